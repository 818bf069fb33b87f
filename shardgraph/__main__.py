"""The command ``shardgraph``, also as ``python -m shardgraph``."""

from __future__ import annotations

import atexit
import signal
import sys


def main() -> int:
    """Run the command line of this process and return its exit status, 130 if interrupted while it is still loaded."""
    # When Python ends, which takes a while with torch, there is nothing left to interrupt.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        from shardgraph.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
