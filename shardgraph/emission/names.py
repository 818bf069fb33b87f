"""Names that a person would choose: of the module and the operation that a value comes of."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

from shardgraph import ir
from shardgraph.emission import prelude

_MODULES = ("torch", "dist", "aten", "math", "functools")
RESERVED = frozenset(
    {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *_MODULES, "state", "saved", *vars(prelude), *vars(ir)}
    | set(vars(ir.buckets))
)
"""Names that no value gets: of Python, and of functions that files may have."""


class Names:
    """Names of one scope, each given once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken) | RESERVED

    def new(self, wanted: str) -> str:
        """The wanted name, with a number if it is taken."""
        name = identifier(wanted)
        number = 2
        made = name
        while made in self._taken:
            made, number = f"{name}_{number}", number + 1
        self._taken.add(made)
        return made

    def new_class(self, wanted: str) -> str:
        """The same for a class."""
        number, made = 2, wanted
        while made in self._taken:
            made, number = f"{wanted}{number}", number + 1
        self._taken.add(made)
        return made


def identifier(text: str) -> str:
    """The text as a name in Python, in lower case."""
    name = re.sub(r"\W+", "_", text).strip("_").lower()
    return f"module_{name}" if not name or name[0].isdigit() else name


def snake(text: str) -> str:
    """``LlamaDecoderLayer`` as ``llama_decoder_layer``, ``GPT2Block`` as ``gpt2_block``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text).lower().strip("_")


def camel(text: str) -> str:
    """``ln_f`` as ``LnF``."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W+|_", text) if part)
