"""FairScale's LayerwiseGradientScaler is :class:`shardgraph.LayerwiseGradScaler` with a loss scale of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardgraph.arguments import POSITIVE, checked, mapping_of
from shardgraph.module.layerwise_grad_scaler import LayerwiseGradScaler

_FACTORS = mapping_of("factors above 0 by the name of a layer", POSITIVE)


class LayerwiseGradientScaler:
    """``fairscale.optim.layerwise_gradient_scaler.LayerwiseGradientScaler``, made before the model is wrapped::

        scaler = LayerwiseGradientScaler(model, {"fc1": 2.0**10, "fc2": 2.0**8})
        model = FSDP(model)
        ...
        scaler.scale()
        loss(model(inputs), target).backward()
        scaler.unscale()
        scaler.step(optimizer)

    Args:
        model: the model with the layers.
        layer_scale_dict: a factor for each layer that is scaled, by its name.
        growth_factor: by which a factor grows after ``growth_interval`` steps without an overflow in its layer.
        backoff_factor: by which it is multiplied at an overflow in its layer.
        growth_interval: see ``growth_factor``.
        min_scale: the least factor.
        max_scale: the largest factor.

    Raises:
        ShardGraphError: as of :class:`shardgraph.LayerwiseGradScaler`.
    """

    @checked(
        layer_scale_dict=mapping_of("factors above 0 by the name of a layer", POSITIVE),
        min_scale=POSITIVE,
        max_scale=POSITIVE,
    )
    def __init__(
        self,
        model: nn.Module,
        layer_scale_dict: Mapping[str, float],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10000,
        min_scale: float = torch.finfo(torch.float32).tiny,
        max_scale: float = torch.finfo(torch.float32).max,
    ) -> None:
        self._model = model
        self._unscaled = False
        self._scaler = LayerwiseGradScaler(
            model,
            layer_scale_dict,
            min_factor=min_scale,
            max_factor=max_scale,
            init_scale=1.0,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        self._scaler.scale(torch.ones((), device="cpu"))  # makes its loss scale

    def scale(self) -> None:
        """Nothing: the layers scale gradients at every step."""

    def unscale(self) -> None:
        """Divide each layer's gradients by its factor; after backward, before they are clipped."""
        self._scaler.unscale_(torch.optim.SGD(self._model.parameters()))
        self._unscaled = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step, unless a gradient on any rank overflowed, and move the factors."""
        if not self._unscaled:
            self.unscale()
        if not self._scaler.overflowed:
            optimizer.step()
        self._scaler.update(1.0)
        self._unscaled = False

    def factors(self) -> dict[str, float]:
        """The present factor of each layer, by its name."""
        return self._scaler.factors()
