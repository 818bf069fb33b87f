"""``python -m tests.faulted``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.faulted.cases import Case
from tests.faulted.running import plain
from tests.faulted.tally import inject, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--file", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="show what the file has")
    parser.add_argument("--again", action="store_true", help="run those that took too long or went wrong once more")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        plain(Case(**json.loads(options.case)), options.folder)
    elif options.table:
        print(table(options.file))
    else:
        inject(range(options.first, options.first + options.faults), options.file, options.again)


if __name__ == "__main__":
    main()
