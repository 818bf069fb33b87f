"""What a trace of torch.profiler says of the device's streams, and of what overlaps on them."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@dataclass(frozen=True)
class Work:
    """One kernel or copy: ``kind`` is ``"kernel"`` or ``"gpu_memcpy"``; times in microseconds."""

    name: str
    kind: str
    stream: int
    start: float
    end: float


def traced(run: Callable[[], Any]) -> list[Work]:
    """The device's work while ``run`` runs; ``run`` ends with a synchronization."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(errors="replace"))["traceEvents"])


def read(events: list[dict[str, Any]]) -> list[Work]:
    """Kernels and copies among the events of a trace."""
    return [
        Work(
            event["name"],
            event["cat"],
            event.get("args", {}).get("stream", -1),
            event["ts"],
            event["ts"] + event["dur"],
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")
    ]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(first: list[Work], second: list[Work]) -> float:
    """Milliseconds during which some of both is under way."""
    ours, theirs = (union([(work.start, work.end) for work in each]) for each in (first, second))
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        total += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total / 1e3


def busy(work: list[Work]) -> float:
    """Milliseconds during which some of it is under way."""
    return sum(end - start for start, end in union([(each.start, each.end) for each in work])) / 1e3


def by_stream(work: list[Work]) -> dict[int, list[Work]]:
    """The work of each stream, that of the stream which computes most first."""
    streams: dict[int, list[Work]] = defaultdict(list)
    for each in work:
        streams[each.stream].append(each)
    return dict(sorted(streams.items(), key=lambda item: -busy([each for each in item[1] if each.kind == "kernel"])))


def described(work: list[Work]) -> list[dict[str, Any]]:
    """Each stream: its work, how long it takes, and how long beside the stream that computes most."""
    streams = by_stream(work)
    computing = next(iter(streams.values()), [])
    return [
        {
            "stream": stream,
            "kernels": sum(one.kind == "kernel" for one in each),
            "copies": sum(one.kind == "gpu_memcpy" for one in each),
            "ms": busy(each),
            "beside_compute_ms": 0.0 if each is computing else overlap(each, computing),
            "names": most([one.name for one in each]),
        }
        for stream, each in streams.items()
    ]


def most(names: list[str], count: int = 4) -> list[str]:
    """The most frequent names, shortened, with how often they are."""
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return [f"{n} x {name[:60]}" for name, n in sorted(counts.items(), key=lambda item: -item[1])[:count]]
