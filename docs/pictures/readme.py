"""Draw the pictures of the README: the plan of a small GPT with its memory, and the report of Llama 3 8B.

python docs/pictures/readme.py            # writes docs/plan.svg and, where Chromium is, docs/report.png
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardgraph
from examples.train_gpt import GPT

DOCS = Path(__file__).parents[1]
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "use_cache": False,
}


def plan(path: Path) -> Path:
    """A GPT of four layers under fsdp on two ranks, whose batch has 8 rows of 128 tokens."""
    with torch.device("meta"):
        model, ids = GPT(128, 4, 4, 128), torch.zeros(8, 128, dtype=torch.long)
    two = shardgraph.preset("fsdp", {"dp": 2})
    return shardgraph.visualize(two, path, model=model, example_inputs=(ids,), cluster="H100")


def report(path: Path, chromium: str) -> None:
    """Llama 3 8B under fsdp on 64 H100, as a browser shows its page."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model, ids = LlamaForCausalLM(LlamaConfig(**LLAMA)), torch.zeros(1, 8192, dtype=torch.long)
    call = {"example_kwargs": {"input_ids": ids, "labels": ids}}
    analysis = shardgraph.analyze(model, plan="fsdp", **call, mesh={"dp": 64}, cluster="H100", precision="bf16")
    with tempfile.TemporaryDirectory() as folder:
        page = shardgraph.visualize(analysis, Path(folder, "report.html"))
        window = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1180,1290"]
        command = [chromium, *window, f"--user-data-dir={folder}/user", f"--screenshot={path}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    plan(DOCS / "plan.svg")
    if chromium := shutil.which("chromium") or shutil.which("google-chrome"):
        report(DOCS / "report.png", chromium)


if __name__ == "__main__":
    main()
