"""The source of an analysis: a question, which can be decided again for other sizes and for fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import fx

from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.stacks import Stack
from shardgraph.errors import ShardGraphError
from shardgraph.ir import JointGraph
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.report.folding import find_others, find_stack, unlike
from shardgraph.report.treatments import treats_alike
from shardgraph.search.decide import decide
from shardgraph.search.depths import PLACED, Depths
from shardgraph.search.question import Question

CheckCut = Callable[[JointGraph, Call, Plan, Captures], None]


def unchecked(joint: JointGraph, call: Call, plan: Plan, captures: Captures) -> None:
    """Raises no error, for a search without pipelines."""


@dataclass(frozen=True)
class Source:
    """A question about one rank's call, and how its answer is analysed.

    ``fused``: price chains of pointwise operations as fused; ``fold``: analyse only a few layers of a stack of equal
    layers, if that is enough. ``captures`` has graphs of the call, ``depths`` those of other numbers of layers.
    ``check_cut`` raises ShardGraphError of a captured call whose batch cannot be cut into microbatches.
    """

    question: Question
    fused: bool = False
    fold: bool = True
    captures: Captures = field(default_factory=Captures, repr=False, compare=False)
    depths: Depths | None = field(default=None, repr=False, compare=False)
    check_cut: CheckCut = field(default=unchecked, repr=False, compare=False)

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
        alike, or a choice is open that needs all layers.

        Of layers that differ in their attributes (:func:`unlike`), few are enough for a search, which says so.
        """
        if self.question.automatic or self.question.budgeted:
            return None
        stack = self.stack_of_equal_layers
        searches = self.depths is not None
        return None if stack is not None and not searches and unlike(self.question.model, stack) else stack

    @property
    def stack_but_for_annotations(self) -> Stack | None:
        """The same if annotations may tell equal layers apart."""
        return replace(self, question=replace(self.question, plan=replace(self.plan, annotations=()))).stack

    @property
    def stack_of_equal_layers(self) -> Stack | None:
        """The stack that the plan treats alike, if there is one, whatever is open."""
        question = self.question
        found = find_stack(question.model) if self.depths is None else self.depths.stack
        stack = found if self.fold else None
        return stack if stack is not None and treats_alike(question.plan, question.model, stack) else None

    @property
    def recomputations(self) -> Sequence[str]:
        """What a search tries that backward recomputes: what is asked for; else from nothing to all, of a model that is
        captured whole what an integer program finds."""
        if self.question.recompute is not None:
            return [self.question.recompute]
        return ["budget"] if self.stack_of_equal_layers is None else ["none", "selective", "full"]

    @property
    def of_step(self) -> Source:
        """The same for a step whose model returns its loss alone, as the last stage of a pipeline does."""
        if self.call.loss_fn is not None:
            return self
        return replace(self, question=replace(self.question, call=replace(self.call, loss_fn=own_loss)))

    def program(self) -> Program:
        """The call under the plan that :func:`shardgraph.search.decide.decide` decides for it."""
        plan = decide(self.question, self.captures)
        return lower(self.captures.take(self.question.captured, plan), plan, self.question.shapes)

    @property
    def of_few_layers(self) -> Source:
        """The same with copies of the model that have few of its equal layers, if the plan treats these alike: all that
        is priced from it shares them."""
        stack = self.stack_of_equal_layers
        return self if stack is None else replace(self, depths=self.depths_of(stack))

    def graph(self, plan: Plan) -> fx.GraphModule | None:
        """The captured graph under ``plan``, of a few layers if the model is deep; None if it cannot be captured."""
        with suppress(ShardGraphError):
            few = self.with_few(plan)
            return few.captures.joint(few.question.captured, plan).module
        return None

    def depths_of(self, stack: Stack) -> Depths:
        """The copies of the model with other numbers of layers: the given ones, or new ones."""
        if self.depths is not None:
            return self.depths
        model = self.question.model
        others = [each for each in find_others(model, stack) if treats_alike(self.plan, model, each)]
        for further, counted in dict.fromkeys([(tuple(others), False), (tuple(others), True), ((), False)]):
            depths = Depths(model, stack, further, counted)
            if replace(self, depths=depths).graph(self.plan) is not None:
                return depths
        return Depths(model, stack)  # as of one that reads its fifth layer

    def with_few(self, plan: Plan, one_more: Stack | None = None) -> Source:
        """The same analysis under ``plan`` of a copy of the model with :data:`PLACED` units of each of its stacks, with
        ``one_more`` of one of them; of the whole model if it has no stacks."""
        few = self
        while few.depths is not None:
            few = few.at(few.depths, PLACED + (few.depths.stack == one_more), plan)
        return few

    def shallow(self, depths: Depths, shallow: Sequence[int]) -> Iterator[Source]:
        """The same analysis for copies of the model with only a few units of its stack."""
        for units in shallow:
            yield self.at(depths, units, self.plan)

    def at(self, depths: Depths, units: int, plan: Plan) -> Source:
        """The same analysis under ``plan`` of a copy of the model with so many units, all of whose layers are analysed,
        but for those of further stacks."""
        model, inner = depths.model(units), depths.within(units)
        question = replace(self.question, model=model, plan=plan, call=replace(self.call, model=model))
        fold = inner is not None
        return replace(self, question=question, captures=depths.captures(units), depths=inner, fold=fold)

    def resized(self, batch: int, sequence: int = 0) -> Source:
        """The same analysis for a call of other sizes; see :meth:`Call.resized`."""
        return replace(self, question=replace(self.question, call=self.call.resized(batch, sequence)))
