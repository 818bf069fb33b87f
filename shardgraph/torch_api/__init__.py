"""The only package that uses private torch API, for torch 2.11 to 2.13.

All other packages import from here, so that a new torch release is a change to this package.
"""

# ruff: noqa: F401 (what is imported is exported)

import torch._dynamo as dynamo
import torch.utils._pytree as pytree
from torch import _neg_view as negated
from torch._C import _storage_address as storage_address  # type: ignore[attr-defined]  # the stubs lack it
from torch._functorch._aot_autograd.schemas import OutputType
from torch._ops import OpOverload, OpOverloadPacket
from torch._refs import tensor as tensor_of
from torch._subclasses.fake_tensor import DataDependentOutputException as NoValue
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase
from torch.fx.graph import CodeGen
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from shardgraph.torch_api import releases
from shardgraph.torch_api.allocator import allocations, undisturbed
from shardgraph.torch_api.attention import attention_on, positions_first, unit_stride
from shardgraph.torch_api.checkpoints import box_of, describe_states, read_metadata, storage_info, take_blocks
from shardgraph.torch_api.connections import (
    break_connections,
    break_store,
    can_break,
    connections_of,
    has_hung_up,
    innermost_store,
    members,
    operation_counts,
    own_connection,
    recorded_connections,
    store_port,
)
from shardgraph.torch_api.decisions import deciding, example_of, passes, traced_value
from shardgraph.torch_api.elsewhere import Elsewhere
from shardgraph.torch_api.execution import (
    ENTER_RANGE,
    LEAVE_RANGE,
    autocast_state,
    below_autograd,
    boxed,
    default_device,
    differentiated,
    entered_modes,
    function_modes,
    global_hooks,
    is_profiled,
    is_transformed,
    keep_graph,
    modes_active,
    next_operation,
    no_autocast,
    not_traced,
    tracer_settings,
    will_accumulate,
)
from shardgraph.torch_api.fakes import Fakes, by_layout, fake_like, is_plain_fake, meta_memory, outside_modes
from shardgraph.torch_api.groups import (
    all_gather,
    group_along,
    group_of_messages,
    has_backend,
    is_gloo,
    limit_wait,
    ordered_gloo,
    ordered_group,
    reduce_scatter,
    wait_of,
)
from shardgraph.torch_api.guarded_layers import Repeated
from shardgraph.torch_api.guards import Guards
from shardgraph.torch_api.inductor import compile_by_inductor, cxx_compiler_error
from shardgraph.torch_api.nodes import append_node, is_valid, parts_of_nodes
from shardgraph.torch_api.optimizers import (
    after_every_step,
    before_every_step,
    has_own_step,
    has_step_hooks,
    in_every_load,
    when_made,
)
from shardgraph.torch_api.recorder import GENERATED, communicated
from shardgraph.torch_api.recurrent import list_weights, read_weights
from shardgraph.torch_api.rms_norm import rms_norm_on
from shardgraph.torch_api.schedules import PipelineAction, pipeline_actions
from shardgraph.torch_api.stored_guards import NotStored, StoredGuards, known_module
from shardgraph.torch_api.strategies import (
    ask_strategy,
    is_shard_placeholder,
    mesh_without_group,
    op_strategies,
    single_dim_strategies,
    size_arguments,
    strategy_of,
    tensor_meta,
)
from shardgraph.torch_api.tensors import (
    as_placed,
    explain_refusals,
    is_viewed,
    local_tensor,
    map_tensors,
    placed,
    with_strides,
)
from shardgraph.torch_api.tracing import (
    FUNCTION_MODES,
    NothingTracedError,
    Trace,
    as_compiling,
    as_written,
    export_joint,
    runs_its_own,
    trace,
)

DynamoError = dynamo.exc.TorchDynamoException
