"""What a program has that a file of plain PyTorch cannot have, and what would work instead."""

from __future__ import annotations

import torch

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.passes.program import Program


def check(program: Program, by_tokens: bool = False) -> None:
    """Raise ShardGraphError if a program has what an emitted file cannot do.

    ``by_tokens``: the losses of data ranks are to be weighed by the elements that they are means of.
    """
    plan = program.plan
    if plan.offload.disk is not None:
        raise ShardGraphError(
            f"plan {plan.name!r} keeps parameters in files that ranks update in place, and an emitted program has its "
            "weights in one file that it reads: emit it with offload='parameters', which keeps them in host memory"
        )
    if not program.trained:
        raise ShardGraphError("the program has no backward: emit a call that is trained, with a loss and gradients")
    if program.joint.results:
        name = program.joint.results[0].fqn
        raise ShardGraphError(
            f"forward sets the attribute {name!r} of the model, which an emitted file does not have: return it instead"
        )
    if program.joint.shortened:
        raise ShardGraphError(
            f"the embedding of {program.joint.shortened[0].fqn!r} has max_norm, and rows are shortened before the "
            "program runs, which an emitted file does not do: leave max_norm out, or use the compiled module"
        )
    if not all(alias.plain for alias in program.joint.aliases.values()):
        raise ShardGraphError(
            "forward returns a view of a complex tensor that has other values than its memory (its conjugate, or its "
            "real or imaginary part), which an emitted file does not make: return a copy, such as output.real.clone()"
        )
    if not gives_loss(program):
        _check_outputs(program, by_tokens)


def gives_loss(program: Program) -> bool:
    """Whether the program's only output is a loss, of which it has the gradient too."""
    roles = [role for role, _ in ir.outputs(program.joint.module)]
    outputs = [role for role in roles if isinstance(role, ir.Output) and role.index < program.joint.returned]
    if len(outputs) != 1 or program.joint.aliases:
        return False
    value = getattr(dict(ir.outputs(program.joint.module))[outputs[0]], "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _check_outputs(program: Program, by_tokens: bool) -> None:
    """Raise ShardGraphError unless a loss can be computed of the program's outputs, outside of it."""
    instead = "give a loss_fn and a target; of a compiled module, use train_step before save_program"
    if program.plan.pipeline is not None:
        raise ShardGraphError(
            "the program gives no loss, and the stages of a pipeline train microbatch by microbatch, each with its "
            f"part of the loss: {instead}"
        )
    if by_tokens:
        raise ShardGraphError(
            "the program gives no loss, so that nothing says how many tokens one is a mean of: weigh the loss of the "
            f"training loop, emit it with loss_weight='ranks', or {instead}"
        )
    if program.optional:
        raise ShardGraphError(
            f"the program has several outputs, of which some do not depend on {program.optional[0]!r}: which "
            f"parameters have a gradient would be the loop's to say. Return only what is trained on, or {instead}"
        )
