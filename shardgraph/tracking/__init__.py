"""Measured memory of a step: which module holds how many bytes of what, operation by operation."""

from shardgraph.tracking.trace import MemoryTrace
from shardgraph.tracking.tracker import MemoryTracker

__all__ = ["MemoryTrace", "MemoryTracker"]
