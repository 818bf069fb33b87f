"""Shards become whole tensors, and whole tensors shards, in one process without ranks."""

from __future__ import annotations

import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

import shardgraph
from shardgraph import CheckpointError, PlanError
from shardgraph.cli.main import main
from shardgraph.fairscale import FullyShardedDataParallel
from shardgraph.offline.consolidate import read_shards
from shardgraph.offline.files import write_whole
from shardgraph.offline.stored import Stored, StoredState
from tests import fairscale_shards, offline
from tests.standing import on_ranks

Contents = list[dict[str, Any]]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return offline.Net()


# -- what ranks of several plans saved -------------------------------------------------------------------

PLANS = {
    "fsdp": {"dp": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "pp+fsdp": {"pp": 2, "dp": 2},
}


@pytest.fixture(scope="module", params=PLANS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    placements = on_ranks(offline.save, 4, args=(request.param, PLANS[request.param], str(folder)))
    if request.param == "fsdp+tp":
        assert placements == [["replicate", "split(0, blocks=3)"]] * 4
    return request.param, folder


@pytest.mark.quick("hsdp")
def test_files_of_ranks_become_the_file_that_they_would_write(saved: tuple[str, Path]) -> None:
    _, folder = saved
    shardgraph.consolidate(folder / "shards", folder / "model.safetensors")
    assert equal(load_file(folder / "model.safetensors"), load_file(folder / "whole.safetensors"))
    model, expected = offline.Net(seed=1), offline.Net(seed=2)
    load_model(model, folder / "model.safetensors")
    load_model(expected, folder / "whole.safetensors")
    assert equal(model.state_dict(), expected.state_dict())
    assert model.head.weight is model.embed.weight


def test_a_folder_of_torch_becomes_the_file_that_ranks_would_write(saved: tuple[str, Path]) -> None:
    _, folder = saved
    shardgraph.consolidate(folder / "dcp", folder / "of_dcp.safetensors", entry="model", model=on_meta())
    assert equal(load_file(folder / "of_dcp.safetensors"), load_file(folder / "whole.safetensors"))


def test_split_writes_what_ranks_of_the_plan_save(saved: tuple[str, Path]) -> None:
    plan, folder = saved
    if plan.startswith("pp"):
        with pytest.raises(PlanError, match="which stage uses a parameter is known from its program only"):
            shardgraph.split(folder / "whole.safetensors", folder / "split", on_meta(), folder / "plan.yaml")
        return
    shardgraph.split(folder / "whole.safetensors", folder / "split", on_meta(), folder / "plan.yaml")
    for rank in range(4):
        by_split, by_rank = (torch.load(folder / of / f"rank-{rank:05}.pt") for of in ("split", "shards"))
        assert equal(by_split["model"], by_rank["model"])
        assert by_split["shard_metadata"] == by_rank["shard_metadata"]


def test_ranks_load_what_split_wrote_of_a_file_of_torch(tmp_path: Path) -> None:
    torch.save(offline.Net().state_dict(), tmp_path / "whole.pt")
    shardgraph.split(tmp_path / "whole.pt", tmp_path / "split", on_meta(), "fsdp", {"dp": 2})
    assert on_ranks(offline.loads, args=("fsdp", str(tmp_path))) == [True, True]


def test_consolidate_shard_weights_has_all_names() -> None:
    expected = offline.Net().state_dict()
    assert [equal(whole, expected) for whole in on_ranks(offline.by_name)] == [True, True]


# -- files of FairScale -----------------------------------------------------------------------------------

FILES = [fairscale_shards.FOLDER / f"rank-{rank}.pt" for rank in range(fairscale_shards.RANKS)]


def whole_of_fairscale() -> dict[str, torch.Tensor]:
    return torch.load(fairscale_shards.FOLDER / "whole.pt")


def of_fairscale() -> Contents:
    return [torch.load(path) for path in FILES]


def test_files_of_fairscale_become_a_file_that_the_model_loads(tmp_path: Path) -> None:
    shardgraph.consolidate(FILES, tmp_path / "model.safetensors")
    model = fairscale_shards.Net()
    load_model(model, tmp_path / "model.safetensors")
    assert equal(model.state_dict(), whole_of_fairscale())


def test_names_that_fairscale_drops_are_kept() -> None:
    state = read_shards(FILES)
    assert state.tied == {"body.head.weight": "body.embed.weight", "same.weight": "out.weight"}
    saved = of_fairscale()
    whole = FullyShardedDataParallel.consolidate_shard_weights(
        [rank["model"] for rank in saved], [rank["shard_metadata"] for rank in saved]
    )
    assert equal(whole, whole_of_fairscale())


def test_buffers_of_fairscale_are_left_out_on_request() -> None:
    saved = of_fairscale()
    whole = FullyShardedDataParallel.consolidate_shard_weights(
        [rank["model"] for rank in saved], [rank["shard_metadata"] for rank in saved], with_module_buffers=False
    )
    assert whole.keys() == whole_of_fairscale().keys() - dict(fairscale_shards.Net().named_buffers()).keys()


def test_names_with_wrappers_in_them_are_those_of_the_model(tmp_path: Path) -> None:
    saved = of_fairscale()
    for rank in saved:
        rank["model"] = {f"_fsdp_wrapped_module._fpw_module.{name}": value for name, value in rank["model"].items()}
    shardgraph.consolidate(saved, tmp_path / "model.safetensors", model=fairscale_shards.Net())
    assert load_file(tmp_path / "model.safetensors").keys() < whole_of_fairscale().keys()


def test_files_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for rank, path in enumerate(FILES):
        shutil.copy(path, tmp_path / f"shard{rank + 8}.pt")  # 8, 9, 10
    assert torch.equal(read_shards(tmp_path).tensors["out.weight"].read(), whole_of_fairscale()["out.weight"])


def test_parameters_that_each_rank_has_whole_are_taken_once_if_they_are_equal() -> None:
    saved = of_fairscale()
    for rank in saved:
        rank["model"]["thin.weight"] = torch.ones(2)
        rank["shard_metadata"]["param_metadata"][2]["params"]["weight"]["padding"] = 0
    assert torch.equal(read_shards(saved).tensors["thin.weight"].read(), torch.ones(2, 1))
    saved[1]["model"]["thin.weight"] += 1
    with pytest.raises(CheckpointError, match=r"each rank has all of 'thin.weight', and other values"):
        read_shards(saved)


# -- what does not fit --------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Contents:
    """What two ranks under hybrid sharding, and two replicas of them, save."""
    save_model(offline.Net(), tmp_path / "whole.safetensors")
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    shardgraph.split(tmp_path / "whole.safetensors", tmp_path / "shards", on_meta(), "hsdp", mesh)
    return [torch.load(tmp_path / "shards" / f"rank-{rank:05}.pt") for rank in range(4)]


def refused(shards: Contents, tmp_path: Path, why: str, **options: Any) -> None:
    path = tmp_path / "refused" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=f"(?s){why}"):
        shardgraph.consolidate(shards, path, **options)
    assert list(path.parent.iterdir()) == []


def test_a_missing_rank_is_named(shards: Contents, tmp_path: Path) -> None:
    refused(shards[:1] + shards[2:], tmp_path, r"the run had 4 ranks, and there are files of 3: add those of rank 1")


def test_a_rank_twice_is_refused(shards: Contents, tmp_path: Path) -> None:
    refused([*shards, shards[0]], tmp_path, "entry 0 of the list, entry 4 of the list are of the same rank")


def test_ranks_of_another_mesh_are_refused(shards: Contents, tmp_path: Path) -> None:
    shards[2]["shard_metadata"]["mesh"] = [["dp", 4]]
    refused(shards, tmp_path, r"is of a run with mesh \[\['dp', 4\]\]")


def test_shards_of_another_shape_are_refused(shards: Contents, tmp_path: Path) -> None:
    shards[1]["model"]["odd.weight"] = torch.zeros(3, 8)
    refused(shards, tmp_path, r"the shard of 'odd.weight' in entry 1 of the list is \[3, 8\].* would be \[2, 8\]")


def test_replicas_that_differ_are_refused_and_nothing_is_left(shards: Contents, tmp_path: Path) -> None:
    shards[2]["model"]["odd.bias"] += 1
    refused(shards, tmp_path, "entry 0 of the list and entry 2 of the list have the same shard of 'odd.bias'")


def test_a_shard_that_is_not_there_is_named(shards: Contents, tmp_path: Path) -> None:
    del shards[1]["model"]["odd.bias"]
    refused(shards, tmp_path, "entry 1 of the list has no shard of 'odd.bias'")


def test_a_shard_that_no_description_names_is_refused(shards: Contents, tmp_path: Path) -> None:
    shards[1]["model"]["old"] = torch.zeros(1)
    refused(shards, tmp_path, "entry 1 of the list has old, which no description names")


def test_two_states_of_the_model_in_a_file_are_to_be_told_apart(shards: Contents, tmp_path: Path) -> None:
    for rank in shards:
        rank["averages"] = {name: value + 1 for name, value in rank["model"].items()}
    refused(shards, tmp_path, "has the same shards in 'model' and 'averages': .* as entry='model'")
    refused(shards, tmp_path, "has no entry 'other'; it has 'model', 'averages'", entry="other")
    shardgraph.consolidate(shards, tmp_path / "model.safetensors", entry="averages")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["gain"], offline.Net().gain + 1)


