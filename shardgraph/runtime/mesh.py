"""The device mesh of this run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgraph import torch_api
from shardgraph.errors import PlanError
from shardgraph.mesh import Mesh
from shardgraph.plans.plan import Plan
from shardgraph.runtime.device import current_device, group_device_type
from shardgraph.runtime.nodes import nodes_of_run, ranks_per_node


def run_axes(mesh: DeviceMesh | Mapping[str, int] | None, plan: str | Plan) -> Mesh:
    """The mesh of this run as axis sizes by name; ``()`` without a process group. No groups are made.

    ``mesh`` may be a DeviceMesh with named dimensions or axis sizes by name, outermost first. By default it is the
    plan's, else all ranks along one axis ``dp``; for ``"hsdp"``, nodes times the ranks of a node.

    Raises:
        PlanError: the mesh does not fit the number of ranks.
    """
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise PlanError(
                "the mesh has no dimension names: make it with init_device_mesh(..., mesh_dim_names=('dp',))"
            )
        return tuple(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    sizes = dict(mesh) if mesh is not None else dict(plan.whole_mesh) if isinstance(plan, Plan) else {}
    if not dist.is_initialized():
        if (ranks := math.prod(sizes.values())) > 1:
            raise PlanError(
                f"the mesh {sizes} needs {ranks} ranks and there is no process group: start with "
                "shardgraph.launch(fn, nproc=...) or torchrun, or check the plan in one process with shardgraph.verify"
            )
        return ()
    world = dist.get_world_size()
    sizes = sizes or _default_mesh(world, plan)
    if (ranks := math.prod(sizes.values())) != world:
        raise PlanError(
            f"the mesh {sizes} is for {ranks} ranks and {world} are running: axis sizes must multiply to {world}"
        )
    return tuple(sizes.items())


def run_mesh(mesh: DeviceMesh | Mapping[str, int] | None, axes: Mesh, timeout: float = 300.0) -> DeviceMesh | None:
    """The device mesh of ``axes``: ``mesh``, if it is one; None without axes or process group. All ranks must call it.

    Its groups wait ``timeout`` seconds for a collective.

    Its device is the accelerator if the process group communicates the accelerator's tensors, else the CPU. A mesh of
    all ranks over gloo gets groups of its own, and is equal to the one given.
    """
    made = _mesh(mesh, axes)
    for group in made.get_all_groups() if made is not None else ():
        torch_api.limit_wait(group, timedelta(seconds=timeout))
    return made


def _mesh(mesh: DeviceMesh | Mapping[str, int] | None, axes: Mesh) -> DeviceMesh | None:
    if isinstance(mesh, DeviceMesh):
        gloo = all(dist.get_backend(group) == "gloo" for group in mesh.get_all_groups())
        if mesh.device_type != "cpu" or not gloo or mesh.size() < dist.get_world_size():
            return mesh
        backends = ((torch_api.ordered_gloo(), None),) * mesh.ndim
        return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, backend_override=backends)
    if not axes or not dist.is_initialized():
        return None
    names, sizes = zip(*axes, strict=True)
    device_type = group_device_type()
    override: Any = dict.fromkeys(names, torch_api.ordered_gloo()) if device_type == "cpu" else None
    return init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=override)


IN_NODE, OVER_NODES = "in_node", "over_nodes"


def node_mesh() -> DeviceMesh:
    """All ranks as nodes times the ranks of each. All ranks must call it."""
    mesh = run_mesh(None, ((OVER_NODES, nodes_of_run()), (IN_NODE, dist.get_world_size() // nodes_of_run())))
    assert mesh is not None
    return mesh


def run_device(mesh: DeviceMesh | Mapping[str, int] | None) -> torch.device | None:
    """The device that ranks of this run compute on; None without a process group."""
    if isinstance(mesh, DeviceMesh):
        return current_device(mesh.device_type)
    return current_device(group_device_type()) if dist.is_initialized() else None


def _default_mesh(world: int, plan: str | Plan) -> dict[str, int]:
    if plan != "hsdp":
        return {"pp" if plan == "pp" else "dp": world}
    per_node = ranks_per_node()
    if world % per_node or world == per_node:
        raise PlanError(
            f"plan 'hsdp' on {world} ranks of one node: say how to divide them, such as "
            f"mesh={{'dp_replicate': 2, 'dp_shard': {max(world // 2, 1)}}}"
        )
    return {"dp_replicate": world // per_node, "dp_shard": per_node}
