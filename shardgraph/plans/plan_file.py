"""Writes and reads the YAML form of a plan, described in :mod:`shardgraph.plans.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations.kinds import parse
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.offload_plan import NOTHING, Offload
from shardgraph.plans.orders import SCHEDULES
from shardgraph.plans.parameter_plan import AUTO, GRADIENTS, REPLICATE, SHARD, ParameterPlan
from shardgraph.plans.pipeline_plan import CHECKPOINTS, Pipeline
from shardgraph.plans.precision import AS_STORED, Precision

SCHEMA = 1
"""The version of the form."""


def written_plan(plan: Mapping[str, Any]) -> str:
    """The YAML form of a plan whose fields are given by name."""
    data = {
        "schema": plan["schema"],
        "name": plan["name"],
        "note": plan["note"],
        "mesh": dict(plan["mesh"]),
        "prefetch": plan["prefetch"],
        "operators": dict(plan["operators"]),
        "annotations": [{pattern: str(annotation)} for pattern, annotation in plan["annotations"]],
        "recompute": plan["recompute"] if isinstance(plan["recompute"], str) else _lists(plan["recompute"]),
        "loss_chunk": plan["loss_chunk"],
        "experts": plan["experts"],
        "pipeline": _written_pipeline(plan["pipeline"]) if plan["pipeline"] else None,
        "precision": _differences(plan["precision"], AS_STORED),
        "offload": _differences(plan["offload"], NOTHING),
        "considered": [asdict(candidate) | {"mesh": dict(candidate.mesh)} for candidate in plan["considered"]],
        "parameters": {
            pattern: {
                "placements": list(entry.placements),
                "gradient": entry.gradient,
                "reshard_after_forward": entry.reshard_after_forward,
            }
            | ({"offload": True} if entry.offload else {})
            for pattern, entry in plan["parameters"]
        },
    }
    optional = (
        "considered",
        "loss_chunk",
        "operators",
        "experts",
        "pipeline",
        "precision",
        "offload",
        "annotations",
    )
    data = {key: value for key, value in data.items() if key not in optional or value}
    if plan["recompute"] == "none":
        del data["recompute"]
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    if plan["activations"] is None:
        return text
    last = {"activations": _written_activations(plan["activations"])}  # one line each
    return text + yaml.safe_dump(last, sort_keys=False, default_flow_style=False, width=200, allow_unicode=True)


def _written_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    data = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(pipeline).items()}
    return {key: value for key, value in data.items() if value != [] and (key, value) != ("axis", "pp")}


def _written_activations(activations: Activations) -> dict[str, Any]:
    return {"call": activations.call, **{axis: dict(rules) for axis, rules in activations.along}}


def _differences(given: Any, usual: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from ``usual``."""
    return {field: value for field, value in asdict(given).items() if value != getattr(usual, field)}


