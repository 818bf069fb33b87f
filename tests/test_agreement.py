"""Ranks agree, or all of them raise. Each test's ranks report what they saw as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardgraph.errors import CaptureError, RankMismatchError
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.first_made import FirstMade
from shardgraph.runtime.launch import launch

pytestmark = pytest.mark.timeout(150)

SHAPES = "structure (*, *)\ninput 0: shape {}, torch.float32\ninput 1: 3"


def outcome(agreement: Agreement, topic: str, value: str | None = None, error: BaseException | None = None) -> str:
    try:
        agreement.agree(topic, value, error)
    except (RankMismatchError, CaptureError) as failure:
        return f"{type(failure).__name__}: {failure}"
    return "agreed"


def scenarios() -> dict[str, str]:
    """Rounds on two agreements in turn: one world of three ranks for all, since starting it costs most."""
    rank, seen = dist.get_rank(), {}
    first, second = Agreement(dist.group.WORLD, 20), Agreement(dist.group.WORLD, 20)
    seen["equal"] = outcome(first, "the inputs", SHAPES.format([4, 8]))
    seen["different"] = outcome(second, "the inputs", SHAPES.format([2, 8] if rank == 1 else [4, 8]))
    seen["after a difference"] = outcome(second, "the inputs", SHAPES.format([4, 8]))
    seen["elsewhere"] = outcome(first, "the program" if rank == 2 else "the inputs", "same")
    dist.barrier()
    started = time.monotonic()
    if rank == 2:
        time.sleep(2)  # still compiling when rank 1 fails
    error = CaptureError("model.py:7 depends on data") if rank == 1 else None
    seen["error"] = outcome(first, "the program", "same", error)
    seen["error took"] = str(time.monotonic() - started)
    seen["after an error"] = outcome(first, "the program", "same")
    return seen


def late_rank(late: int) -> str:
    """What each rank sees when one comes after the others have given up."""
    agreement = Agreement(dist.group.WORLD, 1.0)
    dist.barrier()
    if dist.get_rank() == late:
        time.sleep(6)
    return outcome(agreement, "the inputs", "same")


def from_first() -> dict[str, str]:
    """What each rank gets from rank 0: a text, errors of some classes, and nothing in time."""
    rank, seen, calls = dist.get_rank(), {}, []
    agreement, hurried = Agreement(dist.group.WORLD, 20), Agreement(dist.group.WORLD, 1.0)

    def get(name: str, make: Callable[[], str], by: Agreement = agreement) -> None:
        try:
            seen[name] = by.from_first_rank("the plan", make)
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"

    def fail(error: Exception) -> str:
        raise error

    get("text", lambda: calls.append(rank) or f"made by rank {rank}")
    seen["calls"] = str(calls)
    get("own error", lambda: fail(CaptureError("model.py:7 depends on data")))
    get("private error", lambda: fail(Private("unknown elsewhere")))
    get("error of torch", lambda: fail(dist.DistStoreError("no room")))
    get("afterwards", lambda: "another text")
    dist.barrier()
    get("late", lambda: time.sleep(4) or "too late", hurried)
    return seen


def of_first() -> dict[str, Any]:
    """What each rank gets of what is made once: by whom, nothing after an error and in time, and what is left."""
    rank, seen = dist.get_rank(), dict[str, Any]()
    made_by, hurried = (Agreement(dist.group.WORLD, timeout).first_made for timeout in (20, 1.0))
    store = dist.distributed_c10d._get_default_store()
    made = list[str]()

    def make(text: str) -> bytes:
        made.append(text)
        return b"\xff" + f"{text} of rank {rank}".encode()

    def fail() -> bytes:
        raise CaptureError("model.py:7 depends on data")

    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    seen["once"] = [made_by.get("the graph", "a", lambda: make("a")) for _ in range(2)]
    dist.barrier()
    seen["keys"] = store.num_keys() - before
    dist.barrier()
    seen["own"] = made_by.get("the graph", f"of rank {rank}", lambda: make("own"))
    dist.barrier()
    failing = Agreement(dist.group.WORLD, 20).first_made
    if rank == 2:
        with pytest.raises(CaptureError):
            failing.get("the graph", "b", fail)
    dist.barrier()
    if rank != 2:
        seen["none after an error"] = failing.get("the graph", "b", lambda: make("b"))
    seen["apart"] = failing.get("the graph", "b", lambda: make("b"))
    dist.barrier()
    if rank == 1:
        hurried.get("the graph", "c", lambda: time.sleep(4) or make("c"))
    else:
        time.sleep(1)
        seen["none in time"] = hurried.get("the graph", "c", lambda: make("c"))
    dist.barrier()
    seen["too large"] = made_by.get("the graph", "d", lambda: make("d") * (1 << 20))[:1]
    seen["made"] = made
    return seen


def unread() -> int:
    """The bytes that are left of many things that one rank alone has made."""
    made_by = Agreement(dist.group.WORLD, 20).first_made
    if dist.get_rank() == 1:
        for i in range(40):
            made_by.get("the graph", f"{i}", lambda: b"x" * 1000)
        return sum(len(made_by._store.get(f"made/{i}/1")) for i in range(40))
    return 0


class Private(CaptureError):
    """A class that is not among the errors that every rank knows."""


def keys_left_by_many_rounds() -> tuple[int, int]:
    """Keys in the store after a few rounds, and after many more."""
    agreement = Agreement(dist.group.WORLD, 20)
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for rounds in (3, 40):
        for i in range(rounds):
            agreement.agree("the program", str(i))
            agreement.from_first_rank("the plan", lambda: "a text")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[0], counts[1]


def subgroup() -> str:
    """Ranks 1 and 2 agree on their own, and differ."""
    group = dist.new_group([1, 2])
    return outcome(Agreement(group, 20), "the stage", str(dist.get_rank()))


def several() -> tuple[dict[str, Any], str, tuple[int, int], str, str]:
    seen = scenarios() | from_first() | of_first() | {"unread": unread()}
    return seen, subgroup(), keys_left_by_many_rounds(), late_rank(2), late_rank(0)


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, Any], str, tuple[int, int], str, str]]:
    return launch(several, 3, timeout=100)


@pytest.mark.slow
def test_ranks_with_equal_values_go_on(ranks: list) -> None:
    assert [seen["equal"] for seen, *_ in ranks] == ["agreed"] * 3


def test_a_difference_raises_on_all_ranks_and_shows_the_lines(ranks: list) -> None:
    (message,) = {seen["different"] for seen, *_ in ranks}
    assert message.startswith("RankMismatchError: the ranks differ in the inputs: rank 1 from ranks 0, 2.")
    assert "--- rank 0\n+++ rank 1" in message
    assert "-input 0: shape [4, 8], torch.float32\n+input 0: shape [2, 8], torch.float32" in message
    assert "input 1" not in message


def test_ranks_can_agree_again_after_a_failure(ranks: list) -> None:
    assert {(seen["after a difference"], seen["after an error"]) for seen, *_ in ranks} == {("agreed", "agreed")}


def test_ranks_at_different_points_are_told_so(ranks: list) -> None:
    (message,) = {seen["elsewhere"] for seen, *_ in ranks}
    assert "ranks 0, 1 at the inputs; rank 2 at the program" in message


def test_an_error_is_raised_by_its_rank_and_quoted_on_the_others(ranks: list) -> None:
    quoted = "RankMismatchError: rank 1 failed at the program: CaptureError: model.py:7 depends on data"
    own = "CaptureError: model.py:7 depends on data"
    assert [seen["error"] for seen, *_ in ranks] == [quoted, own, quoted]


def test_an_error_does_not_wait_for_a_busy_rank(ranks: list) -> None:
    assert all(float(ranks[rank][0]["error took"]) < 1.5 for rank in (0, 1))


def test_only_the_members_of_a_group_are_asked(ranks: list) -> None:
    outside, *members = [subgroup for _, subgroup, *_ in ranks]
    assert outside == "agreed"
    assert all("differ in the stage: rank 2 from rank 1" in message for message in members)


def test_many_rounds_leave_no_more_keys_than_few(ranks: list) -> None:
    assert all(few == many for _, _, (few, many), _, _ in ranks)


def test_every_rank_gets_what_the_first_one_makes(ranks: list) -> None:
    assert [seen["text"] for seen, *_ in ranks] == ["made by rank 0"] * 3
    assert [seen["calls"] for seen, *_ in ranks] == ["[0]", "[]", "[]"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own error", "CaptureError: model.py:7 depends on data"),
        ("private error", "CaptureError: unknown elsewhere"),
        ("error of torch", "RuntimeError: no room"),
    ],
)
def test_an_error_of_the_first_rank_is_raised_on_every_rank(ranks: list, name: str, message: str) -> None:
    first, *others = [seen[name] for seen, *_ in ranks]
    assert others == [message] * 2
    assert first.partition(": ")[2] == message.partition(": ")[2]


def test_the_next_text_comes_after_an_error(ranks: list) -> None:
    assert {seen["afterwards"] for seen, *_ in ranks} == {"another text"}


def test_the_others_wait_for_the_first_rank_no_longer_than_the_timeout(ranks: list) -> None:
    (message,) = {seen["late"] for seen, *_ in ranks}
    assert message.startswith("RankMismatchError: rank 0 did not have the plan within 1 s of rank ")


def test_one_rank_makes_what_all_ask_for_and_another_time_again(ranks: list) -> None:
    (first,), (second,) = ({seen["once"][i] for seen, *_ in ranks} for i in range(2))
    assert first.startswith(b"\xffa of rank ") and second.startswith(b"\xffa of rank ")
    assert sum(seen["made"].count("a") for seen, *_ in ranks) == 2


def test_what_all_have_taken_leaves_nothing_in_the_store(ranks: list) -> None:
    assert [seen["keys"] for seen, *_ in ranks] == [0] * 3


def test_what_no_rank_takes_is_forgotten_after_some_others(ranks: list) -> None:
    assert ranks[1][0]["unread"] == 16_000


def test_ranks_that_ask_for_different_things_make_their_own(ranks: list) -> None:
    assert [seen["own"] for seen, *_ in ranks] == [f"\xffown of rank {rank}".encode("latin-1") for rank in range(3)]


def test_nothing_is_sent_after_an_error_or_in_time_or_if_it_is_too_large(ranks: list) -> None:
    assert [seen.get("none after an error") for seen, *_ in ranks] == [b"", b"", None]
    assert [seen["apart"] for seen, *_ in ranks] == [f"\xffb of rank {rank}".encode("latin-1") for rank in range(3)]
    assert [seen.get("none in time") for seen, *_ in ranks] == [b"", None, b""]
    assert sorted(seen["too large"] for seen, *_ in ranks) == [b"", b"", b"\xff"]


@pytest.mark.parametrize("late", [2, 0])
def test_a_late_rank_fails_with_those_that_gave_up(ranks: list, late: int) -> None:
    (message,) = {outcomes[3 if late == 2 else 4] for outcomes in ranks}
    assert f"RankMismatchError: rank {late} did not come to the inputs within 1 s" in message


def test_one_store_does_not_serve_a_thousand_ranks() -> None:
    assert FirstMade(object(), 0, 1000, 20.0).alone
    assert not FirstMade(object(), 0, 8, 20.0).alone


def test_one_process_agrees_with_itself_and_raises_its_own_error() -> None:
    agreement = Agreement(None, 0.1)
    agreement.agree("the program", "anything")
    with pytest.raises(CaptureError, match="no"):
        agreement.agree("the program", error=CaptureError("no"))
