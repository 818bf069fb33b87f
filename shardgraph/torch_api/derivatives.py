"""Derivatives that forward itself computes: ``torch.autograd.grad`` as an operation of the graph."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo as dynamo
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.builder import wrap_fx_proxy

SETTINGS: dict[str, Any] = {"trace_autograd_ops": True}
"""Settings of the tracer with which it takes ``torch.autograd.grad``."""


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one that derivatives can be taken for, and that passes none on."""
    before = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        return tensor.detach().requires_grad_()
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(before)


def leaves_in_forward() -> AbstractContextManager[Any]:
    """Inside, the tracer takes ``tensor.requires_grad_()`` of a tensor that requires no gradient, also of an input.

    It would end there, for what depends on such a tensor would lose the gradient that the tensor accumulates. Nothing
    that forward returns shows it, so the tensor is another one from there on, for the graph alone.
    """
    require = TensorVariable.method_requires_grad_

    def requiring(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        value = self.as_proxy().node.meta["example_value"]
        wanted = requires_grad.as_python_constant() if isinstance(requires_grad, ConstantVariable) else requires_grad
        if wanted is not True or value.requires_grad:
            return require(self, tx, requires_grad)
        leaf: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", leaf_of, (self.as_proxy(),), {}))
        self.proxy, self.requires_grad, self.has_grad_fn = leaf.proxy, True, False
        return self

    def refuse(*_: Any, **__: Any) -> Any:
        dynamo.exc.unimplemented(
            gb_type="forward calls backward()",
            context="backward",
            explanation="gradients that it leaves in parameters would be lost",
            hints=["Take derivatives with torch.autograd.grad(..., create_graph=True), which returns them."],
        )

    return patch.multiple(TensorVariable, method_requires_grad_=requiring, method_backward=refuse)
