"""Measured steps: which module holds how many bytes of what, and what the computation waits for, and how long."""

from shardgraph.tracking.trace import MemoryTrace
from shardgraph.tracking.tracker import MemoryTracker
from shardgraph.tracking.waits import WaitTracker

__all__ = ["MemoryTrace", "MemoryTracker", "WaitTracker"]
