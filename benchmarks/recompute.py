"""Peak memory against step time of recomputation, ours beside others', on one CPU.

    python benchmarks/recompute.py --name recompute-gpt2
    python benchmarks/recompute.py --solve 32

GPT-2 (``transformers``) trains with AdamW. All contenders run the same captured graph by the same executor from the
same weights, and differ in what backward computes again alone:

* ``torch budget``: what torch's partitioner chooses for an ``activation_memory_budget`` on that graph;
* ``ours``: what shardgraph chooses when it is given the very peak that was measured for each of those, as bytes, and
  for parts of the activation memory of keeping everything; budgets with the same choice are one contender;
* ``none``, ``selective``, ``full``: by name; ``full`` is per-layer checkpointing.

``torch.utils.checkpoint`` around each layer of the model runs beside them in eager mode, and the model without it.
Every round takes one step of each in turn, so that a machine whose speed drifts is fair to all; medians are reported.
Peaks are bytes of live tensors (``shardgraph.runtime.measure.PeakMemory``). Gradients are compared with those
of ``none``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.cost_models.cluster import Cluster
from shardgraph.ir import JointGraph, Output, copy_graph, outputs
from shardgraph.passes.analysis.names import names_of
from shardgraph.passes.recompute.names import Rule, rules_for
from shardgraph.passes.recompute.values import values_of
from shardgraph.pictures import svg
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.executor import State
from shardgraph.runtime.measure import PeakMemory
from shardgraph.search.recomputation import Choice, Recomputations

TORCH_BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.2, 0.0)
PARTS = (0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.14)


@dataclass
class Point:
    """One contender: bytes and seconds. ``budgets`` are what it was asked for, bytes for ours and a ratio for torch."""

    kind: str
    budgets: list[float]
    predicted_bytes: int | None
    measured_bytes: int = 0
    gradient_error: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


class Bench:
    """The model, its captured graph, and a step of it under any recomputation."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = gpt2(options)
        ids = torch.randint(options.vocabulary, (options.batch, options.length))
        self.call = {"input_ids": ids, "labels": ids}
        self.joint = capture(self.model, (), self.call, device=torch.device("cpu"))
        plan = replace(shardgraph.preset("single", ()), recompute="budget")
        cluster = Cluster.load(options.cluster)
        self.found = Recomputations(self.joint, plan, named_shapes(self.model), cluster)
        self.state = State(self.model, None, torch.device("cpu"))
        self.reference: list[torch.Tensor] = []

    def step_of(self, choice: Choice) -> Callable[[], torch.Tensor]:
        executable = Differentiable(self.found.program(choice), self.state)
        leaves = tree_leaves(((), self.call))
        return lambda: executable(leaves, lambda: True).loss

    def measured(self, point: Point, loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> Contender:
        contender = Contender(point, loss, model)
        contender.step()  # makes the optimizer's state
        states = [value for state in contender.optimizer.state.values() for value in state.values()]
        held = [*model.parameters(), *model.buffers(), *states, *self.call.values()]
        with PeakMemory().track(held) as memory:
            contender.step()
        point.measured_bytes = memory.peak_bytes
        loss().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        self.reference = self.reference or gradients
        point.gradient_error = max(
            ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
            for mine, theirs in zip(gradients, self.reference, strict=True)
        )
        contender.optimizer.zero_grad()
        return contender


class Contender:
    """A way to train, and what it was seen to take. Learning rates are 0, so that all have the same weights."""

    def __init__(self, point: Point, loss: Callable[[], torch.Tensor], model: torch.nn.Module) -> None:
        self.point, self.loss = point, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step(self) -> float:
        started = time.perf_counter()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def gpt2(options: argparse.Namespace) -> torch.nn.Module:
    config = GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 32, vocab_size=options.vocabulary,
        n_positions=options.length, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def torch_choice(joint: JointGraph, budget: float) -> tuple[Rule, ...]:
    """What torch's partitioner computes again in the joint graph for its ``activation_memory_budget``."""
    gm = joint.module
    results = sum(isinstance(role, Output) for role, _ in outputs(gm))
    with functorch_config.patch(activation_memory_budget=budget):
        forward, backward = min_cut_rematerialization_partition(copy_graph(gm), None, num_fwd_outputs=results)
    both = {node.name for node in forward.graph.nodes} & {n.name for n in backward.graph.nodes if n.op != "placeholder"}
    values = values_of(gm)
    return rules_for([node for node in values.makes if node.name in both], names_of(values.makes))


def curve(options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(options)
    found = bench.found
    contenders = []
    ours: dict[Choice, Point] = {}

    def add(kind: str, budgets: list[float], choice: Choice) -> Point:
        point = Point(kind, budgets, found.peak(choice))
        contenders.append(bench.measured(point, bench.step_of(choice), bench.model))
        return point

    def add_ours(budget: int) -> None:
        choice = found.nearest(budget)
        if found.peak(choice) > budget:
            return
        if choice in ours:
            ours[choice].budgets.append(budget)
        else:
            ours[choice] = add("ours", [budget], choice)

    everything = add("none", [], found.choices[0])
    for mode in ("selective", "full"):
        add(mode, [], Choice(mode, 0.0, 0))
    floor = sum(t.nbytes for t in (*bench.model.parameters(), *bench.model.buffers(), *bench.call.values()))
    floor += 2 * sum(parameter.nbytes for parameter in bench.model.parameters())  # AdamW's
    for part in PARTS:
        add_ours(int(floor + part * (everything.measured_bytes - floor)))
    for ratio in TORCH_BUDGETS:
        add_ours(add("torch budget", [ratio], Choice(torch_choice(bench.joint, ratio), 0.0, 0)).measured_bytes)
    for kind in ("eager", "eager, torch.utils.checkpoint"):
        model = copy.deepcopy(bench.model)
        if kind != "eager":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        point = Point(kind, [], None)
        contenders.append(bench.measured(point, lambda model=model: model(**bench.call).loss, model))
    for _ in range(options.rounds):
        for contender in contenders:
            contender.point.times.append(contender.step())
    points = [contender.point for contender in contenders]
    return {"floor_bytes": floor, "points": [asdict(p) | {"seconds": p.seconds} for p in points]}


def table(figures: dict[str, Any]) -> str:
    points, floor = figures["points"], figures["floor_bytes"]
    base = points[0]
    head = f"{'':<30}{'asked':>22}{'predicted':>11}{'measured':>10}{'of act.':>9}"
    lines = [f"{head}{'step s':>8}{'of none':>9}{'range s':>16}"]
    for p in points:
        asked = ", ".join(f"{budget:.1f}" if budget <= 1 else mib(budget) for budget in sorted(p["budgets"]))
        part = (p["measured_bytes"] - floor) / (base["measured_bytes"] - floor)
        spread = f"{min(p['times']):.3f} to {max(p['times']):.3f}"
        lines.append(
            f"{p['kind']:<30}{asked:>22}{mib(p['predicted_bytes']):>11}{mib(p['measured_bytes']):>10}{part:>9.0%}"
            f"{p['seconds']:>8.3f}{p['seconds'] / base['seconds']:>9.3f}{spread:>16}"
        )
    errors = [abs(p["predicted_bytes"] / p["measured_bytes"] - 1) for p in points if p["predicted_bytes"]]
    lines.append(f"largest error of a predicted peak {max(errors):.2%}, of a gradient {worst(points):.1e}")
    return "\n".join(lines)


def worst(points: Sequence[dict[str, Any]]) -> float:
    return max(point["gradient_error"] for point in points)


def mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"


COLOURS = {"ours": "#1b6ca8", "torch budget": "#d1495b", "none": "#222222", "selective": "#edae49", "full": "#66a182"}


def plot(figures: dict[str, Any]) -> str:
    """The points as an SVG: peak along, time up."""
    points = [p for p in figures["points"] if not p["kind"].startswith("eager")]
    width, height, left, bottom = 760, 420, 70, 50
    peaks, times = [p["measured_bytes"] / 2**20 for p in points], [p["seconds"] for p in points]
    low, high = 0.95 * min(peaks), 1.03 * max(peaks)
    least, most = 0.98 * min(times), 1.02 * max(times)

    def at(p: dict[str, Any]) -> tuple[float, float]:
        x = left + (p["measured_bytes"] / 2**20 - low) / (high - low) * (width - left)
        return x, height - bottom - (p["seconds"] - least) / (most - least) * (height - bottom - 20)

    body = []
    for i in range(6):
        y = height - bottom - i * (height - bottom - 20) / 5
        body.append(f'<line x1="{left}" x2="{width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        body.append(svg.text(left - 8, int(y) + 4, f"{least + i * (most - least) / 5:.2f} s", "small end"))
        x = left + i * (width - left) / 5
        body.append(svg.text(int(x), height - bottom + 18, f"{low + i * (high - low) / 5:.0f}", "small middle"))
    body.append(svg.text((left + width) // 2, height - 8, "measured peak, MiB", "middle"))
    for kind, colour in COLOURS.items():
        line = [at(p) for p in sorted(points, key=lambda p: -max(p["budgets"], default=0)) if p["kind"] == kind]
        if len(line) > 2:
            body.append(
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}" fill="none" stroke="{colour}"/>'
            )
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in line]
    for i, (kind, colour) in enumerate(COLOURS.items()):
        body.append(svg.rect(width - 190, 24 + 20 * i, 12, 12, colour))
        body.append(svg.text(width - 172, 35 + 20 * i, "full (per layer)" if kind == "full" else kind))
    return svg.document("Peak memory against step time", [svg.Drawing(width, height, "\n".join(body))])


def solve(layers: int) -> None:
    """Seconds to choose a recomputation for Llama with the widths of 7B, on ``meta``, at half of its activations."""
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    joint = capture(model, (), {"input_ids": ids, "labels": ids}, device=torch.device("cpu"))
    plan = replace(shardgraph.preset("fsdp", {"dp": 8}), recompute="budget")
    started = time.perf_counter()
    found = Recomputations(joint, plan, named_shapes(model), Cluster.of("H100"))
    kept = found.choices[0]
    chosen = found.nearest(found.peak(kept) - max(choice.dropped for choice in found.choices) // 2)
    seconds = time.perf_counter() - started
    print(f"{layers} layers, {len(joint.module.graph.nodes)} nodes: {seconds:.1f} s, {len(found.choices)} choices")
    print(f"peak {mib(found.peak(kept))} -> {mib(found.peak(chosen))} MiB, {chosen.seconds:.4f} s more")
    for pattern, names in chosen.rules:
        print(f"  {pattern}: {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json and results/NAME.svg are written")
    parser.add_argument("--cluster", help="a file of shardgraph calibrate; default: calibrate now, on one rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--solve", type=int, metavar="LAYERS", help="time the choice for Llama instead")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.solve:
        solve(options.solve)
        return
    results = Path(__file__).parent / "results"
    if options.cluster is None:
        options.cluster = str(results / f"{options.name}.yaml")
        shardgraph.calibrate(1).save(options.cluster)
    figures = curve(options)
    print(table(figures))
    configuration = vars(options) | {"cluster": Path(options.cluster).name, "torch": torch.__version__}
    text = json.dumps({"configuration": configuration, **figures}, indent=1)
    (results / f"{options.name}.json").write_text(text + "\n")
    (results / f"{options.name}.svg").write_text(plot(figures))


if __name__ == "__main__":
    main()
