"""The device that this process computes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

_NOT_ON_THE_DEVICE = ("gloo", "fake")  # gloo copies device tensors through host memory, fake moves nothing


def accelerator() -> torch.device | None:
    """This process's current accelerator, with its index; None without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def current_device(device_type: str) -> torch.device:
    """The device of this type that this process uses."""
    return torch.device(device_type) if device_type == "cpu" else accelerator() or torch.device(device_type)


def device_type_of(backends: Mapping[str, str], accelerator: str | None) -> str:
    """The device type that ranks compute on: the accelerator's, if their group communicates its tensors, else cpu.

    ``backends`` has the group's backend for each device type, as ``{"cpu": "gloo", "cuda": "nccl"}``.
    """
    if accelerator is None or backends.get(accelerator, "gloo") in _NOT_ON_THE_DEVICE:
        return "cpu"
    return accelerator


def group_device_type() -> str:
    """The device type that the ranks of the default process group compute on, however it was initialised."""
    # The backend of a group made without naming one is "undefined"; its configuration names one per device type.
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    kind = torch.accelerator.current_accelerator(check_available=True)
    return device_type_of(backends, None if kind is None else kind.type)
