"""Train a model of transformers until it can count, let it write, and save it for from_pretrained.

python examples/generate.py                                # starts two ranks
torchrun --nproc-per-node 2 examples/generate.py --plan tp
torchrun --nproc-per-node 8 examples/generate.py --pretrained Qwen/Qwen3-0.6B --steps 5 --out tuned
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import shardgraph

CYCLE = 32  # the numbers that are counted, from 0, again and again


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    if options.pretrained:
        return AutoModelForCausalLM.from_pretrained(options.pretrained)
    config = LlamaConfig(
        vocab_size=CYCLE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config.bos_token_id = config.eos_token_id = None  # every number is a number
    return AutoModelForCausalLM.from_config(config)


def rows_of(step: int, rows: int, length: int = 24) -> torch.Tensor:
    """Rows that count from anywhere: ``[rows, length]``."""
    starts = torch.randint(CYCLE, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(length)) % CYCLE


def train(options: argparse.Namespace, folder: str) -> list[float]:
    """What each rank does; returns the loss of every step, and the share of what it writes that is right."""
    torch.manual_seed(0)
    example = rows_of(0, options.batch)
    call = {"input_ids": example, "labels": example}
    sharded = shardgraph.compile(model_of(options), options.plan, example_kwargs=call)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=options.lr)
    data_rank, size, main = sharded.plan.data_rank(dist.get_rank()), sharded.plan.data_size, dist.get_rank() == 0
    losses: list[float] = []
    for step in range(options.steps):
        rows = rows_of(step, options.batch * size).chunk(size)[data_rank]
        loss = sharded.train_step(input_ids=rows, labels=rows)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if main and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)

    sharded.eval()
    prompt = torch.tensor([[3, 4, 5, 6], [28, 29, 30, 31]])
    written = sharded.generate(prompt, max_new_tokens=12, do_sample=False).cpu()  # called by all ranks
    expected = (prompt[:, :1] + torch.arange(16)) % CYCLE
    sharded.save_pretrained(folder)  # whole tensors, by rank 0; called by all ranks
    if main:
        print("after 3 4 5 6 it writes", *written[0, 4:].tolist())
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()  # plain transformers, without shardgraph
        same = torch.equal(loaded.generate(prompt, max_new_tokens=12, do_sample=False), written)
        print(f"loaded from {folder}, it writes {'the same' if same else 'something else'}")
    return [*losses, (written == expected).float().mean().item()]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="fsdp", help="any without a pipeline")
    parser.add_argument("--pretrained", help="a model of the Hugging Face hub, or a folder")
    parser.add_argument("--out", help="where the trained model is saved; a temporary folder")
    for name, default in {"nproc": 2, "steps": 60, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    with tempfile.TemporaryDirectory() as folder:
        shardgraph.launch(train, options.nproc, args=(options, options.out or folder))
