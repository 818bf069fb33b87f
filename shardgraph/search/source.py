"""The source of an analysis: a question, which can be decided again for other sizes and for fewer layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from shardgraph.capture.captures import Call, Captures
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.report.folding import SHALLOW, Stack, find_stack, shortened, treats_alike
from shardgraph.search.decide import decide
from shardgraph.search.question import Question


@dataclass(frozen=True)
class Source:
    """A question about one rank's call, and how its answer is analysed.

    ``fused``: price chains of pointwise operations as fused; ``fold``: analyse only a few layers of a stack of equal
    layers, if that is enough.
    """

    question: Question
    fused: bool = False
    fold: bool = True

    @property
    def call(self) -> Call:
        assert self.question.call is not None
        return self.question.call

    @property
    def plan(self) -> Plan:
        return self.question.plan

    @property
    def stack(self) -> Stack | None:
        """The stack of equal layers of which a few are enough to analyse; None if there is none that the plan treats
        alike, or a choice is open that needs all layers."""
        question = self.question
        if not self.fold or question.automatic or question.budgeted:
            return None
        stack = find_stack(question.model)
        return stack if stack is not None and treats_alike(question.plan, question.model, stack) else None

    def program(self) -> Program:
        """The call under the plan that :func:`shardgraph.search.decide.decide` decides for it."""
        captures = Captures()
        plan = decide(self.question, captures)
        return lower(captures.take(self.question.captured, plan), plan, self.question.shapes)

    def shallow(self, stack: Stack) -> Iterator[Source]:
        """The same analysis for copies of the model with only a few layers of its ``stack``."""
        for layers in SHALLOW:
            yield self._of(shortened(self.question.model, stack, layers), self.plan)

    def shortened(self, stack: Stack, plan: Plan) -> Source:
        """The same analysis under a pipeline of fewer layers of ``stack``, those that ``plan`` balances."""
        assert plan.pipeline is not None
        return self._of(shortened(self.question.model, stack, sum(plan.pipeline.balance)), plan)

    def _of(self, model: nn.Module, plan: Plan) -> Source:
        call = replace(self.call, model=model)
        return replace(self, question=replace(self.question, model=model, plan=plan, call=call))

    def resized(self, batch: int, sequence: int = 0) -> Source:
        """The same analysis for a call of other sizes; see :meth:`Call.resized`."""
        return replace(self, question=replace(self.question, call=self.call.resized(batch, sequence)))
