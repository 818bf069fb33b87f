"""The costs of a model's layers for each division of its operators and each recomputation, found when asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardgraph.capture.stacks import Stack
from shardgraph.errors import PlanError
from shardgraph.ir.fused import ATTENTION
from shardgraph.passes.chunking.chunk_loss import chunks_of, scores_of
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.search.depths import PLACED
from shardgraph.search.divided_costs import Slower, among, both, slower
from shardgraph.search.layer_costs import LayerCosts, layer_costs, takes_another, whole_costs, with_others
from shardgraph.search.layouts import Layout
from shardgraph.search.source import Source

SMALL = 20
"""Parameters of a model whose programs take no time to make and analyse: its costs are found for each batch. Those of
larger ones are scaled from the batch of the call, as operations that are large enough are."""


_UNDIVIDED = 1.5
"""Costs of fewer ranks follow from those of the most if computation takes at most so many times what it would if all
of it were divided."""


@dataclass
class CostTable:
    """Costs of the model of ``source``, from programs of a few of its layers, or of all if it has no equal ones.

    Time includes waiting for copies of offloaded activations. ``remarks`` say how close the integer program came to the
    fastest placements.

    Placements of operators take seconds, so they are assigned for one ``degree``; the costs of a lower one are between
    those and the undivided ones if that divides nearly all work, and those of more ranks, and of most pairs of axes,
    follow from them (:mod:`.divided_costs`).
    """

    source: Source
    degree: int
    remarks: dict[str, None] = field(default_factory=dict, init=False)
    _known: dict[tuple[object, ...], LayerCosts | None] = field(default_factory=dict, init=False)
    _scaled: dict[tuple[object, ...], LayerCosts | None] = field(default_factory=dict, init=False)

    def of(self, layout: Layout, links: float = 1.0) -> LayerCosts | None:
        """The costs with operators divided, activations recomputed and offloaded as in a layout; None if that cannot
        be. The links that operators use have ``links`` times the bandwidth of the cluster's."""
        chunks = (layout.chunked, layout.stages > 1, layout.batch) if layout.chunked else None
        key = self._key(layout), chunks, links
        if key not in self._scaled:
            costs = self._divided(replace(layout, chunked=0))
            if costs is not None and layout.chunked:
                costs = self._in_chunks(costs, layout)
            self._scaled[key] = None if costs is None else costs.with_links_faster(links)
        return self._scaled[key]

    def _divided(self, layout: Layout) -> LayerCosts | None:
        sizes = dict(layout.dividing)
        filling = set(sizes) == {"cp", "tp"} and layout.degree == self.degree
        if len(sizes) > 1 and not filling:
            return self._along_several(layout)
        if layout.degree in (1, self.degree) or filling:
            return self._priced(layout)
        ((axis, ranks),) = sizes.items()
        if ranks > self.degree:
            return self._along(layout, axis)
        one, divided = (self._priced(layout.along(axis, each)) for each in (1, self.degree))
        if one is None or divided is None or not _shrinks(one, divided, self.degree):  # too few experts, or heads
            return self._priced(layout)
        if axis == "cp":  # a ring is hidden among fewer ranks too
            return one.divided_by(ranks, divided, self.degree)
        return among(one, divided, axis, self.degree, ranks, self._slower(layout, axis, self.degree, one))

    def _along_several(self, layout: Layout) -> LayerCosts | None:
        """The costs of a division along the outermost axis, and of that along the others, together."""
        (outer, ranks), *_ = layout.dividing
        rest = layout.along(outer, 1)
        one, first, second = self._priced(layout.undivided), self._along(layout, outer), self._divided(rest)
        if one is None or first is None or second is None:
            return None
        return both(one, outer, first, ranks, second, rest.degree)

    def _along(self, layout: Layout, axis: str) -> LayerCosts | None:
        """The costs of a layout's division along one of its axes alone, with the ranks of that axis where they are."""
        ranks = dict(layout.dividing)[axis]
        few = min(ranks, self.degree)
        one, near = self._priced(layout.undivided), self._divided(layout.undivided.along(axis, few))
        if one is None or near is None or (axis == "tp" and ranks > few and self._heads % ranks):
            return None
        return among(one, near, axis, few, ranks, self._slower(layout, axis, few, one))

    def _slower(self, layout: Layout, axis: str, few: int, one: LayerCosts) -> Slower:
        """How much longer collectives along an axis of a layout take than among a ``few`` ranks of a node."""
        machine = self.source.question.machine
        far = machine.group_of(layout.dividing, axis)
        return slower(machine, axis, far, few, one.crossing, layout.whole_activations)

    def _in_chunks(self, costs: LayerCosts, layout: Layout) -> LayerCosts | None:
        """The costs with scores in chunks, which changes those of ranks that divide the model by their share; with
        stages those of a step that returns its loss alone. Chunks have one size, whatever the batch."""
        alone = self._by_one_rank(layout)
        table, scores = self._of_step if layout.stages > 1 else self, self.scores(layout)
        measured = next((nbytes for nbytes in chunks_of(scores) if nbytes <= layout.chunked), 0)
        whole, chunked = self._priced(alone), table._priced(replace(alone, chunked=measured))
        if whole is None or chunked is None:
            return None
        freed = whole.working - chunked.working
        if measured:
            of_batch = layout.chunked * costs.batch / layout.batch
            freed *= max(0.0, scores - of_batch) / (scores - measured)
        return costs.without(whole.tail.plus(chunked.tail, -1), freed, 1 / layout.degree)

    def without_loss(self, layout: Layout) -> LayerCosts | None:
        """The costs of a layout as if the loss took no room: in chunks of any size it takes no less."""
        costs, whole = self.of(layout), self._priced(self._by_one_rank(layout))
        return None if costs is None or whole is None else costs.without(whole.tail, whole.working, 1 / layout.degree)

    def _by_one_rank(self, layout: Layout) -> Layout:
        """The layout of one rank by itself, by which is known what its loss costs."""
        return Layout(data="ddp", recompute=layout.recompute, offload=layout.offload, batch=layout.batch)

    def scores(self, layout: Layout) -> int:
        """Bytes of scores of the call's loss that can be computed in chunks under a layout."""
        return self._of_step._scores if layout.stages > 1 else self._scores

    @cached_property
    def _scores(self) -> int:
        return 0 if self.source.depths is None or self._graph is None else scores_of(self._graph)

    @cached_property
    def _heads(self) -> int:
        """What ranks that divide all attentions' heads of queries divide; 0 without attention."""
        nodes = [] if self._graph is None else self._graph.graph.find_nodes(op="call_function", target=ATTENTION)
        return math.gcd(*(node.args[0].meta["val"].shape[1] for node in nodes))

    @cached_property
    def _graph(self) -> fx.GraphModule | None:
        """The captured graph; None if there is none, as of a step of a model without a loss."""
        return self.source.graph(self.source.question.with_options(Layout().plan()))

    @cached_property
    def _of_step(self) -> CostTable:
        return CostTable(self.source.of_step, self.degree)

    def _priced(self, layout: Layout) -> LayerCosts | None:
        *_, offload, batch = self._key(layout)
        key = self._key(layout), layout.chunked
        if key not in self._known:
            alone = Layout(
                tp=layout.tp, cp=layout.cp, ep=layout.ep, data="ddp", recompute=layout.recompute, offload=offload,
                chunked=layout.chunked, whole_activations=layout.whole_activations,
            )  # fmt: skip
            plan = replace(self.source.question.with_options(alone.plan()), recompute=layout.recompute, bucket=0)
            try:
                self._known[key] = self._analysed(plan, batch)
            except PlanError:  # its operators cannot be divided so
                self._known[key] = None
        return self._known[key]

    def _key(self, layout: Layout) -> tuple[int, int, int, bool, str, str, int | None]:
        """All of a layout that its layers' costs depend on: what is done with parameters is the estimate's."""
        offload = "activations" if layout.offloads_activations else ""
        whole, batch = layout.whole_activations and layout.tp > 1, layout.batch if self._small else None
        return layout.tp, layout.cp, layout.ep, whole, layout.recompute, offload, batch

    @cached_property
    def _small(self) -> bool:
        return self.source.depths is None and len(self.source.question.shapes) <= SMALL

    def _analysed(self, plan: Plan, batch: int | None) -> LayerCosts:
        depths, call = self.source.depths, self.source.call
        if depths is None:
            source = self.source
            if batch is not None and batch != call.batch:
                source = source.resized(batch, call.sequence)
            program, analysis = program_of(source, plan)
            self._say_gaps(plan, program)
            return whole_costs(program, analysis)
        few = program_of(self.source.with_few(plan), plan)
        self._say_gaps(plan, few[0])
        more = self._with_one_more(depths.stack, plan) if takes_another(few[1], depths.stack) else None
        costs = layer_costs(few, more, depths.stack, PLACED)
        for other in depths.others:
            costs = with_others(costs, few, self._with_one_more(other, plan), depths.stack, other.units - PLACED)
        return costs

    def _with_one_more(self, stack: Stack, plan: Plan) -> tuple[Program, Analysis]:
        return program_of(self.source.with_few(plan, one_more=stack), plan)

    def _say_gaps(self, plan: Plan, program: Program) -> None:
        """Remark on the gap of each axis' placements, which a program notes if it is above 0."""
        for axis, _ in plan.operators:
            subject = f"placements along {axis!r}"
            proved = " are the fastest: the bound of their integer program is reached"
            told = next((note.removeprefix(subject) for note in program.notes if note.startswith(subject)), proved)
            # The plan that is chosen need not have the axis.
            self.remarks[f"where layouts are divided along {axis!r}, placements{told}"] = None


def _shrinks(one: LayerCosts, divided: LayerCosts, degree: int) -> bool:
    """Whether nearly all work of a layer is divided, without many more operations: that of an attention with fewer
    heads than ranks is not, but may be among fewer ranks."""
    whole, mine = (costs.layer if costs.layers else costs.whole for costs in (one, divided))
    started = whole.started + whole.started_back
    expected = started + (whole.forward + whole.backward - started) / degree
    computation = mine.forward + mine.backward - mine.exposed - mine.exposed_back
    return computation <= _UNDIVIDED * expected


def program_of(source: Source, plan: Plan) -> tuple[Program, Analysis]:
    """The program of the call of ``source`` under ``plan``, and its analysis."""
    question = source.question
    assert question.call is not None
    program = lower(source.captures.joint(question.call, plan), plan, question.shapes)
    return program, analyze_program(program, question.machine, optimizer=question.optimizer, fused=source.fused)
