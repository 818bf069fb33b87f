"""Faults that a pass could make, one in each program: verify finds every one that makes a difference, and its pass."""

from __future__ import annotations

import importlib
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

import shardgraph
from shardgraph import Plan
from shardgraph.passes import lowering
from shardgraph.passes.program import Program
from tests.mutants import Mutant, differs, mutants
from tests.zoo import make

QUICK = 4  # of each case in the fast suite
PER_PASS = 20
CASES = [
    ("tied-transformer", "fsdp", {"dp": 2}),
    ("tied-transformer", "zero2", {"dp": 3}),
    ("tied-transformer", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
    ("conv-batch-norm", "ddp", {"dp": 2}),
    ("tied-transformer", "tp", {"tp": 2}),
    ("tied-transformer", "tp+sp", {"tp": 2}),
    ("tied-transformer", "cp", {"cp": 2}),
    ("tied-transformer", "fsdp+tp", {"dp": 2, "tp": 2}),
]
IDS = [f"{plan}-{'x'.join(map(str, mesh.values()))}" for _, plan, mesh in CASES]


@cache
def case(name: str, plan: str, mesh: tuple[tuple[str, int], ...]) -> tuple[Any, ...]:
    """A model in double precision with inputs, its program under a plan, and that plan."""
    torch.manual_seed(0)
    model, (args, kwargs) = make(name, 12)
    model = model.double() if "batch-norm" in name else model.double().eval()  # without dropout
    args = tuple(x.double() if x.is_floating_point() else x for x in args)
    report = shardgraph.verify(model, args, plan, mesh=dict(mesh), example_kwargs=kwargs, fp64=True)
    assert report.ok, report
    part = tuple(x.chunk(report.plan.data_size)[0] for x in args)
    program = lowering.build_program(model, report.plan, part, kwargs)
    return model, args, kwargs, program, report.plan


def chosen(program: Program, seed: int, per_pass: int) -> list[Mutant]:
    """Some of each pass's mutants, of as many faults as there are."""
    order = list(mutants(program))
    Random(seed).shuffle(order)
    picked = []
    for made_by in sorted({mutant.made_by for mutant in order}):
        own, taken = [mutant for mutant in order if mutant.made_by == made_by], {}
        for mutant in own:
            taken.setdefault(mutant.fault, []).append(mutant)
        rounds = max(map(len, taken.values()))
        picked += [each[i] for i in range(rounds) for each in taken.values() if i < len(each)][:per_pass]
    return picked


def is_wrong(mutant: Mutant, program: Program, model: Any, args: Any, kwargs: Any) -> bool:
    """Whether the mutant differs from the original, by a judge of its own; one that cannot be run does."""
    try:
        return any(differs(mutant.of(program), model, args, kwargs, seed) for seed in range(3))
    except (RuntimeError, shardgraph.ShardGraphError):
        return True


def found(mutant: Mutant, model: Any, args: Any, kwargs: Any, plan: Plan, monkeypatch: Any) -> str:
    """What verify says of the mutant: "missed", "refused", or the pass that it blames."""
    build = lowering.lower
    module = importlib.import_module("shardgraph.api.verify")
    monkeypatch.setattr(module, "lower", lambda *args, **kwargs: mutant.of(build(*args, **kwargs)))
    try:
        report = shardgraph.verify(model, args, plan, mesh=dict(plan.mesh), example_kwargs=kwargs, fp64=True)
    except (RuntimeError, shardgraph.ShardGraphError):
        return "refused"
    finally:
        monkeypatch.setattr(module, "lower", build)
    if report.ok:
        return "missed"
    return report.first_divergence.made_by if report.first_divergence else "nothing"


@pytest.mark.parametrize(("name", "plan", "mesh"), CASES, ids=IDS)
def test_a_program_without_a_fault_is_equal_for_the_judge_too(name, plan, mesh):
    model, args, kwargs, program, _ = case(name, plan, tuple(mesh.items()))
    assert not any(differs(program, model, args, kwargs, seed) for seed in range(3))


@pytest.mark.parametrize("per_pass", [QUICK, pytest.param(PER_PASS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "plan", "mesh"), CASES, ids=IDS)
def test_every_fault_that_makes_a_difference_is_found_and_blamed_on_its_pass(name, plan, mesh, per_pass, monkeypatch):
    model, args, kwargs, program, chosen_plan = case(name, plan, tuple(mesh.items()))
    wrong = [m for m in chosen(program, 0, per_pass) if is_wrong(m, program, model, args, kwargs)]
    verdicts = {str(m): (found(m, model, args, kwargs, chosen_plan, monkeypatch), m.made_by) for m in wrong}
    print(f"{plan}: {len(wrong)} mutants")
    assert {m: verdict for m, (verdict, made_by) in verdicts.items() if verdict not in ("refused", made_by)} == {}
