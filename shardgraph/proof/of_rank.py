"""Values that a rank computes from its own coordinate, which are no part of a value of the captured graph.

Such as the number of its first row. They are followed through the operations that are registered here, up to where
they become something that ranks hold; any other operation on them is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardgraph.proof.held import Held, UntypedError
from shardgraph.torch_api import pytree


class OfRank:
    """A value that differs between ranks by their coordinates."""

    def held(self) -> Held:
        """What the ranks hold, if it is something that they do.

        Raises:
            UntypedError: it is not.
        """
        raise UntypedError(f"it is used otherwise than is known of it: {(type(self).__doc__ or '').splitlines()[0]}")


Known = Callable[..., Any]
KNOWN: dict[Any, list[Known]] = {}
"""By operation: functions of the typing, the node and the arguments; one returns None where it does not apply."""


def known(*targets: Any) -> Callable[[Known], Known]:
    """Register a function for operations on values of ranks."""

    def register(function: Known) -> Known:
        for target in targets:
            KNOWN.setdefault(target, []).append(function)
        return function

    return register


def depends(args: Any, kwargs: Any) -> bool:
    """Whether an argument depends on the rank."""
    return any(isinstance(each, OfRank) for each in pytree.tree_leaves((args, kwargs)))


def computed(typing: Any, node: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on values of ranks; None if no function knows it."""
    for function in KNOWN.get(node.target, ()):
        value = function(typing, node, *args, **kwargs)
        if value is not None:
            return value
    return None


def as_held(args: Any, kwargs: Any) -> Any:
    """The arguments as what the ranks hold."""
    return pytree.tree_map_only(OfRank, lambda each: each.held(), (args, kwargs))
