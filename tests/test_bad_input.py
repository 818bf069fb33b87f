"""What a public function cannot use is refused at its door: by name, with what is allowed, before anything is done.

*Clear* is an error of shardgraph that is told in ten lines at most and names the argument or field (or Python's own
error for an argument that is missing or unknown). *Nonsense* is a value that ``_may`` does not allow for the name.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
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

X = torch.zeros(2, 4)
FSDP = S.preset("fsdp", {"dp": 2})


def linear() -> nn.Module:
    return nn.Linear(4, 4)


@pytest.fixture(scope="module")
def compiled() -> S.ShardedModule:
    return S.compile(linear(), "single", example_inputs=X)


def clear(call: Callable[[], Any], *names: str) -> str:
    """The message of the clear error that a call ends with."""
    with pytest.raises(ShardGraphError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) <= 10, message
    assert not names or any(name in message for name in names), message
    return message


# -- a table of bad calls, by the argument that is bad

CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("model", lambda: S.compile(3)),
    ("model", lambda: S.compile(None)),
    ("model", lambda: S.compile(nn.Linear)),
    ("lazy", lambda: S.compile(nn.LazyLinear(3), "single")),
    ("compiled already", lambda: S.compile(S.compile(linear(), "single"), "single")),
    ("example_kwargs", lambda: S.compile(linear(), "single", example_kwargs=[X])),
    ("from_numpy", lambda: S.analyze(linear(), (np.zeros((2, 4)),), cluster="H100")),
    ("from_numpy", lambda: S.compile(linear(), "single")(np.zeros((2, 4)))),
    ("mesh", lambda: S.compile(linear(), mesh=2)),
    ("mesh", lambda: S.compile(linear(), mesh={"dp": "1"})),
    ("mesh", lambda: S.compile(linear(), mesh={"dp": True})),
    ("mesh", lambda: S.compile(linear(), mesh={1: 1})),
    ("pipeline", lambda: S.compile(linear(), "pp", pipeline="1f1b")),
    ("plan", lambda: S.compile(linear(), 3)),
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


# -- a fuzz of every function, one argument at a time

_JUNK = [
    None, True, False, 0, 1, -1, 2, 10**400, -0.5, 0.5, 1.0, math.nan, math.inf, -math.inf, 1e300, 3j, "", "a", "3",
    "\0", b"x", (), (1,), ("a", 1), [], [None], [1, "a"], {}, {"a": 1}, {1: 2}, {"a": None}, set(), X, np.zeros(2),
    np.float32(1), torch.float32, torch.device("cpu"), nn.Linear, linear(), print, lambda: 1, object(), object, int,
    Ellipsis, range(3), iter([1]), torch.optim.SGD(linear().parameters(), lr=0.1), FSDP, S.Pipeline(), S.Precision(),
]  # fmt: skip
JUNK = st.one_of(
    st.sampled_from(_JUNK),
    st.integers(),
    st.floats(),
    st.binary(max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=3),
)


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_)) and math.isfinite(_float(value))


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _pathlike(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _inputs(value: Any) -> bool:
    return isinstance(value, (tuple, list, torch.Tensor))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _infinite(value: Any) -> bool:
    return isinstance(value, float) and value == math.inf


def _sequence(value: Any) -> bool:
    return isinstance(value, (tuple, list, range))


_MAY: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(["model"], lambda value: isinstance(value, nn.Module)),
    **dict.fromkeys(["example_inputs"], _inputs),
    **dict.fromkeys(
        ["example_kwargs", "mesh", "annotations", "state_dict", "factors"], lambda v: isinstance(v, Mapping)
    ),
    **dict.fromkeys(["plan", "cluster", "on", "first", "second"], lambda v: _pathlike(v) or isinstance(v, S.Plan)),
    **dict.fromkeys(["path", "folder", "directory"], _pathlike),
    **dict.fromkeys(["precision", "offload"], lambda v: isinstance(v, (str, S.Precision))),
    **dict.fromkeys(
        ["backend", "recompute", "loss_weight", "place", "entry", "name", "source"], lambda v: type(v) is str
    ),
    **dict.fromkeys(["seconds", "timeout", "tune", "network", "init_scale"], lambda v: _real(v) and v > 0),
    **dict.fromkeys(["memory", "loss_chunk"], lambda v: isinstance(v, str) or (_real(v) and v >= 1)),
    **dict.fromkeys(
        ["devices", "global_batch", "world_size", "steps", "sequence", "nproc", "nodes", "frequency"], _whole
    ),
    **dict.fromkeys(
        ["devices_per_node", "growth_interval", "average_frequency", "multiple_of", "microbatches"], _whole
    ),
    **dict.fromkeys(["ranks", "samples", "calls", "blocks"], _whole),
    **dict.fromkeys(
        ["training", "fold", "fp64", "progress", "initialize", "gradient_statistics"], lambda v: type(v) is bool
    ),
    **dict.fromkeys(["scheduled", "background", "enabled", "powers_of_two", "inputs"], lambda v: type(v) is bool),
    **dict.fromkeys(["activations", "optimizer_state", "strict", "assign", "warmup"], lambda v: type(v) is bool),
    **dict.fromkeys(["loss_fn", "fn"], callable),
    "pipeline": lambda v: isinstance(v, S.Pipeline),
    "lengths": lambda v: isinstance(v, S.Lengths),
    "tolerance": lambda v: _real(v) and v >= 0,
    "seed": lambda v: _whole(v, -(2**63)),
    "step": lambda v: _whole(v, 0),
    "keep": lambda v: v is None or _whole(v),
    "growth_factor": lambda v: _real(v) and v > 1,
    "backoff_factor": lambda v: _real(v) and 0 < v < 1,
    "index": lambda v: _whole(v, 0),
    "dim": lambda v: _whole(v, -(10**9)),
    "stages": _sequence,
    "balance": _sequence,
    "among": _sequence,
    "per_second": lambda v: _real(v) and v > 0,
    "overhead": lambda v: _real(v) and v >= 0,
    "moved_per_second": lambda v: (_real(v) and v > 0) or _infinite(v),
    "bandwidth": lambda v: (_real(v) and v > 0) or _infinite(v),
    "latency": lambda v: (_real(v) and v >= 0) or _infinite(v),
}
"""For the names of arguments, whether a value may be one; None may be, where it is the default."""

_MODEL_CALL = {"model": linear(), "example_inputs": (X,), "cluster": "H100"}
FUNCTIONS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (S.compile, {"model": linear(), "plan": "single"}),
    (S.analyze, {**_MODEL_CALL, "mesh": {"dp": 2}}),
    (S.verify, {"model": linear(), "example_inputs": (X,)}),
    (S.prove, {**_MODEL_CALL, "mesh": {"dp": 2}}),
    (S.plan, _MODEL_CALL),
    (S.what_if, {"plan": FSDP, **_MODEL_CALL, "network": 0.5}),
    (S.compare, {"first": FSDP, "second": FSDP, **_MODEL_CALL}),
    (S.emit, {"model": linear(), "directory": "/nowhere/at all", "example_inputs": (X,)}),
    (S.lint, {"model": linear(), "example_inputs": (X,), "mesh": {"dp": 2}}),
    (S.annotate, {"model": linear(), "annotations": {}}),
    (S.visualize, {"what": FSDP, "path": "/nowhere/x.svg"}),
    (S.preset, {"name": "fsdp", "mesh": {"dp": 2}}),
    (S.launch, {"fn": print}),
    (S.save_checkpoint, {"path": "/nowhere/at all", "step": 1, "model": linear()}),
    (S.load_checkpoint, {"path": "/nowhere/at all", "model": linear()}),
    (S.consolidate, {"shards": "/nowhere", "path": "/nowhere/x"}),
    (S.split, {"path": "/nowhere", "folder": "/nowhere/x", "model": linear()}),
    (S.GradScaler, {}),
    (S.Pipeline, {}),
    (S.Offload, {}),
    (S.Precision, {}),
    (S.Batch, {"samples": 4}),
    (S.Lengths, {"fill": {"x": 0}, "multiple_of": 8}),
    (S.Cluster.of, {"name": "H100"}),
    (S.Cluster.load, {"path": "/nowhere"}),
    (S.Plan.load, {"path": "/nowhere"}),
    (S.Rate, {"per_second": 1.0}),
    (S.Link, {"bandwidth": 1.0, "latency": 0.0}),
    (S.shard, {"dim": 0, "mesh_dim": "tp"}),
    (S.stage, {"index": 1}),
]


def _arguments() -> list[tuple[Callable[..., Any], dict[str, Any], str, Any]]:
    found = []
    for function, base in FUNCTIONS:
        for name, parameter in inspect.signature(function).parameters.items():
            if name in _MAY and not (function is S.Offload and name == "parameters"):
                found.append((function, base, name, parameter.default))
    return found


def _fuzzed(argument: tuple[Any, dict[str, Any], str, Any], value: Any) -> None:
    function, base, name, default = argument
    if value is default or (value is None and default is None) or _MAY[name](value):
        return  # it may be
    if function is S.preset and name == "mesh" and _sequence(value):
        return  # pairs
    clear(lambda: function(**{**base, name: value}), name)


FUZZ = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(FUZZ, max_examples=400)
@given(st.sampled_from(_arguments()), JUNK)
def test_no_argument_of_a_wrong_type_or_out_of_range_is_accepted(argument, value):
    _fuzzed(argument, value)


@pytest.mark.parametrize("argument", _arguments(), ids=lambda each: f"{each[0].__qualname__}-{each[2]}")
def test_each_argument_refuses_each_value_that_it_may_not_be(argument):
    for value in _JUNK:
        _fuzzed(argument, value)


@pytest.mark.slow
@settings(FUZZ, max_examples=5000)
@given(st.sampled_from(_arguments()), JUNK)
def test_no_argument_is_accepted_in_5000(argument, value):
    _fuzzed(argument, value)


# -- files


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
