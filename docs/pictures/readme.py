"""Draw the pictures of the README: the plan of a small GPT with its memory, and the report of Llama 3 8B.

python docs/pictures/readme.py            # writes docs/plan.svg and, where Chromium is, docs/report.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardgraph
from examples.train_gpt import GPT

DOCS = Path(__file__).parents[1]


def plan(path: Path) -> Path:
    """A GPT of four layers under fsdp on two ranks, whose batch has 8 rows of 128 tokens."""
    with torch.device("meta"):
        model, ids = GPT(128, 4, 4, 128), torch.zeros(8, 128, dtype=torch.long)
    two = shardgraph.preset("fsdp", {"dp": 2})
    return shardgraph.visualize(two, path, model=model, example_inputs=(ids,), cluster="H100")


if __name__ == "__main__":
    plan(DOCS / "plan.svg")
