"""Capture: an unmodified module and example inputs become a :class:`~shardgraph.ir.JointGraph`.

Nothing is computed and no memory is allocated for the model: a private copy of its modules is traced, with fake tensors
for parameters and buffers. The model itself is only read, and may run in other threads meanwhile.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from shardgraph import ir, torch_api
from shardgraph.capture import constraints
from shardgraph.capture.canonical import same_kernels
from shardgraph.capture.casting import casting, check_products, computed_dtypes
from shardgraph.capture.decisions import Decisions
from shardgraph.capture.export import PREFIX, Exported, Traced, export, run_as_traced
from shardgraph.capture.few_layers import from_few_layers
from shardgraph.capture.first_calls import HOOKED, hook_outputs, name_tensors
from shardgraph.capture.lookups import check_lookups
from shardgraph.capture.masks import drop_known_masks
from shardgraph.capture.matrix_checks import check_matrices
from shardgraph.capture.numbers import as_tensor, check_numbers, is_number
from shardgraph.capture.private_copy import private_copy
from shardgraph.capture.record import Record, record
from shardgraph.capture.recurrent import check_recurrent, with_own_weights
from shardgraph.capture.refused import check_arguments, check_effects, check_shapes, check_strides, unsupported
from shardgraph.capture.rewrites import rewritten
from shardgraph.capture.row_numbers import row_numbers
from shardgraph.capture.scaled_products import scale_products
from shardgraph.capture.shortened_rows import take_shortenings
from shardgraph.capture.side_effects import is_constant
from shardgraph.capture.stacks import Stack, UnequalLayersError
from shardgraph.capture.subclasses import check_inputs
from shardgraph.capture.synchronized import check_synchronized, mark_synchronized, of_this_rank
from shardgraph.errors import CaptureError, NoLossError, ShardGraphError
from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, ROLE, SOURCE, STACK_TRACE, forget_unknown
from shardgraph.plans.annotations import constrain
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.torch_api import FakeTensorMode, OutputType, Repeated, pytree

_Result = tuple[ir.Role | None, Any]
_OURS = (Traced.forward.__code__.co_filename, constrain.__file__, constraints.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep


def own_loss(output: Any) -> Any:
    """The loss that a model returns as ``output.loss`` or ``output["loss"]``; ``output`` itself if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else output


def _check_takes_output(loss_fn: Callable[..., torch.Tensor]) -> None:
    """Raise CaptureError if a loss that is given no target needs one."""
    if not takes(loss_fn, 1):
        raise CaptureError(
            f"loss_fn{inspect.signature(loss_fn)} is called with the model's output alone, since the call has no "
            "'target': give it one by name, in example_kwargs={..., 'target': ...}, or a loss_fn that takes nothing "
            "but the output"
        )


def takes(loss_fn: Callable[..., torch.Tensor], values: int) -> bool:
    """Whether a loss may be called with so many values; what has no signature may."""
    with suppress(ValueError):
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(*values * [None])
        except TypeError:
            return False
    return True


def _check_loss(joint: ir.JointGraph) -> None:
    """Raise NoLossError unless the graph's only result is a loss."""
    outputs = [each for each in ir.outputs(joint.module) if isinstance(each[0], ir.Output)]
    values = [value for role, value in outputs if role.index < joint.returned]
    if len(values) != 1 or not isinstance(values[0], fx.Node) or values[0].meta["val"].dim():
        raise NoLossError(
            "train_step needs a loss, which is one number: give shardgraph.compile a loss_fn(output, target) and "
            "train_step a target, or call a model that returns its loss as output.loss with what that takes, such as "
            "labels"
        )


