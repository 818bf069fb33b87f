"""Parameters that this rank does not have: of other stages of a pipeline, where their shapes are known, and no values.

They are on ``meta``. There torch computes with them alone, as a loop over all parameters does that their own ranks make
too. Together with values it may do nothing in silence: ``average.add_(parameter)`` leaves the average as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardgraph.errors import ShardGraphError
from shardgraph.torch_api import pytree


class Elsewhere(torch.Tensor):
    """A parameter of another stage, or what is computed from such parameters alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            vars(made).update(vars(self))  # whether it is a parameter, too
            memo[id(self)] = made
        copied: Elsewhere = memo[id(self)]
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            here = any(
                isinstance(each, torch.Tensor) and not each.is_meta and (each.dim() or each is given[0])
                for each in given
            )
            if not here:
                result = func(*args, **(kwargs or {}))
        if here:
            raise ShardGraphError(
                f"{getattr(func, '__name__', func)} takes a parameter of another stage of the pipeline, which has no "
                "values on this rank, together with a tensor that has. What combines parameters of several layers, as "
                "averages of a student's parameters in its teacher do, needs a plan without a pipeline"
            )
        if func in torch.overrides.get_default_nowrap_functions():
            return result
        return pytree.tree_map_only(torch.Tensor, lambda t: t if isinstance(t, cls) else t.as_subclass(cls), result)