def read_plan(text: str, source: str) -> dict[str, Any]:
    """Parse the YAML form of a plan into its fields by name; ``source`` names the text in errors.

    Raises:
        PlanError: it is not YAML, or a field has a value that is not allowed.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{source} is not YAML: {error}") from error
    return _from_data(data, source)


def _from_data(data: Any, source: str) -> dict[str, Any]:
    def take(mapping: Any, path: str, required: frozenset[str], fields: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(mapping, dict):
            raise PlanError(
                f"{source}: {path or 'the file'} is {mapping!r}; it may be a mapping of {', '.join(fields)}"
            )
        prefix = f"{path}." if path else ""
        for key in mapping:
            if key not in fields:
                known = nearest(str(key), fields) or f"; the fields are {', '.join(fields)}"
                raise PlanError(f"{source}: unknown field {prefix}{key}{known}")
        for key, expected in fields.items():
            if key not in mapping:
                if key in required:
                    raise PlanError(f"{source}: the field {prefix}{key} is missing; it may be {expected[1]}")
            elif not isinstance(mapping[key], expected[0]):
                raise PlanError(f"{source}: {prefix}{key} is {mapping[key]!r}; it may be {expected[1]}")
        return mapping

    top = take(data, "", frozenset({"schema", "name", "mesh", "parameters"}), _PLAN_FIELDS)
    entries = []
    for pattern, value in top["parameters"].items():
        entry = take(value, f"parameters.{pattern}", frozenset({"placements"}), _PARAMETER_FIELDS)
        entries.append((str(pattern), ParameterPlan(**{**entry, "placements": tuple(entry["placements"])})))
    considered = []
    for i, value in enumerate(top.get("considered", [])):
        fields = take(value, f"considered.{i}", frozenset(_CANDIDATE_FIELDS) - {"batches"}, _CANDIDATE_FIELDS)
        considered.append(Candidate(**{**fields, "mesh": _mesh(fields["mesh"])}))
    changed: dict[str, Any] = {
        "mesh": _mesh(top["mesh"]),
        "parameters": tuple(entries),
        "considered": tuple(considered),
    }
    if "pipeline" in top:
        changed["pipeline"] = Pipeline(**take(top["pipeline"], "pipeline", frozenset({"ranks"}), _PIPELINE_FIELDS))
    if "operators" in top:
        changed["operators"] = tuple((str(axis), style) for axis, style in top["operators"].items())
    if "precision" in top:
        changed["precision"] = _precision(take(top["precision"], "precision", _NONE, _PRECISION_FIELDS), source)
    if "offload" in top:
        changed["offload"] = Offload(**take(top["offload"], "offload", _NONE, _OFFLOAD_FIELDS))
    if "activations" in top:
        changed["activations"] = _activations(top["activations"], source)
    if "annotations" in top:
        changed["annotations"] = tuple(_annotation(each, source) for each in top["annotations"])
    if isinstance(top.get("recompute"), dict):
        changed["recompute"] = tuple(_rule(pattern, names, source) for pattern, names in top["recompute"].items())
    return {**top, **changed}


def _lists(rules: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, list[str]]:
    return {pattern: list(names) for pattern, names in rules}


def _rule(pattern: Any, names: Any, source: str) -> tuple[str, tuple[str, ...]]:
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"{source}: recompute.{pattern} is {names!r}; it may be a list of operations, such as [silu, mul]"
        )
    return str(pattern), tuple(names)


def _activations(data: dict[Any, Any], source: str) -> Activations:
    call, along = data.get("call"), {axis: rules for axis, rules in data.items() if axis != "call"}
    if not isinstance(call, str):
        raise PlanError(f"{source}: activations.call is {call!r}; it may be the call that the rest was decided for")
    for axis, rules in along.items():
        if not isinstance(rules, dict) or not all(isinstance(text, str) for text in rules.values()):
            raise PlanError(
                f"{source}: activations.{axis} is {rules!r}; it may be a mapping of operations to the placements of "
                "their operands and results"
            )
    pairs = tuple(
        (str(axis), tuple((str(name), text) for name, text in rules.items())) for axis, rules in along.items()
    )
    try:
        return Activations(call, pairs)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def _annotation(data: Any, source: str) -> Annotated:
    if not isinstance(data, dict) or len(data) != 1:
        raise PlanError(f"{source}: annotations has {data!r}; it may have one pattern with its annotation")
    ((pattern, text),) = data.items()
    try:
        return str(pattern), parse(str(text))
    except PlanError as error:
        raise PlanError(f"{source}: annotations.{pattern}: {error}") from None


def _precision(fields: dict[str, Any], source: str) -> Precision:
    try:
        return Precision(**fields)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def _mesh(data: Mapping[Any, Any]) -> Mesh:
    return tuple((str(axis), size) for axis, size in data.items())


_PLAN_FIELDS = {
    "schema": (int, f"{SCHEMA}"),
    "name": (str, "a text"),
    "note": (str, "a text"),
    "mesh": (dict, "a mapping of axis names to sizes, such as {dp: 2}"),
    "prefetch": (int, "a whole number from 0"),
    "operators": (dict, "a mapping of mesh axes to 'whole', 'sequence' or 'context'"),
    "recompute": ((str, dict), "none, full, selective, budget, or a mapping of modules to their operations"),
    "loss_chunk": (int, "the bytes of scores that exist at a time"),
    "experts": (str, "the mesh axis that divides experts"),
    "pipeline": (dict, "a mapping of ranks, schedule, microbatches and stages"),
    "annotations": (list, "a list of patterns, each with what is said of what it matches"),
    "precision": (dict, "a mapping of parameters, reduce, buffers and outputs to dtypes"),
    "offload": (dict, "a mapping of parameters, activations and disk"),
    "activations": (dict, "a mapping of 'call' and mesh axes to the placements of operations"),
    "considered": (list, "a list of the plans that were priced"),
    "parameters": (dict, "a mapping of name patterns to what happens to those parameters"),
}
_PARAMETER_FIELDS = {
    "placements": (list, f"a list of {REPLICATE!r}, {SHARD!r}, 'split(d)' or {AUTO!r}, one for each mesh axis"),
    "gradient": (str, " or ".join(map(repr, GRADIENTS))),
    "reshard_after_forward": (bool, "true or false"),
    "offload": (bool, "true or false"),
}
_PIPELINE_FIELDS = {
    "ranks": (int, "a whole number from 1"),
    "schedule": (str, " or ".join(map(repr, SCHEDULES))),
    "microbatches": (int, "a whole number from 0"),
    "stages": (list, "a list of the modules with which stages begin"),
    "balance": (list, "a list of how many layers each stage has"),
    "checkpoint": (str, " or ".join(map(repr, CHECKPOINTS))),
    "axis": (str, "the name of a mesh axis"),
}
_PRECISION_FIELDS = {
    **dict.fromkeys(("parameters", "reduce", "buffers", "outputs"), (str, "the name of a dtype")),
    "inputs": (bool, "true or false"),
}
_OFFLOAD_FIELDS = {
    "parameters": (bool, "true or false"),
    "activations": (bool, "true or false"),
    "disk": (str, "the path of a folder"),
}
_CANDIDATE_FIELDS = {
    "name": (str, "a text"),
    "mesh": (dict, "a mapping of axis names to sizes, such as {dp: 2}"),
    "memory": (int, "a number of bytes"),
    "seconds": (float, "a number of seconds"),
    "fits": (bool, "true or false"),
    "batches": (int, "a whole number from 1"),
}
_NONE: frozenset[str] = frozenset()
