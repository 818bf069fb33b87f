"""Pipeline schedules on the simulator's clock beside the same schedules on real ranks.

    python benchmarks/pipeline.py --name pipeline-2-ranks

One transformer of equal layers trains under every schedule. Every round takes each schedule in turn: first each rank
runs its actions in their order but alone, without messages (the seconds of every action), and passes a microbatch's
values to the other and back (those of a message); then all ranks take a training step together, of which it is noted
when each action ran. From the first, ``simulate_schedule`` says how long the schedule takes and how much of it the
ranks wait; the second says how long it took and how long they waited. Figures are medians over rounds.

A step is measured from the first action of any rank to the last: what ``train_step`` does before and after (cutting the
batch, handing out gradients, telling all ranks the loss) belongs to no schedule and is the column ``around``. The clock
is that of the machine, so ranks must share one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import nn

import shardgraph
from shardgraph import Cluster, Pipeline
from shardgraph.cost_models.actions import Action, Kind
from shardgraph.cost_models.schedules import Ran, SimulatedSchedule, StageCost, simulate_schedule
from shardgraph.cost_models.timeline import Timeline
from shardgraph.pictures.gantt import draw_gantt
from shardgraph.pictures.svg import Drawing, document
from shardgraph.plans.orders import SCHEDULES, find_schedule, pipeline_order
from shardgraph.report.pipeline import analyze_pipeline


class Round(NamedTuple):
    """What one rank saw of one schedule in one round: what ran alone, a message, and a step with what ran in it.

    In seconds; actions are on the machine's clock.
    """

    alone: list[Ran]
    message: float
    train_step: float
    together: list[Ran]


class Training:
    """The model under one schedule on this rank."""

    def __init__(self, schedule: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width, count = options.width, options.nproc * find_schedule(schedule).least
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        begins = [f"layers.{options.layers * number // count}" for number in range(1, count)]
        shape = (options.rows * options.microbatches, options.length, width)
        self.batch, self.target = torch.randn(shape), torch.randn(shape)
        self.module: Any = shardgraph.compile(
            nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False),
            plan="pp",
            mesh={"pp": options.nproc},
            pipeline=Pipeline(options.microbatches, schedule, tuple(begins)),
            loss_fn=nn.functional.mse_loss,
            example_inputs=(self.batch,),
            example_kwargs={"target": self.target},
        )
        self.ran: list[Ran] = []
        for stage in self.module._running.stages:
            self._watch(stage, "forward_one_chunk", "F")
            self._watch(stage, "backward_one_chunk", "B")
            self._watch(stage, "backward_weight_one_chunk", "W")

    def _watch(self, stage: Any, method: str, kind: Kind) -> None:
        run = getattr(stage, method)

        def watched(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = run(microbatch, *args, **kwargs)
            end = time.perf_counter()
            part: Kind = kind if kwargs.get("full_backward", True) else "I"
            self.ran.append(Ran(Action(stage.stage_index, part, microbatch), start, end))
            return result

        setattr(stage, method, watched)

    def round(self) -> Round:
        dist.barrier()
        alone = self._alone()
        message = self._message()
        dist.barrier()
        started = time.perf_counter()
        self.module.train_step(self.batch, target=self.target)
        ended = time.perf_counter()
        self.module.zero_grad()
        return Round(alone, message, ended - started, self._taken())

    def _alone(self) -> list[Ran]:
        """This rank's actions in the schedule's order, with operands at hand, so that none waits."""
        kwargs, pipeline, running = {"target": self.target}, self.module.pipeline, self.module._running
        running._begin(self.module._work((self.batch,), kwargs, self.module._loss_of(kwargs)), train=True)
        stages = {stage.stage_index: stage for stage in running.stages}
        for stage in stages.values():
            for number, microbatch in enumerate(stage.work):
                stage.arrived["forward", number] = [torch.randn(each.shape) for each in microbatch.stage.received]
                stage.arrived["backward", number] = [torch.randn(each.shape) for each in microbatch.stage.returned]
        for action in pipeline_order(pipeline.schedule, pipeline.ranks, pipeline.count, pipeline.parts)[running.rank]:
            stage, number = stages[action.stage], action.microbatch
            if action.kind == "F":
                stage.forward_one_chunk(number)
            elif action.kind == "W":
                stage.backward_weight_one_chunk(number)
            else:
                stage.backward_one_chunk(number, full_backward=action.kind == "B")
        for stage in stages.values():
            stage.take_gradients()
            stage.end()
        return self._taken()

    def _message(self) -> float:
        """Half of the time in which a microbatch's values go from rank 0 to rank 1 and back; the median of nine."""
        buffer = torch.empty(sum(tensor.numel() for tensor in self.module.program.stages[1].received))
        ways, seconds = [dist.send, dist.recv], []
        for _ in range(9 if dist.get_rank() < 2 else 0):
            started = time.perf_counter()
            for way in ways if dist.get_rank() == 0 else reversed(ways):
                way(buffer, 1 - dist.get_rank())
            seconds.append((time.perf_counter() - started) / 2)
        return statistics.median(seconds) if seconds else 0.0

    def _taken(self) -> list[Ran]:
        taken, self.ran = self.ran, []
        return taken

    def analysis(self) -> dict[str, float]:
        """What shardgraph predicts for this machine without having measured it."""
        found = analyze_pipeline(self.module.program, Cluster.detect())
        return {"seconds": found.schedule.seconds, "bubble": found.bubble_fraction}


