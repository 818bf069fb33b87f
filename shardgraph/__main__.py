"""``python -m shardgraph``."""

import sys

from shardgraph.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
