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
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.train_step import Contender, build_model, report
from benchmarks.training_jobs import JOBS

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


def made(name: str, options: argparse.Namespace, device: torch.device) -> Contender:
    return (Engine if name.startswith("DeepSpeed") else Contender)(name, options, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="deepspeed", help="results/NAME.json is written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--job", default="llama", choices=JOBS)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    options = parser.parse_args()
    options.nproc, options.optimizer = 2, "adamw"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    memory = [name for name in options.contenders if name not in ("DDP", "one rank")]
    report(options, made, memory, {"deepspeed": metadata.version("deepspeed")})


if __name__ == "__main__":
    main()
