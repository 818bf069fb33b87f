"""``plan="auto"``: the layout of ranks, recomputation and microbatches with the least predicted time per sample.

The outer storey estimates every layout in closed form (:mod:`.estimate`) from the costs of the model's layers
(:mod:`.layer_costs`); the inner one is the placement of operators by an integer program and, for models that are
captured whole, the recomputation of operations by another. The layouts with the best estimates are priced exactly, as
``analyze`` does, in their order, until the next one is estimated to be slower than the fastest that fits by more than
estimates have been wrong. So what is returned was priced exactly.

Nothing here grows with the number of devices, or of layers: a few layers are captured, and never a whole deep model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from shardgraph.errors import CaptureError, PlanError, ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.search.batches import Batches
from shardgraph.search.buckets import bucket_bytes
from shardgraph.search.cost_table import SMALL
from shardgraph.search.estimate import Estimate, stage_layers
from shardgraph.search.estimates import Estimated, Estimates, per_sample
from shardgraph.search.exact import Priced, UnlikeError, cheapest, in_other_buckets, price
from shardgraph.search.layouts import Layout
from shardgraph.search.limit import UNLIMITED, Limit
from shardgraph.search.machine import with_devices
from shardgraph.search.mixtures import mixed
from shardgraph.search.parameter_choices import with_kept, with_vectors_replicated
from shardgraph.search.source import Source
from shardgraph.search.what_if import what_if
from shardgraph.sizes import format_seconds

_DOUBT = 1.03
"""How much more than exact prices estimates of seconds have been, at most: ``benchmarks/search.py`` prints the ratios.
Where a search sees more, it takes that. A layout is not priced if its estimate, less so much, is more than the best
price."""

_DOUBT_OF_FEW = 1.25
"""Likewise for models without many equal layers, of which estimates know less."""

_DOUBT_OF_SMALL = 2.0
"""Likewise for small models, whose operations take little but their overhead, and which are priced in no time."""

_DOUBT_OF_SCHEDULES = 1.1
"""Likewise for pipelines, if each schedule is priced once: ZBV's estimates have been up to 1.09 of exact prices."""

_BOUNDS = 4
"""Meshes whose bounds are listed."""

_MEMORY_DOUBT = 1.25
"""Likewise of memory: estimates were at most so much above the exact peaks."""

_NEAR = 1.01
"""Plans that take less than this many times the least are called alike."""

_HIDDEN = 0.002
"""Computation hides all communication of which no more than this part of a step is exposed."""

_FINALISTS = 3
"""If one fits, no more layouts are priced exactly once so many fit or cannot be priced, but the best of each preset."""

_MATTERS = 1.02
"""If buckets for the cluster make the best layout so many times as fast, others are priced with them too. Vectors are
replicated only if that makes the best plan so many times as fast: less has been lost on real ranks."""

_WAITS = 0.04
"""Of a step of many layers, what it waits for communication at least if other collectives are tried for it."""

_FEWER = 0.5
"""At most this part of what such a step waits for is spared if activations are whole between divided products: of three
gathers and two scatters for each pair of these there are two reductions then, which are a gather and a scatter each."""

_ADJUSTED = 2
"""Numbers of layers that are tried at most, of those that are not treated as the others; and layouts whose activations
are held whole."""

_TRIES = 12
"""Layouts that are priced exactly before those with the least memory are, if none of them fits."""

_SMALLEST = 2
"""Those with the least memory that are priced then."""

_WORTH_ALL_LAYERS = 0.01
"""The part of a step that a layout has to save by its estimate for all its layers to be analysed for its price."""

_FROM_ALL_LAYERS = 2
"""Layouts that are priced so at most."""

_TIMES_THE_DEVICES = (2, 4, 8, 16)
"""As many devices are tried where nothing fits."""

_OF_SMALL = 48
"""Layouts of a small model that are priced exactly at most, whether one fits or none: estimates know less of it."""


Bounds = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Found:
    """The answer of a search: exactly priced plans, those that fit first, and of these the fastest.

    ``estimated`` is the number of layouts with an estimate or a price. ``remarks`` are what was not searched and why,
    how far estimates were from exact prices, and what other devices would do. If nothing fits, ``larger`` is the best
    plan for twice as many devices, or for as many times two of them as it takes. ``bounds`` are the least seconds per
    sample of meshes with layouts that were not priced, the least first.
    """

    priced: Sequence[Priced]
    estimated: int
    remarks: Sequence[str]
    larger: Priced | None = None
    bounds: Bounds = ()


