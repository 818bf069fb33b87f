"""A choice of options as rules that a plan holds and a person can edit, and back.

An operation is called ``module/kind.n``, the ``n``-th of its kind in its module: ``model.layers.0.mlp.up_proj/mm.1``.
Its option is written as the placements of its operands and of its results, ``replicate, split(1) -> split(1)``, with
``by name`` where a lowering stands in for it. A rule gives the operations that a pattern names, with shell wildcards,
an option; the last that matches counts.

**An operation that no rule names follows its operands**: it takes the first of its legal options that takes all
operands as they lie; else the first for which some that every rank has are cut, which sends nothing; else every rank
does all of it. So rules are few: those for operations where something begins to be cut, or is gathered.
"""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError, nearest
from shardgraph.ir import Input, Tangent, placeholders
from shardgraph.passes.analysis.names import names_of
from shardgraph.passes.base import Context
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.options import Option, operands
from shardgraph.passes.sharding.placements import REPLICATE, is_cut, written
from shardgraph.plans.activation_plan import Rules
from shardgraph.plans.parameter_plan import AUTO

_SHOWN = 6  # legal options that an error lists


class Placements(Protocol):
    """What may be chosen for the operations of a graph along one mesh axis."""

    def options(self, node: fx.Node) -> list[Option]:
        """What is legal for a placeholder, a constant or an operation; the first of an operation: all of it."""
        ...

    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds of bringing a value from one placement to another; infinite for what may not be."""
        ...

    def solve(self) -> tuple[dict[fx.Node, Option], float]:
        """The option of every node that together take the least time; and the gap (:mod:`shardgraph.passes.milp`)."""
        ...

    def ends(self, chosen: Mapping[fx.Node, Option]) -> Iterator[tuple[Value, Placement]]:
        """How the results of the graph must lie."""
        ...


@dataclass(frozen=True)
class Applied:
    """The option of every node under a plan's rules, and what of the rules did not apply."""

    options: dict[fx.Node, Option]
    ignored: tuple[str, ...]


def choose(gm: fx.GraphModule, placements: Placements, axis: str, context: Context) -> dict[fx.Node, Option]:
    """The option of every node: what the plan says of operations along ``axis``, else the best; and write it down.

    Of a call other than the one that the plan was decided for it is what of the plan applies there.

    Raises:
        PlanError: what the plan says does not apply to the call that it was decided for, or nothing is possible.
    """
    plan, position = context.plan, context.plan.axes.index(axis)
    rules = plan.activations.rules(axis) if plan.activations else None
    open_ = any(entry.placements[position] == AUTO for _, entry in plan.parameters)
    if plan.activations and rules is not None and not open_:
        call = call_of(gm)
        strict = call == plan.activations.call
        try:
            applied = apply_rules(rules, gm, placements, axis, strict=strict)
        except PlanError as error:
            if strict:
                raise
            context.notes.append(f"operations along {axis!r} are placed anew for {call}: {error}")
        else:
            if applied.ignored:
                context.notes.append(
                    f"activations along {axis!r} were decided for {plan.activations.call}; for {call} these do not "
                    f"apply, and the operations follow their operands: {', '.join(applied.ignored[:_SHOWN])}"
                    f"{f' and {len(applied.ignored) - _SHOWN} more' if len(applied.ignored) > _SHOWN else ''}"
                )
            context.activations[axis] = rules
            return applied.options
    chosen, gap = placements.solve()
    if gap:
        context.notes.append(
            f"placements along {axis!r} are within {gap:.2%} of the fastest: the search ran out of time"
        )
    context.activations[axis] = rules_for(gm, placements, chosen)
    return chosen


def call_of(gm: fx.GraphModule) -> str:
    """The call that a joint graph was captured for, as text: which halves it has, and its inputs."""
    roles = placeholders(gm)
    halves = "forward and backward" if any(isinstance(role, Tangent) for role in roles) else "forward"
    inputs = sorted((role.index, node.meta["val"]) for role, node in roles.items() if isinstance(role, Input))
    tensors = [value for _, value in inputs if isinstance(value, torch.Tensor)]
    given = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in tensors)
    return f"{halves} of {given or 'no tensors'}"


def written_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """What rules call the operations of a graph."""
    return {node: f"{module}/{kind}.{number}" for node, (module, kind, number) in names_of(_operations(gm)).items()}


def pattern_of(name: str) -> str:
    """The pattern of an operation and those of other layers: numbers among the names of its module are any."""
    module, _, operation = name.partition("/")
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) + "/" + operation


def text_of(option: Option) -> str:
    """An option as a rule has it."""
    given, gotten = (", ".join(map(_word, placements)) for placements in (option.operands, option.results))
    by = f" by {option.lowering}" if option.lowering else ""
    return f"{given + ' ' if given else ''}-> {gotten}{by}"


