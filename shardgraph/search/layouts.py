"""How ranks may share the work of a step: the outer storey of the search, and the plans that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardgraph.cost_models.cluster import Cluster
from shardgraph.mesh import Mesh
from shardgraph.plans.batch import Batch
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan
from shardgraph.plans.presets import preset

DATA = ("ddp", "zero2", "fsdp")
"""What is sharded over data ranks: nothing, optimizer state and gradients, parameters too. ``zero1`` is left out: it
sends more than ``zero2`` and holds more, but for parameters of fewer rows than ranks."""


TOGETHER = (("cp", "tp"), ("ep", "tp"), ("ep", "cp"))
"""Pairs of axes along which a model is divided at once, the outer one first."""


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks along each kind of axis, and what goes with them.

    ``stages`` pipeline ranks, each with ``chunks`` stages, which with ``zero_bubble`` compute gradients of weights when
    they would wait; ``replicate`` times ``shard`` data ranks, over the latter of which ``data`` shards; ``tp`` ranks
    share a batch, and shard activations between divided products along the sequence, or hold them whole, with
    ``whole_activations``; ``cp`` ranks share a batch, each with a part of its sequences; ``ep`` ranks have batches
    of their own, and a part of the experts each. A data rank computes ``microbatches`` of ``batch`` samples in a step;
    without stages it may add up their gradients ``once``, before they are reduced.
    Of the model's equal layers, or of those of each stage, the first ``full`` are recomputed whole, whatever
    ``recompute`` says of the others, the parameters of the last ``kept`` stay gathered for backward where ``data``
    gathers them again, and what ``away`` of them save, as far from each other as can be, is in host memory until
    backward needs it. Scores of a loss over a large vocabulary exist in chunks of ``chunked`` bytes, if that is not 0.
    ``offload`` is the name of what is kept in host memory (:meth:`Offload.of`), if anything is.
    """

    stages: int = 1
    chunks: int = 1
    zero_bubble: bool = False
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    data: str = "fsdp"
    recompute: str = "none"
    offload: str = ""
    batch: int = 1
    microbatches: int = 1
    once: bool = False
    full: int = 0
    kept: int = 0
    away: int = 0
    chunked: int = 0
    whole_activations: bool = False

    @property
    def data_ranks(self) -> int:
        """Ranks with a batch of their own."""
        return self.replicate * self.shard * self.ep

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stages * self.data_ranks * self.cp * self.tp  # those of experts have batches

    @property
    def shards(self) -> int:
        """Ranks that have a part of each parameter, as it is stored."""
        return 1 if self.data == "ddp" else self.shard

    @property
    def shared(self) -> bool:
        """Whether ranks share a batch otherwise than in stages."""
        return self.tp * self.cp > 1

    @property
    def offloads_activations(self) -> bool:
        """Whether what is saved for backward is in host memory meanwhile."""
        return self.offload in ("activations", "all")

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters are in host memory, with their gradients and the optimizer's state."""
        return self.offload in ("parameters", "all")

    @property
    def dividing(self) -> Mesh:
        """The axes along which the model is divided, apart from stages and what is stored, outermost first.

        Operators are innermost, as they send most.
        """
        return tuple(axis for axis in (("ep", self.ep), ("cp", self.cp), ("tp", self.tp)) if axis[1] > 1)

    @property
    def degree(self) -> int:
        """Ranks that the model is divided among, apart from stages and what is stored."""
        return self.tp * self.cp * self.ep

    @property
    def undivided(self) -> Layout:
        """The layout whose ranks each have all of the model's computation."""
        return replace(self, ep=1, cp=1, tp=1)

    def along(self, axis: str, ranks: int) -> Layout:
        """The layout with as many ranks along the axis ``"tp"``, ``"cp"`` or ``"ep"``."""
        size: dict[str, Any] = {axis: ranks}
        return replace(self, **size)

    def in_calls_of(self, batch: int) -> Layout:
        """The layout with as many samples in calls of ``batch``."""
        calls = self.microbatches * self.batch // batch
        return replace(self, batch=batch, microbatches=calls, once=self.once and calls > 1)

    @property
    def mixed(self) -> bool:
        """Whether equal layers are not treated alike."""
        return bool(self.full or self.kept or self.away)

    def with_layers(self, layers: int) -> Layout:
        """The layout with so many of the layers treated as one of them, or some, are."""
        if self.full:
            return replace(self, full=layers)
        return replace(self, away=layers) if self.away else replace(self, kept=layers)

    @property
    def plain_in_memory(self) -> Layout:
        """The layout without what only saves memory, apart from recomputation of all layers and smaller batches."""
        return replace(self, chunked=0, full=0, away=0, offload="")

    @property
    def plain(self) -> bool:
        """Whether ranks divide the batch, and nothing of the model but what is stored."""
        return self.stages == self.degree == 1

    @property
    def samples(self) -> int:
        """Samples of a step over all ranks."""
        return self.data_ranks * self.microbatches * self.batch

    @property
    def accumulated(self) -> int:
        """Calls of a data rank in a step: a pipeline has all microbatches in one."""
        return self.microbatches if self.stages == 1 else 1

    @property
    def schedule(self) -> str:
        """The schedule of its stages.

        The others are never better: they take as long as one of these, or longer, and hold more (``gpipe``,
        ``looped-bfs``, ``dualpipev``).
        """
        if self.zero_bubble:
            return "zbv" if self.chunks == 2 else "interleaved-zero-bubble"
        return "1f1b" if self.chunks == 1 else "interleaved-1f1b"

    @property
    def name(self) -> str:
        """The name of its preset."""
        data = "hsdp" if self.replicate > 1 and self.data == "fsdp" else self.data
        parts = ["pp" * (self.stages > 1), data * (self.replicate * self.shard > 1)]
        operators = "tp" if self.whole_activations else "tp+sp"
        parts += ["ep" * (self.ep > 1), "cp" * (self.cp > 1), operators * (self.tp > 1)]
        return "+".join(filter(None, parts)) or "single"

    @property
    def mesh(self) -> Mesh:
        """Its mesh, outermost axis first."""
        shards = [("dp_replicate", self.replicate), ("dp_shard", self.shard)]
        data = shards if self.replicate > 1 else [("dp", self.shard)] if self.shard > 1 else []
        axes = [("pp", self.stages), *data, *self.dividing]
        return tuple(axis for axis in axes if axis[1] > 1)

    def plan(self, balance: tuple[int, ...] = ()) -> Plan:
        """The plan, whose stages have ``balance`` layers; if empty, stages are still to be chosen."""
        pipeline = None
        if self.stages > 1:
            pipeline = Pipeline(self.microbatches, self.schedule, balance=balance, ranks=self.stages)
        plan = replace(preset(self.name, self.mesh, pipeline), recompute=self.recompute)
        plan = replace(plan, loss_chunk=self.chunked) if self.chunked else plan
        if (calls := self.accumulated) > 1:
            plan = replace(plan, batch=Batch(self.samples, calls, "last" if self.once else "each"))
        return replace(plan, offload=Offload.of(self.offload)) if self.offload else plan


