"""Decisions of an earlier start: a search over the same captured graph, on the same machine, ends at the same plan."""

from __future__ import annotations

from shardgraph.cache import entries
from shardgraph.cache.results import Result
from shardgraph.capture.captures import Captures
from shardgraph.plans.plan import Plan
from shardgraph.search.answer import answer
from shardgraph.search.question import Question
from shardgraph.search.source import CheckCut, unchecked


def remembered(question: Question, captures: Captures, check_cut: CheckCut = unchecked) -> Plan:
    """:func:`shardgraph.search.answer.answer`, read from disk if the same question was answered before."""
    if not question.open or question.call is None or entries.directory() is None:
        return answer(question, captures, check_cut)
    kept = captures.joint(question.captured, question.plan).kept
    asked = question.plan.to_yaml(), question.automatic, question.free_mesh, question.recompute, question.memory
    options = question.loss_chunk, question.offload, question.optimizer, dict(question.shapes), question.total
    priced = question.automatic or question.budgeted or question.plan.pipeline is not None
    result = Result(kept, "plan", asked, options, question.machine if priced else None)
    if (text := result.read()) is not None:
        return Plan.from_yaml(text, "the plan on disk")
    plan = answer(question, captures, check_cut)
    result.write(plan.to_yaml())
    return plan
