"""Faults that are injected into a small training run, drawn by number: what goes wrong, where, and when.

    python -m tests.faulted --faults 100 --file faults.jsonl    # goes on where the file ends
    python -m tests.faulted --table --file faults.jsonl

Every case is a run of its own: with ``launch``; of processes that make their group themselves ("plain", forked from one
that has imported what they need, which saves seconds); or of scripts, each started anew. Its outcome is how long the
other ranks took to end after the fault, how they ended, and what they wrote; then a job on one device goes on from the
last checkpoint, with the losses of one that nothing happened to.
"""

from tests.faulted.cases import LIMIT, Case, draw
from tests.faulted.running import Outcome, run
from tests.faulted.tally import inject, table

__all__ = ["LIMIT", "Case", "Outcome", "draw", "inject", "run", "table"]
