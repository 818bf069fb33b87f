"""Work that all ranks finish, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardgraph.runtime.agreement import Agreement


@contextmanager
def on_all_ranks(agreement: Agreement, topic: str) -> Iterator[list[str]]:
    """Run the body, then wait until every rank has: without error, and with equal lines in the list that is yielded."""
    lines: list[str] = []
    error: Exception | None = None
    try:
        yield lines
    except Exception as failure:  # of any kind: the other ranks must not wait for this one
        error = failure
    agreement.agree(topic, "\n".join(lines), error)
