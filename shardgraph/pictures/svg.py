"""The few SVG elements that the pictures consist of, and self-contained documents of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

MARGIN = 10
# Classes only: texts by Graphviz in the same document keep their own style.
_STYLE = (
    ".text{font:13px Helvetica,Arial,sans-serif;fill:#222} .title{font-size:18px;font-weight:600} "
    ".strong{font-weight:600} .mono{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px} "
    ".small{fill:#555;font-size:12px} .end{text-anchor:end} .middle{text-anchor:middle}"
)


@dataclass(frozen=True)
class Drawing:
    """SVG elements within ``width`` x ``height`` user units, with the origin at the upper left."""

    width: int
    height: int
    body: str


def document(title: str, drawings: Sequence[Drawing]) -> str:
    """One self-contained SVG document with ``drawings`` below each other."""
    width = max(drawing.width for drawing in drawings) + 2 * MARGIN
    y, body = MARGIN, []
    for drawing in drawings:
        body.append(f'<g transform="translate({MARGIN},{y})">\n{drawing.body}\n</g>')
        y += drawing.height + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
            f'height="{y}" viewBox="0 0 {width} {y}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            rect(0, 0, width, y, "#ffffff"),
            *body,
            "</svg>\n",
        ]
    )


def rect(x: int, y: int, width: int, height: int, colour: str, more: str = "") -> str:
    """A filled rectangle; ``more`` are further attributes."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}" {more}/>'


def text(x: int, y: int, content: str, kind: str = "") -> str:
    """A line of text on the baseline ``y``; ``kind`` names classes of the style sheet."""
    return f'<text x="{x}" y="{y}" class="text {kind}">{escape(content)}</text>'
