"""``shardgraph.split``: one file of whole tensors becomes the shards of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.arguments import MESH, MODEL, PATH, TEXT, checked, instance, of_plan
from shardgraph.errors import CheckpointError, PlanError
from shardgraph.mesh import coordinates
from shardgraph.module.checkpoint import tensors_of
from shardgraph.module.local_state import description
from shardgraph.offline.files import read_whole
from shardgraph.offline.stored import StoredState, of_model, reading
from shardgraph.plans.plan import Plan
from shardgraph.plans.resolve import named_or_loaded, resolve_plan
from shardgraph.plans.shards import named_shapes, part_of

_PLAN = of_plan(instance("the name of a plan, such as 'fsdp', a Plan, or the path of a plan file", Plan) | PATH)


@checked(path=PATH, folder=PATH, model=MODEL, plan=_PLAN, mesh=MESH, entry=TEXT)
def split(
    path: str | Path,
    folder: str | Path,
    model: nn.Module,
    plan: str | Path | Plan = "fsdp",
    mesh: Mapping[str, int] | None = None,
    *,
    entry: str = "",
) -> None:
    """Write the shards of every rank of ``plan`` to ``folder``, from one file of whole tensors.

    One process does it, without a process group or accelerator, and holds the shards of one rank at a time, since a
    file of ``torch.save`` is written at once. Rank 3 loads its own by

        sharded.load_local_state_dict(torch.load("folder/rank-00003.pt")["model"])

    Args:
        path: a safetensors file, or one of ``torch.save`` (any other ending).
        folder: is made; it must not be there, or be empty.
        model: the original, if need be on ``meta``: it says which tensors are parameters, and which are tied.
        plan: as for :func:`shardgraph.compile`. One that chooses placements (``"tp"``, ``"ep"``) is given as it was
            chosen: ``sharded.plan``, or the file that ``sharded.plan.save`` wrote.
        mesh: axis sizes by name, outermost first, as for :func:`shardgraph.analyze`; default: the plan's own.
        entry: the name under which a file of ``torch.save`` has the model's state.

    Raises:
        CheckpointError: the file cannot be read, does not fit the model, or the folder is not empty.
        PlanError: the plan does not fit the model or mesh, is not decided, or has a pipeline.

    Nothing has been written then.
    """
    chosen = _decided(plan, mesh, model)
    folder = Path(folder)
    with reading(repr(str(path))):
        state = of_model(read_whole(Path(path), entry), model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{str(folder)!r} is there and not empty: give a new folder")
    draft = folder.with_name(folder.name + ".draft")
    try:
        draft.mkdir(parents=True)
        for rank in range(chosen.world_size):
            torch.save(_of_rank(rank, state, model, chosen), draft / f"rank-{rank:05}.pt")
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _of_rank(rank: int, state: StoredState, model: nn.Module, plan: Plan) -> dict[str, Any]:
    """The file of a rank."""
    here = coordinates(plan.whole_mesh, rank)[len(plan.replicas) :]
    described = description(model, plan, rank, here, tensors_of(model).keys())
    return {"model": _shards(state, model, plan, here), "shard_metadata": described}


def _shards(state: StoredState, model: nn.Module, plan: Plan, here: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The shards at mesh coordinates ``here``, under all names of the model."""
    entries = plan.resolve(named_shapes(model))
    shards = {}
    for name, stored in state.tensors.items():
        whole = stored.read()
        shards[name] = part_of(whole, entries[name], plan.mesh, here).clone() if name in entries else whole
    return {name: shards[state.tied.get(name, name)] for name in tensors_of(model)}


def _decided(plan: str | Path | Plan, mesh: Mapping[str, int] | None, model: nn.Module) -> Plan:
    asked = named_or_loaded(plan)
    if mesh is None and not isinstance(asked, Plan):
        raise PlanError(f"plan {asked!r} is for any mesh: say for which, such as mesh={{'dp': 8}}")
    chosen = asked if mesh is None and isinstance(asked, Plan) else resolve_plan(asked, tuple((mesh or {}).items()))
    if chosen.pipeline is not None:
        raise PlanError(
            f"plan {chosen.name!r} has a pipeline, and which stage uses a parameter is known from its program only: "
            "compile the model, and give the file to load_state_dict, which takes each rank's own part"
        )
    if undecided := chosen.undecided(named_shapes(model)):
        raise PlanError(
            f"plan {chosen.name!r} does not say how {undecided[0]!r} is placed, which is chosen when a model is "
            "compiled: give sharded.plan, or the file that sharded.plan.save(...) wrote"
        )
    return chosen
