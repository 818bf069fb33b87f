"""What the inputs of a call are called: by the parameters of the model's forward, in messages and by users."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional_names(model: nn.Module) -> list[str]:
    """The names of positional inputs of ``model``, in order; those of ``*args`` have none."""
    return [name for name, each in _parameters(model).items() if each.kind in _POSITIONAL]


def keyword_names(model: nn.Module) -> list[str] | None:
    """The names that ``model`` takes as keywords; None if it takes any."""
    parameters = _parameters(model)
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return [name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_POSITIONAL]


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def input_names(model: nn.Module, spec: Any) -> list[str]:
    """A name for each flattened input of calls of this structure, such as ``input 0 (input_ids)``."""
    args, kwargs = spec.child(0), spec.child(1)
    known = positional_names(model)
    tops = [known[i] if i < len(known) else "" for i in range(args.num_children)] + [str(key) for key in kwargs.context]
    leaves = (each.child(i).num_leaves for each in (args, kwargs) for i in range(each.num_children))
    names = [name for name, count in zip(tops, leaves, strict=True) for _ in range(count)]
    return [f"input {i} ({name})" if name else f"input {i}" for i, name in enumerate(names)]
