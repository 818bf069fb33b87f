"""Models and batches of many lengths for :mod:`tests.test_lengths`, and what runs on ranks for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import shardgraph
from shardgraph import Lengths, Pipeline

Batch = dict[str, torch.Tensor]
FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}
SIXTEENS = Lengths(FILL, multiple_of=16)


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes, **dropout)
    return BertForMaskedLM(config).double().train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, use_cache=False, **dropout)
    return GPT2LMHeadModel(config).double().train()


def texts(length: int, seed: int, rows: int = 3) -> Batch:
    """A batch whose rows end at different places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (rows, length), generator=generator)
    ends = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < ends).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Tagger(nn.Module):
    """Tags of words, whose states are mixed with the mean of all words that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embedding(ids))
        weights = mask.to(x.dtype).unsqueeze(-1)
        x = x + (x * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        return self.head(x)


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


def tags_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def words(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, their mask and tags."""
    ids = torch.randint(20, (4, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.ones_like(ids), (ids * 7) % 20


LENGTHS = [(5, 11), (8, 3), (13, 2), (7, 16)]  # of the ranks in each step
TAGGED = Lengths({"ids": 0, "mask": 0, "target": -100}, powers_of_two=True)


def trained_under(plan: str, weight: str, pipeline: Pipeline | None = None) -> list[float]:
    """Differences to the unsharded model on batches without padding, of weights after steps and of outputs; each data
    rank has batches of its own lengths."""
    original = tagger()
    example = words(8, 0)
    sharded = shardgraph.compile(
        copy.deepcopy(original), plan, pipeline=pipeline, loss_fn=tags_loss, loss_weight=weight, lengths=TAGGED,
        example_inputs=example[:2], example_kwargs={"target": example[2]}, progress=False,
    )  # fmt: skip
    size, own = sharded.plan.data_size, sharded.plan.data_rank(dist.get_rank())
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (sharded, original))
    found = []
    for step, lengths in enumerate(LENGTHS):
        batches = [words(lengths[rank], step) for rank in range(size)]
        ids, mask, target = batches[own]
        sharded.step(ids, mask, target=target, optimizer=mine)
        counts = [tags.numel() if weight == "tokens" else 1 for *_, tags in batches]
        losses = [tags_loss(original(*inputs), tags) for *inputs, tags in batches]
        sum(loss * count / sum(counts) for loss, count in zip(losses, counts, strict=True)).backward()
        theirs.step()
        theirs.zero_grad()
        with torch.no_grad():
            found.append(_difference(sharded(ids, mask), original(ids, mask)))
    state = sharded.full_state_dict()
    found += [_difference(state[name], value) for name, value in original.state_dict().items() if state]
    return found


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    return (one - other).abs().max().item()


def stepped(model: nn.Module, batches: Sequence[Batch]) -> tuple[nn.Module, list[float]]:
    """``model`` after steps of AdamW, and its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


class Told(nn.Module):
    """A layer whose forward depends on much."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), 1

    def forward(self, x: torch.Tensor, twice: bool = False, options: dict[str, Any] | None = None) -> torch.Tensor:
        x = self.layer(x) * self.factor
        if x.dim() == 3:
            x = x.sum(1)
        return x * 2 if twice else x
