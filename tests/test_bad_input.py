"""What a public function cannot use is refused at its door: by name, with what is allowed, before anything is done.

A table of examples, and damaged files of plans, clusters and checkpoints; ``test_arguments.py`` has every argument.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardgraph as S
from shardgraph import fairscale
from shardgraph.errors import ArgumentError, ShardGraphError
from shardgraph.saves.manifest import checksum_text
from tests.refused import clear

X = torch.zeros(2, 4)
FSDP = S.preset("fsdp", {"dp": 2})


def linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.fixture(scope="module")
def compiled() -> S.ShardedModule:
    return S.compile(linear(), "single", example_inputs=X)


# -- a table of bad calls, by the argument that is bad

CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("model", lambda: S.compile(3)),
    ("model", lambda: S.compile(None)),
    ("model", lambda: S.compile(nn.Linear)),
    ("lazy", lambda: S.compile(nn.LazyLinear(3), "single")),
    ("compiled already", lambda: S.compile(S.compile(linear(), "single"), "single")),
    ("compiled already", lambda: S.analyze(S.compile(linear(), "single"), X, cluster="H100")),
    ("compiled already", lambda: S.plan(S.compile(linear(), "single"), X, cluster="H100", devices=2)),
    ("compiled already", lambda: S.verify(S.compile(linear(), "single"), X)),
    ("compiled already", lambda: S.emit(S.compile(linear(), "single"), "emitted", example_inputs=X)),
    ("example_kwargs", lambda: S.compile(linear(), "single", example_kwargs=[X])),
    ("from_numpy", lambda: S.analyze(linear(), (np.zeros((2, 4)),), cluster="H100")),
    ("from_numpy", lambda: S.compile(linear(), "single")(np.zeros((2, 4)))),
    ("mesh", lambda: S.compile(linear(), mesh=2)),
    ("mesh", lambda: S.compile(linear(), mesh={"dp": "1"})),
    ("mesh", lambda: S.compile(linear(), mesh={"dp": True})),
    ("mesh", lambda: S.compile(linear(), mesh={1: 1})),
    ("pipeline", lambda: S.compile(linear(), "pp", pipeline="1f1b")),
    ("plan", lambda: S.compile(linear(), 3)),
    ("example_inputs=", lambda: S.compile(linear(), (X,))),
    ("plan='fsdp'", lambda: S.analyze(linear(), "fsdp", cluster="H100")),
    ("fsdpp", lambda: S.compile(linear(), "fsdpp")),
    ("loss_fn", lambda: S.compile(linear(), "single", loss_fn=3)),
    ("timeout", lambda: S.compile(linear(), "single", timeout=-1)),
    ("timeout", lambda: S.compile(linear(), "single", timeout="5")),
    ("timeout", lambda: S.compile(linear(), "single", timeout=math.nan)),
    ("cluster", lambda: S.analyze(linear(), X, cluster=3)),
    ("optimizer", lambda: S.analyze(linear(), X, cluster="H100", optimizer=3)),
    ("training", lambda: S.analyze(linear(), X, cluster="H100", training="yes")),
    ("world_size", lambda: S.verify(linear(), X, world_size="2")),
    ("tolerance", lambda: S.verify(linear(), X, tolerance=-1)),
    ("seed", lambda: S.verify(linear(), X, seed="a")),
    ("devices", lambda: S.front(linear(), X, devices="a")),
    ("plan", lambda: S.what_if(3, linear(), X)),
    ("path", lambda: S.visualize(FSDP, 3)),
    ("annotations", lambda: S.annotate(linear(), 3)),
    ("text", lambda: S.Plan.from_yaml(3)),
    ("path", lambda: S.Plan.load(None)),
    ("name", lambda: S.preset(3, {"dp": 2})),
    ("mesh", lambda: S.preset("fsdp", 3)),
    ("stages", lambda: S.Pipeline(stages="xyz")),
    ("balance", lambda: S.Pipeline(balance=(1, 0))),
    ("schedule", lambda: S.Pipeline(schedule=["1f1b"])),
    ("offload", lambda: S.Offload(parameters="yes")),
    ("init_scale", lambda: S.GradScaler(init_scale=math.nan)),
    ("backoff_factor", lambda: S.GradScaler(backoff_factor=2.0)),
    ("fill", lambda: S.Lengths(fill=3, multiple_of=8)),
    ("name", lambda: S.Cluster.of(3)),
    ("nodes", lambda: S.Cluster.of("H100", nodes=True)),
    ("path", lambda: S.Cluster.load(3)),
    ("per_second", lambda: S.Rate("fast")),
    ("latency", lambda: S.Link(1e9, None)),
    ("parameters", lambda: S.clip_grad_norm_(linear(), 1.0)),
    ("max_norm", lambda: S.clip_grad_norm_([X], "a")),
    ("norm_type", lambda: S.clip_grad_norm_([X], 1.0, norm_type="x")),
    ("place", lambda: S.assume(3, False)),
    ("place", lambda: S.assume("f.py", False)),
    ("kind", lambda: S.rewrite(3, None)),
    ("placement", lambda: S.constrain(X, 4)),
    ("dim", lambda: S.shard(True, "tp")),
    ("index", lambda: S.stage("a")),
    ("optimizer", lambda: S.LocalSGD(3, 4, frequency=1)),
    ("params", lambda: S.ShardedOptimizer(3, torch.optim.Adam)),
    ("module", lambda: S.AveragedWeights(3)),
    ("model", lambda: S.MemoryTracker(3)),
    ("model", lambda: S.WaitTracker(linear())),
    ("shards", lambda: S.consolidate(3, "x")),
    ("step", lambda: S.save_checkpoint("x", -1, linear())),
    ("copies", lambda: S.save_checkpoint("x", 1, linear(), copies="2")),
    ("required", lambda: S.load_checkpoint("x", linear(), required=0)),
    ("objects", lambda: S.load_checkpoint("x", linear(), objects=3)),
    ("sharded", lambda: S.check_replicas(linear())),
    ("dtypes", lambda: S.calibrate(2, dtypes=3)),
    ("model", lambda: S.lint(3)),
    ("module", lambda: fairscale.ShardedDataParallel(3, [])),
    ("sharded_optimizer", lambda: fairscale.ShardedDataParallel(linear(), 3)),
    ("chunks", lambda: fairscale.Pipe(nn.Sequential(linear()), [1], chunks=0)),
    ("checkpoint", lambda: fairscale.Pipe(nn.Sequential(linear()), [1], checkpoint="often")),
    ("num_experts", lambda: fairscale.Top2Gate(4, 0)),
    ("experts", lambda: fairscale.MOELayer(linear(), 3)),
    ("reduction", lambda: fairscale.MEVO(nn.Parameter(X), reduction="max")),
    ("scale", lambda: fairscale.MEVO(nn.Parameter(X), scale=-1)),
    ("model", lambda: fairscale.OffloadModel(3, "cpu")),
    ("device", lambda: fairscale.OffloadModel(linear(), 3)),
    ("num_microbatches", lambda: fairscale.OffloadModel(linear(), "cpu", num_microbatches=0)),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CALLS)])
def test_a_bad_argument_is_told_by_name(name, call):
    clear(call, name)


@pytest.mark.parametrize(
    "given", [{"fn": 3}, {"nproc": "2"}, {"nproc": 0}, {"timeout": -1}, {"timeout": math.inf}, {"args": 3}], ids=str
)
def test_launch_starts_nothing_with_a_bad_argument(given, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr("shardgraph.runtime.launch.start_processes", lambda *args, **options: started.append(args))
    clear(lambda: S.launch(**{"fn": print, **given}), *given)
    assert not started


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("state_dict", lambda m: m.load_state_dict(None)),
        ("state_dict", lambda m: m.load_local_state_dict(3)),
        ("strict", lambda m: m.load_state_dict({}, strict="no")),
        ("max_norm", lambda m: m.clip_grad_norm_("a")),
        ("max_norm", lambda m: m.clip_grad_norm_(-1.0)),
        ("max_norm", lambda m: m.clip_grad_norm_(math.nan)),
        ("norm_type", lambda m: m.clip_grad_norm_(1.0, norm_type="x")),
        ("optimizer", lambda m: m.step(X, optimizer=3)),
        ("max_norm", lambda m: m.step(X, optimizer=3, max_norm=-1.0)),
        ("scaler", lambda m: m.train_step(X, scaler=3)),
        ("set_to_none", lambda m: m.zero_grad("yes")),
        ("mode", lambda m: m.train("yes")),
        ("enable", lambda m: m.join(enable=3)),
        ("requires_gradient_sync", lambda m: m.set_requires_gradient_sync(3)),
        ("hook", lambda m: m.register_comm_hook(None, 3)),
        ("path", lambda m: m.save_safetensors(3)),
        ("directory", lambda m: m.save_program(3)),
    ],
)
def test_a_bad_argument_of_a_method_is_told_by_name(compiled, name, call):
    clear(lambda: call(compiled), name)


class Nothing(nn.Module):
    """Its forward returns nothing, after it has computed something or not."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.linear, self.computes = nn.Linear(4, 4), computes

    def forward(self, x: torch.Tensor) -> None:
        if self.computes:
            self.linear(x)


