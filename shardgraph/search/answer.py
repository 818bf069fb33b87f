"""The answer to a question: the one place where plans are chosen and decided."""

from __future__ import annotations

from shardgraph.capture.captures import Captures
from shardgraph.plans.plan import Plan
from shardgraph.search.decide import decide
from shardgraph.search.planner import choose_plan
from shardgraph.search.question import Question
from shardgraph.search.source import CheckCut, Source, unchecked


def answer(question: Question, captures: Captures, check_cut: CheckCut = unchecked) -> Plan:
    """The plan for a question, with all open choices decided.

    ``"auto"`` is searched (:mod:`.planner`): for a total of samples all layouts, whose batch ``check_cut`` is asked
    whether it can be cut; else not those whose ranks share a batch while another one fits, since the caller's loop
    gives each rank a batch of its own.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: no plan meets the request; or a choice is open and there are no example inputs.
    """
    if question.automatic and question.call is not None:
        source = Source(question, captures=captures, check_cut=check_cut)
        question = question.settled(choose_plan(source, own_batches=question.total is None))
    return decide(question, captures)
