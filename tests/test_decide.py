"""One question, one decision, one captured graph: for compile, analyze and verify, on one rank and on several."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardgraph
from shardgraph import Pipeline, Plan, PlanError, preset, torch_api
from tests.machines import toy_cluster
from tests.zoo import Deep

X = (torch.ones(4, 2, 32),)
TP = {"dp": 2, "tp": 2}


@pytest.fixture
def traced(monkeypatch) -> list[Any]:
    """Every call of the tracer from now on."""
    return count_traces(monkeypatch.setattr)


def count_traces(set_attribute=setattr) -> list[Any]:
    calls: list[Any] = []
    trace = torch_api.trace

    def counted(*args: Any) -> Any:
        calls.append(args)
        return trace(*args)

    set_attribute(torch_api, "trace", counted)
    return calls


# -- one captured graph ------------------------------------------------------------------------------------------------


@pytest.mark.quick("*ddp*")
@pytest.mark.parametrize(
    "options",
    [
        {"plan": "auto"},
        {"plan": "single"},
        {"plan": "ddp"},
        {"plan": "tp"},
        {"plan": "single", "memory": "1GiB"},
        {"plan": "pp", "pipeline": Pipeline(2)},
    ],
    ids=str,
)
def test_one_process_captures_a_call_once(traced, options):
    model = Deep(2)
    sharded = shardgraph.compile(model, example_inputs=X, cluster=toy_cluster(), **options)
    sharded.train_step(*X)
    expected = 1 if "pipeline" in options else 2  # train_step is another call than forward
    assert len(traced) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "auto"},
        {"plan": "auto", "memory": "1GiB"},
        {"plan": "fsdp"},
        {"plan": "fsdp", "memory": "1GiB"},
        {"plan": "fsdp+tp", "mesh": TP},
        {"plan": "pp+fsdp", "mesh": {"pp": 2, "dp": 2}, "memory": "1GiB"},
    ],
    ids=str,
)
def test_an_analysis_captures_a_call_once(traced, options):
    shardgraph.analyze(Deep(2), X, cluster=toy_cluster(), **options)
    assert len(traced) == 1


@pytest.mark.quick("*Pipeline*")
@pytest.mark.parametrize(
    "options",
    [
        {"plan": "auto", "world_size": 4},
        {"plan": "fsdp", "memory": "1GiB"},
        {"plan": "fsdp+tp", "mesh": TP},
        {"plan": "pp", "mesh": {"pp": 2}, "pipeline": Pipeline(2)},
    ],
    ids=str,
)
def test_a_verification_captures_a_call_once(traced, options):
    report = shardgraph.verify(Deep(2), X, cluster=toy_cluster(), fp64=True, **options)
    assert report.ok, report
    assert len(traced) == 1


@pytest.mark.slow
def test_another_mode_is_another_capture(traced):
    model = Deep(2)
    sharded = shardgraph.compile(model, "single", example_inputs=X)
    sharded.eval()
    sharded(*X)
    sharded.train()
    sharded(*X)
    assert len(traced) == 2


def test_a_pipeline_compiles_from_inputs_without_values():
    inputs = (torch.empty(4, 2, 32, device="meta"),)
    sharded = shardgraph.compile(Deep(2), "pp", pipeline=Pipeline(2), example_inputs=inputs)
    assert sharded.train_step(*X).isfinite()


# -- one decision ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_takes_auto_and_says_what_it_chose_among():
    report = shardgraph.verify(Deep(2), X, "auto", world_size=4, cluster=toy_cluster(), fp64=True)
    assert report.ok, report
    assert report.plan.world_size == 4 and report.plan.considered


@pytest.mark.slow
def test_verify_takes_auto_where_operators_are_divided():
    plans = shardgraph.analyze(Deep(2), X, "auto", mesh={"tp": 4}, cluster=toy_cluster()).plan
    report = shardgraph.verify(Deep(2), X, "auto", mesh={"tp": 4}, cluster=toy_cluster(), fp64=True)
    assert report.ok, report
    assert report.plan.operators == plans.operators != ()


def test_verify_and_analyze_decide_the_same():
    given = {"mesh": TP, "cluster": toy_cluster(), "memory": "1GiB"}
    verified = shardgraph.verify(Deep(2), (torch.ones(8, 2, 32),), "fsdp+tp", **given).plan
    assert verified == shardgraph.analyze(Deep(2), X, "fsdp+tp", **given).plan


def test_the_plan_of_an_analysis_says_where_parameters_lie():
    model = Deep(2)
    plan = shardgraph.analyze(model, X, "fsdp+tp", mesh=TP, cluster=toy_cluster()).plan
    assert not plan.undecided({name: parameter.shape for name, parameter in model.named_parameters()})


def test_a_plan_file_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    preset("fsdp", {"dp": 2}).save(path)
    reads: Counter[Path] = Counter()
    read = Plan.load.__func__
    monkeypatch.setattr(Plan, "load", classmethod(lambda cls, path: reads.update([path]) or read(cls, path)))
    shardgraph.analyze(Deep(2), X, path, cluster=toy_cluster())
    shardgraph.verify(Deep(2), X, path)
    assert reads[path] == 2
    preset("single", ()).save(path)
    shardgraph.compile(Deep(2), str(path), example_inputs=X)
    assert reads[str(path)] == 1


def test_auto_with_a_pipeline_says_how_to_ask_for_one():
    with pytest.raises(PlanError, match=r"'auto' chooses no pipeline: ask for 'pp'"):
        shardgraph.analyze(Deep(2), X, "auto", pipeline=Pipeline(2), cluster=toy_cluster())


def test_a_plan_that_is_no_plan_is_refused():
    with pytest.raises(PlanError, match=r"compile\(\): plan is 3; it may be the name of a plan"):
        shardgraph.compile(Deep(2), 3)


# -- several ranks -----------------------------------------------------------------------------------------------------

PLANS = {
    "ddp": {"dp": 2},
    "zero1": {"dp": 2},
    "zero2": {"dp": 2},
    "fsdp": {"dp": 2},
    "hsdp": {"dp_replicate": 1, "dp_shard": 2},
    "tp": {"tp": 2},
    "fsdp+tp": {"dp": 1, "tp": 2},
    "pp": {"pp": 2},
    "auto": None,
}


def two_ranks() -> dict[str, Any]:
    """What each rank captured and decided for every plan, and what it saw of rank 0 failing and of it being late."""
    deciding = [importlib.import_module(f"shardgraph.{name}") for name in ("api.compile", "search.remembered")]
    traced, decided = count_traces(), []
    decide = deciding[0].answer

    def counted(*args: Any) -> Plan:
        decided.append(args)
        return decide(*args)

    for module in deciding:
        module.answer = counted
    seen: dict[str, Any] = {"captures": {}, "decisions": {}, "plans": {}}
    for plan, mesh in PLANS.items():
        traced.clear()
        decided.clear()
        sharded = shardgraph.compile(
            Deep(2),
            plan,
            mesh=mesh,
            example_inputs=X,
            cluster=toy_cluster(),
            pipeline=Pipeline(2) if mesh == {"pp": 2} else None,
        )
        (sharded.train_step(*X) if plan == "pp" else sharded(*X).backward())
        seen["captures"][plan], seen["decisions"][plan] = len(traced), len(decided)
        seen["plans"][plan] = sharded.plan.to_yaml()
    seen["error"] = outcome(memory="1KiB")

    def late(*_: Any) -> Plan:
        time.sleep(4)
        return preset("fsdp", {"dp": 2})

    for module in deciding:
        module.answer = late
    dist.barrier()
    seen["late"] = outcome(memory="1GiB", timeout=1.0)
    return seen


def outcome(**options: Any) -> str:
    try:
        shardgraph.compile(Deep(2), "fsdp", example_inputs=X, cluster=toy_cluster(), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "compiled"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return shardgraph.launch(two_ranks, 2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_one_rank_captures_a_call_for_all(ranks, plan):
    assert sum(seen["captures"][plan] for seen in ranks) == 1


@pytest.mark.parametrize("plan", ["tp", "fsdp+tp", "pp", "auto"])
def test_rank_0_decides_and_the_others_have_its_plan(ranks, plan):
    assert [seen["decisions"][plan] for seen in ranks] == [1, 0]
    assert ranks[0]["plans"][plan] == ranks[1]["plans"][plan]


def test_an_error_of_rank_0_is_raised_on_every_rank(ranks):
    (message,) = {seen["error"] for seen in ranks}
    assert message.startswith("PlanError: no recomputation brings plan 'fsdp'")


def test_the_others_wait_for_the_decision_as_long_as_the_timeout_says(ranks):
    (message,) = {seen["late"] for seen in ranks}
    assert message.startswith("RankMismatchError: rank 0 did not have the plan within 1 s of rank 1")
