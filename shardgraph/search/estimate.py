"""Estimated time and memory of a layout, in closed form from the costs of its layers.

The search compares thousands of layouts by these estimates, and prices the best few exactly. They ignore the order of
operations: communication of data ranks overlaps with the computation of the same half of a step as far as the cluster
lets it, but for the first gather and the last reduction, and memory is that of the fullest moment of three: the start
of backward, its end, and the update.

A pipeline of ranks with ``v`` stages each takes the time of all microbatches on its slowest rank, and of one on each of
the others, divided by ``v``, which is ``m + (p - 1) / v`` times as long as a microbatch takes on ``p`` equal ranks
(D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021,
https://arxiv.org/abs/2104.04473, section 2.2). A rank of it holds at most as many microbatches as it runs ahead.
Where gradients of weights, of ``W`` seconds, are computed while ranks would wait, a microbatch of ``T`` seconds counts
``(T - 2 W) / T`` in the bubbles (P. Qi et al., "Zero bubble pipeline parallelism", 2023,
https://arxiv.org/abs/2401.10241, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardgraph.cost_models import compute
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.group import Group
from shardgraph.cost_models.optimizers import UPDATED_TOGETHER, optimizer_cost
from shardgraph.mesh import Mesh
from shardgraph.passes.schedule.members import ALONE
from shardgraph.report.accumulation import accumulation_seconds, seconds_of_calls
from shardgraph.report.pipeline import seconds_between
from shardgraph.search.buckets import filling
from shardgraph.search.layer_costs import LayerCosts, Part
from shardgraph.search.layouts import Layout

_WEIGHTS = 0.25
"""The part of backward that computes gradients of weights and fills the time of waiting: half of that of matrix
products, none of that of others, and less where stages are unequal."""

_LOADS = 4
"""Operations that Python calls for each parameter in host memory in a half: two copy it, and two gather it."""


@dataclass(frozen=True)
class Estimate:
    """``seconds`` of a step and ``memory`` of the fullest rank, in bytes; of the seconds, ``compute`` are those of the
    busiest rank without waiting for others, collectives along operator axes included."""

    seconds: float
    memory: float
    compute: float


@lru_cache(256)
def stage_layers(costs: LayerCosts, stages: int) -> tuple[int, ...]:
    """How many layers each stage has, so that the slowest one takes least: what comes before the layers counts for the
    first, what comes after for the last."""

    def seconds(part: Part) -> float:
        return part.forward + part.backward

    layer = seconds(costs.layer) or 1.0
    extra = [0.0] * stages
    extra[0] += seconds(costs.head) / layer
    extra[-1] += seconds(costs.tail) / layer
    counts = [costs.unit] * stages
    for _ in range(costs.layers // costs.unit - stages):
        at = min(range(stages), key=lambda stage: (counts[stage] + extra[stage], stage))
        counts[at] += costs.unit
    return tuple(counts)


class _Rank(NamedTuple):
    """What ``alike`` ranks of a pipeline have, of which ``first`` is the first, which holds most: their ``own`` stages,
    the ``whole`` of these, and whether the ``loss`` is in one."""

    first: int
    alike: int
    own: tuple[Part, ...]
    whole: Part
    loss: bool


@lru_cache(1024)
def _ranks(costs: LayerCosts, stages: int, chunks: int, back: bool) -> tuple[_Rank, ...]:
    """The ranks of a pipeline of ``stages`` ranks with ``chunks`` stages each; if ``back``, the second half of the
    stages goes back from the last rank. Many layouts differ in their data ranks and batches alone."""
    layers = stage_layers(costs, stages * chunks) if stages > 1 else (costs.layers,)
    kinds = [(place == 0, number, place == len(layers) - 1) for place, number in enumerate(layers)]
    parts = {kind: _stage(costs, *kind) for kind in dict.fromkeys(kinds)}
    equal: dict[tuple[tuple[bool, int, bool], ...], list[int]] = {}
    for rank in range(stages):
        own = [kinds[rank], kinds[-1 - rank]] if back else kinds[rank::stages]
        equal.setdefault(tuple(own), []).append(rank)
    found = []
    for each, ranks in equal.items():
        stages_of_rank, whole = tuple(parts[kind] for kind in each), Part()
        for part in stages_of_rank:
            whole = whole.plus(part)
        found.append(_Rank(ranks[0], len(ranks), stages_of_rank, whole, kinds[-1] in each))
    return tuple(found)


def _stage(costs: LayerCosts, head: bool, layers: int, tail: bool) -> Part:
    part = Part().plus(costs.layer, layers)
    part = part.plus(costs.head) if head else part
    return part.plus(costs.tail) if tail else part


def estimate(layout: Layout, costs: LayerCosts, cluster: Cluster, optimizer: str) -> Estimate:
    """The estimate of a layout whose operators are divided, and activations recomputed, as those of ``costs``."""
    return _Estimate(layout, _stored_by(costs, layout.shards), cluster, optimizer).of_step()


@lru_cache(1024)
def _stored_by(costs: LayerCosts, ranks: int) -> LayerCosts:
    return costs.stored_by(ranks)


@dataclass(frozen=True)
class _Estimate:
    layout: Layout
    costs: LayerCosts
    cluster: Cluster
    optimizer: str

    def of_step(self) -> Estimate:
        layout = self.layout
        scale = layout.batch / self.costs.batch
        chunks = layout.chunks if layout.stages > 1 else 1
        back = layout.stages > 1 and layout.schedule == "zbv"
        ranks = _ranks(self.costs, layout.stages, chunks, back)
        parts = {part: sum(self._microbatch(part, scale)) for part in {part for rank in ranks for part in rank.own}}
        seconds = [sum(parts[part] for part in rank.own) for rank in ranks]
        ends = [self._once(rank.whole) for rank in ranks]
        slowest = max(range(len(ranks)), key=lambda place: seconds[place])
        others = sum(rank.alike * each for rank, each in zip(ranks, seconds, strict=True)) - seconds[slowest]
        bubbles = others / layout.chunks * self._idle(ranks[slowest].own)
        messages = self._messages(scale) if layout.stages > 1 else 0.0
        messages *= layout.microbatches + (layout.stages - 1) / layout.chunks
        total = layout.microbatches * seconds[slowest] + bubbles + messages + max(ends)
        if layout.once:
            before = sum(self._microbatch(ranks[slowest].whole, scale, reduces=False))
            total -= (layout.microbatches - 1) * (seconds[slowest] - before)
        compute = max(sum(sum(part.seconds(scale)) for part in rank.own) for rank in ranks)
        memory = max(self._memory(rank, scale) for rank in ranks)
        return Estimate(total, memory, layout.microbatches * compute)

    def _idle(self, own: Sequence[Part]) -> float:
        """The part of their time for a microbatch for which other stages let a rank wait."""
        if not self.layout.zero_bubble:
            return 1.0
        forward, backward = (sum(getattr(part, half) for part in own) for half in ("forward", "backward"))
        again = {"none": 0.0, "selective": 0.2, "full": 1.0}.get(self.layout.recompute, 0.0) * forward
        weights = _WEIGHTS * max(0.0, backward - again)
        return max(0.0, forward + backward - 2 * weights) / (forward + backward) if forward + backward else 1.0

    # Seconds

    def _microbatch(self, part: Part, scale: float, reduces: bool = True) -> tuple[float, float]:
        """Forward and backward of a microbatch, with the data ranks' communication that each microbatch has, if it
        ``reduces`` its gradients.

        Parameters in host memory are copied to the device for each half, and their gradients to the host in backward.
        """
        forward, backward = part.seconds(scale)
        if staged := self.layout.stages > 1:
            microbatches, device = self.layout.microbatches, self.cluster.device
            added = accumulation_seconds(device, part.reduced, part.tensors, microbatches)
            backward += max(added, device.call * part.tensors) if microbatches > 1 else 0.0
        if self.layout.offloads_parameters:
            copied = part.gathered / self.layout.shards / self.cluster.device.linked_host.link.bandwidth
            called = _LOADS * self.cluster.device.call * part.tensors
            forward = max(forward, copied, part.called + called)
            backward = max(backward, copied, part.called_back + called)
        forward += 0.0 if self._gathers_once else part.cast / self.layout.shards
        backward += self._cast_again(part)
        copied = self._away * scale / self.cluster.device.linked_host.link.bandwidth if self._away else 0.0
        forward, backward = max(forward, copied), max(backward, copied)
        fsdp = self.layout.data == "fsdp"
        gathers = 0.0 if self._gathers_once else self._gather(part)
        again = gathers * (1 - self._kept / part.gathered) if fsdp and part.gathered else 0.0
        reductions = self._reduction(part) if reduces and not staged else 0.0
        forward += self._copies(part, gathers)
        backward += self._copies(part, again) + self._copies(part, reductions)
        first = 0.0 if staged else self._gather(self.costs.head)
        last = self._reduction(self.costs.head) if reductions else 0.0
        return self._beside(part, forward, gathers, first), self._beside(part, backward, again + reductions, last)

    def _cast_again(self, part: Part) -> float:
        """Seconds to cast in backward what is gathered again."""
        if self.layout.data != "fsdp" or not part.cast:
            return 0.0
        started = compute.seconds(self.cluster.device, "pointwise", "", 0.0, 0.0)
        return part.cast / self.layout.shards + part.tensors * started

    def _beside(self, part: Part, computation: float, communication: float, end: float) -> float:
        """Seconds of a half of a part whose communication overlaps with computation, but for the first or the last of
        it: a layer's share, or what the ``end`` of the model takes if that is more. It slows computation while that
        does not wait for copies of activations, and delays collectives along operator axes on the same link."""
        alone = min(communication, max(communication / (self.costs.layers + 1), end))
        overlap = self._overlap
        slowed = max(0.0, (1 - overlap) * communication - part.copied / 2)
        if self._on_one_link and (whole := part.forward + part.backward):
            slowed += communication * min(1.0, part.sent / whole)
        awaited = self.cluster.sync if communication else 0.0  # the first or the last
        return max(computation + slowed, communication) + overlap * alone + awaited

    @cached_property
    def _on_one_link(self) -> bool:
        """Whether data ranks and those that divide operators take turns on a link."""
        data = self._group("dp_replicate"), self._group(self._sharding)
        operators = [self._group(axis) for axis, _ in self.layout.dividing]
        return bool({each.where for each in data if each} & {each.where for each in operators if each})

    @cached_property
    def _overlap(self) -> float:
        """Of the data ranks' communication, over the link on which most is waited for."""
        group = self._group("dp_replicate") or self._group(self._sharding)
        return self.cluster.overlap if group is None else self.cluster.overlap_on(group.where)

    def _copies(self, part: Part, sent: float) -> float:
        """Seconds to copy those of a part's tensors that share collectives, if anything is ``sent``."""
        nbytes = part.gathered * (1 - self._alone[1])
        return compute.seconds(self.cluster.device, "pointwise", "", 0.0, 2 * nbytes) if sent and nbytes else 0.0

    def _once(self, whole: Part) -> float:
        """Seconds at the end of a step: the update, and in a pipeline what all microbatches have together."""
        cost, device = optimizer_cost(self.optimizer), self.cluster.device
        on_host = self.layout.offloads_parameters
        rate = device.linked_host.optimizer if on_host else device.rate("optimizer")
        assert rate is not None
        nbytes, alone = whole.parameters / self.layout.shards, on_host or self.layout.ranks == 1
        updates = whole.tensors if alone else min(whole.tensors, nbytes / UPDATED_TOGETHER + 1)
        update = cost.moved * nbytes / rate.per_second + rate.overhead * updates
        if self.layout.stages == 1:
            added = whole.reduced if self.layout.once else nbytes
            where = (0.0, added) if on_host else (added, 0.0)
            return update + seconds_of_calls(device, self.layout.microbatches, *where)
        gathered = self._gather(whole) + whole.cast / self.layout.shards if self._gathers_once else 0.0
        return update + self._reduction(whole) + gathered

    def _collective(self, operation: str, nbytes: float, part: Part, axis: str) -> float:
        """Seconds to gather, scatter or reduce tensors of a part, of ``nbytes`` in full."""
        if (group := self._group(axis)) is None:
            return 0.0
        count = part.tensors
        waits = self.layout.offloads_parameters and operation == "all_gather_into_tensor"  # each for its copy
        if not waits:
            alone, of_bytes = self._alone
            buckets = math.ceil(nbytes * (1 - of_bytes) / self._bucket) + 1
            count = count * alone + min(count * (1 - alone), buckets)
        whole, shard = int(nbytes), int(nbytes / group.ranks)
        sizes = {
            "all_gather_into_tensor": (shard, whole),
            "reduce_scatter_tensor": (whole, shard),
            "all_reduce": (whole, whole),
        }
        args = group, self.cluster.efficiency
        started = collective_seconds(operation, 0, 0, *args) if count > 1 else 0.0
        return collective_seconds(operation, *sizes[operation], *args) + max(0, count - 1) * started

    @cached_property
    def _alone(self) -> tuple[float, float]:
        """The part of a layer's tensors that are too large to share collectives, and that of their bytes."""
        costs = self.costs
        nbytes = costs.layer.gathered or costs.whole.gathered
        large = [share for share in costs.shares if share * nbytes * ALONE > self._bucket]
        return len(large) / max(1, len(costs.shares)), sum(large)

    @cached_property
    def _bucket(self) -> int:
        """Bytes of the buckets that exact prices are of."""
        groups = filter(None, map(self._group, ("dp", "dp_shard", "dp_replicate")))
        total = self.costs.whole.gathered
        return max((filling(group, self.cluster, total) for group in groups), default=0)

    @cached_property
    def _mesh(self) -> Mesh:
        return self.layout.mesh

    @cached_property
    def _groups(self) -> dict[str, Group]:
        return {}

    def _group(self, axis: str) -> Group | None:
        """The ranks along an axis of the mesh; None if it has none such."""
        if axis not in self._groups and axis in dict(self._mesh):
            self._groups[axis] = self.cluster.group_of(self._mesh, axis)
        return self._groups.get(axis)

    @property
    def _gathers_once(self) -> bool:
        """Whether all microbatches of a step have the same gathered parameters."""
        return self.layout.stages > 1 and self.layout.data != "fsdp"

    @property
    def _kept(self) -> float:
        """Bytes of parameters that stay gathered for backward, of those that are sharded."""
        return self.layout.kept * self.costs.layer.gathered

    @property
    def _away(self) -> float:
        """Bytes that some of the layers save in host memory, of a microbatch of the size of the costs."""
        return self.layout.away * self.costs.layer.saved

    def _gather(self, part: Part) -> float:
        if self.layout.data == "ddp":
            return 0.0
        return self._collective("all_gather_into_tensor", part.gathered, part, self._sharding)

    def _reduction(self, part: Part) -> float:
        """Gradients, over data ranks."""
        if self.layout.data == "ddp":
            return self._collective("all_reduce", part.reduced, part, "dp")
        seconds = self._collective("reduce_scatter_tensor", part.reduced, part, self._sharding)
        return seconds + self._collective("all_reduce", part.reduced / self.layout.shard, part, "dp_replicate")

    @property
    def _sharding(self) -> str:
        return "dp_shard" if self.layout.replicate > 1 else "dp"

    def _messages(self, scale: float) -> float:
        """Seconds of a microbatch's two messages between stages, which the next microbatch's computation hides half."""
        nbytes = int(self.costs.crossing * scale)
        along = self._group("pp")
        assert along is not None
        return seconds_between(along, nbytes, self.cluster) * self.layout.chunks

    # Bytes

    def _memory(self, rank: _Rank, scale: float) -> float:
        layout, whole = self.layout, rank.whole
        cost = optimizer_cost(self.optimizer)
        sharded = self.layout.shards
        weights = whole.parameters
        outside = max(self.costs.head.parameters, self.costs.tail.parameters)
        largest = min(weights, self.costs.layer.parameters + outside)
        stored = weights / sharded
        computed = whole.gathered / weights if weights else 1.0  # of a lower precision, perhaps
        gathered = {
            "ddp": 0.0,
            "zero2": weights * computed,
            "fsdp": min(weights * computed, largest * computed + self._kept),
        }
        beside = gathered[layout.data] if sharded > 1 else 0.0
        lasting = stored * (1 + cost.states) + beside
        working = self.costs.working if rank.loss else min(self.costs.working, self.costs.layer.saved)
        saved = (self._saved(rank.first, rank.own) + working) * scale
        if self.layout.offloads_parameters:
            return (beside if sharded > 1 else largest) + saved
        if layout.stages > 1:  # gradients are whole until the last microbatch has been added to them
            return lasting + saved + weights
        held = whole.reduced if layout.once else stored if layout.microbatches > 1 else 0.0  # of the calls before
        gradients = held + (0.0 if layout.once else stored) + (largest if sharded > 1 else 0.0)
        at_once = layout.ranks == 1 and not self.cluster.device.is_cpu
        temporaries = cost.at_once * weights if at_once else cost.temporaries * outside / sharded
        return lasting + max(saved + held, gradients, stored + temporaries)

    def _saved(self, rank: int, own: Sequence[Part]) -> float:
        """Bytes that a rank's stages hold for backward, for microbatches of the size of the costs."""
        layout = self.layout
        if layout.stages > 1 and layout.schedule == "zbv":  # a stage holds more the earlier it is, on each rank alike
            ends = 2 * layout.stages - rank - 0.5, rank + 0.5
            return sum(part.saved * min(layout.microbatches, held) for part, held in zip(own, ends, strict=True))
        return sum(part.saved for part in own) * self._in_flight(rank) / layout.chunks - self._away

    def _in_flight(self, rank: int) -> float:
        """The microbatches of which a rank holds what it saves, counted once for each of its stages."""
        layout = self.layout
        if layout.stages == 1:
            return 1.0
        if layout.chunks == 1:
            later = rank / 2 if layout.zero_bubble else 0  # gradients of weights need about half of what is saved
            return min(layout.microbatches, layout.stages - rank + later)
        ahead = 2 * (layout.stages - rank - 1) + (layout.chunks - 1) * layout.stages + 1
        return min(layout.microbatches * layout.chunks, ahead)
