"""Draw the plan and the page of the README, and the schedule of docs/pipeline.md.

    python docs/pictures/readme.py            # writes docs/plan.svg, docs/schedule.svg and docs/report.png

The page needs ``transformers``, and Chromium to show it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardgraph
from examples.train_gpt import GPT
from shardgraph.cost_models.schedules import StageCost, simulate_schedule
from shardgraph.pictures.gantt import draw_schedule
from shardgraph.plans.orders import pipeline_order

DOCS = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WINDOW = "1180,1560"


def plan(path: Path) -> Path:
    """A GPT of four layers under fsdp on two ranks, whose batch has 8 rows of 128 tokens."""
    with torch.device("meta"):
        model, ids = GPT(128, 4, 4, 128), torch.zeros(8, 128, dtype=torch.long)
    two = shardgraph.preset("fsdp", {"dp": 2})
    return shardgraph.visualize(two, path, model=model, example_inputs=(ids,), cluster="H100")


def schedule(path: Path) -> Path:
    """zbv with two stages on each of four ranks; gradients of inputs and of weights take as long as forward."""
    order = pipeline_order("zbv", ranks=4, stages=8, microbatches=8)
    cost = StageCost(forward=1e-3, backward=2e-3, saved=2**29, fixed=2**28)
    return draw_schedule(simulate_schedule(order, [cost] * 8), path, "zbv on 4 ranks, 8 stages, 8 microbatches")


def page(path: Path) -> Path:
    """What a report about Llama 3 8B in bfloat16 under fsdp on 64 H100 begins with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, use_cache=False, **sizes))
        ids = torch.zeros(1, 8192, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    options = {"mesh": {"dp": 64}, "cluster": "H100", "precision": "bf16"}
    found = shardgraph.analyze(model, plan="fsdp", example_kwargs=call, **options)
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as folder:
        report = shardgraph.visualize(found, Path(folder) / "report.html", model=model, example_kwargs=call)
        shown = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WINDOW}"]
        subprocess.run([browser, *shown, f"--screenshot={path}", report.as_uri()], check=True, capture_output=True)
    return path


if __name__ == "__main__":
    plan(DOCS / "plan.svg")
    schedule(DOCS / "schedule.svg")
    page(DOCS / "report.png")
