"""Where a model's Python asks for the values of tensors while it is traced: branches, numbers and lists.

torch's tracer ends at a branch on a tensor. Within :func:`deciding` a branch that can only raise is a check in the
graph, and for all other values a :class:`Decider` is asked first.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo import exc, symbolic_convert
from torch._dynamo.variables import TensorVariable, builder, tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from shardgraph.torch_api.both_ways import UnequalWaysError, take_both
from shardgraph.torch_api.known_shapes import tell_shapes
from shardgraph.torch_api.repeated_arguments import allow_repeated_arguments
from shardgraph.torch_api.tracer_mends import mend_tracer

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Decider(Protocol):
    """What answers for values of tensors."""

    raised: dict[Any, tuple[str, list[tuple[str, int, str, str]]]]
    """The exceptions of the traced code, each with what it says and the lines that led to it, the innermost last."""

    def value(self, node: fx.Node, line: str) -> Any:
        """The value of a node of the graph so far, as ``tolist`` gives it, that Python asks for at this ``line``; None
        if nothing is known of it."""

    def size(self, node: fx.Node, line: str) -> Any:
        """The number that a node gives, on which a shape depends at this ``line``; None if it is not known."""

    def checked(self, line: str, value: bool) -> None:
        """A branch at this ``line``, which raises otherwise, is captured as if its condition were this ``value``."""

    def both(self, node: fx.Node, line: str) -> bool:
        """Both ways of a branch on a value at this ``line`` are computed, and one of them chosen, if that can be;
        whether either may be taken whatever values there are."""

    def unequal(self, line: str) -> None:
        """Both ways of the branch at this ``line`` leave behind what cannot be chosen between."""

    def same(self, one: fx.Node, other: fx.Node, line: str) -> bool | None:
        """Whether two inputs of the graph are one tensor, as Python asks at this ``line``; None if they are no inputs
        of the call."""

    def assumed(self, line: str) -> bool | None:
        """Whether a branch at this ``line`` is to be captured as if its condition were true or false, and checked."""


_decider: ContextVar[Decider | None] = ContextVar("decider", default=None)
_caught: ContextVar[list[BaseException]] = ContextVar("caught")
"""The exceptions of traced code that the tracer has caught, while there is a decider."""


@contextmanager
def deciding(decider: Decider) -> Iterator[None]:
    """Have ``decider`` asked for values while a model is traced inside."""
    _install()
    allow_repeated_arguments()
    mend_tracer()
    token, caught = _decider.set(decider), _caught.set([])
    try:
        yield
        # The tracer's closures keep them in cycles, and they the frames of all callers, with their tensors.
        for each in _caught.get():
            each.__traceback__ = None
    finally:
        _decider.reset(token)
        _caught.reset(caught)


def example_of(placeholder: fx.Node) -> Any:
    """The tensor with which the tracer was given an input of its graph; None if it is no tensor."""
    argument = placeholder.meta.get("grapharg")
    return getattr(argument, "example", None)


def traced_value(node: fx.Node) -> Any:
    """The fake tensor of a node of the tracer's graph, or what else it gives."""
    return node.meta.get("example_value")


@functools.cache
def _install() -> None:
    """Ask at the tracer's own handlers of branches and conversions, which go on as before without an answer."""
    for kind in _subclasses(symbolic_convert.InstructionTranslatorBase):
        for name, code in dis.opmap.items():
            if "JUMP" in name and name.endswith(("IF_TRUE", "IF_FALSE", "IF_TRUE_OR_POP", "IF_FALSE_OR_POP")):
                kind.dispatch_table[code] = _jump(kind.dispatch_table[code], "IF_TRUE" in name, "OR_POP" in name)
        kind.dispatch_table[dis.opmap["UNARY_NOT"]] = _negation(kind.dispatch_table[dis.opmap["UNARY_NOT"]])
        kind.dispatch_table[dis.opmap["IS_OP"]] = _identity(kind.dispatch_table[dis.opmap["IS_OP"]])
    base: Any = symbolic_convert.InstructionTranslatorBase
    base.exception_handler = _noting(base.exception_handler)
    handlers: Any = TensorVariable
    for name, (ask, convert) in _CONVERSIONS.items():
        if original := getattr(handlers, name, None):  # torch 2.11 has fewer of them
            setattr(handlers, name, _conversion(original, ask, convert))
    functions: Any = TorchInGraphFunctionVariable
    functions.call_function = _in_the_graph(functions.call_function)
    modules: tuple[Any, ...] = builder, tensor
    for module in modules:  # of new nodes with a result, and of those that write
        module.get_fake_value = _of_known_shape(module.get_fake_value)


