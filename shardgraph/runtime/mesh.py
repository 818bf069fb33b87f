"""The device mesh of this run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgraph.errors import PlanError
from shardgraph.plans.plan import Plan
from shardgraph.runtime.device import group_device_type
from shardgraph.torch_api import ordered_gloo


def resolve_mesh(mesh: DeviceMesh | Mapping[str, int] | None, plan: str | Path | Plan) -> DeviceMesh | None:
    """The device mesh of this run; None without a process group.

    ``mesh`` may be a DeviceMesh with named dimensions or axis sizes by name, outermost first. By default it is all
    ranks along one axis ``dp``; for ``"hsdp"``, nodes times the ranks of a node. Its device is the accelerator if the
    process group communicates the accelerator's tensors, else the CPU.

    Raises:
        PlanError: the mesh does not fit the ranks that there are.
    """
    if isinstance(plan, (str, Path)) and str(plan).endswith((".yaml", ".yml")):
        plan = Plan.load(plan)
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise PlanError(
                "the mesh has no dimension names: make it with init_device_mesh(..., mesh_dim_names=('dp',))"
            )
        return mesh
    wanted = dict(mesh) if mesh is not None else dict(plan.whole_mesh) if isinstance(plan, Plan) else None
    if not dist.is_initialized():
        if wanted and math.prod(wanted.values()) > 1:
            raise PlanError(
                f"the mesh {wanted} needs {math.prod(wanted.values())} ranks and there is no process group: start with "
                "shardgraph.launch(fn, nproc=...) or torchrun, or check the plan in one process with shardgraph.verify"
            )
        return None
    world = dist.get_world_size()
    wanted = wanted or _default_mesh(world, plan)
    if math.prod(wanted.values()) != world:
        raise PlanError(
            f"the mesh {wanted} is for {math.prod(wanted.values())} ranks and {world} are running: "
            f"axis sizes must multiply to {world}"
        )
    if (device_type := group_device_type()) != "cpu":
        return init_device_mesh(device_type, tuple(wanted.values()), mesh_dim_names=tuple(wanted))
    override: dict[Any, Any] = dict.fromkeys(wanted, ordered_gloo())
    return init_device_mesh("cpu", tuple(wanted.values()), mesh_dim_names=tuple(wanted), backend_override=override)


def _default_mesh(world: int, plan: str | Path | Plan) -> dict[str, int]:
    if plan != "hsdp":
        return {"pp" if plan == "pp" else "dp": world}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node or world == per_node:
        raise PlanError(
            f"plan 'hsdp' on {world} ranks of one node: say how to divide them, such as "
            f"mesh={{'dp_replicate': 2, 'dp_shard': {max(world // 2, 1)}}}"
        )
    return {"dp_replicate": world // per_node, "dp_shard": per_node}
