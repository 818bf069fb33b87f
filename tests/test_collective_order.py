"""The static deadlock check."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import DeadlockError
from shardgraph.passes.analysis.collective_order import check_program, check_waits
from tests.rank_order import Collective, check_collective_order, collectives_of

SIZES = {"replica": 2, "shard": 2}
MESH = tuple(SIZES.items())


def program(calls: list[tuple[str, str]], sizes: dict[str, int] = SIZES) -> fx.GraphModule:
    """A graph that issues ``(operation, axis)`` calls on one input and awaits each."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 2, device="meta")
    for operation, axis in calls:
        size = sizes.get(axis, 2)
        target, args = {
            "gather": (ir.ALL_GATHER, (x, size, axis)),
            "scatter": (ir.REDUCE_SCATTER, (x, "sum", size, axis)),
            "reduce": (ir.ALL_REDUCE, (x, "sum", axis)),
        }[operation]
        start = graph.call_function(target, args)
        wait = graph.call_function(ir.WAIT, (start,))
        start.meta["val"] = wait.meta["val"] = x.meta["val"]
    graph.output(())
    return fx.GraphModule({}, graph)


def call(name: str, *group: int, shape: str = "(2,) float32") -> Collective:
    return Collective(f"all_reduce of {name}", "all_reduce", group, shape)


def test_groups_are_the_ranks_that_differ_along_the_axis() -> None:
    gm = program([("gather", "replica"), ("reduce", "shard")])
    assert [c.group for c in collectives_of(gm, (("replica", 2), ("shard", 3)), 4)] == [(1, 4), (3, 4, 5)]


def test_a_call_carries_its_operation_shape_and_description() -> None:
    (gather,) = collectives_of(program([("gather", "shard")]), MESH, 0)
    assert gather.operation == "all_gather_into_tensor"
    assert gather.signature == "(4, 2) float32"
    assert gather.id == "all_gather_into_tensor of all_gather_into_tensor_default (4, 2) float32 over 'shard'"


def test_equal_sequences_pass() -> None:
    check_collective_order({0: [call("a", 0, 1), call("b", 0, 1)], 1: [call("a", 0, 1), call("b", 0, 1)]})


def test_different_shapes_at_one_position_name_ranks_and_ids() -> None:
    ours = [call("a", 0, 1), call("b", 0, 1)]
    theirs = [call("a", 0, 1), call("c", 0, 1, shape="(3,) float32")]
    with pytest.raises(DeadlockError, match=r"number 1: rank 0 issues all_reduce of b .*rank 1 issues all_reduce of c"):
        check_collective_order({0: ours, 1: theirs})


def test_a_member_that_makes_fewer_calls_is_named() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 would wait for ever for rank 1: .*all_reduce of b"):
        check_collective_order({0: [call("a", 0, 1), call("b", 0, 1)], 1: [call("a", 0, 1)]})


def test_a_member_that_makes_more_calls_is_named() -> None:
    with pytest.raises(DeadlockError, match=r"rank 1 would wait for ever for rank 0: .*all_reduce of b"):
        check_collective_order({0: [call("a", 0, 1)], 1: [call("a", 0, 1), call("b", 0, 1)]})


def test_a_member_that_is_absent_is_named() -> None:
    with pytest.raises(DeadlockError, match="rank 0 would wait for ever for rank 7"):
        check_collective_order({0: [call("a", 0, 7)]})


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(DeadlockError, match=r"rank 2 issues all_reduce of a .* does not belong"):
        check_collective_order({2: [call("a", 0, 1)]})


def test_a_circle_of_groups_is_named_with_its_ranks() -> None:
    ring = {0: (0, 1), 1: (1, 2), 2: (0, 2)}  # rank r issues its own pair's call first
    sequences = {
        0: [call("x", *ring[0]), call("z", *ring[2])],
        1: [call("y", *ring[1]), call("x", *ring[0])],
        2: [call("z", *ring[2]), call("y", *ring[1])],
    }
    with pytest.raises(DeadlockError, match="circle") as error:
        check_collective_order(sequences)
    for name in ("rank 0", "rank 1", "rank 2", "of x", "of y", "of z"):
        assert name in str(error.value)


