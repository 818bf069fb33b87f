"""A sharded optimizer of any kind: each rank owns some parameters whole, and updates them for all
(Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054, stage 1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph.arguments import BOOL, CALLABLE, DTYPE, GROUP, MAKES_OPTIMIZER, PARAMETERS, Kind, checked
from shardgraph.errors import CheckpointError, ShardGraphError, expect
from shardgraph.module.gradient_norm import clip_grad_norm_
from shardgraph.module.replaced import current
from shardgraph.module.state_on_disk import keep_state_as_of
from shardgraph.optim.consolidation import consolidated
from shardgraph.optim.ownership import balanced_owners
from shardgraph.optim.rows import gather_rows, in_rows, scatter_rows
from shardgraph.runtime.watch import translated
from shardgraph.sizes import is_whole
from shardgraph.torch_api import local_tensor, ordered_group

_OF_PARAMETERS = ("params", "param_names")  # what is no option of a parameter group
_MESSAGE = 2**18  # elements up to which small parameters are sent together

_STATE = Kind(
    "the state dict of an optimizer, with 'state' and 'param_groups'",
    lambda value: isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys(),
)


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps any torch optimizer with its state spread over ranks by whole parameters, balanced by size.

    Each rank runs an optimizer of its own parameters alone, which sees plain whole tensors, so that ones that need them
    (Muon, Adafactor, LARS) compute what they would on one rank. Parameters that are whole on every rank, as under the
    plan ``"ddp"`` or ``DistributedDataParallel``, are then broadcast by their owners, all at once. Of parameters stored
    in shards of rows (``"zero1"``, ``"zero2"``, ``"fsdp"``) the owner gathers values and gradients, and scatters new
    values. Under these an optimizer that works element by element needs no wrapper: its state is of shards::

        sharded = shardgraph.compile(model, "ddp")
        optimizer = shardgraph.ShardedOptimizer(sharded.parameters(), torch.optim.Adafactor, lr=1e-2)

    Parameter groups, and a scheduler on them, are those of the unsharded optimizer; so is the format of
    :meth:`state_dict`, whatever the number of ranks. It may be made before ``shardgraph.compile``.

    Args:
        params: parameters or parameter groups, the same on every rank.
        optim: makes the optimizer of parameter groups, some of which may be empty; ``torch.optim.Adam``. It updates a
            parameter by that parameter's gradient: not by those of others, which may be another rank's.
        group: the ranks that share the work; default: all.
        broadcast_dtype: the dtype in which new values are sent, to which every rank rounds them. Updates that are
            smaller than its resolution are lost. Default: that of the parameter.
        state_as_objects: send state in pickled form when it is consolidated: for tensors that cannot be sent.
        defaults: options of ``optim``.

    Raises:
        ShardGraphError: ``optim`` evaluates the loss itself, as ``LBFGS`` does, or a parameter is stored otherwise.
    """

    optim: torch.optim.Optimizer

    @checked(
        params=PARAMETERS,
        optim=MAKES_OPTIMIZER,
        group=GROUP,
        broadcast_dtype=DTYPE,
        state_as_objects=BOOL,
    )
    def __init__(
        self,
        params: Any,
        optim: Callable[..., torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        broadcast_dtype: torch.dtype | None = None,
        state_as_objects: bool = False,
        **defaults: Any,
    ) -> None:
        _check_kind(optim)
        self._group = ordered_group(group) if dist.is_initialized() else None
        self._rank, ranks = (dist.get_rank(self._group), dist.get_world_size(self._group)) if self._group else (0, 1)
        self._loads, self._owners = [0] * ranks, list[list[int]]()
        self._broadcast_dtype, self._state_as_objects = broadcast_dtype, state_as_objects
        self._whole: Any = WeakIdKeyDictionary()  # by DTensor, the plain tensor that its owner's optimizer sees
        self._consolidated: dict[int, Any] | None = None
        super().__init__(params, defaults)
        owned = [self._owned(index) for index in range(len(self.param_groups))]
        groups = [{**_options(group), "params": own} for group, own in zip(self.param_groups, owned, strict=True)]
        self.optim = optim(groups, **defaults)
        self._follow_optimizer()

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return len(self._loads)

    @property
    def owners(self) -> list[list[int]]:
        """The rank in the group that owns each parameter of each parameter group."""
        return [list(owners) for owners in self._owners]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, each of whose parameters goes to the rank that owns least."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._owners.append(balanced_owners([parameter.numel() for parameter in group["params"]], self._loads))
        if "optim" in vars(self):  # not while torch's constructor adds the first ones
            self.optim.add_param_group({**_options(group), "params": self._owned(len(self.param_groups) - 1)})
            self._follow_optimizer()

    def refresh(self) -> None:
        """Take note of what has changed: parameters that ``shardgraph.compile`` has replaced, and options of groups.

        :meth:`step` does so by itself.
        """
        for index, (group, own) in enumerate(zip(self.param_groups, self.optim.param_groups, strict=True)):
            group["params"][:] = map(current, group["params"])
            owned = self._owned(index)
            for before, now in zip(own["params"], owned, strict=True):
                if now is not before and before in self.optim.state:
                    self.optim.state[now] = self.optim.state.pop(before)
            own["params"][:] = owned  # in place, since some optimizers keep the list
            own.update(_options(group))

    @torch.no_grad()
    @translated
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters, and take the others' from their owners. All ranks must call it.

        ``closure``, if given, computes the gradients, once.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._consolidated = None  # it would be of the step before
        self.refresh()
        self._take_gradients()
        self.optim.step(**kwargs)
        self._scatter()
        for parameter, whole in self._pairs():
            if whole is not parameter:
                whole.grad = None
        self._follow_optimizer()
        self._broadcast()
        return loss

    @checked(filter_params_fn=CALLABLE)
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ) -> torch.Tensor:
        """Scale the gradients of all parameters, of all ranks, down to a total norm of at most ``max_norm``.

        ``filter_params_fn`` may leave out some of the parameters that it is given. Returns the norm before clipping.
        """
        self.refresh()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return clip_grad_norm_(filter_params_fn(parameters) if filter_params_fn else parameters, max_norm, norm_type)

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Bring the state of all parameters together on one rank of the group, or with -1 on every one, in CPU memory.

        :meth:`state_dict` then returns it there, until the next step. All ranks must call it. Tensors are sent one at a
        time, so that only the recipient holds them all.
        """
        ranks = self.world_size
        fits = is_whole(recipient_rank, -1) and recipient_rank < ranks
        expect(fits, "recipient_rank", recipient_rank, f"a rank below {ranks}, or -1 for all")
        own = self._own_state()
        if self._group is None:
            self._consolidated = own
            return
        device = next(local_tensor(each).device for group in self.param_groups for each in group["params"])
        recipient = None if recipient_rank == -1 else recipient_rank
        self._consolidated = consolidated(own, self._group, recipient, device, self._state_as_objects)

    @checked(all_ranks=BOOL)
    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The state of all parameters in the format of the unsharded optimizer, which loads it, as this class does on
        any number of ranks.

        On the rank that :meth:`consolidate_state_dict` brought it to; with ``all_ranks`` on every rank, which all must
        then call it for.

        Raises:
            CheckpointError: the state has not been consolidated on this rank since the latest step.
        """
        if all_ranks or self._group is None:
            self.consolidate_state_dict(-1)
        if self._consolidated is None:
            raise CheckpointError(
                "the state of this optimizer is spread over ranks, and this rank has not received it since the latest "
                "step: call consolidate_state_dict(recipient_rank) on all ranks, and state_dict() on the recipient; "
                "or state_dict(all_ranks=True) on all; or local_state_dict() for what this rank has"
            )
        return {"state": dict(self._consolidated), "param_groups": self._packed_groups()}

    def local_state_dict(self) -> dict[str, Any]:
        """As :meth:`state_dict`, with the state of this rank's parameters alone; no communication.

        The states of all ranks together are the whole one. Ranks that own the same parameters load it.
        """
        return {"state": self._own_state(), "param_groups": self._packed_groups()}

    @torch.no_grad()
    @checked(state_dict=_STATE)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the unsharded optimizer, or of this class on any number of ranks; each rank takes what is
        of its parameters.

        Raises:
            CheckpointError: it is of other parameter groups; nothing has been loaded.
        """
        self.refresh()
        saved, sizes = state_dict["param_groups"], [len(group["params"]) for group in self.param_groups]
        if (theirs := [len(group["params"]) for group in saved]) != sizes:
            raise CheckpointError(
                f"the state is of parameter groups of {theirs} parameters, and this optimizer has groups of {sizes}: "
                "make it with the groups that the state was saved with, and add those that were added"
            )
        numbers, own = iter(number for group in saved for number in group["params"]), []
        for owners in self._owners:
            own.append([number for owner, number in zip(owners, numbers, strict=False) if owner == self._rank])
        mine = {number for numbers in own for number in numbers}
        self.optim.load_state_dict(
            {
                "state": {number: state for number, state in state_dict["state"].items() if number in mine},
                "param_groups": [{**_options(group), "params": n} for group, n in zip(saved, own, strict=True)],
            }
        )
        for group, theirs in zip(self.param_groups, saved, strict=True):
            group.update(_options(theirs))
        self._follow_optimizer()
        self._consolidated = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size}, {self.optim!r})"

    def _owned(self, index: int) -> list[torch.Tensor]:
        """The parameters of a group that this rank owns, as plain tensors."""
        parameters = self.param_groups[index]["params"]
        _check_placed(parameters, index, self.world_size)
        return [
            self._plain(parameter)
            for parameter, owner in zip(parameters, self._owners[index], strict=True)
            if owner == self._rank
        ]

    def _plain(self, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        if parameter not in self._whole:
            local = local_tensor(parameter).detach()
            value = local.new_zeros(parameter.shape) if in_rows(parameter, self.world_size) else local
            self._whole[parameter] = nn.Parameter(value, parameter.requires_grad)
            keep_state_as_of(parameter, self._whole[parameter])
        whole: torch.Tensor = self._whole[parameter]
        return whole

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter of this rank, with the plain tensor that its optimizer updates."""
        for _, owner, parameter in self._numbered():
            if owner == self._rank:
                yield parameter, self._plain(parameter)

    def _numbered(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Each parameter, with its number in torch's format, and its owner."""
        number = 0
        for group, owners in zip(self.param_groups, self._owners, strict=True):
            for parameter, owner in zip(group["params"], owners, strict=True):
                yield number, owner, parameter
                number += 1

    def _follow_optimizer(self) -> None:
        """Take over options that this rank's optimizer has set, and its state under our name."""
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_options(own))
        self.state = self.optim.state

    def _updated(self, rows: bool) -> list[tuple[torch.Tensor, int]]:
        """The parameters that a step updates, with their owners: those stored in shards of ``rows``, or the others."""
        updated = ((p, owner) for _, owner, p in self._numbered() if p.grad is not None)
        return [(p, owner) for p, owner in updated if in_rows(p, self.world_size) is rows]

    def _take_gradients(self) -> None:
        """Give this rank's optimizer the gradients of its parameters; of those stored in shards, which owners gather,
        the values too."""
        for parameter, owner in self._updated(rows=False):
            if owner == self._rank and isinstance(parameter, DTensor):
                self._plain(parameter).grad = local_tensor(_gradient_of(parameter))
        if (group := self._group) is None or not (sharded := self._updated(rows=True)):
            return
        values = gather_rows(sharded, group)
        gradients = gather_rows([(_gradient_of(parameter), owner) for parameter, owner in sharded], group)
        for (parameter, _), value, gradient in zip(sharded, values, gradients, strict=True):
            if value is not None:
                whole = self._plain(parameter)
                whole.copy_(value)
                whole.grad = gradient

    def _scatter(self) -> None:
        """Write what owners have made of these parameters to the shards of all ranks."""
        if (group := self._group) is None or not (sharded := self._updated(rows=True)):
            return
        new = [self._plain(parameter) if owner == self._rank else None for parameter, owner in sharded]
        scatter_rows(new, sharded, group)

    def _broadcast(self) -> None:
        """Send the parameters that a step has updated to all ranks: started together, awaited together."""
        if self._group is None:
            return
        in_flight = []
        for owner, values in self._messages():
            dtype = self._broadcast_dtype or values[0].dtype
            sent = values[0].to(dtype).contiguous() if len(values) == 1 else _packed(values).to(dtype)
            work = dist.broadcast(sent, group=self._group, group_src=owner, async_op=True)
            in_flight.append((work, sent, values))
        for work, sent, values in in_flight:
            work.wait()
            if sent is not values[0]:
                parts = sent.view(-1).split([value.numel() for value in values])
                for value, part in zip(values, parts, strict=True):
                    value.copy_(part.view(value.shape))

    def _messages(self) -> list[tuple[int, list[torch.Tensor]]]:
        """The updated values of each message with their owner: large ones by themselves, small ones together."""
        messages: list[tuple[int, list[torch.Tensor]]] = []
        filling: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for parameter, owner in self._updated(rows=False):
            value = local_tensor(parameter).detach()
            together = filling.get((owner, value.dtype))
            if value.numel() > _MESSAGE:
                messages.append((owner, [value]))
            elif together is not None and sum(each.numel() for each in together) + value.numel() <= _MESSAGE:
                together.append(value)
            else:
                filling[owner, value.dtype] = together = [value]
                messages.append((owner, together))
        return messages

    def _own_state(self) -> dict[int, Any]:
        mine = ((number, self._plain(p)) for number, owner, p in self._numbered() if owner == self._rank)
        return {number: self.optim.state[whole] for number, whole in mine if whole in self.optim.state}

    def _packed_groups(self) -> list[dict[str, Any]]:
        """The parameter groups in torch's format, with numbers for parameters."""
        numbers = iter(number for number, _, _ in self._numbered())
        return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]


def _packed(values: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values])


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def _check_kind(optim: Callable[..., torch.optim.Optimizer]) -> None:
    closure = inspect.signature(optim.step).parameters.get("closure") if hasattr(optim, "step") else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ShardGraphError(
            f"{getattr(optim, '__name__', optim)} evaluates the loss as often as it needs, by all parameters together, "
            "and here each rank updates some of them by their gradients: use it without sharding, or an optimizer "
            "that takes gradients, such as Adam"
        )


def _check_placed(parameters: Iterable[torch.Tensor], index: int, ranks: int) -> None:
    for position, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor) or in_rows(parameter, ranks):
            continue
        if not all(each.is_replicate() for each in parameter.placements):
            raise ShardGraphError(
                f"parameter {position} of parameter group {index}, of shape {list(parameter.shape)}, is placed as "
                f"{list(parameter.placements)}, and its owner can gather it if it is in shards of rows over all "
                f"{ranks} ranks: compile the model with plan 'ddp', 'zero1', 'zero2' or 'fsdp', or give the parameters "
                "to an optimizer that works element by element, which needs no wrapper"
            )
