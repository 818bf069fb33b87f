"""Rules that need the captured and sharded program."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from shardgraph import ir
from shardgraph.cost_models.compute import ALIGNED
from shardgraph.cost_models.device import IN_16_BITS
from shardgraph.errors import ShardGraphError
from shardgraph.findings.finding import Finding
from shardgraph.ir.attributes import SOURCE
from shardgraph.passes.analysis.costs import node_cost
from shardgraph.passes.analysis.local import shard_bytes
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.analysis.rows import operation_of
from shardgraph.passes.program import Program
from shardgraph.sizes import format_bytes

aten = torch.ops.aten

_UNEVEN = 1.05  # how much larger the largest shards may be than even ones
_WORTH_PADDING = 0.02  # of the FLOPs of products
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


def of_program(program: Program, model: nn.Module, losses: bool = True) -> Iterator[Finding]:
    """What is found in the program of one call of ``model``; ``losses``: also in its losses, which are traced again."""
    if losses:
        yield from _losses(program)
    yield from _unused(program, model)
    yield from _tied(program)
    yield from _random(program)
    yield from _dropped(program)
    yield from _uneven(program)
    yield from _frozen(program, model)
    yield from _gathered_outputs(program)
    yield from _unaligned(program)


def _losses(program: Program) -> Iterator[Finding]:
    """Losses that do not add up to that of the whole batch when ranks' gradients are averaged."""
    ranks = program.plan.data_size
    try:
        losses = program.losses.values() if ranks > 1 else ()
    except ShardGraphError:
        return  # no loss of rows
    for loss in losses:
        kinds = {term.kind for term in loss.terms}
        if "counted" in kinds:
            yield Finding(
                "unequal-counts",
                "warning",
                "the loss is a mean over as many elements as the data say, such as tokens that are not ignored, and "
                f"the means of {ranks} ranks count equally, whatever their numbers of elements are",
                loss.source,
                "compile(..., loss_weight='tokens') weighs those of train_step; or have equally many on each rank",
            )
        if "sum" in kinds:
            yield Finding(
                "summed-loss",
                "warning",
                f"the loss is a sum over the batch, and gradients of {ranks} ranks are averaged: they are 1/{ranks} of "
                "those of the sum over all batches",
                loss.source,
                f"use a mean, or multiply the loss (or the learning rate of SGD) by {ranks}",
            )


def _unused(program: Program, model: nn.Module) -> Iterator[Finding]:
    if not program.trained:
        return  # a forward without gradients
    unused = [name for name, each in model.named_parameters() if each.requires_grad and name not in program.trained]
    if unused:
        yield Finding(
            "unused",
            "warning",
            f"{len(unused)} parameters that require a gradient do not get one in this call",
            ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else ""),
            "if that is meant, freeze them: requires_grad_(False) saves their gradient and optimizer state",
        )


def _tied(program: Program) -> Iterator[Finding]:
    for name, stages in program.owners.items():
        if len(stages) > 1:
            yield Finding(
                "tied-across-stages",
                "note",
                f"stages {' and '.join(map(str, stages))} hold it whole, and add up its gradient after each step",
                name,
                "untie it, or put both uses into one stage, if that is slow",
            )


def _random(program: Program) -> Iterator[Finding]:
    drawn = [node for gm in _forwards(program) for node in gm.graph.nodes if draws(node)]
    if drawn and program.plan.world_size > 1:
        yield Finding(
            "random",
            "note",
            f"{len(drawn)} operations draw random numbers, each rank along data axes its own: the numbers are others "
            "on another number of ranks, so losses are equal only in distribution",
            SOURCE.get(drawn[0]) or module_of(drawn[0]),
            "compile(..., random='samples') has a sample's numbers be the same on any number of ranks",
        )


def _dropped(program: Program) -> Iterator[Finding]:
    for line in program.joint.choices if program.trained else ():
        yield Finding(
            "dropped-layers",
            "warning",
            "a layer that is dropped at random is computed in any case, and if all ranks drop it, its gradients are "
            "zero where PyTorch has none: an optimizer with momentum or weight decay then moves its weights",
            line,
            "set the probability to 0 (layerdrop=0.0 in a config of transformers), or train it with plain SGD",
        )


