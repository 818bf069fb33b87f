"""A picture's file, which a notebook shows."""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardgraph.errors import ShardGraphError

_FORMATS = (".svg", ".html", ".png", ".pdf", ".dot", ".gv")


class Picture(type(Path())):  # type: ignore[misc]  # the class of this system's paths: Path itself cannot be subclassed
    """The path of a picture that was written. As the value of a notebook's cell, the picture is shown."""

    def format(self) -> str:
        """The suffix that selects the format, in lower case.

        Raises:
            ShardGraphError: it is that of no format.
        """
        ending = self.suffix.lower()
        if ending not in _FORMATS:
            raise ShardGraphError(
                f"cannot draw {self.name!r}: its suffix selects the format, and is {', '.join(_FORMATS[:-1])} or "
                f"{_FORMATS[-1]}"
            )
        return ending

    def _repr_html_(self) -> str | None:
        if self.suffix.lower() == ".svg":
            return self.read_text(encoding="utf-8")
        if self.suffix.lower() == ".html":
            page = escape(self.read_text(encoding="utf-8"), quote=True)
            return f'<iframe srcdoc="{page}" style="width:100%;height:720px;border:1px solid #ccc"></iframe>'
        return None

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.suffix.lower() == ".png" else None
