"""Peak memory by the events of torch's CPU allocator: a meter that knows nothing of tensors or of this project.

The profiler reports every block that the CPU allocator gives and takes back, whoever asks for it: tensors, and what
kernels allocate inside of an operation (oneDNN's blocked copies and scratchpads are from this allocator too). Not
reported are memory that libraries take from the system (MKL's buffers, gloo's of its sockets) and what threads allocate
that were not started by the profiled one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocator_peak(run: Callable[[], Any]) -> int:
    """The most bytes of the CPU allocator that are live during ``run()``, above those that were live before it.

    The events do not have the sizes of blocks from before, so ``run`` must free none of those.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocations = [event for event in events if event.get("name") == "[memory]"]
    allocations.sort(key=itemgetter("ts"))  # they are written thread by thread
    return _peak([event["args"] for event in allocations])


def _peak(events: list[dict[str, Any]]) -> int:
    """The peak of allocations (positive ``Bytes``) and releases by ``Addr``, in the order of the events."""
    blocks: dict[int, int] = {}
    live = peak = 0
    for event in events:
        address, nbytes = event["Addr"], event["Bytes"]
        live -= blocks.pop(address, 0)  # also of a block that a thread has freed which is not profiled
        if nbytes > 0:
            blocks[address] = nbytes
            live += nbytes
        peak = max(peak, live)
    return peak
