"""A model, data and a callback that a configuration of Tango names; its workers import them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tango import Step
from tango.common import DatasetDict
from tango.integrations.torch import Model, TrainCallback
from torch import nn

import shardgraph.trainers.tango  # noqa: F401  registers its names


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x))


@Model.register("regression")
class Regression(Model):
    """Three blocks and a head, in single precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[FeedForward() for _ in range(3)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.head(self.blocks(x)), y)}


@Step.register("points")
class Points(Step):
    DETERMINISTIC, CACHEABLE = True, False

    def run(self) -> DatasetDict:  # type: ignore[override]
        values = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
        rows = [{"x": row[:4], "y": row[4:]} for row in values]
        return DatasetDict({"train": rows, "validation": rows[:8]})


@TrainCallback.register("record")
class Record(TrainCallback):
    """Writes the losses of workers, and fails at a step, once."""

    def __init__(self, *args: Any, file: str, fail_at: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.file, self.fail_at = Path(file), fail_at

    def post_batch(self, step: int, epoch: int, batch_loss: float, batch_outputs: list[Any]) -> None:
        with self.file.with_suffix(f".{self.train_config.worker_id}").open("a") as file:
            file.write(json.dumps([step, batch_loss]) + "\n")
        if step == self.fail_at and not self.file.exists():
            if self.is_local_main_process:
                self.file.touch()
            raise RuntimeError("stopped here")


def losses(file: Path, worker: int) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in file.with_suffix(f".{worker}").read_text().splitlines()]
