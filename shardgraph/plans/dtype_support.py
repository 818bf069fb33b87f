"""Checks whether a device, present or described by a cluster, can compute in the dtypes of a plan."""

from __future__ import annotations

import torch

from shardgraph.cost_models.device import Device
from shardgraph.errors import PlanError
from shardgraph.plans.annotations.kinds import precision
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import DTYPES, FLOAT8, dtype_of


def check_described(plan: Plan, device: Device) -> None:
    """Check that a described device has a rate for matrix products in every dtype of ``plan``.

    Raises:
        PlanError: it has none for a dtype; the message lists those that it has.
    """
    able = [name for name in DTYPES if device.rate("matmul", name) is not None]
    able += [FLOAT8] if device.rate("matmul", "float8_e4m3fn") is not None else []
    _check(plan, able, f"device {device.name!r}, as it is described,")


def check_present(plan: Plan, device: torch.device) -> None:
    """Check that ``device``, of this machine, can compute matrix products in every dtype of ``plan``.

    Raises:
        PlanError: it cannot in some dtype; the message lists those in which it can.
    """
    if _dtypes_of(plan):
        able = [name for name in DTYPES if _multiplies(dtype_of(name), device)]
        able += [FLOAT8] if _multiplies_scaled(device) else []
        _check(plan, able, torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}")


def _dtypes_of(plan: Plan) -> list[str]:
    annotated = [annotation.dtype for _, annotation in plan.annotations if isinstance(annotation, precision)]
    return [str(name) for name in (plan.precision.parameters, plan.precision.products, *annotated) if name is not None]


def _check(plan: Plan, able: list[str], device: str) -> None:
    for name in _dtypes_of(plan):
        if name not in able:
            example = {"bfloat16": ", such as 'bf16'", "float16": ", such as 'fp16'"}
            raise PlanError(
                f"plan {plan.name!r} computes in {name}, which {device} cannot: it can in {', '.join(able) or 'none'}. "
                f"Use a precision of these{example.get(able[0], '') if able else ''}"
            )


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type == "cuda" and dtype == torch.bfloat16:  # emulated, and slow, below compute capability 8.0
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        return torch.equal(one @ one, one)
    except (RuntimeError, TypeError):
        return False


def _multiplies_scaled(device: torch.device) -> bool:
    """Whether a device has products of scaled float8 values, of both formats: a GPU of compute capability 8.9 or more.

    The formats of AMD's MI300 are others.
    """
    try:
        values = torch.ones(16, 16, device=device)
        one = torch.ones((), device=device)
        left, right = values.to(torch.float8_e5m2), values.to(torch.float8_e4m3fn).t()
        return bool((torch._scaled_mm(left, right, one, one, out_dtype=torch.float32) == 16).all())
    except (RuntimeError, TypeError, ValueError):
        return False
