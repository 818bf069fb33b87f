"""How the ranks of this run are divided into nodes."""

from __future__ import annotations

import os

import torch.distributed as dist

_SAID_BY = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),  # torchrun and shardgraph.launch
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MPI_LOCALNRANKS", "PMI_SIZE"),  # Intel MPI, MPICH
    ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"),
)
"""Where launchers say how many ranks they have started on a node, and in all."""


def ranks_per_node() -> int:
    """The ranks of this run on a node, as its launcher says; all of them if it does not, 1 without a process group.

    What a launcher says that has started another number of ranks in all is not of this run: each of its processes may
    have started ranks of its own.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    for on_node, in_all in _SAID_BY:
        said, total = os.environ.get(on_node, ""), os.environ.get(in_all, str(world))
        if said.isdigit() and total == str(world) and 0 < int(said) <= world:
            return int(said)
    return world


def nodes_of_run() -> int:
    """The nodes of this run; 1 if its ranks are not divided evenly."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world // ranks_per_node() if world % ranks_per_node() == 0 else 1
