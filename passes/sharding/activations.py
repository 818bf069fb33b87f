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
import glob
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError, nearest
from shardgraph.ir import Buffer, Gradient, Input, Mutation, Output, Parameter, Tangent, outputs, placeholders
from shardgraph.passes.base import Context
from shardgraph.passes.sharding.choose import Placements
from shardgraph.passes.sharding.classes import pattern_of, written_names
from shardgraph.passes.sharding.legal import placed_operands, value_of
from shardgraph.passes.sharding.options import Option, operands
from shardgraph.passes.sharding.placements import REPLICATE, is_cut, written
from shardgraph.plans.activation_plan import Rules
from shardgraph.plans.parameter_plan import AUTO

_SHOWN = 6  # options or operations listed in a message


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
            chosen, ignored = _apply_rules(rules, gm, placements, axis, strict=strict)
        except PlanError as error:
            if strict:
                raise
            context.notes.append(f"operations along {axis!r} are placed anew for {call}: {error}")
        else:
            if ignored:
                context.notes.append(
                    f"activations along {axis!r} were decided for {plan.activations.call}; for {call} these do not "
                    f"apply, and the operations follow their operands: {_first(ignored)}"
                )
            context.activations[axis] = rules
            return chosen
    chosen, gap = placements.solve()
    if gap:
        context.notes.append(
            f"placements along {axis!r} are within {gap:.2%} of the fastest: the search ran out of time"
        )
    context.activations[axis] = _rules_for(gm, placements, chosen)
    return chosen


def call_of(gm: fx.GraphModule) -> str:
    """The call that a joint graph was captured for, as text: which halves it has (forward, backward), and inputs.

    And how many outputs, if there are several: a step for the loss alone computes fewer. And what training does beside,
    which evaluation does not: it writes buffers, and draws random numbers. And if not all parameters have gradients,
    which do: layers may be frozen and trained again.
    """
    roles = placeholders(gm)
    halves = "forward and backward" if any(isinstance(role, Tangent) for role in roles) else "forward"
    inputs = sorted((role.index, node.meta.get("val")) for role, node in roles.items() if isinstance(role, Input))
    tensors = [value for _, value in inputs if isinstance(value, torch.Tensor)]
    forms = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in tensors]
    count = sum(isinstance(role, Output) for role, _ in outputs(gm))
    written = sum(isinstance(role, Mutation) and isinstance(role.of, Buffer) for role, _ in outputs(gm))
    drawn = sum(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in gm.graph.nodes)
    results = f", {count} outputs" if count > 1 else ""
    results += f", buffers written: {written}" if written else ""
    results += f", random draws: {drawn}" if drawn else ""
    return f"{halves} of {', '.join(forms) or 'no tensors'}{results}{_trained(gm)}"


def _trained(gm: fx.GraphModule) -> str:
    """Which parameters have gradients, as text; empty if all have or none has."""
    every = {role for role in placeholders(gm) if isinstance(role, Parameter)}
    roles = (role for role, value in outputs(gm) if isinstance(value, fx.Node))
    trained = sorted(role.of.fqn for role in roles if isinstance(role, Gradient) and isinstance(role.of, Parameter))
    if len(trained) in (0, len(every)):
        return ""
    digest = hashlib.sha256("\n".join(trained).encode()).hexdigest()[:6]
    return f", gradients of {len(trained)} of {len(every)} parameters ({digest})"


def _text_of(option: Option) -> str:
    """An option as written in a rule."""
    before, after = (", ".join(map(_word, placements)) for placements in (option.operands, option.results))
    return f"{before} -> {after}".lstrip() + (f" by {option.lowering}" if option.lowering else "")


def _word(placement: Placement | None) -> str:
    return written(placement).replace("shard(", "split(")  # plans write "split" for tensors used as shards


