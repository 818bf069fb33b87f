"""``python -m shardgraph``."""

import sys

from shardgraph.cli import main

if __name__ == "__main__":
    sys.exit(main())
