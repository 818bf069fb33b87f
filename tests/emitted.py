"""Emitted programs, run on ranks that can import torch alone, and the compiled modules beside them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.runtime.launch import rank_environment, serve_store
from shardgraph.torch_api import pytree

STEPS = 3
_SECONDS = 240


def beside_torch() -> list[str]:
    """The names of all packages that are installed here, but for torch and what it requires."""
    with_torch, found = {"torch"}, ["torch"]
    while found:
        for each in metadata.requires(found.pop()) or ():
            name = _normal(re.split(r"[^\w.-]", each)[0])
            if "extra ==" not in each and name not in with_torch:
                with suppress(metadata.PackageNotFoundError):
                    metadata.distribution(name)
                    with_torch.add(name)
                    found.append(name)
    every = metadata.packages_distributions()
    return ["shardgraph", *(name for name, parts in every.items() if with_torch.isdisjoint(map(_normal, parts)))]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_NOWHERE = f'''
import sys

class Rest:
    """Finds what another finder does, but for what must not be needed."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {beside_torch()}:
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Rest, sys.meta_path)
'''

_DRIVER = (
    _NOWHERE
    + """
import importlib, json
try:
    import shardgraph
except ImportError:
    pass
else:
    raise SystemExit("shardgraph can be imported")
import torch
torch.set_num_threads(1)
losses = {}
for folder in sys.argv[2:]:
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name in ("program", "ranks") or name.startswith("stage")]:
        del sys.modules[name]
    program = importlib.import_module("program")
    program.join_ranks(program.AXES)
    losses[folder] = program.main(int(sys.argv[1]))
    sys.path.remove(folder)
print("LOSSES", json.dumps(losses), flush=True)
program.leave_ranks()
"""
)


@dataclass(frozen=True)
class Case:
    """A model under a plan: ``build()`` returns it with the inputs of one call.

    ``edits`` are what a user writes into the emitted program in place of what is there. Beside it the compiled module
    trains on ``loss(output)``, if the model has none, and by ``LocalSGD`` of this ``frequency``, if one is given.
    """

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    plan: str | shardgraph.Plan
    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    edits: Mapping[str, str] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    frequency: int | None = None

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return int(torch.tensor(list(self.mesh.values())).prod()) if self.mesh else 1

    def made(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model with the same weights every time."""
        torch.manual_seed(7)
        return self.build()


def batch_of(call: Any, number: int) -> Any:
    """Another batch of the same values, in another order, for a rank."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(number))
        return tensor.flatten()[order].view(tensor.shape)

    return pytree.tree_map_only(torch.Tensor, other, call)


def emitted_losses(
    cases: Sequence[Case], folder: Path, steps: int = STEPS, **options: Any
) -> list[dict[str, list[float]]]:
    """The losses of emitted programs on every rank, by the name of the case; all cases have as many ranks."""
    folders = {str(written(case, folder, **options)): case.name for case in cases}
    ranks = run_ranks(cases[0].ranks, ["-c", _DRIVER, str(steps), *folders])
    found = []
    for text in ranks:
        line = next(line for line in text.splitlines() if line.startswith("LOSSES"))
        found.append({folders[to]: values for to, values in json.loads(line.removeprefix("LOSSES")).items()})
    return found


def written(case: Case, folder: Path, **options: Any) -> Path:
    """The folder of the emitted program of a case, with a batch for each rank."""
    model, args, kwargs = case.made()
    to = folder / case.name.replace("+", "-").replace(":", "-")
    call = {"example_inputs": args, "example_kwargs": kwargs, "mesh": case.mesh}
    shardgraph.emit(model, to, case.plan, **call, cluster="H100", **case.options, **options)
    for before, after in case.edits.items():
        text = (to / "program.py").read_text(encoding="utf-8")
        assert text.count(before) == 1, before
        (to / "program.py").write_text(text.replace(before, after), encoding="utf-8")
    leaves, names = pytree.tree_leaves((args, kwargs)), _inputs(to)
    for number in range(case.ranks):
        own = [leaf for leaf in batch_of(leaves, number) if isinstance(leaf, torch.Tensor)]
        tensors = {name: leaf.contiguous() for name, leaf in zip(names, own, strict=True)}
        torch.save(tensors, to / f"batch{number}.pt")
    return to


class _Nothing:
    """Finds nothing of what must not be needed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "shardgraph":
            raise ImportError("shardgraph is not here")


@contextmanager
def without_shardgraph() -> Iterator[None]:
    """Within, shardgraph cannot be imported."""
    here = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "shardgraph"}
    sys.meta_path.insert(0, _Nothing())
    try:
        with pytest.raises(ImportError, match="is not here"):
            importlib.import_module("shardgraph")
        yield
    finally:
        del sys.meta_path[0]
        sys.modules.update(here)


def losses_of_both(case: Case, folder: Path) -> tuple[list[float], list[float]]:
    """The losses of the program in ``folder`` and of the compiled module, on this rank."""
    torch.set_num_threads(1)
    with without_shardgraph():
        spec = importlib.util.spec_from_file_location("emitted_program", folder / "program.py")
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(program)
        program.join_ranks(program.AXES)
        emitted = program.main(STEPS)
    return emitted, compiled_losses(case)


def under_torchrun(command: Sequence[str | Path], folder: Path) -> list[list[float]]:
    """The losses that each rank prints under ``torchrun command``, in processes that can import torch alone."""
    (folder / "sitecustomize.py").write_text(_NOWHERE)  # Python imports it as it starts
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    there = subprocess.run([sys.executable, "-c", "import shardgraph"], env=environment, capture_output=True, text=True)
    assert "No module named 'shardgraph'" in there.stderr
    words = [sys.executable, "-m", "torch.distributed.run", *map(str, command)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=folder, env=environment, **pipes) as running:
        try:
            printed, errors = running.communicate(timeout=_SECONDS)
        finally:
            running.terminate()  # which ends the ranks too
    assert running.returncode == 0, errors[-4000:]
    losses: dict[int, list[float]] = {}
    for rank, loss in re.findall(r"rank (\d+) step \d+ loss ([-+.e\d]+|nan|inf)", printed):
        losses.setdefault(int(rank), []).append(float(loss))
    return [losses[rank] for rank in sorted(losses)]


def run_ranks(count: int, arguments: Sequence[str]) -> list[str]:
    """Run Python on ranks; returns what each prints. Ends them all if one fails or takes too long."""
    store = serve_store(timeout=float(_SECONDS)) if count > 1 else None
    running = []
    for rank in range(count):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if store is not None:
            environment = rank_environment(rank, count, store.port, environment)
        running.append(
            subprocess.Popen(
                [sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    try:
        ended = [process.communicate(timeout=_SECONDS) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [printed for printed, _ in ended]


def compiled_losses(case: Case, steps: int = STEPS) -> list[float]:
    """The losses of the compiled module on this rank."""
    model, args, kwargs = case.made()
    options = {"cluster": "H100", **case.options}
    loss_fn = options.pop("loss_fn", None)
    torch.set_num_threads(1)
    sharded = shardgraph.compile(
        model, case.plan, mesh=case.mesh or None, example_inputs=args, example_kwargs=kwargs, loss_fn=loss_fn, **options
    )
    plan = sharded.plan
    rank = dist.get_rank() if dist.is_initialized() else 0
    if plan.pipeline is not None:
        rank %= plan.world_size // plan.pipeline.ranks
    replica, rank = divmod(rank, max(plan.world_size // plan.copies, 1))
    number = replica * plan.data_size + plan.data_rank(rank) if case.mesh else 0
    args, kwargs = batch_of((args, kwargs), number)
    optimizer: Any = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    if case.frequency is not None:
        optimizer = shardgraph.LocalSGD(optimizer, sharded, frequency=case.frequency)
    torch.manual_seed(0)
    losses = []
    for _ in range(steps):
        if case.loss is None:
            loss = sharded.train_step(*args, **kwargs)
        else:
            loss = case.loss(sharded(*args, **kwargs))
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _inputs(folder: Path) -> list[str]:
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    line = next(line for line in text.splitlines() if line.startswith("INPUTS"))
    return list(eval(line.partition("=")[2]))
