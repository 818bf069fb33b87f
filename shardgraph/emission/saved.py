"""A program written to a directory, with its weights and a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardgraph
from shardgraph.emission.copies import copy_at_once
from shardgraph.emission.folder import write
from shardgraph.emission.pipeline import Pipelined
from shardgraph.emission.program import Emission, input_names, used_state
from shardgraph.emission.refusals import check
from shardgraph.passes.program import Program
from shardgraph.runtime.layout import Layout
from shardgraph.runtime.pipeline.microbatches import batch_size


def synthesized(kind: Sequence[Any], rows: int, parts: int) -> Any:
    """An input of this :func:`~shardgraph.capture.numbers.input_key`, of random numbers if it is a tensor, whose rows,
    if they are the batch's, are of one of so many ``parts``."""
    if len(kind) != 5:
        return kind
    shape, dtype = list(kind[0]), kind[1]
    if shape and shape[0] == rows:
        shape[0] *= parts
    values = torch.randn(shape, device="cpu") if dtype.is_floating_point else torch.randint(0, 2, shape, device="cpu")
    return values.to(dtype)


def save(
    program: Program,
    model: nn.Module,
    directory: str | Path,
    leaves: Sequence[Any],
    names: Sequence[str],
    scheduled: bool,
    whole: Mapping[str, torch.Tensor] | None = None,
    by_tokens: bool = False,
) -> list[Path]:
    """Write the files; returns them.

    Args:
        program: in the order in which it is to be written; unless ``scheduled``, it is the caller's to lose.
        model: the module, for its name and the values of buffers.
        directory: made if it is not there.
        leaves: the flattened inputs of a call, of which tensors are saved as the batch.
        names: what these are called, as :func:`shardgraph.module.input_names.input_names` has it.
        scheduled: what ``program`` is, for the title.
        whole: the unsharded parameters by name; default: those of ``model``.
        by_tokens: weigh the losses of data ranks by the elements that they are means of.
    """
    folder = Path(directory)
    if not scheduled:
        for gm in program.graphs.values():
            copy_at_once(gm)
    short = input_names([(re.search(r"\((\w+)\)", name) or [0, name])[1] for name in names])
    inputs = {i: short[i] for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    versions = f"shardgraph {shardgraph.__version__} with torch {torch.__version__}"
    emission = Emission(program, type(model).__name__, inputs, scheduled, versions, by_tokens)
    if program.plan.pipeline is None:
        files = {"program.py": emission.file()}
    else:
        files = Pipelined(emission, batch_size(list(leaves))).files()
    tensors = {"batch.pt": {inputs[i]: leaves[i] for i in inputs}}
    parameters = dict(whole if whole is not None else model.named_parameters())
    if not any(each.is_meta for each in parameters.values()):
        layout = Layout(model)
        buffers = {fqn: layout.buffer(fqn).to(value.dtype) for fqn, value in used_state(program).items()}
        constants = {
            f"constant.{node.target}": getattr(gm, str(node.target))
            for gm in program.graphs.values()
            for node in gm.graph.find_nodes(op="get_attr")
        }
        tensors["weights.pt"] = {fqn: parameters[fqn] for fqn in program.parameters} | buffers | constants
    write(folder, files, tensors)
    return [folder / name for name in (*files, *tensors)]


__all__ = ["check", "save", "synthesized"]
