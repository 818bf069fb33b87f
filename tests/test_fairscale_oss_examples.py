"""The scripts that FairScale shows for OSS and for AdaScale, against the same training on one rank."""

from __future__ import annotations

import re

import pytest
import torch

from tests.adascale import Paper
from tests.example_scripts import ROUNDED, loaded, losses_in, printed_by


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_the_example_of_oss_has_the_losses_of_one_rank_and_half_of_its_state():
    example, printed = loaded("oss"), printed_by("oss")
    model = example.make_model()
    optimizer = example.BASE_OPTIMIZER(model.parameters(), **example.ARGUMENTS)
    expected = []
    for _ in range(example.EPOCHS):
        for data, target in example.batches():
            optimizer.zero_grad()
            loss = example.LOSS(model(data), target)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    found = losses_in(printed)
    assert found == pytest.approx(expected, abs=ROUNDED) and found[-1] < found[0] / 2
    held, total = map(int, re.findall(r"holds (\d+) of (\d+) numbers", printed)[0])
    assert total == sum(value.numel() for state in optimizer.state.values() for value in state.values())
    assert 0.25 * total < held < 0.75 * total


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_the_example_of_adascale_has_the_losses_and_gains_of_the_paper_on_whole_gradients():
    example, printed = loaded("adascale"), printed_by("adascale")
    model = example.make_model()
    paper, parameters = Paper(1 - example.WORLD_SIZE / 1000, debias=True), list(model.parameters())
    expected, progress = [], 0.0
    while progress < example.MAX_EPOCH * example.BATCHES:
        data, target = example.dataset(example.WORLD_SIZE)[len(expected) % example.BATCHES]
        samples, losses = [], []
        for rows, wanted in zip(data.chunk(example.WORLD_SIZE), target.chunk(example.WORLD_SIZE), strict=True):
            losses.append(example.LOSS(model(rows), wanted))
            samples.append([torch.cat([each.flatten() for each in torch.autograd.grad(losses[-1], parameters)])])
        gain, _ = paper.step(samples)
        rate = gain * example.RATE * example.decay(int(progress // example.BATCHES))
        mean = torch.stack([sample for (sample,) in samples]).mean(0)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
                parameter -= rate * gradient.view_as(parameter)
        expected.append((torch.stack(losses).mean().item(), gain))
        progress += gain
    found = [(float(loss), float(gain)) for loss, gain in re.findall(r"loss (\S+) gain (\S+)", printed)]
    assert len(found) == len(expected)
    for (loss, gain), (expected_loss, expected_gain) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, abs=ROUNDED)
        assert gain == pytest.approx(expected_gain, abs=ROUNDED)
    assert found[0][1] > 1.0
