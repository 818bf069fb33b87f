"""Tracing a module into its joint graph."""

from __future__ import annotations

import ast
import builtins
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import tracing


def _ignorable_calls() -> set[Callable[..., Any]]:
    # A log call in a forward is no reason not to compile it. Libraries add methods to Logger (warning_once).
    methods = {value for name, value in vars(logging.Logger).items() if callable(value) and not name.startswith("_")}
    return methods | {logging.debug, logging.info, logging.warning, logging.error, warnings.warn}


@contextmanager
def _quiet_metrics() -> Iterator[None]:
    # torch 2.11 cannot write the ignored functions into its log of metrics, and prints a traceback at every capture.
    logger = logging.getLogger("torch._dynamo.metrics_context")
    before = logger.disabled
    logger.disabled = before or torch.__version__ < "2.12"
    try:
        yield
    finally:
        logger.disabled = before


def dynamo_capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[str]]:
    """Trace ``model`` through Python into one FX graph of torch calls; and what its forward writes to, by the tracer's
    names, such as ``L['self'].cache``, which the graph does not.

    Raises:
        DynamoError: the model's Python cannot be traced in one piece.
    """
    # Shapes and numbers are constants of a program: a new one is a new program, chosen by its key.
    static = dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        specialize_int=True,
        specialize_float=True,
        ignore_logger_methods=dynamo.config.ignore_logger_methods | _ignorable_calls(),
    )
    with _quiet_metrics(), static, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = dynamo_graph_capture_for_export(model)(*args, **kwargs)
    # Bytecode packs the inputs and outputs, and may call any builtin. torch 2.11 runs it with the globals of the
    # model's forward alone, and refuses a name that is not among them.
    bytecodes: Any = (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten)
    for bytecode in bytecodes:
        bytecode.f_globals = {**vars(builtins), **bytecode.f_globals}
    found = (re.search(r"certain side effects happened.*: (\[.*\])", str(each.message), re.DOTALL) for each in caught)
    return captured, [name for each in found if each for name in ast.literal_eval(each[1])]


def export_joint(captured: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower a captured module to its joint forward and backward graph of functional aten operations."""
    with ExitStack() as stack:
        stack.enter_context(tracing(captured.meta["tracing_context"]))
        return aot_export_joint_with_descriptors(stack, captured, args, kwargs)