def test_shards_without_a_description_are_refused(shards: Contents, tmp_path: Path) -> None:
    refused([rank["model"] for rank in shards], tmp_path, r"no descriptions of its shards.*local_metadata_dict\(\)")


def test_shards_of_another_model_are_refused(shards: Contents, tmp_path: Path) -> None:
    refused(shards, tmp_path, r"unknown to this model: 'gain', .*nothing was written", model=nn.Linear(2, 2))


def test_files_of_two_kinds_are_refused(shards: Contents, tmp_path: Path) -> None:
    refused([*shards, *of_fairscale()], tmp_path, "some files are of FairScale and some are not")


def test_a_missing_rank_of_fairscale_is_seen_by_its_elements(tmp_path: Path) -> None:
    refused(
        of_fairscale()[1:], tmp_path, r"the parts of 'flat_param_0' have 4 \+ 2 elements .* the parameters in it 10"
    )


def test_ranks_of_fairscale_in_another_order_are_refused(tmp_path: Path) -> None:
    refused(of_fairscale()[::-1], tmp_path, "in the order of the ranks")


def test_ranks_of_fairscale_that_describe_other_parameters_are_refused(tmp_path: Path) -> None:
    saved = of_fairscale()
    saved[1]["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"]["numels"] = [6, 4, 0]
    refused(saved, tmp_path, "describe 'flat_param_0' as of other parameters")


