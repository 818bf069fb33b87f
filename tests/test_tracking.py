"""Measured memory by module, as data."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardgraph
from shardgraph import MemoryTrace, MemoryTracker, ShardGraphError
from shardgraph.runtime.executor import Bound
from shardgraph.runtime.measure import PeakMemory
from shardgraph.tracking.trace import Moment
from tests import tracking
from tests.standing import on_ranks


def compiled() -> nn.Module:
    return shardgraph.compile(tracking.Net(), "single")


@pytest.mark.parametrize("make", [tracking.Net, compiled])
def test_the_peak_is_that_of_all_live_tensors(make) -> None:
    model, x = make(), tracking.batch()
    optimizer = torch.optim.AdamW(model.parameters())
    tracking.step(model, optimizer, x)
    states = [value for state in optimizer.state.values() for value in state.values()]
    with PeakMemory().track([*model.parameters(), *states, x]) as memory:
        tracking.step(model, optimizer, x)
    with MemoryTracker(model, optimizer) as tracker:
        tracking.step(model, optimizer, x)
    assert tracker.trace.peak.live == memory.peak_bytes


@pytest.mark.parametrize("make", [tracking.Net, compiled])
def test_each_module_has_its_own_parameters_gradients_and_optimizer_state(make) -> None:
    modules = tracking.traced(make()).modules
    for name, module in tracking.Net().named_modules():
        if isinstance(module, nn.Linear):
            nbytes = sum(parameter.nbytes for parameter in module.parameters())
            assert modules[name]["parameters"] == modules[name]["gradients"] == nbytes
            assert modules[name]["optimizer state"] == 2 * nbytes + 2 * 4  # two averages, and a count for each


@pytest.mark.parametrize("make", [tracking.Net, compiled])
def test_what_is_saved_for_backward_is_in_the_module_that_made_it(make) -> None:
    modules = tracking.traced(make()).modules
    hidden, residual = [64 * 32 * 4, 32 * 32 * 4, 128 * 32 * 4, 32 * 32 * 4], 16 * 32 * 4
    for number, nbytes in enumerate(hidden):
        saved = modules[f"layers.{number}"]["saved"]
        assert saved - nbytes in (0, residual)  # an operator of the layer, or of the next one, saves the sum


def test_operations_of_backward_are_in_the_module_that_they_differentiate() -> None:
    moments = tracking.traced(tracking.Net()).moments
    backward = [each.module for each in moments if each.half == "backward" and each.module.endswith(".up")]
    assert list(dict.fromkeys(backward)) == [f"layers.{number}.up" for number in (3, 2, 1, 0)]


def test_what_is_computed_again_in_backward_is_in_its_module() -> None:
    class Recomputed(tracking.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x).square().mean()

    trace = tracking.traced(Recomputed())
    again = [each for each in trace.moments if each.half == "backward" and "addmm" in each.label]
    assert {each.module for each in again} >= {f"layers.{number}.up" for number in range(4)}
    assert trace.peak.live < tracking.traced(tracking.Net()).peak.live


def test_the_prediction_of_a_module_is_what_is_measured() -> None:
    cluster = shardgraph.Cluster.detect()
    analysis = shardgraph.analyze(
        tracking.Net(), (tracking.batch(),), "single", mesh={}, cluster=cluster, optimizer="adamw"
    )
    predicted, measured = MemoryTrace.predicted(analysis), tracking.traced(compiled())
    assert measured.peak.live == pytest.approx(predicted.peak.live, rel=0.01)
    found = measured.peaks()
    for module, nbytes in predicted.peaks().items():
        if module:  # the optimizer is nobody's
            assert found[module] == pytest.approx(nbytes, rel=0.02), module


@pytest.mark.parametrize("plan", ["fsdp", "zero2"])
def test_shards_and_what_is_gathered_of_them_are_told_apart(plan: str) -> None:
    for predicted, measured, modules in on_ranks(tracking.of_shards, args=(plan,)):
        assert measured == pytest.approx(predicted, rel=0.01)
        weights = sum(parameter.nbytes for parameter in tracking.Net().layers[2].up.parameters())
        assert modules["layers.2.up"]["parameters"] == modules["layers.2.up"]["gradients"] == weights // 2
        assert modules["layers.2.up"]["gathered parameters"] == weights


def test_each_rank_of_a_pipeline_has_its_own_stages() -> None:
    (first, halves), (second, others) = on_ranks(tracking.of_stages)
    linear = {name for name, module in tracking.Net().named_modules() if isinstance(module, nn.Linear)}
    assert {*first} | {*second} == linear and not {*first} & {*second}
    assert halves == others == 3


def test_modules_of_a_compiled_part_have_their_paths_in_the_model() -> None:
    found, plain = tracking.of_a_compiled_part(), tracking.traced(tracking.Net()).modules
    assert found.keys() == plain.keys()
    assert found["layers.2"]["saved"] >= 128 * 32 * 4
    assert found["layers.2.up"]["gradients"] == plain["layers.2.up"]["gradients"]


def test_a_step_that_is_measured_computes_the_same() -> None:
    plain, measured, x = compiled(), compiled(), tracking.batch()
    for model in (plain, measured):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracking.step(model, optimizer, x)
        if model is measured:
            with MemoryTracker(model, optimizer):
                tracking.step(model, optimizer, x)
        else:
            tracking.step(model, optimizer, x)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), measured.parameters(), strict=True))


def test_nothing_is_left_behind_after_an_error() -> None:
    model = tracking.Net()
    with pytest.raises(ValueError, match="of the user"), MemoryTracker(model):
        raise ValueError("of the user")
    assert Bound.observer is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_was_not_measured_is_said() -> None:
    model = tracking.Net()
    tracker = MemoryTracker(model)
    with pytest.raises(ShardGraphError, match="nothing has been measured yet"):
        _ = tracker.trace
    with tracker, pytest.raises(ShardGraphError, match="one tracker at a time"), MemoryTracker(model):
        pass


# -- the trace as data ------------------------------------------------------------------------------------


def trace(saved: dict[str, int], live: tuple[int, ...] = (10, 30, 20), name: str = "a") -> MemoryTrace:
    moments = tuple(Moment("forward", f"layers.{i}", f"mm_{i}", {"saved": each}) for i, each in enumerate(live))
    return MemoryTrace(name, moments, {module: {"saved": nbytes} for module, nbytes in saved.items()})


def test_a_trace_is_saved_and_loaded(tmp_path: Path) -> None:
    measured = tracking.traced(tracking.Net())
    measured.save(tmp_path / "trace.json")
    assert MemoryTrace.load(tmp_path / "trace.json") == measured


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ShardGraphError, match=r"is no trace of memory: give a file of MemoryTrace\.save"):
        MemoryTrace.load(tmp_path / "other.json")
    with pytest.raises(ShardGraphError, match="cannot be read as a trace"):
        MemoryTrace.load(tmp_path / "none.json")


def test_the_text_names_the_peak_and_every_module() -> None:
    lines = str(trace({"layers.0": 2048, "layers.1": 0})).splitlines()
    assert lines[0] == "a: peak 30 B at mm_1 (forward of layers.1)"
    assert [line.split() for line in lines[2:]] == [
        ["layers.0", "-", "-", "2.0", "KiB", "-", "10", "B"],
        ["layers.1", "-", "-", "-", "-", "30", "B"],
        ["layers.2", "-", "-", "-", "-", "20", "B"],
    ]


def test_two_traces_are_compared_by_kind_and_module() -> None:
    text = trace({}).compare(trace({}, (10, 15, 40), name="b"))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["saved"] == rows["all"] == ["30", "B", "40", "B", "+33.3%"]
    assert rows["layers.1"] == ["30", "B", "15", "B", "-50.0%"]


def test_the_picture_shows_the_peak_and_its_kinds(tmp_path: Path) -> None:
    measured = tracking.traced(tracking.Net())
    measured.draw(tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert drawn.startswith("<svg") and f"at {measured.peak.label} (backward of layers.2)" in drawn
    assert all(f">{word}<" in drawn for word in ("forward", "backward", "optimizer", "saved", "gradients"))


def test_a_picture_of_many_microbatches_stays_within_its_sides(tmp_path: Path) -> None:
    moments = tuple(Moment(half, "", "mm", {"saved": 1}) for _ in range(100) for half in ("forward", "backward"))
    MemoryTrace("many", moments).draw(tmp_path / "memory.svg")
    path = re.search(r'd="(M[^"]*z)" fill="[^"]*"><title>saved', (tmp_path / "memory.svg").read_text())
    assert path is not None and {int(x) for x in re.findall(r"[MH](-?\d+)", path[1])} <= {*range(80, 731)}


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (5, 1, 1, 1, 6, 2), (0, 9, 0, 3, 3), (2, 8, 1, 7, 3, 3, 4)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_cut_points_leave_the_smallest_largest_part(sizes: tuple[int, ...], count: int) -> None:
    found = trace({f"layers.{i}": size for i, size in enumerate(sizes)}).cut_points(count)

    def largest(starts: tuple[int, ...]) -> int:
        ends = (*starts, len(sizes))
        return max(sum(sizes[a:b]) for a, b in zip((0, *starts), ends, strict=True))

    best = min(largest(starts) for starts in combinations(range(1, len(sizes)), count))
    assert len(found) == count and largest(tuple(int(name.split(".")[1]) for name in found)) == best


def test_what_is_saved_within_a_module_counts_for_it() -> None:
    saved = {"layers.0.up": 4, "layers.0.down": 4, "layers.1": 2, "layers.2": 2, "layers.10": 7, "head": 100}
    assert trace(saved).cut_points(2) == ["layers.1", "layers.10"]


def test_a_chain_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ShardGraphError, match="2 modules one after the other have 1 places to cut, and 2 are asked"):
        trace({"layers.0": 1, "layers.1": 1}).cut_points(2)
    with pytest.raises(ShardGraphError, match="there are 2 lists of modules: encoder, decoder; name the chain"):
        trace({"encoder.0": 1, "decoder.0": 1}).cut_points(1)
    assert trace({"encoder.0": 1, "decoder.0": 1}).cut_points(1, ["encoder.0", "decoder.0"]) == ["decoder.0"]
