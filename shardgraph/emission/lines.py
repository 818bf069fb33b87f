"""Lines of Python: long ones are broken as formatters do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 110
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def indented(lines: Iterable[str], by: int = 4) -> list[str]:
    """The lines, further right."""
    return [" " * by + line if line else line for line in lines]


def wrapped(line: str) -> list[str]:
    """A statement in as many lines as it needs, broken at its longest brackets."""
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        return [line]
    opening = _outer(line)
    if opening is None:
        return [line]
    start, stop = opening
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    parts = split(line[start + 1 : stop])
    if not parts:
        return [line]
    together = margin + ", ".join(parts)
    if len(together) <= WIDTH and not line[start + 1 : stop].rstrip().endswith(","):
        inner = [together]
    else:
        inner = [each for part in parts for each in wrapped(f"{margin}{part},")]
    return [line[: start + 1], *inner, margin[4:] + line[stop:]]


def split(text: str) -> list[str]:
    """The parts of a text between its outer commas."""
    parts, depth, start = [], 0, 0
    for i, character in _unquoted(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _unquoted(text: str) -> Iterator[tuple[int, str]]:
    """The characters outside of strings, with their places."""
    quote = ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            yield i, character


def _outer(line: str) -> tuple[int, int] | None:
    """The brackets of a line that are in no others and have the most in them, and more than a word."""
    open_at: list[int] = []
    found: tuple[int, int] | None = None
    for i, character in _unquoted(line):
        if character in _PAIRS:
            open_at.append(i)
        elif character in _PAIRS.values() and open_at:
            start = open_at.pop()
            if not open_at and i - start > 20 and (found is None or i - start > found[1] - found[0]):
                found = start, i
    return found


def generalized(texts: Sequence[str], numbers: Sequence[int], index: str) -> str | None:
    """One expression in ``index`` that is each of ``texts`` for its number; None if there is none.

    Numbers in quotes become those of an f-string.
    """
    split_texts = [re.split(r"(\d+)", text) for text in texts]
    if len({len(parts) for parts in split_texts}) > 1:
        return None
    made = []
    for parts in zip(*split_texts, strict=True):
        if len(set(parts)) == 1:
            made.append(parts[0])
            continue
        if not all(part.isdigit() for part in parts):
            return None
        further = {int(part) - number for part, number in zip(parts, numbers, strict=True)}
        if len(further) > 1:
            return None
        (step,) = further
        made.append("\0" + (index if not step else f"{index} + {step}" if step > 0 else f"{index} - {-step}") + "\0")
    pieces = re.split(r"""("[^"]*"|'[^']*')""", "".join(made))
    for i, piece in enumerate(pieces):
        quoted = piece[:1] in ("'", '"') and "\0" in piece
        pieces[i] = ("f" if quoted else "") + re.sub("\0(.*?)\0", r"{\1}" if quoted else r"\1", piece)
    return "".join(pieces)


def quoted(text: str) -> str:
    """The text as a string in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
