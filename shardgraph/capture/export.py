"""Tracing a call of a model, with what it leaves behind on the model, into one joint graph of the tracer's."""

from __future__ import annotations

import linecache
import operator
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from shardgraph import torch_api
from shardgraph.capture.answered import Answered
from shardgraph.capture.canonical import FusedOperators
from shardgraph.capture.decisions import Decisions
from shardgraph.capture.double import as_traced
from shardgraph.capture.first_calls import hook_outputs
from shardgraph.capture.masked_writes import choose_masked
from shardgraph.capture.pytrees import register_types
from shardgraph.capture.refused import AS_A_CHECK
from shardgraph.capture.side_effects import Effects, harmful, merged, side_effects
from shardgraph.capture.stacks import UnequalLayersError
from shardgraph.errors import CaptureError, ShardGraphError
from shardgraph.ir import AttributeResult, Origin
from shardgraph.ir.attributes import STACK_TRACE

PREFIX = "model."
"""Of names in the traced module."""


class Traced(nn.Module):
    """``model(*args, **kwargs)``, or ``loss_fn(model(*args, **kwargs), target)``, as the module that is traced.

    So the loss is part of the graph, and hooks of the model are as those of its submodules. Without a ``target`` among
    the inputs, ``loss_fn`` is called with the output alone. With ``results``, attributes that forward sets, it returns
    the output and a list of their values.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        results: Sequence[AttributeResult] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.results = [(each.path, each.keys) for each in results]
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._output(*args, **kwargs)
        if not self.results:
            return output
        values = []
        for path, keys in self.results:
            value: Any = self.model.get_submodule(path)
            for key in keys:
                value = getattr(value, key)
            values.append(value)
        return output, values

    def _output(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            return self.model(*args, **kwargs)
        if "target" not in kwargs:
            return self.loss_fn(self.model(*args, **kwargs))
        target = kwargs.pop("target")
        return self.loss_fn(self.model(*args, **kwargs), target)


@dataclass(frozen=True)
class Exported:
    """A traced call: ``lowered`` is the tracer's joint graph, ``guards(model)`` its conditions on the model.

    ``canonical`` is the first name in the model of each parameter and buffer, by each of its names in the graph.
    ``repeats``: after the call, the next one is traced alike. ``unequal``: see
    :class:`shardgraph.torch_api.Trace`. ``origin``: what was traced, if forward leaves nothing behind, so that it is
    all there is.
    """

    lowered: Any
    canonical: dict[str, str]
    effects: Effects
    guards: Callable[..., Any]
    repeats: bool
    unequal: Callable[[nn.Module, torch_api.Repeated], str]
    origin: Origin | None


def export(
    private: Callable[[], nn.Module],
    present: Callable[..., None],
    loss_fn: Callable[..., torch.Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    decisions: Decisions,
) -> Exported:
    """Trace a call of the model that ``private()`` makes copies of, and that :func:`present` makes ready to be traced.
    ``decisions`` are asked for values of its inputs.

    Raises:
        CaptureError: its Python cannot be traced into one graph, or it leaves behind what cannot be repeated.
    """
    model = private()
    name = type(model).__name__

    def call(model: nn.Module, either: bool = False) -> Any:
        answered = Answered(decisions.answers, either), decisions.input_values()
        with torch_api.as_compiling(), torch_api.as_written(), FusedOperators(), answered[0], answered[1]:
            return Traced(model, loss_fn)(*args, **kwargs)

    def trace(model: nn.Module, effects: Effects, assigned: Set[str]) -> torch_api.Trace:
        counted = {each.fqn for each in effects.results if each.number}
        present(model, assigned, counted)
        with torch_api.deciding(decisions):
            traced = _trace(Traced(model, loss_fn, effects.results), args, kwargs, model)
        _refuse_flex_attention(name, traced.graph)
        choose_masked(traced.graph)
        inputs = _attributes(traced.graph, model)
        _count_out_of_place(traced.graph, {inputs[name] for name in counted & inputs.keys()})
        for module in model.modules():  # the inputs of its graph are what lowering puts in place of parameters
            torch_api.read_weights(module)
        return traced

    try:
        effects, assigned, read, repeats = Effects(), frozenset[str](), frozenset[str](), True
        if plain := _plain_tensors(model):
            assigned, model = _assigned(plain, partial(call, model), model), private()
        traced = trace(model, effects, assigned)
        if read := assigned & _attributes(traced.graph, model).keys():
            assigned -= read
            traced = trace(model := private(), effects, assigned)
        guards: Callable[..., Any] = traced.guards
        if written := harmful(traced.written):
            called = private()
            effects = side_effects(written, called, partial(call, called))
            if decisions.answers.either:
                called = private()
                effects = merged(effects, side_effects(written, called, partial(call, called, True)), private())
        if effects:
            try:
                traced = trace(model := private(), effects, assigned)
            except torch_api.DynamoError as error:
                raise CaptureError(_counting(effects, _explain(name, error, decisions))) from error
            guards, called = traced.guards, private()
            call(called)  # The same program is valid for the next call, if forward takes the same way then.
            again = trace(called, effects, assigned | {each.fqn for each in effects.results} - read)
            repeats = _lines(again.graph) == _lines(traced.graph)
            if repeats:
                guards = partial(guards, later=again.guards)
        named = _canonical(model)
        origin = (
            None
            if effects or assigned or decisions.conditions
            else Origin(traced.code, traced.called, traced.guards_data)
        )
        try:
            return Exported(_lower(traced.graph, args, kwargs), named, effects, guards, repeats, traced.unequal, origin)
        except (RuntimeError, TypeError) as error:
            if not re.search("not a known type|unhashable type", str(error)):  # torch 2.11 looks it up by its hash
                raise
            # Of what was captured: the model's own Python may choose other kernels.
            with torch.no_grad(), as_traced(), FusedOperators():
                register_types(traced.graph(*args, **kwargs))
            return Exported(_lower(traced.graph, args, kwargs), named, effects, guards, repeats, traced.unequal, origin)
    except torch_api.DynamoError as error:
        raise CaptureError(_explain(name, error, decisions)) from error
    except ShardGraphError:
        raise
    except Exception as error:  # of the tracer's own, of any kind
        if isinstance(error, (SyntaxError, torch_api.NothingTracedError)):  # torch's tracer ends so where all is unused
            raise CaptureError(
                f"forward of {name} returns no tensor that it computes, so that there is no program to make of it: "
                "return what it computes from its inputs, or its loss"
            ) from None
        if stack := getattr(error, "real_stack", None):  # of the user's code, where the tracer itself failed
            said = str(error).partition("\n")[0]
            reads = "fake modes" in said  # as torch's tracer ends at tolist()
            reason = "Python reads values that the graph computes" if reads else f"torch's tracer fails ({said})"
            frames = [(each.filename, each.lineno, each.name, each.line) for each in stack]
            raise CaptureError(_told(name, reason, frames[-1:], _known(f"{reason} {frames}"))) from error
        if "Encountered a set_ on a graph input" in str(error):
            raise CaptureError(
                f"forward of {name} replaces the data of a parameter or buffer (tensor.data = ...), which no graph "
                "can: write parameters after optimizer.step(), in place, in a method of the model; assign or write "
                "buffers, as in self.buffer = value"
            ) from error
        raise CaptureError(
            f"{name} was traced, but its forward and backward cannot be made into one graph: {error}"
        ) from error


def _refuse_flex_attention(name: str, gm: fx.GraphModule) -> None:
    """Raise CaptureError where a graph has the operator of ``flex_attention``, which holds its mask as a graph."""
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "flex_attention":
            at = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.+)', STACK_TRACE.get(node) or "")
            own = [frame for frame in at if not frame[0].startswith(_TORCH) and frame[0] != __file__]
            raise CaptureError(_told(name, "no plan can shard flex_attention", own[-1:], _known("flex_attention")))


def _counting(effects: Effects, explained: str) -> str:
    """The message about a model that cannot be traced with the numbers that it counts as inputs, if it counts any."""
    for each in effects.results:
        if each.number:
            return (
                f"forward writes to the attribute {each.fqn!r} of the model{each.source}: it counts, and its Python "
                "needs the number, so that every call would be another program. Give forward the number as an input, "
                f"or keep it in a buffer and compute with torch.where\n{explained}"
            )
    return explained


def _canonical(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {PREFIX + name: first.setdefault(id(tensor), name) for name, tensor in named}


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain tensor attributes of all modules, by name."""
    modules = model.named_modules()
    held = ((path, key, value) for path, module in modules for key, value in vars(module).items())
    return {f"{path}.{key}".lstrip("."): value for path, key, value in held if isinstance(value, torch.Tensor)}


