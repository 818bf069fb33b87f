"""Every argument of every public function and class, of FairScale's names too, refuses by name what it may not be.

*Clear* is an error of shardgraph that is told in ten lines at most and names the argument or field (or Python's own
error for an argument that is missing or unknown). *Nonsense* is a value that :func:`_may` does not allow for the name.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardgraph as S
from shardgraph import fairscale as F
from tests.refused import clear

X = torch.zeros(2, 4)
FSDP = S.preset("fsdp", {"dp": 2})
H100 = S.Cluster.of("H100")
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


COMPILED = S.compile(linear(), "single", example_inputs=X)
REPLICA = S.compile(linear(), "local-sgd", mesh={"replicas": 1}, example_inputs=X)
MEASURED = S.compile(linear(), "ddp", mesh={"dp": 1}, example_inputs=X, gradient_statistics=True)
ANALYSIS = S.analyze(linear(), (X,), mesh={"dp": 2}, cluster="H100")
AVERAGES = S.AveragedWeights(COMPILED)
OWNED = S.ShardedOptimizer(linear().parameters(), torch.optim.SGD, lr=0.1)
SCALED = S.AdaScale(sgd(MEASURED), MEASURED)
with S.MemoryTracker(COMPILED) as TRACKER:
    COMPILED(X).sum().backward()
TRACE = TRACKER.trace

# -- what is called, with arguments that it takes

_CALL = {"model": linear(), "example_inputs": (X,), "cluster": "H100"}
_NOWHERE = "/nowhere/at all"
FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (S.compile, {"model": linear(), "plan": "single"}),
    (S.analyze, {**_CALL, "mesh": {"dp": 2}}),
    (S.verify, {"model": linear(), "example_inputs": (X,)}),
    (S.prove, {**_CALL, "mesh": {"dp": 2}}),
    (S.plan, _CALL),
    (S.front, {**_CALL, "devices": (2,)}),
    (S.what_if, {"plan": FSDP, **_CALL, "network": 0.5}),
    (S.compare, {"first": FSDP, "second": FSDP, **_CALL}),
    (S.emit, {"model": linear(), "directory": _NOWHERE, "example_inputs": (X,)}),
    (S.lint, {"model": linear(), "example_inputs": (X,), "mesh": {"dp": 2}}),
    (S.annotate, {"model": linear(), "annotations": {}}),
    (S.assume, {"place": "model.py:3", "value": None}),
    (S.rewrite, {"kind": "no.such.Class", "forward": None}),
    (S.visualize, {"what": FSDP, "path": "/nowhere/x.svg"}),
    (S.preset, {"name": "fsdp", "mesh": {"dp": 2}}),
    (S.launch, {"fn": print, "nproc": 1}),
    (S.elastic, {"fn": print, "nproc": 1}),
    (S.calibrate, {"nproc": 2, "seconds": 1.0}),
    (S.save_checkpoint, {"path": _NOWHERE, "step": 1, "model": linear()}),
    (S.load_checkpoint, {"path": _NOWHERE, "model": linear()}),
    (S.checkpoints, {"path": _NOWHERE}),
    (S.consolidate, {"shards": "/nowhere", "path": "/nowhere/x"}),
    (S.split, {"path": "/nowhere", "folder": "/nowhere/x", "model": linear()}),
    (S.flight_record, {}),
    (S.find_nonfinite, {"sharded": COMPILED}),
    (S.check_replicas, {"sharded": COMPILED}),
    (S.clip_grad_norm_, {"parameters": list(linear().parameters()), "max_norm": 1.0}),
    (S.GradScaler, {}),
    (S.LayerwiseGradScaler, {"model": linear(), "factors": {"": 2.0}}),
    (S.AveragedWeights, {"module": COMPILED}),
    (S.AdaScale, {"optimizer": sgd(MEASURED), "module": MEASURED}),
    (S.LocalSGD, {"optimizer": sgd(REPLICA), "module": REPLICA, "frequency": 2}),
    (S.SlowMo, {"optimizer": sgd(REPLICA), "module": REPLICA, "frequency": 2}),
    (S.StochasticGradientPush, {"optimizer": sgd(REPLICA), "module": REPLICA}),
    (S.ShardedOptimizer, {"params": list(linear().parameters()), "optim": torch.optim.SGD}),
    (S.MemoryTracker, {"model": linear()}),
    (S.WaitTracker, {"model": COMPILED}),
    (S.Pipeline, {}),
    (S.Offload, {}),
    (S.Precision, {}),
    (S.Batch, {"samples": 4}),
    (S.Lengths, {"fill": {"x": 0}, "multiple_of": 8}),
    (S.Plan, {"name": "a", "mesh": FSDP.mesh, "parameters": FSDP.parameters}),
    (S.ParameterPlan, {"placements": ("shard(0)",)}),
    (S.Plan.load, {"path": "/nowhere"}),
    (S.Cluster, {"name": "a", "device": H100.device, "devices_per_node": 1, "nodes": 1, "intra": H100.intra}),
    (S.Cluster.of, {"name": "H100"}),
    (S.Cluster.load, {"path": "/nowhere"}),
    (S.Device, {"name": "a", "memory": 10, "peak": H100.device.peak, "rates": H100.device.rates}),
    (S.Rate, {"per_second": 1.0}),
    (S.Link, {"bandwidth": 1.0, "latency": 0.0}),
    (S.shard, {"dim": 0, "mesh_dim": "tp"}),
    (S.replicate, {}),
    (S.output, {"placement": S.replicate()}),
    (S.precision, {"dtype": "bfloat16"}),
    (S.stage, {"index": 1}),
    (F.FSDP, {"module": linear()}),
    (F.OSS, {"params": list(linear().parameters()), "lr": 0.1}),
    (F.ShardedDataParallel, {"module": LAYERS, "sharded_optimizer": F.OSS(LAYERS.parameters(), lr=0.1)}),
    (F.ShardedGradScaler, {}),
    (F.LayerwiseGradientScaler, {"model": linear(), "layer_scale_dict": {"": 2.0}}),
    (F.AdaScale, {"optimizer": sgd(MEASURED)}),
    (F.SlowMoDistributedDataParallel, {"module": linear(), "nprocs_per_node": 1}),
    (F.Pipe, {"module": LAYERS, "balance": [2]}),
    (F.OffloadModel, {"model": LAYERS, "device": "cpu"}),
    (F.MEVO, {"proj_weight": nn.Parameter(X)}),
    (F.Top2Gate, {"model_dim": 4, "num_experts": 2}),
    (F.MOELayer, {"gate": F.Top2Gate(4, 2), "experts": nn.ModuleList([linear(), linear()])}),
    (F.ColumnParallelLinear, {"in_features": 4, "out_features": 4}),
    (F.RowParallelLinear, {"in_features": 4, "out_features": 4}),
    (F.ParallelEmbedding, {"num_embeddings": 4, "embedding_dim": 4}),
    (F.VocabParallelEmbedding, {"num_embeddings": 4, "embedding_dim": 4}),
    (F.initialize_model_parallel, {"model_parallel_size_": 1}),
    (F.checkpoint_wrapper, {"module": linear()}),
    (F.wrap, {"module": linear()}),
    (F.auto_wrap, {"module": linear()}),
    (F.enable_wrap, {"wrapper_cls": F.FSDP}),
    (F.default_auto_wrap_policy, {"module": linear(), "recurse": True, "unwrapped_params": 3}),
    (F.balance_by_size, {"partitions": 1, "module": LAYERS, "input": X}),
    (F.balance_by_time, {"partitions": 1, "module": LAYERS, "sample": X}),
    (F.skippable, {}),
    (F.stash, {"name": "a", "tensor": X}),
    (F.pop, {"name": "a"}),
    (F.verify_skippables, {"module": LAYERS}),
]
METHODS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (COMPILED.clip_grad_norm_, {"max_norm": 1.0}),
    (COMPILED.join, {}),
    (COMPILED.load_state_dict, {"state_dict": COMPILED.state_dict()}),
    (COMPILED.load_local_state_dict, {"state_dict": COMPILED.local_state_dict()}),
    (COMPILED.register_comm_hook, {"state": None, "hook": print}),
    (COMPILED.rows_of, {"samples": 4}),
    (COMPILED.save_program, {"directory": _NOWHERE}),
    (COMPILED.save_safetensors, {"path": "/nowhere/x.safetensors"}),
    (COMPILED.set_is_last_backward, {"is_last_backward": True}),
    (COMPILED.set_requires_gradient_sync, {"requires_gradient_sync": True}),
    (COMPILED.train, {}),
    (COMPILED.unshard, {}),
    (COMPILED.zero_grad, {}),
    (FSDP.save, {"path": "/nowhere/x.yaml"}),
    (H100.save, {"path": "/nowhere/x.yaml"}),
    (ANALYSIS.max_batch, {}),
    (ANALYSIS.max_sequence, {}),
    (ANALYSIS.table, {}),
    (ANALYSIS.transfer_table, {}),
    (ANALYSIS.save_trace, {"path": "/nowhere/x.json"}),
    (TRACE.compare, {"other": TRACE}),
    (TRACE.cut_points, {"count": 1}),
    (TRACE.draw, {"path": "/nowhere/x.svg"}),
    (TRACE.save, {"path": "/nowhere/x.json"}),
    (OWNED.clip_grad_norm, {"max_norm": 1.0}),
    (OWNED.consolidate_state_dict, {}),
    (OWNED.state_dict, {}),
    (OWNED.load_state_dict, {"state_dict": OWNED.state_dict()}),
    (AVERAGES.load_state_dict, {"state_dict": AVERAGES.state_dict()}),
    (SCALED.gain, {}),
    (SCALED.set_scale, {"scale": 1.0}),
    (SCALED.set_num_gradients_to_accumulate, {"num_gradients_to_accumulate": 1}),
]

MADE_BY_US = {
    *(S.Analysis, S.Loaded, S.MemoryTrace, S.NonFinite, S.Proof, S.Replicas, S.Save),  # results
    *(S.ShardedModule, S.constrain),  # compile makes it; the tracer follows it, test_bad_input.py has it
    *(
        S.wait_for_saves,
        S.ignored,
        S.keep_gathered,
        S.offload,
        S.recompute,
        S.reshard,
        S.save,
        F.Namespace,
    ),  # no argument
}
"""What is public, and is not called with arguments by people, or has none."""

# -- what an argument may be


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_)) and math.isfinite(_float(value))


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _positive(value: Any) -> bool:
    return _real(value) and value > 0


def _not_negative(value: Any) -> bool:
    return _real(value) and value >= 0


def _part(value: Any) -> bool:
    return _real(value) and 0 <= value <= 1


def _infinite(value: Any) -> bool:
    return isinstance(value, float) and value == math.inf


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _from_zero(value: Any) -> bool:
    return _whole(value, 0)


def _pathlike(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _paths(value: Any) -> bool:
    return _pathlike(value) or (
        _sequence(value) and all(_pathlike(each) or isinstance(each, Mapping) for each in value)
    )


def _text(value: Any) -> bool:
    return type(value) is str


def _bool(value: Any) -> bool:
    return type(value) is bool


def _sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list, range))


def _inputs(value: Any) -> bool:
    return isinstance(value, (tuple, list, torch.Tensor))


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _dtype(value: Any) -> bool:
    return isinstance(value, (str, torch.dtype))


def _device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _iterator(value: Any) -> bool:
    return isinstance(value, Iterator)


def _tensors(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Iterator)) or (
        isinstance(value, (tuple, list, set)) and all(isinstance(each, torch.Tensor) for each in value)
    )


def _classes(value: Any) -> bool:
    return isinstance(value, (tuple, list, set)) and all(isinstance(each, type) for each in value)


def _names(value: Any) -> bool:
    if isinstance(value, Iterator):
        return True  # it gives its values once, and the one here has none any more
    return isinstance(value, Iterable) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


def _never(value: Any) -> bool:
    return False


def _anything(value: Any) -> bool:
    return True


def _named(rule: Callable[[Any], bool], names: str) -> dict[str, Callable[[Any], bool]]:
    return dict.fromkeys(names.split(), rule)


MAY: dict[str, Callable[[Any], bool]] = {
    **_named(_module, "model module gate"),
    **_named(_inputs, "example_inputs"),
    **_named(_mapping, "example_kwargs mesh annotations state_dict factors objects layer_scale_dict fill efficiency"),
    **_named(_mapping, "peak rates sustained latencies"),
    **_named(lambda v: _pathlike(v) or isinstance(v, S.Plan), "plan cluster on first second what"),
    **_named(_paths, "path folder directory shards disk"),
    **_named(lambda v: isinstance(v, (str, S.Precision)), "precision offload"),
    **_named(_text, "backend recompute loss_weight place entry name source note mesh_dim axis experts random"),
    **_named(
        _positive, "seconds timeout tune network init_scale per_second slowmo_lr lr scale gradient_predivide_factor"
    ),
    **_named(_positive, "min_factor max_factor min_scale max_scale max_norm alignment"),
    **_named(lambda v: _text(v) or (_real(v) and v >= 1), "memory loss_chunk allocation"),
    **_named(_whole, "global_batch world_size steps sequence nproc nodes frequency devices_per_node growth_interval"),
    **_named(_whole, "average_frequency multiple_of microbatches ranks samples calls blocks least chunks num_slices"),
    **_named(_whole, "in_features out_features stride num_embeddings embedding_dim model_parallel_size_ partitions"),
    **_named(_whole, "pipeline_length nprocs_per_node slowmo_frequency slowmo_num_shards localsgd_frequency"),
    **_named(_whole, "model_dim num_experts num_microbatches tile_factor num_gradients_to_accumulate copies schema"),
    **_named(_from_zero, "step index at restarts every staleness prefetch bucket unwrapped_params reduce_buffer_size"),
    **_named(_from_zero, "dimension"),
    **_named(_bool, "training fold fp64 progress initialize gradient_statistics scheduled background enabled"),
    **_named(_bool, "powers_of_two inputs activations optimizer_state strict assign warmup required debias_ewma"),
    **_named(_bool, "is_scaled_loss error_if_nonfinite state_as_objects reshard_after_forward disable_reshard_on_root"),
    **_named(_bool, "mixed_precision fp32_reduce_scatter flatten_parameters move_params_to_cpu move_grads_to_cpu"),
    **_named(_bool, "no_broadcast_optim_state clear_autocast_cache force_input_to_fp32 verbose cpu_offload"),
    **_named(_bool, "state_dict_on_rank_0_only allow_reset_parameters broadcast_fp16 force_broadcast_object"),
    **_named(_bool, "broadcast_buffers sync_models_at_startup auto_refresh_trainable reduce_fp16 bias gather_output"),
    **_named(_bool, "warn_on_trainable_params_changed slowmo_memory_efficient deferred_batch_norm input_is_parallel"),
    **_named(_bool, "checkpoint_activation offload_to_cpu recurse module_is_root skip_params_check_for_root"),
    **_named(_bool, "scale_grad_by_freq sparse value recurse is_last_backward requires_gradient_sync async_op"),
    **_named(_bool, "divide_by_initial_world_size enable throw_on_early_termination set_to_none mode all_ranks"),
    **_named(_bool, "update_smoothing"),
    **_named(callable, "hook filter_params_fn loss_fn fn outer optim init_method auto_wrap_policy"),
    **_named(_sequence, "modules stages balance among args remarks considered replicas devices bounds"),
    **_named(_dtype, "dtype outputs buffers reduce products broadcast_dtype compute_dtype buffer_dtype"),
    **_named(_device, "device offload_device compute_device state_dict_device"),
    **_named(_part, "decay overlap smoothing momentum slowmo_momentum"),
    **_named(_real, "margin"),
    **_named(_not_negative, "tolerance overhead doubt sync param_scale bucket_cap_mb min_num_params"),
    **_named(lambda v: _positive(v) or _infinite(v), "moved_per_second bandwidth"),
    **_named(lambda v: _not_negative(v) or _infinite(v), "latency"),
    **_named(_classes, "force_leaf_modules exclude_wrap_modules"),
    **_named(_tensors, "parameters"),
    **_named(
        _never, "other pg_idx group process_group process_group_reduce_scatter sharded measured host intra inter batch"
    ),
    **_named(_never, "placement schedule checkpoint gradient reduction slowmo_base_algorithm init"),
    "optimizer": lambda v: _optimizer(v) or _text(v) or callable(v),
    "params": _iterator,
    "sharded_optimizer": _never,
    "pipeline": lambda v: isinstance(v, S.Pipeline),
    "lengths": lambda v: isinstance(v, S.Lengths),
    "seed": lambda v: _whole(v, -(2**63)),
    "keep": lambda v: v is None or _whole(v),
    "growth_factor": lambda v: _real(v) and v > 1,
    "backoff_factor": lambda v: _real(v) and 0 < v < 1,
    "dim": lambda v: _whole(v, -(10**9)),
    "padding_idx": lambda v: _whole(v, -4) and v < 4,
    "broadcast_buffer_size": lambda v: _whole(v, -1),
    "dtypes": lambda v: _sequence(v) and any(isinstance(each, str) for each in v),
    "kind": lambda v: isinstance(v, type) and issubclass(v, nn.Module),
    "forward": lambda v: v is None or callable(v),
    "extra": _anything,
    "state": _anything,
    "limit": lambda v: v is None or _whole(v),
    "count": _whole,
    "recipient_rank": lambda v: type(v) is int and -1 <= v < 1,
    "wrapper_cls": _anything,
    "norm_type": lambda v: _real(v) or (isinstance(v, float) and math.isinf(v)),
    "max_norm": lambda v: _not_negative(v) or _infinite(v),
    "input": _inputs,
    "sample": _inputs,
    "placements": _sequence,
    "operators": _sequence,
    "tensor": lambda v: v is None or isinstance(v, torch.Tensor),
    "proj_weight": lambda v: isinstance(v, torch.Tensor),
    "scaler": _never,
}
"""For the names of arguments, whether a value may be one; None may be, where it is the default."""

OF_ONE: dict[tuple[Callable[..., Any], str], Callable[[Any], bool]] = {
    (F.FSDP, "process_group_reduce_scatter"): lambda v: v is False,
    (S.front, "devices"): lambda v: _sequence(v) and len(v) > 0,
    (S.plan, "devices"): _whole,
    (S.what_if, "devices"): _whole,
    (ANALYSIS.transfer_table, "limit"): _whole,
    (ANALYSIS.transfer_table, "measured"): lambda v: _mapping(v) and not v,
    (SCALED.gain, "pg_idx"): lambda v: type(v) is int and v == 0,
    (S.elastic, "nproc"): lambda v: _whole(v) or callable(v),
    (S.elastic, "least"): lambda v: type(v) is int and v == 1,  # of one rank
    (S.assume, "value"): lambda v: v is None or _bool(v),
    (S.Offload, "parameters"): _bool,
    (S.Precision, "parameters"): _dtype,
    (S.Plan, "parameters"): _sequence,
    (S.Plan, "mesh"): _sequence,
    (S.Plan, "annotations"): _sequence,
    (S.Plan, "recompute"): lambda v: _text(v) or (type(v) is tuple and not v),
    (S.Plan, "activations"): _never,
    (S.Plan, "loss_chunk"): _whole,
    (S.ParameterPlan, "offload"): _bool,
    (S.Plan, "offload"): _never,
    (S.Plan, "precision"): lambda v: isinstance(v, S.Precision),
    (S.Cluster, "device"): _never,
    (S.preset, "mesh"): lambda v: _mapping(v) or _sequence(v),  # pairs
    (S.consolidate, "shards"): lambda v: _paths(v) and v not in ((), []),
    (S.Pipeline, "schedule"): _never,
    (F.ParallelEmbedding, "norm_type"): _positive,
    (F.ParallelEmbedding, "max_norm"): _positive,
    (F.VocabParallelEmbedding, "norm_type"): _positive,
    (F.VocabParallelEmbedding, "max_norm"): _positive,
    (F.OffloadModel, "model"): lambda v: _module(v) or (_sequence(v) and len(v) > 0),
    (F.stash, "name"): _text,
    (F.MOELayer, "experts"): _module,  # one of them
    (F.skippable, "stash"): _names,
    (F.skippable, "pop"): _names,
}
"""The same where it is of one function alone."""

_JUNK = [
    None, True, False, 0, 1, -1, 2, 10**400, -0.5, 0.5, 1.0, math.nan, math.inf, -math.inf, 1e300, 3j, "", "a", "3",
    "\0", b"x", (), (1,), ("a", 1), [], [None], [1, "a"], {}, {"a": 1}, {1: 2}, {"a": None}, set(), X, np.zeros(2),
    np.float32(1), torch.float32, torch.device("cpu"), nn.Linear, linear(), print, lambda: 1, object(), object, int,
    Ellipsis, range(3), iter([1]), sgd(linear()), FSDP, S.Pipeline(), S.Precision(),
]  # fmt: skip
JUNK = st.one_of(
    st.sampled_from(_JUNK),
    st.integers(),
    st.floats(),
    st.binary(max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=3),
)

Argument = tuple[Callable[..., Any], dict[str, Any], inspect.Parameter]


def _arguments() -> list[Argument]:
    return [
        (function, base, parameter)
        for function, base in (*FUNCTIONS, *METHODS)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _rule(argument: Argument) -> Callable[[Any], bool] | None:
    function, _, parameter = argument
    return OF_ONE.get((function, parameter.name), MAY.get(parameter.name))


def _fuzzed(argument: Argument, value: Any) -> None:
    function, base, parameter = argument
    rule = _rule(argument)
    assert rule is not None
    if value is parameter.default or (value is None and parameter.default is None) or rule(value):
        return  # it may be
    clear(lambda: function(**{**base, parameter.name: value}), parameter.name)


ARGUMENTS = _arguments()
FUZZ = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def test_every_public_name_and_every_argument_is_fuzzed():
    called = {function for function, _ in FUNCTIONS}
    public = {getattr(room, name) for room in (S, F) for name in room.__all__} | {S.compile}
    errors = {each for each in public if isinstance(each, type) and issubclass(each, Exception)}
    assert {each.__name__ for each in public - called - MADE_BY_US - errors} == set()
    assert [f"{each[0].__qualname__}({each[2].name})" for each in ARGUMENTS if _rule(each) is None] == []


@settings(FUZZ, max_examples=400)
@given(st.sampled_from(ARGUMENTS), JUNK)
def test_no_argument_of_a_wrong_type_or_out_of_range_is_accepted(argument, value):
    _fuzzed(argument, value)


@pytest.mark.slow
@settings(FUZZ, max_examples=5000)
@given(st.sampled_from(ARGUMENTS), JUNK)
def test_no_argument_is_accepted_in_5000(argument, value):
    _fuzzed(argument, value)


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda each: f"{each[0].__qualname__}-{each[2].name}")
def test_each_argument_refuses_each_value_that_it_may_not_be(argument):
    for value in _JUNK:
        _fuzzed(argument, value)
