"""Pictures and texts as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardgraph.pictures.svg import Drawing, document

_STYLE = (
    "body{font:14px/1.5 Helvetica,Arial,sans-serif;color:#222;margin:24px} svg{max-width:100%;height:auto} "
    "pre{font:12px/1.5 ui-monospace,Menlo,Consolas,monospace;background:#f5f5f5;padding:12px;overflow-x:auto}"
)


def html_page(title: str, drawings: Sequence[Drawing], texts: Sequence[str]) -> str:
    """A page with ``texts`` in monospace and ``drawings`` below."""
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>",
            *(f"<pre>{escape(text)}</pre>" for text in texts),
            *(document(title, [drawing]) for drawing in drawings),
            "</body>\n</html>\n",
        ]
    )
