"""A self-contained HTML page: key figures, warnings, findings, modules, pictures, timeline, alternatives, plan."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from shardgraph.findings.finding import Finding
from shardgraph.pictures.svg import Drawing, document


@dataclass(frozen=True)
class Figure:
    """A key figure: ``value`` in large letters, what it is, and a remark; ``bad`` if it needs attention."""

    name: str
    value: str
    remark: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Page:
    """What a page shows, from top to bottom, the timeline below the first drawing; what is empty has no section.

    ``modules`` is :func:`shardgraph.pictures.page.modules.module_tree`, ``timeline``
    :func:`shardgraph.pictures.page.timeline.timeline_data`. ``alternatives`` are the cells of a table, the heads first.
    ``findings`` are those of lint, None if it was not run, of ``looked_at`` if not of the whole model.
    ``texts`` are shown in monospace under their heads, folded away but for the first.
    """

    title: str
    subtitle: str = ""
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    findings: Sequence[Finding] | None = None
    looked_at: str = ""
    modules: Mapping[str, Any] | None = None
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    timeline: Mapping[str, Any] | None = None
    alternatives: Sequence[Sequence[str]] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    def html(self) -> str:
        """The page, as text in UTF-8."""
        data = {"modules": self.modules, "timeline": self.timeline}
        return _template().render(
            page=self,
            pictures={name: Markup(document(name, [drawing])) for name, drawing in self.drawings.items()},
            style=Markup(_asset("page.css")),
            script=Markup(_asset("page.js")),
            # "<" would end the element that the data is in.
            data=Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")),
        )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    return environment.from_string(_asset("page.html"))


def _breakable(text: str) -> Markup:
    """The text, which breaks behind the underscores of a long name rather than in a word."""
    return Markup(re.sub(r"(?<=[^\W_])_(?=\w)", "_<wbr>", escape(text)))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
