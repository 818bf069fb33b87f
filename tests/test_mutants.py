"""Faults that a pass could make, one in each program: verify finds every one that makes a difference, and its pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests import mutation
from tests.mutants import mutants
from tests.mutation import ALIKE, CASES, PER_PASS, WITH, WITHOUT, subject, tried

pytestmark = pytest.mark.usefixtures("shared_captures")

QUICK = 2  # mutants of each pass in the fast suite
FAST = ("hsdp-2x2", "tp+sp-2", "fsdp-2-recompute", "fsdp-2-offload", "pp+zero2-2x2")


def alike(case: str, verdict: str, made_by: str) -> bool:
    """Whether verify cannot tell the passes apart: a shard that is saved may be one that no captured value is."""
    sharded = any(each in case for each in ("tp", "cp")) and {verdict, made_by} == {"shard-operators", "partition"}
    return sharded or {verdict, made_by} <= ALIKE


def cases(*per_pass: int) -> list[Any]:
    """All cases, each with these numbers of mutants of a pass; slow but for ``FAST`` ones with ``QUICK``."""
    return [
        pytest.param(
            case, each, id=f"{case.id}-{each}", marks=() if case.id in FAST and each == QUICK else pytest.mark.slow
        )
        for case in CASES
        for each in per_pass
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "_"), cases(QUICK))
def test_a_program_without_a_fault_is_equal_for_verify_and_for_the_judge(case, _):
    made = subject(case)
    assert made.report.ok, made.report
    assert not made.differs(made.program)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("case", "per_pass"), cases(QUICK, PER_PASS))
def test_every_fault_that_makes_a_difference_is_found_and_blamed_on_its_pass(case, per_pass):
    _, verdicts = tried(case, per_pass)
    assert verdicts
    wrong = {
        str(mutant): verdict
        for mutant, verdict in verdicts.items()
        if verdict not in ("refused", mutant.made_by) and not alike(case.id, verdict, mutant.made_by)
    }
    assert wrong == {}


def test_every_pass_has_mutants_or_a_reason_to_have_none():
    passes = {name for case in CASES for name in case.passes}
    assert WITH.keys().isdisjoint(WITHOUT)
    assert passes == WITH.keys() | WITHOUT.keys()


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
    rows = [(name, made_by, *map(int, numbers)) for name, made_by, *numbers in mutation.read()]
    assert rows
    assert [row for row in rows if row[4] != row[3]] == []
    assert [
        row
        for row in rows
        if row[6] + row[5] != row[4] and not alike(row[0], "shard-operators", row[1]) and row[1] not in ALIKE
    ] == []