def _uneven(program: Program) -> Iterator[Finding]:
    """Parameters whose shards differ, so that the first ranks hold more than the last."""
    context, worst = program.context, (0.0, "")
    held, even = 0, 0.0
    for name, entry in program.parameters.items():
        if entry.shard_axis is None:
            continue
        largest = shard_bytes(context, name, 0)
        whole = context.shapes[name].numel() * context.stored[name].itemsize
        share = whole / program.plan.mesh[entry.shard_axis][1]
        held, even = held + largest, even + share
        worst = max(worst, (largest - share, name))
    if even and held > _UNEVEN * even:
        _, name = worst
        yield Finding(
            "uneven-shards",
            "note",
            f"rank 0 holds {format_bytes(held)} of the sharded parameters, and an even share were {format_bytes(even)}:"
            " first dimensions are not multiples of the number of ranks",
            f"{name} of shape {tuple(context.shapes[name])}",
            "make the dimension a multiple, shard over fewer ranks (hsdp), or annotate small ones replicate()",
        )


def _frozen(program: Program, model: nn.Module) -> Iterator[Finding]:
    frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
    gathered = [
        name for name in frozen if name in program.parameters and program.parameters[name].reshard_after_forward
    ]
    gathered = [name for name in gathered if program.parameters[name].shard_axis is not None]
    if gathered and program.trained:
        sizes = program.context.shapes
        nbytes = sum(sizes[name].numel() * program.context.stored[name].itemsize for name in gathered)
        yield Finding(
            "frozen-gathered",
            "note",
            f"{len(gathered)} frozen parameters, {format_bytes(nbytes)}, are gathered in forward and again in backward",
            gathered[0],
            "annotate them keep_gathered() if there is room for that",
        )


def _gathered_outputs(program: Program) -> Iterator[Finding]:
    """Outputs beside a loss that are gathered over an operator axis for the caller alone."""
    axes = {axis for axis, _ in program.plan.operators}
    for gm in _forwards(program):
        results = [(role, value) for role, value in ir.outputs(gm) if isinstance(role, ir.Output)]
        values = [value for _, value in results if isinstance(value, fx.Node)]
        if not any(value.meta["val"].dim() == 0 for value in values):
            continue
        for value in values:
            if (start := _gather_of(value)) is not None and ir.group_of(start) in axes:
                yield Finding(
                    "gathered-output",
                    "note",
                    f"{format_bytes(value.meta['val'].nbytes)} of an output beside the loss are gathered over "
                    f"{ir.group_of(start)} for the caller",
                    SOURCE.get(value) or module_of(value),
                    "return the loss alone if nothing reads the output",
                )


def _unaligned(program: Program) -> Iterator[Finding]:
    """Products of forward in 16 bits that tensor cores are slow to read, such as with a vocabulary of odd size."""
    products = (node for gm in _forwards(program) for node in gm.graph.nodes if node.target in _PRODUCTS)
    costs = [(node, cost) for node in products if (cost := node_cost(node)).dtype in IN_16_BITS]
    slow = [(node, cost) for node, cost in costs if cost.alignment < ALIGNED]
    part = sum(cost.flops for _, cost in slow) / max(1, sum(cost.flops for _, cost in costs))
    if part >= _WORTH_PADDING:
        node, _ = max(slow, key=lambda each: each[1].flops)
        least = min(cost.alignment for _, cost in slow)
        yield Finding(
            "unaligned-products",
            "note",
            f"{part:.0%} of the FLOPs of forward's products in 16 bits are of matrices whose rows begin at multiples "
            f"of {least} bytes, and tensor cores are several times slower below {ALIGNED}",
            SOURCE.get(node) or module_of(node),
            "pad the dimension to a multiple of 8, better of 64: a vocabulary of transformers by "
            "model.resize_token_embeddings(pad_to_multiple_of=64)",
        )


def _gather_of(value: fx.Node) -> fx.Node | None:
    """The all-gather whose result ``value`` is, perhaps reshaped."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        if operation_of(value).startswith("all_gather"):
            return value
        sources = value.all_input_nodes
        if len(sources) != 1 or not _as_large(sources[0], value):
            return None
        value = sources[0]
    return None


def _as_large(source: fx.Node, value: fx.Node) -> bool:
    """Whether ``value`` may be ``source`` in another form, and both are tensors."""
    sizes = [getattr(each.meta["val"], "nbytes", -1) for each in (source, value)]
    return 0 <= sizes[0] <= sizes[1]


def _forwards(program: Program) -> Iterator[fx.GraphModule]:
    return (stage.kept.forward for stage in program.stages)
