"""Stochastic gradient push (Assran, Loizou, Ballas and Rabbat, 2019, https://arxiv.org/abs/1811.10792)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardgraph.errors import ShardGraphError, expect
from shardgraph.module.sharded import ShardedModule
from shardgraph.optim.replicas import OfReplicas
from shardgraph.runtime import watch
from shardgraph.runtime.watch import translated
from shardgraph.sizes import is_whole
from shardgraph.torch_api import local_tensor


class _Message(NamedTuple):
    """A message to a peer and one from another, on their way."""

    works: tuple[Any, Any]
    sent: torch.Tensor
    received: torch.Tensor


class StochasticGradientPush(OfReplicas):
    """Steps an optimizer on each replica of a model, and mixes each with that of one other rank per step.

    Replicas are sums x with weights w (push-sum); the parameters are z = x / w, and a step of the optimizer moves x as
    it moves z. Then each rank keeps half of x and w, and sends the other half to the rank that is 1, 2, 4, ... further,
    by turns, so that news reaches all N ranks in log2 N steps. A step sends as many bytes as there are parameters, and
    no rank waits for more than one other::

        sharded = shardgraph.compile(model, "local-sgd")
        optimizer = StochasticGradientPush(torch.optim.SGD(sharded.parameters(), lr=0.1), sharded)

    Replicas differ at all times; :class:`shardgraph.SlowMo` around this one brings them together now and then.

    Args:
        optimizer: updates the parameters of ``module``, which are of one dtype.
        module: compiled under ``"local-sgd"``, alone or before the plan of a replica.
        staleness: how many steps a message is on its way, beside computation; 0: it is awaited in its own step.

    Raises:
        ShardGraphError: the module has no replicas, or an argument cannot be.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: ShardedModule, *, staleness: int = 0) -> None:
        expect(is_whole(staleness, 0), "staleness", staleness, "a whole number of steps from 0")
        super().__init__(optimizer, module)
        dtypes = {parameter.dtype for parameter in self._parameters()}
        if len(dtypes) > 1:
            raise ShardGraphError(
                f"a message has the parameters of one dtype, and these are of {sorted(map(str, dtypes))}: store them "
                "in one (precision= computes in another), or use LocalSGD"
            )
        self.staleness, self.weight = staleness, 1.0
        self._steps, self._in_flight = 0, deque[_Message]()
        self._offset: torch.Tensor | None = None
        self._hops = [2**i for i in range((self._count - 1).bit_length())]

    @translated
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's replica, and mix it with another."""
        self.begin()
        loss = self.optimizer.step(closure)
        self.exchange()
        return loss

    @torch.no_grad()
    def begin(self) -> None:
        """Note x - z, which a step of the optimizer keeps. For loops that step it by themselves."""
        self._offset = None if self.weight == 1 else (self.weight - 1) * self._flat()

    @torch.no_grad()
    def exchange(self) -> None:
        """Send half of x and w, and add what is due of other ranks; after a step of the optimizer."""
        if self._count == 1:
            return
        z = self._flat()
        x = z if self._offset is None else z + self._offset
        half = torch.cat([x, x.new_tensor([self.weight])]) / 2
        self._in_flight.append(self._posted(half))
        self._steps += 1
        if len(self._in_flight) > self.staleness:
            half = half + self._arrived()
        self._set(half)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in which replicas are equal; all ranks must call it."""
        self.drain()  # messages have the parameters so far
        super().add_param_group(param_group)

    @torch.no_grad()
    def drain(self) -> None:
        """Take in what is on its way to this rank, between steps; all ranks must call it."""
        if self._in_flight:
            sums = torch.cat([self._flat(), self._flat().new_ones(1)]) * self.weight
            while self._in_flight:
                sums += self._arrived()
            self._set(sums)

    @torch.no_grad()
    def settle(self) -> None:
        """:meth:`drain`, and leave x as parameters, with weight 1: their mean is that of all replicas, and is taken
        next."""
        self.drain()
        for parameter in self._parameters():
            local_tensor(parameter).mul_(self.weight)
        self.weight = 1.0

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state of this rank, and the weight of its parameters, which first :meth:`drain`; all ranks
        must call it, and save parameters after."""
        self.drain()
        return {**self.optimizer.state_dict(), "push": {"steps": self._steps, "weight": self.weight}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, or the state of the optimizer alone."""
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != "push"})
        own = state_dict.get("push", {"steps": 0, "weight": 1.0})
        self._steps, self.weight = own["steps"], own["weight"]

    def __repr__(self) -> str:
        return f"StochasticGradientPush({self._count} replicas, staleness {self.staleness}, {self.optimizer!r})"

    def _flat(self) -> torch.Tensor:
        """The parameters z as one dimension."""
        return torch.cat([local_tensor(parameter).detach().reshape(-1) for parameter in self._parameters()])

    def _posted(self, half: torch.Tensor) -> _Message:
        group, tag = self._module.replicas, self._steps % 1024
        assert group is not None
        watch.place.with_messages.add(str(group.group_name))
        rank, hop = dist.get_rank(group), self._hops[self._steps % len(self._hops)]
        received = torch.empty_like(half)
        receiving = dist.irecv(received, group=group, group_src=(rank - hop) % self._count, tag=tag)
        sending = dist.isend(half, group=group, group_dst=(rank + hop) % self._count, tag=tag)
        return _Message((sending, receiving), half, received)

    def _arrived(self) -> torch.Tensor:
        message = self._in_flight.popleft()
        for work in message.works:
            work.wait()
        return message.received

    def _set(self, sums: torch.Tensor) -> None:
        """Set parameters to x / w, of x with w behind it."""
        self.weight, self._offset = sums[-1].item(), None
        parts = (sums[:-1] / sums[-1]).split([local_tensor(parameter).numel() for parameter in self._parameters()])
        for parameter, part in zip(self._parameters(), parts, strict=True):
            local = local_tensor(parameter)
            local.copy_(part.view(local.shape))
