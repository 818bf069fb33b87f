"""Methods that other wrappers of models have and a compiled module has not: what to do instead, in one line each."""

from __future__ import annotations

_RESHARDING = (
    "whether parameters stay whole after forward is part of the program: say so before compile, by the plan 'zero2' "
    "or annotate(model, {name: keep_gathered()})"
)
_PREFETCH = "the program starts gathers early, as many as Plan.prefetch says: dataclasses.replace(plan, prefetch=2)"
_MEAN = (
    "gradients are means over data ranks: scale the loss, or the gradients between backward and the optimizer's step"
)
_COLLECTIVES = "collectives are nodes of the program, and memory for them is torch's: leave this call out"
_CHANGED = "a program calls no Python for its collectives: change gradients between backward and the optimizer's step"
_CLASSES = (
    "sharded.full_state_dict() has whole values, state_dict() DTensors, and torch.distributed.checkpoint.state_dict "
    "both"
)
_FILES = (
    "torch.distributed.checkpoint writes and reads sharded.state_dict() with the optimizer's, on any number of ranks"
)

INSTEAD = {
    # FSDPModule of FSDP2
    "reset_iter_state": "a backward that fails leaves nothing behind: call the module again",
    "set_requires_all_reduce": "set_requires_gradient_sync(False) keeps gradients back along all data axes",
    "set_reshard_after_forward": _RESHARDING,
    "set_reshard_after_backward": _RESHARDING,
    "set_modules_to_forward_prefetch": _PREFETCH,
    "set_modules_to_backward_prefetch": _PREFETCH,
    "set_unshard_in_backward": "backward gathers what it reads, and no more: leave this call out",
    "set_custom_all_gather": _COLLECTIVES,
    "set_custom_reduce_scatter": _COLLECTIVES,
    "set_all_reduce_hook": _CHANGED,
    "set_post_optim_event": "a call of the module waits for the optimizer's step as torch's streams do: leave it out",
    "set_reduce_scatter_divide_factor": _MEAN,
    "set_gradient_divide_factor": _MEAN,
    "set_force_sum_reduction_for_comms": "reductions are sums, divided afterwards: leave this call out",
    "set_reduce_scatter_unused_params": "parameters that no rank's loss reaches have no gradient: leave this call out",
    "set_reduce_scatter_max_input_buffers": _COLLECTIVES,
    "set_separate_reduce_scatter_group": _COLLECTIVES,
    "set_allocate_memory_from_process_group_for_comm": _COLLECTIVES,
    "set_symm_mem_for_comm": _COLLECTIVES,
    # DistributedDataParallel
    "module": "a compiled module has the model's attributes and names itself, without a prefix: leave out '.module'",
    "join_hook": "torch's Join cannot repeat collectives of parameters in shards: with sharded.join(): ...",
    "will_sync_module_buffers": "buffers that forward writes are averaged in each program: leave this call out",
    "_set_static_graph": "the program is static by itself: leave this call out",
    "_set_params_and_buffers_to_ignore_for_model": "annotate(model, {name: ignored()}) before compile",
    "_register_fused_optim": "sharded.step(..., optimizer=optimizer) updates parameters in backward",
    "_register_builtin_comm_hook": "register_comm_hook with fp16_compress_hook or another of default_hooks",
    "_register_buffer_comm_hook": "buffers that forward writes are averaged; synchronise others between steps",
    # FullyShardedDataParallel of FSDP1
    "summon_full_params": "with sharded.unsharded(): ...",
    "set_state_dict_type": _CLASSES,
    "state_dict_type": _CLASSES,
    "optim_state_dict": "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(sharded, optimizer)",
    # an engine of DeepSpeed
    "backward": "loss.backward(), or sharded.train_step(inputs)",
    "save_checkpoint": _FILES,
    "load_checkpoint": _FILES,
}
"""What to do instead of each, by name."""


def instead_of(name: str, model: str) -> AttributeError | None:
    """The error for a name that a compiled module of a ``model`` has not, if another wrapper has it."""
    if name not in INSTEAD:
        return None
    return AttributeError(f"neither a compiled module nor {model} has {name!r}; instead: {INSTEAD[name]}")
