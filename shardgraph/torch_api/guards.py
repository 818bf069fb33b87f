"""What tracing read of a model beside its inputs and tensors, checked before the trace is used again."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import fx, nn
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder
from torch._guards import Guard, GuardsSet, tracing
from torch._logging import trace_structured
from torch.utils._ordered_set import OrderedSet

from shardgraph.torch_api.guarded_layers import Repeated, for_all_layers, ordered_in_all_layers
from shardgraph.torch_api.hook_guards import NoHooks, without_hooks

# Conditions on inputs and modes, which have a key of their own.
_OTHER = {
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "DETERMINISTIC_ALGORITHMS",
    "DUPLICATE_INPUT",
    "GLOBAL_STATE",
    "GRAD_MODE",
    "SHAPE_ENV",
    "TORCH_FUNCTION_STATE",
}
GUARD_HOOKS: dict[str, Any] = {"skip_nnmodule_hook_guards": False}
"""The tracer's option with which hooks of modules are among its guards."""


class Guards:
    """Conditions under which a model would be traced as its private copy was: on attributes, hooks and globals.

    They are the tracer's own guards, for the values that ``model`` has now in place of its copy's. ``captured`` is the
    tracer's result, and ``graph`` the graph made of it. ``later`` makes the guards of the same graph for a model in
    which forward has set attributes. ``repeated`` are layers of ``model`` that others were traced for.
    """

    def __init__(
        self,
        captured: Any,
        graph: fx.GraphModule,
        model: nn.Module,
        later: Callable[[nn.Module], Guards] | None = None,
        repeated: Repeated = (),
    ) -> None:
        self._model, self._later = model, later
        output = copy.copy(captured.output_graph)
        first, *_ = output.local_scope
        self._scope = {**output.local_scope, first: model}
        names = {"L": self._scope, "G": output.global_scope}
        output.local_scope, output.skip_guards_check = self._scope, True
        own = f"L['{first}']"
        hooks, others = without_hooks(output.guards, own, model, repeated)
        guards = for_all_layers(others, own, repeated)
        output.guard_on_key_order = ordered_in_all_layers(output.guard_on_key_order, own, repeated)
        output._guards = GuardsSet(OrderedSet(conditions(guards, own, names)))
        self._make(output, captured.bytecode, graph.meta["tracing_context"], NoHooks(model, hooks))

    def _make(self, output: Any, code: CodeType, context: Any, hooks: NoHooks) -> None:
        self._hooks = hooks
        # A trace that nobody has asked for ends with its first record, which would be all guards, written out.
        trace_structured("artifact", lambda: {"name": "shardgraph_guards", "encoding": "string"}, suppress_context=True)
        with dynamo.config.patch(GUARD_HOOKS), tracing(context):
            self._manager: Any = CheckFunctionManager(code, output).guard_manager

    def follow(self) -> None:
        """After a call: if it has set attributes that forward reads, hold for what it has set them to."""
        if self._later is not None and not self.hold:
            later, self._later = self._later(self._model), None
            self._manager, self._scope, self._hooks = later._manager, later._scope, later._hooks

    @property
    def hold(self) -> bool:
        """Whether all values are as they were."""
        return self._hooks.hold and bool(self._manager.check(self._scope))

    @property
    def failing(self) -> str:
        """The first condition that does not hold, such as ``model.dropout.p == 0.1``; empty if all do."""
        if self.hold:
            return ""
        if condition := self._hooks.failing:
            return condition
        parts = self._manager.check_verbose(self._scope).verbose_code_parts
        condition = parts[0].partition("  #")[0].strip() if parts else "an object that forward used is gone"
        # Addresses mean nothing to a reader, and differ between ranks.
        condition = re.sub(r"___check_obj_id\((.*), \d+\)(, type=.*)?", r"\1 is the same object", condition)
        condition = re.sub(r"___check_type_id\((.*), \d+\), type=<class '(.*)'>", r"type(\1) is \2", condition)
        return re.sub(r"\._modules\['(\w+)'\]", r".\1", condition).replace("L['self'].model", "model")


def conditions(guards: Iterable[Guard], own: str, names: dict[str, Any]) -> Iterator[Guard]:
    """The guards that are about the model, called ``own``, or a global, and about what the model itself has.

    Some are only about its copy, such as hooks that cast or constrain.
    """
    for guard in guards:
        name, kind = guard.name, guard.create_fn_name()
        if kind in _OTHER or (name and own not in name and "G[" not in name):
            continue
        try:
            value = eval(name or "None", {}, names)
        except (AttributeError, KeyError, IndexError, TypeError):  # TypeError: None is asked, such as for a closure
            if kind != "HASATTR":  # in torch 2.11 of what is not there, by its name
                continue
            value = None
        except NameError:  # in the tracer's own notation
            value = None
        source = guard.originating_source
        if kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS") and not _holds(guard.create_fn, kind, value):
            continue  # of a plain attribute, which the copy has among its buffers
        if kind == "NOT_PRESENT_IN_GENERIC_DICT" and "_compiled_call_impl" in _arguments(guard.create_fn):
            continue  # what replaces a module's call computes the same
        if kind != "TENSOR_MATCH":
            yield source.make_guard(guard.create_fn)  # its own remembers what it was made for
        # A parameter or buffer is an input of the graph, and any other tensor a constant in it.
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not _of_buffer(name):
            yield source.make_guard(GuardBuilder.ID_MATCH)


def _of_buffer(name: str) -> bool:
    """Whether the tracer's name is that of a buffer."""
    return "._buffers[" in name or "['_buffers'][" in name


def _holds(create: Any, kind: str, contained: Any) -> bool:
    """Whether a guard of what a dictionary contains holds."""
    arguments = {"key": next(iter(create.args), None), "invert": kind == "DICT_NOT_CONTAINS", **create.keywords}
    return (arguments["key"] in contained) != arguments["invert"]


def _arguments(create: Any) -> tuple[Any, ...]:
    """What a guard is made with, beside its value."""
    return *getattr(create, "args", ()), *getattr(create, "keywords", {}).values()
