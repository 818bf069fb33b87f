"""Forward operations by name, so that a plan can list which are recomputed and a person can edit the list.

A rule is a module name pattern and the names of operations in those modules:
``("model.layers.*.mlp", ("silu", "mul"))``. ``mul`` is every multiplication of the module, ``mul.2`` its second one.
"""

from __future__ import annotations

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby

from torch import fx

from shardgraph.errors import PlanError, nearest
from shardgraph.ir.operations import canonical
from shardgraph.passes.analysis.names import Name
from shardgraph.plans.annotations.match import matches

Rule = tuple[str, tuple[str, ...]]


def chosen_by(rules: Iterable[Rule], names: Mapping[fx.Node, Name]) -> set[fx.Node]:
    """The operations that ``rules`` name.

    Raises:
        PlanError: a pattern matches no module with operations, or the matched modules have no operation of a name.
    """
    modules = list(dict.fromkeys(module for module, _, _ in names.values()))
    chosen: set[fx.Node] = set()
    for pattern, operations in rules:
        matching = {module for module in modules if matches(pattern, module)}
        inside = [node for node, (module, _, _) in names.items() if module in matching]
        if not inside:
            known = nearest(pattern, modules) or f"; such modules are {', '.join(map(repr, modules[:4]))}"
            raise PlanError(f"recompute names the module {pattern!r}, and none that computes something matches{known}")
        for name in operations:
            kind, _, number = name.partition(".")
            kind = canonical(kind)
            named = [n for n in inside if fnmatchcase(names[n][1], kind) and number in ("", str(names[n][2]))]
            if not named:
                kinds = dict.fromkeys(names[node][1] for node in inside)
                raise PlanError(
                    f"recompute names the operation {name!r} of {pattern!r}, which is not there{nearest(name, kinds)}; "
                    f"there are {', '.join(kinds)}"
                )
            chosen.update(named)
    return chosen


def rules_for(chosen: Collection[fx.Node], names: Mapping[fx.Node, Name]) -> tuple[Rule, ...]:
    """Rules that name exactly the ``chosen`` operations, with equal layers merged into one pattern."""
    every: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    layers_of: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    kinds = Counter(name[:2] for name in names.values())
    whole = Counter(names[node][:2] for node in chosen)
    for node, (module, kind, number) in names.items():
        before, layer, after = _in_layer(module)
        every[before, after, kind].add(layer)
        if node in chosen:
            alone = whole[module, kind] < kinds[module, kind]
            layers_of[before, after, f"{kind}.{number}" if alone else kind].add(layer)
    rules: dict[str, list[str]] = defaultdict(list)
    for (before, after, name), layers in layers_of.items():
        full = layers == every[before, after, name.partition(".")[0]]
        for wildcard in ["*"] if full and layers != {""} else wildcards(layers):
            rules[glob.escape(before) + wildcard + glob.escape(after)].append(name)
    return tuple((pattern, tuple(names)) for pattern, names in rules.items())


def _in_layer(module: str) -> tuple[str, str, str]:
    """A module name split into the parts before, at and after its first number."""
    number = re.search(r"(?<![^.])\d+(?![^.])", module)
    return (module[: number.start()], number[0], module[number.end() :]) if number else (module, "", "")


def wildcards(numbers: Collection[str]) -> list[str]:
    """Wildcards for a set of numbers, without other ones: ``["[0-9]", "1[0-4]"]`` for 0 to 14."""
    found = [""] if "" in numbers else []
    last: dict[str, list[int]] = defaultdict(list)
    for number in sorted(filter(None, numbers), key=int):
        last[number[:-1]].append(int(number[-1]))
    for tens, digits in last.items():
        for _, pairs in groupby(enumerate(digits), key=lambda pair: pair[1] - pair[0]):  # consecutive digits
            run = [digit for _, digit in pairs]
            found.append(f"{tens}{run[0]}" if len(run) == 1 else f"{tens}[{run[0]}-{run[-1]}]")
    return found