def measure(options: argparse.Namespace) -> dict[str, tuple[list[Round], dict[str, float]]]:
    """What each rank does: the rounds of every schedule, without the first, which warms up; and the analysis."""
    torch.set_num_threads(1)
    trainings = {name: Training(name, options) for name in options.schedules}
    rounds = [{name: training.round() for name, training in trainings.items()} for _ in range(options.rounds + 1)]
    return {name: ([each[name] for each in rounds[1:]], training.analysis()) for name, training in trainings.items()}


Costs = dict[tuple[int, Kind], float]
"""Seconds of each kind of action by stage."""


def mean_seconds(spans: Sequence[Ran]) -> Costs:
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for ran in spans:
        found[ran.action.stage, ran.action.kind].append(ran.end - ran.start)
    return {key: statistics.fmean(seconds) for key, seconds in found.items()}


def median_seconds(runs: Sequence[Costs]) -> Costs:
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: statistics.median(run[key] for run in runs if key in run) for key in keys}


def alone(figures: dict[str, list[list[Round]]]) -> dict[int, Costs]:
    """By the number of stages, what each takes alone: over rounds, and over the schedules that have the same stages."""
    runs: defaultdict[int, list[Costs]] = defaultdict(list)
    for schedule, ranks in figures.items():
        runs[find_schedule(schedule).least] += [mean_seconds(each.alone) for rounds in ranks for each in rounds]
    return {count: median_seconds(found) for count, found in runs.items()}


def simulated(schedule: str, seconds: Costs, message: float, options: argparse.Namespace) -> SimulatedSchedule:
    """The schedule as the simulator has it, with these seconds of actions and of a message."""
    count = options.nproc * find_schedule(schedule).least
    order = pipeline_order(schedule, options.nproc, count, options.microbatches)
    costs = [
        StageCost(
            forward=seconds[stage, "F"],
            backward=seconds.get((stage, "B"), 0.0),
            backward_input=seconds.get((stage, "I")),
            backward_weight=seconds.get((stage, "W")),
            send_output=message,
            send_gradient=message,
        )
        for stage in range(count)
    ]
    return simulate_schedule(order, costs, prefetch=find_schedule(schedule).prefetch)


def measured(ranks: Sequence[Round]) -> SimulatedSchedule:
    """A step of all ranks, told as the simulator tells one: from the first action of any rank on."""
    start = min(each.together[0].start for each in ranks)
    spans = [tuple(Ran(r.action, r.start - start, r.end - start) for r in each.together) for each in ranks]
    return SimulatedSchedule(tuple(spans), (((0.0, 0),),) * len(ranks), Timeline(()))


