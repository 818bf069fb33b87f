"""All that a module's program depends on, but for attributes that forward reads, which its guards are for."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardgraph.module.numbers import shown


class ProgramKey(NamedTuple):
    """``inputs`` has the :func:`~shardgraph.capture.numbers.input_key` of each flattened input, ``modes`` and
    ``trained`` a bool for each module and parameter, ``values`` those of inputs by which forward has branched."""

    buffers: tuple[Any, ...]
    structure: Any
    inputs: tuple[Any, ...]
    modes: tuple[bool, ...]
    trained: tuple[bool, ...]
    grad: bool
    autocast: Any
    dtype: Any
    device: str
    functions: tuple[Any, ...]
    hooks: tuple[int, ...]
    with_loss: bool
    values: tuple[Any, ...] = ()

    @property
    def undecided(self) -> ProgramKey:
        """The same for any buffers, and any values of inputs."""
        return self._replace(buffers=(), values=())

    @property
    def without_shapes(self) -> ProgramKey:
        """The same for any buffers, and any shapes and strides of inputs."""
        alike = tuple((kind[1], *kind[3:]) if is_tensor(kind) else kind for kind in self.inputs)
        return self._replace(buffers=(), inputs=alike)

    def described(self, changed: str) -> str:
        """As readable text, with what ``changed`` on the model."""
        lines = [f"structure {self.structure}"]
        for i, kind in enumerate(self.inputs):
            form = f"shape {list(kind[0])}, {kind[1]}" if is_tensor(kind) else shown(kind)
            lines.append(f"input {i}: {form}")
        shapes = ", ".join(f"{list(kind[0])} {kind[1]}" for kind in dict.fromkeys(self.buffers) if _is_shaped(kind))
        return "\n".join(
            [
                *lines,
                f"{sum(self.modes)} of {len(self.modes)} modules in training mode",
                f"{sum(self.trained)} of {len(self.trained)} parameters require a gradient",
                f"gradients {'on' if self.grad else 'off'}, autocast {self.autocast}, "
                f"{'with' if self.with_loss else 'without'} loss",
                f"default dtype {self.dtype}, default device {self.device}, {len(self.functions)} modes of functions, "
                f"{len(self.hooks)} hooks of all modules",
                f"{len(self.buffers)} buffers, of shapes {shapes or 'none'}",
                f"no longer {changed}" if changed else "the model's attributes as they were",
            ]
        )


def is_tensor(kind: tuple[Any, ...]) -> bool:
    """Whether an entry of ``inputs`` is a tensor's."""
    return len(kind) == 5


def _is_shaped(kind: Any) -> bool:
    return isinstance(kind, tuple)