def _first(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _rules_for(gm: fx.GraphModule, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Rules:
    """Rules that reproduce the ``chosen`` option of every operation, with one rule for equal layers."""
    names = written_names(gm)
    texts = {name: _text_of(chosen[node]) for node, name in names.items()}
    alike: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        alike[pattern_of(name)].add(text)
    rules: dict[str, str] = {}
    for node, name in names.items():
        if chosen[node] != _following(node, placements, chosen):
            alone = glob.escape(name)  # keys of an nn.ModuleDict may be any text
            rules[pattern_of(alone) if len(alike[pattern_of(name)]) == 1 else alone] = texts[name]
    matches = _last_matches(rules.items(), texts)
    wrong = {glob.escape(name): texts[name] for name, (_, text) in matches.items() if text != texts[name]}
    return (*rules.items(), *wrong.items())


def _last_matches(rules: Iterable[tuple[str, str]], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The last rule that matches each operation."""
    matches: dict[str, tuple[str, str]] = {}
    for pattern, text in rules:
        matches |= dict.fromkeys(fnmatch.filter(names, pattern), (pattern, text))
    return matches


def _apply_rules(
    rules: Rules, gm: fx.GraphModule, placements: Placements, axis: str, *, strict: bool
) -> tuple[dict[fx.Node, Option], list[str]]:
    """The option of every node under ``rules``, without a search, and the rules and operations that were ignored.

    If ``strict``, a rule that does not apply to this graph is an error; otherwise it is ignored and its operations
    follow their operands.

    Raises:
        PlanError: a rule matches no operation or gives an illegal option, or the rules contradict each other.
    """
    names = written_names(gm)
    every = list(names.values())
    ignored = [pattern for pattern, _ in rules if not fnmatch.filter(every, pattern)]
    if ignored and strict:
        similar = nearest(ignored[0], dict.fromkeys(map(pattern_of, every))) or f"; it has {', '.join(every[:4])}, ..."
        raise PlanError(
            f"the plan's activations along {axis!r} name the operation {ignored[0]!r}, which this model does not "
            f"have as captured here{similar}. Take the rule out, or all of 'activations' to have them chosen anew"
        )
    matches = _last_matches(rules, every)
    chosen: dict[fx.Node, Option] = {}
    for node, options in placements.options.items():
        if node not in names:
            chosen[node] = options[0]
            continue
        option = None
        if names[node] in matches:
            pattern, text = matches[names[node]]
            option = next((o for o in options if _text_of(o).replace(" ", "") == text.replace(" ", "")), None)
            if option is None and strict:
                shapes = ", ".join(str(list(operand.meta["val"].shape)) for operand in operands(node))
                raise PlanError(
                    f"the plan's activations along {axis!r} say {text!r} of {pattern!r}, and {names[node]!r} with "
                    f"operands of shapes {shapes or 'none'} cannot be so: it may be "
                    f"{_first([repr(_text_of(option)) for option in options])}. Change the rule, or take 'activations' "
                    "out of the plan to have them chosen anew"
                )
            if option is None:
                ignored.append(names[node])
        chosen[node] = option or _following(node, placements, chosen)
    _check_moves(placements, chosen, names, axis)
    return chosen, ignored


def _following(node: fx.Node, placements: Placements, chosen: Mapping[fx.Node, Option]) -> Option:
    """The option of an operation that no rule matches."""
    options = placements.options[node]
    values = [value_of(operand) for operand in operands(node)]
    current = tuple(chosen[maker].results[index] for maker, index in values)
    if exact := next((option for option in options if option.operands == current), None):
        return exact

    def free(option: Option) -> bool:
        return all(
            before == after
            or (before == REPLICATE and is_cut(after) and not math.isinf(placements.move(value, before, after)))
            for value, before, after in zip(values, current, option.operands, strict=True)
        )

    return next((option for option in options if free(option)), options[0])


def _check_moves(
    placements: Placements, chosen: Mapping[fx.Node, Option], names: Mapping[fx.Node, str], axis: str
) -> None:
    uses = [(v, after, repr(name)) for node, name in names.items() for v, after in placed_operands(node, chosen[node])]
    for value, end in placements.ends():
        uses.append((value, chosen[end].results[0] if isinstance(end, fx.Node) else end, "the program's result"))
    for (maker, index), after, user in uses:
        before = chosen[maker].results[index]
        if before != after and math.isinf(placements.move((maker, index), before, after)):
            raise PlanError(
                f"along {axis!r} the plan has {names.get(maker, maker.name)!r} as {_word(before)} and {user} takes it "
                f"as {_word(after)}, which cannot be: give one of them an option that goes with the other's, or take "
                "'activations' out of the plan to have them chosen anew"
            )
