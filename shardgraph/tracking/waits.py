"""``shardgraph.WaitTracker``: measures how long the computation waits for each collective and copy."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.arguments import checked
from shardgraph.errors import ShardGraphError
from shardgraph.module.pipelined import PipelinedModule
from shardgraph.module.sharded import COMPILED, ShardedModule
from shardgraph.runtime.executor import Bound

Wait = tuple[str, str]
"""The graph, ``"forward"`` or ``"backward"``, and the node that waits."""


class WaitTracker:
    """Measures the exposed time of each collective, and of each copy between host and device, in what runs inside it.

        with shardgraph.WaitTracker(sharded) as tracker:
            for batch in batches:
                sharded(batch).backward()
        analysis = shardgraph.analyze(model, (batch,), sharded.plan, fold=False)
        print(analysis.transfer_table(tracker.times))

    That is how long the computation is idle at the wait: on a CPU the thread that computes, on CUDA the stream. Graphs
    run as Python meanwhile, also those of another backend. Let the module run once before: its first call compiles.

    Args:
        model: a compiled module, without a pipeline.

    Raises:
        ShardGraphError: the module has a pipeline.
    """

    @checked(model=COMPILED)
    def __init__(self, model: ShardedModule) -> None:
        if isinstance(model, PipelinedModule):
            raise ShardGraphError(
                "the waits of a pipeline are those of its schedule, not of one graph: measure a plan without a pipeline"
            )
        self._model = model
        self._runs: dict[Bound, Callable[[list[Any]], Sequence[Any]]] = {}
        self._waits: list[tuple[Wait, Callable[[], float]]] = []
        self._calls: Counter[str] = Counter()

    @property
    def times(self) -> dict[Wait, float]:
        """The seconds of each wait, the mean over the runs of its graph.

        Raises:
            ShardGraphError: nothing has run inside the block.
        """
        if not self._calls:
            raise ShardGraphError("nothing has been measured yet: run a step inside the block, and read it afterwards")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds: dict[Wait, float] = defaultdict(float)
        for wait, took in self._waits:
            seconds[wait] += took()
        return {(half, node): total / self._calls[half] for (half, node), total in seconds.items()}

    def __enter__(self) -> WaitTracker:
        if Bound.observer is not None:
            raise ShardGraphError("one tracker measures at a time: end the block of the other one first")
        Bound.observer = self._run
        return self

    def __exit__(self, *error: Any) -> None:
        Bound.observer = None

    def _run(self, bound: Bound, inputs: list[Any], _: int | None = None) -> Sequence[Any]:
        if bound.model is not self._model.original:
            return torch_api.boxed(bound.module)(inputs)
        kept = any(isinstance(role, (ir.Saved, ir.Tangent)) for role, _ in bound.inputs)
        half = "backward" if kept else "forward"
        self._calls[half] += 1
        if bound not in self._runs:
            self._runs[bound] = torch_api.boxed(self._timed(bound.module, half))
        return self._runs[bound](inputs)

    def _timed(self, gm: fx.GraphModule, half: str) -> fx.GraphModule:
        """A copy of a graph whose waits are timed."""
        copy = ir.copy_graph(gm)
        for node in filter(ir.is_wait, copy.graph.nodes):
            node.target = self._timed_wait(node.target, (half, node.name), node.meta["val"].device)
        return copy

    def _timed_wait(self, wait: Any, name: Wait, device: torch.device) -> Callable[..., Any]:
        def timed_wait(*args: Any) -> Any:
            now = _on_stream if device.type == "cuda" else _on_thread
            took = now()
            result = wait(*args)
            self._waits.append((name, took()))
            return result

        return timed_wait


def _on_thread() -> Callable[[], Callable[[], float]]:
    """Begins to time the thread; what is returned ends that, and returns what reads the seconds."""
    begin = time.perf_counter()

    def end() -> Callable[[], float]:
        seconds = time.perf_counter() - begin
        return lambda: seconds

    return end


def _on_stream() -> Callable[[], Callable[[], float]]:
    """Likewise for the current CUDA stream; the seconds can be read once it has come so far."""
    begin, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def end() -> Callable[[], float]:
        after.record()
        return lambda: begin.elapsed_time(after) / 1e3

    return end
