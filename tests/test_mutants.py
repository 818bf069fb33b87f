"""Faults that a pass could make, one in each program: verify finds every one that makes a difference, and its pass."""

from __future__ import annotations

from typing import Any

import pytest

from shardgraph.passes.base import GraphsPass
from tests import mutation
from tests.mutants import Mutant, chosen, mutants
from tests.mutation import CASES, NUMERIC, PER_PASS, RIGHT, WITH, WITHOUT, subject, tried

pytestmark = pytest.mark.usefixtures("shared_captures")

QUICK = 2  # mutants of each pass in the fast suite
FAST = (
    "hsdp-2x2",
    "tp+sp-2",
    "fsdp-2-recompute",
    "fsdp-2-loss-chunk",
    "fsdp-2-offload",
    "pp+zero2-2x2",
    "pp-2-zero-bubble",
    "ddp-2-logits",
    "fsdp-2-constrained",
    "hsdp-2x2-buckets",
)


def alike(mutant: Mutant, verdict: str) -> bool:
    """Whether another pass would have left the same text: a gradient in another's place, to which no value is equal."""
    returned = mutant.result is not None and mutant.graph.endswith("backward")
    return returned and (mutant.made_by, verdict) == ("partition", "shard-operators")


def cases(*per_pass: int) -> list[Any]:
    """All cases, each with these numbers of mutants of a pass; slow but for ``FAST`` ones with ``QUICK``."""
    return [
        pytest.param(
            case, each, id=f"{case.id}-{each}", marks=() if case.id in FAST and each == QUICK else pytest.mark.slow
        )
        for case in CASES
        for each in per_pass
    ]


@pytest.mark.quick("ddp-2-logits-2")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "_"), cases(QUICK))
def test_a_program_without_a_fault_is_equal_for_verify_and_for_the_judge(case, _):
    made = subject(case)
    assert made.report.ok, made.report
    assert not made.differs(made.program)


@pytest.mark.quick("ddp-2-logits-2")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("case", "per_pass"), cases(QUICK, PER_PASS))
def test_every_fault_that_makes_a_difference_is_found_and_blamed_on_its_pass(case, per_pass):
    _, verdicts = tried(case, per_pass)
    assert verdicts
    wrong = {
        str(mutant): verdict
        for mutant, verdict in verdicts.items()
        if verdict not in ("refused", mutant.made_by) and not alike(mutant, verdict)
    }
    assert wrong == {}


@pytest.mark.quick("ddp-2-logits-2", "hsdp-2x2-2", "tp+sp-2-2")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("case", "per_pass"), cases(QUICK, PER_PASS))
def test_no_fault_that_makes_a_difference_in_exact_arithmetic_is_proved(case, per_pass):
    made = subject(case)
    every = chosen(made.program, 0, per_pass)
    faults = [mutant for mutant in every if mutant.fault not in NUMERIC]
    assert faults
    assert [str(mutant) for mutant in faults if made.proved(mutant)] == []


def test_every_pass_has_mutants_or_a_reason_to_have_none():
    passes = {each.name for each in _kinds(GraphsPass) if each.__module__.startswith("shardgraph.passes.")}
    assert WITH.keys().isdisjoint(WITHOUT)
    assert passes == WITH.keys() | WITHOUT.keys()


def _kinds(kind: type) -> set[Any]:
    """All subclasses that have a name: passes, but for those that run others."""
    found = {each for sub in kind.__subclasses__() for each in {sub, *_kinds(sub)}}
    return {each for each in found if hasattr(each, "name")}


@pytest.mark.quick("fsdp-2-constrained", "fsdp-2-loss-chunk", "hsdp-2x2", "hsdp-2x2-buckets")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.id, marks=() if c.id in FAST else pytest.mark.slow) for c in CASES if c.id in WITH.values()],
)
def test_a_case_has_mutants_of_the_passes_that_it_is_named_for(case):
    made = {mutant.made_by for mutant in mutants(subject(case).program)}
    assert {name for name, of in WITH.items() if of == case.id} <= made


def test_the_page_of_mutants_has_the_figures_that_were_measured():
    assert (mutation.DOCS / "mutants.md").read_text() == mutation.document(mutation.read())


def test_all_mutants_in_the_table_that_differ_were_found_and_blamed_or_refused():
    rows = [(name, made_by, *map(int, numbers[:5])) for name, made_by, *numbers in mutation.read()]
    assert rows
    assert [row for row in rows if row[4] != row[3]] == []
    others = [(each.id, "partition") for each in CASES if "shard-operators" in each.passes]  # see alike
    assert [row for row in rows if row[6] + row[5] != row[4] and row[:2] not in others] == []


def test_no_mutant_in_the_table_that_differs_in_exact_arithmetic_was_proved():
    rows = mutation.read()
    assert rows
    assert [row for row in rows if row[1] != RIGHT and row[7] not in ("", "0")] == []
