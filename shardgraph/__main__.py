"""The command ``shardgraph``, also as ``python -m shardgraph``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of this process and return its exit status, 130 if interrupted while it is still loaded."""
    try:
        from shardgraph.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
