"""Hooks of MkDocs that make the site of the repository as it is: see mkdocs.yml.

The pages of docs/ are joined by pages from other folders and by the notebooks with their outputs. Links are written for
the repository; here they lead to the page if the site has it, and otherwise become plain text.
"""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {  # pages of the site that are not in docs/, by their path in the repository
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "examples/many_machines.md": "examples/many_machines.md",
    "notebooks/README.md": "notebooks/index.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for picture in (ROOT / "benchmarks").rglob("*.svg"):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), abs_src_path=str(picture)))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        content = _page_of(json.loads(notebook.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page, which are relative to its place in the repository, into those of the site."""
    here = page.file.src_uri
    source = {site: path for path, site in OUTSIDE.items()}.get(here) or _source_of(here)

    def turned(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        there = _site_of(os.path.normpath(os.path.join(os.path.dirname(source), path)))
        if files.get_file_from_path(there) is None:
            return words if not picture else found[0]
        relative = os.path.relpath(there, os.path.dirname(here) or ".")
        return f"{picture}[{words}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(turned, markdown)


def _source_of(page: str) -> str:
    """Where a page of the site is in the repository."""
    return page if page.startswith("notebooks/") else f"docs/{page}"


def _site_of(path: str) -> str:
    """The page of the site that a file of the repository has become."""
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return OUTSIDE.get(path) or path.removeprefix("docs/")


def _page_of(notebook: dict[str, Any]) -> str:
    """A notebook with its outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            shown = output.get("data", {})
            picture = "".join(shown.get("image/svg+xml", "") or shown.get("text/html", ""))
            if picture:
                parts.append(f'<div class="output">{_without_empty_lines(_without_prolog(picture))}</div>')
            else:
                text = html.escape("".join(output.get("text", "") or shown.get("text/plain", "")).strip("\n"))
                parts.append(f'<pre class="output">{_without_empty_lines(text, " ")}</pre>')
    return "\n\n".join(parts) + "\n"


def _without_prolog(picture: str) -> str:
    return re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", picture, flags=re.DOTALL)


def _without_empty_lines(text: str, filler: str = "") -> str:
    """Markdown ends a block of HTML at an empty line."""
    return re.sub(r"\n[ \t]*(?=\n)", f"\n{filler}" if filler else "", text)
