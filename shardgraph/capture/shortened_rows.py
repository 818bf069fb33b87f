"""Lookups that shorten rows of their table first (``max_norm``): the captured graph reads the table as if that were
done, and says which rows it is of.

A row is shortened by itself, so it does not matter when that happens as long as nothing reads the row before: whoever
runs the graph does it first, for the rows of all ranks and microbatches together, as for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import CaptureError
from shardgraph.ir.attributes import ROLE
from shardgraph.ir.subgraph import subgraph

aten = torch.ops.aten
_RENORM = aten.embedding_renorm.default
_SAME = (aten.clone.default, aten.detach.default, aten.alias.default)
_INDICES: Mapping[Any, int] = {
    aten.embedding.default: 1,
    aten._embedding_bag.default: 1,
    aten._embedding_bag_forward_only.default: 1,
}

Line = Callable[[fx.Node], str]


@dataclass(frozen=True)
class Shortening:
    """Rows of the parameter ``fqn`` that are shortened for the lookup of ``indices``, a node of the graph."""

    fqn: str
    indices: fx.Node
    max_norm: float
    norm_type: float
    line: str

    def of(self, gm: fx.GraphModule) -> ir.ShortenedRows:
        """The same with a graph of its own for the indices, once inputs of ``gm`` have roles.

        Raises:
            CaptureError: they depend on more than inputs and buffers.
        """
        needed, queue = {self.indices}, [self.indices]
        while queue:
            fresh = {*queue.pop().all_input_nodes} - needed
            needed |= fresh
            queue += fresh
        for node in needed:
            drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if drawn or (node.op == "placeholder" and not isinstance(ROLE.get(node), (ir.Input, ir.Buffer))):
                raise CaptureError(
                    f"the embedding of {self.fqn!r} has max_norm and looks up rows that forward computes from "
                    f"{'random numbers' if drawn else 'parameters'}, at {self.line}: rows are shortened before a call, "
                    "so what is looked up must follow from its inputs and buffers. Leave max_norm out, and divide what "
                    "the embedding returns by its norm"
                )
        nodes = [node for node in gm.graph.nodes if node in needed]
        return ir.ShortenedRows(
            self.fqn, self.max_norm, self.norm_type, subgraph(gm, nodes, (), [(None, self.indices)])
        )


def take_shortenings(gm: fx.GraphModule, name_of: Callable[[str], str], line: Line) -> list[Shortening]:
    """Take what shortens rows of parameters out of a lowered graph, with the results and tangents that it has for it.

    ``name_of`` is the first name of a parameter, ``line`` tells that of a node. Writes of parameters by anything else
    stay.

    Raises:
        CaptureError: what is read of a parameter would be another value if its rows were shortened before.
    """
    output = gm.graph.output_node()
    descriptions, (values,) = list(output.meta["desc"]), output.args
    taken: dict[str, list[fx.Node]] = {}
    for desc, value in zip(descriptions, values, strict=True):
        if _is_write(desc) and (renorms := _renorms(value)):
            taken.setdefault(name_of(desc.mutated_input.target), []).extend(renorms)
    if not taken:
        return []
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    versions = {fqn: _versions(gm, fqn, name_of, renorms) for fqn, renorms in taken.items()}
    found = []
    for fqn, renorms in taken.items():
        renorms.sort(key=order.__getitem__)
        for reader in _readers(versions[fqn]):
            _check_read(fqn, reader, [each for each in renorms if order[each] < order[reader]], renorms, line)
        for renorm in renorms:
            _, indices, max_norm, norm_type = renorm.args
            found.append(Shortening(fqn, indices, float(max_norm), float(norm_type), line(renorm)))
    results = list(zip(descriptions, values, strict=True))
    dropped = [desc for desc, _ in results if _is_write(desc) and name_of(desc.mutated_input.target) in taken]
    kept = [(desc, value) for desc, value in results if desc not in dropped]
    output.args = (tuple(value for _, value in kept),)
    output.meta["desc"] = [desc for desc, _ in kept]
    _drop_tangents(gm, dropped)
    for of_parameter in versions.values():
        _read_stored(gm, of_parameter)
    return found


def _is_write(desc: Any) -> bool:
    """Whether a result is the new value of a parameter."""
    return type(desc).__name__ == "InputMutationAOTOutput" and type(desc.mutated_input).__name__ == "ParamAOTInput"


def _renorms(value: Any) -> list[fx.Node]:
    """What makes a new value of a parameter: shortenings alone, or nothing."""
    found = []
    while isinstance(value, fx.Node) and value.op == "call_function":
        if value.target is _RENORM:
            found.append(value)
        elif value.target not in _SAME:
            return []
        value = value.args[0]
    return found


def _versions(
    gm: fx.GraphModule, fqn: str, name_of: Callable[[str], str], renorms: list[fx.Node]
) -> Mapping[fx.Node, fx.Node]:
    """The nodes that are the parameter, before or after shortening, each with the input of the graph that it is."""
    versions: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        desc = node.meta.get("desc") if node.op == "placeholder" else None
        if type(desc).__name__ == "ParamAOTInput" and name_of(desc.target) == fqn:
            versions[node] = node
        elif node in renorms or (node.target in _SAME and node.args[0] in versions):
            versions[node] = versions[node.args[0]]
    return versions


def _readers(versions: Mapping[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    return (user for node in versions for user in node.users if user not in versions and user.op != "output")


def _check_read(fqn: str, reader: fx.Node, before: list[fx.Node], renorms: list[fx.Node], line: Line) -> None:
    """Raise CaptureError if a node reads rows of a parameter that are shortened only later."""
    if len(before) == len(renorms):
        return
    position = _INDICES.get(reader.target)
    if position is None or reader.args[position] not in [renorm.args[1] for renorm in before]:
        later = renorms[len(before)]
        raise CaptureError(
            f"forward reads {fqn!r} at {line(reader)}, and shortens rows of it after that, at {line(later)} (max_norm "
            "of an embedding): a sharded program shortens them before a call. Look them up before they are read, or "
            "leave max_norm out"
        )


def _drop_tangents(gm: fx.GraphModule, results: list[Any]) -> None:
    """Without a result, the gradient with respect to it is not added either."""
    for tangent in [node for node in gm.graph.nodes if node.op == "placeholder"]:
        if type(tangent.meta["desc"]).__name__ == "TangentAOTInput" and tangent.meta["desc"].output in results:
            for total in list(tangent.users):
                assert total.target is aten.add.Tensor, total.format_node()
                (other,) = (each for each in total.args if each is not tangent)
                total.replace_all_uses_with(other)
                gm.graph.erase_node(total)
            gm.graph.erase_node(tangent)


def _read_stored(gm: fx.GraphModule, versions: Mapping[fx.Node, fx.Node]) -> None:
    """Let what reads a parameter, before or after shortening, read the input of the graph."""
    for node, stored in versions.items():
        if node is not stored:
            node.replace_all_uses_with(stored)
    for node in reversed(list(versions)):
        if node is not versions[node]:
            gm.graph.erase_node(node)
