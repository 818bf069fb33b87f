"""The step time of a transformer in closed form for a layout of ranks, without a model or a graph.

The operations of a decoder are priced with the same devices, links and formulas as a captured program, so that figures
published for other programs can be checked, and layouts can be compared without compiling them. Sources: operations of
a layer, and each tensor-parallel rank's shard of them: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053; the pipeline
and its bubble: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters", arXiv:2104.04473;
recomputation and sequence parallelism: V. Korthikanti et al., "Reducing activation recomputation in large transformer
models", arXiv:2205.05198; sharded parameters: S. Rajbhandari et al., "ZeRO", arXiv:1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.compute import causal_part, seconds
from shardgraph.cost_models.timeline import StepTime
from shardgraph.errors import ShardGraphError
from shardgraph.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
SHARDING = ("ddp", "zero1", "zero2", "fsdp")
_TRAFFIC_BACKWARD = 2  # the backward of a pointwise operation reads a gradient and an input, and writes a gradient
_FLASH_BACKWARD = 2.5  # five matrix products, forward has two: T. Dao, arXiv:2307.08691, section 4.1


@dataclass(frozen=True)
class Transformer:
    """A decoder: ``layers`` of ``width``, with ``heads`` query heads, ``kv_heads`` key heads and an MLP of ``hidden``.

    ``gated``: the MLP has a third matrix (SwiGLU). ``flash``: attention is one kernel that does not write its scores.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    gated: bool = False
    flash: bool = True

    @property
    def keys(self) -> int:
        """Elements of all keys of one position."""
        return self.width * self.kv_heads // self.heads

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of one layer."""
        return self.width * (2 * self.width + 2 * self.keys + (3 if self.gated else 2) * self.hidden)

    @property
    def parameters(self) -> int:
        """Elements of all matrices, including one of the vocabulary: that of the head."""
        return self.layers * self.layer_parameters + self.vocabulary * self.width


@dataclass(frozen=True)
class Layout:
    """A parallel layout of ranks.

    ``data``, ``tensor`` and ``pipeline`` are ranks along each axis; tensor-parallel ranks are neighbours, pipeline
    stages are farthest apart. A rank has ``rows`` sequences in each of the ``microbatches`` of a step, and
    ``interleave`` stages. ``sharding``, one of ``SHARDING``, is over the data-parallel ranks; groups of ``shard`` ranks
    (0: all) share one copy. ``recompute`` is one of ``RECOMPUTE``: nothing, attention's scores, or every layer. With
    ``sequence_parallel`` norms and residuals are sharded over the tensor-parallel ranks too. ``reduced`` are bytes per
    element of the gradients that are reduced.
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    rows: int = 1
    microbatches: int = 1
    interleave: int = 1
    sharding: str = "fsdp"
    shard: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    reduced: int = 2

    def __post_init__(self) -> None:
        for name, known in (("sharding", SHARDING), ("recompute", RECOMPUTE)):
            if getattr(self, name) not in known:
                raise ShardGraphError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")

    @property
    def mesh(self) -> Mesh:
        """Stages outermost, the ranks of a tensor-parallel group innermost."""
        shard = self.shard or self.data
        return (("pp", self.pipeline), ("replicate", self.data // shard), ("shard", shard), ("tp", self.tensor))


def step_time(model: Transformer, sequence: int, layout: Layout, cluster: Cluster, dtype: str) -> StepTime:
    """Predicted seconds of a training step with AdamW on the slowest rank.

    Raises:
        ClusterError: the cluster has too few devices, or the device no rate for ``dtype``.
    """
    cluster.check_mesh(layout.mesh)
    price = _Price(model, sequence, layout, cluster, dtype)
    layers = -(-model.layers // layout.pipeline)
    layer, reduce = price.layer(), price.tensor_parallel()
    gather, scatter = price.data_parallel()

    def exposed_per_layer(communication: tuple[float, float]) -> float:
        """Seconds that ``communication`` adds to the forward and the backward that it overlaps with."""
        blocked = [computation + collective for computation, collective in zip(layer, reduce, strict=True)]
        return sum(
            max(beside - computation, (1 - cluster.overlap) * beside)
            for computation, beside in zip(blocked, communication, strict=True)
        )

    # All-reduces of a tensor-parallel group block the computation; data-parallel collectives overlap with it.
    blocking = layers * sum(reduce) + price.send()
    beside = {"zero2": (gather, scatter), "fsdp": (gather, gather + scatter)}.get(layout.sharding, (0.0, 0.0))
    # Replicas reduce gradients once, after the last microbatch, and gather updated parameters before the first.
    once = (0.0, 0.0) if any(beside) else (gather, scatter)
    compute = layers * sum(layer) + sum(price.head())
    exposed = blocking + layers * exposed_per_layer(beside)
    return StepTime(
        compute=layout.microbatches * compute,
        optimizer=price.optimizer(),
        communication=layout.microbatches * (blocking + layers * sum(beside)) + layers * sum(once),
        exposed=layout.microbatches * exposed + layers * exposed_per_layer(once),
        bubble=(layout.pipeline - 1) * (compute + exposed) / layout.interleave,
    )


class _Price:
    """Seconds of the parts of one microbatch on one rank, and of the work per step."""

    def __init__(self, model: Transformer, sequence: int, layout: Layout, cluster: Cluster, dtype: str) -> None:
        self.model, self.sequence, self.layout, self.cluster, self.dtype = model, sequence, layout, cluster, dtype
        self.device, self.ranks, self.tokens = cluster.device, dict(layout.mesh), layout.rows * sequence

    def layer(self) -> tuple[float, float]:
        """Seconds of forward, and of backward with its recomputation."""
        model, tensor = self.model, self.layout.tensor
        columns = [(model.width, (model.width + 2 * model.keys) // tensor), (model.width // tensor, model.width)]
        columns += [(model.width, model.hidden // tensor)] * (2 if model.gated else 1)
        columns += [(model.hidden // tensor, model.width)]
        products = sum(self.matmul(self.tokens, inner, outer) for inner, outer in columns)
        (core, core_backward), traffic = self.attention(), self.traffic()
        forward = products + core + traffic
        backward = 2 * products + core_backward + _TRAFFIC_BACKWARD * traffic
        recomputed = {"none": 0.0, "selective": 0.0 if model.flash else core, "full": forward}[self.layout.recompute]
        return forward, backward + recomputed

    def attention(self) -> tuple[float, float]:
        """The two products of attention and the softmax between them, forward and backward."""
        model, layout = self.model, self.layout
        dtype = "bfloat16" if self.dtype.startswith("float8") else self.dtype  # only matrices are in 8 bits
        flops = 4 * self.tokens * self.sequence * model.width / layout.tensor
        if model.flash:
            forward = seconds(self.device, "attention", dtype, causal_part(self.sequence) * flops, 0)
            return forward, _FLASH_BACKWARD * forward
        scores = layout.rows * self.sequence**2 * model.heads / layout.tensor
        # Written by the product, read and written by softmax and by dropout (with its mask), read by the product.
        moved = 13 * scores
        forward = seconds(self.device, "matmul", dtype, flops, 0) + seconds(self.device, "pointwise", "", 0, moved)
        return forward, 2 * forward

    def traffic(self) -> float:
        """Norms, residuals and the activation function of one layer, forward."""
        model, layout = self.model, self.layout
        width = model.width / (layout.tensor if layout.sequence_parallel else 1)
        norms = 2 * (1 + 1) * width
        residuals = 2 * (2 + 1) * width
        activation = (3 if model.gated else 2) * model.hidden / layout.tensor
        elements = self.tokens * (norms + residuals + activation)
        rate = self.device.rate("pointwise")
        assert rate is not None
        return 5 * rate.overhead + 2 * elements / rate.per_second

    def head(self) -> tuple[float, float]:
        """Logits and the loss over the vocabulary, in float32."""
        entries = self.model.vocabulary // self.layout.tensor
        product = self.matmul(self.tokens, self.model.width, entries)
        loss = seconds(self.device, "pointwise", "", 0, 14 * self.tokens * entries)
        return product + loss, 2 * product + loss

    def matmul(self, rows: int, inner: int, outer: int) -> float:
        moved = 2 * (rows * inner + inner * outer + rows * outer)
        return seconds(self.device, "matmul", self.dtype, 2 * rows * inner * outer, moved)

    def tensor_parallel(self) -> tuple[float, float]:
        """The all-reduces of one layer: two in forward, two in backward, two more if it recomputes everything."""
        nbytes = 2 * self.tokens * self.model.width
        one = self.collective("all_reduce", nbytes, nbytes, "tp")
        return 2 * one, (4 if self.layout.recompute == "full" else 2) * one

    def data_parallel(self) -> tuple[float, float]:
        """Seconds to all-gather one layer's parameters, and to reduce its gradients."""
        layout = self.layout
        whole = self.model.layer_parameters // layout.tensor
        shard, reduced = self.ranks["shard"], layout.reduced * whole
        if layout.sharding == "ddp":
            return 0.0, self.collective("all_reduce", reduced, reduced, "shard")
        gather = self.collective("all_gather_into_tensor", 2 * whole // shard, 2 * whole, "shard")
        scatter = self.collective("reduce_scatter_tensor", reduced, reduced // shard, "shard")
        return gather, scatter + self.collective("all_reduce", reduced // shard, reduced // shard, "replicate")

    def send(self) -> float:
        """Seconds to send activations to the next stage and gradients back, for every stage of a rank."""
        if self.layout.pipeline == 1:
            return 0.0
        nbytes = 2 * self.tokens * self.model.width / (self.layout.tensor if self.layout.sequence_parallel else 1)
        link = self.cluster.link_of(self.layout.mesh, "pp")
        return 2 * self.layout.interleave * (link.latency + nbytes / link.bandwidth)

    def collective(self, operation: str, operand: int, result: int, axis: str) -> float:
        link = self.cluster.link_of(self.layout.mesh, axis)
        return collective_seconds(operation, operand, result, self.ranks[axis], link, self.cluster.efficiency)

    def optimizer(self) -> float:
        """Seconds of AdamW in float32 on the rank's shard of the parameters."""
        layout = self.layout
        shard = self.model.parameters / (layout.tensor * layout.pipeline)
        shard /= 1 if layout.sharding == "ddp" else self.ranks["shard"]
        rate = self.device.rate("optimizer")
        assert rate is not None
        return 7 * 4 * shard / rate.per_second
