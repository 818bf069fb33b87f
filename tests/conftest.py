"""What every test shares: one thread, quiet libraries, no downloads, and ranks that start with their imports done."""

import multiprocessing
import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)
multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(
    [
        "shardgraph",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ]
)
