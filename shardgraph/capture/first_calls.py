"""What libraries do once, in the first call that needs it: done before a call is traced, which would be the first.

A trace has all that a call does, so that what a library notes for itself would be an effect of forward, to be refused.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

HOOKED = "_output_capturing_hooks_installed"
"""The attribute by which transformers knows a model that :func:`hook_outputs` need not hook."""


def name_tensors() -> None:
    """einops notes which framework a type is of when it first comes upon one (``einops._backends.get_backend``)."""
    if (einops := sys.modules.get("einops")) is not None:
        for tensor in (torch.empty(1), nn.Parameter(torch.empty(1))):
            einops.rearrange(tensor, "a -> a")


def hook_outputs(model: nn.Module) -> None:
    """transformers hooks its modules, under a lock, when router logits and the like are first asked for."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            maybe_install_capturing_hooks(module)
