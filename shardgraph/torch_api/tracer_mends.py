"""What torch's tracer ends at although it can trace it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.iter import ItertoolsVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily


@functools.cache
def mend_tracer() -> None:
    """Have it traced, from now on."""
    # It finds the methods of operators by calling them, when the first one is traced: then with tensors that have no
    # values, of which it would know half of them ever after.
    with unset_fake_temporarily(), torch.device("cpu"):
        builtin.populate_builtin_to_tensor_fn_map()
    _take_keys_by_position()


def _take_keys_by_position() -> None:
    """``itertools.groupby(values, key)`` is ``groupby(list(values), key=key)``."""
    kind: Any = ItertoolsVariable
    original = kind.call_function

    @functools.wraps(original)
    def wrapped(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is itertools.groupby and args:
            values, *key = args
            args = [VariableTracker.build(tx, list).call_function(tx, [values], {})]
            kwargs = {**kwargs, "key": key[0]} if key else kwargs
        return original(self, tx, args, kwargs)

    kind.call_function = wrapped
