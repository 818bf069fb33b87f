"""Tables of parameters, in which those of equal layers are one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from shardgraph.emission.lines import generalized, quoted, wrapped
from shardgraph.plans.parameter_plan import ParameterPlan


def layout(shape: torch.Size, entry: ParameterPlan, axes: Sequence[str]) -> str:
    """How a parameter is stored, as a call of ``Layout``."""
    parts = [str(tuple(shape))]
    if entry.shard_axis is not None:
        parts.append(f"rows={quoted(axes[entry.shard_axis])}")
    if entry.splits:
        split = ", ".join(f"{quoted(axes[position])}: {split}" for position, split in entry.splits.items())
        parts.append(f"split={{{split}}}")
    return f"Layout({', '.join(parts)})"


def in_loops(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Entries of a dictionary, those of equal layers as one."""
    shown: list[str] = []
    done: set[str] = set()
    values = dict(rows)
    for name, value in rows:
        if name in done:
            continue
        match = re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name)
        alike = [name]
        if match:
            head, tail = name[: match.start()], name[match.end() :]
            number = int(match[0])
            while (following := f"{head}{number + len(alike)}{tail}") in values and values[following] == value:
                alike.append(following)
        if match and len(alike) > 1:
            first = int(match[0])
            numbers = f"range({first + len(alike)})" if not first else f"range({first}, {first + len(alike)})"
            key = generalized([quoted(each) for each in alike], range(first, first + len(alike)), "i")
            shown.append(f"    **{{{key}: {value} for i in {numbers}}},")
        else:
            shown.append(f"    {quoted(name)}: {value},")
        done.update(alike)
    return shown


def folded(statements: Sequence[str]) -> list[str]:
    """Statements, those that differ in the number of a layer alone as a loop."""
    lines: list[str] = []
    by_form: dict[str, list[str]] = {}
    for statement in statements:
        by_form.setdefault(re.sub(r"(?<=[\".])\d+(?=\.)", "#", statement), []).append(statement)
    for alike in by_form.values():
        numbers = [re.findall(r"(?<=[\".])\d+(?=\.)", statement) for statement in alike]
        first = [int(each[0]) for each in numbers if each]
        general = generalized(alike, first, "i") if len(alike) > 1 and len(first) == len(alike) else None
        if general is None or first != list(range(first[0], first[0] + len(first))):
            lines += [line for statement in alike for line in wrapped(statement)]
        else:
            begin = f"{first[0]}, " if first[0] else ""
            lines += [f"for i in range({begin}{first[-1] + 1}):", *wrapped(f"    {general}")]
    return lines


def name_lines(names: Sequence[str]) -> list[str]:
    """Names as entries of a set, those of equal layers together."""
    lines = []
    for text in folded([f"name({quoted(name)})" for name in names]):
        if text.startswith("for i in"):
            lines.append(f"*({{}} {text.removesuffix(':')}),")
        elif text.startswith("    "):
            lines[-1] = lines[-1].replace("{}", text.strip().removeprefix("name(").removesuffix(")"))
        else:
            lines.append(text.removeprefix("name(").removesuffix(")") + ",")
    return lines
