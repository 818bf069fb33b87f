"""``torch.nn.LSTM``, ``GRU`` and ``RNN``: written out, step after step, as operations that every plan can shard.

PyTorch has one kernel per device for a whole sequence, which no rule divides and whose choice depends on the device.
The same steps as a graph grow with the length of the sequence, of which the user is told from some length on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardgraph import torch_api
from shardgraph.errors import CaptureError

_MANY_STEPS = 512
"""Steps of all layers and directions together, from which on the user is told what they cost."""
_Cell = Callable[..., tuple[Tensor, ...]]


def with_own_weights(copied: nn.Module) -> nn.Module:
    """The private copy of a model, in which the list of parameters that every recurrent layer keeps is of its own."""
    for module in copied.modules():
        torch_api.list_weights(module)
    return copied


def check_recurrent(module: nn.Module, where: str) -> None:
    """Raise CaptureError if a recurrent layer computes one of its weights, which its list of them does not follow."""
    names = module._flat_weights_names if isinstance(module, nn.RNNBase) else ()
    if computed := [name for name in names if name not in module._parameters]:
        raise CaptureError(
            f"{where} is a recurrent layer whose {computed[0]!r} is computed at every call, as by weight_norm: only "
            "parameters may be weights of it. Compute the weights of an nn.LSTMCell, GRUCell or RNNCell, and call it "
            "in a loop over the positions"
        )


def _lstm_cell(gates: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    (hidden, cell), (recurrent, bias, projection) = state, weights
    entry, forget, new, out = (gates + F.linear(hidden, recurrent, bias)).chunk(4, 1)
    cell = forget.sigmoid() * cell + entry.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return (hidden if projection is None else F.linear(hidden, projection)), cell


def _gru_cell(gates: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    (hidden,), (recurrent, bias, _) = state, weights
    reset, update, new = gates.chunk(3, 1)
    of_reset, of_update, of_new = F.linear(hidden, recurrent, bias).chunk(3, 1)
    update = (update + of_update).sigmoid()
    new = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    return (new + update * (hidden - new),)


def _elman_cell(
    gates: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor | None], nonlinearity: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    (hidden,), (recurrent, bias, _) = state, weights
    return (nonlinearity(gates + F.linear(hidden, recurrent, bias)),)


def _layer(
    cell: _Cell, x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One direction of one layer over ``x [length, batch, features]``: all outputs, and the last state."""
    own, recurrent, *rest = weights
    bias, recurrent_bias = rest[:2] if has_biases else (None, None)
    projection = rest[-1] if len(rest) in (1, 3) else None
    # What does not wait for the step before is one product for all steps.
    steps = F.linear(x, own, bias).unbind(0)
    outputs = []
    for gates in reversed(steps) if reverse else steps:
        state = cell(gates, state, (recurrent, recurrent_bias, projection))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def _recurrent(
    cell: _Cell,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """All layers: outputs, and the last states ``[layers * directions, batch, features]``."""
    if not isinstance(has_biases, bool):  # in place of which a packed sequence has its states
        raise CaptureError(
            "a recurrent layer is called with a packed sequence, whose lengths would be constants of the program: "
            "give it the padded batch, and leave out what is behind the end of a sequence, such as with a mask in the "
            "loss; or pack outside of what is compiled"
        )
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    if (steps := len(x) * num_layers * directions) > _MANY_STEPS:
        warnings.warn(
            f"a recurrent layer is written out in {steps} steps (of {len(x)} positions, {num_layers} layers, "
            f"{directions} directions), and compiling takes time for each: shorter sequences, with the state handed on "
            "from one call to the next, compile faster",
            stacklevel=2,
        )
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            state = tuple(state[number] for state in states)
            own = weights[number * each : (number + 1) * each]
            out, state = _layer(cell, x, state, own, has_biases, reverse=direction == 1)
            outputs.append(out)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*last, strict=True))


def _lstm(x: Tensor, states: Any, *rest: Any) -> tuple[Tensor, ...]:
    return _recurrent(_lstm_cell, x, states, *rest)


def _of_one_state(cell: _Cell, x: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _recurrent(cell, x, (state,), *rest)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: partial(_of_one_state, _gru_cell),
    torch.rnn_tanh: partial(_of_one_state, partial(_elman_cell, nonlinearity=torch.tanh)),
    torch.rnn_relu: partial(_of_one_state, partial(_elman_cell, nonlinearity=torch.relu)),
}
"""Functions of torch by what computes the same, operation for operation."""
