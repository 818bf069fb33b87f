"""A training step of DeepSpeed's ZeRO beside FSDP2, shardgraph and one rank, in the rounds of ``train_step.py``.

    pip install deepspeed   # beside shardgraph, in an environment of its own
    python benchmarks/deepspeed_step.py

DeepSpeed runs on CPU ranks as it does there by itself: torch's AdamW on its shards of float32, gloo, and none of its
own kernels. The models, batches and optimizer are those of ``train_step.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.train_step import Contender, beside, build_model

CONTENDERS = ["DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "shardgraph fsdp of 8", "FSDP2", "DDP", "one rank"]


class Engine(Contender):
    """A model in an engine of DeepSpeed, which runs backward and the optimizer itself."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        import deepspeed

        self.name, self.options, self.device, self.whole = name, options, device, False
        self.times, self.losses = [], []
        model = build_model(options).to(device)
        config = {
            "train_micro_batch_size_per_gpu": len(self.batch(0)),
            "zero_optimization": {"stage": int(name[-1])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        # Compiled on first use, by all ranks at once, for inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        started = time.perf_counter()
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.first_call = time.perf_counter() - started

    def step(self, number: int) -> None:
        started = time.perf_counter()
        loss = self.loss(number)
        self.model.backward(loss)
        self.model.step()
        self.times.append(time.perf_counter() - started)
        self.losses.append(loss.item())


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    beside("deepspeed", Engine, "DeepSpeed", CONTENDERS, __doc__)
