"""The one place that touches private torch API, for torch 2.11 to 2.13.

Everything else in shardgraph imports from here, so that a new torch release is a change to one file.
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import tracing
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement
from torch.fx.graph import CodeGen, _BoxedCodeGen

__all__ = [
    "CodeGen",
    "DynamoError",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "OutputType",
    "PipelineStageBase",
    "as_placed",
    "ask_strategy",
    "autocast_state",
    "below_autograd",
    "boxed",
    "default_store",
    "descriptors",
    "dynamo_capture",
    "export_joint",
    "has_backend",
    "is_shard_placeholder",
    "keep_graph",
    "local_tensor",
    "mesh_without_group",
    "op_strategies",
    "ordered_gloo",
    "pipeline_actions",
    "placed",
    "pytree",
    "single_dim_strategies",
    "strategy_of",
    "tensor_meta",
]

DynamoError = dynamo.exc.TorchDynamoException


def default_store() -> dist.Store:
    """The key-value store behind the default process group."""
    return _get_default_store()


def ordered_gloo() -> str:
    """The name of a gloo backend whose groups run one collective at a time, in order.

    Gloo's two worker threads corrupt memory when they run collectives of one group at once on more than two
    ranks (seen on torch 2.13: heap corruption within some hundred concurrent all-gathers on 3 ranks). One
    worker keeps collectives asynchronous to the computation, which is the overlap that matters.
    """
    name = "shardgraph_gloo"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _one_worker_gloo, devices=["cpu"])
    return name


def group_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The process group along one axis of ``mesh`` or several, made the first time; all ranks must ask alike."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    backend = dist.get_backend(mesh.get_group(axes[0]))
    return mesh[axes]._flatten("+".join(axes), backend).get_group()


def _one_worker_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The shard that this rank holds of a DTensor, outside of autograd; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_placed(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor that lies as ``like``, of which it has this rank's shape and the dtype.

    ``DTensor.from_local`` would derive both anew, which for every gradient of every step is time that a user feels.
    """
    return DTensor(local, like._spec, requires_grad=False)


