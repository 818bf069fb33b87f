"""The memory of one rank over a step, by kind of tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol
from xml.sax.saxutils import escape

from shardgraph.pictures.svg import Drawing, rect, text
from shardgraph.report.analysis import Analysis
from shardgraph.sizes import format_bytes

WIDTH, HEIGHT = 980, 380
_LEFT, _RIGHT, _TOP, _BASE = 80, 690, 70, 340  # the sides of the plot
_LEAST = 40  # the minimum width of a phase with few operations, such as the optimizer's
_COLOURS = {  # from the bottom up: first the tensors that stay, last the short-lived ones
    "parameters": "#4e79a7",
    "optimizer state": "#a0cbe8",
    "buffers": "#79706e",
    "inputs": "#bab0ac",
    "gradients": "#f28e2b",
    "saved": "#59a14f",
    "activations": "#8cd17d",
    "gathered parameters": "#edc948",
    "communication buffers": "#b07aa1",
    "temporaries": "#e15759",
}
_OTHER = "#d37295"


class Live(Protocol):
    """What is live after an operation in ``half`` of a step: a row of a prediction, or a measured moment."""

    @property
    def half(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def memory(self) -> Mapping[str, int]: ...
    @property
    def live(self) -> int: ...


def draw_memory(analysis: Analysis, limited: bool = True) -> Drawing:
    """The live bytes of each operation by kind, with the peak and, if ``limited`` and less than twice that, the
    device's memory."""
    peak = analysis.peak
    where = f" in {peak.module}" if peak.module else ""
    title = f"Memory of a rank over a step: plan {analysis.plan.name}, {analysis.optimizer}"
    caption = f"Peak {format_bytes(peak.live)} at {peak.label} ({peak.half}{where})"
    device = analysis.cluster.device
    return draw_moments(analysis.rows, title, caption, (device.name, device.memory) if limited else None)


def draw_moments(rows: Sequence[Live], title: str, caption: str, limit: tuple[str, int] | None = None) -> Drawing:
    """The live bytes of ``rows`` by kind, with the peak and, if less than twice that, the ``limit`` of a device."""
    peak = max(rows, key=lambda row: row.live)
    shown = limit if limit is not None and limit[1] < 2 * peak.live else None
    top = 1.05 * max(peak.live, shown[1] if shown else 0)
    bars, present = _bars(rows), dict.fromkeys(kind for row in rows for kind in row.memory)
    colours = {kind: _COLOURS.get(kind, _OTHER) for kind in _COLOURS | present if kind in present}

    def y(nbytes: float) -> int:
        return round(_BASE - nbytes / top * (_BASE - _TOP))

    body = [text(0, 20, title, "title"), text(0, 44, caption)]
    for nbytes in _ticks(top):
        body += [_line(_LEFT, y(nbytes), _RIGHT, y(nbytes), 'stroke="#ddd"')]
        body += [text(_LEFT - 8, y(nbytes) + 4, format_bytes(nbytes), "small end")]
    stacks = [list(accumulate(bar.row.memory.get(kind, 0) for kind in colours)) for bar in bars]
    for i, kind in reversed(list(enumerate(colours))):  # each area starts at zero and covers the lower part of the last
        outline = _outline(bars, [y(stack[i]) for stack in stacks])
        body.append(f'<path d="{outline}" fill="{colours[kind]}"><title>{kind}</title></path>')
    for half, group in groupby(bars, lambda bar: bar.row.half):
        inside = list(group)
        if inside[-1].right - inside[0].left >= _LEAST:
            body.append(text((inside[0].left + inside[-1].right) // 2, _BASE + 20, half, "small middle"))
        body.append(_line(inside[-1].right, _TOP, inside[-1].right, _BASE + 6, 'stroke="#888" stroke-dasharray="3 3"'))
    for bar in bars:  # what a pointer on the bar is told
        held = "".join(f"\n{kind} {format_bytes(bar.row.memory[kind])}" for kind in colours if bar.row.memory.get(kind))
        where = f"{bar.row.label} ({bar.row.half}): {format_bytes(bar.row.live)}"
        area = f'x="{bar.left}" y="{_TOP}" width="{bar.right - bar.left}" height="{_BASE - _TOP}"'
        body.append(f'<rect {area} fill-opacity="0"><title>{escape(where + held)}</title></rect>')
    at = next(bar.left for bar in bars if bar.row is peak)
    body.append(f'<path d="M{at} {y(peak.live) - 2}l-5 -9h10z" fill="#222"/>')
    beside, side = (at + 9, "strong") if at < _RIGHT - 80 else (at - 9, "strong end")  # the legend is on the right
    body.append(text(beside, y(peak.live) - 2, format_bytes(peak.live), side))
    if shown is not None:
        name, nbytes = shown
        body.append(_line(_LEFT, y(nbytes), _RIGHT, y(nbytes), 'stroke="#c00" stroke-width="2"'))
        body.append(text(_LEFT + 6, y(nbytes) - 5, f"{name} has {format_bytes(nbytes)}", "small"))
    body.append(text(_RIGHT + 20, _TOP + 12, "at the peak", "strong"))
    for i, kind in enumerate(reversed(colours), start=1):
        body.append(rect(_RIGHT + 20, _TOP + 20 * i, 16, 14, colours[kind]))
        body.append(text(_RIGHT + 42, _TOP + 20 * i + 12, kind))
        body.append(text(WIDTH, _TOP + 20 * i + 12, format_bytes(peak.memory.get(kind, 0)), "end"))
    return Drawing(WIDTH, HEIGHT, "\n".join(body))


class _Bar(NamedTuple):
    """The operation that is drawn between two horizontal positions."""

    left: int
    right: int
    row: Live


def _bars(rows: Sequence[Live]) -> list[_Bar]:
    """Bars of whole pixels from left to right; for operations that share a pixel, the one with the most live bytes."""
    halves = [list(group) for _, group in groupby(rows, lambda row: row.half)]
    least = min(_LEAST, (_RIGHT - _LEFT) // len(halves))
    spare = _RIGHT - _LEFT - least * len(halves)
    bars, left = [], _LEFT
    for half in halves:
        width = least + spare * len(half) // len(rows)
        pixels = [(left + i * width // len(half), row) for i, row in enumerate(half)]
        tallest = [max(group, key=lambda each: each[1].live) for _, group in groupby(pixels, lambda each: each[0])]
        left += width
        ends = [x for x, _ in tallest[1:]] + [left]
        bars += [_Bar(x, end, row) for (x, row), end in zip(tallest, ends, strict=True)]
    return bars


def _outline(bars: Sequence[_Bar], heights: Sequence[int]) -> str:
    """A closed path over the tops of the bars."""
    steps, before = [f"M{bars[0].left} {_BASE}"], _BASE
    for bar, height in zip(bars, heights, strict=True):
        if height != before:
            steps.append(f"H{bar.left}V{height}")
        before = height
    return "".join([*steps, f"H{bars[-1].right}V{_BASE}z"])


def _ticks(top: float) -> Iterator[int]:
    """Round numbers of bytes from 0 to ``top``, at most seven."""
    step = 1
    while top / step > 6:
        step *= 2
    return iter(range(0, int(top) + 1, step))


def _line(x1: int, y1: int, x2: int, y2: int, looks: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {looks}/>'