def compare(
    schedule: str, seconds: Costs, ranks: Sequence[Sequence[Round]], options: argparse.Namespace
) -> tuple[dict[str, Any], list[Drawing]]:
    """The figures of one schedule, and its simulated step above the measured one of median length.

    ``replayed`` is each round's schedule simulated with what its actions took in that very step: how far it is from
    what was measured is the simulator's own error, without that of the seconds it was given.
    """
    rounds = list(zip(*ranks, strict=True))
    message = statistics.median(each.message for each in ranks[0])
    simulation = simulated(schedule, seconds, message, options)
    steps = [measured(each) for each in rounds]
    replayed = [
        simulated(schedule, mean_seconds([ran for rank in each for ran in rank.together]), message, options)
        for each in rounds
    ]
    figures = {
        "simulated_s": simulation.seconds,
        "measured_s": statistics.median(step.seconds for step in steps),
        "rounds_s": [step.seconds for step in steps],
        "replayed_rounds_s": [each.seconds for each in replayed],
        "train_step_s": statistics.median(max(rank.train_step for rank in each) for each in rounds),
        "simulated_bubble": simulation.bubble_fraction,
        "measured_bubble": statistics.median(step.bubble_fraction for step in steps),
        "rounds_bubble": [step.bubble_fraction for step in steps],
        "replayed_rounds_bubble": [each.bubble_fraction for each in replayed],
        "simulated_bubble_of_ranks": [simulation.bubble(rank) for rank in range(len(ranks))],
        "measured_bubble_of_ranks": [
            statistics.median(step.bubble(rank) for step in steps) for rank in range(len(ranks))
        ],
        "message_s": message,
        "actions_s": {f"{stage}{kind}": value for (stage, kind), value in sorted(seconds.items())},
    }
    middle = sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]
    return figures, [draw_gantt(simulation, f"{schedule}, simulated"), draw_gantt(middle, f"{schedule}, measured")]


def table(figures: dict[str, Any]) -> None:
    names = f"{'':<25}{'simulated ms':>13}{'measured ms':>13}{'range ms':>14}{'ratio':>7}{'around ms':>11}"
    print(f"{names}{'bubble sim.':>13}{'measured':>10}{'points':>8}{'replayed':>10}{'points':>8}{'analysis ms':>13}")
    for name, f in figures.items():
        spread = f"{1e3 * min(f['rounds_s']):.0f} to {1e3 * max(f['rounds_s']):.0f}"
        replayed = zip(f["replayed_rounds_s"], f["rounds_s"], strict=True)
        bubbles = zip(f["replayed_rounds_bubble"], f["rounds_bubble"], strict=True)
        print(
            f"{name:<25}{1e3 * f['simulated_s']:>13.0f}{1e3 * f['measured_s']:>13.0f}{spread:>14}"
            f"{f['simulated_s'] / f['measured_s']:>7.2f}{1e3 * (f['train_step_s'] - f['measured_s']):>11.0f}"
            f"{f['simulated_bubble']:>13.1%}{f['measured_bubble']:>10.1%}"
            f"{100 * (f['simulated_bubble'] - f['measured_bubble']):>8.1f}"
            f"{statistics.median(a / b for a, b in replayed):>10.2f}"
            f"{100 * statistics.median(a - b for a, b in bubbles):>8.1f}{1e3 * f['analysis']['seconds']:>13.0f}"
        )
    by = {key: [f[key] for f in figures.values()] for key in ("simulated_s", "measured_s")}
    for key, seconds in by.items():
        print(f"fastest first, {key[:-2]}: {', '.join(name for _, name in sorted(zip(seconds, figures, strict=True)))}")
    print(f"Spearman {spearmanr(by['simulated_s'], by['measured_s']).statistic:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json and results/NAME.svg are written")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    options = parser.parse_args()

    busy = os.getloadavg()[0]
    ranks = shardgraph.launch(measure, options.nproc, args=(options,), timeout=3000)
    rounds = {name: [rank[name][0] for rank in ranks] for name in options.schedules}
    seconds = alone(rounds)
    figures, pictures = {}, []
    for name in options.schedules:
        found, drawn = compare(name, seconds[find_schedule(name).least], rounds[name], options)
        figures[name] = found | {"analysis": ranks[0][name][1]}
        pictures += drawn
    print(
        f"{options.layers} layers of width {options.width}, {options.microbatches} microbatches, {options.nproc} ranks"
    )
    table(figures)
    configuration = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "device": platform.machine(),
        "load_before": busy,
        **vars(options),
    }
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    path.write_text(json.dumps({"configuration": configuration, "figures": figures}, indent=1) + "\n")
    path.with_suffix(".svg").write_text(document("Pipeline schedules, simulated and measured", pictures))
    print(f"written to {path} and {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
