"""What share of a model's parameters a verification has compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Elements of parameters: all, those that the loss reaches, and those of them whose gradient was compared.

    ``hidden`` are the parameters whose gradient is so small that an error would not show: of rounding alone, such as
    that of an attention's key bias, if the loss is a good one. ``unreached`` are the trained parameters without a
    gradient, ``frozen`` the others. ``noise`` is the number of elements whose gradients were compared, and their
    weights after a step not, since an optimizer such as AdamW turns the rounding of a small gradient into noise.
    """

    elements: int
    reached: int
    compared: int
    hidden: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    noise: int = 0

    @property
    def share(self) -> float:
        """Of what the loss reaches, how much was compared; 0 if it reaches nothing that could have been."""
        return self.compared / self.reached if self.reached else float(not self.unreached)

    def __str__(self) -> str:
        said = [
            f"gradients of {self.share:.2%} of the {self.reached:,} parameter elements that the loss reaches compared"
        ]
        if self.hidden:
            said.append(f"too small to be: {_named(self.hidden)}")
        if self.unreached:
            said.append(f"the loss does not reach {_named(self.unreached)}")
        if self.frozen:
            said.append(f"frozen: {_named(self.frozen)}")
        if self.noise:
            said.append(f"weights with a gradient of rounding alone left out after the step: {self.noise:,}")
        return "; ".join(said)


def _named(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} others" if len(others) > 1 else " and ".join([first, *others])
