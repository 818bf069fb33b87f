"""What each rank does in the tests of Lightning: one module, trained by Lightning's own strategy or ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardgraph import ShardGraphError
from shardgraph.trainers.lightning import ShardGraphStrategy
from tests.standing import environment


class Learner(LightningModule):
    """An encoder that steps call, a list of layers, batch norm, and a loss without parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
        self.heads = nn.ModuleList([nn.Linear(5, 4), nn.Linear(4, 2)])
        self.loss = nn.MSELoss()
        self.register_buffer("scale", torch.ones(1))
        self.seen: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        for head in self.heads:
            hidden = head(torch.relu(hidden))
        return hidden * self.scale

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.loss(self(batch[0]), batch[1])
        self.log("train", loss, sync_dist=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.encoder.parameters(), "lr": 2e-2}, {"params": self.heads.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Small(LightningModule):
    """One layer of its own; ``add`` puts something into it that cannot be."""

    def __init__(self, add: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if add == "parameter":
            self.shift = nn.Parameter(torch.zeros(2))
        if add == "shared":
            self.other = nn.Linear(3, 2)
            self.other.weight = self.layer.weight

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(rows: int = 32) -> DataLoader:
    values = torch.randn(rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(values[:, :3], values[:, 3:]), batch_size=4)


def trainer(plan: str, folder: str, **options: Any) -> Trainer:
    strategy = "ddp" if plan == "theirs" else ShardGraphStrategy(plan, options=options.pop("compile", None))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"precision": "64-true", "max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return Trainer(strategy=strategy, accelerator="cpu", devices=2, default_root_dir=folder, **given)


def whole(made: Trainer) -> dict[str, Tensor]:
    """The weights on every rank."""
    if not isinstance(made.strategy, ShardGraphStrategy):
        return {name: value.clone() for name, value in made.lightning_module.state_dict().items()}
    with made.strategy.whole_parameters() as module:
        return {name: value.clone() for name, value in module.state_dict().items()}


def trained(plan: str, folder: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of each step, weights, and the loss of validation; every rank begins with weights of its own."""
    with environment():
        model = Learner(seed=int(os.environ["RANK"]))
        made = trainer(plan, folder, **options)
        made.fit(model, data(), data(8))
        return model.seen, whole(made), float(made.callback_metrics["val"])


def evaluated(plan: str, folder: str) -> tuple[float, Tensor]:
    """The loss of a test, and predictions, of a model that has not been trained."""
    with environment():
        model = Learner()
        tested = trainer(plan, folder).test(model, data(), verbose=False)
        predicted = trainer(plan, folder).predict(model, data())
        return tested[0]["val"], torch.cat(predicted)


def resumed(first: str, second: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """The second epoch's losses and the weights of a run that begins under one plan and goes on under another."""
    with environment():
        saving = ModelCheckpoint(folder, "one", save_top_k=-1)
        trainer(first, folder, max_epochs=1, callbacks=[saving], enable_checkpointing=True).fit(
            Learner(), data(), data(8)
        )
        saved = next(Path(folder).glob("*.ckpt"))
        model = Learner(seed=5)
        made = trainer(second, folder)
        made.fit(model, data(), data(8), ckpt_path=saved)
        return model.seen, whole(made)


def saved_is_plain(folder: str) -> list[str]:
    """The names of what differs after a checkpoint is loaded into a module without a trainer."""
    with environment():
        model = Learner()
        made = trainer("fsdp", folder)
        made.fit(model, data(), data(8))
        made.save_checkpoint(Path(folder) / "last.ckpt")
        expected = whole(made)
        loaded = Learner.load_from_checkpoint(Path(folder) / "last.ckpt", weights_only=True).state_dict()
        assert loaded.keys() == expected.keys()
        return [name for name, value in expected.items() if not torch.equal(loaded[name], value.to(loaded[name]))]


class Noting(Small):
    """Notes the dtype of its layer's output."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        output = self.layer(batch[0].float())
        self.dtype_seen = str(output.dtype)
        return output.float().square().mean()


def in_bfloat16(folder: str) -> str:
    """The dtype of a compiled module's output in the Trainer's mixed precision."""
    with environment():
        model = Noting()
        trainer("fsdp", folder, precision="bf16-mixed", max_epochs=1).fit(model, data())
        return model.dtype_seen


def refused(case: str, folder: str) -> str:
    """The words with which something is refused."""
    cases: dict[str, Any] = {
        "parameter": lambda: trainer("fsdp", folder).fit(Small("parameter"), data()),
        "shared": lambda: trainer("fsdp", folder).fit(Small("shared"), data()),
        "tp": lambda: trainer("tp", folder).fit(Small(), data()),
        "precision": lambda: trainer("fsdp", folder, precision="bf16-true").fit(Small(), data()),
        "start": lambda: ShardGraphStrategy("fsdp", start_method="spawn"),
        "loss": lambda: ShardGraphStrategy("fsdp", options={"loss_fn": print}),
    }
    with environment():
        try:
            cases[case]()
        except ShardGraphError as error:
            return str(error)
        return "nothing was refused"
