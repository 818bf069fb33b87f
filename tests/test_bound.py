"""What every rank runs, its graphs bound to its place in the mesh, is what verify has proved: their text in lockstep.

Lockstep interprets graphs before they are bound, with symbolic parts, and axes for groups. Here the bound ones run, as
the runtime calls them, with collectives between threads (:mod:`tests.bound`), and must give the same bits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardgraph import Offload, Pipeline, Precision, preset
from shardgraph.checks.lockstep import run_lockstep
from shardgraph.ir import Gathered, Parameter, Role, Saved, placeholders
from shardgraph.mesh import coordinates
from shardgraph.passes.base import of_kind, sibling
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.shards import part_of
from shardgraph.runtime import bind
from tests.bound import run_bound
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")


class Language(nn.Module):
    """Layers between an embedding and the loss of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Case:
    """A model under a plan with options."""

    plan: str
    mesh: Mapping[str, int]
    model: str = "language"
    pipeline: Pipeline | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.plan, "x".join(map(str, self.mesh.values())), self.model, *self.options])

    @property
    def program(self) -> Program:
        """The program of one rank's call; dropout, whose generator the threads would share, is off."""
        torch.manual_seed(0)
        model, (args, kwargs) = (Language(), ((torch.randint(0, 32, (4, 6)),), {}))
        if self.model != "language":
            model, (args, kwargs) = make(self.model, 4)
        for module in model.modules():
            if isinstance(module, nn.Dropout | nn.MultiheadAttention):
                setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
        plan = replace(preset(self.plan, self.mesh, self.pipeline), **self.options)
        return build_program(model, plan, args, kwargs)


