"""Replicas that train by themselves and are averaged now and then: local SGD (Stich, 2018,
https://arxiv.org/abs/1805.09767), SlowMo (Wang, Tantia, Ballas and Rabbat, 2020, https://arxiv.org/abs/1910.00643) and
DiLoCo (Douillard et al., 2023, https://arxiv.org/abs/2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.arguments import CALLABLE, OPTIMIZER, POSITIVE, checked, number, of_plan, whole
from shardgraph.module.sharded import COMPILED, ShardedModule
from shardgraph.optim.gossip import StochasticGradientPush
from shardgraph.optim.replicas import OfReplicas
from shardgraph.runtime.watch import translated
from shardgraph.torch_api import all_gather, local_tensor, reduce_scatter

Outer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_STEPS = of_plan(whole(1, "a whole number of steps"))
MOMENTUM = of_plan(number("from 0 to less than 1", lambda value: 0 <= value < 1))


class LocalSGD(OfReplicas):
    """Steps an optimizer on each replica of a model, and every ``frequency`` steps brings the replicas together.

    Without ``outer`` all take their mean (local SGD). With it, what the mean has moved since the replicas were last
    together is the gradient of an outer step from there; DiLoCo is Nesterov momentum as outer optimizer::

        sharded = shardgraph.compile(model, "local-sgd")
        nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        optimizer = LocalSGD(torch.optim.AdamW(sharded.parameters()), sharded, frequency=500, outer=nesterov)

    Each replica does the outer step for its part of every parameter: one reduce-scatter of parameters before, one
    all-gather after, all in flight together, and 1/N of the outer optimizer's state. Buffers of forward are averaged.
    State of ``optimizer`` is each replica's own, and stays. Replicas are equal after a multiple of ``frequency`` steps:
    evaluate and save then.

    Args:
        optimizer: updates the parameters of ``module``, of all of which replicas take the mean.
        module: compiled under ``"local-sgd"``, alone or before the plan of a replica (``"local-sgd+fsdp"``).
        frequency: the number of steps in a round.
        outer: makes the outer optimizer of parameter groups; it has to work element by element, as SGD and Adam do.
        average_frequency: also take the mean every so many steps, between outer steps.

    Raises:
        ShardGraphError: the module reduces gradients over all ranks, or an argument cannot be.
    """

    @checked(optimizer=OPTIMIZER, module=COMPILED, frequency=_STEPS, outer=CALLABLE, average_frequency=_STEPS)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: ShardedModule,
        *,
        frequency: int,
        outer: Outer | None = None,
        average_frequency: int | None = None,
    ) -> None:
        super().__init__(optimizer, module)
        self.frequency, self.average_frequency, self._steps = frequency, average_frequency, 0
        self.outer: torch.optim.Optimizer | None = None
        if outer is not None:
            made = outer([self._starts_of(group) for group in optimizer.param_groups])
            self.outer = OPTIMIZER.check("LocalSGD(): what outer() returned", made)

    @property
    def together(self) -> bool:
        """Whether the replicas are equal: no step has been made since the latest outer step."""
        return self._steps % self.frequency == 0

    @translated
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's replica and, when a round is complete, bring the replicas together."""
        self.begin()
        loss = self.optimizer.step(closure)
        self.advance()
        return loss

    @torch.no_grad()
    def begin(self) -> None:
        """Note where a round starts. For loops that step the optimizer by themselves; :meth:`step` does it."""
        if self.outer is not None and self.together:
            for parameter, start in self._pairs():
                start.copy_(self._part_of(self._flat(parameter)))

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step of the optimizer, and bring the replicas together if they are due."""
        self._steps += 1
        if self.together:
            self._bring_together(self.outer)
        elif self.average_frequency is not None and self._steps % self.average_frequency == 0:
            self._bring_together(None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in which replicas are equal."""
        super().add_param_group(param_group)
        if self.outer is not None:
            self.outer.add_param_group(self._starts_of(self.param_groups[-1]))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with that of the outer step under ``"local_sgd"``; both are of this rank alone, as its
        parameters are."""
        outer = self.outer
        starts = [] if outer is None else [start.detach().clone() for _, start in self._pairs()]
        own = {"steps": self._steps, "starts": starts, "outer": None if outer is None else outer.state_dict()}
        return {**self.optimizer.state_dict(), "local_sgd": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, of as many replicas. Of the optimizer alone, a round and
        the outer step begin anew."""
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "local_sgd"})
        own = state_dict.get("local_sgd", {"steps": 0})
        self._steps = own["steps"]
        if self.outer is not None and own.get("outer") is not None:
            self.outer.load_state_dict(own["outer"])
            for (_, start), stored in zip(self._pairs(), own["starts"], strict=True):
                start.copy_(stored)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(every {self.frequency} steps of {self._count} replicas, {self.optimizer!r})"

    def _bring_together(self, outer: torch.optim.Optimizer | None) -> None:
        if isinstance(self.optimizer, StochasticGradientPush):
            self.optimizer.settle()
        flats = {parameter: self._flat(parameter) for parameter in self._parameters()}
        means = {parameter: torch.empty_like(self._part_of(flat)) for parameter, flat in flats.items()}
        self._communicate(reduce_scatter, [(means[each], flat) for each, flat in flats.items()])
        for mean in means.values():
            mean /= self._count
        if outer is not None:
            self._step_outer(outer, means)
            means = {parameter: start.detach() for parameter, start in self._pairs()}
        self._communicate(all_gather, [(flat, means[each]) for each, flat in flats.items()])
        for parameter, flat in flats.items():
            local = local_tensor(parameter)
            if flat.data_ptr() != local.data_ptr():
                local.copy_(flat[: local.numel()].view(local.shape))
        buffers = [buffer for buffer in self._module.buffers() if buffer.is_floating_point()]
        self._communicate(dist.all_reduce, [(buffer,) for buffer in buffers])
        for buffer in buffers:
            buffer /= self._count

    def _step_outer(self, outer: torch.optim.Optimizer, means: dict[torch.Tensor, torch.Tensor]) -> None:
        """Step from where the round started, by what the mean has moved since."""
        for parameter, start in self._pairs():
            start.grad = start.detach() - means[parameter]
        self._scale(outer)
        outer.step()
        outer.zero_grad()

    def _scale(self, outer: torch.optim.Optimizer) -> None:
        """Change gradients of the outer step, and its rate, before it is made."""

    def _communicate(self, collective: Callable[..., Any], calls: list[tuple[torch.Tensor, ...]]) -> None:
        """Call ``collective`` with each of these over the replicas, all in flight together."""
        group = self._module.replicas
        if group is None:  # a single replica: the result is the argument
            for result, *given in calls:
                result.copy_(given[0] if given else result)
            return
        for work in [collective(*call, group=group, async_op=True) for call in calls]:
            work.wait()

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter, with this replica's part of where the round started."""
        assert self.outer is not None
        for group, starts in zip(self.param_groups, self.outer.param_groups, strict=True):
            pairs = zip(group["params"], starts["params"], strict=True)
            yield from ((parameter, start) for parameter, start in pairs if start.numel())

    def _starts_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The outer parameter group for one of the optimizer's."""
        flats = (self._flat(parameter) for parameter in group["params"])
        return {"params": [nn.Parameter(self._part_of(flat).detach().clone()) for flat in flats]}

    def _flat(self, parameter: torch.Tensor) -> torch.Tensor:
        """A rank's elements of a parameter as one dimension, with zeros to divide by replicas: a view if it can be."""
        flat = local_tensor(parameter).detach().reshape(-1)
        missing = -flat.numel() % self._count
        return nn.functional.pad(flat, (0, missing)) if missing else flat

    def _part_of(self, flat: torch.Tensor) -> torch.Tensor:
        length = flat.numel() // self._count
        group = self._module.replicas
        return flat.narrow(0, (0 if group is None else dist.get_rank(group)) * length, length)


