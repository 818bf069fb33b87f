"""Small results that follow from a captured graph on disk, such as a decided plan; and the names of all that do."""

from __future__ import annotations

import logging
from typing import Any

from shardgraph.cache import entries
from shardgraph.cache.digests import Digest, NoDigest
from shardgraph.cache.values import NotStorable

log = logging.getLogger(__name__)


class Result:
    """The result of a ``question`` about the graph that is ``kept`` on disk; all of the question counts."""

    def __init__(self, kept: str, *question: Any) -> None:
        name = entry_name(kept, *question)
        self._path = None if name is None else entries.path_of(name)

    def read(self) -> Any:
        """The result, None if there is none."""
        try:
            data = entries.read(self._path) if self._path is not None else None
            return None if data is None else entries.decoded(data)[0].get("result")
        except NotStorable as error:
            log.warning("computed again: %s", error)
            return None

    def write(self, result: Any) -> None:
        """Keep a result that JSON can write."""
        if self._path is None:
            return
        try:
            entries.write(self._path, entries.encoded({"result": result}, []))
        except OSError as error:
            log.warning("a result cannot be kept in %s: %s", self._path.parent, error.strerror)


def entry_name(kept: str, *question: Any) -> str | None:
    """The name of what answers a ``question`` about the graph that is ``kept``; None if nothing is."""
    if not kept:
        return None
    digest = Digest()
    try:
        digest.put(kept, entries.versions())
        digest.outside(question)
    except (NoDigest, RecursionError) as error:
        log.info("no result is kept: %s", error)
        return None
    return digest.text[:40]
