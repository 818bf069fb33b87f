"""The model that a command line names, and the inputs of one call of it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
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

    What is printed meanwhile goes to standard error, since standard output is for results.

    Args:
        name: ``package.module:function``, a model type of transformers, or the path of a config in JSON.
        batch, sequence: the size of the inputs that are made up for a model of transformers.
        settings: fields of its config, as ``"name=value"``.

    Raises:
        ShardGraphError: there is no such model, or it cannot be built.
    """
    sizes = transformers_model.Sizes(batch or 1, sequence)
    torch.manual_seed(0)
    with nullcontext() if weights else torch.device("meta"), redirect_stdout(sys.stderr):
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
        raise ShardGraphError(f"{path!r} is no name of a module: {_as_imported(Path(path), attribute)}")
    if not all(each.isidentifier() for each in [*path.split("."), attribute]):
        raise ShardGraphError(f"{name!r} names no function: write it as package.module:function")
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
    except (Exception, SystemExit) as error:
        raise ShardGraphError(f"{path!r} cannot be imported: {_last_line(error)}{_ended(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [each for each in vars(module) if callable(getattr(module, each)) and not each.startswith("_")]
        raise ShardGraphError(f"{path!r} has no function {attribute!r}{nearest(attribute, known)}")
    if isinstance(function, nn.Module):
        raise ShardGraphError(
            f"{name} is a {type(function).__name__} itself: name a function that makes and returns it"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of what is not written in Python
        return function
    required = [
        each.name
        for each in parameters
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
    except SystemExit as error:
        raise ShardGraphError(f"{name} failed: {_last_line(error)}{_ended(error)}") from error
    except Exception as error:
        hint = (
            ""
            if weights
            else ". It was called with torch.device('meta'), since weights are not needed: tensors whose "
            "values it reads it has to make with device='cpu'"
        )
        raise ShardGraphError(f"{name} failed: {_last_line(error)}{hint}") from error


_INSTALLED = (*(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")), "<frozen")


def _as_imported(path: Path, attribute: str) -> str:
    """How to name a function of a file."""
    named, here = path.with_suffix(""), Path.cwd()
    if path.is_absolute() and path.is_relative_to(here):
        named = named.relative_to(here)
    if all(part.isidentifier() for part in named.parts):
        return f"write it as import does, {'.'.join(named.parts)}:{attribute}"
    return f"write it as import does, {named.name}:{attribute}, and start the command in {path.parent}"


def _ended(error: BaseException) -> str:
    """What to do about a file that is a program, and ends as such."""
    if not isinstance(error, SystemExit):
        return ""
    return ', so it ended itself as a script does: put what a script does under `if __name__ == "__main__":`'


def _last_line(error: BaseException) -> str:
    """The error and the line that raised it, of the user's own files if there is one."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = sorted(frames[1:] or frames, key=lambda frame: not frame.filename.startswith(_INSTALLED))
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(each).__name__ for each in value)})"
    return type(value).__name__
