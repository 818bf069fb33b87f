"""``shardgraph demo``: a small language model that is verified, trained on two ranks and drawn, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import shardgraph
from shardgraph.cli.options import Json, picture_to_write
from shardgraph.cli.output import result, working

_ROWS, _LENGTH, _STEPS = 8, 64, 30


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Number of ranks.")] = 2,
    out: Annotated[
        str, typer.Option("--out", "-o", callback=picture_to_write, help="The page to write.")
    ] = "demo.html",
    as_json: Json = False,
) -> None:
    """Show what it does: verify a plan, train under it beside the unsharded model, and write a report."""
    with working("prove that the program under fsdp equals the model"):
        import torch

        verified = shardgraph.verify(_model(), _batch(0)[:1], "fsdp", world_size=ranks)
    _say(as_json, f"1. Verified, all ranks in this process:\n{verified}\n")
    with working(f"train on {ranks} ranks beside the unsharded model"):
        trained = shardgraph.launch(_train, ranks, args=(ranks,))[0]
    every = _STEPS // 5
    shown = [f"   step {step:3d}  sharded {a:.6f}  unsharded {b:.6f}" for step, a, b in trained["losses"][::every]]
    difference = max(abs(a - b) for _, a, b in trained["losses"])
    _say(as_json, "\n".join([f"2. Trained for {_STEPS} steps on {ranks} ranks:", *shown]))
    _say(
        as_json,
        f"   the losses differ by {difference:.1e} at most; a rank holds {trained['held']:.0%} of all\n",
    )
    with working("predict and draw it on a node of H100"):
        with torch.device("meta"):
            large = _model(width=4096, layers=8)
        inputs = torch.zeros(4, 2048, dtype=torch.long, device="meta")
        analysis = shardgraph.analyze(large, (inputs,), "fsdp", mesh={"dp": 8}, cluster="H100", precision="bf16")
        path = shardgraph.visualize(analysis, Path(out), model=large, example_inputs=(inputs,))
    _say(as_json, f"3. The same architecture with {_count(large):.1f} B parameters, predicted on 8 H100:\n{analysis}\n")
    text = f"Open {path} in a browser. Next: `shardgraph doctor`, and docs/tutorial.md."
    result(text, {"verified": verified.ok, "difference": difference, "wrote": str(path)}, as_json)
    if not verified.ok:
        raise typer.Exit(1)


def _say(as_json: bool, text: str) -> None:
    if not as_json:
        typer.echo(text)


def _model(width: int = 64, layers: int = 2) -> Any:
    """A language model over bytes, of torch's own layers."""
    import torch
    from torch import nn

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(256, width)
            self.positions = nn.Parameter(0.02 * torch.randn(2048, width))
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, max(4, width // 128), 4 * width, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
            self.head = nn.Linear(width, 256)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids) + self.positions[: ids.shape[1]]
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=x.device, dtype=x.dtype)
            for layer in self.layers:
                x = layer(x, src_mask=mask, is_causal=True)
            return self.head(x)

    torch.manual_seed(0)
    return Bytes()


def _batch(step: int) -> Any:
    """Bytes of this file, and the bytes after them, each ``(rows, length)``; the same on every rank."""
    import torch

    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - _LENGTH - 1, (_ROWS,), generator=torch.Generator().manual_seed(step))
    window = torch.stack([text[start : start + _LENGTH + 1] for start in starts.tolist()])
    return window[:, :-1], window[:, 1:]


def _loss(logits: Any, target: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def _train(ranks: int) -> dict[str, Any]:
    """What each rank does: its part of each batch, and on the first one all of it with the unsharded model."""
    import torch
    import torch.distributed as dist

    rank, model, original = dist.get_rank(), _model(), _model()
    sharded = shardgraph.compile(model, "fsdp")
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (sharded, original))
    losses = []
    for step in range(_STEPS):
        ids, targets = _batch(step)
        mine = ids.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        loss = _loss(sharded(mine[0]), mine[1])
        expected = _loss(original(ids), targets) if rank == 0 else loss
        for each, one in ((loss, optimizer), (expected, reference)):
            if one is optimizer or rank == 0:
                each.backward()
                one.step()
                one.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((step, mean.item() / ranks, expected.item()))
    held = sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in sharded.parameters())
    return {"losses": losses, "held": held / sum(each.numel() for each in original.parameters())}


def _count(model: Any) -> float:
    return sum(each.numel() for each in model.parameters()) / 1e9