STAGES = Pipeline(2, stages=("layers.1",))
CASES = [
    Case("ddp", {"dp": 2}),
    Case("zero1", {"dp": 3}, "odd-mlp"),
    Case("zero2", {"dp": 2}, "conv-batch-norm"),  # whose buffers are averaged
    Case("fsdp", {"dp": 3}, "odd-mlp"),
    Case("hsdp", {"dp_replicate": 2, "dp_shard": 2}),
    Case("tp", {"tp": 2}),
    Case("tp+sp", {"tp": 2}),
    Case("fsdp+tp", {"dp": 2, "tp": 2}),
    Case("cp", {"cp": 2}, "tied-transformer"),  # whose keys and values go around a ring
    Case("ep", {"ep": 2}, "mixture"),
    Case("pp+zero2", {"pp": 2, "dp": 2}, pipeline=STAGES),
    Case("pp+tp", {"pp": 2, "tp": 2}, pipeline=STAGES),
    Case("pp+fsdp", {"pp": 2, "dp": 2}, pipeline=replace(STAGES, checkpoint="except_last")),
    Case("fsdp", {"dp": 2}, options={"recompute": "full"}),
    Case("fsdp", {"dp": 2}, options={"offload": Offload(parameters=True, activations=True)}),
    Case("fsdp", {"dp": 2}, options={"loss_chunk": 1024}),
    Case("fsdp", {"dp": 2}, options={"precision": Precision("bfloat16", reduce="float32")}),
]
FURTHER = [
    Case("tp", {"tp": 2}, "tied-transformer"),
    Case("tp+sp", {"tp": 3}, "tied-transformer"),
    Case("hsdp+tp", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Case("zero1+tp+sp", {"dp": 2, "tp": 2}, "tied-transformer"),
    Case("fsdp+cp", {"dp": 2, "cp": 2}, "tied-transformer"),
    Case("cp+tp", {"cp": 2, "tp": 2}, "tied-transformer"),
    Case("fsdp+ep", {"dp": 2, "ep": 2}, "mixture"),
    Case("pp+fsdp+tp", {"pp": 2, "dp": 2, "tp": 2}, pipeline=STAGES),
    Case("pp+hsdp", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, pipeline=STAGES),
    Case("fsdp+tp", {"dp": 2, "tp": 2}, options={"recompute": "selective", "loss_chunk": 1024}),
    Case("fsdp+tp", {"dp": 2, "tp": 2}, options={"offload": Offload(parameters=True, activations=True)}),
    Case("tp+sp", {"tp": 2}, options={"precision": Precision("bfloat16", reduce="float32")}),
    Case("ddp", {"dp": 3}, "llama"),
    Case("tp", {"tp": 2}, "llama"),
]


def names(program: Program) -> Iterator[str]:
    """The program's graphs, with what backward becomes under ``no_sync`` and after it, or in a split backward."""
    for name in program.graphs:
        yield name
        if name in of_kind(program.graphs, "backward"):
            kinds = ("local", "accumulate", "reduce") if program.plan.pipeline is None else ("inputs", "weights")
            yield from (sibling(name, kind) for kind in kinds)


def given(gm: fx.GraphModule, program: Program, held: Mapping[Role, Any], rank: int) -> dict[Role, Any]:
    """A rank's inputs of a graph: what it holds, its parts of parameters, and numbers for all else."""
    generator = torch.Generator().manual_seed(rank)
    mesh, found = program.plan.mesh, dict(held)
    for role, node in placeholders(gm).items():
        value = node.meta["val"]
        if isinstance(role, Parameter):
            whole = torch.randn(program.shapes[role.fqn], generator=torch.Generator().manual_seed(7), dtype=value.dtype)
            found[role] = part_of(whole, program.parameters[role.fqn], mesh, coordinates(mesh, rank)).contiguous()
        elif role not in found and isinstance(value, torch.Tensor):
            made = torch.randint(3, value.shape, generator=generator).to(value.dtype)
            found[role] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(made)
    return found


def check(program: Program) -> None:
    """Every rank gets from its bound graphs the bits that lockstep gets from their text, forward and backward."""
    mesh, graphs, inputs, expected = program.plan.mesh, [], [], []
    held: defaultdict[tuple[int, str], dict[Role, Any]] = defaultdict(dict)  # by rank and stage
    for name in names(program):
        graphs.append(gm := program.graph(name))
        stages = [held[rank, sibling(name, "")] for rank in range(math.prod(size for _, size in mesh))]
        inputs.append([given(gm, program, mine, rank) for rank, mine in enumerate(stages)])
        expected.append(run_lockstep(gm, mesh, inputs[-1]))
        for mine, results in zip(stages, expected[-1], strict=True):
            mine |= {role: value for role, value in results if isinstance(role, Saved | Gathered)}
    for name, found, wanted in zip(names(program), run_bound(graphs, mesh, inputs), expected, strict=True):
        for rank, results in enumerate(zip(found, wanted, strict=True)):
            for (role, value), (_, other) in zip(*results, strict=True):
                assert same(value, other), f"{role} of {name} on rank {rank}"


def same(value: Any, other: Any) -> bool:
    """Whether two results, of which some are several tensors, are equal."""
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.quick("fsdp-2-language-offload", "hsdp-2x2-language", "pp+tp-2x2-language")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)], ids=str)
def test_bound_graphs_of_every_rank_compute_what_lockstep_does(case):
    check(case.program)


# -- a fault in binding ------------------------------------------------------------------------------------


def along_another_axis(monkeypatch):
    """Collectives over the groups of the other axis, which are of the same size."""
    right = bind.torch_api.group_along
    monkeypatch.setattr(
        bind.torch_api, "group_along", lambda mesh, axes: right(mesh, tuple({*mesh.mesh_dim_names} - {*axes}))
    )


def part_of_the_next_rank(monkeypatch):
    """Every rank takes the part that is the next one's."""

    def next_along(target, args, along):
        def place(axis):
            size, here = along(axis)
            return size, (here + 1) % size

        return right(target, args, place)

    right = bind.on_rank
    monkeypatch.setattr(bind, "on_rank", next_along)


def around_the_ring_backwards(monkeypatch):
    """Every rank sends to the one before it."""

    def backwards(node, mesh):
        right(node, mesh)
        tensor, received, sent, group = node.args
        node.args = (tensor, sent, received, group)

    right = bind._send
    monkeypatch.setattr(bind, "_send", backwards)


@pytest.mark.quick("part")
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case("hsdp", {"dp_replicate": 2, "dp_shard": 2}), along_another_axis),
        (Case("zero1", {"dp": 2}), part_of_the_next_rank),
        (Case("cp", {"cp": 3}, "tied-transformer"), around_the_ring_backwards),
    ],
    ids=["group", "part", "send"],
)
def test_a_fault_in_binding_is_found(case, fault, monkeypatch):
    program = case.program
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="on rank"):
        check(program)
