"""The estimates of all layouts of a question's ranks: the outer storey of the search."""

from __future__ import annotations

import copy
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.passes.chunking.chunk_loss import chunks_of
from shardgraph.report.folding import unlike
from shardgraph.search.batches import Batches
from shardgraph.search.cost_table import CostTable
from shardgraph.search.estimate import Estimate, estimate
from shardgraph.search.exact import FEW
from shardgraph.search.layer_costs import LayerCosts
from shardgraph.search.layouts import Layout, layouts, layouts_on
from shardgraph.search.limit import UNLIMITED, Limit
from shardgraph.search.source import Source
from shardgraph.search.stages import blocks_of
from shardgraph.search.ways import OFFLOADS

Estimated = tuple[Layout, Estimate]

_IDLE = 1.03
"""Operators are divided if ranks that only divide the batch take more than this times the time of their computation."""

_ROOMY = 0.8
"""Nothing is recomputed if memory without it is estimated at no more than this part of the budget."""

_WORTHWHILE = 0.99
"""Layers that are not treated alike are priced one by one, and so only if a layout of them is estimated to take no more
than this part of the time of those that treat all alike. Likewise losses in chunks, whose costs take programs of their
own."""

_GATHERED_AGAIN = 1.5
"""A step that waits for parameters alone takes so many times as long if they are gathered again in backward."""

_UNDIVIDED = "operators were not divided"

_DEGREES = (8, 4, 2)

_LONG = 2**14
"""Tokens of sequences that are divided among ranks: shorter ones leave each so little that its products are no longer
efficient, and ``tp`` divides more."""