@pytest.mark.parametrize("computes", [False, True])
def test_a_forward_that_returns_nothing_is_told(computes):
    clear(lambda: S.compile(Nothing(computes), "single")(X), "returns no tensor that it computes")


def test_one_tensor_is_the_inputs_of_a_call():
    model = linear()
    assert S.verify(model, X).ok == S.verify(model, (X,)).ok is True
    assert S.compile(model, "single", example_inputs=X).forward_graph is not None


def test_an_error_of_an_argument_is_one_of_python_too():
    for kind in (TypeError, ValueError, ArgumentError):
        with pytest.raises(kind, match=r"^compile\(\): timeout is -1; it may be a number of seconds above 0"):
            S.compile(linear(), "single", timeout=-1)


def test_missing_and_unknown_arguments_are_pythons_own_errors():
    with pytest.raises(TypeError, match=r"compile\(\) got an unexpected keyword argument 'modle'"):
        S.compile(linear(), modle=3)
    with pytest.raises(TypeError, match=r"annotate\(\) missing 1 required positional argument: 'annotations'"):
        S.annotate(linear())


def test_every_public_function_has_a_door():
    functions = [each for name in (*S.__all__, "compile") if inspect.isfunction(each := getattr(S, name))]
    assert [each.__name__ for each in functions if not hasattr(each, "__wrapped__")] == [
        "constrain",  # the tracer follows it
        "wait_for_saves",  # has none
    ]


