"""Proofs of an earlier start: what was proved of the same graph, with the same text, is not proved again."""

from __future__ import annotations

from shardgraph.cache.results import Result
from shardgraph.passes.program import Program
from shardgraph.proof.prove import prove


def check_proved(program: Program) -> None:
    """Raise GraphInvariantError if :func:`shardgraph.proof.prove.prove` finds the program wrong."""
    text = program.text, program.plan.to_yaml(), dict(program.shapes), repr(program.actions)
    result = Result(program.joint.kept, "proof", *text)
    if result.read() is None:
        prove(program).raise_if_wrong()
        result.write("nothing wrong")