def test_tensors_that_fairscale_does_not_describe_are_refused(tmp_path: Path) -> None:
    saved = of_fairscale()
    saved[0]["model"]["flat_param_1"] = torch.zeros(3)
    refused(saved, tmp_path, "has flat_param_1, of which its description knows nothing")


def test_an_entry_of_a_folder_of_torch_is_to_be_named(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2)}, "optimizer": {"step": torch.zeros(())}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    refused(tmp_path / "dcp", tmp_path, r"has model, optimizer: say which one is the model's")
    refused(tmp_path / "dcp", tmp_path, r"has no entry 'net'; it has model, optimizer", entry="net")
    shardgraph.consolidate(tmp_path / "dcp", tmp_path / "model.safetensors", entry="model")
    assert equal(load_file(tmp_path / "model.safetensors"), state["model"])


def test_a_missing_file_of_a_folder_of_torch_is_named(tmp_path: Path) -> None:
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    refused(tmp_path / "dcp", tmp_path, r"lacks __0_0.distcp")


def test_objects_in_a_file_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {}, "args": Path("x")}, tmp_path / "rank-0.pt")
    refused([tmp_path / "rank-0.pt"], tmp_path, "tensors and plain values only; allow classes that you trust")


@pytest.mark.parametrize(
    ("plan", "mesh", "error", "why"),
    [
        ("fsdp", None, PlanError, r"say for which, such as mesh=\{'dp': 8\}"),
        ("tp", {"tp": 2}, PlanError, r"does not say how 'gain' is placed, .* give sharded.plan"),
        ("pp", {"pp": 2}, PlanError, "has a pipeline"),
        ("fsdp", {"dp": 2}, CheckpointError, "is there and not empty: give a new folder"),
    ],
)
def test_what_cannot_be_split_is_refused(
    plan: str, mesh: dict[str, int] | None, error: type[Exception], why: str, tmp_path: Path
) -> None:
    save_model(offline.Net(), tmp_path / "whole.safetensors")
    with pytest.raises(error, match=f"(?s){why}"):
        shardgraph.split(tmp_path / "whole.safetensors", tmp_path, on_meta(), plan, mesh)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.safetensors"]


def test_a_file_of_another_model_is_not_split(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"unknown to this model: 'weight'"):
        shardgraph.split(tmp_path / "whole.pt", tmp_path / "split", on_meta(), "fsdp", {"dp": 2}, entry="model")
    with pytest.raises(CheckpointError, match=r"has no tensors by name: .* entry='model'"):
        shardgraph.split(tmp_path / "whole.pt", tmp_path / "split", on_meta(), "fsdp", {"dp": 2})
    assert not (tmp_path / "split").exists()


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    before = []

    def read(place: int) -> torch.Tensor:
        before.append(len(alive))
        tensor = torch.full((3,), float(place))
        alive.add(tensor)
        return tensor

    tensors = {str(place): Stored(torch.Size([3]), torch.float32, partial(read, place)) for place in range(4)}
    write_whole(StoredState(tensors), tmp_path / "model.safetensors")
    assert before == [0, 0, 0, 0]
    assert load_file(tmp_path / "model.safetensors")["3"].tolist() == [3, 3, 3]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = nn.Module()
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        values = torch.tensor([[float("nan"), -0.0, 3.0]] * 3).to(dtype)
        model.register_parameter(f"of_{dtype.itemsize}", nn.Parameter(values, requires_grad=False))
    for dtype in (torch.bool, torch.int64, torch.uint8):
        model.register_buffer(str(dtype).replace("torch.", "of_"), torch.tensor(1).to(dtype))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    shardgraph.split(tmp_path / "whole.pt", tmp_path / "split", model, "fsdp", {"dp": 2})
    shardgraph.consolidate(tmp_path / "split", tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert (
            torch.equal(loaded[name].view(torch.uint8), value.view(torch.uint8)) if value.dim() else loaded[name] == 1
        )


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "model.safetensors")
    assert main(["consolidate", *map(str, FILES), "--out", out]) == 0
    assert "Wrote" in capsys.readouterr().out
    assert load_file(out).keys() < whole_of_fairscale().keys()
    assert main(["consolidate", str(FILES[0]), "--out", out]) == 2
    assert "give the file of every rank" in capsys.readouterr().err