def test_signatures_are_as_written():
    assert list(inspect.signature(S.launch).parameters) == ["fn", "nproc", "args", "timeout"]
    assert inspect.signature(S.preset).return_annotation == "Plan" and "Presets are" in (S.compile.__doc__ or "")


# -- files

FUZZ = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def _paths(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [here, *(path for key, each in children for path in _paths(each, (*here, key)))]


def _replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = _replaced(data[path[0]], path[1:], value)
    return copy


PLAN_TEXT = S.Plan.from_yaml(
    """
schema: 1
name: a
mesh: {dp: 2, tp: 2}
prefetch: 4
bucket: 0
operators: {tp: whole}
annotations: [{'*.weight': 'shard(0, "tp")'}]
recompute: {'layers.*': [silu]}
pipeline: {ranks: 2, schedule: 1f1b, microbatches: 4, stages: [b]}
batch: {samples: 64, calls: 2}
precision: {parameters: bfloat16, inputs: true}
offload: {activations: true}
considered: [{name: a, mesh: {dp: 2}, memory: 5, seconds: 1.0, fits: true}]
remarks: [b]
bounds: {fsdp on dp=4: 0.5}
parameters: {'*': {placements: [shard(0), auto], gradient: reduce_scatter, reshard_after_forward: true}}
"""
).to_yaml()
_OTHER = ["a", -1, 0, True, 1.5, math.nan, None, [], [1], {}, {"a": 1}, {1: 1}, [[]], 10**30, math.inf, "\n"]
TEXTS = st.one_of(
    st.tuples(st.just("cut"), st.integers(1, 400)),
    st.tuples(st.just("twice"), st.integers(0, 400)),
    st.tuples(st.just("unknown"), st.integers(0, 400)),
    st.tuples(st.just("binary"), st.integers(0, 400)),
    st.tuples(st.sampled_from(_OTHER), st.integers(0, 400)),
)


def _mutated(text: str, how: Any, where: int) -> str:
    data = yaml.safe_load(text)
    if how == "cut":
        return text[: where % len(text)]
    if how == "twice":
        lines = text.splitlines()
        tops = [line for line in lines if line[:1].isalpha()]
        return text + (tops[where % len(tops)] + "\n" if tops else text)
    if how == "binary":
        return text[: where % len(text)] + "\x00\x07" + text[where % len(text) :]
    paths = _paths(data)
    path = paths[where % len(paths)]
    if how == "unknown":
        return yaml.safe_dump({**data, "placments": 3})
    return yaml.safe_dump(_replaced(data, path, how))


def _read_or_clear(read: Callable[[str], Any], write: Callable[[Any], str], text: str) -> None:
    try:
        read_back = read(text)
    except ShardGraphError as error:
        assert len(str(error).splitlines()) <= 10 and len(str(error)) < 2000, str(error)
        return
    assert (
        read(write(read_back)) == read_back
    )  # what is accepted is a plan or a cluster, which is written as it is read


@settings(FUZZ, max_examples=150)
@given(TEXTS)
def test_a_damaged_plan_file_is_refused_or_another_plan(mutation):
    text = _mutated(PLAN_TEXT, *mutation)
    _read_or_clear(S.Plan.from_yaml, lambda plan: plan.to_yaml(), text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schema: 1\nname: a\nname: b\nmesh: {dp: 2}\nparameters: {}", "'name' is given twice in line 3"),
        ("schema: true\nname: a\nmesh: {dp: 2}\nparameters: {}", "schema is True"),
        ("[" * 5000, "nested more than"),
        ("&a [*a]", "the file is"),
        ("schema: 1\nname: a\nmesh: &m {dp: *m}\nparameters: {}", "mesh"),
        ("", "the file is None"),
        ("a: \x00", "not YAML"),
        ("schema: 1\nname: a\nmesh: {dp: .nan}\nparameters: {}", "mesh"),
    ],
)
def test_a_plan_file_that_is_none_is_refused(text, told):
    assert told in clear(lambda: S.Plan.from_yaml(text))