def layouts(
    ranks: int, cluster: Cluster, layers: int, *, pipelines: bool, axes: Sequence[str] = ("tp",)
) -> Iterator[Layout]:
    """All layouts of ``ranks``, apart from recomputation, microbatches and offload.

    The model is divided along ``axes`` (``"tp"``, ``"cp"``, ``"ep"``) among a power of two of ranks: along one of them,
    or, where that is all of a node, along two together. It may also be several nodes: along one axis, along operators
    inside each node and another axis beyond, or along all three; with stages, which send less over the network,
    operators stay inside. Parameters are sharded over all data ranks, or over those of a node, or of a few nodes, and
    replicated over the others.
    """
    inside = min(cluster.closest, ranks)
    for stages in _divisors(ranks) if pipelines else [1]:
        if stages > max(1, layers):
            continue
        for degree in _powers(ranks // stages):
            if degree > inside and degree % inside:
                continue
            for staged in _staged(stages, layers):
                for base in _divided(staged, degree, inside, axes):
                    yield from _data(base, ranks // stages // degree, max(1, inside // degree))


def layouts_on(mesh: Mesh, layers: int, *, pipelines: bool) -> Iterator[Layout]:
    """Likewise all that have this mesh, whatever its sizes; none if its axes are not those of :attr:`Layout.mesh`."""
    sizes = dict(mesh)
    stages, replicate = sizes.get("pp", 1), sizes.get("dp_replicate", 1)
    if stages > (max(1, layers) if pipelines else 1):
        return
    for staged in _staged(stages, layers):
        base = staged
        for axis in ("ep", "cp", "tp"):
            base = base.along(axis, sizes.get(axis, 1))
        if replicate > 1:
            of_data = iter([replace(base, replicate=replicate, shard=sizes.get("dp_shard", 1))])
        else:
            of_data = _data(base, sizes.get("dp", 1), 1)
        yield from (layout for layout in of_data if layout.mesh == mesh)


def _divided(staged: Layout, degree: int, inside: int, axes: Sequence[str]) -> Iterator[Layout]:
    """The model divided along each axis; and where that fills a node, or several, also along two together."""
    alone = axes if degree > 1 else axes[:1]
    if degree > inside and staged.stages > 1:
        alone = [axis for axis in axes if axis != "tp"]
    yield from (staged.along(axis, degree) for axis in alone)
    pairs = [(outer, inner) for outer, inner in TOGETHER if {outer, inner} <= set(axes)]
    for outer, inner in pairs if degree == inside else ():
        yield from (staged.along(outer, degree // ranks).along(inner, ranks) for ranks in _powers(degree)[1:-1])
    for outer, inner in pairs if degree > inside > 1 else ():
        if inner == "tp":
            yield staged.along(outer, degree // inside).along(inner, inside)
    if len(axes) > 2 and degree > inside > 1:
        yield from _along_three(staged, degree // inside, inside)


def _along_three(staged: Layout, nodes: int, inside: int) -> Iterator[Layout]:
    """The model divided along all axes: with operators over all of a node, or over a part and sequences over the rest,
    which leaves experts to the nodes."""
    yield from (
        staged.along("ep", nodes // ranks).along("cp", ranks).along("tp", inside) for ranks in _powers(nodes)[1:-1]
    )
    yield from (
        staged.along("ep", nodes).along("cp", inside // ranks).along("tp", ranks) for ranks in _powers(inside)[1:-1]
    )


def _data(base: Layout, ranks: int, of_node: int) -> Iterator[Layout]:
    for data in DATA if ranks > 1 else DATA[:1]:
        yield replace(base, shard=ranks, data=data)
    shard = of_node
    while 1 < shard < ranks:
        if ranks % shard == 0:
            yield replace(base, replicate=ranks // shard, shard=shard, data="fsdp")
        shard *= 2 if shard >= of_node else 1


def _staged(stages: int, layers: int) -> Iterator[Layout]:
    """Pipelines: with one stage per rank, or as many as leave each at least a layer, with which a pipeline idles less;
    and with whole backwards, or gradients of weights on their own."""
    if stages == 1:
        yield Layout()
        return
    evenly = [number for number in (2, 3, 5, 7) if layers % (stages * number) == 0]
    for chunks in sorted({1, 2, 4, *evenly[:1]}):
        if stages * chunks <= layers:
            yield from (Layout(stages=stages, chunks=chunks, zero_bubble=zero) for zero in (False, True))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0 and each <= 64]


def _powers(number: int) -> list[int]:
    return [2**i for i in range(number.bit_length()) if number % 2**i == 0]
