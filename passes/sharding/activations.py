"""Converts a choice of options to rules that a plan stores and a user can edit, and back.

An operation is named ``module/kind.n``, the ``n``-th of its kind in its module: ``model.layers.0.mlp.up_proj/mm.1``.
Its option is written as the placements of its operands and results, ``replicate, split(1) -> split(1)``, followed by
``by name`` if a lowering replaces the operation. A rule assigns an option to every operation whose name matches a
pattern with shell wildcards; the last matching rule wins.

**An operation that no rule matches follows its operands**: it takes the first legal option whose operand placements
equal the current ones; else the first that only shards replicated operands, which needs no communication; else it is
computed in full on every rank. So few rules are needed: only for operations where a tensor is first sharded, or is
gathered.
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

_SHOWN = 6  # legal options listed in an error


class Placements(Protocol):
    """The options of a graph's operations along one mesh axis."""

    def options(self, node: fx.Node) -> list[Option]:
        """The legal options of a placeholder, constant or operation; the first of an operation is fully replicated."""
        ...

    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds to redistribute a value from one placement to another; infinite if not allowed."""
        ...

    def solve(self) -> tuple[dict[fx.Node, Option], float]:
        """The option of every node that minimizes total time, and the gap (:mod:`shardgraph.passes.milp`)."""
        ...

    def ends(self, chosen: Mapping[fx.Node, Option]) -> Iterator[tuple[Value, Placement]]:
        """The placements required of the graph's outputs."""
        ...


@dataclass(frozen=True)
class Applied:
    """The option of every node under a plan's rules, and which rules did not apply."""

    options: dict[fx.Node, Option]
    ignored: tuple[str, ...]


def choose(gm: fx.GraphModule, placements: Placements, axis: str, context: Context) -> dict[fx.Node, Option]:
    """Choose every node's option, by the plan's rules for ``axis`` if any, else by search, and record the choice.

    For a call other than the one that the plan was decided for, only the rules that apply to it are used.

    Raises:
        PlanError: the rules do not apply to the call that they were decided for, or no choice is possible.
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
    """The call that a joint graph was captured for, as text: which halves it has (forward, backward), and inputs."""
    roles = placeholders(gm)
    halves = "forward and backward" if any(isinstance(role, Tangent) for role in roles) else "forward"
    inputs = sorted((role.index, node.meta.get("val")) for role, node in roles.items() if isinstance(role, Input))
    tensors = [value for _, value in inputs if isinstance(value, torch.Tensor)]
    given = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in tensors)
    return f"{halves} of {given or 'no tensors'}"


def written_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The names that rules use for the operations of a graph."""
    return {node: f"{module}/{kind}.{number}" for node, (module, kind, number) in names_of(_operations(gm)).items()}


def pattern_of(name: str) -> str:
    """The pattern that matches an operation in every layer: numbers in its module's name become wildcards."""
    module, _, operation = name.partition("/")
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) + "/" + operation


def text_of(option: Option) -> str:
    """An option as written in a rule."""
    given, gotten = (", ".join(map(_word, placements)) for placements in (option.operands, option.results))
    by = f" by {option.lowering}" if option.lowering else ""
    return f"{given + ' ' if given else ''}-> {gotten}{by}"


def rules_for(gm: fx.GraphModule, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Rules:
    """Rules that reproduce the ``chosen`` option of every operation, with one rule for equal layers."""
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

    If ``strict``, a rule that does not apply to this graph is an error; otherwise it is ignored and its operations
    follow their operands.

    Raises:
        PlanError: a rule matches no operation or gives an illegal option, or the rules contradict each other.
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
    return written(placement).replace("shard(", "split(")  # plans write "split" for tensors used as shards


def _named(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The option text and pattern of the last rule that matches each operation."""
    found: dict[str, tuple[str, str]] = {}
    for pattern, text in rules:
        found |= dict.fromkeys(fnmatch.filter(names, pattern), (text, pattern))
    return found


def _option(options: Sequence[Option], text: str) -> Option | None:
    wanted = text.replace(" ", "")
    return next((option for option in options if text_of(option).replace(" ", "") == wanted), None)


def _following(node: fx.Node, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Option:
    """The option of an operation that no rule matches."""
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
