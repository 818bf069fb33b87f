"""The states of random generators in a graph: read, and set again if a condition holds.

With these, a layer that is computed and then dropped at random has drawn nothing. They are done in the order of the
graph, as all that draws.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from shardgraph.ir.attributes import SOURCE
from shardgraph.torch_api import pytree

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
torch.library.define("shardgraph::generator_state", "(str device) -> Tensor", tags=_TAGS)
torch.library.define(
    "shardgraph::set_generator_state", "(Tensor condition, Tensor state, str device) -> Tensor", tags=_TAGS
)
GENERATOR_STATE = torch.ops.shardgraph.generator_state.default
SET_GENERATOR_STATE = torch.ops.shardgraph.set_generator_state.default
_BYTES = {"cpu": len(torch.get_rng_state())}
_OF_ACCELERATORS = 16


@torch.library.impl("shardgraph::generator_state", "CompositeExplicitAutograd")
def _(device: str) -> Tensor:
    state: Tensor = torch.get_rng_state() if device == "cpu" else getattr(torch, device).get_rng_state()
    return state


@torch.library.impl("shardgraph::set_generator_state", "CompositeExplicitAutograd")
def _(condition: Tensor, state: Tensor, device: str) -> Tensor:
    if condition:
        (torch if device == "cpu" else getattr(torch, device)).set_rng_state(state)
    return condition.clone()


@torch.library.register_fake("shardgraph::generator_state")
def _(device: str) -> Tensor:
    return torch.empty(_BYTES.get(device, _OF_ACCELERATORS), dtype=torch.uint8, device="cpu")


@torch.library.register_fake("shardgraph::set_generator_state")
def _(condition: Tensor, state: Tensor, device: str) -> Tensor:
    return torch.empty_like(condition)


def drop_unused_states(gm: fx.GraphModule) -> None:
    """Remove from a graph what sets a generator to the state that it has, since nothing was drawn after it was read."""
    drawn = 0
    read: dict[fx.Node, int] = {}
    now: dict[str, int] = {}
    for node in list(gm.graph.nodes):
        if node.target is GENERATOR_STATE:
            read[node] = now.get(node.args[0], 0)
        elif node.target is SET_GENERATOR_STATE and read.get(node.args[1]) == now.get(node.args[2], 0):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            drawn += 1
            for device in _devices(node):
                now[device] = drawn
    for node in read:
        if not node.users:
            gm.graph.erase_node(node)


def random_choices(gm: fx.GraphModule) -> tuple[str, ...]:
    """The lines where a graph chooses by random numbers alone between what it has computed: layers that are dropped."""
    lines: dict[str, None] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self):
        needed, queue, drawn = {node.args[0]}, [node.args[0]], False
        while queue:
            each = queue.pop()
            drawn = drawn or torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ())
            if each.op == "placeholder":
                break
            fresh = {*each.all_input_nodes} - needed
            needed |= fresh
            queue += fresh
        else:
            if drawn and not node.args[0].meta["val"].dim():
                lines[SOURCE.get(node) or ""] = None
    return tuple(lines)


def _devices(node: fx.Node) -> set[str]:
    """The devices on which a node draws, or sets the state."""
    if node.target is SET_GENERATOR_STATE:
        return {node.args[2]}
    return {each.device.type for each in pytree.tree_leaves(node.meta["val"]) if isinstance(each, Tensor)}