def _in_the_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    """The tracer's handler of torch's functions, for which a check of a tensor is one in the graph, as branches are."""

    @functools.wraps(original)
    def wrapped(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        decider = _decider.get()
        if decider is None or self.value not in (torch._check_tensor_all, torch._check_tensor_all_with):
            return original(self, tx, args, kwargs)
        given = [*args, *kwargs.values()]
        condition = kwargs.get("cond") or given[self.value is torch._check_tensor_all_with]
        _check(tx, condition.realize().call_method(tx, "_is_all_true", [], {}), True)
        return VariableTracker.build(tx, None)

    return wrapped


def _of_known_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """The tracer's function for the fake tensor of a new node, which is told the numbers that its shape depends on."""

    @functools.wraps(original)
    def wrapped(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        decider = _decider.get()
        if decider is not None and "example_value" not in node.meta:
            tell_shapes(node, lambda of: decider.size(of, _line(tx)), traced_value)
        return original(node, tx, *args, **kwargs)

    return wrapped


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    """A handler of the exceptions of traced code that tells the decider first where each was raised."""

    @functools.wraps(original)
    def wrapped(tx: Any, raised: Any) -> None:
        decider = _decider.get()
        if decider is not None:  # of each exception first where it is raised, then also on its way outwards
            _caught.get().append(raised)
            frames, at = [], tx
            while at is not None:
                code, line = at.f_code, at.lineno
                text = linecache.getline(code.co_filename, line).strip()
                frames.append((code.co_filename, line, code.co_name, text))
                at = getattr(at, "parent", None)
            same = tx.exn_vt_stack.get_current_exception()
            decider.raised.setdefault(same, (f"raised exception {same.debug_repr()}", frames[::-1]))
        original(tx, raised)

    return wrapped


def _subclasses(kind: type) -> set[Any]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _known(tx: Any, variable: Any) -> Any:
    """What the decider says of a tensor's value; None if it does not know, or there is none."""
    decider = _decider.get()
    return None if decider is None else decider.value(variable.as_proxy().node, _line(tx))


def _number(tx: Any, variable: Any) -> Any:
    """What the decider says of the one element of a tensor, whatever its shape; None likewise, and for more of them."""
    value = _known(tx, variable)
    while isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    return value


def _line(tx: Any) -> str:
    file, number = tx.f_code.co_filename, tx.lineno
    return f"{file}:{number}, in {tx.f_code.co_name}:  {linecache.getline(file, number).strip()}"


def users_line(tx: Any) -> str:
    """The line that led here outside of torch, whose distributions check their arguments."""
    at = tx
    while at is not None and at.f_code.co_filename.startswith(_TORCH):
        at = getattr(at, "parent", None)
    return _line(at or tx)


def _as_it_is(value: Any) -> Any:
    return value


_Ask = Callable[[Any, Any], Any]
_CONVERSIONS: dict[str, tuple[_Ask, Callable[[Any], Any]]] = {
    "method_item": (_number, _as_it_is),
    "method_tolist": (_known, _as_it_is),
    "bool_impl": (_number, bool),
    "nb_int_impl": (_number, int),
    "nb_index_impl": (_number, int),
    "nb_float_impl": (_number, float),
}


def _conversion(original: Callable[..., Any], ask: _Ask, convert: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = ask(tx, self)
        if value is None:
            return original(self, tx, *args, **kwargs)
        return VariableTracker.build(tx, convert(value))

    return wrapped


def _asked_about(tx: Any) -> Any:
    """The tensor on top of the stack, if there is one and a decider; what others trace is left as it is."""
    if _decider.get() is None:
        return None
    variable = tx.stack[-1].realize()
    return variable if isinstance(variable, TensorVariable) else None


def _negation(original: Callable[..., None]) -> Callable[..., None]:
    def wrapped(tx: Any, instruction: Any) -> None:
        variable = _asked_about(tx)
        value = None if variable is None else _number(tx, variable)
        if value is None:
            original(tx, instruction)
            return
        tx.pop()
        tx.push(VariableTracker.build(tx, not value))

    return wrapped


def _identity(original: Callable[..., None]) -> Callable[..., None]:
    """Of two inputs the tracer knows that they are two."""

    def wrapped(tx: Any, instruction: Any) -> None:
        decider, same = _decider.get(), None
        variables = [] if decider is None else [each.realize() for each in tx.stack[-2:]]
        if decider is not None and all(isinstance(each, TensorVariable) for each in variables):
            nodes = [each.as_proxy().node for each in variables]
            if nodes[0] is not nodes[1] and all(node.op == "placeholder" for node in nodes):
                same = decider.same(nodes[0], nodes[1], _line(tx))
        if same is None:
            original(tx, instruction)
            return
        tx.popn(2)
        tx.push(VariableTracker.build(tx, same != bool(instruction.argval)))

    return wrapped


def _jump(original: Callable[..., None], on_true: bool, keeps: bool) -> Callable[..., None]:
    """A jump on a condition that ``on_true`` jumps if it is true, and then ``keeps`` it on the stack."""

    def wrapped(tx: Any, instruction: Any) -> None:
        variable, decider = _asked_about(tx), _decider.get()
        if variable is None or decider is None:
            original(tx, instruction)
            return
        ways = tx.indexof[instruction.target], tx.indexof[tx.next_instruction]
        jumping, going_on = (_raises(tx.instructions, way) for way in ways)
        if jumping or going_on:
            value: Any = on_true if going_on else not on_true
            decider.checked(_line(tx), value)
            _check(tx, variable, value)
        elif (value := _number(tx, variable)) is None:
            value = decider.assumed(_line(tx))
            if value is None:
                line, place = _line(tx), (tx.f_code, tx.indexof[instruction])
                if keeps or place in _both:  # in a loop, each of whose ways comes by it again
                    original(tx, instruction)
                    return
                always_valid, number = decider.both(variable.as_proxy().node, line), tx.lineno
                unlike = (UnequalWaysError,) if always_valid else _UNEQUAL
                tx.pop()
                _both.append(place)
                try:
                    take_both(tx, variable, instruction, on_true, always_valid)
                except unlike:
                    decider.unequal(line)
                    tx.push(variable)
                    tx.starts_line(number)
                    original(tx, instruction)
                finally:
                    _both.remove(place)
                return
            _check(tx, variable, value)
        tx.pop()
        if bool(value) is on_true:
            if keeps:
                tx.push(variable)
            tx.jump(instruction)

    return wrapped


_both: list[Any] = []
"""The branches of which both ways are being traced, the innermost last."""
_UNEQUAL = (UnequalWaysError, exc.Unsupported, exc.UserError, exc.ObservedException)
"""What a way ends with that cannot be traced, and that might never be taken."""

_ELSEWHERE = ("JUMP", "STORE", "DELETE", "RETURN", "YIELD", "FOR_ITER", "SEND", "IMPORT", "SETUP", "RERAISE")
"""In the names of instructions after which more may happen than the making of an exception."""


def _raises(instructions: Sequence[Any], first: int) -> bool:
    """Whether code from its ``first`` of these instructions on makes an exception, raises it, and does nothing else."""
    for instruction in instructions[first : first + 200]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if any(each in instruction.opname for each in _ELSEWHERE):
            return False
    return False


def passes(frame: FrameType) -> bool | None:
    """The value with which a running frame does not raise that asks whether a tensor is true: by a branch that only
    raises otherwise, or as torch's own check; None if it does not ask so."""
    if frame.f_code is torch._check_tensor_all_with.__code__:
        return True
    instructions = _instructions(frame.f_code)
    at = next((i for i, each in enumerate(instructions) if each.offset == frame.f_lasti), 0)
    at += instructions[at].opname == "TO_BOOL"  # since Python 3.13
    jump = instructions[at]
    if "JUMP" not in jump.opname or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    target = next(i for i, each in enumerate(instructions) if each.offset == jump.argval)
    jumping, going_on = (_raises(instructions, way) for way in (target, at + 1))
    on_true = "IF_TRUE" in jump.opname
    return None if jumping == going_on else on_true if going_on else not on_true


@functools.lru_cache(1024)
def _instructions(code: CodeType) -> Sequence[dis.Instruction]:
    return list(dis.get_instructions(code))


def _check(tx: Any, variable: Any, expected: bool) -> None:
    """Have the graph check that a value is true or not, as is ``expected``."""
    condition = variable.as_proxy()
    if not expected:
        condition = wrap_fx_proxy(
            tx, tx.output.create_proxy("call_function", torch.logical_not, (condition,), {})
        ).as_proxy()
    tx.output.create_proxy("call_function", torch._assert_async, (condition, users_line(tx)), {})
