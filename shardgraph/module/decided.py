"""Values of a call's inputs that choose its program, beside their shapes: those by which forward has branched before.

See :mod:`shardgraph.capture.decisions`. Each call with inputs alike computes all of them, so that a program is found
whatever way forward takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardgraph.errors import ShardGraphError
from shardgraph.ir import Condition, JointGraph
from shardgraph.module.program_key import ProgramKey


class Decided:
    """The conditions that have been met, by the rest of a program's key."""

    def __init__(self) -> None:
        self._conditions: dict[ProgramKey, list[Condition]] = {}

    def learn(self, key: ProgramKey, conditions: Sequence[Condition]) -> None:
        """Have the values of ``conditions`` in the keys of calls that are like this one, from now on."""
        if conditions:
            known = self._conditions.setdefault(key.undecided, [])
            keys = {each.key for each in known}
            known += [each for each in conditions if each.key not in keys]

    def completed(self, key: ProgramKey, leaves: Sequence[Any]) -> ProgramKey:
        """The key of a call with the values that these flattened inputs have."""
        if not self._conditions:
            return key
        return key._replace(values=tuple(_hashable(each.of(leaves)) for each in self._of(key)))

    def told(self, key: ProgramKey) -> Iterator[str]:
        """Each condition and its value, as text."""
        for condition, value in zip(self._of(key), key.values, strict=False):
            yield f"{value} is the value at {condition.line}"

    def differing(self, key: ProgramKey, before: ProgramKey) -> Iterator[str]:
        """What differs in the values of a call from those ``before``, which may be fewer, as text."""
        for i, (condition, value) in enumerate(zip(self._of(key), key.values, strict=False)):
            if i >= len(before.values):
                yield f"the value at {condition.line} is {value}, and was not asked for before"
            elif value != before.values[i]:
                yield f"the value at {condition.line} is {value} instead of {before.values[i]}"

    def _of(self, key: ProgramKey) -> Sequence[Condition]:
        return self._conditions.get(key.undecided, ())


def check_decided_alike(microbatches: Iterable[JointGraph], batch: Sequence[Any]) -> None:
    """Raise ShardGraphError unless forward takes the same way for each microbatch as for the whole ``batch``, flattened
    inputs: else what is computed of a row would be another function than the original's."""
    for joint in dict.fromkeys(microbatches):
        for condition in joint.conditions:
            if (whole := condition.of(batch)) != condition.value:
                raise ShardGraphError(
                    f"forward decides by a value of its inputs, which is {whole} for the batch and {condition.value} "
                    f"for a microbatch of the pipeline, so that it would compute something else:\n  {condition.line}\n"
                    "  use a plan without a pipeline, or give forward the number as an input of its own"
                )


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else repr(value)  # nan equals itself
