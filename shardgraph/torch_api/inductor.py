"""Compilation of one functional graph by inductor, whose collectives keep their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

# Random numbers are those of eager mode, in its order; nothing is moved to where it is read, above all no collective.
_SETTINGS = {"fallback_random": True, "reorder_for_locality": False}


def compile_by_inductor(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], Sequence[Any]]:
    """``gm`` as compiled kernels, for inputs that are laid out as these: a function of one list, which it empties.

    Raises whatever inductor raises for a graph that it cannot compile.
    """
    import torch._inductor.compile_fx as inductor  # takes a second, which nobody else should wait for
    from torch._inductor.decomposition import select_decomp_table

    with torch._inductor.config.patch(_SETTINGS), torch.no_grad():
        drawn = torch.Tag.nondeterministic_seeded
        table = {op: rule for op, rule in select_decomp_table().items() if drawn not in getattr(op, "tags", ())}
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in inputs
            ]
            traced = make_fx(gm, decomposition_table=table, tracing_mode="real")(*fake)
        tracing = torch._guards.TracingContext(mode)
        with torch._guards.tracing(tracing), torch._inductor.virtualized.V.set_fake_mode(mode):
            compiled: Any = inductor.compile_fx_inner(traced, fake)
    return compiled


def cxx_compiler_error() -> str | None:
    """Why inductor cannot compile for CPUs on this machine: the message about its C++ compiler; None if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).strip()
    return None
