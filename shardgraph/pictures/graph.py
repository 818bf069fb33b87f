"""The plan as a graph that Graphviz lays out: modules as nested clusters, parameters as nodes, data flow as edges.

The label of a cluster is a node above all others in it: edges go around nodes, and through labels of Graphviz's own.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from html import escape

import graphviz

from shardgraph.pictures.flow import Edges
from shardgraph.pictures.svg import Drawing
from shardgraph.pictures.tree import Module, Site, Tree, describe
from shardgraph.sizes import format_bytes

_FONT = "Helvetica,Arial,sans-serif"
_COLUMNS = 3  # parameters of a module side by side
_SVG = "{http://www.w3.org/2000/svg}"
_SHRINK = 0.88  # whoever looks at an SVG may have wider fonts than Graphviz measured
ET.register_namespace("", _SVG.strip("{}"))
ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def plan_graph(tree: Tree, flow: Edges) -> graphviz.Digraph:
    """A plan as a Graphviz graph; equal consecutive layers are one cluster, without the edges between them.

    A node has the name of its parameter, which viewers show as a tooltip.
    """
    dot = graphviz.Digraph("plan")
    dot.attr("graph", compound="true", nodesep="0.15", ranksep="0.3", fontname=_FONT, fontsize="12")
    dot.attr("graph", label=_title(tree), labelloc="t", labeljust="l")
    dot.attr("node", shape="box", fontname=_FONT, fontsize="11", margin="0.1,0.05", height="0.3", color="#777777")
    dot.attr("edge", color="#44444499", arrowsize="0.6")
    _add_module(dot, [tree.root], tree.colours, tree.on)
    folded = dict(_fold(tree.root, tree.root, ()))
    edges = dict.fromkeys(
        (_drawn(source, folded), _drawn(target, folded))
        for source, target in flow
        if not _between_layers(folded[source.module][1], folded[target.module][1])
    )
    for site in dict.fromkeys(site for ends in edges for site in ends if site.kind in ("inputs", "outputs")):
        dot.node(_name(site), site.text, shape="plaintext", fontsize="13")
        if site.kind == "inputs":
            dot.edge(_name(site), _heading(tree.root), style="invis")
    for above, below in _under_headings(tree.root, edges):
        dot.edge(above, below, style="invis")
    for source, target in edges:
        borders = {}
        if source.module is not target.module:  # an edge from outside ends at the border of a module's cluster
            ends = (("ltail", source), ("lhead", target))
            borders = {end: _identifier(f"cluster {site.module.path}") for end, site in ends if site.kind == "module"}
        dot.edge(_name(source), _end(source, target), **borders)
    return dot


def _under_headings(root: Module, edges: Iterable[tuple[Site, Site]]) -> Iterator[tuple[str, str]]:
    """Pairs of which the second is to be below the first: a module's heading and nodes that no edge inside of it leads
    to, and where an edge from and the heading of the outermost module that it enters, which is drawn below all of it.
    """
    inside: dict[Module, list[str]] = {}
    around: dict[Module, Module] = {}

    def visit(module: Module) -> None:
        groups = [group[0] for group in module.shown()]
        around.update(dict.fromkeys(groups, module))
        sites = [_name(site) for site in module.sites if site.kind in ("join", "borrowed")]
        inside[module] = [*(_node(module, each.name) for each in module.own[:1]), *sites, *map(_heading, groups)]
        for group in groups:
            visit(group)

    visit(root)
    led: set[str] = set()
    for source, target in edges:
        if source.kind == "inputs" or target.kind == "outputs":
            continue
        outer, at = [source.module], target.module
        while outer[-1] is not root:
            outer.append(around[outer[-1]])
        below = _name(target)
        while at not in outer:
            below, at = _heading(at), around[at]
        led.add(below)
        if below != _end(source, target):
            yield _name(source), below
    for module, nodes in inside.items():
        yield from ((_heading(module), node) for node in [each for each in nodes if each not in led] or nodes[:1])


def render_svg(dot: graphviz.Digraph) -> Drawing:
    """The graph, laid out by Graphviz.

    Raises:
        graphviz.ExecutableNotFound: Graphviz's program ``dot`` is not on the ``PATH``.
    """
    svg = ET.fromstring(dot.pipe(format="svg", encoding="utf-8"))
    width, height = (int(svg.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    graph = svg.find(f"{_SVG}g")
    assert graph is not None
    for group in graph.iter(f"{_SVG}g"):
        _fit_texts(group)
    return Drawing(width, height, ET.tostring(graph, encoding="unicode").rstrip())


def _fit_texts(group: ET.Element) -> None:
    """Have the texts of a group fit in any font: each smaller than its room, and parts of a line behind each other."""
    line = None
    for text in group.findall(f"{_SVG}text"):
        text.set("font-size", f"{_SHRINK * float(text.attrib['font-size']):.2f}")
        looks = {name: value for name, value in text.attrib.items() if name not in ("x", "y", "text-anchor")}
        if line is None or line.get("y") != text.get("y"):
            line = text
        else:
            ET.SubElement(line, f"{_SVG}tspan", {"font-weight": "normal", "fill": "#000000"} | looks).text = text.text
            group.remove(text)


def _title(tree: Tree) -> str:
    lines = [f'<font point-size="18"><b>{escape(tree.title)}</b></font>', *map(escape, tree.summary)]
    lines += [f'<font color="{colour}" point-size="15">&#9632;</font> {escape(line)}' for colour, line in tree.legend]
    rows = "".join(f'<tr><td align="left">{line}</td></tr>' for line in lines)
    return f'<<table border="0" cellspacing="1" cellpadding="1">{rows}</table>>'


def _add_module(dot: graphviz.Digraph, alike: list[Module], colours: dict[str, str], on: str) -> None:
    """One cluster, which represents all modules in ``alike``."""
    module = alike[0]
    with dot.subgraph(name=_identifier(f"cluster {module.path}")) as cluster:
        cluster.attr(label="", style="rounded,filled", fillcolor="#00000008", color="#888888", margin="8")
        cluster.node(_heading(module), _label(alike, on), shape="plaintext", margin="0", height="0")
        _add_parameters(cluster, module, colours)
        for site in module.sites:
            if site.kind == "join":
                cluster.node(_name(site), _escape(site.text), shape="ellipse", style="filled", fillcolor="white")
            elif site.kind == "borrowed":
                cluster.node(_name(site), _escape(f"{site.text}\n({site.use})"), style="dashed")
        for group in module.shown():
            _add_module(cluster, group, colours, on)


def _add_parameters(cluster: graphviz.Digraph, module: Module, colours: dict[str, str]) -> None:
    """A node for each parameter of ``module``, in rows of ``_COLUMNS``."""
    names = [_node(module, parameter.name) for parameter in module.own]
    for start in range(0, len(names), _COLUMNS):
        with cluster.subgraph() as line:
            line.attr(rank="same")
            for name, parameter in zip(names[start:][:_COLUMNS], module.own[start:], strict=False):
                label = "\n".join((parameter.name, parameter.shapes, format_bytes(parameter.nbytes)))
                line.node(name, _escape(label), style="filled", fillcolor=colours[parameter.placement])
    for i, name in enumerate(names[1:], start=1):
        cluster.edge(names[i - 1 if i % _COLUMNS else i - _COLUMNS], name, style="invis")


def _label(alike: list[Module], on: str) -> str:
    name, held = describe(alike, on)
    lines = [f'<b>{escape(name)}</b>&#8195;<font color="#555555">{held}</font>' if held else f"<b>{escape(name)}</b>"]
    for each in alike[0].traffic.values():
        sent = f"{each.calls}, {format_bytes(each.nbytes)}"
        lines.append(f'<font point-size="10" color="#555555">{escape(sent)}</font>')
    return "<" + "".join(f'{line}&#160;&#160;<br align="left"/>' for line in lines) + ">"


_Chain = tuple[tuple[Module, int], ...]
"""The groups drawn as one that contain a module, outermost first: the group's first module, and the index within."""


