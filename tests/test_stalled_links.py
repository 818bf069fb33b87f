"""Connections between ranks that carry nothing any more are told within seconds; slow ones are waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.runtime.watch import place
from shardgraph.runtime.watch.motion import Motion
from tests import standing
from tests.faulted import LIMIT, Case, run
from tests.faulted.relay import Relay
from tests.faulted.running import launched_through
from tests.ranks import whole

pytestmark = pytest.mark.timeout(400)

LAUNCHED = Case(0, "stall", "forward", 1, victim=1, ranks=2, plan="fsdp", way="launch", link="ranks")
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (LAUNCHED, "ranks 0, 1 are in all_gather_into_tensor of"),
        pytest.param(replace(LAUNCHED, ranks=3, way="plain"), "ranks 0, 1, 2 are in all_gather", marks=SLOW),
        pytest.param(replace(LAUNCHED, plan="pp", way="plain"), "a message between stages", marks=SLOW),
        pytest.param(replace(LAUNCHED, phase="end", way="plain"), "ranks 0, 1 are in barrier", marks=SLOW),
    ],
    ids=["launch", "three", "pipeline", "group-of-the-user"],
)
def test_stalled_connections_are_told_with_the_collective_and_the_ranks(case: Case, told: str) -> None:
    standing.end_all()
    outcome = run(case)
    assert not outcome.problem and outcome.took < LIMIT
    assert "nothing moves any more between ranks 0, 1" in outcome.output and told in outcome.output
    assert "job.py:" in outcome.output


@contextlib.contextmanager
def slow_links(port: int) -> Iterator[int]:
    """A relay to the store at ``port``; connections between ranks carry 50 KB a second."""
    with Relay(port) as relay:
        relay.slow(("ranks",), 50_000)
        yield relay.port


def _step(rows: int, backward: bool) -> tuple[float, float]:
    """The seconds of a forward in which two ranks send each other ``rows`` KiB, and the largest error of the step."""
    torch.manual_seed(0)
    model, x = nn.Linear(512, rows, bias=False), torch.randn(4, 512)
    expected = model(x).square().mean()
    (gradient,) = torch.autograd.grad(expected, model.weight)
    sharded = shardgraph.compile(model, "fsdp", timeout=600, progress=False)
    started = time.monotonic()
    with torch.set_grad_enabled(backward):
        loss = sharded(x).square().mean()
    took, errors = time.monotonic() - started, [loss.detach() - expected.detach()]
    if backward:
        loss.backward()
        errors.append(whole(sharded.weight.grad) - gradient)
    return took, max(each.abs().max().item() for each in errors)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "backward"), [(600, False), pytest.param(1200, True, marks=SLOW)])
def test_a_slow_connection_is_waited_for(rows: int, backward: bool) -> None:
    standing.end_all()
    with launched_through(slow_links):
        for took, error in shardgraph.launch(_step, 2, args=(rows, backward), timeout=600):
            assert took > rows / 55 and error < 1e-6


def _looks(computes: bool) -> list[float]:
    """For how long rank 0, which waits for a message, is still at each look; a thread of its may compute meanwhile."""
    over, motion, found = threading.Event(), Motion(), []
    group = dist.new_group(backend=shardgraph.torch_api.ordered_gloo())
    dist.barrier(group)
    computed = threading.Event()

    def compute() -> None:
        while not over.is_set():
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                torch.randn(100, 100).sum()
            computed.set()

    def look() -> None:
        for _ in range(6):
            time.sleep(0.5)
            if computes:
                computed.clear()
                assert computed.wait(60)
            motion.look(place.here())
            found.append(motion.still)
        dist.send(torch.zeros(1), 1)  # over another group

    threads = [threading.Thread(target=look), *([threading.Thread(target=compute)] if computes else [])]
    for thread in threads if dist.get_rank() == 0 else []:
        thread.start()
    if dist.get_rank():
        dist.recv(torch.zeros(1), 0)  # rank 0 has looked often enough
    dist.barrier(group)
    over.set()
    for thread in threads if dist.get_rank() == 0 else []:
        thread.join()
    dist.destroy_process_group(group)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("computes", [False, True])
def test_a_rank_is_still_while_it_neither_communicates_nor_computes(computes: bool) -> None:
    looks, _ = standing.on_ranks(_looks, args=(computes,))
    if computes:
        assert not any(looks)
    else:
        assert looks[0] == 0 and all(later >= before + 0.5 for before, later in pairwise(looks))
