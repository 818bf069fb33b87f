"""Tracing a module into its joint graph."""

from __future__ import annotations

import ast
import builtins
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch._dynamo as dynamo
from torch import fx, nn
from torch._dynamo import output_graph, symbolic_convert, trace_rules
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.source import Source
from torch._dynamo.utils import get_metrics_context
from torch._dynamo.variables import UserFunctionVariable, torch_function, user_defined
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._export.utils import _compiling_state_context
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import tracing
from torch.distributions import constraints, kl

from shardgraph.torch_api import derivatives
from shardgraph.torch_api.decisions import users_line
from shardgraph.torch_api.guarded_layers import Repeated, unequal
from shardgraph.torch_api.guards import GUARD_HOOKS, Guards
from shardgraph.torch_api.stored_guards import guards_data


def _ignorable_calls() -> set[Callable[..., Any]]:
    # A log call in a forward is no reason not to compile it. Libraries add methods to Logger (warning_once).
    methods = {value for name, value in vars(logging.Logger).items() if callable(value) and not name.startswith("_")}
    return methods | {logging.debug, logging.info, logging.warning, logging.error, warnings.warn}


def _distributions() -> AbstractContextManager[Any]:
    """Inside, ``torch.distributions`` are traced, with their checks of values among those of the graph.

    The tracer leaves the function to Python, and ends at it, by which they ask for the class of a constraint. The
    formula for the divergence of two classes it can only look up among those that have been searched for.
    """
    for pair in kl._KL_REGISTRY:
        if pair not in kl._KL_MEMOIZE:
            kl._KL_MEMOIZE[pair] = kl._dispatch_kl(*pair)
    return patch.dict(trace_rules.get_torch_obj_rule_map(), {constraints.is_dependent: UserFunctionVariable})


def _no_names_for_logs() -> AbstractContextManager[Any]:
    """Inside, the tracer's log of calls is without names of functions, for which it would parse each file of the model
    whether the log is written or not."""
    written = symbolic_convert.trace_call_log.isEnabledFor(logging.DEBUG)
    return nullcontext() if written else patch.object(symbolic_convert, "get_funcname", lambda *_: None)


def _no_python_draws() -> AbstractContextManager[Any]:
    """Inside, the tracer ends at a function of ``random``, of which the graph would have one number for all calls."""

    def refuse(*_: Any) -> Any:
        dynamo.exc.unimplemented(
            gb_type="Python draws a random number",
            context="random",
            explanation="it would be a constant of the graph",
            hints=[],
        )

    return patch.object(user_defined, "call_random_fn", refuse)


def _functions_as_called() -> AbstractContextManager[Any]:
    """Inside, the graph has the functions that forward calls, whatever modes are active: these change them where the
    graph is lowered. The tracer of torch 2.11 traces through modes too, so that those would change functions twice."""
    kind: Any = torch_function.SymbolicTorchFunctionState
    begin = kind.__init__
    return patch.object(kind, "__init__", lambda state, _, **options: begin(state, (), **options))


FUNCTION_MODES = "the modes of functions that are active"
"""The name of what forward writes to where it enters a mode, as when it leaves it again."""


def _modes_by_name() -> AbstractContextManager[Any]:
    """Inside, the tracer has a name for the modes of functions: they alone have a source without one."""
    original = output_graph._get_source_debug_name
    return patch.object(
        output_graph,
        "_get_source_debug_name",
        lambda source: FUNCTION_MODES if type(source) is Source else original(source),
    )


class UntrainedWarning(UserWarning):
    """A checkpoint leaves what is inside without gradients."""


