"""torch's own record of what was communicated: its flight recorder, which also gloo's groups write to by default."""

from __future__ import annotations

import pickle
from typing import Any

import torch

GENERATED = "eval_with_key"  # in the file names of torch.fx's generated code


def communicated() -> list[dict[str, Any]]:
    """The collectives that this process has started lately, the oldest first, but for messages between two ranks.

    Each has its ``frames``, innermost first, ``process_group`` (name and description), ``collective_seq_id``,
    ``profiling_name``, ``output_sizes``, ``output_dtypes``, times in nanoseconds, and whether it is ``retired``: done.
    Empty where torch keeps none: over gloo before torch 2.12, or with ``TORCH_FR_BUFFER_SIZE=0``.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    entries: list[dict[str, Any]] = pickle.loads(dump())["entries"] if dump is not None else []
    return [each for each in entries if not each["is_p2p"]]