def search(
    source: Source,
    batches: Batches,
    budget: int,
    *,
    pipelines: bool,
    own_batches: bool = False,
    limit: float | None = None,
    show: Callable[[str], None] = lambda stage: None,
) -> Found:
    """Search all layouts of the question's ranks.

    ``budget`` are the bytes that a rank may use. With ``pipelines``, layouts may have stages. If ``own_batches``, ranks
    share a batch only where nothing else fits. After ``limit`` seconds no more layouts are estimated or priced, if one
    fits. ``show`` is called with the name of each step as it begins.

    Raises:
        CaptureError: the model cannot be traced into one graph.
    """
    within = Limit(limit)
    source = source.of_few_layers
    show("what a layer costs")
    question = source.question
    estimates = Estimates(source, budget, pipelines, own_batches, within)
    ranks, machine = question.plan.world_size, question.machine
    finals = Finals(source, estimates, budget, within, show)
    estimated = estimates.all(ranks, machine, batches, finals.bound)
    show("the best layouts")
    finals.price_best(estimated)
    if divided := estimates.divided_too(estimated, finals.fastest, ranks, machine, batches):
        finals.price_best(divided)
        estimated = [*estimated, *divided]
    if not finals.fits:
        finals.price_smallest([pair for pair in estimated if finals.may_fit(*pair)])
    if not finals.fits and (offloaded := estimates.offloaded(ranks, machine, batches)):
        finals.price_best(offloaded)
        estimated = [*estimated, *offloaded]
        if finals.fits:
            finals.remarks["nothing fits without offload: layouts with it, of all layers alike, were searched"] = None
    finals.finish(estimated)
    remarks = [*estimates.remarks, *estimates.left_out, *finals.remarks, *finals.compared(estimated)]
    if within.cut:
        remarks.append(f"the limit of {format_seconds(limit or 0.0)} ended the search: other layouts may be faster")
    else:
        remarks += what_if(estimates, estimated, budget, machine, batches, free_mesh=question.free_mesh)
        remarks += finals.alike()
    count = len(finals.layouts.union(layout for layout, _ in estimated))
    if finals.fits or within.cut:
        return Found(finals.ranked(), count, remarks, bounds=finals.bounds(estimated))
    show("more devices")
    return Found(finals.ranked(), count, remarks, _on_more(source, batches, budget, pipelines, own_batches, within))


def _on_more(
    source: Source, batches: Batches, budget: int, pipelines: bool, own_batches: bool, limit: Limit
) -> Priced | None:
    """The best plan for the least power of two times as many devices with which one fits, if any does."""
    question, ranks = source.question, source.question.plan.world_size
    for times in _TIMES_THE_DEVICES:
        if (machine := with_devices(question.machine, times * ranks)).world_size < times * ranks:
            break  # there is no network between nodes
        plan = replace(question.plan, mesh=(("dp", times * ranks),))
        larger = replace(source, question=replace(question, plan=plan, cluster=machine, free_mesh=True))
        estimates = Estimates(larger, budget, pipelines, own_batches, limit)
        finals = Finals(larger, estimates, budget, limit)
        for estimated in (estimates.all, estimates.offloaded):
            fitting = (pair[0] for pair in estimated(times * ranks, machine, batches) if pair[1].memory <= budget)
            for layout in itertools.islice(fitting, _FINALISTS):
                finals.price_all([layout])
                if finals.fits:
                    return finals.ranked()[0]
    return None


