"""Inputs padded to few lengths, by a policy of the user's, so that few programs are compiled; outputs are cut back."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardgraph.arguments import BOOL, NONE, WHOLE, check_fields, mapping_of, number, sequence_of
from shardgraph.capture.capture import output_leaves
from shardgraph.errors import ShardGraphError, expect
from shardgraph.module.input_names import keyword_names, positional_names
from shardgraph.sizes import is_whole
from shardgraph.torch_api import pytree

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_TARGET = "target"  # of a loss function: no input of forward

_FILL = mapping_of("", number("", math.isfinite) | BOOL | NONE, lambda name: isinstance(name, str) or is_whole(name, 0))


@dataclass(frozen=True)
class Lengths:
    """To which lengths inputs of every call are padded; see ``lengths`` of :func:`shardgraph.compile`.

    That padding changes nothing is for the user to see to: padded positions must be masked, and their labels ignored.
    One of ``multiple_of``, ``powers_of_two`` and ``among`` says which lengths there are.

    Args:
        fill: for each input that is padded, by its name in ``forward`` or its position, the value that is put behind
            its end; None for an input that has the length of another one by chance, and stays as it is. A call must
            have all of these inputs; one that is None is left out.
        multiple_of: the next multiple of this.
        powers_of_two: the next power of two.
        among: the next of these.
        dimension: the dimension of inputs that is padded.

    Raises:
        PlanError: an argument is malformed.
    """

    fill: Mapping[str | int, float | None]
    multiple_of: int | None = None
    powers_of_two: bool = False
    among: Sequence[int] = ()
    dimension: int = 1

    def __post_init__(self) -> None:
        given = _FILL.fits(self.fill) and any(value is not None for value in self.fill.values())
        expect(given, "fill of Lengths", self.fill, "a value for each input that is padded: {'input_ids': 0}")
        check_fields(self, "Lengths: ", powers_of_two=BOOL, among=sequence_of("whole numbers above 0", WHOLE))
        ways = (self.multiple_of is not None) + bool(self.powers_of_two) + bool(self.among)
        expect(ways == 1, "Lengths", self, "given one of multiple_of, powers_of_two and among")
        sizes = [*self.among, *([] if self.multiple_of is None else [self.multiple_of])]
        valid = all(type(size) is int and size > 0 for size in sizes)
        expect(valid, "multiple_of or among of Lengths", sizes, "whole numbers above 0")
        valid = type(self.dimension) is int and self.dimension >= 0
        expect(valid, "dimension of Lengths", self.dimension, "0 or more")

    def after(self, length: int) -> int:
        """The length to which ``length`` is padded.

        Raises:
            ShardGraphError: it is longer than all of ``among``.
        """
        if self.multiple_of is not None:
            return -(-length // self.multiple_of) * self.multiple_of
        if self.powers_of_two:
            return 1 << max(length - 1, 0).bit_length()
        longer = [size for size in self.among if size >= length]
        if not longer:
            raise ShardGraphError(
                f"an input has length {length}, and the longest of Lengths(among={list(self.among)}) is "
                f"{max(self.among)}: give it a longer one, or cut inputs"
            )
        return min(longer)


@dataclass
class _Cuts:
    """In which dimensions outputs of a program have the length of an input; seen in calls of ``lengths``."""

    inputs: dict[tuple[int, int], set[str | int]]  # that may be meant, by output and dimension
    lengths: list[dict[str | int, int]]

    def cover(self, lengths: Mapping[str | int, int]) -> bool:
        """Whether nothing new is to be seen in a call: it is longer than one that was, and all inputs say the same."""
        longer = any(all(lengths[name] >= seen[name] for name in lengths) for seen in self.lengths)
        return longer and all(len({lengths[name] for name in names}) == 1 for names in self.inputs.values())


class Padding:
    """Pads the calls of ``model`` by a policy, and cuts what forward returns.

    Raises:
        ShardGraphError: the policy names an input that forward does not have.
    """

    def __init__(self, policy: Lengths, model: nn.Module, device: torch.device) -> None:
        self._policy, self._model, self._device = policy, model, device
        self._positions = positional_names(model)
        self._keywords = keyword_names(model)
        self._cuts: dict[Hashable, _Cuts] = {}
        for name in policy.fill:
            known = type(name) is int or self._keywords is None or name in (*self._keywords, _TARGET)
            if not known:
                raise ShardGraphError(
                    f"Lengths has a fill value for {name!r}, which is no input of {type(model).__name__}.forward: it "
                    f"has {', '.join(self._keywords or ())}"
                )

    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """The call with its named inputs padded.

        Raises:
            ShardGraphError: it lacks one of them, or has another input of a length that is padded.
        """
        short = self._short(self._lengths(args, kwargs))
        self._check_others(args, kwargs, short)
        values, named = list(args), dict(kwargs)
        for name, length in short.items():
            is_keyword, key = self._place(name, args, kwargs) or (True, name)
            into: Any = named if is_keyword else values
            into[key] = self._longer(into[key], self._policy.after(length), self._policy.fill[name])
        return tuple(values), named

    def cut(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What forward returned for the padded call, as it would be for this one.

        Which dimensions have the length is seen by running the model on shapes alone, as it is written: when a program
        first returns something for a padded call, and again for calls that are shorter than those seen.

        Raises:
            ShardGraphError: an output follows the length in another way.
        """
        lengths = self._lengths(args, kwargs)
        if not self._short(lengths):
            return output
        leaves, spec = pytree.tree_flatten(output)
        key = self._key(spec, leaves, args, kwargs)
        cuts = self._cuts.setdefault(key, _Cuts({}, []))
        if not cuts.cover(lengths):
            self._look(cuts, leaves, args, kwargs, lengths)
        for (i, dimension), names in cuts.inputs.items():
            leaves[i] = leaves[i].narrow(dimension, 0, lengths[next(iter(names))])
        return pytree.tree_unflatten(leaves, spec)

    def _lengths(self, args: Any, kwargs: Any) -> dict[str | int, int]:
        """The lengths of the inputs that the policy pads, by name."""
        found, inner = dict[str | int, int](), dict[str | int, set[int]]()
        dimension = self._policy.dimension
        for name, value in self._policy.fill.items():
            if value is None or (place := self._place(name, args, kwargs)) is None:
                continue
            is_keyword, key = place
            tensor = kwargs[key] if is_keyword else args[key]
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= dimension:
                what = f"has shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"is {tensor!r}"
                raise ShardGraphError(
                    f"the input {name!r} is padded along dimension {dimension} by Lengths, and it {what}: give a "
                    "tensor with that dimension, or take it out of fill"
                )
            found[name] = tensor.shape[dimension]
            inner[name] = set(tensor.shape[dimension + 1 :])
        for name, length in found.items():
            for other, longer in found.items():
                if length == 1 < longer and longer in inner[name]:
                    raise ShardGraphError(
                        f"the input {name!r} has size 1 in dimension {dimension}, which Lengths pads, and the length "
                        f"of {other!r}, {longer}, in another one: give a tensor with the length in dimension "
                        f"{dimension}, as a mask of [batch, length] has"
                    )
        return found

    def _short(self, lengths: Mapping[str | int, int]) -> dict[str | int, int]:
        """Those that have to be padded."""
        return {name: length for name, length in lengths.items() if self._policy.after(length) != length}

    def _place(self, name: str | int, args: Any, kwargs: Any) -> tuple[bool, Any] | None:
        """Whether an input of a call is a keyword's, and its place in ``kwargs`` or ``args``. None: it is the target of
        a loss function, in a call without one.

        Raises:
            ShardGraphError: the call lacks it.
        """
        if name in kwargs:
            return True, name
        position = name if isinstance(name, int) else -1
        if name in self._positions:
            position = self._positions.index(str(name))
        if 0 <= position < len(args):
            return False, position
        if name == _TARGET and name not in (self._keywords or ()):
            return None
        raise ShardGraphError(
            f"the call has no input {name!r}, which Lengths pads, and its default may not fit what is padded (a mask "
            f"of all positions, say): give it, or {name}=None if it has none"
        )

    def _check_others(self, args: Any, kwargs: Any, lengths: Mapping[str | int, int]) -> None:
        """Raise ShardGraphError if an input that the policy does not name has a length that is padded."""
        first = min(1, self._policy.dimension)
        for name, value in self._others(args, kwargs):
            for tensor in (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)):
                for dimension, size in list(enumerate(tensor.shape))[first:]:
                    same = next((known for known, length in lengths.items() if length == size), None)
                    if same is not None:
                        raise ShardGraphError(
                            f"the input {name!r} has size {size} in dimension {dimension}, the length of {same!r}, "
                            f"which Lengths pads: give fill a value for it too, as fill={{..., {name!r}: 0}}, or "
                            f"{name!r}: None if it has that size by chance and stays as it is"
                        )

    def _others(self, args: Any, kwargs: Any) -> Iterator[tuple[str | int, Any]]:
        """The inputs that the policy does not name."""
        for position, value in enumerate(args):
            names: list[str | int] = [*self._positions[position : position + 1], position]
            if not any(name in self._policy.fill for name in names):
                yield names[0], value
        yield from ((name, value) for name, value in kwargs.items() if name not in self._policy.fill)

    def _longer(self, tensor: torch.Tensor, length: int, value: Any) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[self._policy.dimension] = length - shape[self._policy.dimension]
        return torch.cat([tensor, tensor.new_full(shape, value)], self._policy.dimension)

    def _key(self, spec: Any, leaves: Sequence[Any], args: Any, kwargs: Any) -> Hashable:
        """What the dimensions of outputs that have the length depend on, beside the call's lengths."""
        inputs, structure = pytree.tree_flatten(self.padded(args, kwargs))
        shapes = (tuple(each.shape) if isinstance(each, torch.Tensor) else repr(each) for each in (*leaves, *inputs))
        return spec, structure, tuple(shapes), tuple(module.training for module in self._model.modules())

    def _look(self, cuts: _Cuts, leaves: Sequence[Any], args: Any, kwargs: Any, lengths: dict[str | int, int]) -> None:
        """Add to ``cuts`` what a call of these inputs returns, beside the outputs of its padded call."""
        expected = output_leaves(self._model, args, kwargs, self._device)
        if expected is None:
            raise _uncut("forward reads values, so that the shapes of its outputs without padding cannot be told")
        if len(expected) != len(leaves):
            raise _uncut(f"forward returns {len(leaves)} values with padding and {len(expected)} without")
        for i, (mine, wanted) in enumerate(zip(leaves, expected, strict=True)):
            shapes = [list(each.shape) if isinstance(each, torch.Tensor) else each for each in (mine, wanted)]
            differ = f"output {i} is {shapes[0]} with padding and {shapes[1]} without"
            if not isinstance(mine, torch.Tensor) or not isinstance(wanted, torch.Tensor):
                if isinstance(wanted, (int, float, str, torch.Tensor)) and shapes[0] != shapes[1]:
                    raise _uncut(differ)
                continue
            if mine.dim() != wanted.dim():
                raise _uncut(differ)
            for dimension, sizes in enumerate(zip(mine.shape, wanted.shape, strict=True)):
                place = (i, dimension)
                if sizes[0] == sizes[1] and place not in cuts.inputs:
                    continue
                fits = {name for name, length in lengths.items() if (self._policy.after(length), length) == sizes}
                known = cuts.inputs.setdefault(place, fits)
                known &= fits
                if not known:
                    raise _uncut(f"{differ}: not in the lengths of inputs alone")
        cuts.lengths.append(lengths)


def _uncut(reason: str) -> ShardGraphError:
    return ShardGraphError(
        f"what forward returns for a padded call cannot be cut back: {reason}. Train with train_step or step, which "
        "return the loss alone; return outputs of the inputs' lengths; or pad batches, and cut outputs, by yourself"
    )
