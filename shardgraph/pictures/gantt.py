"""A pipeline schedule over time: the actions, idle time and memory of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardgraph.cost_models.actions import Kind
from shardgraph.cost_models.schedules import Ran, SimulatedSchedule
from shardgraph.pictures.svg import Drawing, document, rect, text
from shardgraph.sizes import format_bytes, format_seconds

WIDTH = 980
_LEFT, _RIGHT, _TOP = 60, 850, 80  # the sides of the plot
_BAR, _MEMORY, _GAP = 22, 24, 10  # the heights of a rank's bars, of its memory, and of the gap between ranks
_DIGIT = 7  # the width of a digit in a bar
_KINDS: dict[Kind, tuple[str, str]] = {
    "F": ("#a0cbe8", "forward"),
    "B": ("#ffbe7d", "backward"),
    "I": ("#f1ce63", "gradients of inputs"),
    "W": ("#8cd17d", "gradients of weights"),
}
_WAITS, _HELD = "#ececec", "#cfb3c8"


def draw_schedule(simulated: SimulatedSchedule, path: str | Path, title: str = "Pipeline schedule") -> Path:
    """Write :func:`draw_gantt` as one self-contained SVG file; returns its path."""
    path = Path(path)
    path.write_text(document(title, [draw_gantt(simulated, title)]), encoding="utf-8")
    return path


def draw_gantt(simulated: SimulatedSchedule, title: str = "Pipeline schedule") -> Drawing:
    """The actions of each rank over a step: a bar in the colour of its kind, with the number of its microbatch.

    If a rank has several stages, later ones are darker. Beside a rank is the fraction of the step in which it waits;
    below it, if bytes are known, is the memory that it holds, on one scale for all ranks, and the most of it.
    """
    most = max(simulated.peak(rank)[0] for rank in range(len(simulated.ranks)))
    lane = _BAR + (_MEMORY if most else 0) + _GAP
    base = _TOP + lane * len(simulated.ranks)

    def x(seconds: float) -> int:
        return round(_LEFT + seconds / simulated.seconds * (_RIGHT - _LEFT))

    waits = f"ranks wait {simulated.bubble_fraction:.1%} of it"
    body = [text(0, 20, title, "title"), text(0, 44, f"{format_seconds(simulated.seconds)} a step; {waits}")]
    body += _legend(simulated, bool(most))
    for seconds in _ticks(simulated.seconds):
        body.append(f'<path d="M{x(seconds)} {_TOP - 4}V{base}" stroke="#ddd"/>')
        body.append(text(x(seconds), base + 14, format_seconds(seconds) if seconds else "0", "small middle"))
    for rank, spans in enumerate(simulated.ranks):
        y = _TOP + lane * rank
        body.append(text(_LEFT - 8, y + 16, f"rank {rank}", "end"))
        body.append(text(_RIGHT + 10, y + 16, f"waits {simulated.bubble(rank):.1%}"))
        body.append(rect(_LEFT, y, _RIGHT - _LEFT, _BAR, _WAITS))
        body += _bars(spans, x, y)
        if most:
            floor, scale = y + _BAR + _MEMORY, (_MEMORY - 2) / most
            edge = "".join(f"H{x(when)}V{floor - round(held * scale)}" for when, held in simulated.memory[rank])
            body.append(f'<path d="M{_LEFT} {floor}{edge}H{_RIGHT}V{floor}z" fill="{_HELD}"/>')
            body.append(text(_RIGHT + 10, y + _BAR + 16, f"at most {format_bytes(simulated.peak(rank)[0])}", "small"))
    return Drawing(WIDTH, base + 24, "\n".join(body))


def _bars(spans: Sequence[Ran], x: Callable[[float], int], y: int) -> Iterator[str]:
    """The actions of a rank, with a tooltip of the action and its seconds; ``2F0`` is microbatch 0 on stage 2."""
    stages = sorted({ran.action.stage for ran in spans})
    for ran in spans:
        left, width = x(ran.start), x(ran.end) - x(ran.start)
        shown = max(1, width - 1) if width > 3 else width  # a gap between neighbours of one kind
        colour = _shade(_KINDS[ran.action.kind][0], stages.index(ran.action.stage), len(stages))
        yield (
            f'<rect x="{left}" y="{y}" width="{shown}" height="{_BAR}" fill="{colour}">'
            f"<title>{ran.action}: {format_seconds(ran.end - ran.start)}</title></rect>"
        )
        number = str(ran.action.microbatch)
        if _DIGIT * len(number) + 2 <= width:
            yield text(left + width // 2, y + 16, number, "middle")


def _shade(colour: str, at: int, count: int) -> str:
    """``colour`` for the first of ``count`` stages, up to a quarter darker for the last."""
    keep = 1 - at / max(1, count - 1) / 4
    return "#" + "".join(f"{round(int(colour[i : i + 2], 16) * keep):02x}" for i in (1, 3, 5))


def _legend(simulated: SimulatedSchedule, memory: bool) -> Iterator[str]:
    used = {ran.action.kind for spans in simulated.ranks for ran in spans}
    entries = [entry for kind, entry in _KINDS.items() if kind in used] + [(_WAITS, "waits")]
    entries += [(_HELD, "memory held")] if memory else []
    right = WIDTH
    for colour, name in reversed(entries):
        right -= 34 + _DIGIT * len(name)  # a box, its name, and a gap
        yield rect(right, 34, 14, 14, colour)
        yield text(right + 19, 45, name, "small")
    if any(len({ran.action.stage for ran in spans}) > 1 for spans in simulated.ranks):
        yield text(WIDTH, 64, "later stages of a rank are darker", "small end")


def _ticks(top: float) -> Iterator[float]:
    """Round numbers of seconds from 0 to ``top``, at most eleven."""
    step = 10 ** math.floor(math.log10(top))
    step *= next(part for part in (0.1, 0.2, 0.5, 1) if top / (step * part) <= 10)
    return (step * i for i in range(int(top / step) + 1))
