"""The few functions that a formula needs besides ``+ - * /``, for numbers and for sympy expressions.

A cost formula is written once: for numbers it returns a number, for sympy expressions an expression.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy


@dataclass(frozen=True)
class Arithmetic:
    """``ratio_up(a, b)`` is the exact ratio of whole numbers, rounded up to a whole number."""

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    log2: Callable[[Any], Any]
    ratio_up: Callable[[Any, Any], Any]


NUMBERS = Arithmetic(max, min, math.log2, lambda a, b: -(-a // b))
EXPRESSIONS = Arithmetic(
    lambda a, b: sympy.Max(a, b, evaluate=False),  # comparing them takes long, and is mostly undecided
    lambda a, b: sympy.Min(a, b, evaluate=False),
    lambda x: sympy.log(x) / sympy.log(2),
    lambda a, b: sympy.ceiling(sympy.sympify(a) / sympy.sympify(b)),
)
