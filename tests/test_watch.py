"""What follows from what ranks wait for, and from the last collectives of all."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch import fx, nn

from shardgraph import ir
from shardgraph.cli.main import main
from shardgraph.errors import RankFailedError
from shardgraph.runtime import watch
from shardgraph.runtime.watch import flight, place
from shardgraph.runtime.watch.compared import findings
from shardgraph.runtime.watch.stacks import Frame
from shardgraph.runtime.watch.stuck import STILL, Status, verdict
from shardgraph.runtime.watch.watcher import Watcher

BOTH = (0, 1)


def test_ranks_in_one_collective_may_go_on() -> None:
    same = Status("all_reduce", "all_reduce", "dp", BOTH, counts={"dp": 5})
    assert verdict({0: same, 1: same}) is None


def test_ranks_at_the_same_number_in_different_collectives_will_not() -> None:
    one = Status("all_reduce at a.py:1", "all_reduce", "dp", BOTH, counts={"dp": 5})
    other = Status("all_gather at a.py:2", "all_gather", "dp", BOTH, counts={"dp": 5})
    assert verdict({0: one, 1: other}) == (
        "the ranks communicate different things: rank 0 is in all_reduce at a.py:1; rank 1 is in all_gather at a.py:2"
    )


def test_ranks_in_one_graph_may_wait_for_different_collectives_of_it() -> None:
    one = Status("gather of a", "gather of a", "dp", BOTH, run=3, counts={"dp": 5})
    other = Status("gather of b", "gather of b", "dp", BOTH, run=3, counts={"dp": 5})
    assert verdict({0: one, 1: other}) is None


def test_a_rank_that_is_behind_may_catch_up() -> None:
    ahead = Status("all_reduce", "all_reduce", "dp", BOTH, counts={"dp": 5})
    assert verdict({0: ahead}) is None  # rank 1 computes


def test_a_rank_in_a_step_of_a_pipeline_and_one_beside_it_will_not_meet() -> None:
    inside = Status("a message between stages", "message", "", BOTH, run=4, message=True)
    beside = Status("all_reduce", "all_reduce", "", BOTH)
    assert verdict({0: beside, 1: inside}) is not None
    assert verdict({0: inside, 1: Status("broadcast", "broadcast", "", BOTH, run=4)}) is None


def test_ranks_that_send_to_one_another_may_go_on() -> None:
    sends, receives = (Status(name, name, "", BOTH, message=True) for name in ("send", "recv"))
    assert verdict({0: sends, 1: receives}) is None


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_both_places() -> None:
    one = Status("all_reduce over dp", "all_reduce", "dp", BOTH, counts={"dp": 5, "tp": 2})
    other = Status("all_gather over tp", "all_gather", "tp", BOTH, counts={"dp": 4, "tp": 3})
    found = verdict({0: one, 1: other})
    assert found is not None and found.startswith("the ranks wait for each other, and none can go on: rank 0 is in")


def test_a_rank_at_an_agreement_and_one_in_a_collective_wait_for_each_other() -> None:
    agreeing = Status("waiting at the inputs", "agreement", absent=(1,), counts={"dp": 4})
    other = Status("all_gather over dp", "all_gather", "dp", BOTH, counts={"dp": 5})
    assert verdict({0: agreeing, 1: other}) is not None
    assert verdict({0: agreeing}) is None


def test_a_rank_that_leaves_out_a_collective_of_a_pipeline_beside_its_steps_is_told() -> None:
    clips = Status("all_reduce", "all_reduce", "", BOTH, counts={"pp": 1}, beside="pp")
    saves = Status("waiting at step 2 of the checkpoint", "agreement", absent=(0,), counts={"pp": 0})
    assert verdict({0: clips, 1: saves}) is not None
    assert verdict({0: clips, 1: replace(saves, counts={"pp": 1})}) is None  # what it has sent is on its way
    assert verdict({0: clips, 1: replace(saves, counts={})}) is None  # it is in a step


STALLED = Status("all_reduce at a.py:1", "all_reduce", "dp", BOTH, counts={"dp": 5}, still=STILL)


def test_ranks_in_one_collective_on_which_nothing_moves_are_stalled() -> None:
    told = "nothing moves any more between ranks 0, 1: their connections are stalled: ranks 0, 1 are in all_reduce at"
    assert verdict({0: STALLED, 1: STALLED}) == f"{told} a.py:1"
    assert verdict({0: STALLED, 1: replace(STALLED, still=STILL - 1)}) is None  # bytes have come there
    assert verdict({0: STALLED}) is None  # rank 1 computes


def test_stalled_ranks_are_told_together_with_those_that_wait_for_them() -> None:
    ahead = replace(STALLED, text="all_gather over all", group="all", members=(0, 1, 2), counts={"dp": 5, "all": 1})
    agrees = replace(STALLED, text="waiting at the inputs", operation="agreement", group="", members=(), absent=(0, 1))
    for waiting in ({0: STALLED, 1: STALLED, 2: ahead}, {0: STALLED, 1: STALLED, 2: agrees}):
        found = verdict(waiting)
        assert found is not None and "between ranks 0, 1, 2" in found and f"rank 2 is in {waiting[2].text}" in found


def test_a_rank_that_waits_for_one_that_computes_is_not_stalled() -> None:
    waits_for_three = replace(STALLED, group="all", members=(0, 1, 3), counts={"all": 1})
    assert verdict({0: STALLED, 1: waits_for_three}) is None


def test_a_rank_whose_save_alone_waits_may_go_on() -> None:
    saves = Status("waiting at the checkpoint", "agreement", absent=(1,), counts={"dp": 4})
    other = Status("all_gather over dp", "all_gather", "dp", BOTH, counts={"dp": 5})
    assert verdict({0: saves, 1: other}) is not None
    assert verdict({0: replace(saves, computes=True), 1: other}) is None


def collective(call: int, place: int, value: str, started: float) -> dict[str, object]:
    return {
        **{"kind": "all_gather", "axis": "dp", "bytes": 8, "value": value, "line": "a.py:3"},
        **{"call": call, "place": place, "started": started, "finished": started + 0.001},
    }


def test_the_rank_that_was_late_is_found() -> None:
    first = [collective(1, 1, "a", 1.0), collective(1, 2, "b", 2.0)]
    second = [collective(1, 1, "a", 1.5)]
    late, latest = findings({0: first, 1: second})
    assert late.startswith(
        "Rank 1 had last started all_gather of a, 8 bytes over 'dp' (a.py:3), when rank 0 had started"
    )
    assert latest.startswith("Rank 1 was the latest by most, 500.0 ms after the first, at all_gather of a")


def test_the_rank_that_was_different_is_found() -> None:
    ranks = {rank: [collective(1, 1, "b" if rank == 1 else "a", 1.0)] for rank in range(3)}
    different, *_ = findings(ranks)
    assert "differ at collective 1 of graph 1: Ranks 0, 2: all_gather of a" in different
    assert "Rank 1: all_gather of b" in different


def outside(place: int, kind: str, group: str = "3", line: str = "a.py:3") -> dict[str, object]:
    about = {"kind": kind, "group": group, "call": 0, "place": place, "line": line, "done": True, "finished": None}
    return {**collective(0, place, "Float[2]", float(place)), **about}


def test_collectives_outside_of_graphs_are_compared_by_their_number_in_the_group() -> None:
    first = [outside(1, "all_reduce"), outside(2, "barrier", "0"), outside(2, "all_reduce")]
    second = [outside(1, "all_reduce", line="a.py:9"), outside(2, "barrier", "0"), outside(2, "broadcast")]
    (different,) = findings({0: first, 1: second})
    assert different == (
        "The ranks differ at collective 2 of group 'dp', outside of graphs: Rank 0: all_reduce; Rank 1: broadcast."
    )
    (behind,) = findings({0: first, 1: second[:2]})
    assert behind.startswith("Rank 1 had last started all_reduce of Float[2]")


def test_the_command_shows_what_was_found_and_the_last_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "record.json"
    ranks = {"0": [collective(1, 1, "a", 1.0), collective(1, 2, "b", 2.0)], "1": [collective(1, 1, "a", 1.0)]}
    file.write_text(json.dumps({"failure": "rank 1 was killed", "ranks": ranks}))
    assert main(["flight", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "Failure: rank 1 was killed" in shown and "Rank 1 had last started" in shown and "1.00 ms" in shown
    file.write_text("{}")
    assert main(["flight", str(file)]) == 2
    assert "is no flight record" in capsys.readouterr().err


def test_one_agreement_after_the_other_at_the_same_topic_is_progress() -> None:
    marks = []
    with ThreadPoolExecutor(1) as looking:
        for _ in range(2):
            with place.agreeing("the store") as waiting:
                waiting.absent = [0]
                marks += [looking.submit(place.here).result().mark for _ in range(2)]
    assert marks[0] == marks[1] != marks[2] == marks[3]


def test_a_graph_is_as_it_was_once_its_code_notes_collectives() -> None:
    graph = fx.Graph()
    started = graph.call_function(ir.ALL_REDUCE, (graph.placeholder("x"), "sum", "a group"))
    graph.output((graph.call_function(ir.WAIT, (started,)),))
    gm = ir.UnboundGraph(nn.Module(), graph)
    before = gm.code
    with flight.noting(gm):
        assert gm.code.count(" = shardgraph_runtime_watch_flight_mark(") == 2
    assert gm.code == before


def test_a_look_that_fails_does_not_end_the_watch(monkeypatch, capsys) -> None:
    watcher = Watcher.__new__(Watcher)
    watcher.rank, watcher._puzzled = 3, False

    def fail() -> None:
        raise TypeError("no line")

    monkeypatch.setattr(watcher, "_look", fail)
    watcher._look_if_possible()
    watcher._look_if_possible()
    assert capsys.readouterr().err.count("shardgraph: rank 3 is watched with gaps: TypeError: no line") == 1


def test_generated_code_may_be_at_no_line() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    gm = fx.GraphModule(nn.Module(), graph)
    place.know(gm.forward, gm)
    assert place._in_graph(Frame(type(gm).forward.__code__, None, 0)) is None


def test_an_error_that_is_raised_from_itself_ends_a_rank_too() -> None:
    alone, one, other = ValueError("alone"), ValueError("one"), ValueError("other")
    alone.__cause__ = alone
    one.__cause__, other.__cause__ = other, one
    assert watch.seen(alone) is alone
    assert watch.seen(one) is one


def test_the_failure_of_another_rank_is_found_below_the_error_that_it_led_to() -> None:
    error, between, cause = ValueError("own"), KeyError("between"), RankFailedError("rank 1 has ended")
    error.__cause__, between.__cause__ = between, cause
    assert watch.seen(error) is cause