class Estimates:
    """Estimates for the call of ``source``, in which a rank may use ``budget`` bytes; with ``pipelines``, layouts may
    have stages. If ``own_batches``, ranks share a batch only where nothing else fits. Once the ``limit`` is over, and
    something is estimated to fit, nothing else gets an estimate. ``remarks`` are what was left out, and why."""

    def __init__(
        self, source: Source, budget: int, pipelines: bool, own_batches: bool = False, limit: Limit = UNLIMITED
    ) -> None:
        self._source, self._question, self._budget, self._pipelines = source, source.question, budget, pipelines
        self._limit, self._fits = limit, False
        self._own_batches, self._recomputations = own_batches, source.recomputations
        self._mesh = None if self._question.free_mesh else self._question.plan.mesh
        self._axes = ["tp"] + ["cp"] * (source.call.sequence >= _LONG) + ["ep"] * self._may_have_experts
        self._stack = None if source.depths is None else source.depths.stack
        self._layers = 0 if self._stack is None else self._stack.layers - self._stack.head
        machine = source.question.machine
        ranks = source.question.plan.world_size
        self._degrees = [d for d in _DEGREES if ranks % d == 0 and d <= machine.closest]
        degrees = {layout.degree for layout in self._layouts(ranks, machine, pipelines)} if self._mesh else set()
        if 1 < max(degrees, default=1) <= machine.closest:
            self._degrees = sorted(degrees)
        self._costs = CostTable(source, max(self._degrees, default=1))
        self.remarks = self._costs.remarks
        stack = source.stack_of_equal_layers
        if stack is not None and (attributes := unlike(source.question.model, stack)):
            second = "second" if stack.head == 0 and stack.period == 1 else "first that are alike"
            what = f"priced as if all layers of {stack.path} were like the {second}, though they differ in {attributes}"
            self.remarks[f"{what}: shardgraph.analyze has the price of a plan as it is"] = None

    def all(
        self,
        ranks: int,
        machine: Cluster,
        batches: Batches,
        bound: Callable[[Sequence[Estimated]], float] = lambda estimated: math.inf,
    ) -> list[Estimated]:
        """All layouts of ``ranks`` ranks of a cluster, the fastest first; operators are divided only where that may be
        faster, or nothing fits.

        ``bound`` of those that recompute nothing are seconds per sample: what is estimated to take longer is not
        estimated with more recomputed, which would take longer still.
        """
        free = self._layouts(ranks, machine, self._pipelines)
        every = [layout for layout in free if layout.ep == 1 or self._divides_experts(layout.ep)]
        inside = [layout for layout in every if layout.degree in (1, *self._degrees)]
        beyond = [layout for layout in every if layout.degree > machine.closest and self._degrees]
        estimated: list[Estimated] = []
        self._undivided: list[Layout] = []
        for shared, group in itertools.product((False, True), (inside, beyond)):
            which = [layout for layout in group if layout.shared == shared]
            if self._may_pay(estimated):
                estimated += self._estimated(which, machine, batches, bound)
            elif which:
                self._undivided += which if group is inside else []
                what = "nothing was divided over several nodes" if group is beyond else _UNDIVIDED
                self.remarks[f"{what}: {self._why_not}"] = None
        return _fastest_first(self._with_smaller(estimated, machine))

    def divided_too(
        self, estimated: Sequence[Estimated], fastest: float, ranks: int, machine: Cluster, batches: Batches
    ) -> list[Estimated]:
        """Layouts that divide operators, if :meth:`all` left them out and that was wrong: estimates of memory were too
        low, and the ``fastest`` of what fits takes more seconds per sample than what was estimated to fit."""
        slow = math.inf if self._own_batches else _compute(estimated) * _IDLE**2
        if not self._undivided or (fastest < math.inf and fastest <= slow):
            return []
        for remark in [remark for remark in self.remarks if remark.startswith(_UNDIVIDED)]:
            del self.remarks[remark]
        return _fastest_first(self._estimated(self._undivided, machine, batches))

    def _layouts(self, ranks: int, machine: Cluster, pipelines: bool) -> Iterator[Layout]:
        """All layouts of the mesh that is asked for; of any mesh if none is."""
        blocks = self._blocks[0] if pipelines else 1
        if self._mesh is not None:
            return layouts_on(self._mesh, blocks, pipelines=pipelines)
        return layouts(ranks, machine, blocks, pipelines=pipelines, axes=self._axes)

    @cached_property
    def _blocks(self) -> tuple[int, float]:
        """How many stages the model can have at most; and if it has no equal layers, of which those are units, the
        bytes that pass from one to the next."""
        if self._stack is not None:
            return self._stack.units, 0.0
        source = self._source
        try:
            return blocks_of(source.captures.joint(source.call, self._question.with_options(Layout().plan())))
        except PlanError:  # nothing runs one after the other
            return 1, 0.0

    @property
    def left_out(self) -> Iterator[str]:
        """What no layout has, though a plan may, and why."""
        if self._pipelines and self._blocks[0] > 1:
            yield (
                "not searched with stages: layers of which some are kept gathered or save in host memory, "
                "operators divided over several nodes, or with whole activations between them, since pipelines "
                "take longest to price: ask for them in the plan"
            )

    def offloaded(self, ranks: int, machine: Cluster, batches: Batches) -> list[Estimated]:
        """All layouts without stages that keep something in host memory, the fastest first."""
        if not self._may_offload(machine):
            return []
        every = self._layouts(ranks, machine, pipelines=False)
        divided = [layout for layout in every if layout.degree in (1, *self._degrees)]
        offloaded = [replace(layout, offload=what) for layout in divided for what in OFFLOADS]
        return _fastest_first(self._estimated(offloaded, machine, batches))

    def costs(self, layout: Layout) -> LayerCosts:
        """The costs of the model's layers under a layout that has an estimate."""
        costs = self._costs.of(layout)
        assert costs is not None
        return costs

    def again(self, layout: Layout, machine: Cluster) -> Estimate | None:
        """The estimate of a layout on some cluster; None if its operators cannot be divided so.

        A recomputation that is still to be chosen takes no time if everything fits without one, and leaves as little
        memory as a full one.
        """
        kinds = ("none", "full") if layout.recompute == "budget" else (layout.recompute,)
        links = self._links(layout, machine)
        guesses = []
        for kind in kinds:
            known = layout if layout.recompute == kind else replace(layout, recompute=kind)
            if (costs := self._costs.of(known, links)) is None:
                return None
            if layout.full and (whole := self._costs.of(replace(known, recompute="full"), links)) is not None:
                costs = costs.with_some_as(whole, min(costs.layers, layout.full * layout.stages * layout.chunks))
            if layout.stages > 1 and self._stack is None:
                costs = costs.in_blocks(*self._blocks)
            guesses.append(estimate(known, costs, machine, self._question.optimizer))
        return replace(guesses[0], memory=min(guess.memory for guess in guesses))

    def within(self, budget: int, estimated: Sequence[Estimated], machine: Cluster) -> list[Estimated]:
        """The same layouts if a rank may use ``budget`` bytes: of their layers as few are recomputed, say, or as many
        kept gathered, as then fit."""
        other = copy.copy(self)
        other._budget = budget
        plain = [pair for pair in estimated if not pair[0].kept and pair[0] == pair[0].plain_in_memory]
        return other._with_smaller(plain, machine)

    def fitted(self, layout: Layout, machine: Cluster, more: float = 0.0) -> Layout | None:
        """The layout of layers that are not treated alike with as few of them recomputed, or as many kept gathered, as
        fit the memory, which is ``more`` than estimated; None if no number does."""

        def fits(layers: int) -> bool:
            guess = self.again(layout.with_layers(layers), machine)
            return guess is not None and guess.memory + more <= self._budget

        step = 1 if self._stack is None or layout.stages == 1 else self._stack.period
        numbers = range(0, -(-self._layers // (layout.stages * layout.chunks)) + step, step)
        if layout.full or layout.away:
            place = bisect_left(numbers, True, key=fits)
        else:
            place = bisect_left(numbers, True, key=lambda number: not fits(number)) - 1
        return layout.with_layers(numbers[place]) if 0 <= place < len(numbers) else None

    def _with_smaller(self, estimated: Sequence[Estimated], machine: Cluster) -> list[Estimated]:
        """These, and of those that do not fit, or leave room, layouts that differ from them only in what is held."""
        estimated = [*estimated, *self._in_chunks(estimated, machine)]
        estimated += self._saved_on_host(estimated, machine)
        return [*estimated, *self._mixtures(estimated, machine)]

    def _may_offload(self, machine: Cluster) -> bool:
        """Whether something may be in host memory, and it is open what; a CPU's memory is its host's."""
        device = machine.device
        return device.host is not None and not device.is_cpu and self._question.offload is None

    def _fits_host(self, layout: Layout, machine: Cluster) -> bool:
        """Whether what some layers save fits the memory of the host."""
        if not layout.away:
            return True
        costs = self.costs(replace(layout, recompute="none") if layout.recompute == "budget" else layout)
        return layout.away * costs.layer.saved * layout.batch / costs.batch <= machine.device.linked_host.memory

    def _saved_on_host(self, estimated: Sequence[Estimated], machine: Cluster) -> list[Estimated]:
        """Layouts that keep in host memory what all layers save, of those that would be faster than what fits even if
        copies take no more time than their bytes, and that do not fit without."""
        if not self._may_offload(machine) or not self._layers:
            return []
        best = _WORTHWHILE * self._best_of(estimated)
        large = [pair for pair in estimated if pair[1].memory > self._budget and pair[0].stages == 1]
        faster = [replace(layout, away=self._layers) for layout, guess in large if per_sample((layout, guess)) < best]
        least = self._guesses(faster, machine)
        fitting = [pair[0] for pair in least if pair[1].memory <= self._budget and per_sample(pair) < best]
        held = filter(lambda layout: self._fits_host(layout, machine), fitting)
        whole = (replace(layout, away=0, offload="activations") for layout in held)
        return list(self._guesses(whole, machine))

    def _in_chunks(self, estimated: Sequence[Estimated], machine: Cluster) -> list[Estimated]:
        """Layouts whose loss is computed in chunks, of those that would be faster than what fits, and do not; in small
        chunks where large ones do not fit."""
        large = [pair for pair in estimated if pair[1].memory > self._budget]
        found: list[Estimated] = []
        while large and self._may_be_in_chunks:
            best = _WORTHWHILE * self._best_of([*estimated, *found])
            faster = (layout for layout, guess in large if per_sample((layout, guess)) < best)
            possible = (self._in_less(layout) for layout in faster if self._fits_in_chunks(layout, machine))
            chunked = list(self._guesses(filter(None, possible), machine))
            found += chunked
            large = [pair for pair in chunked if pair[1].memory > self._budget]
        return found

    def _fits_in_chunks(self, layout: Layout, machine: Cluster) -> bool:
        """Whether a layout that does not fit may do so with its loss in chunks, alone or with something else that does
        not fit without chunks either."""
        if self._may_be_mixed:
            return True
        ways = [replace(layout, recompute="full") if layout.recompute == "budget" else layout]
        if self._may_offload(machine) and layout.stages == 1:
            ways.append(replace(ways[0], away=self._layers))
        for way in ways:
            costs, guess = self._costs.without_loss(way), self.again(way, machine)
            if costs is None or guess is None or guess.memory <= self._budget:
                continue
            if estimate(way, costs, machine, self._question.optimizer).memory <= self._budget:
                return True
        return False

    def _in_less(self, layout: Layout) -> Layout | None:
        """The layout with its loss in the largest chunks that are smaller than now."""
        scores = self._costs.scores(layout) * layout.batch / self._source.call.batch
        smaller = [nbytes for nbytes in chunks_of(scores) if not layout.chunked or nbytes < layout.chunked]
        return replace(layout, chunked=smaller[0]) if smaller else None

    @cached_property
    def _may_be_in_chunks(self) -> bool:
        """Whether chunks of the loss of a deep model are open; of others they are chosen with the recomputation."""
        return self._stack is not None and self._question.with_options(Layout().plan()).loss_chunk is None

    def _best_of(self, estimated: Sequence[Estimated]) -> float:
        """The least seconds per sample of what fits."""
        return min((per_sample(pair) for pair in estimated if pair[1].memory <= self._budget), default=math.inf)

    def _mixtures(self, estimated: Sequence[Estimated], machine: Cluster) -> list[Estimated]:
        """Layouts in which some layers are recomputed, or what they save is in host memory, or their parameters are
        kept gathered, and the others are not, where those that treat all alike are slower or do not fit."""
        best = _WORTHWHILE * self._best_of(estimated)
        seeds = [seed for pair in estimated for seed in self._seeds(pair, best, machine)]
        if not self._may_be_mixed and any(seed.stages == 1 for seed in seeds):
            self.remarks[
                f"the {self._layers} equal layers are treated alike, but in stages: where they are not, all of them "
                f"are priced one by one, which is done for up to {FEW}; annotations of some (recompute(), "
                "keep_gathered()) hold in every layout"
            ] = None
            seeds = [seed for seed in seeds if seed.stages > 1]
        mixed = (self.fitted(layout, machine) for layout in seeds)
        fitting = (layout for layout in mixed if layout is not None and layout.mixed)
        found = self._guesses((layout for layout in fitting if self._fits_host(layout, machine)), machine)
        return [pair for pair in found if per_sample(pair) < best]

    @property
    def _may_be_mixed(self) -> bool:
        """Whether layouts are priced whose layers are not treated alike."""
        return self._stack is None or self._stack.layers <= FEW

    def _seeds(self, pair: Estimated, best: float, machine: Cluster) -> Iterator[Layout]:
        """Layouts with one layer that is treated otherwise than in this one, if enough of them may bring less than
        ``best`` seconds per sample."""
        layout, guess = pair
        if not self._layers:
            return
        if guess.memory > self._budget:
            if layout.recompute == "full" or layout.offload or per_sample(pair) >= best:
                return
            if "full" in self._recomputations:
                yield replace(layout, full=1)
            if layout.stages == 1 and self._may_offload(machine):
                yield replace(layout, away=1)
        elif layout.stages > 1:
            return
        elif layout.data == "fsdp" and layout.shard > layout.ep == 1 and per_sample(pair) < best * _GATHERED_AGAIN:
            all_kept = replace(layout, kept=self._layers)
            if (least := self.again(all_kept, machine)) is not None and per_sample((all_kept, least)) < best:
                yield replace(layout, kept=1)

    def _estimated(
        self,
        every: Iterable[Layout],
        machine: Cluster,
        batches: Batches,
        bound: Callable[[Sequence[Estimated]], float] = lambda estimated: math.inf,
    ) -> list[Estimated]:
        """The layouts with their batches, and with the more recomputed, the less of them fits; arguments as
        :meth:`all`."""
        least, *more = self._recomputations
        batched = (replace(layout, recompute=least) for base in every for layout in batches.of(base))
        estimated = list(self._guesses(batched, machine))
        longest = bound(estimated) if more else 0.0
        latest = estimated
        for recompute in more:
            again = [
                replace(layout, recompute=recompute)
                for layout, guess in latest
                if guess.memory > self._budget * _ROOMY and per_sample((layout, guess)) <= longest
            ]
            latest = list(self._guesses(again, machine))
            estimated += latest
        return estimated

    def _guesses(self, every: Iterable[Layout], machine: Cluster) -> Iterator[Estimated]:
        for layout in every:
            if self._fits and self._limit.over:
                return
            if (guess := self.again(layout, machine)) is not None:
                self._fits |= guess.memory <= self._budget
                yield layout, guess

    def _links(self, layout: Layout, machine: Cluster) -> float:
        """The bandwidth of the links that divided operators use, beside that of the question's cluster."""
        known = self._question.machine
        if layout.degree > known.devices_per_node and machine.inter and known.inter:
            return machine.inter.bandwidth / known.inter.bandwidth
        return machine.intra.bandwidth / known.intra.bandwidth

    @property
    def _why_not(self) -> str:
        """Why ranks do not share what others may."""
        if self._own_batches:
            return "each rank keeps a batch of its own where that fits; shardgraph.plan searches the rest"
        return f"ranks that divide less spend at least {1 / _IDLE:.0%} of a step on its computation"

    @property
    def _may_have_experts(self) -> bool:
        """Whether there are parameters of three dimensions, as those of experts are that can be divided."""
        return self._divides_experts(1)

    def _divides_experts(self, ranks: int) -> bool:
        """Whether there are any whose experts so many ranks can divide equally."""
        return any(experts % ranks == 0 for experts in self._experts)

    @cached_property
    def _experts(self) -> set[int]:
        """The sizes of the first of three dimensions of parameters."""
        return {shape[0] for shape in self._question.shapes.values() if len(shape) == 3}

    def _may_pay(self, undivided: Sequence[Estimated]) -> bool:
        """Whether ranks wait, or nothing fits, if they divide the batch alone: no layout is faster than all of the
        computation, divided evenly."""
        fitting = [guess.seconds / layout.samples for layout, guess in undivided if guess.memory <= self._budget]
        if self._own_batches:
            return not fitting
        return not fitting or min(fitting) > _compute(undivided) * _IDLE


def _compute(estimated: Sequence[Estimated]) -> float:
    """The least seconds of computation per sample."""
    return min((guess.compute / layout.samples for layout, guess in estimated), default=0.0)


def _fastest_first(estimated: Iterable[Estimated]) -> list[Estimated]:
    """Of equally fast ones those first that do nothing to save memory, which their estimates may overrate."""
    return sorted(estimated, key=lambda pair: (per_sample(pair), pair[0] != pair[0].plain_in_memory, pair[1].memory))


def per_sample(pair: Estimated) -> float:
    """The estimated seconds for a sample, by which layouts are compared."""
    return pair[1].seconds / pair[0].samples
