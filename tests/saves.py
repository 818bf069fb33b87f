"""What runs on the ranks for :mod:`tests.test_saves`: jobs that save, are damaged, and go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardgraph
from shardgraph.errors import CheckpointError, RankFailedError
from tests.ranks import whole

SAMPLES = 8


class Net(nn.Module):
    """A tied weight, a buffer of integers, odd sizes, dropout."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.arange(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.dropout(self.down(torch.relu(self.up(x)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).double()


def batch(step: int) -> torch.Tensor:
    """The global batch of a step."""
    return torch.randint(6, (SAMPLES, 5), generator=torch.Generator().manual_seed(step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Job:
    """A model under a plan with its optimizer and a scheduler."""

    def __init__(
        self,
        plan: str,
        mesh: dict[str, int] | None = None,
        seed: int = 0,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        example = {} if mesh is None or set(mesh) == {"dp"} else {"example_inputs": (batch(0),)}
        if plan.startswith("pp"):
            options |= {"pipeline": shardgraph.Pipeline(microbatches=2)}
        self.model = shardgraph.compile(net(seed, dropout=dropout), plan, mesh=mesh, **example, **options)
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(getattr(self.optimizer, "optim", self.optimizer), 0.9)
        self.objects = {"scheduler": self.scheduler}

    def train(self, steps: range) -> list[float]:
        """The loss of each step, of all samples."""
        losses = []
        for step in steps:
            plan = self.model.plan
            ids = batch(step).chunk(plan.data_size)[plan.data_rank(dist.get_rank() if dist.is_initialized() else 0)]
            loss = self.model.train_step(ids) if plan.pipeline else self.model(ids)
            if not plan.pipeline:
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    def save(self, path: str, step: int, **options: Any) -> shardgraph.Save:
        options = {"extra": {"position": step * SAMPLES}, "objects": self.objects, **options}
        return shardgraph.save_checkpoint(path, step, self.model, self.optimizer, **options)

    def load(self, path: str, **options: Any) -> shardgraph.Loaded:
        options = {"objects": self.objects, **options}
        return shardgraph.load_checkpoint(path, self.model, self.optimizer, **options)

    def digest(self) -> list[bytes]:
        """All of this rank's values, of the model and the optimizer's state."""
        of_parameters = (self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters())
        states = [state[key] for state in of_parameters for key in sorted(state)]
        tensors = [*self.model.state_dict().values(), *states]
        locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in locals_]


def refused(call: Callable[[], Any]) -> str:
    """The text of the error that a call raises."""
    try:
        with warnings.catch_warnings(record=True):
            call()
    except (CheckpointError, RankFailedError) as error:
        return str(error)
    return ""


def saved(path: str, plan: str, mesh: dict[str, int] | None, options: dict[str, Any] | None = None) -> list[float]:
    """Train three steps, save, and go on: the losses of the latter."""
    job = Job(plan, mesh, **(options or {}))
    job.train(range(3))
    job.save(path, 3)
    return job.train(range(3, 6))


def continued(path: str, plan: str, mesh: dict[str, int] | None, options: dict[str, Any] | None = None) -> list[float]:
    """The losses of another job, with other weights at first, after loading."""
    job = Job(plan, mesh, seed=7, **(options or {}))
    loaded = job.load(path)
    assert (loaded.step, loaded.extra) == (3, {"position": 24})
    return job.train(range(3, 6))


# -- damage ------------------------------------------------------------------------------------------


def flipped_everywhere(path: str, flips: int) -> list[tuple[str, str, bool]]:
    """For single bits that are flipped, one after the other, in all files: the file, the error of loading, and whether
    this rank's values are as before."""
    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(2))
    folder = job.save(path, 2).result()
    job.train(range(2, 4))
    before, generator, found = job.digest(), random.Random(0), []
    files = [(each, 8 * each.stat().st_size) for each in sorted(folder.iterdir())]
    dist.barrier()
    for number in range(flips):
        file, bits = files[number % len(files)]
        position = generator.randrange(bits)
        with _on_first_rank(lambda file=file, position=position: _flip(file, position)):
            error = refused(lambda: job.load(path))
        found.append((file.name, error, job.digest() == before))
    assert job.load(path).step == 2  # all is as it was
    return found


def _flip(file: Path, position: int) -> Callable[[], None]:
    data = bytearray(file.read_bytes())
    data[position // 8] ^= 1 << position % 8
    file.write_bytes(data)

    def undo() -> None:
        data[position // 8] ^= 1 << position % 8
        file.write_bytes(data)

    return undo


@contextmanager
def _on_first_rank(change: Callable[[], Callable[[], None]]) -> Iterator[None]:
    undo = change() if dist.get_rank() == 0 else None
    dist.barrier()
    yield
    dist.barrier()
    if undo is not None:
        undo()
    dist.barrier()


def damaged_in_other_ways(path: str) -> dict[str, tuple[str, bool]]:
    """For each kind of damage the error of loading, and whether this rank's values are as before."""
    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(2))
    other = job.save(f"{path}/other", 1).result()
    job.train(range(2, 3))
    folder = job.save(f"{path}/one", 2).result()
    job.train(range(3, 4))
    before = job.digest()

    def truncated() -> None:
        os.truncate(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size - 1)

    def missing() -> None:
        (folder / "__1_0.distcp").unlink()

    def swapped() -> None:
        first, second = folder / "__0_0.distcp", folder / "__1_0.distcp"
        first.rename(folder / "aside"), second.rename(first), (folder / "aside").rename(second)

    def of_another_step() -> None:
        for name in ("manifest.json", "manifest.json.sha256"):
            shutil.copy(other / name, folder / name)

    def all_of_another_step() -> None:
        shutil.rmtree(folder)
        shutil.copytree(other, folder)

    def longer() -> None:
        with (folder / "__0_0.distcp").open("ab") as file:
            file.write(b"more")

    def file_of_another_step() -> None:
        shutil.copy(other / "__0_0.distcp", folder / "__0_0.distcp")

    def without_manifest() -> None:
        (folder / "manifest.json").unlink()

    found = {}
    kept = f"{path}/kept"
    if dist.get_rank() == 0:
        shutil.copytree(folder, kept)
    for damage in (
        truncated,
        missing,
        swapped,
        of_another_step,
        all_of_another_step,
        longer,
        file_of_another_step,
        without_manifest,
    ):

        def change(damage: Callable[[], None] = damage) -> Callable[[], None]:
            damage()
            return lambda: (shutil.rmtree(folder), shutil.copytree(kept, folder))

        with _on_first_rank(change):
            error = refused(lambda: job.load(f"{path}/one"))
            at_path = refused(lambda: job.load(str(folder)))
        found[damage.__name__] = (error, bool(at_path) and job.digest() == before)
    return found


def one_rank_cannot_write(path: str) -> list[str]:
    """What each rank hears when rank 1 has no room left; at the next call, in the background too."""
    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(1))
    job.save(path, 1)
    told = []
    with _full_disk(dist.get_rank() == 1):
        told.append(refused(lambda: job.save(path, 2)))
        saving = job.save(path, 3, background=True)
        told.append(refused(lambda: job.save(path, 4)))
        told.append(refused(saving.result))
    assert sorted(os.listdir(path)) == ["step-00000001"]
    job.save(path, 5)
    assert job.load(path).step == 5
    return told


@contextmanager
def _full_disk(here: bool) -> Iterator[None]:
    """Files have no room for more than a few bytes."""
    from shardgraph.saves import writing

    before = writing._Checksummed.write

    def write(self: Any, data: Any) -> int:
        if self.end + len(data) > 3000:
            raise OSError(28, "No space left on device")
        return before(self, data)

    writing._Checksummed.write = write if here else before  # type: ignore[method-assign]
    try:
        yield
    finally:
        writing._Checksummed.write = before  # type: ignore[method-assign]


def ranks_that_differ(path: str) -> dict[str, str]:
    """What all ranks hear when they do not save or load the same."""
    job, rank = Job("fsdp", {"dp": dist.get_world_size()}), dist.get_rank()
    job.train(range(1))
    found = {
        "step": refused(lambda: job.save(path, rank)),
        "path": refused(lambda: job.save(f"{path}{rank}", 1)),
        "extra": refused(lambda: job.save(path, 1, extra=lambda: 0) if rank else job.save(path, 1)),
        "object": refused(lambda: job.save(path, 1, objects={"it": object()}) if rank else job.save(path, 1)),
        "late": refused(lambda: (time.sleep(rank), job.save(path, 1, timeout=0.3))),
    }
    job.save(path, 1)
    found["model"] = refused(
        lambda: shardgraph.load_checkpoint(path, nn.Linear(2, 2) if rank else job.model, timeout=10)
    )
    return found


def extras_of_ranks(path: str) -> list[Any]:
    job, rank = Job("fsdp", {"dp": dist.get_world_size()}), dist.get_rank()
    job.save(path, 1, extra={"position": rank})
    return [job.load(path).extra, len(job.load(path).extras)]


def extras_loaded(path: str) -> tuple[list[Any], str]:
    loaded = Job("single").load(path)
    return loaded.extras, refused(lambda: loaded.extra)


def by_torch(path: str) -> float:
    """The largest difference of a weight that ``torch.distributed.checkpoint`` reads from what the model has; and ours
    of what it wrote."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(2))
    folder = job.save(path, 2).result()
    expected = {name: whole(value).clone() for name, value in job.model.state_dict().items()}
    moments = {name: whole(s["exp_avg"]).clone() for name, s in _state_by_name(job).items()}

    other = Job("fsdp", {"dp": dist.get_world_size()}, seed=3)
    weights, states = get_state_dict(other.model, other.optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=str(folder))
    worst = max((whole(weights[name]) - value).abs().max().item() for name, value in expected.items())
    read = {name: whole(state["exp_avg"]) for name, state in states["state"].items()}
    worst = max(worst, *((read[name] - value).abs().max().item() for name, value in moments.items()))

    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(job.model, job.optimizer), strict=True)),
        checkpoint_id=f"{path}/by-torch",
    )
    third = Job("fsdp", {"dp": dist.get_world_size()}, seed=4)
    loaded = shardgraph.load_checkpoint(f"{path}/by-torch", third.model, third.optimizer)
    assert loaded.step is None and loaded.extra is None
    ours = {name: whole(value) for name, value in third.model.state_dict().items()}
    worst = max(worst, *((ours[name] - value).abs().max().item() for name, value in expected.items()))
    read = {name: whole(s["exp_avg"]) for name, s in _state_by_name(third).items()}
    return max(worst, *((read[name] - value).abs().max().item() for name, value in moments.items()))


def _state_by_name(job: Job) -> dict[str, Any]:
    return {name: job.optimizer.state[parameter] for name, parameter in job.model.named_parameters()}


def in_the_background(path: str) -> tuple[bool, list[int]]:
    """Whether what is on the disk is of the step that was saved though training went on; and the steps that are there
    after more saves than are kept."""
    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(2))
    expected = job.digest()
    job.save(path, 2, background=True)
    job.train(range(2, 4))
    other = Job("fsdp", {"dp": dist.get_world_size()}, seed=5)
    other.load(path)
    same = other.digest() == expected
    for step in range(3, 8):
        job.save(path, step, background=True, keep=2)
    shardgraph.wait_for_saves()
    return same, [step for step, _ in shardgraph.checkpoints(path)]


# -- optimizers and other objects ----------------------------------------------------------------------


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=1e-2, max_iter=2)


def owned_adafactor(parameters: Any) -> torch.optim.Optimizer:
    return shardgraph.ShardedOptimizer(parameters, torch.optim.Adafactor, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


OPTIMIZERS = {"Adafactor": adafactor, "ShardedOptimizer": owned_adafactor, "momentum": momentum}


def with_average(path: str, resume: bool) -> tuple[float, int]:
    """A job with an average of its weights; the largest element of the average's weights."""
    job = Job("fsdp", {"dp": dist.get_world_size()}, seed=int(resume))
    average = shardgraph.AveragedWeights(job.model, decay=0.5)
    objects = {**job.objects, "average": average, "scaler": (scaler := shardgraph.GradScaler("cpu", init_scale=8.0))}
    if resume:
        job.load(path, objects=objects)
        assert scaler.get_scale() == 32.0
    else:
        job.train(range(2))
        average.update()
        scaler.scale(torch.ones(()))
        scaler.update(32.0)
        job.save(path, 2, objects=objects)
    with average.applied():
        return job.train(range(2, 3))[0], average.updates


def with_gains(path: str, resume: bool) -> list[float]:
    """Losses and gains of AdaScale."""

    def scaled(model: nn.Module) -> Any:
        return shardgraph.AdaScale(momentum(model.parameters()), model)

    model = shardgraph.compile(net(int(resume)), "fsdp", gradient_statistics=True)
    optimizer = scaled(model)
    found = []
    if resume:
        assert shardgraph.load_checkpoint(path, model, optimizer).step == 3
    for step in range(3, 6) if resume else range(6):
        if step == 3 and not resume:
            shardgraph.save_checkpoint(path, 3, model, optimizer)
        optimizer.zero_grad()
        loss = model(batch(step).chunk(2)[dist.get_rank()])
        loss.backward()
        found += [optimizer.gain(), loss.item()]
        optimizer.step()
    return found[-6:]


def on_disk(path: str, folder: str) -> list[float]:
    """Losses after a resume by a job whose parameters and state are in files."""
    offload = shardgraph.Offload(parameters=True, disk=folder, optimizer_state=True)
    job = Job("fsdp", {"dp": dist.get_world_size()}, seed=3, offload=offload)
    assert job.load(path).step == 3
    losses = job.train(range(3, 6))
    job.save(path, 6)
    return losses


# -- a rank that fails ---------------------------------------------------------------------------------


def one_rank_stops(path: str, told: str) -> None:
    """Save twice; at the second time rank 1 stops itself while it writes, and the others write down what they hear."""
    from shardgraph.saves import writing

    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(1))
    job.save(path, 1)
    if dist.get_rank() == 1:
        writing._write_file = lambda *_: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(60))  # type: ignore
    start = time.monotonic()
    error = refused(lambda: job.save(path, 2, timeout=300))
    Path(f"{told}-{dist.get_rank()}").write_text(f"{time.monotonic() - start:.1f} {error}")
    os._exit(1)


def with_lbfgs(path: str, resume: bool) -> list[float]:
    """Losses of LBFGS, whose state is lists of tensors on the first parameter."""
    model = shardgraph.compile(net(int(resume)), "fsdp")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2)
    mine, losses = batch(0).chunk(dist.get_world_size())[dist.get_rank()], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(mine)
        loss.backward()
        return loss

    if resume:
        assert shardgraph.load_checkpoint(path, model, optimizer).step == 3
    for step in range(3, 6) if resume else range(6):
        if step == 3 and not resume:
            shardgraph.save_checkpoint(path, 3, model, optimizer)
        losses.append(optimizer.step(closure).item())
    return losses[-3:]


def saved_at_the_end(path: str) -> None:
    """A job whose last save is under way when it returns, and whose process group ends."""
    job = Job("fsdp", {"dp": dist.get_world_size()})
    job.train(range(1))
    job.save(path, 1, background=True)
