"""Captured graphs that an earlier start left on disk, or another rank has: read if capturing now would give the same.

An entry is found by a digest of the model and the call, before anything is traced. It says which names the traced code
looked up, and holds if these mean now what they meant then: equal functions, classes and values. Then the tracer's
guards are made again, for the model as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from shardgraph import ir
from shardgraph.cache import entries
from shardgraph.cache.code import Names, check_calls, check_described, digest_of, names_in, state_of_torch
from shardgraph.cache.digests import Digest, NoDigest
from shardgraph.cache.graphs import graph_data, graph_of
from shardgraph.cache.made_once import CANNOT, Ranks, made_once, shared
from shardgraph.cache.values import NotStorable, Reader, Writer, spec_data, spec_of, well_formed
from shardgraph.capture.capture import Asked, capture, later_rows
from shardgraph.capture.decisions import assumptions
from shardgraph.capture.export import Traced
from shardgraph.capture.numbers import is_number
from shardgraph.capture.rewrites import rewrites_of
from shardgraph.torch_api import (
    FakeTensorMode,
    StoredGuards,
    autocast_state,
    global_hooks,
    modes_active,
    pytree,
    tracer_settings,
)

log = logging.getLogger(__name__)


def remembered(call: Any, device: torch.device, ranks: Ranks | None, **options: Any) -> ir.JointGraph:
    """:func:`shardgraph.capture.capture.capture` of a call; read from disk, or taken from one of ``ranks`` that has
    captured the same, if it is there and holds.

    ``call`` is a :class:`shardgraph.capture.captures.Call`.
    """

    def captured() -> ir.JointGraph:
        return capture(call.model, call.args, dict(call.kwargs), device=device, loss_fn=call.loss_fn, **options)

    digest = None
    if shared(ranks):
        try:
            digest = _digest(call, device, options)
        except CANNOT as error:
            log.info("the captured graph is not kept: %s", error)
    if digest is None:
        joint = captured()
    else:
        joint = made_once(
            "the captured graph",
            digest.text[:40],
            captured,
            partial(_entry, digest=digest, call=call, device=device),
            partial(_read, digest=digest, call=call, device=device, options=options),
            ranks,
        )
    joint.origin = None
    return joint


def _digest(call: Any, device: torch.device, options: dict[str, Any]) -> Digest:
    """What is known before tracing: versions, switches, the call and the whole model."""
    if modes_active() or global_hooks():
        raise NoDigest("a mode of torch or a hook of all modules is active")
    digest = Digest(call.model)
    digest.put(
        entries.versions(), state_of_torch(device), tracer_settings(), autocast_state(device.type), call.training
    )
    digest.put(assumptions())
    digest.outside(rewrites_of(call.model))
    digest.put([name for name, _ in call.model.named_parameters(remove_duplicate=False)])
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    digest.put(str(spec))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            place = str(leaf.device) if is_number(leaf) else "the device"
            shape = tuple(leaf.shape), leaf.stride(), str(leaf.dtype), leaf.requires_grad
            digest.put(type(leaf).__qualname__, *shape, place, is_number(leaf))
        else:
            digest.outside(leaf)
    digest.outside(options)
    digest.outside(call.loss_fn)
    digest.add(call.model)
    return digest


def _entry(
    joint: ir.JointGraph, digest: Digest, call: Any, device: torch.device
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    if (origin := joint.origin) is None:
        raise NotStorable("forward leaves something behind on the model")
    check_calls(origin.called)
    names = names_in(origin.code)
    looked_up = digest_of(names, meant := Digest())
    check_described(origin.code, digest.codes | meant.codes)
    writer = Writer(device)
    parts = {
        "names": names,
        "looked up": looked_up,
        "guards": origin.guards(call.model),
        "graph": graph_data(joint.module, writer),
        "result": spec_data(joint.out_spec, writer),
        "about": [writer.write(each) for each in (joint.aliases, joint.stored, joint.rows, joint.repeats)],
        "buffers": sorted(joint.buffers),
        "choices": list(joint.choices),
    }
    joint.kept = f"{digest.text[:40]} {looked_up}"
    return parts, writer.tensors


@well_formed
def _read(
    parts: entries.Parts,
    tensors: list[torch.Tensor],
    digest: Digest,
    call: Any,
    device: torch.device,
    options: dict[str, Any],
) -> ir.JointGraph | None:
    """The graph of an entry; None if what it was traced from has changed."""
    key, names, looked_up = digest.text[:40], _names(parts["names"]), parts["looked up"]
    if digest_of(names, Digest()) != looked_up:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # as the tracer's
    reader = Reader(mode, tensors, device)
    aliases, stored, rows, repeats = map(reader.read, parts["about"])
    guards = StoredGuards(parts["guards"], Traced(call.model, call.loss_fn))
    unread: Any = partial(_graph, parts, reader)
    joint = _Kept(
        unread,
        spec_of(parts["result"], reader),
        mode,
        aliases,
        stored=stored,
        repeats=repeats,
        guards=_once(guards, call),
        rows=rows,
        row_numbers=later_rows(rows, call.model, Asked(call.args, dict(call.kwargs), device, call.loss_fn, **options)),
        kept=f"{key} {looked_up}",
    )
    joint.buffers, joint.choices = frozenset(parts["buffers"]), tuple(parts["choices"])
    return joint


def _graph(parts: entries.Parts, reader: Reader) -> fx.GraphModule:
    return graph_of(parts["graph"], reader)


class _Kept(ir.JointGraph):
    """A captured graph on disk, whose nodes are read when they are first asked for: a program on disk needs none."""

    _module: Any

    @property
    def module(self) -> fx.GraphModule:  # an attribute of the others
        if not isinstance(self._module, fx.GraphModule):
            self._module = self._module()
        read: fx.GraphModule = self._module
        return read

    @module.setter
    def module(self, module: Any) -> None:
        self._module = module


def _names(data: Any) -> Names:
    return {str(module): [str(name) for name in names] for module, names in data.items()}


def _once(guards: StoredGuards, call: Any) -> Callable[[nn.Module], Any]:
    """The guards of the model that the entry was compared with, or of another one: made anew for it."""

    def of(model: nn.Module) -> Any:
        return guards if model is call.model else guards.of(Traced(model, call.loss_fn))

    return of