class SlowMo(LocalSGD):
    """:class:`LocalSGD` whose outer step has slow momentum, in units of the optimizer's learning rate:

        u <- momentum * u + (start - mean) / rate
        parameters <- start - lr * rate * u

    so that a schedule of the learning rate does not rescale what the momentum remembers. The rate is that of the
    round's last step, for each parameter group its own. Arguments are those of :class:`LocalSGD`.

    Args:
        momentum: of the outer step, from 0 to less than 1; the more replicas, the higher.
        lr: of the outer step.
    """

    @checked(momentum=MOMENTUM, lr=POSITIVE)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: ShardedModule,
        *,
        frequency: int,
        momentum: float = 0.5,
        lr: float = 1.0,
        average_frequency: int | None = None,
    ) -> None:
        self._slow_rate = lr
        outer = partial(torch.optim.SGD, lr=lr, momentum=momentum)
        super().__init__(optimizer, module, frequency=frequency, outer=outer, average_frequency=average_frequency)

    def _scale(self, outer: torch.optim.Optimizer) -> None:
        for group, starts in zip(self.param_groups, outer.param_groups, strict=True):
            rate = group["lr"]
            starts["lr"] = self._slow_rate * rate
            for start in starts["params"]:
                if start.grad is not None and rate:  # at a rate of 0 nothing has moved
                    start.grad /= rate
