"""What share of a model's parameters a verification has compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Elements of parameters: all, those that the loss reaches, and those of them that were compared.

    ``rounding`` has the number of elements by parameter whose gradient holds only rounding, so that an optimizer such
    as AdamW turns it into noise; ``unreached`` are the trained parameters without a gradient, ``frozen`` the others.
    """

    elements: int
    reached: int
    compared: int
    rounding: Mapping[str, int]
    unreached: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Of what the loss reaches, how much was compared; 0 if it reaches nothing."""
        return self.compared / self.reached if self.reached else 0.0

    def __str__(self) -> str:
        said = [f"{self.share:.2%} of the {self.reached:,} parameter elements that the loss reaches compared"]
        if self.rounding:
            said.append(f"{sum(self.rounding.values()):,} have only rounding for a gradient ({_named(self.rounding)})")
        if self.unreached:
            said.append(f"the loss does not reach {_named(self.unreached)}")
        if self.frozen:
            said.append(f"frozen: {_named(self.frozen)}")
        return "; ".join(said)


def _named(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} others" if len(others) > 1 else " and ".join([first, *others])
