"""The answer to a question: the one place where plans are chosen and decided."""

from __future__ import annotations

from collections.abc import Callable

from shardgraph.capture.captures import Captures
from shardgraph.plans.plan import Plan
from shardgraph.search.decide import decide
from shardgraph.search.planner import choose_plan
from shardgraph.search.question import Question
from shardgraph.search.source import Source


def answer(question: Question, captures: Captures, show: Callable[[str], None] = lambda stage: None) -> Plan:
    """The plan for a question, with all open choices decided.

    ``"auto"`` is searched (:mod:`.planner`), with pipelines if the call has its loss: a step of stages is more than a
    call of a module. ``show`` is called with the name of each step of the search.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: no plan meets the request; or a choice is open and there are no example inputs.
    """
    if question.automatic and question.call is not None:
        source = Source(question, captures=captures)
        question = question.settled(choose_plan(source, pipelines=question.call.loss_fn is not None, show=show))
    return decide(question, captures)
