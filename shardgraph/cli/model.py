"""The model that a command line names, and the inputs of one call of it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardgraph.cli import transformers_model
from shardgraph.cli.options import settings_of
from shardgraph.errors import ShardGraphError, nearest


@dataclass(frozen=True)
class Job:
    """A module and one call of it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def call(self) -> dict[str, Any]:
        """The inputs by the names that the public functions have for them."""
        return {"example_inputs": self.args, "example_kwargs": self.kwargs}


def is_function(name: str) -> bool:
    """Whether a model is named by a function that returns it."""
    return ":" in name


def job_of(
    name: str, batch: int | None, sequence: int | None, settings: Iterable[str] | None, *, weights: bool = False
) -> Job:
    """The module of this name and a call of it: on ``meta``, or with random ``weights``.

    Args:
        name: ``package.module:function``, a model type of transformers, or the path of a config in JSON.
        batch, sequence: the size of the inputs that are made up for a model of transformers.
        settings: fields of its config, as ``"name=value"``.

    Raises:
        ShardGraphError: there is no such model, or it cannot be built.
    """
    sizes = transformers_model.Sizes(batch or 1, sequence)
    torch.manual_seed(0)
    with nullcontext() if weights else torch.device("meta"):
        if not is_function(name):
            module = transformers_model.build(name, settings_of(settings))
            return Job(module, (), transformers_model.inputs(module, sizes))
        if settings:
            raise ShardGraphError(f"--set is for configs of transformers, and {name} is a function: change it there")
        made = _called(_function(name), name, weights)
        module, *call = made if isinstance(made, tuple) and made else (made,)
        if not isinstance(module, nn.Module) or len(call) > 2:
            raise ShardGraphError(f"{name} returned {_kinds(made)}: {_WANTED}")
        if not call and transformers_model.is_one(module):
            return Job(module, (), transformers_model.inputs(module, sizes))
        if batch or sequence:
            raise ShardGraphError(
                f"--batch and --sequence are for inputs that are made up for models of transformers, and {name} has "
                "inputs of its own: change them there"
            )
        return _with_call(module, call, name)


_WANTED = (
    "it is to return a module, or (module, inputs), or (module, inputs, keyword inputs), where inputs are a tuple and "
    "keyword inputs a dictionary"
)


def _with_call(module: nn.Module, call: Sequence[Any], name: str) -> Job:
    args = call[0] if call else ()
    kwargs = call[1] if len(call) > 1 else {}
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise ShardGraphError(f"{name} returned a module with {_kinds(tuple(call))}: {_WANTED}")
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ShardGraphError(
            f"{name} returned a module whose forward cannot be called so: {error}; {_WANTED}"
        ) from error
    return Job(module, tuple(args), kwargs)


def _function(name: str) -> Callable[[], Any]:
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or os.sep in path:
        dotted = path.removesuffix(".py").removeprefix(f".{os.sep}").replace(os.sep, ".")
        raise ShardGraphError(f"{path!r} is no name of a module: write it as import does, {dotted}:{attribute}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ShardGraphError(
                f"there is no module {error.name!r} here: start the command where `python -c 'import {path}'` works, "
                "or name a module that is installed"
            ) from error
        raise ShardGraphError(f"{path!r} cannot be imported: {_last_line(error)}") from error
    except Exception as error:
        raise ShardGraphError(f"{path!r} cannot be imported: {_last_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [each for each in vars(module) if callable(getattr(module, each)) and not each.startswith("_")]
        raise ShardGraphError(f"{path!r} has no function {attribute!r}{nearest(attribute, known)}")
    required = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if required:
        raise ShardGraphError(
            f"{name} cannot be called without {', '.join(required)}: name a function that needs no arguments, such as "
            f"one that calls it. {_WANTED.capitalize()}"
        )
    return function


def _called(function: Callable[[], Any], name: str, weights: bool) -> Any:
    try:
        return function()
    except Exception as error:
        hint = (
            ""
            if weights
            else ". It was called with torch.device('meta'), since weights are not needed: tensors whose "
            "values it reads it has to make with device='cpu'"
        )
        raise ShardGraphError(f"{name} failed: {_last_line(error)}{hint}") from error


def _last_line(error: Exception) -> str:
    """The error and the line that raised it, of what is not installed if there is one."""
    *_, frame = sorted(
        traceback.extract_tb(error.__traceback__)[1:] or traceback.extract_tb(error.__traceback__),
        key=lambda frame: "site-packages" not in frame.filename and not frame.filename.startswith("<frozen"),
    )
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__
