"""Functions of autograd that are given one tensor twice, which torch's tracer refuses: the second is a view of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.misc import AutogradFunctionVariable


@functools.cache
def allow_repeated_arguments() -> None:
    """Have them traced, from now on."""
    kind: Any = AutogradFunctionVariable
    original = kind.call_apply

    @functools.wraps(original)
    def wrapped(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        seen: set[Any] = set()
        given = []
        for each in args:
            each = each.realize() if hasattr(each, "realize") else each
            if isinstance(each, TensorVariable):
                if each.as_proxy().node in seen:
                    view = tx.output.create_proxy("call_function", torch.Tensor.view_as, (each.as_proxy(),) * 2, {})
                    each = wrap_fx_proxy(tx, view)
                seen.add(each.as_proxy().node)
            given.append(each)
        return original(self, tx, given, kwargs)

    kind.call_apply = wrapped
