"""More training programs for :mod:`tests.whole_programs`, as of repositories of research."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def _batch(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def _words(step: int, *shape: int) -> torch.Tensor:
    return torch.randint(29, shape, generator=torch.Generator().manual_seed(step))


class Language(nn.Module):
    """A language model with a tied head that gives logits, and a loss or None."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(29, 16), nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 29, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        length = ids.shape[1]
        assert length <= 8, f"a sequence of {length} is too long"
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.layers(self.words(ids) + self.places(torch.arange(length)), mask=mask, is_causal=True)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])


def language(run: Any) -> None:
    """Accumulated gradients, clipped; rates set by hand; and the same model without targets at the end."""
    model = run.compile(Language(), _words(0, 8, 8), _words(1, 8, 8))
    optimizer = model.optimizer()
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 3
        for part in range(2):
            with model.no_sync() if part == 0 and hasattr(model, "no_sync") else nullcontext():
                ids, targets = run.rows(_words(10 * step + part, 8, 8), _words(500 + 10 * step + part, 8, 8))
                _, loss = model(ids, targets)
                (loss / 2).backward()
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        run.note(loss=loss)
    with torch.no_grad():
        logits, loss = model.eval()(run.rows(_words(77, 8, 8)))
    assert loss is None
    run.note(last=logits.mean())


class Contrast(nn.Module):
    """An encoder, one that follows it, and a queue of what that made, which methods move on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(_batch(5, 4, 16), dim=0))
        self.first = 0

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            key = F.normalize(self.follower(other), dim=1)
        alike = (query * key).sum(1, keepdim=True)
        return torch.cat([alike, query @ self.queue.clone().detach()], 1) / 0.2, key

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    @torch.no_grad()
    def remember(self, keys: torch.Tensor) -> None:
        self.queue[:, self.first : self.first + len(keys)] = keys.T
        self.first = (self.first + len(keys)) % 16


def momentum_contrast(run: Any) -> None:
    """A second encoder follows the first one's weights, and keys of all ranks go to a queue."""
    model = run.compile(Contrast(), _batch(0, 8, 6), _batch(1, 8, 6))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(3):
        x, other = run.rows(_batch(step, 8, 6), _batch(30 + step, 8, 6))
        logits, key = model(x, other)
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss=loss)
        keys = [torch.empty_like(key) for _ in range(8 // len(key))]
        if len(keys) > 1:
            dist.all_gather(keys, key.contiguous())
        model.follow()
        model.remember(torch.cat(keys) if len(keys) > 1 else key)


class Sharpness(torch.optim.SGD):
    """Steps by the gradient of a point that is uphill, by the norm of all gradients (sharpness-aware)."""

    @torch.no_grad()
    def climb(self, norm: torch.Tensor | None = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if norm is None:
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in parameters]), p=2)
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad * (0.5 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p].pop("before"))
        self.step()
        self.zero_grad()


def sharpness_aware(run: Any, norm: Callable[[Any], torch.Tensor | None] = lambda model: None) -> None:
    """Two passes for each step, with the norm of all gradients between."""
    layers = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 1))
    model = run.compile(layers, _batch(0, 8, 6))
    optimizer = Sharpness(model.parameters(), lr=0.1)
    for step in range(3):
        x = run.rows(_batch(step, 8, 6))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.climb(norm(model))
        model(x).square().mean().backward()
        optimizer.descend()
        run.note(loss=loss)


def sharpness_aware_of_all_ranks(run: Any) -> None:
    """The same where the norm is asked of the module, since a rank of a pipeline has the gradients of its stages."""
    sharpness_aware(run, lambda model: model.clip_grad_norm_(math.inf) if hasattr(model, "clip_grad_norm_") else None)


class Critic(nn.Module):
    """A critic, and its loss with a penalty on slopes between real and made rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        between = (0.3 * real + 0.7 * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return (self.net(made) - self.net(real) + 10 * (slope.norm(2, dim=1, keepdim=True) - 1).square()).mean()


def gradient_penalty(run: Any) -> None:
    """Second derivatives, by a first one in forward."""
    critic = run.compile(Critic(), _batch(0, 8, 6), _batch(1, 8, 6))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for step in range(3):
        loss = critic(*run.rows(_batch(step, 8, 6), _batch(40 + step, 8, 6)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss=loss)


class Codes(nn.Module):
    """Codes from a book, whose gradients pass them by."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.book, self.decoder = nn.Linear(6, 4), nn.Embedding(8, 4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.encoder(x)
        book = self.book.weight
        apart = code.square().sum(1, keepdim=True) + book.square().sum(1) - 2 * code @ book.t()
        nearest = self.book(apart.argmin(1))
        loss = F.mse_loss(nearest, code.detach()) + 0.25 * F.mse_loss(code, nearest.detach())
        return self.decoder(code + (nearest - code).detach()), loss


def book_of_codes(run: Any) -> None:
    """A quantised encoder."""
    model = run.compile(Codes(), _batch(0, 8, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        x = run.rows(_batch(step, 8, 6))
        again, loss = model(x)
        loss = loss + F.mse_loss(again, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss=loss)


class Adapted(nn.Module):
    """The loss of a task after a step of the parameters for it, which is differentiated too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = dict(self.net.named_parameters())
        slopes = torch.func.grad(lambda p: F.mse_loss(torch.func.functional_call(self.net, p, (x,)), y))(values)
        stepped = {name: value - 0.1 * slopes[name] for name, value in values.items()}
        return F.mse_loss(torch.func.functional_call(self.net, stepped, (other,)), target)


def meta_learning(run: Any) -> None:
    """Tasks, for each of which the model is adapted inside of its loss."""

    def task(number: int) -> tuple[torch.Tensor, ...]:
        return tuple(_batch(10 * number + part, 4, 6 if part % 2 == 0 else 1) for part in range(4))

    model = run.compile(Adapted(), *task(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        numbers = run.rows(torch.arange(4))
        loss = sum(model(*task(10 * step + number)) for number in numbers.tolist()) / len(numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss=loss)


def _unit_norm(x: torch.Tensor) -> torch.Tensor:
    return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def adaptive_clipping(run: Any) -> None:
    """Gradients are clipped in place, unit by unit, by the norms of the weights, as timm does it but for ``clamp_``."""
    layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    model = run.compile(layers, _batch(0, 8, 3, 6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(run.rows(_batch(step, 8, 3, 6, 6))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            values, gradient = parameter.detach(), parameter.grad.detach()
            most = _unit_norm(values).clamp(min=1e-3).mul_(0.01)
            norm = _unit_norm(gradient)
            clipped = gradient * (most / norm.clamp(min=1e-6))
            parameter.grad.detach().copy_(torch.where(norm < most, gradient, clipped))
        optimizer.step()
        run.note(loss=loss)


RESEARCH = (
    language,
    momentum_contrast,
    sharpness_aware,
    sharpness_aware_of_all_ranks,
    gradient_penalty,
    book_of_codes,
    meta_learning,
    adaptive_clipping,
)
