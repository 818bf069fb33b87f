"""Capture: an unmodified module and example inputs become a :class:`~shardgraph.ir.JointGraph`.

Nothing is computed and no memory is allocated for the model: a private copy of its modules is traced, with fake tensors
for parameters and buffers. The model itself is only read, and may run in other threads meanwhile.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from shardgraph import ir, torch_api
from shardgraph.capture import constraints
from shardgraph.capture.canonical import FusedOperators, same_kernels
from shardgraph.capture.casting import casting, check_products, computed_dtypes
from shardgraph.capture.numbers import check_numbers, is_number
from shardgraph.capture.private_copy import private_copy
from shardgraph.capture.pytrees import register_types
from shardgraph.capture.row_numbers import row_numbers
from shardgraph.capture.side_effects import constants_set
from shardgraph.errors import CaptureError, ShardGraphError
from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, ROLE, SOURCE, STACK_TRACE, forget_unknown
from shardgraph.plans.annotations import constrain
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.torch_api import FakeTensorMode, OutputType, pytree

_PREFIX = "model."
_Result = tuple[ir.Role | None, Any]
_OURS = (__file__, constrain.__file__, constraints.__file__)


class _Traced(nn.Module):
    """``model(*args, **kwargs)``, or ``loss_fn(model(*args, **kwargs), target)``, as the module that is traced.

    So the loss is part of the graph, and hooks of the model are as those of its submodules. Without a ``target`` among
    the inputs, ``loss_fn`` is called with the output alone.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            return self.model(*args, **kwargs)
        if "target" not in kwargs:
            return self.loss_fn(self.model(*args, **kwargs))
        target = kwargs.pop("target")
        return self.loss_fn(self.model(*args, **kwargs), target)


def own_loss(output: Any) -> Any:
    """The loss that a model returns as ``output.loss`` or ``output["loss"]``; ``output`` itself if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else output


def _check_loss(joint: ir.JointGraph) -> None:
    """Raise ShardGraphError unless the graph's only result is a loss."""
    values = [value for role, value in ir.outputs(joint.module) if isinstance(role, ir.Output)]
    if len(values) != 1 or not isinstance(values[0], fx.Node) or values[0].meta["val"].dim():
        raise ShardGraphError(
            "train_step needs a loss, which is one number: give shardgraph.compile a loss_fn(output, target) and "
            "train_step a target, or call a model that returns its loss as output.loss with what that takes, such as "
            "labels"
        )


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
            has a backward hook.
    """
    _check_hooks(model)
    fake_mode = FakeTensorMode()
    fake_args, fake_kwargs = _fake_inputs(fake_mode, args, kwargs, device)
    dtypes = computed_dtypes(model, precision, annotations)
    private = _stand_in(model, fake_mode, device, dtypes)
    named = [*private.named_parameters(remove_duplicate=False), *private.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    canonical = {_PREFIX + name: first.setdefault(id(tensor), name) for name, tensor in named}
    with (
        casting(private, precision, annotations, stored=model),
        constraints.constrained(private, annotations),
        same_kernels(),
        fake_mode,
    ):
        traced = _Traced(private, loss_fn)
        exported, attributes, guards = _export(traced, fake_args, fake_kwargs, private)
    constraints.check_met(exported.graph_module, annotations)
    _name_modules(exported.graph_module)
    leaves = pytree.tree_leaves((args, kwargs))
    joint = _joint_graph(exported, fake_mode, canonical, leaves)
    joint.attributes = attributes
    joint.guards = lambda model: guards(_Traced(model, loss_fn))
    joint.stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
    joint.rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    def from_rows() -> list[ir.RowNumber] | None:
        with casting(private, precision, annotations, stored=model), same_kernels():
            return row_numbers(
                lambda call: traced(*call[0], **call[1]), (fake_args, fake_kwargs), joint.rows, fake_mode
            )

    joint.row_numbers = from_rows
    check_products(joint.module)
    check_numbers(joint.module, args, kwargs)
    if loss_fn is not None:
        _check_loss(joint)
    return joint


def output_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[torch.Size | None]:
    """The shapes of the tensors that ``model(*args, **kwargs)`` returns, None for all else; nothing is computed."""
    mode = FakeTensorMode()
    fake_args, fake_kwargs = _fake_inputs(mode, args, kwargs, device)
    private = _stand_in(model, mode, device, {})
    with same_kernels(), mode, torch.no_grad():
        leaves = pytree.tree_leaves(private(*fake_args, **fake_kwargs))
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def _check_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a module has backward hooks, which would see gradients that the graph does not keep."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            where = f"the module {path!r}" if path else "the model"
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
                inside = {call: re.sub(r"^L\['self'\](\.model)?\.?", "", path) for call, (path, _) in stack.items()}
                attribute.set(node, {call: (inside[call], kind) for call, (_, kind) in stack.items()})


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


def _stand_in(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> nn.Module:
    """A private copy of ``model`` with fake tensors, of ``dtypes`` by their first names.

    Parameters become contiguous, as they are once they have been sharded and gathered. Plain tensor
    attributes are presented as buffers, so that they are inputs of the graph rather than constants.
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
    private = private_copy(model, fakes)
    for module in private.modules():
        for key in [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]:
            module._buffers[key] = vars(module).pop(key)
            module._non_persistent_buffers_set.add(key)
    return private