def test_groups_in_one_common_order_have_no_circle() -> None:
    x, y, z = call("x", 0, 1), call("y", 1, 2), call("z", 0, 2)
    check_collective_order({0: [x, z], 1: [x, y], 2: [z, y]})


def test_the_quick_check_agrees_with_the_full_one() -> None:
    """Random programs on small meshes, some with an axis or a group size that the mesh has not."""

    def refused(check, *args) -> bool:
        try:
            check(*args)
        except DeadlockError:
            return True
        return False

    def full(gm: fx.GraphModule, mesh) -> None:
        ranks = range(math.prod(size for _, size in mesh))
        check_collective_order({rank: collectives_of(gm, mesh, rank) for rank in ranks})

    draw, verdicts = random.Random(0), set()
    for sizes in itertools.product((1, 2, 3), repeat=2):
        mesh = (("replica", sizes[0]), ("shard", sizes[1]))
        for _ in range(20):
            axes = ("replica", "shard") if draw.random() < 0.7 else ("replica", "shard", "tensor")
            made_for = dict(mesh) if draw.random() < 0.7 else SIZES
            operations = ("gather", "scatter", "reduce")
            gm = program([(draw.choice(operations), draw.choice(axes)) for _ in range(6)], made_for)
            verdict = refused(check_program, gm, mesh)
            assert verdict == refused(full, gm, mesh)
            verdicts.add(verdict)
    assert verdicts == {True, False}


def test_ranks_that_run_different_texts_are_found() -> None:
    calls = [("gather", "shard"), ("reduce", "shard")]
    texts = {0: program(calls[::-1]), 1: program(calls), 2: program(calls), 3: program(calls)}
    sequences = {rank: collectives_of(gm, MESH, rank) for rank, gm in texts.items()}
    with pytest.raises(DeadlockError, match="collective number 0"):
        check_collective_order(sequences)


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(DeadlockError, match=r"'shards'.*did you mean 'shard'"):
        check_program(program([("reduce", "shards")]), MESH)


def test_a_program_for_another_mesh_is_refused() -> None:
    with pytest.raises(DeadlockError, match="expects 8 ranks, and the mesh axis 'shard' has 2"):
        check_program(program([("gather", "shard")], {"shard": 8}), MESH)


def test_four_thousand_ranks_take_no_time() -> None:
    sizes = {"replica": 64, "shard": 64}
    gm = program([("gather", "shard"), ("scatter", "shard"), ("reduce", "replica")] * 200, sizes)
    start = time.perf_counter()
    check_program(gm, tuple(sizes.items()))
    assert time.perf_counter() - start < 0.5


def test_awaited_collectives_pass() -> None:
    check_waits(program([("gather", "shard"), ("reduce", "replica")]))


def test_a_collective_without_wait_is_named() -> None:
    gm = program([("gather", "shard")])
    gm.graph.erase_node(next(node for node in gm.graph.nodes if node.target is ir.WAIT))
    with pytest.raises(DeadlockError, match=r"all_gather_into_tensor .* is awaited 0 times"):
        check_waits(gm)


def test_a_second_wait_is_refused() -> None:
    gm = program([("gather", "shard")])
    start = next(ir.collectives(gm))
    with gm.graph.inserting_after(start):
        gm.graph.call_function(ir.WAIT, (start,))
    with pytest.raises(DeadlockError, match="awaited 2 times"):
        check_waits(gm)


def test_an_unawaited_use_is_named() -> None:
    gm = program([("gather", "shard")])
    start = next(ir.collectives(gm))
    with gm.graph.inserting_after(start):
        gm.graph.call_function(torch.ops.aten.neg.default, (start,), name="early")
    with pytest.raises(DeadlockError, match="used by 'early'"):
        check_waits(gm)


def test_an_unawaited_result_is_named() -> None:
    gm = program([("gather", "shard")])
    gm.graph.output_node().args = ((next(ir.collectives(gm)),),)
    with pytest.raises(DeadlockError, match="is returned without being awaited"):
        check_waits(gm)