def _assigned(before: dict[str, torch.Tensor], call: Callable[[], Any], model: nn.Module) -> frozenset[str]:
    """Those of the plain tensor attributes of ``model`` that a call replaces."""
    try:
        call()
    except Exception:  # of the model's own, which tracing tells
        return frozenset()
    after = _plain_tensors(model)
    return frozenset(name for name, tensor in before.items() if after.get(name) is not tensor)


def _attributes(gm: fx.GraphModule, model: nn.Module) -> dict[str, fx.Node]:
    """The inputs of a traced graph that are tensors of the model, by their first name."""
    named, modules = {}, dict(model.named_modules(remove_duplicate=False))
    first = {module: path for path, module in model.named_modules()}
    for node in gm.graph.nodes:
        if source := getattr(node, "_dynamo_source", None):
            name = re.sub(r"(?:\.__dict__)?(?:\['_\w+'\]|\._modules|\._buffers)\['(\w+)'\]", r".\1", source.name)
            prefix, _, name = name.partition(PREFIX)
            path, _, key = name.rpartition(".")
            if prefix == "L['self']." and path in modules:
                named[f"{first[modules[path]]}.{key}".lstrip(".")] = node
    return named


_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
}


def _count_out_of_place(gm: fx.GraphModule, numbers: set[fx.Node]) -> None:
    """``self.count += 1`` gives a number another value, where a tensor in its place would be written."""
    for node in gm.graph.nodes:
        if node.all_input_nodes and numbers.issuperset(node.all_input_nodes):
            numbers.add(node)
            node.target = _OUT_OF_PLACE.get(node.target, node.target)
    if numbers:
        gm.recompile()


