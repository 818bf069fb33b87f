"""Files that are read outside of a training, with bytes changed, are refused in words or give the tensors of the model.

Checkpoints of jobs have checksums (``test_saves.py``); plans, clusters and manifests are in ``test_bad_input.py``.
These formats have none, so a changed number may be read; what is read has the names and shapes that the model has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import shardgraph
from shardgraph.cli.main import main
from shardgraph.errors import ShardGraphError

Damage = tuple[str, float, int, bytes]
DAMAGE = st.tuples(
    st.sampled_from(["cut", "flip", "set", "insert", "remove", "move", "replace", "repeat"]),
    st.floats(0, 1),  # where
    st.integers(1, 64),  # how much
    st.binary(min_size=1, max_size=64),
)


def damaged(data: bytes, damage: Damage) -> bytes:
    how, part, count, new = damage
    at = int(part * (len(data) - 1))
    if how == "cut":
        return data[:at]
    if how == "flip":
        return data[:at] + bytes([data[at] ^ (1 << count % 8)]) + data[at + 1 :]
    if how == "set":
        return data[:at] + new + data[at + len(new) :]
    if how == "insert":
        return data[:at] + new + data[at:]
    if how == "remove":
        return data[:at] + data[at + count :]
    if how == "move":
        return data[at:] + data[:at]
    if how == "repeat":
        return data[:at] + data[at : at + count] * 3 + data[at + count :]
    return new * count


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def read_or_refused(call: Callable[[], None], result: Path, what: str) -> None:
    """``what`` was damaged: a call that reads it is refused clearly, or the tensors that it writes are the model's."""
    try:
        call()
    except ShardGraphError as error:
        assert len(str(error).splitlines()) <= 10 and len(str(error)) < 2000, str(error)
        assert not result.exists(), f"{what}: refused, and something was written"
        return
    files = sorted(result.iterdir()) if result.is_dir() else [result]
    for file in files:
        read = load_file(file) if file.suffix == ".safetensors" else torch.load(file)["model"]
        shapes = {name: each.shape for name, each in model_of().state_dict().items()}
        assert read.keys() == shapes.keys(), what
        assert result.is_dir() or {name: each.shape for name, each in read.items()} == shapes, what


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``shards`` of two ranks, ``folder`` of torch.distributed.checkpoint, ``whole.safetensors`` and ``whole.pt``."""
    folder, model = tmp_path_factory.mktemp("files"), model_of()
    shardgraph.compile(model_of(), "single").save_safetensors(folder / "whole.safetensors")
    torch.save(model.state_dict(), folder / "whole.pt")
    shardgraph.split(folder / "whole.pt", folder / "shards", model, "fsdp", {"dp": 2})
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "folder", no_dist=True)
    return folder


def _consolidate(source: Path, to: Path) -> None:
    shardgraph.consolidate(source, to / "a.safetensors", model=model_of())


def _load(source: Path, to: Path) -> None:
    """Load what torch.distributed.checkpoint alone has written, and write what was loaded."""
    model = model_of()
    shardgraph.load_checkpoint(source, model)
    save_file(model.state_dict(), to / "a.safetensors")


READ: dict[str, Callable[[Path, Path], None]] = {
    "shards/rank-00001.pt": lambda here, to: _consolidate(here / "shards", to),
    "folder/.metadata": lambda here, to: _consolidate(here / "folder", to),
    "folder/__0_0.distcp": lambda here, to: _consolidate(here / "folder", to),
    "folder/.metadata, loaded": lambda here, to: _load(here / "folder", to),
    "folder/__0_0.distcp, loaded": lambda here, to: _load(here / "folder", to),
    "whole.pt": lambda here, to: shardgraph.split(here / "whole.pt", to / "a", model_of(), "fsdp", {"dp": 2}),
    "whole.safetensors": lambda here, to: shardgraph.split(
        here / "whole.safetensors", to / "a", model_of(), "fsdp", {"dp": 2}
    ),
}


def _read_damaged(files: Path, folder: Path, name: str, damage: Damage) -> None:
    here = folder / "here"
    shutil.rmtree(folder)
    shutil.copytree(files, here)
    file = name.partition(",")[0]
    (here / file).write_bytes(damaged((files / file).read_bytes(), damage))
    results = folder / "results"
    results.mkdir()
    read_or_refused(lambda: READ[name](here, results), results / ("a.safetensors" if "/" in name else "a"), name)


FUZZ = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(FUZZ, max_examples=60)
@given(st.sampled_from(list(READ)), DAMAGE)
def test_damaged_files_of_tensors_are_refused_or_read(files, tmp_path, name, damage):
    _read_damaged(files, tmp_path, name, damage)


@pytest.mark.slow
@settings(FUZZ, max_examples=5000)
@given(st.sampled_from(list(READ)), DAMAGE)
def test_files_of_tensors_that_are_damaged_in_5000_ways_are_refused_or_read(files, tmp_path, name, damage):
    _read_damaged(files, tmp_path, name, damage)


def record() -> str:
    entry = {"kind": "all_gather", "axis": "dp", "bytes": 8, "value": "w", "line": "a.py:1", "call": 1, "place": 1}
    other = {"kind": "barrier", "axis": "dp", "group": "dp", "bytes": 0, "value": "", "line": "", "call": 0, "place": 1}
    ranks = {
        str(rank): [
            {**entry, "started": 1.7e9 + rank, "finished": 1.7e9 + 2},
            {**other, "started": 1.7e9 + 3, "finished": None, "done": True},
        ]
        for rank in range(2)
    }
    return json.dumps({"failure": "rank 1 was stopped", "ranks": ranks})


def _show(file: Path, capsys: pytest.CaptureFixture[str], text: bytes) -> None:
    file.write_bytes(text)
    code = main(["flight", str(file)])
    told = capsys.readouterr()
    assert code == 0 or len(told.err.splitlines()) <= 10, told.err


_VALUES = [None, "a", -1, 1e300, 10**30, float("nan"), [], {}, [[]], {"a": 1}, True]


def _replaced(text: str, where: int, value: object) -> str:
    """The record with one value, of a rank or of a field, replaced."""
    data = json.loads(text)
    places = [(data, key) for key in data]
    for rank, entries in data["ranks"].items():
        places += [(data["ranks"], rank), *((entries, index) for index in range(len(entries)))]
        places += [(entry, key) for entry in entries for key in entry]
    holder, key = places[where % len(places)]
    holder[key] = value
    return json.dumps(data)


@settings(FUZZ, max_examples=150)
@given(DAMAGE, st.integers(0, 100), st.sampled_from(_VALUES), st.booleans())
@pytest.mark.slow
def test_a_damaged_flight_record_is_shown_or_refused(tmp_path, capsys, damage, where, value, bytewise):
    text = record()
    changed = damaged(text.encode(), damage) if bytewise else _replaced(text, where, value).encode()
    _show(tmp_path / "record.json", capsys, changed)


def test_a_flight_record_that_is_nested_without_end_is_refused(tmp_path, capsys):
    _show(tmp_path / "record.json", capsys, b"[" * 100_000)
