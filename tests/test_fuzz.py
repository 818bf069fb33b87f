"""Random models under random plans train like the original: outputs, losses, gradients, weights and buffers.

A failure shows the seed, the plan and the model. One seed again:

    python -m pytest tests/test_fuzz.py -m "slow or not slow" -k "seed431-"
"""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from tests.fuzzing import (
    OPTIMIZERS,
    Change,
    Model,
    Sharding,
    loss_of,
    random_changes,
    random_model,
    random_sharding,
)

QUICK, ALL = 10, 510
SEEDS = [
    pytest.param(seed, id=f"seed{seed}-", marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in range(ALL)
]
EXACT = {"rtol": 1e-8, "atol": 1e-10}

REFUSED: dict[str, str] = {
    "the ranks do not divide the positions": r"is a sequence of \d+ and is to be cut among \d+ ranks",
    "the model itself diverges": r"the original's gradient of .* is not finite at step \d",
    "torch 2.11 does not trace a slice of a ParameterList": r"(?s)function marked as skipped.*container\.py",
}
"""Why a model may be refused, with the message that says so."""


@pytest.mark.quick("seed2-")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_whose_attributes_change_trains_like_the_original(seed):
    random = Random(seed)
    model, optimizer = random_model(random), random.choice(list(OPTIMIZERS))
    described = f"seed {seed}, plan single, {optimizer}\n{model}"
    try:
        train_beside_original(model, optimizer, random)
    except Exception as error:
        error.add_note(described)
        if not refusal(error):
            raise


@pytest.mark.quick("seed0-", "seed2-")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_under_a_random_plan_trains_like_the_original(seed):
    random = Random(seed)
    model, optimizer, sharding = random_model(random), random.choice(list(OPTIMIZERS)), random_sharding(random)
    described = f"seed {seed}, {sharding}, {optimizer}\n{model}"
    try:
        report = verified(model, optimizer, sharding, random)
    except Exception as error:
        error.add_note(described)
        if not refusal(error):
            raise
    else:
        assert report.ok, f"{report}\n{described}"


def refusal(error: Exception) -> str | None:
    """The reason of ``REFUSED`` for which a model was refused, if it was."""
    if not isinstance(error, shardgraph.ShardGraphError):
        return None
    return next((reason for reason, message in REFUSED.items() if re.search(message, str(error))), None)


def verified(model: Model, optimizer: str, sharding: Sharding, random: Random) -> shardgraph.Report:
    rows = sharding.data_ranks * random.randint(1, 3) + (random.random() < 0.2)  # may be more than the ranks divide
    return shardgraph.verify(
        model,
        (model.example(rows, random.randint(2, 6)),),
        sharding.plan,
        mesh=sharding.mesh,
        recompute=sharding.recompute,
        loss_fn=loss_of,
        optimizer=OPTIMIZERS[optimizer],
        steps=2,
        fp64=True,
        tolerance=1e-8,
    )


def train_beside_original(model: Model, optimizer: str, random: Random) -> None:
    """Train both for three steps, with changes of attributes, and at times of the batch, between the steps."""
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "single", progress=False)
    optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in (sharded, original)]
    x, changes = model.example(random.randint(1, 4), random.randint(2, 6)), []
    for step in range(3):
        try:
            compare_step(sharded, original, x)
            for each in optimizers:
                each.step()
                each.zero_grad()
            compare(dict(sharded.named_parameters()), dict(original.named_parameters()), "weight")
            compare(dict(model.named_buffers()), dict(original.named_buffers()), "buffer")
        except Exception as error:
            error.add_note(f"at step {step}, after {changes}, with an input of {list(x.shape)}")
            raise
        changes += change(model, original, random)
        if random.random() < 0.3:
            x = model.example(random.randint(1, 4), x.shape[1])


def change(model: Model, original: Model, random: Random) -> list[Change]:
    changes = random_changes(original, random)
    for each in changes:
        each.apply(model)
        each.apply(original)
    return changes


def compare_step(sharded: nn.Module, original: nn.Module, x: torch.Tensor) -> None:
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    made, expected = sharded(inputs[0]), original(inputs[1])
    torch.testing.assert_close(made, expected, **EXACT)
    losses = [loss_of(output) for output in (made, expected)]
    torch.testing.assert_close(*losses, **EXACT)
    assert losses[0].requires_grad == losses[1].requires_grad
    for loss in losses if losses[1].requires_grad else []:  # changes may have frozen all parameters
        loss.backward()
    compare(gradients(sharded, inputs[0]), gradients(original, inputs[1]), "gradient")


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {"the input": x.grad}


def compare(made: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (made[name] is None), f"{what} of {name}: {made[name]}, and the original's is {value}"
        if value is not None:
            torch.testing.assert_close(made[name], value, **EXACT, msg=lambda text, n=name: f"{what} of {n}: {text}")
