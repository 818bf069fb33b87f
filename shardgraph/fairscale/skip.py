"""FairScale's skip connections between layers of a sequence: here values of one forward, like any other.

In FairScale a layer's ``forward`` is a generator that yields commands, which the pipeline carries out. A program sends
what skips stages by itself, so the commands are carried out where they stand: the decorator writes ``forward`` anew
with ``yield command`` as a call, and a :class:`shardgraph.fairscale.Pipe` hands the tensors that are set aside from
layer to layer.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn

from shardgraph.arguments import NAME, TENSOR, Kind, checked, instance
from shardgraph.errors import ShardGraphError

_HANDLE, _MAKE = "__carry_out", "__make"
_default = threading.local()


_NAMES = Kind(
    "names of tensors, such as ['1to3']",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str) and all(map(NAME.fits, value)),
)


def _check_name(command: str, name: str) -> None:
    """Called while a model is traced, which follows no more than this."""
    if not isinstance(name, str):
        NAME.check(f"{command}(): name", name)


class Namespace:
    """Keeps tensors apart that layers set aside under the same name."""


class stash:
    """The command ``yield stash(name, tensor)``: set a tensor, or None, aside for a later layer."""

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        _check_name("stash", name)
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            TENSOR.check("stash(): tensor", tensor, ", or None")
        self.name, self.tensor = name, tensor


class pop:
    """The command ``tensor = yield pop(name)``: take what an earlier layer has set aside."""

    def __init__(self, name: str) -> None:
        _check_name("pop", name)
        self.name = name


class Skippable(nn.Module):
    """A layer that sets tensors aside or takes them; :func:`skippable` makes such classes."""

    stashes: tuple[str, ...]
    pops: tuple[str, ...]
    _written: Callable[..., Any]
    _keys: dict[str, str]

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put the names of this layer, or ``only`` some, into a namespace; returns the layer.

        Raises:
            ShardGraphError: the layer has none of the names.
        """
        names = {*self.stashes, *self.pops}
        for name in names if only is None else only:
            if name not in names:
                raise ShardGraphError(f"{type(self).__name__} neither sets {name!r} aside nor takes it")
            self._keys = {**self.keys(), name: f"{name} of {id(ns)}"}
            self._namespaces = [*getattr(self, "_namespaces", []), ns]  # so that its id stays its own
        return self

    def keys(self) -> dict[str, str]:
        """By name, the key under which the tensor is set aside."""
        return {**{name: name for name in (*self.stashes, *self.pops)}, **getattr(self, "_keys", {})}

    def forward(self, input: Any, aside: dict[str, torch.Tensor | None] | None = None) -> Any:
        """The layer's own forward, with what is set ``aside``; without a Pipe that is kept for the thread."""
        held = vars(_default).setdefault("aside", {}) if aside is None else aside
        keys = self.keys()

        def carry_out(command: stash | pop) -> torch.Tensor | None:
            known = self.stashes if isinstance(command, stash) else self.pops
            if command.name not in known:
                raise ShardGraphError(
                    f"{type(self).__name__} does not declare {command.name!r}: name it in @skippable(stash=, pop=)"
                )
            if isinstance(command, stash):
                held[keys[command.name]] = command.tensor
                return None
            return held.pop(keys[command.name])

        return self._written(input, carry_out)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare what a layer sets aside and takes; its ``forward(self, input)`` yields :class:`stash` and :class:`pop`::

        @skippable(pop=["1to3"])
        class Layer3(nn.Module):
            def forward(self, input):
                skip = yield pop("1to3")
                return F.relu(input) + skip

    Raises:
        ShardGraphError: the source of ``forward`` is not there, or it has decorators.
    """

    stashes, pops = (
        _NAMES.check(f"skippable(): {which}", tuple(names) if isinstance(names, Iterator) else names)
        for which, names in (("stash", stash), ("pop", pop))
    )

    def extended(layer: type[nn.Module]) -> type[Skippable]:
        names = {"stashes": tuple(stashes), "pops": tuple(pops), "_written": _without_yields(layer)}
        names |= {"__module__": layer.__module__, "__qualname__": layer.__qualname__, "__doc__": layer.__doc__}
        return type(layer.__name__, (Skippable, layer), names)

    return extended


@checked(module=instance("an nn.Sequential", nn.Sequential))
def verify_skippables(module: nn.Sequential) -> None:
    """Check that each tensor is set aside once, and taken once by a later layer.

    Raises:
        TypeError: with a line for each that is not.
    """
    if wrong := list(_mismatches(module)):
        raise TypeError("what layers set aside and take does not match:\n" + "\n".join(f"* {line}" for line in wrong))


class SkipSequential(nn.Sequential):
    """A sequence in which what layers set aside is a value of its forward."""

    def forward(self, input: Any) -> Any:
        """The output of the last layer."""
        aside: dict[str, torch.Tensor | None] = {}
        for layer in self:
            input = layer(input, aside) if isinstance(layer, Skippable) else layer(input)
        return input


def _mismatches(module: nn.Sequential) -> Iterator[str]:
    waiting: dict[str, str] = {}
    for place, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        keys = layer.keys()
        for name in layer.pops:
            if name in layer.stashes:
                yield f"layer {place} both sets {name!r} aside and takes it"
            elif waiting.pop(keys[name], None) is None:
                yield f"layer {place} takes {name!r}, which no layer before it has set aside for it"
        for name in layer.stashes:
            if keys[name] in waiting:
                yield f"layer {place} sets {name!r} aside, as one before it does: isolate them in namespaces"
            elif name not in layer.pops:
                waiting[keys[name]] = f"no layer takes {name!r}, which layer {place} sets aside"
    yield from waiting.values()


class _Calls(ast.NodeTransformer):
    """``yield command`` as a call; functions inside of the function keep their own."""

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        if node.value is None:
            raise ShardGraphError(
                f"line {node.lineno} of a skippable forward yields nothing: yield stash(...) or pop(...)"
            )
        return ast.copy_location(ast.Call(ast.Name(_HANDLE, ast.Load()), [self.visit(node.value)], []), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node


def _without_yields(layer: type[nn.Module]) -> Callable[..., Any]:
    """``forward`` of a class as a function of the input and of what carries commands out."""
    forward = layer.forward
    where = f"forward of {layer.__name__}"
    try:
        lines, first = inspect.getsourcelines(forward)
    except (OSError, TypeError) as error:
        raise ShardGraphError(f"{where} is written anew, and its source is not there: {error}") from error
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or len(function.args.args) != 2:
        raise ShardGraphError(f"{where} is to be a function of self and input, without decorators")
    function.body = [_Calls().visit(statement) for statement in function.body]
    function.args.args.append(ast.arg(_HANDLE))
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    # Names of the scope around the class, __class__ among them, are those of a function around the new one.
    closed = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    around = ast.parse(f"def {_MAKE}({', '.join(closed)}):\n    return None").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [function, ast.Return(ast.Name(function.name, ast.Load()))]
    tree = ast.increment_lineno(ast.fix_missing_locations(ast.Module([around], [])), first - 1)
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getsourcefile(forward) or "<skippable>", "exec"), forward.__globals__, made)
    written: Callable[..., Any] = made[_MAKE](*(cell.cell_contents for cell in closed.values()))
    return written