@dataclass(frozen=True)
class Asked:
    """What a model is captured for; see :func:`capture`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    loss_fn: Callable[..., torch.Tensor] | None = None
    annotations: Sequence[Annotated] = ()
    precision: Precision = AS_STORED

    def inputs(self, fake_mode: FakeTensorMode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as fake tensors."""
        return _fake_inputs(fake_mode, self.args, self.kwargs, self.device)

    def dtypes(self, model: nn.Module) -> Any:
        """The dtypes in which parameters of ``model`` are computed with."""
        return computed_dtypes(model, self.precision, self.annotations)

    def casting(self, copied: nn.Module, model: nn.Module) -> Any:
        """The context in which ``copied``, a stand-in of ``model``, computes in the dtypes asked for."""
        return casting(copied, self.precision, self.annotations, stored=model)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    annotations: Sequence[Annotated] = (),
    precision: Precision = AS_STORED,
) -> ir.JointGraph:
    """Trace ``model(*args, **kwargs)``, in its current mode, into a joint graph on ``device``.

    With ``loss_fn`` the graph's output is ``loss_fn(model(*args, **kwargs), target)``, ``target`` being taken from
    ``kwargs``, or ``loss_fn`` of the output alone where they have none. Under ``torch.no_grad()``, or when nothing
    requires a gradient, the graph is the forward alone. Parameters may be of any kind (real, ``meta``, ``DTensor``):
    only names, shapes and dtypes are read. ``annotations`` of outputs and inputs of modules become constraints in the
    graph. Parameters have the dtype of the computation under ``precision``.

    Raises:
        PlanError: an annotation constrains nothing, or a tied parameter would have two dtypes.
        CaptureError: the model's Python cannot be traced into one graph; the message has the user's line. Or a module
            has a backward hook, or is a SyncBatchNorm of a process group of its own.
    """
    _check_modules(model)
    check_inputs(pytree.tree_leaves((args, kwargs)))
    check_arguments(model, args, {k: v for k, v in kwargs.items() if loss_fn is None or k != "target"})
    if loss_fn is not None and "target" not in kwargs:
        _check_takes_output(loss_fn)
    asked = Asked(args, kwargs, device, loss_fn, annotations, precision)
    name_tensors()
    with rewritten(model):
        few = from_few_layers(model, lambda few: _traced(few, asked), lambda few, stacks: _recorded(few, stacks, asked))
        joint = few or _traced(model, asked)[0]
    if precision.products is not None:
        scale_products(joint, annotations)
    joint.stored = {name: parameter.dtype for name, parameter in model.named_parameters()}

    joint.row_numbers = later_rows(joint.rows, model, asked)
    return joint


def _traced(model: nn.Module, asked: Asked) -> tuple[ir.JointGraph, Callable[..., str]]:
    """The joint graph of a model as it is, and what tells which layers were not read alike."""
    fake_mode = FakeTensorMode()
    fake_args, fake_kwargs = asked.inputs(fake_mode)
    dtypes, loss_fn = asked.dtypes(model), asked.loss_fn
    leaves = pytree.tree_leaves((asked.args, asked.kwargs))
    decisions = Decisions(leaves, pytree.tree_leaves((fake_args, fake_kwargs)))
    with ExitStack() as stack:

        def private() -> nn.Module:
            copied = _stand_in(model, fake_mode, asked.device, dtypes)
            stack.enter_context(asked.casting(copied, model))
            stack.enter_context(constraints.constrained(copied, asked.annotations))
            return copied

        stack.enter_context(same_kernels())
        stack.enter_context(fake_mode)
        exported = export(private, partial(present, fake_mode), loss_fn, fake_args, fake_kwargs, decisions)
    gm = exported.lowered.graph_module
    constraints.check_met(gm, asked.annotations)
    _name_modules(gm)
    mark_synchronized(gm, model)
    joint = _joint_graph(exported, fake_mode, leaves)
    joint.conditions = tuple(decisions.conditions)
    drop_known_masks(joint.module)
    joint.guards = partial(_guards, exported, loss_fn)
    if exported.origin and not joint.shortened:  # which are not stored
        joint.origin = replace(exported.origin, guards=partial(_guards_data, exported.origin, loss_fn))
    joint.rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    check_products(joint.module)
    check_lookups(joint.module)
    numbers = {each.fqn for each in joint.results if each.number}
    check_numbers(joint.module, asked.args, asked.kwargs, numbers, joint.returned)
    if loss_fn is not None:
        _check_loss(joint)
    return joint, partial(_unequal, exported, loss_fn)


def _guards(
    exported: Exported, loss_fn: Callable[..., torch.Tensor] | None, model: nn.Module, repeated: Repeated = ()
) -> Any:
    more = {"repeated": _in_traced(repeated)} if repeated else {}
    return exported.guards(Traced(model, loss_fn, exported.effects.results), **more)


