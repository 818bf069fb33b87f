"""Integer programs: what contradicts is named, and a search that is cut short says how far from the best it may be."""

from __future__ import annotations

import random
import time

import pytest

from shardgraph.passes.milp import NoSolution, Program


def test_the_least_cost_within_the_constraints_is_found():
    program = Program()
    cheap, dear = program.variable(1.0, integer=True), program.variable(3.0, high=4.0)
    program.constrain("three in all", {cheap: 1.0, dear: 1.0}, low=3.0)
    solution = program.solve(limit=10)
    assert list(solution.values) == [1.0, 2.0]
    assert solution.objective == pytest.approx(7.0) and solution.gap == 0.0


def test_constraints_that_contradict_each_other_are_named():
    program = Program()
    x, y = program.variable(integer=True), program.variable(integer=True)
    program.constrain("one of both", {x: 1.0, y: 1.0}, low=1.0)
    program.constrain("x is not taken", {x: 1.0}, high=0.0)
    program.constrain("y is not taken", {y: 1.0}, high=0.0)
    program.constrain("y is at most 1", {y: 1.0}, high=1.0)
    with pytest.raises(NoSolution, match="contradict each other") as raised:
        program.solve(limit=10)
    named = set(raised.value.constraints)
    assert named and named <= {"one of both", "x is not taken", "y is not taken"}
    assert not raised.value.timed_out


def hard(items: int = 150, rooms: int = 50) -> Program:
    """A knapsack in many dimensions, whose best nobody proves in a second."""
    draw, program = random.Random(1), Program()
    taken = [program.variable(-draw.randint(50, 100), integer=True) for _ in range(items)]
    for number in range(rooms):
        weights = {item: float(draw.randint(20, 100)) for item in taken}
        program.constrain(f"room {number}", weights, high=sum(weights.values()) / 2)
    return program


def test_a_time_limit_is_obeyed_and_the_gap_reported():
    before = time.perf_counter()
    solution = hard().solve(limit=1.0)
    assert time.perf_counter() - before < 20.0  # a machine that does other things meanwhile
    assert 0.0 < solution.gap < 1.0
    assert solution.bound < solution.objective < 0.0


def test_a_limit_of_nodes_is_obeyed_and_leaves_the_same_solution_each_time():
    one, other = (hard(60, 20).solve(limit=600.0, nodes=50) for _ in range(2))
    assert 0.0 < one.gap == other.gap and list(one.values) == list(other.values)
    assert hard(60, 20).solve(limit=600.0, nodes=200).gap <= one.gap


def test_no_solution_in_time_is_told_from_none_at_all():
    with pytest.raises(NoSolution, match="within 0 seconds") as raised:
        hard().solve(limit=0.0)
    assert raised.value.timed_out and raised.value.constraints == ()


def test_the_same_program_has_the_same_solution():
    assert list(hard(40, 10).solve(limit=60).values) == list(hard(40, 10).solve(limit=60).values)
