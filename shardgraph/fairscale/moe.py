"""FairScale's mixture of experts, with the experts of all ranks in one module."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from shardgraph.arguments import GROUP, MODEL, WHOLE, checked
from shardgraph.errors import ShardGraphError
from shardgraph.nn.gating import Routing, TopKGate


class Top2Gate(TopKGate):
    """``fairscale.nn.Top2Gate``: two experts for each token, as :class:`shardgraph.nn.TopKGate` chooses them.

    The second is sampled in training, not in evaluation. Its matrix is ``weight``; checkpoints of FairScale, which call
    it ``wg.weight``, load.

    Args:
        model_dim: width of a token.
        num_experts: experts of all ranks together.
    """

    @checked(model_dim=WHOLE, num_experts=WHOLE)
    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__(model_dim, num_experts, 2, 1.0, sampled=True)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Route ``input`` [tokens, model_dim].

        Returns: the auxiliary loss, a scalar; the weight of each place of a token in an expert's buffer, [tokens,
        experts, capacity]; and whether it has one.
        """
        routing = super().forward(input.unsqueeze(0))
        weights = _by_place(routing, self.num_experts, self.capacity(len(input))).to(input.dtype)
        return (routing.aux_loss / self.num_experts**2).to(input.dtype), weights, weights.bool()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "wg.weight" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "wg.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _by_place(routing: Routing, experts: int, capacity: int) -> Tensor:
    """The weights of the one group of tokens, [tokens, experts, capacity]."""
    expert = F.one_hot(routing.experts[0], experts)
    place = F.one_hot(routing.positions[0].clamp_max(capacity - 1), capacity)
    return torch.einsum("ks,kse,ksc->sec", routing.weights[0], expert.to(routing.weights), place.to(routing.weights))


class MOELayer(nn.Module):
    """``fairscale.nn.MOELayer``: each token through the experts that ``gate`` chooses, and their weighted sum.

    ``experts`` are all of them, where FairScale's ranks each make their own: the plan ``"ep"`` divides them among
    ranks, ``"fsdp"`` their elements. They compute as one, with parameters of each name stacked: ``experts.fc.weight``
    is [experts, ...]. The auxiliary loss of the latest call is ``l_aux``.

    Args:
        gate: returns the auxiliary loss, weights [tokens, experts, capacity] and where there is one, of [tokens,
            width]; such as :class:`Top2Gate`.
        experts: modules of one kind and one size, or one expert, which take and return [rows, width].
        group: all ranks; others are refused.

    Raises:
        ShardGraphError: the experts are not alike, or have buffers, or ``group`` is not all ranks.
    """

    l_aux: Tensor | None

    @checked(gate=MODEL, experts=MODEL, group=GROUP)
    def __init__(self, gate: nn.Module, experts: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if group is not None and dist.get_world_size(group) < dist.get_world_size():
            raise ShardGraphError(
                f"MOELayer was given a group of {dist.get_world_size(group)} of {dist.get_world_size()} ranks: the "
                "plan says which ranks share experts, such as 'ddp+ep' with a mesh; leave group out"
            )
        each = list(experts) if isinstance(experts, nn.ModuleList) else [experts]
        self.gate, self.num_experts, self.experts = gate, len(each), _stacked(each)
        self.l_aux = None

    def forward(self, input: Tensor) -> Tensor:
        """The experts' results of ``input`` [sequences, tokens, width], of the same shape.

        Raises:
            ShardGraphError: ``input`` has not three dimensions, or the gate chooses among other experts than there are.
        """
        if input.dim() != 3:
            raise ShardGraphError(f"MOELayer was given {list(input.shape)}, and takes [sequences, tokens, width]")
        tokens = input.flatten(0, 1)
        self.l_aux, weights, there = self.gate(tokens)
        if weights.shape[1] != self.num_experts:
            raise ShardGraphError(
                f"the gate chooses among {weights.shape[1]} experts, and MOELayer was given {self.num_experts}: give "
                "it the experts of all ranks, which the plan 'ep' divides"
            )
        sent = torch.einsum("sec,sm->ecm", there.to(tokens.dtype), tokens)
        received = torch.vmap(self._expert, randomness="different")(dict(self.experts.named_parameters()), sent)
        return torch.einsum("sec,ecm->sm", weights, received).view(input.shape)

    def _expert(self, parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
        result: Tensor = functional_call(self.experts, parameters, (rows,))
        return result


def _stacked(experts: list[nn.Module]) -> nn.Module:
    """The first expert, with the parameters of all of them stacked."""
    first = experts[0]
    for number, each in enumerate(experts):
        if type(each) is not type(first) or _sizes(each) != _sizes(first):
            raise ShardGraphError(
                f"expert {number} of MOELayer is not like the first: they compute together, as {first} with "
                "stacked parameters; make them of one class and one size"
            )
        if next(each.buffers(), None) is not None:
            raise ShardGraphError(f"expert {number} of MOELayer has buffers, which all experts would share: use none")
    parameters, _ = stack_module_state(experts)
    stacked = copy.deepcopy(first)
    for name, parameter in parameters.items():
        owner, _, own = name.rpartition(".")
        setattr(stacked.get_submodule(owner), own, nn.Parameter(parameter.detach().clone()))
    return stacked


def _sizes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
