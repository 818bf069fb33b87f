"""What is told of a module's programs: what each was compiled for, or why, and when there are too many."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from shardgraph.findings.model_rules import of_model
from shardgraph.findings.program_rules import of_program
from shardgraph.module.decided import Decided
from shardgraph.module.input_names import input_names
from shardgraph.module.numbers import shown
from shardgraph.module.program_key import ProgramKey, is_tensor
from shardgraph.passes.program import Program

log = logging.getLogger(__name__)
_MANY = 8  # programs that differ in the shapes of inputs alone
_MANY_OF_POLICY = 32  # where the user has said to which lengths inputs are padded
_SHOWN = 4  # shapes of an input in a message


class Recompiled:
    """The programs that a module has compiled, by all that they depend on but the shapes of inputs."""

    def __init__(self, model: nn.Module, decided: Decided, padded: bool) -> None:
        self._model, self._decided = model, decided
        self._many = _MANY_OF_POLICY if padded else _MANY
        self._alike: defaultdict[Any, dict[Any, float]] = defaultdict(dict)  # seconds, by the inputs
        self._warned = self._evicted = self._looked = False

    def tell(self, key: ProgramKey, seconds: float, others: Iterable[ProgramKey], changed: str) -> None:
        """Tell that the program of ``key`` has been compiled, beside those of ``others``; what ``changed`` on the model
        since it was last compiled, if it was."""
        reasons = [f"no longer {changed}"] if changed else self._reasons(key, others)
        if reasons:
            log.info("compiled another program in %.1f s: %s", seconds, "; ".join(reasons))
        elif not self._alike:
            graphs = "forward and backward" if key.grad else "forward alone"
            names = input_names(self._model, key.structure)
            inputs = ", ".join(f"{name}: {_described(kind)}" for name, kind in zip(names, key.inputs, strict=True))
            told = (
                "compiled the first program in %.1f s, %s, for %s. Calls with other shapes, dtypes or modes have others"
            )
            log.info(told, seconds, graphs, inputs or "no inputs")
        alike = self._alike[key.without_shapes]
        alike[key.inputs] = alike.get(key.inputs, 0.0) + seconds
        if len(alike) >= self._many and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(alike)} programs have been compiled that differ in the shapes of inputs alone, in "
                f"{sum(alike.values()):.0f} s altogether: {self._advice(key.structure, list(alike))}",
                stacklevel=2,
            )

    def look(self, program: Program) -> None:
        """Warn, once on the first rank, of what trains otherwise than on one device without an error."""
        if self._looked or (dist.is_initialized() and dist.get_rank()):
            return
        self._looked = True
        found = [*of_model(self._model, program.plan), *of_program(program, self._model, losses=False)]
        names = [each.rule for each in found if each.severity == "warning"]
        if names:
            log.warning(
                "this may train otherwise than expected (%s): print(shardgraph.lint(sharded))", ", ".join(names)
            )

    def evicted(self, key: ProgramKey, kept: int) -> None:
        """Warn, once, that the program of ``key`` is no longer among those that are ``kept``."""
        if not self._evicted:
            self._evicted = True
            alike = self._alike[key.without_shapes]
            advice = (
                self._advice(key.structure, list(alike))
                if len(alike) > 1
                else "the logger 'shardgraph' says at level INFO what each was compiled for"
            )
            warnings.warn(
                f"more than {kept} programs have been compiled, and {kept} are kept: those unused for longest are "
                f"dropped, and compiled again when they are needed. {advice[0].upper()}{advice[1:]}",
                stacklevel=2,
            )

    def _reasons(self, key: ProgramKey, others: Iterable[ProgramKey]) -> list[str]:
        """What differs from the program that differs in the least."""
        each = (list(self._differences(key, other)) for other in others)
        return min(each, key=len, default=[])

    def _differences(self, key: ProgramKey, other: ProgramKey) -> Iterator[str]:
        if key.structure != other.structure:
            structures = key.structure, other.structure
            mine, theirs = (", ".join(input_names(self._model, each)) or "none" for each in structures)
            yield f"the inputs are {mine} instead of {theirs}"
        else:
            for name, kind, old in zip(input_names(self._model, key.structure), key.inputs, other.inputs, strict=True):
                if kind != old:
                    yield f"{name}: {_changed(kind, old)}"
        for counted, now, before in (
            ("modules in training mode", key.modes, other.modes),
            ("parameters require a gradient", key.trained, other.trained),
        ):
            if now != before:
                yield f"{sum(now)} of {len(now)} {counted}{_instead(sum(now), before)}"
        if key.grad != other.grad:
            yield "gradients instead of no gradients" if key.grad else "no gradients instead of gradients"
        if key.autocast != other.autocast:
            yield f"autocast {key.autocast} instead of {other.autocast}"
        if key.dtype != other.dtype:
            yield f"default dtype {key.dtype} instead of {other.dtype}"
        if key.device != other.device:
            yield f"default device {key.device} instead of {other.device}"
        if key.functions != other.functions:
            yield "other modes of functions (torch.overrides.TorchFunctionMode)"
        if key.hooks != other.hooks:
            yield "other hooks of all modules (torch.nn.modules.module.register_module_...)"
        if key.with_loss != other.with_loss:
            yield "with the loss instead of without" if key.with_loss else "without the loss instead of with it"
        if key.buffers != other.buffers:
            yield "buffers of other shapes, or other buffers"
        if key.undecided == other.undecided:
            yield from self._decided.differing(key, other)

    def _advice(self, spec: Any, calls: Sequence[Any]) -> str:
        """What to do about calls with these inputs."""
        varying, dimensions = dict[str, list[Any]](), set[int]()
        for name, kinds in zip(input_names(self._model, spec), zip(*calls, strict=True), strict=True):
            shapes = list(dict.fromkeys(tuple(kind[0]) for kind in kinds if is_tensor(kind)))
            if len(shapes) > 1:
                varying[name] = shapes
                dimensions |= {i for i, sizes in enumerate(zip(*shapes, strict=False)) if len({*sizes}) > 1}
        if not varying:  # in strides
            return "give inputs that are contiguous"
        name, shapes = next(iter(varying.items()))
        seen = f"{name} has had shapes {', '.join(str(list(each)) for each in shapes[:_SHOWN])}"
        seen += " and others" if len(shapes) > _SHOWN else ""
        if dimensions == {0}:
            return f"{seen}. Give all batches as many rows, as a DataLoader does with drop_last=True"
        fill = ", ".join(f"{_own(name)}: ..." for name in varying)
        dimension = min(dimensions - {0}, default=1)
        option = f"multiple_of=64, fill={{{fill}}}" + (f", dimension={dimension}" if dimension != 1 else "")
        return (
            f"{seen}. Pad to few lengths: shardgraph.compile(..., lengths=shardgraph.Lengths({option})) does, with "
            "multiple_of or powers_of_two=True so that few are left, and so does pad_to_multiple_of=64 of a data "
            "collator of transformers; docs/lengths.md says what padding needs"
        )


def _changed(kind: Any, old: Any) -> str:
    """How an input differs from what it was."""
    if not (is_tensor(kind) and is_tensor(old)):
        return f"{_described(kind)} instead of {_described(old)}"
    (shape, dtype, _, trained, _), (shape_before, dtype_before, _, trained_before, _) = kind, old
    parts = []
    if shape != shape_before:
        parts.append(f"shape {list(shape)} instead of {list(shape_before)}")
    if dtype != dtype_before:
        parts.append(f"{dtype} instead of {dtype_before}")
    if trained != trained_before:
        parts.append("it requires a gradient" if trained else "it no longer requires a gradient")
    return ", ".join(parts) or "other strides"


def _described(kind: Any) -> str:
    if not is_tensor(kind):
        return shown(kind)
    return "a number that changes" if kind[-1] else f"a tensor of shape {list(kind[0])}, {kind[1]}"


def _instead(count: int, before: Sequence[bool]) -> str:
    return f" instead of {sum(before)}" if count != sum(before) else ", and not the same ones"


def _own(name: str) -> str:
    """An input as ``Lengths`` is given it: its quoted name, or its position."""
    number, _, rest = name.partition(" (")
    return repr(rest[:-1]) if rest else number.removeprefix("input ")