def _lines(gm: fx.GraphModule) -> list[str]:
    """A traced graph as text. Inputs have the order and the names with which the tracer came upon them."""
    return sorted(re.sub(r"_dict_(?=parameters|buffers|modules)", "_", str(gm.graph)).splitlines())


def _trace(traced: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> torch_api.Trace:
    try:
        return torch_api.trace(traced, args, kwargs)
    except torch_api.DynamoError as error:
        if "maybe_install_capturing_hooks" not in str(error):
            raise
    hook_outputs(model)
    return torch_api.trace(traced, args, kwargs)


def _lower(captured: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with as_traced(), FusedOperators(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To copy construct from a tensor")  # the tracer's own calls
        return torch_api.export_joint(captured, args, kwargs)


def _has_other_experts(frames: Iterable[Sequence[Any]]) -> bool:
    """Whether the code is of a model of transformers that has its experts in one graph too."""
    return any("use_experts_implementation" in "".join(linecache.getlines(str(file))) for file, *_ in frames)


def run_as_traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a model with the functions that its graph has, and the answers that its Python gets when traced."""
    state = random.getstate()
    try:
        with torch_api.as_compiling(), torch_api.as_written(), as_traced(), FusedOperators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model(*args, **kwargs)
    except Exception as error:  # of the model's own: tracing tells it
        raise UnequalLayersError(str(error)) from error
    finally:
        random.setstate(state)


def _explain(name: str, error: torch_api.DynamoError, decisions: Decisions) -> str:
    """Dynamo's long message, reordered: the user's line first, then the reason and the remedies."""
    message, stack = str(error), getattr(error, "real_stack", None) or ()
    frames: list[Sequence[Any]] = [(at.filename, at.lineno, at.name, at.line) for at in stack] or re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.+)', message.partition("from user code:")[2]
    )
    # A ``finally`` on the way is where torch's tracer says that it was raised.
    frames = [frame for frame in decisions.raised_at(message) or frames if frame[0] != __file__]
    last = ([frame for frame in frames if not frame[0].startswith(_TORCH)] or frames)[-1:]
    own = re.search(r"context: raised exception (.+)|: got (\w+\(.+\))", message)
    raised = own and (own[1] or own[2])
    if unknown := re.search("Failed to find name `(.+)` in", message):
        raised = f"NameError(\"name '{unknown[1]}' is not defined\")"
    if raised:
        remedies = "".join(f"\n  {remedy}" for remedy in _known(f"{raised} {frames}"))
        return (
            f"forward of {name} raises {raised} for inputs like these{_at(last)}\n"
            f"  if a call of the model itself does not raise it, torch's tracer is at fault{remedies}"
        )
    reason, hints = message.partition("\n")[0].strip(), re.findall(r"Hint: (.+)", message)[:3]
    reason = reason.removeprefix("Consider annotating your code using torch._check*(). ")
    known = _known(f"{reason} {frames}")
    if not known and (called := _CALLS.search(message)):
        called_name = ".".join(filter(None, called.groups()))
        return _told(name, f"forward calls {called_name}, which is no operation of torch", last, [_NO_OPERATION], _ONCE)
    branches = re.search("Data-dependent|data-dependent expression", reason) and decisions.remedy
    return _told(name, reason, last, known or ([decisions.remedy] if branches else hints))


def _known(text: str) -> list[str]:
    """What to do about a reason and the lines that led to it."""
    return [remedy for found, remedy in _REMEDIES.items() if re.search(found, text)]


def _at(frames: Iterable[Sequence[Any]]) -> str:
    """Lines of code, of a file, a number, a function and a text each."""
    return "".join("\n  at {}:{}, in {}:  {}".format(*frame) for frame in frames).rstrip()


_TORCH = os.path.dirname(torch.__file__) + os.sep
_CALLS = re.compile(
    r"Explanation: .*?(?:builtin (?:operator )?`([\w.]+?)\.?`|that the function `(\w+)` in file|"
    r"trace method `(\w+)` of class)"
)
"""What torch's tracer says of a function that it does not follow."""
_NO_OPERATION = (
    "leave it out of forward: what prints, writes or measures can be a forward hook of the compiled module, which has "
    "its inputs and outputs; what else it returns, give forward as an input"
)
_REMEDIES = {
    r"Python draws|\brandom\.\w+\(": "numbers of Python's generator would be constants of the program: draw with "
    "torch, and compare the tensor itself, as in `if torch.rand(()) < ratio:`, of which both ways are computed and one "
    "is chosen at each call",
    r"Dynamic shape operator.*ctc_loss": "lengths of ctc_loss are values of tensors: return the log-probabilities from "
    "forward, and compute F.ctc_loss of them outside",
    r"data-dependent expression.*modules/batchnorm\.py": "a batch norm with momentum=None averages over all calls, and "
    "their number is the value of a buffer: give it a momentum; update_bn of torch.optim.swa_utils, which takes it "
    "away for a while, is called with sharded.original",
    r"data-dependent expression.*torch\._(assert|check)": AS_A_CHECK,
    "mutate tensor data attribute": "a graph does not see a write to tensor.data: write y = 2 * y, or in place, as in "
    "y.mul_(2) or y.copy_(other)",
    "checkpoint_sequential": "torch.utils.checkpoint.checkpoint, called for each part, is captured; and recompute= of "
    "shardgraph.compile recomputes layers without it",
    r"pack_\w*sequence|data-dependent.*modules/rnn\.py": "the lengths of a packed sequence are values of a tensor: "
    "give recurrent layers the padded batch, read the output at the last position of each sequence with torch.gather, "
    "and leave padding out of the loss; for a layer in two directions, reverse each sequence within its length with "
    "torch.gather and use two layers",
    "flex_attention|create_block_mask": "masks of flex_attention are Python: give scaled_dot_product_attention a mask "
    "that is computed from the numbers of documents, attn_mask=(document[:, :, None] == document[:, None, :]).tril()",
    "compute_num_masked_span|_compute_mask_indices": "NumPy draws what is masked (SpecAugment), otherwise on each "
    "rank: set apply_spec_augment=False in the config, with which it is captured, and mask features before the call",
}
"""What to do, by what is found in the reason and the lines that led to it."""


_VALUES = "its Python must not depend on the values of tensors"
_ONCE = "its Python runs once, and what calls repeat are its operations on tensors"


def _told(
    name: str, reason: str, frames: Iterable[Sequence[Any]], hints: Iterable[str] = (), rule: str = _VALUES
) -> str:
    """Why a model cannot be captured: the reason, the user's line, the rule, and what to do."""
    where = _at(frames)
    remedies = "".join(f"\n  {hint.strip()}" for hint in hints)
    if "expert" in where:
        remedies += "\n  experts in a loop run for those that were chosen; in shardgraph.nn.MoE they are in one graph"
        if _has_other_experts(frames):
            remedies += ", and in this model with experts_implementation='grouped_mm' or 'batched_mm' in its config"
    return (
        f"{name} cannot be captured as one graph: {reason}{where}\n"
        f"  shardgraph compiles the whole forward: {rule}."
        f"{remedies}"
    )
