"""Train a language model of transformers, from its configuration, on bytes; stop, and go on from a checkpoint.

    python examples/language_model.py                                  # starts two ranks
    torchrun --nproc-per-node 2 examples/language_model.py --plan auto
    python examples/language_model.py --save run --steps 20            # writes a checkpoint
    python examples/language_model.py --save run --nproc 4             # goes on from it to step 30, on four ranks
    torchrun --nproc-per-node 8 examples/language_model.py --model llama --layers 32 --width 4096 --heads 32 \
        --length 4096 --batch 64 --plan fsdp --precision bf16 --recompute selective --loss-chunk 256MiB
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

import shardgraph


def config_of(options: argparse.Namespace) -> PretrainedConfig:
    if options.model == "gpt2":
        sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads}
        return GPT2Config(vocab_size=256, n_positions=options.length, bos_token_id=0, eos_token_id=0, **sizes)
    sizes = {"num_hidden_layers": options.layers, "hidden_size": options.width, "num_attention_heads": options.heads}
    return LlamaConfig(
        vocab_size=256, intermediate_size=3 * options.width, max_position_embeddings=options.length, **sizes
    )


def library_text() -> torch.Tensor:
    """Sources of Python's standard library, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batch_of(text: torch.Tensor, step: int, rows: int, length: int) -> torch.Tensor:
    """The rows of a step, the same on every rank: ``[rows, length]``."""
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def train(options: argparse.Namespace) -> list[float]:
    """What each rank does; returns the loss of every step."""
    torch.manual_seed(0)
    text = library_text()
    with torch.device("meta"):  # nothing is allocated; each rank initialises its own shards
        model = AutoModelForCausalLM.from_config(config_of(options))
    example = batch_of(text, 0, options.batch // dist.get_world_size(), options.length)
    sharded = shardgraph.compile(
        model,
        options.plan,
        example_kwargs={"input_ids": example, "labels": example},
        precision=options.precision,
        recompute=options.recompute,
        loss_chunk=options.loss_chunk,
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=options.lr)
    first = 0
    if options.save:  # what any number of ranks have saved, under any plan
        first = shardgraph.load_checkpoint(options.save, sharded, optimizer, required=False).step
    data_rank, size = sharded.plan.data_rank(dist.get_rank()), sharded.plan.data_size
    if dist.get_rank() == 0:
        print(f"{sum(p.numel() for p in sharded.parameters()):,} parameters, {sharded.plan}")

    losses: list[float] = []
    for step in range(first, options.steps):
        mine = batch_of(text, step, options.batch, options.length).chunk(size)[data_rank]
        loss = sharded.train_step(input_ids=mine, labels=mine)  # forward and backward
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 5 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)
        if options.save and (step % 10 == 9 or step + 1 == options.steps):
            shardgraph.save_checkpoint(options.save, step + 1, sharded, optimizer, background=True)
    shardgraph.wait_for_saves()
    return losses


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start; under torchrun it decides")
    parser.add_argument("--plan", default="fsdp", help="a name, or a plan file")
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--steps", type=int, default=30, help="in all, those before a checkpoint included")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all ranks")
    for name, default in {"length": 64, "width": 64, "layers": 2, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", help="folder of the checkpoints, of which the last is gone on from if there is one")
    for name in ("precision", "recompute", "loss-chunk"):
        parser.add_argument(f"--{name}", help=f"as {name.replace('-', '_')} of shardgraph.compile")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    shardgraph.launch(train, options.nproc, args=(options,))
