"""Whole and sharded checkpoints of modules whose parameters are DTensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardgraph.errors import CheckpointError
from shardgraph.module.checkpoint import full_state_dict, load_full_state_dict, save_safetensors
from shardgraph.runtime.launch import launch

pytestmark = pytest.mark.timeout(120)


class Odd(nn.Module):
    """Odd sizes, a dimension smaller than any world, a scalar, a tied weight and a buffer."""

    def __init__(self, seed: int = 0, width: int = 7) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.thin = nn.Linear(width, 1)
        self.head = nn.Linear(width, 5)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(()))
        self.norm.running_mean.normal_()


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every parameter sharded by rows, scalars replicated; ties stay."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module.named_parameters(recurse=False):
            placement = [Shard(0) if p.dim() else Replicate()]
            if id(p) not in placed:
                placed[id(p)] = nn.Parameter(distribute_tensor(p.detach(), mesh, placement, src_data_rank=None))
            setattr(module, key, placed[id(p)])
    return model


def equal(state: dict[str, Tensor], original: nn.Module) -> bool:
    expected = original.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


# -- several ranks -----------------------------------------------------------------------------------


def meshes() -> dict[int, DeviceMesh]:
    """By number of ranks, a mesh of the first ones; made in the same order on all."""
    return {size: DeviceMesh("cpu", list(range(size))) for size in (1, 2, 3, 4)}


def refused(module: nn.Module, path: str) -> str:
    try:
        save_safetensors(module, path)
    except CheckpointError as error:
        return str(error)
    return ""


def checkpoints_on_four_ranks(folder: str) -> dict[str, object]:
    """What each test below looks at, from one launch."""
    rank, mesh = dist.get_rank(), meshes()
    found: dict[str, object] = {}

    sharded = shard(Odd(), mesh[4])
    found["full"] = full_state_dict(sharded)
    found["tied"] = rank != 0 or found["full"]["embed.weight"] is found["full"]["head.weight"]
    save_safetensors(sharded, f"{folder}/model.safetensors")
    found["there"] = Path(folder, "model.safetensors").exists()
    found["refused"] = refused(sharded, f"{folder}/no such folder/model.safetensors")

    by_columns = {
        name: distribute_tensor(value.detach(), mesh[4], [Shard(1)]) if value.dim() > 1 else value
        for name, value in Odd(seed=1).state_dict().items()
    }
    load_full_state_dict(sharded, by_columns)
    found["from DTensors"] = full_state_dict(sharded)

    if rank < 2:
        saved = shard(Odd(seed=2), mesh[2])
        dcp.save(saved.state_dict(), checkpoint_id=f"{folder}/dcp", process_group=mesh[2].get_group())
    dist.barrier()
    for size in (1, 3, 4):
        if rank < size:
            loaded = shard(Odd(seed=3), mesh[size])
            state = loaded.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/dcp", process_group=mesh[size].get_group())
            loaded.load_state_dict(state)
            found[f"dcp on {size}"] = full_state_dict(loaded)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict]:
    return launch(checkpoints_on_four_ranks, 4, args=(str(folder),), timeout=100)


def test_rank_0_has_the_full_state_and_the_others_nothing(ranks: list[dict]) -> None:
    assert equal(ranks[0]["full"], Odd())
    assert [rank["full"] for rank in ranks[1:]] == [{}, {}, {}]


def test_tied_names_share_one_tensor(ranks: list[dict]) -> None:
    assert ranks[0]["tied"]


def test_the_file_loads_into_the_original_with_tied_weights(ranks: list[dict], folder: Path) -> None:
    original = Odd(seed=9)
    assert load_model(original, folder / "model.safetensors") == (set(), [])
    assert equal(original.state_dict(), Odd())
    assert original.head.weight is original.embed.weight


def test_every_rank_returns_after_the_file_is_there(ranks: list[dict]) -> None:
    assert all(rank["there"] for rank in ranks)


def test_every_rank_hears_that_rank_0_could_not_write(ranks: list[dict]) -> None:
    assert all("rank 0 could not write" in rank["refused"] and "no such folder" in rank["refused"] for rank in ranks)


def test_dtensors_of_other_placements_are_redistributed(ranks: list[dict]) -> None:
    assert equal(ranks[0]["from DTensors"], Odd(seed=1))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_sharded_checkpoint_of_2_ranks_loads_on(size: int, ranks: list[dict]) -> None:
    assert equal(ranks[0][f"dcp on {size}"], Odd(seed=2))


# -- one rank of several, which can communicate with nobody --------------------------------------------


@pytest.fixture(params=[0, 1, 3])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    # A name of its own: DTensor caches what it knows of equal meshes, this rank's place in them included.
    yield DeviceMesh("cpu", list(range(4)), mesh_dim_names=(f"as_rank_{request.param}",))
    dist.destroy_process_group()


def test_each_rank_cuts_its_own_part_as_dtensor_would(mesh: DeviceMesh) -> None:
    module, source = shard(Odd(), mesh), Odd(seed=1)
    load_full_state_dict(module, source.state_dict())
    expected = shard(copy.deepcopy(source), mesh)
    for name, p in module.named_parameters():
        assert torch.equal(p.to_local(), expected.get_parameter(name).to_local()), name
    assert torch.equal(module.norm.running_mean, source.norm.running_mean)
    assert len(module.embed.weight.to_local()) == {0: 2, 1: 2, 3: 0}[mesh.get_rank()]


def test_parameters_stay_the_same_objects(mesh: DeviceMesh) -> None:
    module = shard(Odd(), mesh)
    before = [(id(p), p.to_local().data_ptr()) for p in module.parameters()]
    load_full_state_dict(module, Odd(seed=1).state_dict())
    assert [(id(p), p.to_local().data_ptr()) for p in module.parameters()] == before


def test_rows_and_columns_of_a_two_dimensional_mesh() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
        full = torch.arange(15.0).view(3, 5)
        module = nn.Module()
        zeros = distribute_tensor(torch.zeros(3, 5), grid, [Shard(0), Shard(1)], src_data_rank=None)
        module.weight = nn.Parameter(zeros)
        load_full_state_dict(module, {"weight": full})
        assert torch.equal(module.weight.to_local(), full[2:, 3:])
        assert isinstance(module.weight, DTensor)
    finally:
        dist.destroy_process_group()


# -- plain tensors, and checkpoints that do not fit ----------------------------------------------------


def test_without_a_process_group_the_state_is_a_copy() -> None:
    model = Odd()
    state = full_state_dict(model)
    assert equal(state, model)
    with torch.no_grad():
        model.thin.weight.add_(1)
    assert equal(state, Odd())


def test_the_file_is_named_as_save_model_names_it(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    save_model(Odd(), str(tmp_path / "theirs"))
    save_safetensors(Odd(), tmp_path / "ours")
    with safe_open(tmp_path / "ours", "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        assert ours.metadata() == {"format": "pt", **theirs.metadata()}


def test_a_file_without_the_tied_name_loads_back(tmp_path: Path) -> None:
    save_safetensors(Odd(), tmp_path / "file")
    state, model = load_file(tmp_path / "file"), Odd(seed=1)
    assert "head.weight" not in state
    load_full_state_dict(model, state)
    assert equal(model.state_dict(), Odd())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_a_file(state: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    save_safetensors(Odd(), tmp_path / "file")
    monkeypatch.setattr("shardgraph.module.checkpoint.save_file", half_a_file)
    with pytest.raises(CheckpointError, match="no space left on device"):
        save_safetensors(Odd(seed=1), tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert torch.equal(load_file(tmp_path / "file")["thin.weight"], Odd().thin.weight)


def broken(change: str) -> dict[str, Tensor]:
    state = Odd(seed=1).state_dict()
    if change == "renamed":
        state["thin.wieght"] = state.pop("thin.weight")
    elif change == "wider":
        state = Odd(seed=1, width=8).state_dict()
    elif change == "of integers":
        state["thin.bias"] = state["thin.bias"].long()
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("renamed", r"1 missing in it: 'thin.weight'; did you mean 'thin.wieght'\?"),
        ("renamed", r"1 unknown to this model: 'thin.wieght'; did you mean 'thin.weight'\?"),
        ("wider", r"'embed.weight' is \[5, 8\], here \[5, 7\]"),
        ("wider", r"of another shape: .* and 3 more"),
        ("of integers", r"numbers of other kinds(?s:.*)'thin.bias' is torch.int64 in it, here torch.float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(change: str, message: str) -> None:
    model = Odd()
    with pytest.raises(CheckpointError, match=message):
        load_full_state_dict(model, broken(change))
    assert equal(model.state_dict(), Odd())


def test_not_strict_loads_what_both_have_and_returns_the_rest() -> None:
    model = Odd()
    keys = load_full_state_dict(model, broken("renamed"), strict=False)
    assert keys == (["thin.weight"], ["thin.wieght"])
    assert torch.equal(model.thin.bias, Odd(seed=1).thin.bias)
    assert torch.equal(model.thin.weight, Odd().thin.weight)


def test_not_strict_still_refuses_other_shapes() -> None:
    with pytest.raises(CheckpointError, match="of another shape"):
        load_full_state_dict(Odd(), broken("wider"), strict=False)
