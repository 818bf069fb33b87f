"""The source of functions, with that of all that they use of this package, to be copied into another file."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

_OWN = "shardgraph"


@dataclass
class Copied:
    """Definitions by the name that they get in the file, in an order in which each comes after what it needs.

    ``given`` are names that the file defines itself. A private name is prefixed with its module's, so that two modules
    may have one alike.
    """

    given: frozenset[str] = frozenset()
    texts: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, function: Any) -> str:
        """Copy a function; returns its name in the file."""
        function = inspect.unwrap(function)
        return self._define(function.__module__, function.__name__)

    def _define(self, module: str, name: str) -> str:
        if (module, name) in self._names:
            return self._names[module, name]
        own = f"{module.rpartition('.')[2]}{name}" if name.startswith("_") else name
        self._names[module, name] = own
        definition, text = _definitions(module)[name]
        renamed = {}
        for used in dict.fromkeys(_names_in(definition)):
            if used != name and (other := self._use(module, used)) != used:
                renamed[used] = other
        if own != name:
            renamed[name] = own
        for used, other in renamed.items():
            text = re.sub(rf"(?<![\w.]){re.escape(used)}\b", other, text)
        self.texts[own] = text
        return own

    def _use(self, module: str, name: str) -> str:
        """Have what a module calls ``name`` in the file too; returns what it is called there."""
        space = vars(sys.modules[module])
        if name in self.given or name not in space:
            return name
        value = space[name]
        if name in _definitions(module):
            return self._define(module, name)
        if isinstance(value, FunctionType) and value.__module__.startswith(_OWN):
            return self.add(value)
        if name in _imports(module):
            self.imports[name] = _imports(module)[name]
        return name


@cache
def _tree(module: str) -> tuple[ast.Module, str]:
    text = inspect.getsource(sys.modules[module])
    return ast.parse(text), text


@cache
def _definitions(module: str) -> dict[str, tuple[ast.stmt, str]]:
    """The functions, classes and constants of a module by name, with their text."""
    tree, text = _tree(module)
    lines = text.splitlines()
    found: dict[str, tuple[ast.stmt, str]] = {}
    for each in tree.body:
        names = []
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            names = [each.name]
        elif isinstance(each, ast.Assign):
            names = [target.id for target in each.targets if isinstance(target, ast.Name)]
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names = [each.target.id]
        decorators = getattr(each, "decorator_list", [])
        first = min([each.lineno, *(decorator.lineno for decorator in decorators)])
        for name in names:
            found[name] = each, textwrap.dedent("\n".join(lines[first - 1 : each.end_lineno]))
    return found


@cache
def _imports(module: str) -> dict[str, str]:
    """The lines that import names of other packages than this one, by name."""
    lines = {}
    for each in ast.walk(_tree(module)[0]):
        if isinstance(each, ast.Import):
            for alias in each.names:
                lines[alias.asname or alias.name.partition(".")[0]] = _line("", alias)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.module.startswith(_OWN):
            for alias in each.names:
                lines[alias.asname or alias.name] = _line(each.module, alias)
    return lines


def _line(module: str, alias: ast.alias) -> str:
    renamed = f" as {alias.asname}" if alias.asname else ""
    return f"from {module} import {alias.name}{renamed}" if module else f"import {alias.name}{renamed}"


def _names_in(node: ast.AST) -> Iterator[str]:
    """The names that a definition takes from its module."""
    nodes = list(ast.walk(node))
    own = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    own |= {each.arg for each in nodes if isinstance(each, ast.arg)}
    for each in nodes:
        if isinstance(each, ast.Name) and each.id not in own and not hasattr(builtins, each.id):
            yield each.id


def import_lines(lines: Iterable[str]) -> str:
    """Import lines in the order that linters want, names of one module together."""
    together: dict[str, list[str]] = {}
    plain = set()
    for line in lines:
        if line.startswith("from "):
            module, _, name = line.removeprefix("from ").partition(" import ")
            together.setdefault(module, []).append(name)
        else:
            plain.add(line)
    made = [f"from {module} import {', '.join(sorted(set(names)))}" for module, names in together.items()]

    def group(line: str) -> tuple[int, int, str]:
        module = line.split()[1].partition(".")[0]
        future = 0 if module == "__future__" else 1 if module in sys.stdlib_module_names else 2
        return future, int(line.startswith("from")), line.split()[1]

    ordered = sorted([*plain, *made], key=group)
    text, before = [], None
    for line in ordered:
        if before is not None and group(line)[0] != before:
            text.append("")
        before = group(line)[0]
        text.append(line)
    return "\n".join(text)