def _guards_data(
    origin: ir.Origin, loss_fn: Callable[..., torch.Tensor] | None, model: nn.Module, repeated: Repeated = ()
) -> Any:
    return origin.guards(Traced(model, loss_fn), _in_traced(repeated))


def _unequal(
    exported: Exported, loss_fn: Callable[..., torch.Tensor] | None, model: nn.Module, repeated: Repeated
) -> str:
    return exported.unequal(Traced(model, loss_fn), _in_traced(repeated))


def _in_traced(repeated: Repeated) -> Repeated:
    return [((PREFIX + path).rstrip("."), numbers) for path, numbers in repeated]


def does_alike(model: nn.Module, stack: Stack, asked: Asked) -> bool:
    """Whether a call of the model, and its backward, do the same in all layers of a stack but the first, and leave
    nothing behind but constants."""
    try:
        with rewritten(model):
            recorded = _recorded(model, [stack], asked)
            return recorded.alike(0) and all(map(is_constant, recorded.left.values()))
    except (UnequalLayersError, ShardGraphError):
        return False


def _recorded(model: nn.Module, stacks: Sequence[Stack], asked: Asked, hooked: bool = False) -> Record:
    """What a call of the model does, as it would be traced."""
    fake_mode = FakeTensorMode()
    inputs = asked.inputs(fake_mode)
    copied = _stand_in(model, fake_mode, asked.device, asked.dtypes(model))
    if hooked:
        hook_outputs(copied)
    with ExitStack() as stack:
        stack.enter_context(asked.casting(copied, model))
        stack.enter_context(constraints.constrained(copied, asked.annotations))
        stack.enter_context(same_kernels())
        stack.enter_context(fake_mode)
        traced = Traced(copied, asked.loss_fn)
        fakes, real = pytree.tree_leaves(inputs), pytree.tree_leaves((asked.args, asked.kwargs))
        recorded = record(lambda: run_as_traced(traced, *inputs), copied, fake_mode, fakes, stacks, real)
    first = not hooked and any(keys == (HOOKED,) for _, keys in recorded.left)
    return _recorded(model, stacks, asked, hooked=True) if first else recorded


def later_rows(rows: int, model: nn.Module, asked: Asked) -> Callable[[], list[ir.RowNumber] | None]:
    """What finds the numbers that forward computes from the ``rows`` of its inputs, when they are asked for."""

    def found() -> list[ir.RowNumber] | None:
        mode = FakeTensorMode()
        copied = _stand_in(model, mode, asked.device, asked.dtypes(model))
        with asked.casting(copied, model), same_kernels(), rewritten(model):
            traced, inputs = Traced(copied, asked.loss_fn), asked.inputs(mode)
            return row_numbers(lambda call: traced(*call[0], **call[1]), inputs, rows, mode)

    return found


