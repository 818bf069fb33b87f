"""An extension of Griffe: the roles of Sphinx in docstrings, such as :func:`shardgraph.compile`, become links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|py:\w+):`~?([\w.]+)`")
_STUB = Path(__file__).parent.parent / "shardgraph" / "__init__.pyi"
PUBLIC = {
    name: f"shardgraph.{module}.{name}".replace("shardgraph.cost_models", "cost_models")
    for module, names in re.findall(r"from \.([\w.]+) import ([^(]+?|\([^)]*\))$", _STUB.read_text(), re.MULTILINE)
    for name in re.findall(r"(\w+) as \w+", names)
}
"""The public names with the modules that define them."""


class Roles(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(_linked, obj.docstring.value)


def _linked(role: re.Match[str]) -> str:
    """A link to a public name or its member; code for anything else."""
    name, _, member = role[1].removeprefix("shardgraph.").partition(".")
    if name not in PUBLIC:
        return f"`{role[1]}`"
    return f"[`{role[1]}`][{PUBLIC[name]}{'.' + member if member else ''}]"