@settings(FUZZ, max_examples=100)
@given(TEXTS)
def test_a_damaged_cluster_file_is_refused_or_another_cluster(tmp_path_factory, mutation):
    folder = tmp_path_factory.mktemp("clusters")

    def written(cluster: S.Cluster) -> str:
        cluster.save(folder / "written.yaml")
        return (folder / "written.yaml").read_text()

    def read(text: str) -> S.Cluster:
        (folder / "read.yaml").write_text(text)
        return S.Cluster.load(folder / "read.yaml")

    _read_or_clear(read, written, _mutated(written(S.Cluster.of("H100", nodes=2)), *mutation))


@settings(FUZZ, max_examples=40)
@given(TEXTS, st.booleans(), st.integers(1, 2))
def test_a_damaged_manifest_of_a_checkpoint_is_refused_and_nothing_is_loaded(
    tmp_path_factory, mutation, checksummed, copies
):
    path = tmp_path_factory.mktemp("saves")
    saved = linear()
    manifest = S.save_checkpoint(path, 1, saved, copies=copies).result() / "manifest.json"
    text = manifest.read_text()
    damaged = _mutated(text, *mutation)
    if mutation[0] not in ("cut", "twice", "binary"):
        damaged = json.dumps(yaml.safe_load(damaged))
    manifest.write_text(damaged)
    if checksummed:  # as if it had been written like that
        (manifest.parent / "manifest.json.sha256").write_text(checksum_text(damaged.encode()))
    into = linear()
    before = {name: each.clone() for name, each in into.state_dict().items()}
    try:
        S.load_checkpoint(path, into)
    except ShardGraphError:
        assert all(torch.equal(each, before[name]) for name, each in into.state_dict().items())
    else:
        assert all(torch.equal(each, saved.state_dict()[name]) for name, each in into.state_dict().items())
