"""Peak memory of models that no test uses: predicted, by this project's meter, and by the allocator's own events.

    python benchmarks/memory_unseen.py --name memory-unseen-2-ranks

Each model of ``unseen_models.py`` trains under every plan: a step of forward, backward and AdamW's update. The meter of
``shardgraph.runtime.measure`` counts storages that operations return; the events (``allocator_events.py``) also have
what kernels allocate and free inside of an operation. Errors are those of the prediction. What cannot be captured or
cut into stages is listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))

from allocator_events import allocator_peak
from unseen_models import MODELS, make

import shardgraph
from shardgraph import Cluster, Pipeline
from shardgraph.errors import ShardGraphError
from shardgraph.report.pipeline import analyze_pipeline
from shardgraph.report.step import program_memory
from shardgraph.runtime.measure import PeakMemory, plain_tensors

PLANS = ["single", "zero2", "fsdp", "pp 1f1b", "pp interleaved-1f1b"]
PIPELINED = [
    "bart", "qwen2, vocabulary of 30000", "opt", "bloom", "gpt-neox", "distilbert", "deberta",
    "electra, vocabulary of 30522", "convnext", "mobilenet v2", "torch transformer", "u-net with batch norm",
]  # fmt: skip
"""The models that are cut into stages too: with dropout, with convolutions, and with large parameters."""

_AT_ONCE = 12  # then new processes are started: every model leaves its process groups behind


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of one rank in a training step."""

    predicted: int
    meter: int
    events: int


def loss_of(output: Any, _: torch.Tensor) -> torch.Tensor:
    """The model's own loss, or else one of all its floating-point outputs."""
    loss = output if isinstance(output, torch.Tensor) and not output.dim() else getattr(output, "loss", None)
    if loss is not None:
        return loss
    return sum(leaf.square().mean() for leaf in tree_leaves(output) if torch.is_floating_point(leaf))


def measure(cases: Iterable[tuple[str, str]]) -> list[Peaks | str]:
    """What each rank does: the peaks of each model under each plan, or why there are none."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[Peaks | str] = []
    for case in cases:
        try:
            found.append(_peaks(*case))
        except ShardGraphError as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        _progress(case, found[-1])
    return found


def _progress(case: tuple[str, str], found: Peaks | str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(", ".join(case), found, file=sys.stderr, flush=True)


def _peaks(name: str, plan: str) -> Peaks:
    model, call = make(name)
    preset, _, schedule = plan.partition(" ")
    kwargs = {**call, "target": torch.zeros(4)}
    given = {"pipeline": Pipeline(4, schedule), "example_kwargs": kwargs} if schedule else {}
    sharded = shardgraph.compile(model, preset, loss_fn=loss_of, **given)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)

    def step() -> None:
        sharded.train_step(**kwargs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = list(plain_tensors([*sharded.parameters(), *sharded.buffers(), *states, *kwargs.values()]))
    before = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    rank = dist.get_rank() if dist.is_initialized() else 0
    # The least of three: on a busy machine gloo's thread may let go of a buffer late.
    meter = min(_metered(step, held) for _ in range(3))
    events = before + min(allocator_peak(step) for _ in range(3))
    if schedule:
        predicted = analyze_pipeline(sharded.program, replace(Cluster.detect(), devices_per_node=2)).peak(rank)
    else:
        predicted = program_memory(sharded.program, "adamw", rank, workspaces=True).peak_bytes
    return Peaks(predicted, meter, events)


def _metered(step: Callable[[], None], held: list[torch.Tensor]) -> int:
    with PeakMemory().track(held) as memory:
        step()
    return memory.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for alone in (True, False):
        cases = [
            (model, plan)
            for plan in options.plans
            for model in options.models
            if (plan == "single") is alone and (model in PIPELINED or not plan.startswith("pp"))
        ]
        for start in range(0, len(cases), _AT_ONCE):
            some = cases[start : start + _AT_ONCE]
            ranks = shardgraph.launch(measure, 1 if alone else 2, args=(some,), timeout=1800)
            figures |= {", ".join(case): found for case, *found in zip(some, *ranks, strict=True)}
    _show(figures)
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    configuration = vars(options) | {"torch": torch.__version__}
    path.write_text(json.dumps({"configuration": configuration, "figures": figures}, indent=1, default=vars) + "\n")


def _show(figures: dict[str, list[Peaks | str]]) -> None:
    print(f"{'model, plan':<50}{'rank':>5}{'predicted':>13}{'meter':>13}{'error':>8}{'events':>13}{'error':>8}")
    errors: list[tuple[float, float]] = []
    for case, ranks in figures.items():
        for rank, found in enumerate(ranks):
            if isinstance(found, str):
                print(f"{case:<50}{rank:>5} {found[:120]}")
                continue
            both = found.predicted / found.meter - 1, found.predicted / found.events - 1
            errors.append(both)
            print(
                f"{case:<50}{rank:>5}{found.predicted:>13,}{found.meter:>13,}{both[0]:>8.2%}"
                f"{found.events:>13,}{both[1]:>8.2%}"
            )
    for name, values in zip(("meter", "events"), zip(*errors, strict=True), strict=True):
        beyond = sum(abs(error) > 0.02 for error in values)
        print(f"{name}: largest error {max(map(abs, values)):.2%}; beyond 2%: {beyond} of {len(values)} figures")


if __name__ == "__main__":
    main()
