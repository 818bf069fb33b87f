"""Accuracy of large batches with AdaScale, with a learning rate that is linear in the batch, and with that of a small
batch: handwritten digits of scikit-learn (which must be installed), a perceptron, two gloo ranks.

``python benchmarks/adascale.py`` prints a row for each, with the steps that each takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import shardgraph

RANKS, BATCH, STEPS, RATE, SEEDS = 2, 8, 1600, 0.1, 5


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and to test with."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    return images[:1347], labels[:1347], images[1347:], labels[1347:]


def train(scale: int, how: str, seed: int) -> tuple[int, float]:
    """The steps of a training that is as long as ``STEPS`` of a small batch, and the accuracy after it."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    passes = max(1, scale // RANKS)
    if how == "adascale":
        model = shardgraph.compile(model, "fsdp", gradient_statistics=True)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer: Any = sgd
    if how == "adascale":
        optimizer = shardgraph.AdaScale(sgd, model, num_gradients_to_accumulate=passes)
    progress, steps, draws = 0.0, 0, torch.Generator().manual_seed(seed)
    while progress < STEPS:
        rows = torch.randint(len(images), (scale * BATCH,), generator=draws)
        factor = scale if how == "linear" else 1
        sgd.param_groups[0]["lr"] = factor * RATE * (1 + math.cos(math.pi * progress / STEPS)) / 2
        optimizer.zero_grad()
        if how == "adascale":
            mine = rows.view(passes, RANKS, -1)[:, dist.get_rank()]
            with model.no_sync():
                for part in mine[:-1]:
                    (nn.functional.cross_entropy(model(images[part]), labels[part]) / passes).backward()
            (nn.functional.cross_entropy(model(images[mine[-1]]), labels[mine[-1]]) / passes).backward()
            progress += optimizer.gain()
        else:
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            progress += scale
        optimizer.step()
        steps += 1
    with torch.no_grad():
        return steps, (model(test_images).argmax(1) == test_labels).float().mean().item()


def adascale(scales: list[int]) -> dict[int, list[tuple[int, float]]]:
    """By scale, the results of all seeds."""
    torch.set_num_threads(1)
    return {scale: [train(scale, "adascale", seed) for seed in range(SEEDS)] for scale in scales}


def main() -> None:
    """Train all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    out, scales = parser.parse_args().out, [4, 16]
    torch.set_num_threads(1)
    figures = {(1, "small batch"): [train(1, "small", seed) for seed in range(SEEDS)]}
    for scale in scales:
        for how in ("unscaled", "linear"):
            figures[scale, how] = [train(scale, how, seed) for seed in range(SEEDS)]
    for scale, results in shardgraph.launch(adascale, RANKS, args=(scales,))[0].items():
        figures[scale, "adascale"] = results
    print("| batch | learning rate | steps | accuracy % |\n|---|---|---|---|")
    for (scale, how), results in sorted(figures.items(), key=lambda each: each[0][0]):
        steps = sum(count for count, _ in results) / len(results)
        accuracies = [100 * accuracy for _, accuracy in results]
        mean = sum(accuracies) / len(accuracies)
        print(
            f"| {scale * BATCH} | {how} | {steps:.0f} | {mean:.1f} ({min(accuracies):.1f} to {max(accuracies):.1f}) |"
        )
    if out is not None:
        rows = [{"scale": scale, "how": how, "results": results} for (scale, how), results in figures.items()]
        out.write_text(json.dumps({"cpus": os.cpu_count(), "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