def output_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[torch.Size | None] | None:
    """The shapes of the tensors that ``model(*args, **kwargs)`` returns, None for all else; nothing is computed. None
    if its Python reads values, without which they cannot be told."""
    leaves = output_leaves(model, args, kwargs, device)
    return leaves and [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def output_leaves(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[Any] | None:
    """What ``model(*args, **kwargs)`` returns, flattened, with tensors that have shapes and no values; or None, as
    :func:`output_shapes`."""
    try:
        return pytree.tree_leaves(_fake_output(model, args, kwargs, device))
    except torch_api.NoValue:
        return None


def returns_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether ``model(*args, **kwargs)`` returns a loss, as :func:`own_loss` finds it; nothing is computed."""
    try:
        loss = own_loss(_fake_output(model, args, kwargs, device))
    except Exception:  # that the model cannot be run on shapes alone is reported by its capture
        return False
    return isinstance(loss, torch.Tensor) and not loss.dim() and loss.is_floating_point()


def _fake_output(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    mode = FakeTensorMode()
    fake_args, fake_kwargs = _fake_inputs(mode, args, kwargs, device)
    private = _stand_in(model, mode, device, {})
    derivatives = torch.enable_grad()  # that forward computes
    with same_kernels(), rewritten(model), torch_api.as_written(), mode, derivatives:
        return private(*fake_args, **fake_kwargs)


def _check_modules(model: nn.Module) -> None:
    """Raise CaptureError if a module has backward hooks, which would see gradients that the graph does not keep,
    normalizes over the rows of some ranks, or is a recurrent layer with weights that are no parameters."""
    for path, module in model.named_modules():
        where = f"the module {path!r}" if path else "the model"
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            check_synchronized(module, where)
        check_recurrent(module, where)
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{where} has a backward hook (register_full_backward_hook or the like), and a compiled backward does "
                "not stop at modules: remove it, register it on the compiled module, or register hooks on parameters, "
                "which work"
            )


def _name_modules(gm: fx.GraphModule) -> None:
    """Record in every node the modules of the user's model that it is from, by their names in the model.

    The tracer writes ``L['self'].model.layers.0``.
    """
    for node in gm.graph.nodes:
        for attribute in (MODULES, FORWARD_MODULES):
            if stack := attribute.get(node):
                inside = {call: _in_model(path) for call, (path, _) in stack.items()}
                attribute.set(node, {call: (inside[call], kind) for call, (_, kind) in stack.items()})


def _in_model(path: str) -> str:
    """The name in the user's model of a module by the tracer's name, which may go through dictionaries of modules.

    Where :func:`torch.func.functional_call` is given a part of the model, the tracer writes ``getattr(..., '0')``.
    """
    plain = re.sub(r"(?:\.__dict__)?(?:\['_modules'\]|\._modules)\['(\w+)'\]", r".\1", path)
    while (by_name := re.sub(r"getattr\((.*), '([^']*)'\)", r"\1.\2", plain)) != plain:
        plain = by_name
    return re.sub(r"^L\['self'\](\.model)?\.?", "", plain)


def _fake_inputs(mode: FakeTensorMode, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    cpu = torch.device("cpu")
    return pytree.tree_map_only(
        torch.Tensor, lambda t: _fake(mode, t, cpu if is_number(t) else device, keep_strides=True), (args, kwargs)
    )


def _fake(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    device: torch.device,
    keep_strides: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # A plain copy of the metadata: from_tensor would keep the real tensor's storage alive.
    like = tensor if keep_strides else torch.empty(tensor.shape, device="meta")
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, like.stride(), dtype=dtype or tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_number(mode: FakeTensorMode, number: int | float) -> torch.Tensor:
    return _fake(mode, as_tensor(number, torch.float64), torch.device("cpu"), keep_strides=True)


def _stand_in(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """A private copy of ``model`` with fake tensors, of ``dtypes`` by their first names.

    Parameters become contiguous, as they are once they have been sharded and gathered.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            parameters = holder is module._parameters
            for real in holder.values():
                if isinstance(real, torch.Tensor) and id(real) not in fakes:
                    fake = _fake(mode, real, device, not parameters, dtypes.get(names.get(id(real), "")))
                    fakes[id(real)] = nn.Parameter(fake, requires_grad=real.requires_grad) if parameters else fake
    return with_own_weights(of_this_rank(private_copy(model, fakes)))


def present(mode: FakeTensorMode, model: nn.Module, assigned: Set[str], counted: Set[str]) -> None:
    """Make a private copy ready to be traced: plain tensor attributes are presented as buffers, so that they are inputs
    of the graph rather than constants, but for those that are ``assigned`` and not read; ``counted`` numbers too, as
    0-dimensional tensors on the CPU. What a call has computed becomes an input like any other.
    """
    fakes: dict[int, torch.Tensor] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        computed = value.grad_fn is not None or value._is_view()
        return fakes.setdefault(id(value), _fake(mode, value, value.device, True) if computed else value)

    for path, module in model.named_modules():
        names = (name.rpartition(".") for name in counted)
        defaults = {key: getattr(type(module), key, None) for of, _, key in names if of == path}
        for key, value in [*(defaults | vars(module)).items()]:
            name = f"{path}.{key}" if path else key
            if isinstance(value, torch.Tensor) and name in assigned:
                vars(module)[key] = fake(value)
            elif isinstance(value, torch.Tensor) or name in counted:
                if hasattr(type(module), key):
                    raise CaptureError(
                        f"the attribute {name!r} changes from call to call, and {type(module).__name__} has a default "
                        "for it, which would be found before its value: set the default in __init__, not in the class"
                    )
                del vars(module)[key]
                module._buffers[key] = fake(value) if isinstance(value, torch.Tensor) else _fake_number(mode, value)
        module._buffers.update({key: fake(value) for key, value in module._buffers.items() if value is not None})


def _joint_graph(exported: Exported, fake_mode: FakeTensorMode, leaves: list[Any]) -> ir.JointGraph:
    gm, effects, canonical = exported.lowered.graph_module, exported.effects, exported.canonical
    gm.graph.set_codegen(torch_api.CodeGen())
    check_matrices(gm, _source_line)
    check_shapes(gm, _source_line)
    check_strides(gm, _source_line)
    bases: list[Any] = []

    def role(desc: Any) -> ir.Role | None:
        if desc is None:
            return None
        kind = type(desc).__name__
        if kind in _NAMED:
            return _NAMED[kind](canonical.get(desc.target, desc.target))
        if kind in _INDEXED:
            return _INDEXED[kind](desc.idx)
        if kind == "IntermediateBaseAOTOutput":
            if desc not in bases:
                bases.append(desc)
            return ir.IntermediateBase(bases.index(desc))
        if kind == "TangentAOTInput":
            of = role(desc.output)
            if isinstance(of, (ir.Output, ir.IntermediateBase)):
                return ir.Tangent(of.index if isinstance(of, ir.Output) else -1 - of.index)
        if kind == "InputMutationAOTOutput":
            of = role(desc.mutated_input)
            if isinstance(of, (ir.Buffer, ir.Input)):
                return ir.Mutation(of)
        if kind == "GradAOTOutput":
            return ir.Gradient(role(desc.grad_of))
        raise unsupported(desc)

    def returned(value: Any) -> Any:
        of = role(value.meta["desc"]) if isinstance(value, fx.Node) and value.op == "placeholder" else None
        # A Python number that the model takes and returns is a constant, as everywhere in the graph.
        number = isinstance(of, ir.Input) and not isinstance(leaves[of.index], torch.Tensor)
        return leaves[of.index] if number else value

    shortenings = take_shortenings(gm, lambda name: canonical.get(name, name), _source_line)
    output = gm.graph.output_node()
    values = pytree.tree_leaves(output.args, is_leaf=lambda value: value is None)
    replaced = [ir.Buffer(canonical[PREFIX + each.fqn]) for each in effects.results if each.buffer]
    out_spec, mutations = _without(exported.lowered.out_spec, replaced)
    check_effects(gm, list(zip(output.meta["desc"], values, strict=True)), _source_line)
    roles = [role(desc) for desc in output.meta["desc"]]
    roles = [None if each in mutations.values() else mutations.get(each, each) for each in roles]
    results = [(of, value) for of, value in zip(roles, map(returned, values), strict=True) if of is not None]
    seen: dict[ir.Role, fx.Node] = {}
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        ROLE.set(node, role(node.meta["desc"]))
        # Tied parameters arrive under each of their names: one input serves them all.
        if (first := seen.setdefault(ROLE.of(node), node)) is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    ir.set_outputs(gm, _sum_tied_gradients(gm, results) + _checks(gm))
    ir.drop_unused_states(gm)
    for node in gm.graph.nodes:
        SOURCE.set(node, _source_line(node))
    forget_unknown(gm)
    gm.graph.lint()
    gm = ir.UnboundGraph(gm, gm.graph)
    # The tracer works in a mode of its own, and values of two modes do not mix.
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in gm.graph.nodes)
    mode = next((mode for mode in modes if mode is not None), fake_mode)
    return ir.JointGraph(
        gm,
        out_spec,
        mode,
        _aliases(gm, exported.lowered._aot_state, role),
        attributes=effects.constants,
        shortened=tuple(each.of(gm) for each in shortenings),
        results=tuple(each for each in effects.results if not each.buffer),
        replaced=frozenset(buffer.fqn for buffer in replaced),
        repeats=exported.repeats,
    )


def _without(out_spec: Any, replaced: list[ir.Buffer]) -> tuple[Any, dict[ir.Role, ir.Role]]:
    """The structure of the results without the last ones, the values of buffers, and what these outputs are."""
    if not replaced:
        return out_spec, {}
    output, values = pytree.tree_unflatten(range(out_spec.num_leaves), out_spec)
    outputs = values[-len(replaced) :]
    kept = (output, values[: -len(replaced)]) if len(values) > len(replaced) else output
    mutations: dict[ir.Role, ir.Role] = {
        ir.Output(i): ir.Mutation(buffer) for i, buffer in zip(outputs, replaced, strict=True)
    }
    return pytree.tree_structure(kept), mutations


_NAMED = {"ParamAOTInput": ir.Parameter, "BufferAOTInput": ir.Buffer}
_INDEXED = {"PlainAOTInput": ir.Input, "PlainAOTOutput": ir.Output}


def _source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that made the node, else of torch's, else the module that did (torch.nn's own
    have no line)."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', STACK_TRACE.get(node) or "")
    frames = [frame for frame in frames if frame[0] not in _OURS]
    if frames:
        file, line = next((frame for frame in reversed(frames) if not frame[0].startswith(_TORCH)), frames[-1])
        return f"{file}:{line}"
    for path, kind in reversed(list((MODULES.get(node) or {}).values())):
        return f"module {path or 'root'}, {getattr(kind, '__name__', kind)}"
    return ""


