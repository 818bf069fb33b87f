"""Mixed precision at capture: the dtype of each tensor of a model, and casts around modules.

A model is captured as if its parameters were stored in the dtype of the computation, so torch decides how an operation
handles it: whether softmax statistics stay in float32, how two dtypes promote, what a region of ``torch.autocast``
does. Rewriting the graph after capture would have to reimplement all of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardgraph.errors import CaptureError, PlanError
from shardgraph.ir.attributes import SOURCE
from shardgraph.plans.annotations.kinds import precision as precision_annotation
from shardgraph.plans.annotations.match import Annotated, matches
from shardgraph.plans.precision import Precision, dtype_of


@dataclass(frozen=True)
class _Region:
    """A module that computes in ``dtype``; ``outputs`` None: its outputs have the dtype of the surrounding module."""

    dtype: torch.dtype
    outputs: torch.dtype | None


def computed_dtypes(model: nn.Module, precision: Precision, annotations: Sequence[Annotated]) -> dict[str, torch.dtype]:
    """The dtype in which the computation sees each parameter and buffer, by its first name.

    Raises:
        PlanError: a tied parameter would have different dtypes under its names.
    """
    regions = _regions(model, precision, annotations)
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    dtypes: dict[str, torch.dtype] = {}
    for path, module in model.named_modules():
        where = _innermost(regions, path)
        computed = regions[where].dtype if where is not None else None
        kept = dtype_of(precision.buffers) if precision.buffers and not where else None
        for own, dtype in ((module._parameters, computed), (module._buffers, kept)):
            for key, tensor in own.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                name = names[id(tensor)]
                annotated = _annotated_region(name, annotations)
                required = annotated.dtype if annotated is not None else dtype or tensor.dtype
                if dtypes.setdefault(name, required) != required:
                    raise PlanError(
                        f"{name!r} is computed with in {dtypes[name]}, and {path}.{key}, which is tied to it, in "
                        f"{required}: annotate both modules with one precision, or the parameter itself"
                    )
    return dtypes


def check_products(gm: fx.GraphModule) -> None:
    """Raise CaptureError if a captured graph multiplies tensors of two dtypes, which no kernel does."""
    for node in gm.graph.nodes:
        values = [each.meta["val"] for each in node.all_input_nodes] if node.target in _PRODUCTS else []
        dtypes = sorted({str(value.dtype).removeprefix("torch.") for value in values if value.is_floating_point()})
        if len(dtypes) > 1:
            raise CaptureError(
                f"{' and '.join(dtypes)} are multiplied at {SOURCE.of(node)}: cast one of them there, cast inputs "
                "and buffers too (shardgraph.Precision), or annotate the module precision(...), which casts its inputs"
            )


_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default}
)


def cast_buffers(model: nn.Module, precision: Precision, annotations: Sequence[Annotated]) -> None:
    """Cast the model's buffers, in place, to the dtype of the computation."""
    dtypes = computed_dtypes(model, precision, annotations)
    cast = {id(buffer): buffer.to(dtypes.get(name, buffer.dtype)) for name, buffer in model.named_buffers()}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:  # shared ones stay shared
                module._buffers[key] = cast[id(buffer)]


@contextmanager
def casting(
    model: nn.Module, precision: Precision, annotations: Sequence[Annotated], stored: nn.Module | None = None
) -> Iterator[None]:
    """Within, inputs and outputs of the model and of annotated modules are cast as their precision says.

    ``stored`` is the same model with tensors in the dtypes in which they are stored, where ``model`` has others.
    """
    stored = stored or model
    regions = _regions(stored, precision, annotations)
    with ExitStack() as hooks:
        for path, region in regions.items():
            module = model.get_submodule(path)
            if path or precision.inputs:
                hooks.enter_context(module.register_forward_pre_hook(_inputs_to(region.dtype), with_kwargs=True))
            outputs = region.outputs or (_around(stored, regions, path) if path else None)
            if outputs is not None:
                hooks.enter_context(module.register_forward_hook(_outputs_to(outputs)))
        yield


def _regions(model: nn.Module, precision: Precision, annotations: Sequence[Annotated]) -> dict[str, _Region]:
    """The modules with an annotated precision, or with running statistics, by name; the model itself is ``""``.

    A running average moves by less than a lower precision can represent, so such modules keep their stored dtype.
    """
    outputs = None if precision.outputs is None else dtype_of(precision.outputs)
    regions = {"": _Region(dtype_of(precision.parameters), outputs)} if precision.parameters else {}
    for path, module in model.named_modules():
        statistics = getattr(module, "running_mean", None)
        if (region := _annotated_region(path, annotations)) is not None:
            regions[path] = region
        elif isinstance(statistics, torch.Tensor) and _innermost(regions, path) is not None:
            regions[path] = _Region(statistics.dtype, None)
    return regions


def annotated_precision(fqn: str, annotations: Sequence[Annotated]) -> bool:
    """Whether the precision of a parameter, or of a module that it is in, is annotated."""
    parts = fqn.split(".")
    return any(_annotated_region(".".join(parts[:end]), annotations) for end in range(len(parts) + 1))


def _annotated_region(name: str, annotations: Sequence[Annotated]) -> _Region | None:
    for pattern, annotation in annotations:
        if isinstance(annotation, precision_annotation) and matches(pattern, name):
            outputs = None if annotation.outputs is None else dtype_of(str(annotation.outputs))
            return _Region(dtype_of(str(annotation.dtype)), outputs)
    return None


def _innermost(regions: dict[str, _Region], path: str) -> str | None:
    """The name of the region that the module ``path`` is, or is in."""
    while path not in regions and path:
        path = path.rpartition(".")[0]
    return path if path in regions else None


def _around(model: nn.Module, regions: dict[str, _Region], path: str) -> torch.dtype:
    """The dtype around a region: of the one that it is in, or else of the model's first parameter."""
    where = _innermost(regions, path.rpartition(".")[0])
    if where is not None:
        return regions[where].dtype
    stored = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(stored, torch.get_default_dtype())


def _inputs_to(dtype: torch.dtype) -> Any:
    return lambda _, args, kwargs: _cast((args, kwargs), dtype)


def _outputs_to(dtype: torch.dtype) -> Any:
    return lambda _, inputs, output: _cast(output, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)