def rules_for(gm: fx.GraphModule, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Rules:
    """Rules under which every operation takes its ``chosen`` option, equal layers together."""
    names = written_names(gm)
    texts = {names[node]: text_of(chosen[node]) for node in names}
    differing = [names[node] for node in names if chosen[node] != _following(node, placements, chosen)]
    alike: dict[str, list[str]] = defaultdict(list)
    for name in texts:
        alike[pattern_of(name)].append(name)
    rules: dict[str, str] = {}
    for name in differing:
        together = {texts[each] for each in alike[pattern_of(name)]}
        rules[pattern_of(name) if len(together) == 1 else name] = texts[name]
    named = _named(rules.items(), texts)
    wrong = {name: texts[name] for name, (text, _) in named.items() if text != texts[name]}
    return (*rules.items(), *wrong.items())


def apply_rules(rules: Rules, gm: fx.GraphModule, placements: Placements, axis: str, *, strict: bool) -> Applied:
    """The option of every node under ``rules``, without a search.

    What does not apply to this graph is refused if ``strict``, and else left out: those operations follow their
    operands.

    Raises:
        PlanError: a rule names no operation or what is not legal, or what rules say together cannot be.
    """
    names = written_names(gm)
    every = list(names.values())
    named = _named(rules, every)
    ignored: list[str] = []
    used = {pattern for _, pattern in named.values()}
    for pattern, _ in rules:
        if pattern not in used and not fnmatch.filter(every, pattern):
            ignored.append(pattern)
            if strict:
                kept = (
                    nearest(pattern, dict.fromkeys(map(pattern_of, every))) or f"; it has {', '.join(every[:4])}, ..."
                )
                raise PlanError(
                    f"the plan's activations along {axis!r} name the operation {pattern!r}, which this model does not "
                    f"have as captured here{kept}. Take the rule out, or all of 'activations' to have them chosen anew"
                )
    chosen: dict[fx.Node, Option] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            chosen[node] = placements.options(node)[0]
        elif node in names:
            text, pattern = named.get(names[node], ("", ""))
            option = _option(placements.options(node), text) if text else _following(node, placements, chosen)
            if option is None and strict:
                raise PlanError(_not_legal(node, names[node], pattern, text, placements, axis))
            if option is None:
                ignored.append(names[node])
            chosen[node] = option or _following(node, placements, chosen)
    _check_moves(gm, placements, chosen, names, axis)
    return Applied(chosen, tuple(ignored))


def _operations(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def _word(placement: Placement | None) -> str:
    return written(placement).replace("shard(", "split(")  # as a plan writes what is used in parts


def _named(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The text of the last rule that names each operation, and its pattern."""
    found: dict[str, tuple[str, str]] = {}
    for pattern, text in rules:
        found |= dict.fromkeys(fnmatch.filter(names, pattern), (text, pattern))
    return found


def _option(options: Sequence[Option], text: str) -> Option | None:
    wanted = text.replace(" ", "")
    return next((option for option in options if text_of(option).replace(" ", "") == wanted), None)


def _following(node: fx.Node, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Option:
    """The option of an operation that no rule names."""
    options = placements.options(node)
    values = [value_of(operand) for operand in operands(node)]
    lies = tuple(chosen[maker].results[index] for maker, index in values)
    if exact := next((option for option in options if option.operands == lies), None):
        return exact

    def free(option: Option) -> bool:
        each = zip(values, lies, option.operands, strict=True)
        return all(
            have == want or (have == REPLICATE and is_cut(want) and not math.isinf(placements.move(value, have, want)))
            for value, have, want in each
        )

    return next((option for option in options if free(option)), options[0])


def _check_moves(
    gm: fx.GraphModule,
    placements: Placements,
    chosen: Mapping[fx.Node, Option],
    names: Mapping[fx.Node, str],
    axis: str,
) -> None:
    def check(value: Value, after: Placement, user: str) -> None:
        before = chosen[value[0]].results[value[1]]
        assert before is not None
        if before != after and math.isinf(placements.move(value, before, after)):
            maker = names.get(value[0], value[0].name)
            raise PlanError(
                f"along {axis!r} the plan has {maker!r} as {_word(before)} and {user} takes it as {_word(after)}, "
                f"which cannot be: give one of them an option that goes with the other's, or take 'activations' out of "
                "the plan to have them chosen anew"
            )

    for node in names:
        for operand, wanted in zip(operands(node), chosen[node].operands, strict=True):
            check(value_of(operand), wanted, repr(names[node]))
    for value, wanted in placements.ends(chosen):
        check(value, wanted, "what the program gives")


def _not_legal(node: fx.Node, name: str, pattern: str, text: str, placements: Placements, axis: str) -> str:
    shapes = ", ".join(str(list(operand.meta["val"].shape)) for operand in operands(node))
    legal = [repr(text_of(option)) for option in placements.options(node)]
    more = f" and {len(legal) - _SHOWN} more" if len(legal) > _SHOWN else ""
    return (
        f"the plan's activations along {axis!r} say {text!r} of {pattern!r}, and {name!r} with operands of shapes "
        f"{shapes or 'none'} cannot be so: it may be {', '.join(legal[:_SHOWN])}{more}. Change the rule, or take "
        "'activations' out of the plan to have them chosen anew"
    )
