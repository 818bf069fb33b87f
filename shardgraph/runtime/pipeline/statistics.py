"""The buffers after a step, from what each microbatch would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardgraph.passes.pipeline.batch_norm import whole_batch
from shardgraph.passes.program import Program


def combined(
    programs: Sequence[Program], start: Mapping[str, torch.Tensor], written: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The buffers after a step in which microbatch ``i``, of ``programs[i]``, would have written ``written[i]``.

    Running statistics of batch norms, from those at the ``start``, are of the whole batch; other floating-point values
    are the mean over microbatches, and integers those of the first microbatch, so that a count of batches counts one.
    """
    buffers: dict[str, torch.Tensor] = {}
    for stages in zip(*(program.stages for program in programs), strict=True):
        for norms in zip(*(stage.batch_norms for stage in stages), strict=True):
            norm, counts = norms[0], [each.count for each in norms]
            pairs = [(values[norm.mean], values[norm.variance]) for values in written if norm.mean in values]
            if pairs:
                before = start[norm.mean], start[norm.variance]
                buffers[norm.mean], buffers[norm.variance] = whole_batch(norm, before, pairs, counts)
    for name in written[0]:
        if name not in buffers:
            values = [each[name] for each in written]
            buffers[name] = torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]
    return buffers
