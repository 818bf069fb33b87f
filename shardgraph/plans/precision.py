"""Mixed precision as data: in which dtypes a plan computes, reduces gradients and keeps buffers.

Parameters are stored, and optimized, in their own dtype, usually float32; what computes with them sees copies in a
lower one (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740). :mod:`shardgraph.capture.casting` says what
that means for each tensor of a model, :mod:`shardgraph.passes.parameters.mixed_precision` puts it into a program.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from shardgraph.errors import PlanError, nearest

DTYPES = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_name(given: str | torch.dtype, what: str) -> str:
    """The name of a dtype that can be computed in; ``what`` says in errors whose it is.

    Raises:
        PlanError: it is none.
    """
    name = str(given).removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPES:
        raise PlanError(f"{what} is {given!r}; it may be {', '.join(DTYPES)}{nearest(name, [*DTYPES, *_SHORT])}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name of ``DTYPES``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True)
class Precision:
    """In which dtypes a plan works, by name (``"bfloat16"``) or as ``torch.bfloat16``; None: as they are.

    The fields are those of FSDP2's ``MixedPrecisionPolicy``, and buffers.

    ``parameters``
        What floating-point parameters are computed with, and gathered in; they are stored in the dtype that they have.
    ``reduce``
        What gradients are reduced in; None: the dtype that they are computed in. Then they get their parameter's.
    ``buffers``
        What floating-point buffers are kept in.
    ``inputs``
        Whether floating-point inputs of the model are cast to ``parameters``.
    ``outputs``
        What floating-point outputs of the model are cast to.
    """

    parameters: str | None = None
    reduce: str | None = None
    buffers: str | None = None
    inputs: bool = True
    outputs: str | None = None

    def __post_init__(self) -> None:
        for field in ("parameters", "reduce", "buffers", "outputs"):
            if (given := getattr(self, field)) is not None:
                object.__setattr__(self, field, dtype_name(given, f"precision.{field}"))
        if not isinstance(self.inputs, bool):
            raise PlanError(f"precision.inputs is {self.inputs!r}; it may be True or False")

    @classmethod
    def of(cls, given: str | Precision) -> Precision:
        """The precision that is meant: ``"bf16"`` and ``"fp16"`` compute in it and reduce in float32.

        Raises:
            PlanError: there is none of that name.
        """
        if isinstance(given, cls):
            return given
        name = _SHORT.get(str(given), given)
        if name not in ("bfloat16", "float16"):
            raise PlanError(
                f"there is no precision {given!r}{nearest(str(given), _SHORT)}; there are 'bf16' and 'fp16', and "
                "shardgraph.Precision(parameters=..., reduce=...)"
            )
        return cls(name, reduce="float32")

    def __str__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        said = [f"{name} {dtype}" for name, dtype in given if isinstance(dtype, str)]
        return ", ".join([*said, *([] if self.inputs or not self.parameters else ["inputs as they are"])])


AS_STORED = Precision()
"""Everything in the dtype that it has."""
