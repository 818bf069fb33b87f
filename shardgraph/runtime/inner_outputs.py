"""Outputs that other outputs are computed from, such as the scores that a model returns beside its loss.

In the original, the gradients of all these go through the tensor that is returned, so that a hook on it, or
``retain_grad()``, has their sum. A program's backward is one function of the gradients of all outputs: such a hook has
that of the output alone, and what it returns would not reach the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardgraph.errors import BackwardError
from shardgraph.ir import IntermediateBase, Output, OutputAlias, outputs, placeholders
from shardgraph.passes.program import Program
from shardgraph.runtime.gradients import tangent_of
from shardgraph.torch_api import pytree

Watched = list[tuple[int, "weakref.ref[torch.Tensor]"]]


def inner_outputs(program: Program) -> frozenset[int]:
    """The positions of those outputs among the model's, flattened."""
    joint = program.joint
    results = [(role, value) for role, value in outputs(joint.module) if isinstance(value, fx.Node)]
    given = placeholders(joint.module)
    # Views are computed of what is returned, or of a base that is, and autograd knows that they are.
    ends = {value for role, value in results if tangent_of(role, program) in given}
    own = {role.index: value for role, value in results if isinstance(role, Output) and role.index < joint.returned}
    computed = (index for index in own if index not in joint.aliases or _is_computed(joint.aliases[index]))
    return frozenset(index for index in computed if _reaches(own[index], ends - {own[index]}))


def _is_computed(alias: OutputAlias) -> bool:
    """Whether a view is of what the graph computes."""
    return isinstance(alias.base, (Output, IntermediateBase)) and not alias.detached


def _reaches(start: fx.Node, ends: set[fx.Node]) -> bool:
    """Whether one of the ``ends`` is computed from a node."""
    seen, waiting = {start}, [start]
    while waiting:
        for user in waiting.pop().users:
            if user in ends:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def watched(output: Any) -> Watched:
    """The tensors in a call's output that have gradients, with their positions; they live no longer for it."""
    tensors = ((index, leaf) for index, leaf in enumerate(pytree.tree_leaves(output)) if isinstance(leaf, torch.Tensor))
    return [(index, weakref.ref(tensor)) for index, tensor in tensors if tensor.requires_grad]


def check_unhooked(watched: Watched, inner: Callable[[], frozenset[int]]) -> None:
    """Raise BackwardError if one of the :func:`inner_outputs` has a hook, or retains its gradient."""
    for index, reference in watched:
        tensor = reference()
        if tensor is not None and (tensor._backward_hooks or tensor.retains_grad) and index in inner():
            raise BackwardError(
                f"output {index} of the model has a hook or retain_grad(), and other outputs are computed from it: of "
                "their gradients, which the model's own backward brings through it, a compiled one shows it nothing. "
                "Compute the loss from that output outside of the model, or call sharded.original(...), which runs as "
                "written"
            )
