"""AdaScale (Johnson, Agrawal, Gu and Guestrin, 2020, https://arxiv.org/abs/2007.05105): learning rates for large
batches, from the variance of gradients over data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardgraph.arguments import BOOL, OPTIMIZER, WHOLE, checked, number, of_plan
from shardgraph.errors import ShardGraphError, expect
from shardgraph.module.replaced import adopt
from shardgraph.module.sharded import COMPILED, ShardedModule
from shardgraph.runtime.gradient_statistics import Measured
from shardgraph.sizes import is_whole


@dataclass
class _Averages:
    """Running averages for one parameter group, of which ``steps`` have a part.

    ``variance`` is that of the gradient of a batch of scale 1, ``square`` the squared norm of its expectation.
    ``weight`` is how much of an exponential average from zero the steps make up.
    """

    variance: float = 0.0
    square: float = 1.0
    weight: float = 0.0
    steps: int = 0

    def add(self, variance: float, square: float, smoothing: float, debias: bool) -> None:
        """One more step. With ``debias`` the average of the first steps is divided by their weight; without, it is
        their mean until that would change by less than ``1 - smoothing`` (appendix B.3 of the paper)."""
        self.steps += 1
        self.weight = smoothing * self.weight + (1 - smoothing)
        rate = (1 - smoothing) / self.weight if debias else max(1 / self.steps, 1 - smoothing)
        if self.steps == 1:
            self.variance = self.square = 0.0
        self.variance += rate * (variance - self.variance)
        self.square += rate * (square - self.square)


_SCALE = of_plan(number("at least 1: the batch of a step is at least a small one", lambda value: 1 <= value < math.inf))
_SMOOTHING = of_plan(number("from 0 to less than 1", lambda value: 0 <= value < 1))


class AdaScale(torch.optim.Optimizer):
    """Multiplies the learning rate of each step by the gain of its batch over one that is ``scale`` times smaller.

    Where gradients of small batches are mostly noise, the mean of S of them allows a learning rate that is S times
    higher; where they agree, no higher one. The gain is between: with the variance v of a small batch's gradient and
    the squared norm m of its expectation it is ``(v + m) / (v / S + m)``, for each parameter group by itself. A step
    counts as many small ones as :meth:`gain` says::

        sharded = shardgraph.compile(model, "fsdp", gradient_statistics=True)
        optimizer = shardgraph.AdaScale(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
        progress = 0.0
        while progress < steps_of_small_batches:
            optimizer.zero_grad()
            sharded(next(batches)).loss.backward()
            progress += optimizer.gain()
            optimizer.step()

    Variance is estimated from the gradients of each data-parallel rank and each accumulated backward pass, measured
    where backward reduces them: before clipping, and for one small all-reduce per step. The optimizer's learning rate,
    and a scheduler on it, are those of the small batch; made for SGD, as the analysis of the paper. It looks like
    ``fairscale.optim.AdaScale`` and, unlike that, does not communicate by itself, and keeps its estimates in
    :meth:`set_scale`, since they are those of the small batch.

    Args:
        optimizer: updates the parameters of ``module``.
        module: compiled with ``gradient_statistics=True``.
        scale: the number of small batches in the batch of a step. Default: data-parallel ranks times
            ``num_gradients_to_accumulate``.
        smoothing: of the exponential averages of variance and square. Default: ``1 - N / 1000``, at least 0, for N
            gradients in a step.
        num_gradients_to_accumulate: backward passes in a step; all but the last are under ``module.no_sync()``.
        is_scaled_loss: whether the loss of each of these passes is divided by their number.
        debias_ewma: whether averages of few steps are debiased as in Adam, instead of being means.

    Raises:
        ShardGraphError: the module does not measure its gradients, or an argument cannot be.
    """

    @checked(
        optimizer=OPTIMIZER,
        module=COMPILED,
        scale=_SCALE,
        smoothing=_SMOOTHING,
        num_gradients_to_accumulate=WHOLE,
        is_scaled_loss=BOOL,
        debias_ewma=BOOL,
    )
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: ShardedModule,
        *,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        # Not that of torch: groups, state and hooks are those of the wrapped optimizer.
        if not isinstance(module, ShardedModule) or not module.plan.gradient_statistics:
            raise ShardGraphError(
                "AdaScale reads how gradients differ between ranks, and this module does not measure it: give it the "
                "module that shardgraph.compile(..., gradient_statistics=True) returns"
            )
        adopt(optimizer)  # gains are read before its first step
        self.optimizer, self._module, self._debias = optimizer, module, debias_ewma
        self._is_scaled_loss, self._scale = is_scaled_loss, None if scale is None else _checked_scale(scale)
        self._averages = [_Averages() for _ in optimizer.param_groups]
        self._seen: list[Measured] = []
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            self._smoothing = smoothing

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def samples(self) -> int:
        """The number of gradients whose mean is that of a step."""
        return self._module.plan.data_size * self._accumulated

    @property
    def scale(self) -> float:
        """How many small batches the batch of a step is."""
        return float(self.samples) if self._scale is None else self._scale

    def set_scale(self, scale: float) -> None:
        """Set the number of small batches in the batch of a step, when the latter has changed."""
        self._scale = _checked_scale(scale)

    @property
    def smoothing(self) -> float:
        """The factor of earlier steps in exponential averages."""
        return self._smoothing

    @checked(update_smoothing=BOOL)
    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Set how many backward passes make up a step, between steps. A ``scale`` that was given remains as it is."""
        count = num_gradients_to_accumulate
        expect(is_whole(count, 1), "num_gradients_to_accumulate", count, "a whole number from 1")
        if count > 1 and self._module.plan.data_size == 1:
            raise ShardGraphError(
                f"num_gradients_to_accumulate is {count}, and on one data-parallel rank gradients are not reduced, so "
                "they are not measured: it may be 1, or the plan one with several data-parallel ranks"
            )
        self._accumulated = count
        if update_smoothing:
            self._smoothing = max(0.0, 1 - self.samples / 1000)

    def gain(self, pg_idx: int | None = None) -> float:
        """The gain of a parameter group, or of all together, with the latest gradients: from 1 to ``scale``."""
        self._update()
        if pg_idx is not None:
            count = len(self._averages)
            expect(is_whole(pg_idx, 0) and pg_idx < count, "pg_idx", pg_idx, f"the index of one of {count} groups")
        chosen = self._averages if pg_idx is None else [self._averages[pg_idx]]
        variance, square = sum(each.variance for each in chosen), sum(each.square for each in chosen)
        return (variance + square) / (variance / self.scale + square) if variance + square else 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, with the learning rate of each parameter group multiplied by its gain.

        ``closure``, if given, computes the gradients, once.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        gains = [self.gain(index) for index in range(len(self.param_groups))]
        rates = [group["lr"] for group in self.param_groups]
        try:
            for group, gain in zip(self.param_groups, gains, strict=True):
                group["lr"] = gain * group["lr"]
            self.optimizer.step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and what has been measured of them."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose averages begin with its first step."""
        self.optimizer.add_param_group(param_group)
        self._averages.append(_Averages())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the averages under ``"adascale"``."""
        return {**self.optimizer.state_dict(), "adascale": [asdict(each) for each in self._averages]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. Without averages, as of the optimizer alone, they begin anew."""
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "adascale"})
        stored = state_dict.get("adascale", [{} for _ in self.param_groups])
        self._averages = [_Averages(**each) for each in stored]

    def __repr__(self) -> str:
        return f"AdaScale(scale={self.scale:g}, smoothing={self.smoothing:g}, {self.optimizer!r})"

    def _update(self) -> None:
        """Add what has been measured since the last time to the averages."""
        groups = [list(self._measured(group["params"])) for group in self.param_groups]
        latest = [each for group in groups for each in group]
        if self.samples == 1 or not latest or all(each in self._seen for each in latest):
            return
        self._seen = latest
        backwards = max(each.backwards for each in latest)  # in some of which a parameter may have been unused
        if backwards != self._accumulated:
            raise ShardGraphError(
                f"a step is of {backwards} backward passes, and "
                f"num_gradients_to_accumulate is {self._accumulated}: call set_num_gradients_to_accumulate with the "
                "number of passes, all but the last of which are under no_sync()"
            )
        # One transfer from the device.
        values = torch.stack([value for each in latest for value in (each.parts, each.mean)]).tolist()
        remaining = iter(zip(values[::2], values[1::2], strict=True))
        for group, averages in zip(groups, self._averages, strict=True):
            own = [next(remaining) for _ in group]
            variance, square = self._estimates(math.fsum(p for p, _ in own), math.fsum(m for _, m in own))
            if group and math.isfinite(variance) and math.isfinite(square):  # not of a step that overflows
                averages.add(variance, square, self._smoothing, self._debias)

    def _measured(self, parameters: Sequence[torch.Tensor]) -> Iterator[Measured]:
        """What has been measured of each parameter since its gradient was cleared."""
        measured = self._module.gradient_statistics.measured
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for parameter in parameters:
            found = measured.get(names.get(id(parameter), ""), [])
            if len(found) > 1:
                raise ShardGraphError(
                    f"gradients have been reduced {len(found)} times since they were cleared, and what is measured is "
                    "of one reduction: call zero_grad() after each step, and accumulate under no_sync() of the module"
                )
            yield from found

    def _estimates(self, parts: float, mean: float) -> tuple[float, float]:
        """The variance of a small batch's gradient, and the squared norm of its expectation, as of one step.

        Each of the N gradients is of a batch that is ``scale / N`` small ones, so that the variance of a small one is
        that many times the one between them; of the mean's squared norm, the variance of the mean is noise.
        """
        if self._is_scaled_loss:
            parts *= self._accumulated**2
        else:
            mean /= self._accumulated**2
        variance = self.scale / (self.samples - 1) * (parts / self.samples - mean)
        return max(0.0, variance), max(0.0, mean - variance / self.scale)


def _checked_scale(scale: float) -> float:
    return float(_SCALE.check("scale", scale))
