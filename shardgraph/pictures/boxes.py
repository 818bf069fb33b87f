"""The plan as nested boxes, an SVG that needs no layout program."""

from __future__ import annotations

from collections.abc import Mapping

from shardgraph.pictures.svg import Drawing, rect, text
from shardgraph.pictures.tree import Module, Tree, describe
from shardgraph.sizes import format_bytes

WIDTH, LINE, PAD, HEADER = 980, 20, 10, 26


def draw_boxes(tree: Tree) -> Drawing:
    """A plan as nested boxes; consecutive layers that are equal in every respect are drawn once."""
    body = [text(0, 20, tree.title, "title")]
    body += [text(0, 44 + LINE * at, line) for at, line in enumerate(tree.summary)]
    y = 40 + LINE * len(tree.summary)
    for colour, line in tree.legend:
        body += [rect(0, y, 16, 14, colour), text(24, y + 12, line)]
        y += LINE
    height, boxes = _box([tree.root], 0, y + PAD, WIDTH, tree.colours, tree.on)
    return Drawing(WIDTH, y + PAD + height, "\n".join([*body, *boxes]))


def _box(alike: list[Module], x: int, y: int, width: int, colours: Mapping[str, str], on: str) -> tuple[int, list[str]]:
    """The height and the elements of one box, which represents all modules in ``alike``."""
    module, right = alike[0], x + width - PAD
    name, held = describe(alike, on)
    body = [text(x + PAD, y + 18, name, "strong"), text(right, y + 18, held, "end")]
    at = y + HEADER
    for parameter in module.own:
        body.append(rect(x + PAD, at, width - 2 * PAD, LINE - 2, colours[parameter.placement]))
        body.append(text(x + PAD + 6, at + 14, parameter.name))
        body.append(text(WIDTH // 2 - 120, at + 14, parameter.shapes, "mono"))
        body.append(text(right - 6, at + 14, format_bytes(parameter.nbytes), "end"))
        at += LINE
    for site in module.sites:
        if site.kind == "borrowed":
            body.append(text(x + PAD + 6, at + 14, f"{site.text} ({site.use})", "small"))
            at += LINE - 2
    for traffic in module.traffic.values():
        body.append(text(x + PAD + 6, at + 14, traffic.calls, "small"))
        body.append(text(right - 6, at + 14, f"{format_bytes(traffic.nbytes)} sent", "small end"))
        at += LINE - 2
    for group in module.shown():
        height, inside = _box(group, x + PAD, at + 4, width - 2 * PAD, colours, on)
        body += inside
        at += height + 8
    height = at + PAD // 2 - y
    return height, [rect(x, y, width, height, "#000000", 'fill-opacity="0.03" stroke="#777"'), *body]