def placed(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """The DTensor of global ``shape`` of which this rank holds ``local``, wherever that is.

    ``DTensor.from_local`` would move it to the device of the mesh.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def has_backend(device_type: str) -> bool:
    """Whether the default process group communicates tensors of a kind of device."""
    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    except RuntimeError:
        return False
    return True


def below_autograd() -> AbstractContextManager[None]:
    """Operations in the body go straight to their kernels.

    The graphs have their own backward, so what autograd would do for each operation is wasted; for a collective that is
    a call of Python, longer than starting it.
    """
    return torch._C._AutoDispatchBelowAutograd()


def keep_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """The ambient autocast of a device type, as part of what a program depends on."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """``gm`` as a function of one list, which it empties: inputs die at their last use."""
    copy = fx.GraphModule(gm, gm.graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    copy.recompile()
    return copy.forward


def _ignorable_calls() -> set[Callable[..., Any]]:
    # A log call in a forward is no reason not to compile it. Libraries add methods to Logger (warning_once).
    methods = {value for name, value in vars(logging.Logger).items() if callable(value) and not name.startswith("_")}
    return methods | {logging.debug, logging.info, logging.warning, logging.error, warnings.warn}


@contextmanager
def _static_capture() -> Iterator[None]:
    # Shapes and numbers are constants of a program: a new one is a new program, chosen by its key.
    with (
        _quiet_metrics(),
        dynamo.config.patch(
            automatic_dynamic_shapes=False,
            assume_static_by_default=True,
            specialize_int=True,
            specialize_float=True,
            ignore_logger_methods=dynamo.config.ignore_logger_methods | _ignorable_calls(),
        ),
    ):
        yield


@contextmanager
def _quiet_metrics() -> Iterator[None]:
    # torch 2.11 cannot write the ignored functions into its log of metrics, and prints a traceback at every capture.
    logger = logging.getLogger("torch._dynamo.metrics_context")
    before = logger.disabled
    logger.disabled = before or torch.__version__ < "2.12"
    try:
        yield
    finally:
        logger.disabled = before


def dynamo_capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Trace ``model`` through Python into one FX graph of torch calls.

    Raises:
        DynamoError: the model's Python cannot be traced in one piece.
    """
    with _static_capture(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_builtins(dynamo_graph_capture_for_export(model)(*args, **kwargs))


def _with_builtins(captured: fx.GraphModule) -> fx.GraphModule:
    """``captured``, whose inputs and outputs are packed by bytecode that may call any builtin.

    torch 2.11 runs it with the globals of the model's forward alone, and refuses a name that is not among them.
    """
    bytecodes: Any = (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten)
    for bytecode in bytecodes:
        bytecode.f_globals = {**vars(builtins), **bytecode.f_globals}
    return captured


def export_joint(captured: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower a captured module to its joint forward and backward graph of functional aten operations."""
    with ExitStack() as stack:
        stack.enter_context(tracing(captured.meta["tracing_context"]))
        return aot_export_joint_with_descriptors(stack, captured, args, kwargs)


# -- what earlier releases get wrong -------------------------------------------------------------------------


def _fake_attention(mode: FakeTensorMode, op: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """Output and logarithms of sums of the CPU's attention, the latter in the precision that it sums in."""
    batch, heads, rows = query.shape[:3]
    with mode:
        sums = query.new_empty(batch, rows, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        return torch.empty_like(query), sums.transpose(1, 2)


def _by_greedy_steps(found: Callable[..., Any]) -> Callable[..., Any]:
    """Redistribution of placements that are no order of shards, such as a dimension cut in blocks, step by step."""

    def wrapper(source: DTensorSpec, target: DTensorSpec, by_graph: bool | None = None) -> Any:
        try:
            return found(source, target, by_graph)
        except ValueError as error:
            if "unable to be interpreted" not in str(error):
                raise
            assert source.tensor_meta is not None
            planner = _redistribute.get_redistribute_planner(source.mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    return wrapper


if torch.__version__ < "2.12":
    # What 2.12 does where its search cannot read the placements; this release gives up.
    redistribution: Any = _redistribute
    redistribution._gen_transform_infos_non_cached = _by_greedy_steps(_redistribute._gen_transform_infos_non_cached)
    # Its tracer knows no value of it. What a device has does not change, so it can be asked while tracing.
    torch.compiler.assume_constant_result(torch.amp.is_autocast_available)
if torch.__version__ < "2.13":
    # Its fake kernel says that the logarithms are in single precision where the queries are in double.
    register_op_impl(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)(_fake_attention)


# -- DTensor's registries of strategies --------------------------------------------------------------------


def single_dim_strategies() -> Mapping[Any, Any]:
    """Tables of legal placements over one mesh dimension, by operator."""
    return DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs


def op_strategies() -> Mapping[Any, Any]:
    """Functions that say what is legal, by operator."""
    return DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs


def is_shard_placeholder(entry: Any) -> bool:
    """Whether an entry of a table is a cut of a dimension, in any number of blocks."""
    return isinstance(entry, _ShardingPlaceholder)


def mesh_without_group(parts: int) -> DeviceMesh:
    """A mesh of one dimension to ask strategies about; it needs no process group and cannot communicate."""
    return DeviceMesh("cpu", torch.arange(parts), _init_backend=False, _rank=0)


def tensor_meta(value: torch.Tensor) -> TensorMeta:
    """A tensor as strategies see it."""
    return TensorMeta(value.shape, value.stride(), value.dtype)


def strategy_of(mesh: DeviceMesh, placement: Placement, meta: TensorMeta) -> OpStrategy:
    """An operand that lies as ``placement`` says."""
    return OpStrategy([OpSpec(DTensorSpec(mesh, (placement,), meta))])


def ask_strategy(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[OpSpec]:
    """What the operator's strategy function says of operands of :func:`strategy_of`."""
    answer = op_strategies()[target](OpSchema(target, args, dict(kwargs)))
    return answer.strategies if isinstance(answer, OpStrategy) else []


def size_arguments() -> dict[Any, int]:
    """Which positional argument of an operator is the size of its result."""
    aten = torch.ops.aten
    known = DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx
    found = {target: at for target, at in known.items() if isinstance(at, int)}
    return found | {aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0, aten.empty.memory_format: 0}


# -- orders of pipeline schedules ----------------------------------------------------------------------------


class _RecordingStage:
    """As much of a pipeline stage as torch's schedules touch: it computes nothing and notes what it is told to."""

    is_first = is_last = False
    submod = None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = 0, ranks
        self.told: list[PipelineAction] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.told.append((self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.told.append((self.stage_index, "B", microbatch))

    def _messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _messages

    def perform_reduce_grad(self, scale: int) -> None:
        """Gradients are reduced once all microbatches are done."""


PipelineAction = tuple[int, str, int]
"""A stage, what it does (F, B, I or W: forward, backward, or the input's or the weights' part of it), a microbatch."""


def pipeline_actions(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[list[PipelineAction]]]:
    """What torch's ``schedule`` runs on each rank, in order; what it overlaps is in one list.

    A schedule of one stage per rank is run, with stages that record: what its ``pipeline_order`` says of the last stage
    is not what it does (torch 2.13: in 1F1B it forwards microbatches 1 to m there, where 0 to m - 1 are run).

    Raises:
        ValueError: torch's schedule does not take these numbers.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind: Any = get_schedule_class(schedule)
    if not issubclass(kind, PipelineScheduleSingle):
        order = kind([_RecordingStage(0, stages, ranks) for _ in range(stages // ranks)], microbatches).pipeline_order
        return [[_leaves(action) for action in order[rank] if action is not None] for rank in range(ranks)]
    recorded = [_RecordingStage(index, stages, ranks) for index in range(stages)]
    for stage in recorded:
        runner = kind(stage, microbatches)
        runner._initialize_stage = lambda *args, **kwargs: None  # there is nothing to allocate for messages
        runner._step_microbatches()
    return [[[action] for action in stage.told] for stage in recorded]


def _leaves(action: Any) -> list[PipelineAction]:
    leaves = action.sub_actions or (action,)
    return [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in leaves]
