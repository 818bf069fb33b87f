"""Lookups beyond the rows of their table, such as positions without an embedding: refused, with the line."""

from __future__ import annotations

import torch
from torch import fx

from shardgraph.capture.known_values import Known, known
from shardgraph.errors import CaptureError
from shardgraph.ir.attributes import SOURCE
from shardgraph.torch_api import unset_fake_temporarily


def check_lookups(gm: fx.GraphModule) -> None:
    """Raise CaptureError if an embedding has fewer rows than the shapes of inputs alone make forward look up.

    A run would raise an IndexError there, or on a GPU end by an assertion of the kernel.
    """
    values: dict[fx.Node, Known | None] = {}
    with torch.device("cpu"), torch.no_grad(), unset_fake_temporarily():
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            table, indices = node.args[:2]
            read = known(indices, values)
            if read is None or not read.held.numel():
                continue
            first, last = read.held.min().item(), read.held.max().item()
            rows = table.meta["val"].shape[0]
            if first < 0 or last >= rows:
                beyond = first if first < 0 else last
                raise CaptureError(
                    f"forward looks up row {beyond} of an embedding that has {rows} rows, at {SOURCE.of(node)}: call "
                    f"it with shorter inputs, or give the embedding more rows"
                )