def _export(
    traced: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> tuple[Any, tuple[ir.AttributeSet, ...], Callable[[nn.Module], Any]]:
    name = type(model).__name__
    try:
        trace = _trace(traced, args, kwargs, model)
        guards: Callable[..., Any] = trace.guards
        with torch.no_grad():
            constants = constants_set(trace.written, model, lambda: traced(*args, **kwargs))
        if constants:
            again = _trace(traced, args, kwargs, model)
            if _lines(again.graph) != _lines(trace.graph):
                raise CaptureError(
                    f"forward of {name} sets {'.'.join(constants[0].keys)!r} in its first call and takes another way "
                    "in the next: a compiled module does the same in each. Call the model once before "
                    "shardgraph.compile"
                )
            guards = partial(guards, later=again.guards)
        try:
            return _lower(trace.graph, args, kwargs), constants, guards
        except (RuntimeError, TypeError) as error:
            if not re.search("not a known type|unhashable type", str(error)):  # torch 2.11 looks it up by its hash
                raise
            with torch.no_grad():
                register_types(traced(*args, **kwargs))
            return _lower(trace.graph, args, kwargs), constants, guards
    except torch_api.DynamoError as error:
        raise CaptureError(_explain(name, str(error))) from error
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CaptureError(
            f"{name} was traced, but its forward and backward cannot be made into one graph: {error}"
        ) from error


def _lines(gm: fx.GraphModule) -> list[str]:
    """A traced graph as text. Inputs have the order and the names with which the tracer came upon them."""
    return sorted(re.sub(r"_dict_(?=parameters|buffers|modules)", "_", str(gm.graph)).splitlines())


def _trace(traced: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module) -> torch_api.Trace:
    try:
        return torch_api.trace(traced, args, kwargs)
    except torch_api.DynamoError as error:
        if "maybe_install_capturing_hooks" not in str(error):
            raise
    # transformers hooks its modules for router logits and the like in the first call that wants them, under a lock.
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            maybe_install_capturing_hooks(module)
    return torch_api.trace(traced, args, kwargs)


def _lower(captured: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with FusedOperators(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "To copy construct from a tensor")  # the tracer's own calls
        return torch_api.export_joint(captured, args, kwargs)


def _explain(name: str, message: str) -> str:
    """Dynamo's long message, reordered: the user's line first, then the reason and the remedies."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.+)', message.partition("from user code:")[2])
    where = "".join("\n  at {}:{}, in {}:  {}".format(*frame) for frame in frames[-1:]).rstrip()
    reason = message.partition("\n")[0].strip()
    hints = "".join(f"\n  {hint.strip()}" for hint in re.findall(r"Hint: (.+)", message)[:3])
    if "expert" in where:
        hints += (
            "\n  experts in a loop run for those that were chosen: a model of transformers has them in one graph with "
            "experts_implementation='grouped_mm' or 'batched_mm' in its config; see also shardgraph.nn.MoE"
        )
    return (
        f"{name} cannot be captured as one graph: {reason}{where}\n"
        "  shardgraph compiles the whole forward: its Python must not depend on the values of tensors."
        f"{hints}"
    )


def _joint_graph(
    exported: Any, fake_mode: FakeTensorMode, canonical: Mapping[str, str], leaves: list[Any]
) -> ir.JointGraph:
    gm = exported.graph_module
    gm.graph.set_codegen(torch_api.CodeGen())
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
        raise CaptureError(
            f"the model does something that shardgraph cannot train sharded: {_UNSUPPORTED.get(kind, kind)} ({desc})"
        )

    def returned(value: Any) -> Any:
        of = role(value.meta["desc"]) if isinstance(value, fx.Node) and value.op == "placeholder" else None
        # A Python number that the model takes and returns is a constant, as everywhere in the graph.
        number = isinstance(of, ir.Input) and not isinstance(leaves[of.index], torch.Tensor)
        return leaves[of.index] if number else value

    output = gm.graph.output_node()
    values = pytree.tree_leaves(output.args, is_leaf=lambda value: value is None)
    results = list(zip([role(d) for d in output.meta["desc"]], map(returned, values), strict=True))
    seen: dict[ir.Role, fx.Node] = {}
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        ROLE.set(node, role(node.meta["desc"]))
        # Tied parameters arrive under each of their names: one input serves them all.
        if (first := seen.setdefault(ROLE.of(node), node)) is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    ir.set_outputs(gm, _sum_tied_gradients(gm, results))
    for node in gm.graph.nodes:
        SOURCE.set(node, _source_line(node))
    forget_unknown(gm)
    gm.graph.lint()
    gm = ir.UnboundGraph(gm, gm.graph)
    # The tracer works in a mode of its own, and values of two modes do not mix.
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in gm.graph.nodes)
    mode = next((mode for mode in modes if mode is not None), fake_mode)
    return ir.JointGraph(gm, exported.out_spec, mode, _aliases(gm, exported._aot_state, role))


_NAMED = {"ParamAOTInput": ir.Parameter, "BufferAOTInput": ir.Buffer}
_INDEXED = {"PlainAOTInput": ir.Input, "PlainAOTOutput": ir.Output}
_UNSUPPORTED = {
    "InputMutationAOTOutput": "its forward writes a parameter in place",
    "TangentAOTInput": "its forward writes in place to an input that requires a gradient",
    "SyntheticBaseAOTInput": "two of its inputs share memory and one is written in place",
    "ViewBaseAOTInput": "an input is a view whose base is written in place",
}


def _source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that made the node, else the module that did (torch.nn's own have no line)."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', STACK_TRACE.get(node) or "")
    frames = [frame for frame in frames if frame[0] not in _OURS]
    if frames:
        return f"{frames[-1][0]}:{frames[-1][1]}"
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
            offset = view.storage_offset() - base_value.storage_offset()
            aliases[index] = ir.OutputAlias(base, tuple(view.shape), tuple(view.stride()), offset, detached)
    return aliases