def _sum_tied_gradients(gm: fx.GraphModule, results: list[_Result]) -> list[_Result]:
    """One gradient per parameter: the sum over the names that it is tied under."""
    merged: dict[Any, _Result] = {}
    for position, (role, value) in enumerate(results):
        key = role if isinstance(role, ir.Gradient) else position
        _, earlier = merged.get(key, (role, None))
        if isinstance(earlier, fx.Node) and isinstance(value, fx.Node):
            with gm.graph.inserting_before(gm.graph.output_node()):
                total = gm.graph.call_function(torch.ops.aten.add.Tensor, (earlier, value))
            total.meta["val"] = value.meta["val"]
            value = total
        merged[key] = (role, earlier if value is None else value)
    return list(merged.values())


def _checks(gm: fx.GraphModule) -> list[_Result]:
    """The conditions that the graph checks as results of it, which whoever runs it checks."""
    results: list[_Result] = []
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg):
        condition, line = node.args
        results.append((ir.Checked(len(results), line), condition))
        gm.graph.erase_node(node)
    return results


def _aliases(gm: fx.GraphModule, state: Any, role: Callable[[Any], ir.Role | None]) -> dict[int, ir.OutputAlias]:
    """Which outputs are views of an input, of another output or of a hidden base."""
    values = {r.index: v for r, v in ir.outputs(gm) if isinstance(r, ir.Output)}
    bases = {r.index: v for r, v in ir.outputs(gm) if isinstance(r, ir.IntermediateBase)}
    aliases: dict[int, ir.OutputAlias] = {}
    for index, info in enumerate(state.fw_metadata.output_info):
        value, kind, detached = values.get(index), info.output_type, not info.requires_grad
        if not isinstance(value, fx.Node) or info.base_idx is None:
            continue
        if kind in (OutputType.alias_of_input, OutputType.is_input):
            base = role(state.flat_args_descs[info.base_idx])
            if isinstance(base, ir.Parameter):
                raise CaptureError(
                    f"the forward returns the parameter {base.fqn!r} itself, or a view of it, and a sharded program "
                    "does not hold it whole: return a copy, such as parameter.clone()"
                )
            base_value = ir.placeholders(gm)[base].meta["val"]
        elif kind in (OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output):
            base, base_value = ir.IntermediateBase(info.base_idx), bases[info.base_idx].meta["val"]
        elif kind == OutputType.alias_of_intermediate_base_is_user_output:
            base, base_value = ir.Output(info.base_idx), values[info.base_idx].meta["val"]
        else:
            continue
        if kind == OutputType.is_input:
            aliases[index] = ir.OutputAlias(base, detached=detached)
        else:
            view = value.meta["val"]
            if (real := view.dtype != base_value.dtype) and view.dtype != base_value.dtype.to_real():
                continue  # bits as other numbers, which have no gradient: what the graph computes
            aliases[index] = ir.OutputAlias(
                base,
                tuple(view.shape),
                tuple(view.stride()),
                view.storage_offset() - (2 if real else 1) * base_value.storage_offset(),
                detached,
                real,
                conjugate=base_value.is_conj() if real else view.is_conj() != base_value.is_conj(),
                negative=view.is_neg() != (base_value.is_neg() and not real),
            )
    return aliases
