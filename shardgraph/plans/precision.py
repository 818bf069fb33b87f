"""Mixed precision as data: the dtypes in which a plan computes, reduces gradients and keeps buffers.

Parameters are stored and optimized in their own dtype, usually float32; the computation uses copies in a lower one
(Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740). :mod:`shardgraph.capture.casting` applies that to each
tensor of a captured model, :mod:`shardgraph.passes.parameters.mixed_precision` to the program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardgraph.errors import PlanError, expect, nearest

DTYPES = ("bfloat16", "float16", "float32", "float64")
FLOAT8 = "float8"
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_name(dtype: str | torch.dtype, field: str) -> str:
    """The name of a floating-point dtype from its name, a short form or itself; ``field`` is for errors.

    Raises:
        PlanError: it is none of ``DTYPES``.
    """
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, name)
    expect(name in DTYPES, field, dtype, f"{', '.join(DTYPES)}{nearest(name, [*DTYPES, *_SHORT])}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in ``DTYPES``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Precision:
    """The dtypes of a plan, by name (``"bfloat16"``) or as ``torch.bfloat16``; None leaves a dtype unchanged.

    The fields are those of FSDP2's ``MixedPrecisionPolicy``, and ``buffers``.

    ``parameters``
        The dtype in which floating-point parameters are all-gathered and used; they are stored in their own dtype.
    ``reduce``
        The dtype in which gradients are reduced; None: the dtype in which they are computed. The result is cast to the
        dtype of the stored parameter.
    ``buffers``
        The dtype of floating-point buffers.
    ``inputs``
        Whether floating-point inputs of the model are cast to ``parameters``.
    ``outputs``
        The dtype to which floating-point outputs of the model are cast.
    ``products``
        ``"float8"``: products with parameters are of values scaled to 8 bits; None: of values as they are.

    Raises:
        PlanError: a field has a value that is not allowed.
    """

    parameters: str | None = None
    reduce: str | None = None
    buffers: str | None = None
    inputs: bool = True
    outputs: str | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        for field in ("parameters", "reduce", "buffers", "outputs"):
            if (dtype := getattr(self, field)) is not None:
                object.__setattr__(self, field, dtype_name(dtype, f"precision.{field}"))
        known = self.products is None or (isinstance(self.products, str) and self.products == FLOAT8)
        expect(known, "precision.products", self.products, f"{FLOAT8!r} or None")
        expect(isinstance(self.inputs, bool), "precision.inputs", self.inputs, "True or False")

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """The precision of a name: ``"bf16"`` and ``"fp16"`` compute in that dtype and reduce in float32; ``"fp8"`` is
        ``"bf16"`` with products of float8 values.

        Raises:
            PlanError: there is no precision of that name.
        """
        if isinstance(precision, cls):
            return precision
        if precision == "fp8":
            return cls("bfloat16", reduce="float32", products=FLOAT8)
        name = _SHORT.get(str(precision), precision)
        if not isinstance(name, str) or name not in ("bfloat16", "float16"):
            raise PlanError(
                f"there is no precision {precision!r}; there are 'bf16', "
                "'fp16' and 'fp8', and shardgraph.Precision(parameters=..., reduce=...)"
                f"{nearest(str(precision), ['bf16', 'fp16', 'fp8'])}"
            )
        return cls(name, reduce="float32")

    def __str__(self) -> str:
        parts = [f"{name} {dtype}" for name, dtype in vars(self).items() if isinstance(dtype, str)]
        if self.parameters and not self.inputs:
            parts.append("inputs as they are")
        return ", ".join(parts)


AS_STORED = Precision()
"""Every tensor in its own dtype."""