def _fold(module: Module, drawn: Module, chain: _Chain) -> Iterator[tuple[Module, tuple[Module, _Chain]]]:
    """``module`` and all below it, each with the module that is drawn for it and its chain."""
    yield module, (drawn, chain)
    for group in drawn.groups():
        for i, member in enumerate(group):
            inside = module.children[member.path.rpartition(".")[2]]
            yield from _fold(inside, group[0], (*chain, (group[0], i)) if len(group) > 1 else chain)


def _drawn(site: Site, folded: dict[Module, tuple[Module, _Chain]]) -> Site:
    module = folded[site.module][0]
    return module.sites[site.module.sites.index(site)] if site in site.module.sites else site


def _between_layers(source: _Chain, target: _Chain) -> bool:
    return any(a is b and i != j for (a, i), (b, j) in zip(source, target, strict=False))


def _heading(module: Module) -> str:
    """The name of the node that is the label of a module's cluster."""
    return _identifier(f"label of {module.path}")


def _name(site: Site) -> str:
    """The name of the node that edges of a site are attached to."""
    if site.kind in ("inputs", "outputs"):
        return f"{site.text} of the model"
    if site.kind == "parameter":
        return _node(site.module, site.text)
    if site.kind == "module":
        return _node(site.module, site.module.own[0].name)
    return _node(site.module, f"{site.kind} {site.module.sites.index(site)}")


def _end(source: Site, target: Site) -> str:
    """The name of the node at which an edge ends: from outside of a module, its heading."""
    whole = target.kind == "module" and source.module is not target.module
    return _heading(target.module) if whole else _name(target)


def _node(module: Module, name: str) -> str:
    return _identifier(f"{module.path}.{name}".strip("."))


def _escape(text: str) -> str:
    """A literal label: Graphviz interprets HTML entities in plain labels too."""
    return graphviz.escape(text.replace("&", "&amp;"))


def _identifier(name: str) -> str:
    """The name without characters that are special in Graphviz's language."""
    return re.sub(r'[:<>"\\]', "_", name)
