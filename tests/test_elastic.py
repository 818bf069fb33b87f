"""A job whose ranks fail goes on with those that are left, with the losses of one that was never interrupted."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardgraph
from shardgraph import LaunchError, ShardGraphError
from tests import elastic_jobs
from tests.plain_loop import losses_of

pytestmark = pytest.mark.timeout(240)


def undisturbed(steps: int) -> dict[int, float]:
    """The loss of each step on one device."""
    model = elastic_jobs.model()

    def loss_of(step: int) -> torch.Tensor:
        inputs, targets = elastic_jobs.batch_of(step)
        return elastic_jobs.loss_of(model(inputs), targets)

    return losses_of(torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of, range(1, steps + 1))


def run(
    folder: Path, steps: int, nproc: Any, faults: dict[int, Any], *more: Any, **options: Any
) -> list[tuple[int, int, float]]:
    """The step, number of ranks and loss of each step that was done, in order; the job ends well."""
    args = (str(folder / "saved"), steps, faults, *more)
    shardgraph.elastic(elastic_jobs.train, nproc, args=args, timeout=120, **options)
    return [tuple(json.loads(line)) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.quick("kill")
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_job_goes_on_without_the_rank_that_failed(tmp_path, how):
    done = run(tmp_path, 8, 3, {3: (6, 1, how)})
    assert [(step, ranks) for step, ranks, _ in done] == [(1, 3), (2, 3), (3, 3), (4, 3), (5, 3)] + [
        (step, 2) for step in (5, 6, 7, 8)
    ]
    expected = undisturbed(8)
    assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, _, loss in done)


@pytest.mark.slow
def test_a_rank_that_failed_is_back_after_the_next_checkpoint(tmp_path):
    done = run(tmp_path, 8, lambda: 3, {3: (4, 1, "kill")})
    # Step 3 is done again by the 2 ranks that are left, and step 4 ends with a checkpoint.
    assert [(step, ranks) for step, ranks, _ in done][:5] == [(1, 3), (2, 3), (3, 3), (3, 2), (4, 2)]
    assert [(step, ranks) for step, ranks, _ in done][5:] == [(step, 3) for step in (5, 6, 7, 8)]
    expected = undisturbed(8)
    assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, _, loss in done)


@pytest.mark.slow
def test_new_ranks_join_a_job_after_its_next_checkpoint(tmp_path):
    def available() -> int:  # a second rank is there when the first steps are done
        return 1 if not (tmp_path / "losses.jsonl").exists() else 2

    done = run(tmp_path, 200, available, {})
    counts = [ranks for _, ranks, _ in done]
    assert counts == sorted(counts) and {*counts} == {1, 2}
    assert [step for step, _, _ in done] == [*range(1, 201)]  # none is done twice
    expected = undisturbed(200)
    assert all(loss == pytest.approx(expected[step], rel=1e-4) for step, _, loss in done)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "plans"), [(3, {3: "ddp", 2: "ddp"}), (4, {4: "hsdp", 3: "zero1"})])
def test_one_step_is_done_again_where_each_is_saved_in_memory(tmp_path, ranks, plans):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = run(tmp_path, 7, ranks, {ranks: (6, 1, "kill")}, plans, memory)
    # The last checkpoint on the disk is of step 4; the rank was killed in step 6, which is the only one begun twice.
    assert [step for step, _, _ in done] == [*range(1, 8)]
    assert [n for _, n, _ in done] == [ranks] * 5 + [ranks - 1] * 2
    expected = undisturbed(7)
    assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, _, loss in done)


@pytest.mark.slow
def test_one_step_is_done_again_where_a_machine_is_lost_with_what_it_had_in_memory(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = run(tmp_path, 7, 3, {3: (6, 2, "kill")}, {3: "fsdp", 2: "zero2"}, f"{memory}/{{machine}}")
    assert [(step, ranks) for step, ranks, _ in done] == [(step, 3) for step in range(1, 6)] + [(6, 2), (7, 2)]
    expected = undisturbed(7)
    assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, _, loss in done)


def test_what_says_how_many_ranks_there_can_be_must_say_a_number(tmp_path):
    with pytest.raises(ShardGraphError, match=r"nproc\(\) returned is 'two'; it may be a whole number from 1"):
        run(tmp_path, 2, lambda: "two", {})


def test_a_job_that_too_few_ranks_are_left_for_fails_with_the_cause(tmp_path):
    with pytest.raises(LaunchError, match="a bad sample") as error:
        run(tmp_path, 4, 2, {2: (1, 1, "raise")}, least=2)
    assert error.value.failed == (1,)


def test_a_batch_is_cut_as_equally_as_can_be():
    sharded = shardgraph.compile(elastic_jobs.model(), "single")
    assert sharded.rows_of(5) == slice(0, 5)
    with pytest.raises(ShardGraphError, match="fewer than the 1 ranks"):
        sharded.rows_of(0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_losses_are_those_of_an_undisturbed_job_whichever_ranks_fail(tmp_path):
    drawn = random.Random(0)
    expected = undisturbed(12)
    for number in range(8):
        faults = {n: (drawn.randint(1, 12), drawn.randrange(n), drawn.choice(["kill", "raise"])) for n in (4, 3, 2)}
        print(number, faults)
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run(folder, 12, 4, faults)
        assert done[-1][0] == 12
        assert all(loss == pytest.approx(expected[step], rel=1e-5) for step, _, loss in done)