class Finals:
    """The exact prices of the layouts with the best estimates."""

    def __init__(
        self,
        source: Source,
        estimates: Estimates,
        budget: int,
        limit: Limit = UNLIMITED,
        show: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._show = show
        self._source, self._estimates, self._budget = source, estimates, budget
        self._question, self._machine = source.question, source.question.machine
        self._deep = source.depths is not None
        small = not self._deep and len(self._question.shapes) <= SMALL
        self._most, self._tries = (_OF_SMALL, _OF_SMALL) if small else (_FINALISTS, _TRIES)
        self._expected = _DOUBT if self._deep else _DOUBT_OF_SMALL if small else _DOUBT_OF_FEW
        self._limit = limit
        self._priced: dict[Layout, Priced | None] = {}
        self._guesses: dict[Layout, Estimate] = {}
        self._in_buckets: dict[Layout, Priced] = {}
        self._refined: list[Priced] = []
        self._unlike: set[tuple[str, bool]] = set()
        self.remarks: dict[str, None] = {}

    def price_best(self, estimated: Sequence[Estimated]) -> None:
        """Price the layouts with the best estimates."""
        self._guesses |= dict(estimated)
        if not self._deep:
            for layout, _ in estimated:
                if self.fits and self._limit.over:
                    break
                if layout.plain and layout.microbatches == 1 and not layout.offload:
                    self._price(layout)
                    if layout.data == "zero2":  # whose shards of few rows may be padded to more than whole gradients
                        self._price(replace(layout, data="zero1"))
        fitting = [pair for pair in estimated if self.may_fit(*pair)]
        presets = _best_of_presets(fitting)
        tried = asked = 0
        for layout, guess in fitting:
            best = self._best
            if asked >= self._tries or (best is not None and self._is_slower(layout, guess, best)):
                break
            if not self._is_possible(layout, guess):
                continue
            if best is not None and tried >= self._most and layout not in presets:
                continue
            self._price(layout)
            asked += 1
            tried += (priced := self._priced[layout]) is None or priced.memory <= self._budget
        if self._best is None and fitting and not any(self._priced.values()):
            self._price(fitting[0][0], whole=True)
        self._price_schedules(fitting)
        self._price_divided(fitting)
        self._price_unlike(fitting)

    def _price_schedules(self, fitting: Sequence[Estimated]) -> None:
        """Price, inside a node, the layout with the best estimate of each schedule that is close to the best price: of
        how long stages wait for each other estimates know least, and few stages are soon priced."""
        if self._best is None or self._machine.world_size > self._machine.closest:
            return
        priced = set[str]()
        for layout, guess in fitting:
            if per_sample((layout, guess)) > _DOUBT_OF_SCHEDULES * self.fastest or self._limit.over:
                break
            if layout.stages > 1 and layout.schedule not in priced and self._is_possible(layout, guess):
                self._price(layout)
                priced.add(layout.schedule)

    def _price_divided(self, fitting: Sequence[Estimated]) -> None:
        """Price the layout with the best estimate of each division of operators that may be the fastest; of deep models
        if that waits for many messages, whose number follows from that of the most ranks, of whose placements it is,
        and may be the fastest if it waits for none."""
        priced = {(layout.stages, layout.dividing) for layout in self._priced}
        for layout, guess in fitting if self._best is not None else ():
            if layout.degree == 1 or (layout.stages, layout.dividing) in priced or self._limit.over:
                continue
            waiting = self._estimates.costs(layout).whole.waiting if self._deep else 0.0
            if self._deep and waiting < _WAITS:
                continue
            if self._least(layout, guess) * (1 - waiting) < self.fastest and self._is_possible(layout, guess):
                self._price(layout)
                priced.add((layout.stages, layout.dividing))

    def _price_unlike(self, fitting: Sequence[Estimated]) -> None:
        """Price from all layers the layouts with the best estimates whose layers are not scheduled alike, if they save
        enough: that takes a minute or more."""
        whole = 0
        for layout, guess in fitting if self._best is not None else ():
            slow = per_sample((layout, guess)) > (1 - _WORTH_ALL_LAYERS) * self.fastest
            if slow or whole == _FROM_ALL_LAYERS or self._limit.over:
                break
            unlike = self._priced.get(layout) is None and _of_copies(layout) in self._unlike
            if unlike and not self._saves_needlessly(layout) and not self._is_too_large(layout, guess):
                self._show("all layers of the best layout")
                self._price(layout, whole=True)
                whole += 1

    def _is_possible(self, layout: Layout, guess: Estimate) -> bool:
        """Whether a layout that may fit is worth a price: it may have stages, and saves no memory needlessly."""
        if self._saves_needlessly(layout) or self._is_too_large(layout, guess):
            return False
        if layout.offload and _of_copies(layout) in self._unlike:  # found out at the price of several analyses
            return False
        return layout.stages == 1 or not self._why_no_stages

    def bound(self, estimated: Sequence[Estimated]) -> float:
        """Seconds per sample of an estimate beyond which no layout is the fastest, since one of these that fits is not
        as slow; infinite if none is known to fit.

        The first few are priced exactly where that takes less time than the estimates which it saves: not those with
        stages, nor with divided operators, whose placements are still to be found. What fits even if estimates are as
        wrong as they may be needs no price, if it is divided inside of nodes alone: of what else is, estimates of time
        may be much too low.
        """
        close = (pair for pair in estimated if pair[0].stages == 1 and pair[0].degree <= self._machine.closest)
        surely = min((per_sample(pair) for pair in close if self._surely_fits(pair[1])), default=math.inf)
        simple = (pair for pair in estimated if pair[0].stages == pair[0].degree == 1)
        fitting = (pair for pair in simple if pair[1].memory <= self._budget and not self._surely_fits(pair[1]))
        for layout, guess in sorted(fitting, key=per_sample)[:_FINALISTS]:
            if self._best is not None or self._limit.over or per_sample((layout, guess)) > surely:
                break
            self._guesses[layout] = guess
            self._price(layout)
        return min(surely * self._doubt**2, self.fastest * self._doubt)

    def finish(self, estimated: Sequence[Estimated]) -> None:
        """Price the best plan with buckets for the cluster; if none fits, what is estimated to take least."""
        if self._best is None:  # for the message
            self.price_smallest(estimated)
        elif not self._limit.cut:
            if self._deep:
                self._adjust()
            self._hold_whole()
            self._refine(self._best)
            self._choose_parameters(self._best)

    def price_smallest(self, estimated: Sequence[Estimated]) -> None:
        """Price what is estimated to take least memory, also if all its layers have to be analysed for that."""
        smallest = (layout for layout, _ in sorted(estimated, key=lambda pair: pair[1].memory))
        possible = (layout for layout in smallest if layout.stages == 1 or not self._why_no_stages)
        for layout in itertools.islice(possible, _SMALLEST):
            self._price(layout, whole=True)

    def price_all(self, layouts: Iterable[Layout]) -> None:
        """Price these layouts, as far as the time allows."""
        for layout in layouts:
            if self._limit.over:
                break
            self._price(layout)

    @property
    def layouts(self) -> set[Layout]:
        """What was asked for its price, whether it has one or not."""
        return set(self._priced)

    @property
    def fastest(self) -> float:
        """The least seconds per sample of what was priced and fits; infinite if nothing does."""
        return math.inf if (best := self._best) is None else best.per_sample

    @property
    def fits(self) -> bool:
        """Whether something that was priced fits."""
        return self._best is not None

    def compared(self, estimated: Sequence[Estimated]) -> Iterator[str]:
        """How far estimates were from exact prices, and the best estimate of what was not priced."""
        ratios = self._ratios
        if ratios:
            yield f"estimates were {min(ratios):.3f} to {max(ratios):.3f} of the exact prices"
        left = [pair for pair in estimated if pair[0] not in self._priced]
        fitting = self._left(estimated)
        if left:
            why = "as they do not fit, or save memory that they need not"
            without = f", {len(left) - len(fitting)} of them {why}" if len(fitting) < len(left) else ""
            yield f"{'1 layout was' if len(left) == 1 else f'{len(left)} layouts were'} not priced exactly{without}"
        if fitting and (best := self._best) is not None:
            yield from self._least_bounds(self.bounds(estimated), best)

    def _left(self, estimated: Sequence[Estimated]) -> list[Estimated]:
        """What was not priced, though it may fit."""
        left = (pair for pair in estimated if pair[0] not in self._priced)
        if "_why_no_stages" in vars(self) and self._why_no_stages:  # if that was asked: to find out takes time
            left = (pair for pair in left if pair[0].stages == 1)
        return [pair for pair in left if self.may_fit(*pair) and not self._saves_needlessly(pair[0])]

    def bounds(self, estimated: Sequence[Estimated]) -> Bounds:
        """What layouts that were not priced take at least, by mesh, if they fit."""
        bounds: dict[str, float] = {}
        for layout, guess in self._left(estimated):
            where = f"{layout.name} on {' x '.join(f'{axis}={size}' for axis, size in layout.mesh)}"
            bounds[where] = min(self._least(layout, guess), bounds.get(where, math.inf))
        return tuple(sorted(bounds.items(), key=lambda each: each[1]))

    def _least_bounds(self, bounds: Bounds, best: Priced) -> Iterator[str]:
        least = ", ".join(f"{format_seconds(seconds)} for {where}" for where, seconds in bounds[:_BOUNDS])
        more = f" (and {len(bounds) - _BOUNDS} more, with explain(bounds=True))" if len(bounds) > _BOUNDS else ""
        yield f"by their estimates less the error of estimates they take per sample at least {least}{more}"
        gain = 1 - bounds[0][1] / best.per_sample
        yield (
            f"so none of them is more than {gain:.1%} faster than the chosen one"
            if gain > 0
            else "so none of them is faster than the chosen one"
        )

    def alike(self) -> Iterator[str]:
        """The plans whose exact prices are nearly the best, by name, if there are several."""
        fitting = [priced for priced in self.ranked() if priced.memory <= self._budget]
        names = dict.fromkeys(each.plan.name for each in fitting if each.per_sample < _NEAR * fitting[0].per_sample)
        if len(names) > 1:
            yield f"within {_NEAR - 1:.0%} of each other, so that it hardly matters which: {', '.join(names)}"

    @property
    def _ratios(self) -> list[float]:
        """Estimates as parts of exact prices: of those in buckets for the cluster, where there are such."""
        exact = {layout: each for layout, each in self._priced.items() if each is not None} | self._in_buckets
        return [self._guessed(layout) / each.per_sample for layout, each in exact.items() if layout in self._guesses]

    def _guessed(self, layout: Layout) -> float:
        """The estimated seconds per sample of a layout."""
        return per_sample((layout, self._guesses[layout]))

    def may_fit(self, layout: Layout, guess: Estimate) -> bool:
        """Whether the peak of a layout may be within the budget: of what an estimate of few layers has whole, as is
        fastest, the budget may have the program divide all."""
        divided = 1 if self._deep else layout.degree
        return guess.memory / divided <= self._budget * _MEMORY_DOUBT

    def _surely_fits(self, guess: Estimate) -> bool:
        return guess.memory * _MEMORY_DOUBT <= self._budget

    def _is_slower(self, layout: Layout, guess: Estimate, best: Priced) -> bool:
        """Whether a layout, and all with larger estimates, take longer than the best; or there is no time left."""
        return self._limit.over or self._least(layout, guess) > best.per_sample

    def _is_too_large(self, layout: Layout, guess: Estimate) -> bool:
        """Whether a layout does not fit if its estimate is as far off as those of others like it, which were priced."""
        if not self._deep:
            return False
        off = [
            each.memory / self._guesses[other].memory
            for other, each in self._priced.items()
            if each is not None and other in self._guesses and _kind(other) == _kind(layout)
        ]
        return bool(off) and guess.memory * min(off) > self._budget

    def _saves_needlessly(self, layout: Layout) -> bool:
        """Whether what fits is the same layout, but does less to save memory; or has fewer, larger calls in a step.
        These take no longer: an operation costs an overhead and then its work, and what is sent after each call is
        sent once. If that is sent once a step in any case, operators that are divided otherwise may outweigh it."""
        fitting = self._fitting
        plain = layout.plain_in_memory
        if layout != plain and plain in fitting:
            return True
        if layout.once and layout.degree > 1 and not self._deep:
            return False
        larger = {other.batch for other in fitting if other.batch > layout.batch}
        return layout.stages == 1 and any(layout.in_calls_of(batch) in fitting for batch in larger)

    def _least(self, layout: Layout, guess: Estimate) -> float:
        """The seconds per sample that a layout takes at least, if its estimate is as wrong as any was."""
        return guess.seconds / layout.samples / self._doubt

    @property
    def _doubt(self) -> float:
        """How much more than exact prices estimates may be."""
        return max(self._expected, *self._ratios, 0.0)

    def _price(self, layout: Layout, whole: bool = False) -> None:
        if self._priced.get(layout) is not None or (layout in self._priced and not whole):
            return
        named = f"{layout.name} on {dict(layout.mesh)}: "
        if whole:
            self.remarks = {remark: None for remark in self.remarks if not remark.startswith(named)}
        try:
            if layout.stages > 1 and self._why_no_stages:
                raise PlanError(self._why_no_stages)
            asked = self._source_of(layout), self._plan(layout), self._budget
            self._priced[layout] = price(*asked, whole=whole) if self._deep else cheapest(*asked)
        except (PlanError, CaptureError) as error:
            self._priced[layout] = None
            if isinstance(error, UnlikeError):
                self._unlike.add(_of_copies(layout))
            self.remarks[f"{named}{error}"] = None

    @cached_property
    def _why_no_stages(self) -> str:
        """Why microbatches, which stages need, do not add up to a batch; empty if they do."""
        layout = Layout(stages=2, batch=self._source.call.batch)
        plan = self._question.with_options(Layout().plan())
        source = self._source_of(layout).with_few(plan)
        try:
            source.check_cut(source.captures.joint(source.call, plan), source.call, plan, source.captures)
        except ShardGraphError as error:
            self.remarks[f"not searched: stages of a pipeline: {error}"] = None
            return str(error)
        return ""

    def _source_of(self, layout: Layout) -> Source:
        """The source of the layout's batch, whose call has the loss if stages need it."""
        source = self._source.of_step if layout.stages > 1 else self._source
        batch = layout.batch * (layout.microbatches if layout.stages > 1 else 1)
        return source if batch == source.call.batch else source.resized(batch, source.call.sequence)

    def _plan(self, layout: Layout) -> Plan:
        balance: tuple[int, ...] = ()
        if layout.stages > 1 and self._source.depths is not None:
            balance = stage_layers(self._estimates.costs(layout), layout.stages * layout.chunks)
            balance = (balance[0] + self._source.depths.stack.head, *balance[1:])
        plan = replace(self._question.with_options(layout.plan(balance=balance)), recompute=layout.recompute)
        if layout.mixed and self._source.depths is not None:
            plan = mixed(plan, layout, self._source.depths.stack)
        return plan

    def _adjust(self) -> None:
        """Price the fastest layout of layers that are not treated alike with as many of them as fit by its exact
        memory."""
        mixes = {layout: priced for layout, priced in self._priced.items() if layout.mixed and priced is not None}
        if not mixes:
            return
        layout, priced = min(mixes.items(), key=lambda pair: pair[1].per_sample)
        for _ in range(_ADJUSTED):
            guess = self._estimates.again(layout, self._machine)
            assert guess is not None
            other = self._estimates.fitted(layout, self._machine, priced.memory - guess.memory)
            if other is None or other in self._priced or not other.mixed or self._limit.over:
                return
            if (again := self._estimates.again(other, self._machine)) is not None:
                self._guesses[other] = again
            self._price(other)
            if (found := self._priced[other]) is None:
                return
            layout, priced = other, found

    def _hold_whole(self) -> None:
        """Price layouts that divide operators with whole activations between products, where these may then be the
        fastest: all-reduces are fewer than all-gathers and reduce-scatters, and what is saved takes more memory. Of
        many layers, which take longer to price, the best such layout alone; none beside sequences, or with stages. Of
        few layers, what is gathered may take more than what is saved, so that whole activations fit where others do
        not."""
        room = self._budget * (1.0 if self._deep else _MEMORY_DOUBT)
        priced = [(layout, each) for layout, each in self._priced.items() if each is not None and each.memory <= room]
        priced.sort(key=lambda pair: pair[1].per_sample)
        least, most, saved = (_WAITS, 1, _FEWER) if self._deep else (_HIDDEN, _ADJUSTED, 1.0)
        divided = [(layout, each) for layout, each in priced if layout.tp > 1 and layout.cp == layout.stages == 1]
        fitting = [pair for pair in divided if pair[1].memory <= self._budget]
        others = [pair for pair in divided if pair[1].memory > self._budget]
        for layout, each in (*fitting[:most], *others[:most]):
            best, exposed = self._best, each.parts["exposed"] / each.seconds
            assert best is not None
            if exposed >= least and each.per_sample * (1 - saved * exposed) < best.per_sample and not self._limit.over:
                self._price(replace(layout, whole_activations=True))

    def _refine(self, best: Priced) -> None:
        """Price the best plan with collectives merged to other sizes, if it waits for any."""
        if best.parts["exposed"] < _HIDDEN * best.seconds:
            return
        layout = next(layout for layout, priced in self._priced.items() if priced is best)
        if not self._deep:
            source = self._source_of(layout)
            self._refined += in_other_buckets(source, best, self._budget, self._limit)
        elif (merged := self._merged(layout)) is not None and merged.per_sample < best.per_sample / _MATTERS:
            self._merge_others(layout, merged.per_sample)

    def _merge_others(self, best: Layout, least: float) -> None:
        """Price layouts in buckets for the cluster that may then take less than so many seconds per sample: where these
        matter, prices in the buckets of named plans, which are equally large everywhere, do not tell which is best."""
        others = self._fitting.keys() & self._guesses.keys() - {best}
        for layout in sorted(others, key=self._guessed):
            if self._guessed(layout) > least * _DOUBT or self._limit.over:
                break
            if (merged := self._merged(layout)) is not None and merged.memory <= self._budget:
                least = min(least, merged.per_sample)

    def _merged(self, layout: Layout) -> Priced | None:
        """The price of a layout with collectives in buckets for the cluster; None if there is none, or no other."""
        plan = self._plan(layout)
        size = bucket_bytes(plan, self._machine, self._question.parameter_bytes)
        merged = replace(plan, bucket=size)
        if size == plan.bucket or (priced := self._refined_price(self._source_of(layout), merged)) is None:
            return None
        self._in_buckets[layout] = priced
        return priced

    def _choose_parameters(self, best: Priced) -> None:
        """Price the best plan with other choices for some of its parameters, if it waits for any."""
        if best.parts["exposed"] < _HIDDEN * best.seconds or best.plan.pipeline is not None:
            return
        source = self._source_of(next(layout for layout, priced in self._priced.items() if priced is best))
        model = self._question.model
        best = min((best, *self._refined), key=lambda each: each.rank(self._budget))
        alone = not best.plan.bucket or not self._deep  # in buckets they are sent with all else
        if alone and (plan := with_vectors_replicated(best.plan, model)) is not None:
            whole = self._refined_price(source, plan, best.per_sample / _MATTERS)
            best = best if whole is None or whole.memory > self._budget else whole
        room = self._budget - best.memory
        for _ in range(_ADJUSTED if not self._deep else 0):  # of layers, it was one of the layouts
            if (plan := with_kept(best.plan, model, room)) is None or self._limit.over:
                return
            if (kept := self._refined_price(source, plan)) is None or kept.memory <= self._budget:
                return
            room -= kept.memory - self._budget

    def _refined_price(self, source: Source, plan: Plan, below: float = math.inf) -> Priced | None:
        """The price of a plan that no layout stands for, if it has one and that is ``below`` seconds per sample."""
        with suppress(PlanError):
            priced = price(source, plan, self._budget, whole=False)
            if priced.per_sample < below:
                self._refined.append(priced)
                return priced
        return None

    @property
    def _best(self) -> Priced | None:
        return min(self._fitting.values(), key=lambda priced: priced.rank(self._budget), default=None)

    @property
    def _fitting(self) -> dict[Layout, Priced]:
        """What was priced and fits."""
        priced = ((layout, each) for layout, each in self._priced.items() if each is not None)
        return {layout: each for layout, each in priced if each.memory <= self._budget}

    def ranked(self) -> list[Priced]:
        """What was priced: the fastest that fit, then the smallest."""
        every = [priced for priced in self._priced.values() if priced is not None] + self._refined
        return sorted(every, key=lambda each: each.rank(self._budget))


def _kind(layout: Layout) -> tuple[object, ...]:
    """Equal for layouts whose estimates of memory are off alike."""
    how = layout.zero_bubble, layout.recompute, layout.offload, layout.data
    return layout.stages > 1, layout.tp * layout.cp > 1, *how


def _of_copies(layout: Layout) -> tuple[str, bool]:
    """What decides where layers' copies to the host fall among other operations: the same for like layouts."""
    return layout.offload, layout.degree > 1


def _best_of_presets(fitting: Sequence[Estimated]) -> set[Layout]:
    """The layout with the best estimate of each preset that divides the batch alone."""
    best: dict[str, Layout] = {}
    for layout, _ in fitting:
        if layout.plain and not layout.mixed:
            best.setdefault(layout.name, layout)
    return set(best.values())
