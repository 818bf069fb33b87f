"""Collectives that no graph of the record has: of clipping, of saves, of the user.

torch keeps them; they are read when somebody asks.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from shardgraph import torch_api
from shardgraph.runtime.watch.place import is_users


def records(length: int) -> list[dict[str, Any]]:
    """The last of them, the oldest first, as :func:`shardgraph.runtime.watch.flight.records` has them.

    ``call`` is 0, ``place`` the number among the collectives of the ``group``, and ``value`` what comes out.
    ``finished`` is None where torch does not note when; then ``done`` says whether, a moment after those who wait for
    the collective go on.
    """
    found = [each for each in torch_api.communicated() if not _is_of_graph(each)]
    return [_record(each) for each in found[-length:]]


def _is_of_graph(entry: dict[str, Any]) -> bool:
    return any(torch_api.GENERATED in frame["filename"] for frame in entry["frames"])


def _record(entry: dict[str, Any]) -> dict[str, Any]:
    group, about = entry["process_group"]
    outputs = list(zip(entry["output_sizes"], entry["output_dtypes"], strict=False))
    frame = next((each for each in entry["frames"] if is_users(each["filename"])), None)
    end = entry["time_discovered_completed_ns"]
    return {
        "kind": entry["profiling_name"].partition(":")[2],
        "axis": about.removeprefix("mesh_"),
        "group": group,
        "bytes": sum(math.prod(sizes) * _size(kind) for sizes, kind in outputs),
        "value": ", ".join(f"{kind}{sizes}" for sizes, kind in outputs) or "nothing",
        "line": "" if frame is None else f"{os.path.basename(frame['filename'])}:{frame['line']} in {frame['name']}",
        "call": 0,
        "place": entry["collective_seq_id"],
        "started": entry["time_created_ns"] / 1e9,
        "finished": None if end is None else end / 1e9,
        "done": bool(entry["retired"]),
    }


def _size(kind: str) -> int:
    """The bytes of an element, by the name that torch's C++ has for its type."""
    dtype = getattr(torch, kind.lower().replace("complex", "c"), torch.uint8)  # torch.float, torch.long, torch.cfloat
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 1
