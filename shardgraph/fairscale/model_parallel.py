"""FairScale's model-parallel layers: whole layers of torch, annotated with how ranks along ``"tp"`` divide them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardgraph.api.annotate import annotate
from shardgraph.arguments import BOOL, CALLABLE, POSITIVE, WHOLE, Kind, checked
from shardgraph.errors import ShardGraphError, expect
from shardgraph.plans.annotations.kinds import Annotation, input, output, replicate, shard
from shardgraph.sizes import divisors, is_whole

_AXIS = "tp"

Initialize = Callable[[Tensor], object]

_LINEAR = {"in_features": WHOLE, "out_features": WHOLE, "bias": BOOL, "init_method": CALLABLE, "stride": WHOLE}
_EMBEDDING = {
    "num_embeddings": WHOLE,
    "embedding_dim": WHOLE,
    "padding_idx": Kind("the index of a row", lambda value: is_whole(value, -(2**63))),
    "max_norm": POSITIVE,
    "norm_type": POSITIVE,
    "scale_grad_by_freq": BOOL,
    "sparse": BOOL,
    "init_method": CALLABLE,
}


@checked(model_parallel_size_=WHOLE, pipeline_length=WHOLE)
def initialize_model_parallel(model_parallel_size_: int, pipeline_length: int = 1) -> dict[str, int]:
    """The mesh of ``compile(model, "ddp+tp", mesh=...)`` in which so many ranks share each layer.

    Args:
        model_parallel_size_: ranks that share a layer; the others have other parts of the batch.
        pipeline_length: is refused above 1: the plan ``"pp"`` makes pipelines.

    Raises:
        ShardGraphError: the ranks of the run are no multiple of ``model_parallel_size_``.
    """
    if pipeline_length > 1:
        raise ShardGraphError(
            f"pipeline_length={pipeline_length} is not the layers' matter: compile with the plan 'pp+tp' and a mesh"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if model_parallel_size_ < 1 or world % model_parallel_size_:
        raise ShardGraphError(
            f"layers cannot be shared by {model_parallel_size_} of {world} ranks: take "
            f"{' or '.join(map(str, divisors(world))) or 1}, or start a multiple of {model_parallel_size_} ranks"
        )
    return {"dp": world // model_parallel_size_, _AXIS: model_parallel_size_}


class ColumnParallelLinear(nn.Linear):
    """``fairscale.nn.model_parallel.ColumnParallelLinear``: outputs divided among ranks.

    The weight is whole until the model is compiled, and the output has all features in the model's forward:
    ``gather_output=False`` says that ranks go on with their parts of it.

    Args:
        in_features: inputs of all ranks.
        out_features: outputs of all ranks.
        bias: whether there is one; it begins at 0.
        gather_output: ranks have the whole output.
        init_method: initialises the whole weight.
        stride: blocks of the outputs, of each of which a rank has a part, as of a fused projection.
    """

    @checked(_LINEAR, gather_output=BOOL)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initialize = nn.init.xavier_normal_,
        stride: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        _initialize(self, init_method)
        placed = shard(0, _AXIS, stride)
        gathered = replicate(_AXIS) if gather_output else shard(-1, _AXIS, stride)
        _annotate(self, {"weight": placed, "bias": placed, "": output(gathered)})


class RowParallelLinear(nn.Linear):
    """``fairscale.nn.model_parallel.RowParallelLinear``: inputs divided among ranks, whose results are summed.

    Args:
        in_features: inputs of all ranks.
        out_features: outputs of all ranks.
        bias: whether there is one, added to the sum; it begins at 0.
        input_is_parallel: ranks have their parts of the input already; otherwise they take them of the whole.
        init_method: initialises the whole weight.
        stride: blocks of the inputs, of each of which a rank has a part.
    """

    @checked(_LINEAR, input_is_parallel=BOOL)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initialize = nn.init.xavier_normal_,
        stride: int = 1,
    ) -> None:
        super().__init__(in_features, out_features, bias)
        _initialize(self, init_method)
        given = shard(-1, _AXIS, stride) if input_is_parallel else replicate(_AXIS)
        _annotate(self, {"weight": shard(1, _AXIS, stride), "bias": replicate(_AXIS), "": input(given)})


class VocabParallelEmbedding(nn.Embedding):
    """``fairscale.nn.model_parallel.VocabParallelEmbedding``: rows of the table divided among ranks.

    Args:
        num_embeddings: rows of all ranks.
        init_method: initialises the whole table.
        embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as of ``nn.Embedding``.
    """

    dim = 0

    @checked(_EMBEDDING)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initialize = nn.init.xavier_normal_,
    ) -> None:
        if padding_idx is not None:
            rows = f"the index of one of {num_embeddings} rows, from the end if negative"
            expect(-num_embeddings <= padding_idx < num_embeddings, "padding_idx", padding_idx, rows)
        super().__init__(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        _initialize(self, init_method)
        _annotate(self, {"weight": shard(self.dim, _AXIS)})


class ParallelEmbedding(VocabParallelEmbedding):
    """``fairscale.nn.model_parallel.layers.ParallelEmbedding``: columns of the table divided among ranks."""

    dim = 1


def _initialize(layer: nn.Linear | nn.Embedding, init_method: Initialize) -> None:
    with torch.no_grad():
        init_method(layer.weight)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()


def _annotate(layer: nn.Module, annotations: dict[str, Annotation]) -> None:
    annotate(layer, {name: each for name, each in annotations.items() if not name or getattr(layer, name) is not None})
