"""Fine-tune adapters of peft on a frozen model of transformers: what is frozen is sharded, what is trained is little.

python examples/lora.py                                    # starts two ranks
torchrun --nproc-per-node 8 examples/lora.py --pretrained Qwen/Qwen3-8B --rank 16 --precision bf16 --out adapter
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import shardgraph


def base_of(options: argparse.Namespace) -> PreTrainedModel:
    """The frozen model: a pretrained one, or random weights, the same on every rank."""
    if options.pretrained:
        return AutoModelForCausalLM.from_pretrained(options.pretrained)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )


def train(options: argparse.Namespace, folder: str) -> list[float]:
    """What each rank does; returns the loss of every step, and how far the saved adapter's loss is from the last."""
    rank, main = dist.get_rank(), dist.get_rank() == 0
    model = get_peft_model(base_of(options), LoraConfig(r=options.rank, target_modules=["q_proj", "v_proj", "up_proj"]))
    sharded = shardgraph.compile(model, options.plan, precision=options.precision)
    trained = [p for p in sharded.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    if main:
        counts = [sum(p.numel() for p in some) for some in (trained, sharded.parameters())]
        print(f"trains {counts[0]:,} of {counts[1]:,} parameters; {sharded.plan}")

    rows = torch.randint(64, (options.batch, 16), generator=torch.Generator().manual_seed(rank))  # to be learnt
    losses: list[float] = []
    for step in range(options.steps):
        loss = sharded(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if main and (step % 5 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)

    sharded.eval()
    with torch.no_grad():
        here = sharded(input_ids=rows, labels=rows).loss.item()
    sharded.save_pretrained(folder)  # the adapter alone; called by all ranks
    dist.barrier()
    with torch.no_grad():  # plain peft loads it
        loaded = PeftModel.from_pretrained(base_of(options), folder).eval()
        there = loaded(input_ids=rows, labels=rows).loss.item()
    if main:
        print(f"the adapter has loss {here:.4f} here, and {there:.4f} where plain peft has loaded it")
    return [*losses, abs(here - there)]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="fsdp", help="a plan of data parallelism")
    parser.add_argument("--pretrained", help="a model of the Hugging Face hub, or a folder")
    parser.add_argument("--precision", help="bf16, for example")
    parser.add_argument("--out", help="where the adapter is saved; a temporary folder")
    for name, default in {"nproc": 2, "steps": 30, "batch": 4, "rank": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    with tempfile.TemporaryDirectory() as folder:
        shardgraph.launch(train, options.nproc, args=(options, options.out or folder))
