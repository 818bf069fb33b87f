"""The data flow between the modules of a captured forward.

Every value has an origin, a *site*: a module that applied its parameters, or operations without parameters that joined
the values of several sites, such as a residual addition. A value computed from one site alone has that site as its
origin, so activation functions, dropout and reshapes are not visible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from shardgraph.ir import Input, IntermediateBase, Output, Parameter, buckets, outputs
from shardgraph.ir.attributes import ROLE, SUBJECT
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.rows import operation_of
from shardgraph.pictures.tree import Module, Site

Edges = dict[tuple[Site, Site], None]
"""Pairs of sites of which the second consumes a value of the first, in order of first use."""


def trace_flow(forward: fx.GraphModule, root: Module) -> Edges:
    """The data flow through ``forward``; the sites are added to the modules of the tree ``root``.

    Buffers, and values that depend on no input, such as positions and masks, have no origin. What forward returns and
    also goes on with, such as the keys and values of a cache, has no edge to the outputs.
    """
    tracer = _Tracer(root)
    for node in forward.graph.nodes:
        tracer.follow(node)
    for role, value in outputs(forward):
        if isinstance(role, (Output, IntermediateBase)) and isinstance(value, fx.Node):
            tracer.connect([tracer.origin[value]], tracer.outputs)
    return tracer.useful_edges()


class _Tracer:
    def __init__(self, root: Module) -> None:
        self.root = root
        self.inputs, self.outputs = Site(root, "inputs", "inputs"), Site(root, "outputs", "outputs")
        self.origin: dict[fx.Node, Site | None] = {}
        self.edges: Edges = {}
        self._parameter: dict[fx.Node, str] = {}  # of values that are a parameter, or one gathered or cast by a pass
        self._order: dict[Site, int] = {self.inputs: 0}  # in order of first use
        self._users: dict[tuple[Module, str], Site] = {}

    def follow(self, node: fx.Node) -> None:
        """Determine the origin of the value of ``node``."""
        role = ROLE.get(node)
        self.origin[node] = self.inputs if isinstance(role, Input) else None
        if isinstance(role, Parameter):
            self._parameter[node] = role.fqn
        if node.op != "call_function":
            return
        if (packed := buckets.packed_as(node)) in self._parameter:
            self._parameter[node] = self._parameter[packed]
            return
        sources = list(dict.fromkeys(site for each in node.all_input_nodes if (site := self.origin[each])))
        sources.sort(key=self._order.__getitem__)
        fqn = next((self._parameter[each] for each in node.all_input_nodes if each in self._parameter), None)
        if node in SUBJECT or (fqn is None and len(sources) < 2):
            self.origin[node] = sources[-1] if sources else None
            if node in SUBJECT and fqn is not None:  # added by a pass: it moves a value and computes nothing
                self._parameter[node] = fqn
            return
        module = module_of(node)
        site = self._user_of(fqn, module, sources) if fqn is not None else self._join(node, module, sources[-1])
        self.connect(sources, site)
        self.origin[node] = site

    def connect(self, sources: Iterable[Site | None], target: Site) -> None:
        """Record that ``target`` consumes values of ``sources``."""
        self.edges |= {(source, target): None for source in sources if source is not None and source is not target}

    def useful_edges(self) -> Edges:
        """The edges, without those to joins whose result only backward uses; those joins are removed."""
        consumers: defaultdict[Site, set[Site]] = defaultdict(set)
        for source, target in self.edges:
            consumers[source].add(target)
        useless: set[Site] = set()
        for site in reversed(self._order):  # consumers before producers
            if site.kind == "join" and consumers[site] <= useless:
                useless.add(site)
                site.module.sites.remove(site)
        ends = [site for site, after in consumers.items() if after - useless == {self.outputs}]
        return {
            (source, target): None
            for source, target in self.edges
            if target not in useless and (target is not self.outputs or source in ends or not ends)
        }

    def _user_of(self, fqn: str, module: str, sources: list[Site]) -> Site:
        """The site of an operation of ``module`` that uses the parameter ``fqn``.

        At the first use of its owner it is the owner's site, even if the code is in another module: attention applies
        the projection of a module inside it.
        """
        path, _, name = fqn.rpartition(".")
        owner = self.root.find(path)
        if sources and _beside(sources[-1], owner, module):
            return sources[-1]  # a weight and its bias
        kind, text = ("parameter", name) if owner.children else ("module", "")
        own = self._users.get((owner, text))
        if owner.path == module or own in sources or (own is None and _related(owner.path, module)):
            return own or self._add(Site(owner, kind, text))
        borrower = self.root.find(module)
        return self._users.get((borrower, fqn)) or self._add(Site(borrower, "borrowed", fqn))

    def _join(self, node: fx.Node, path: str, newest: Site) -> Site:
        """The site of an operation on values of several sites.

        It is the newest of them if that is in the same module (or nearest ancestor with parameters), so attention is
        one site, and no site depends on itself.
        """
        name, module = operation_of(node).strip("_"), self.root
        for child in path.split("."):
            if child not in module.children:
                break
            module = module.children[child]
        if newest.module is not module or newest.kind == "inputs":
            return self._add(Site(module, "join", name))
        if newest.kind == "join" and name not in newest.text.split(", "):
            newest.text += f", {name}"
        return newest

    def _add(self, site: Site) -> Site:
        self._order[site] = len(self._order)
        site.module.sites.append(site)
        if site.kind != "join":
            self._users[site.module, site.text] = site
        return site


def _beside(site: Site, owner: Module, module: str) -> bool:
    """Whether ``module`` uses another parameter of ``owner`` at ``site``."""
    if site.kind == "borrowed":
        return site.module.path == module and site.text.rpartition(".")[0] == owner.path
    return site.kind == "parameter" and site.module is owner


def _related(path: str, other: str) -> bool:
    """Whether one module contains the other."""
    outer, inner = sorted((path, other), key=len)
    return not outer or f"{inner}.".startswith(f"{outer}.")
