"""Execution of graphs: below autograd, with inputs that are freed at their last use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen


def below_autograd() -> AbstractContextManager[None]:
    """Operations in the body go straight to their kernels.

    The graphs have their own backward, so what autograd would do for each operation is wasted; for a collective that is
    a call of Python, longer than starting it.
    """
    return torch._C._AutoDispatchBelowAutograd()


def keep_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """The ambient autocast of a device type, as part of what a program depends on."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """``gm`` as a function of one list, which it empties: inputs are freed at their last use."""
    copy = fx.GraphModule(gm, gm.graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    copy.recompile()
    return copy.forward
