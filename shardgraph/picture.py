"""A picture of a partition plan: what each rank holds of each module, and what it sends for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import fx

from shardgraph.ir import Parameter, chunk_bounds, collectives, group_of, placeholders
from shardgraph.mesh import Mesh
from shardgraph.passes.analysis.wire import node_wire_bytes, operation_of
from shardgraph.plan import ParameterPlan
from shardgraph.sizes import format_bytes

WIDTH, LINE, PAD, HEADER = 980, 20, 10, 26
COLOURS = ("#8ecae6", "#ffd166", "#a8d5a2", "#f4a6b8", "#cdb4f0", "#f7b37e", "#d0d0d0")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222} .title{font-size:20px;font-weight:600} .module{font-weight:600} "
    ".mono{font-family:ui-monospace,monospace;font-size:12px} .sent{fill:#555;font-size:12px} .end{text-anchor:end}"
)


def draw(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    mesh: Mesh,
    parameters: Mapping[str, ParameterPlan],
    shapes: Mapping[str, tuple[int, ...]],
    path: str | Path,
) -> Path:
    """Write a self-contained SVG file of a plan and return its path.

    Modules are nested boxes; numbered neighbours that are alike in every respect are drawn once. Each parameter has
    the colour of its placement, its whole and its local shape (of rank 0, the largest) and its bytes per
    rank; each module lists the collectives of its own parameters with the bytes that a rank sends in one step.
    """
    root = _tree(forward, mesh, parameters, shapes)
    sent = _add_traffic(root, {"forward": forward, "backward": backward}, mesh)
    placements = list(dict.fromkeys(row.placement for row in root.rows()))
    colours = {text: COLOURS[min(i, len(COLOURS) - 1)] for i, text in enumerate(placements)}

    where = " x ".join(f"{axis}={size}" for axis, size in mesh) or "one process"
    whole = sum(row.whole_bytes for row in root.rows())
    traffic = ", ".join(f"{format_bytes(nbytes)} over {axis}" for axis, nbytes in sent.items()) or "nothing"
    held = f"{format_bytes(root.nbytes)} per rank, {format_bytes(whole)} in all"
    summary = f"Parameters: {held}. Sent per rank and step: {traffic}"
    body = [_text(PAD, 30, f"Partition plan on {where}", "title"), _text(PAD, 54, summary)]
    y = 70
    for placement, colour in colours.items():
        rows = [row for row in root.rows() if row.placement == placement]
        body.append(_rect(PAD, y, 16, 14, colour))
        held = format_bytes(sum(row.nbytes for row in rows))
        body.append(_text(PAD + 24, y + 12, f"{placement}: {len(rows)} parameters, {held} per rank"))
        y += LINE
    height, boxes = _box([root], PAD, y + PAD, WIDTH - 2 * PAD, colours)
    height += y + 2 * PAD
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<title>Partition plan on {escape(where)}</title><style>{STYLE}</style>",
        _rect(0, 0, WIDTH, height, "#ffffff"),
        *body,
        *boxes,
        "</svg>",
    ]
    path = Path(path)
    path.write_text("\n".join(svg), encoding="utf-8")
    return path


# -- what is drawn ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placement: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.local) * self.itemsize

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass
class _Module:
    path: str
    own: list[_Row] = field(default_factory=list)
    traffic: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    children: dict[str, _Module] = field(default_factory=dict)

    def find(self, path: str) -> _Module:
        module = self
        for name in path.split(".") if path else ():
            below = f"{module.path}.{name}" if module.path else name
            module = module.children.setdefault(name, _Module(below))
        return module

    def rows(self) -> Iterator[_Row]:
        yield from self.own
        for child in self.children.values():
            yield from child.rows()

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows())

    def likeness(self) -> tuple:
        """Equal for modules that are drawn as one."""
        inside = tuple((name, child.likeness()) for name, child in self.children.items())
        return (*self.own, *((k, *v) for k, v in self.traffic.items()), inside)

    def groups(self) -> Iterator[list[_Module]]:
        """The children; neighbours with numbers for names that are alike are one group."""

        def key(item: tuple[str, _Module]) -> object:
            name, child = item
            return child.likeness() if name.isdigit() else name

        return ([child for _, child in group] for _, group in groupby(self.children.items(), key))


def _tree(
    forward: fx.GraphModule, mesh: Mesh, parameters: Mapping[str, ParameterPlan], shapes: Mapping[str, tuple[int, ...]]
) -> _Module:
    roles = placeholders(forward).items()
    itemsize = {role.fqn: node.meta["val"].element_size() for role, node in roles if isinstance(role, Parameter)}
    root = _Module("")
    for fqn, shape in shapes.items():
        entry, local = parameters[fqn], tuple(shape)
        if entry.shard_axis is not None:
            _, rows = chunk_bounds(shape[0], mesh[entry.shard_axis][1], 0)
            local = (rows, *shape[1:])
        over = [f"{placed} over {axis}" for placed, (axis, _) in zip(entry.placements, mesh, strict=True)]
        path, _, name = fqn.rpartition(".")
        size = itemsize.get(fqn, torch.get_default_dtype().itemsize)
        root.find(path).own.append(_Row(name, tuple(shape), local, ", ".join(over) or "whole", size))
    return root


def _add_traffic(root: _Module, graphs: Mapping[str, fx.GraphModule | None], mesh: Mesh) -> dict[str, int]:
    """Note each collective at the module of its parameter or buffer; returns the bytes sent per axis."""
    sent: dict[str, int] = {}
    for direction, gm in graphs.items():
        for node in collectives(gm) if gm is not None else ():
            axis, nbytes = group_of(node), node_wire_bytes(node, mesh)
            fqn = str(node.meta.get("subject", "")).split(" ")[-1]  # of "gradient of a.weight", "buffer a.mean"
            module = root.find(fqn.rpartition(".")[0])
            entry = module.traffic.setdefault((direction, operation_of(node), axis), [0, 0])
            entry[0] += 1
            entry[1] += nbytes
            sent[axis] = sent.get(axis, 0) + nbytes
    return sent


# -- how it is drawn -------------------------------------------------------------------------------


def _box(alike: list[_Module], x: int, y: int, width: int, colours: Mapping[str, str]) -> tuple[int, list[str]]:
    """The height and the elements of one box, which stands for all modules that are ``alike``."""
    module, right = alike[0], x + width - PAD
    label, held = module.path.rpartition(".")[2] or "model", f"{format_bytes(module.nbytes)} per rank"
    if len(alike) > 1:
        first, last = (".".join(end.path.split(".")[-2:]) for end in (module, alike[-1]))
        label, held = f"{first} .. {last} x{len(alike)}", f"{len(alike)} x {held}"
    body = [_text(x + PAD, y + 18, label, "module"), _text(right, y + 18, held, "end")]
    at = y + HEADER
    for row in module.own:
        local = f" -> {_shape(row.local)}" if row.local != row.shape else ""
        body.append(_rect(x + PAD, at, width - 2 * PAD, LINE - 2, colours[row.placement]))
        body.append(_text(x + PAD + 6, at + 14, row.name))
        body.append(_text(WIDTH // 2 - 120, at + 14, f"{_shape(row.shape)}{local}", "mono"))
        body.append(_text(right - 6, at + 14, format_bytes(row.nbytes), "end"))
        at += LINE
    for (direction, operation, axis), (count, nbytes) in module.traffic.items():
        calls = f"{direction}: {count} x {operation} over {axis}"
        body.append(_text(x + PAD + 6, at + 14, calls, "sent"))
        body.append(_text(right - 6, at + 14, f"{format_bytes(nbytes)} sent", "sent end"))
        at += LINE - 2
    for group in module.groups():
        height, inside = _box(group, x + PAD, at + 4, width - 2 * PAD, colours)
        body += inside
        at += height + 8
    height = at + PAD // 2 - y
    return height, [_rect(x, y, width, height, "#000000", 'fill-opacity="0.03" stroke="#777"'), *body]


def _rect(x: int, y: int, width: int, height: int, colour: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}" {more}/>'


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def _shape(shape: Iterable[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
