"""What a clear refusal is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardgraph.errors import ShardGraphError


def clear(call: Callable[[], Any], *names: str) -> str:
    """The message of the clear error that a call ends with: ours, in ten lines at most, with one of ``names``."""
    with pytest.raises(ShardGraphError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) <= 10, message
    assert not names or any(name in message for name in names), message
    return message
