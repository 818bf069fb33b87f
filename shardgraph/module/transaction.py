"""A model is changed as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Inside, tensors of modules may be replaced; on an exception the modules get back the tensors they had.

    Values written in place are not restored.
    """
    before = [
        (holder, dict(holder))
        for part in chain(model.modules(), model.parameters(), model.buffers())
        for holder in (vars(part), *_inner(part))
    ]
    try:
        yield
    except BaseException:
        for holder, items in before:
            holder.clear()
            holder.update(items)
        raise


def _inner(part: Any) -> list[dict[str, Any]]:
    if not isinstance(part, nn.Module):
        return []
    return [part._parameters, part._buffers, part._modules]
