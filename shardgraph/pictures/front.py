"""The Pareto front of a job: memory and time per sample of its best plans, by number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardgraph.pictures.svg import Drawing, text
from shardgraph.plans.candidate import Candidate
from shardgraph.search.front import Front
from shardgraph.sizes import format_bytes, format_seconds

WIDTH, HEIGHT = 980, 480
_LEFT, _RIGHT, _TOP, _BASE = 90, 760, 80, 420  # the sides of the plot
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#79706e")
_TEXT = 6.5  # the width of a character
_LINE = 13  # the height of a label


def draw_front(front: Front) -> Drawing:
    """A point for each plan that no other one beats, on logarithmic axes, and a line through those on as many devices:
    what more memory buys. Points are hollow if they take more than the budget."""
    points = front.points
    x = _Scale([each.memory for each in points], _LEFT, _RIGHT)
    y = _Scale([each.per_sample for each in points], _BASE, _TOP)
    samples = {each.samples for each in points}
    body = [text(0, 20, f"Memory and time of plans on {front.cluster}", "title")]
    step = f", in steps of {samples.pop()} samples" if len(samples) == 1 else ""
    body.append(
        text(
            0,
            44,
            f"Seconds per sample{step}, by peak bytes of a rank: none on as many devices is better in both",
        )
    )
    body += _grid(points, x, y)
    taken: list[tuple[float, float, float, float]] = [(x(p.memory) - 5, y(p.per_sample) - 5, 10, 10) for p in points]
    if min(each.memory for each in points) < front.budget <= x.last:
        at = x(front.budget)
        body.append(f'<path d="M{at} {_TOP - 6}V{_BASE}" stroke="#c00" stroke-width="2"/>')
        body.append(text(at - 6, _TOP - 10, f"a rank may use {format_bytes(front.budget)}", "small end"))
        taken.append((at - 2, _TOP, 4, _BASE - _TOP))
    for place, devices in enumerate(dict.fromkeys(each.devices for each in points)):
        colour = _COLOURS[place % len(_COLOURS)]
        own = [each for each in points if each.devices == devices]
        corners = [(x(each.memory), y(each.per_sample)) for each in own]
        body.append(_stairs(corners, colour))
        for each, (left, top) in zip(own, corners, strict=True):
            fill = colour if each.fits else "#fff"
            body.append(
                f'<circle cx="{left}" cy="{top}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
                f"<title>{_told(each)}</title></circle>"
            )
            body += _label(each, left, top, taken)
        row = _TOP + 20 * place
        body.append(f'<circle cx="{_RIGHT + 36}" cy="{row}" r="5" fill="{colour}"/>')
        body.append(text(_RIGHT + 48, row + 4, f"{devices} device{'s' * (devices > 1)}"))
    if not all(each.fits for each in points):
        body.append(text(_RIGHT + 30, row + 28, "hollow: more than that", "small"))
    return Drawing(WIDTH, HEIGHT, "\n".join(body))


class _Scale:
    """Positions between two sides for the logarithms of values, with a margin; ``last`` is the largest that fits."""

    def __init__(self, values: Sequence[float], first: int, last: int) -> None:
        low, high = math.log2(min(values)), math.log2(max(values))
        margin = max(0.08 * (high - low), 0.1)
        self._low, self._high = low - margin, high + margin
        self._sides = first, last
        self.first, self.last = 2**self._low, 2**self._high

    def __call__(self, value: float) -> int:
        first, last = self._sides
        return round(first + (math.log2(value) - self._low) / (self._high - self._low) * (last - first))


def _grid(points: Sequence[Candidate], x: _Scale, y: _Scale) -> Iterator[str]:
    for nbytes in _ticks(x, 2, 6):
        yield f'<path d="M{x(nbytes)} {_TOP}V{_BASE}" stroke="#e4e4e4"/>'
        yield text(x(nbytes), _BASE + 18, format_bytes(nbytes), "small middle")
    for seconds in _ticks(y, 10, 7):
        yield f'<path d="M{_LEFT} {y(seconds)}H{_RIGHT}" stroke="#e4e4e4"/>'
        yield text(_LEFT - 8, y(seconds) + 4, format_seconds(seconds), "small end")
    yield f'<path d="M{_LEFT} {_TOP}V{_BASE}H{_RIGHT}" fill="none" stroke="#888"/>'
    yield text((_LEFT + _RIGHT) // 2, _BASE + 42, "memory at the peak of a rank", "middle")


def _ticks(scale: _Scale, base: int, most: int) -> list[float]:
    """Round numbers that the scale has room for: powers of two, or 1, 2 and 5 times powers of ten."""
    low, high = (math.floor(math.log(each, base)) for each in (scale.first, scale.last))
    parts = (1,) if base == 2 else (1, 2, 5)
    every = [part * base**power for power in range(low, high + 1) for part in parts]
    inside = [each for each in every if scale.first <= each <= scale.last]
    return inside[:: -(-len(inside) // most) or 1]


def _stairs(corners: Sequence[tuple[int, int]], colour: str) -> str:
    """Steps from the fastest point to the smallest: with so much memory, so fast."""
    left, top = corners[0]
    path = f"M{_RIGHT} {top}H{left}" + "".join(f"V{y}H{x}" for x, y in corners[1:])
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.6"/>'


def _label(point: Candidate, left: int, top: int, taken: list[tuple[float, float, float, float]]) -> Iterator[str]:
    """Its name, where it covers no point and no other name; without such a place there is none."""
    width = _TEXT * len(point.name)
    for dx, dy in ((9, -6), (9, 14), (-9 - width, -6), (-9 - width, 14), (9, -20), (9, 28)):
        box = (left + dx, top + dy - 10, width, _LINE)
        inside = box[0] >= _LEFT and box[0] + width <= _RIGHT + 28
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            yield text(round(left + dx), top + dy, point.name, "small")
            return


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return (
        one[0] < other[0] + other[2]
        and other[0] < one[0] + one[2]
        and one[1] < other[1] + other[3]
        and other[1] < one[1] + one[3]
    )


def _told(point: Candidate) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in point.mesh) or "one process"
    return (
        f"{point.name} on {mesh}, {point.microbatches} microbatches, recomputed: {point.recompute}; "
        f"{format_bytes(point.memory)}, {format_seconds(point.per_sample)} per sample"
    )
