"""Conditions on a model as data: what the tracer's guards look at, and how, without the values that they found.

The values are those of a model for which the guards are made again, once it is known to be what was traced.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import re
import sys
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

import torch._dynamo.source as sources
from torch import nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._guards import Guard, GuardsSet, Source, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

from shardgraph.torch_api.guarded_layers import Repeated, for_all_layers, ordered_in_all_layers
from shardgraph.torch_api.guards import Guards, conditions
from shardgraph.torch_api.hook_guards import NoHooks, without_hooks

_PLAIN = (type(None), bool, int, str)
_LIBRARIES = frozenset(("torch", "transformers", "shardgraph"))

_PUT = re.compile(r"\w*_\d+_c\w+")
"""Names under which the tracer puts values into forward's globals, with addresses, which only its process knows."""


class NotStored(Exception):
    """A guard that cannot be written down, or cannot be made again."""


def guards_data(captured: Any, model: nn.Module, repeated: Repeated = ()) -> Any:
    """The conditions of a trace on ``model``, as data for JSON: those of :class:`.Guards` with the same ``repeated``.

    Raises:
        NotStored: one is of a kind that cannot be written down.
    """
    output = captured.output_graph
    first, *_ = output.local_scope
    names = {"L": {**output.local_scope, first: model}, "G": output.global_scope}
    table: dict[Source, int] = {}
    rows: list[Any] = []
    builtins_name, imports = output.name_of_builtins_dict_key_in_fglobals, dict(output.import_sources)
    put = {name: value for name, value in output.global_scope.items() if _PUT.fullmatch(name)}
    imports |= {name: value.__name__ for name, value in put.items() if isinstance(value, ModuleType)}
    scope = _scope(imports, builtins_name, model)

    def number(source: Source) -> int:
        if source in table:
            return table[source]
        kind = type(source)
        if getattr(sources, kind.__name__, None) is not kind:
            raise NotStored(f"a guard of {source.name}")
        if isinstance(source, sources.GlobalSource):
            name = source.global_name
            if name not in scope or name in put.keys() - imports.keys():
                raise NotStored(f"a guard of the global {name}")
        row = [kind.__name__]
        for field in dataclasses.fields(source):
            if field.init:
                row.append(_field(getattr(source, field.name), number))
        rows.append(row)
        return table.setdefault(source, len(rows) - 1)

    def written(guard: Guard) -> Any:
        create: Any = guard.create_fn
        arguments: list[Any] = []
        if isinstance(create, functools.partial):
            positional, keywords = create.args, create.keywords
            create = create.func
            arguments = [[_field(each, number) for each in positional], [*keywords], [*map(_plain, keywords.values())]]
        name: str = getattr(create, "__name__", "")
        if create is None or getattr(GuardBuilder, name, None) is not create:
            raise NotStored(f"a guard by {name}")
        return [name, number(guard.originating_source), *arguments]

    own = f"L['{first}']"
    hooks, others = without_hooks(output.guards, own, model, repeated)
    made = [written(guard) for guard in conditions(for_all_layers(others, own, repeated), own, names)]
    in_order = ordered_in_all_layers(output.guard_on_key_order, own, repeated)
    ordered = sorted(number(source) for source in in_order if source in table)
    return {
        "self": first,
        "names": [*output.local_scope],
        "imports": imports,
        "builtins": builtins_name,
        "sources": rows,
        "guards": made,
        "hooks": hooks,
        "ordered": ordered,
    }


def _field(value: Any, number: Any) -> Any:
    return ["source", number(value)] if isinstance(value, Source) else _plain(value)


def _plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise NotStored(f"a guard with a {type(value).__name__}")
    return value


def known_module(name: str) -> ModuleType:
    """A module that is loaded, or part of a library that is.

    Raises:
        NotStored: it is neither; a file names it, which is no reason to run it.
    """
    root = name.split(".")[0]
    if name not in sys.modules and root in _LIBRARIES and root in sys.modules:
        with suppress(ImportError):
            importlib.import_module(name)
    if name not in sys.modules:
        raise NotStored(f"the module {name} is not loaded")
    return sys.modules[name]


def _scope(imports: dict[str, str], builtins_name: str | None, model: nn.Module) -> dict[str, Any]:
    """The globals that guards name: modules, builtins, and those of the traced forward."""
    forward: Any = type(model).forward
    scope: dict[str, Any] = {**forward.__globals__}
    scope |= {alias: known_module(name) for alias, name in imports.items()}
    if builtins_name is not None:
        scope[builtins_name] = vars(builtins)
    return scope


class StoredGuards(Guards):
    """The guards that :func:`guards_data` wrote, for ``model``, a module as the traced one was.

    Raises:
        NotStored: they cannot be made here.
    """

    def __init__(self, data: Any, model: nn.Module) -> None:
        self._model, self._later = model, None
        try:
            self._scope = {name: None for name in data["names"]} | {data["self"]: model}
            made: list[Source] = []
            for kind, *fields in data["sources"]:
                made.append(_source_kind(kind)(*(made[f[1]] if type(f) is list else f for f in fields)))
            guards = [self._guard(made, *row) for row in data["guards"]]
            state = OutputGraphGuardsState(
                local_scope=self._scope,
                global_scope=_scope(data["imports"], data["builtins"], model),
                torch_function_mode_stack=[],
                guard_on_key_order={made[number] for number in data["ordered"]},
                input_source_to_sizes_strides={},
                dual_level=0,
                functorch_layers=[],
                current_device=None,
                global_state_guard=None,  # type: ignore[arg-type]  # of conditions that are not among these
                _guards=GuardsSet(OrderedSet(guards)),
                _aotautograd_guards=[],
                skip_guards_check=True,
                name_of_builtins_dict_key_in_fglobals=data["builtins"],
            )
            code: CodeType = type(model).forward.__code__
            output, context = OutputGraphCommon(state, data["imports"]), TracingContext(FakeTensorMode())
            self._make(output, code, context, NoHooks(model, data["hooks"]))
        except Exception as error:  # the tracer's own, of many kinds
            raise NotStored(f"{type(error).__name__}: {error}") from error
        self._data = data
        if not self.hold:
            raise NotStored(f"a guard does not hold: {self.failing}")

    def of(self, model: nn.Module) -> StoredGuards:
        """The same guards for another model."""
        return StoredGuards(self._data, model)

    @staticmethod
    def _guard(
        made: list[Source], kind: str, source: int, positional: Any = (), keys: Any = (), values: Any = ()
    ) -> Any:
        create: Any = vars(GuardBuilder)[kind]
        if positional or keys:
            create = functools.partial(create, *positional, **dict(zip(keys, values, strict=True)))
        return made[source].make_guard(create)


def _source_kind(name: str) -> Any:
    kind = getattr(sources, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Source)):
        raise NotStored(f"a source of kind {name}")
    return kind