def _reentrant_checkpoints() -> AbstractContextManager[Any]:
    """Inside, ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives the gradients that it gives untraced.

    Of this kind autograd sees the arguments alone: if none needs a gradient, nothing inside gets one. The tracer has
    the other kind in its place, and is told here that autograd is off.
    """
    kind: Any = CheckpointHigherOrderVariable
    name = "_call_function" if "_call_function" in vars(kind) else "call_function"  # before torch 2.12
    call = vars(kind)[name]

    def traced(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant")
        other = reentrant is not None and reentrant.as_python_constant() is False
        if other or not torch.is_grad_enabled() or any(getattr(each, "requires_grad", False) for each in args[1:]):
            return call(self, tx, args, kwargs)
        off = GradModeVariable.create(tx, False, initialized=True)
        try:
            result = call(self, tx, args, kwargs)
        finally:
            off.exit(tx)
        text = "none of the inputs needs a gradient, so that nothing inside of the checkpoint is trained; it is with "
        warnings.warn(f"{text}use_reentrant=False\n  at {users_line(tx)}", UntrainedWarning, stacklevel=2)
        return result

    return patch.object(kind, name, traced)


@contextmanager
def _quiet() -> Iterator[None]:
    # An operation that fails is told by the error, and torch 2.11 cannot write the ignored functions into its log of
    # metrics, and prints a traceback at every capture.
    metrics = ["torch._dynamo.metrics_context"] if torch.__version__ < "2.12" else []
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", *metrics)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def as_compiling() -> AbstractContextManager[Any]:
    """Inside, ``torch.compiler.is_compiling()`` as the tracer has it."""
    return _compiling_state_context() if torch.__version__ >= "2.12" else nullcontext()


def as_written() -> AbstractContextManager[Any]:
    """Inside, what ``torch.compile`` made runs as its Python is written: what it compiled is of real tensors, or would
    be of fake ones."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def runs_its_own(module: nn.Module) -> None:
    """Let a copy of what ``torch.compile`` made of a module, attribute by attribute, run the copy's layers."""
    if isinstance(module, dynamo.OptimizedModule):
        module._initialize()


class Trace(NamedTuple):
    """A traced module as one FX graph of torch calls, in which numbers and shapes are constants.

    ``written`` is what its forward writes to and the graph does not, by the tracer's names, such as
    ``L['self'].cache``. ``guards(model)`` are the :class:`Guards` for a model of which the traced one is a copy, or
    with ``repeated`` a copy of fewer layers, and ``guards_data(model, repeated)`` the same as data. ``unequal(model,
    repeated)`` tells what it read of a layer and is another in a layer that was not traced. ``code`` is the Python that
    was traced, ``called`` the functions in the graph, which are not traced through.
    """

    graph: fx.GraphModule
    written: list[str]
    guards: Callable[..., Guards]
    unequal: Callable[[nn.Module, Repeated], str]
    guards_data: Callable[[nn.Module, Repeated], Any]
    code: list[CodeType]
    called: list[Any]


class NothingTracedError(RuntimeError):
    """A forward that computes no tensor that it returns."""


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Trace ``model`` through Python.

    Raises:
        DynamoError: the model's Python cannot be traced in one piece.
        NothingTracedError: there is nothing to trace.
    """
    # Shapes and numbers are constants of a program: a new one is a new program, chosen by its key.
    static = dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        specialize_int=True,
        specialize_float=True,
        rewrite_assert_with_torch_assert=False,  # without the line; see torch_api/decisions.py
        allow_rnn=True,  # their functions are in the graph, which capture writes out
        # Writes are not repeated by the graph's caller, who is told of them.
        replay_side_effects=False,
        side_effect_replay_policy="warn",
        ignore_logger_methods=dynamo.config.ignore_logger_methods | _ignorable_calls(),
        **GUARD_HOOKS,
        **derivatives.SETTINGS,
    )
    with _quiet(), static, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken = _distributions(), _no_python_draws(), _reentrant_checkpoints(), derivatives.leaves_in_forward()
        named = _functions_as_called(), _modes_by_name(), _no_names_for_logs()
        with ExitStack() as inside:
            for taking in (*taken, *named, get_metrics_context(), as_compiling()):
                inside.enter_context(taking)
            captured = fullgraph_capture(model, args, kwargs)
        if captured.backend_input is None:
            raise NothingTracedError("forward returns no tensor that it computes")
        graph = create_fx_graph_from_captured_output(captured, model, args, kwargs)
    # Bytecode packs the inputs and outputs, and may call any builtin. torch 2.11 runs it with the globals of the
    # model's forward alone, and refuses a name that is not among them.
    bytecodes: Any = (graph._dynamo_bytecode_flatten, graph._dynamo_bytecode_unflatten)
    for bytecode in bytecodes:
        bytecode.f_globals = {**vars(builtins), **bytecode.f_globals}
    found = (re.search(r"certain side effects happened.*: (\[.*\])", str(each.message), re.DOTALL) for each in caught)
    written = [name for each in found if each for name in ast.literal_eval(each[1])]
    for each in caught:
        if each.category is UntrainedWarning:
            warnings.warn(each.message, stacklevel=2)
    output = captured.graph_capture_output
    return Trace(
        graph,
        written,
        guards=partial(Guards, output, graph),
        unequal=partial(unequal, output),
        guards_data=partial(guards_data, output),
        code=list(output.traced_code),
        called=_called(graph),
    )


def _called(graph: fx.GraphModule) -> list[Any]:
    """What a graph calls, methods of tensors too; None for a module."""
    called: dict[Any, None] = {}
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op == "call_method":
                called[getattr(torch.Tensor, str(node.target), None)] = None
            elif node.op.startswith("call_"):
                called[node.target if node.op == "call_function" else None] = None
    return list(called)


def export_joint(captured: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower a captured module to its joint forward and backward graph of functional aten operations."""
    with ExitStack() as stack:
        stack.enter_context(tracing(captured.meta["tracing_context"]))
        return aot_export_joint_with_descriptors(stack, captured, args, kwargs)
