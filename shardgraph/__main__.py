"""``python -m shardgraph``."""

import sys

from shardgraph.api.cli import main

if __name__ == "__main__":
    sys.exit(main())
