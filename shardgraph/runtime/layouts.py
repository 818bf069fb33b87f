"""Operations that need other strides than they find.

PyTorch's fake tensors and its kernels do not agree on the strides of many elementwise results of operands that are laid
out differently (the backward of softplus, of losses and of dropout, ``xlogy`` and more), and devices do not among
themselves; and what a plan gathers is laid out otherwise than what was traced. Most operations take any strides. A view
does not, and may need a copy then. Some kernels read an operand as if it were contiguous and do not look, since the
functions that call them have seen to it: tracing keeps the copy only where the strides that were traced need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_VIEWS: dict[Any, Any] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)

_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1, 2, 3),
    aten.native_layer_norm_backward.default: (3, 4),
    aten._weight_norm_interface.default: (0, 1),
    aten._weight_norm_interface_backward.default: (0, 1, 2, 3),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten.fractional_max_pool2d_backward.default: (4,),
    aten.fractional_max_pool3d_backward.default: (4,),
    aten.nll_loss2d_backward.default: (1,),
    aten._pdist_forward.default: (0,),
    aten._pdist_backward.default: (0, 1, 3),
    aten._linalg_det.default: (0,),  # factors the transpose of what is contiguous, which backward has to know
    aten._linalg_slogdet.default: (0,),
}
"""The positions of arguments that a kernel takes for contiguous."""

_UNAMBIGUOUS: dict[Any, tuple[int, ...]] = {aten.native_batch_norm_backward.default: (0, 1)}
"""Of those whose strides along dimensions of size 1 mislead a kernel: it may take them for channels last."""


def contiguous_arguments(target: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions of those of ``args``, values of the operands of ``target``, that have to be contiguous."""
    ambiguous = (at for at in _UNAMBIGUOUS.get(target, ()) if 1 in args[at].shape)
    return tuple(at for at in (*_CONTIGUOUS.get(target, ()), *ambiguous) if args[at] is not None)


@functools.cache
def suited(target: Any) -> Any:
    """What gives the same as ``target`` whatever strides it finds."""
    if target in _CONTIGUOUS or target in _UNAMBIGUOUS:
        return _on_contiguous(target)
    return _VIEWS.get(target, target)


def suit_layouts(gm: fx.GraphModule) -> None:
    """Have the operations of a graph copy where the strides that they find need it."""
    for node in gm.graph.nodes:
        if (target := suited(node.target)) is not node.target:
            node.target = target


def _on_contiguous(target: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        at = contiguous_arguments(target, args)
        given = (arg.contiguous() if i in at else arg for i, arg in enumerate(args))
        return target(*given, **kwargs)

    run.__name__ = run.__qualname__ = f"contiguous_{target.__name__.replace('.', '_')}"
    return run
