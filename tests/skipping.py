"""Skippable layers, and what ranks do with them in test_fairscale_skip.py."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from shardgraph.fairscale import Namespace, Pipe, pop, skippable, stash
from tests.piped import batch, trained_like


@skippable(stash=["input"])
class Sets(nn.Linear):
    def forward(self, input):
        yield stash("input", input * 2)
        return super().forward(input).tanh()


@skippable(pop=["input"])
class Takes(nn.Linear):
    def forward(self, input):
        skip = yield pop("input")
        return F.gelu(super().forward(input)) + skip


def layers() -> nn.Sequential:
    """Two skips, one around the other, over the places where stages begin."""
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    made = [Sets(6, 6).isolate(outer), Sets(6, 6).isolate(inner), nn.Linear(6, 6)]
    return nn.Sequential(*made, Takes(6, 6).isolate(inner), Takes(6, 6).isolate(outer)).double()


def training(balance: list[int]) -> tuple[float, float]:
    """How far losses and weights of a Pipe are from those of the layers called one after the other."""
    original = layers()
    return trained_like(Pipe(copy.deepcopy(original), balance, chunks=4), original, batch())
