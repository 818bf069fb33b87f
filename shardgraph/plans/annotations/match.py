"""The patterns of annotations: shell wildcards per name component, or regular expressions.

``*`` matches any part of one component between dots, ``**`` any number of components, and ``re:`` starts a regular
expression that must match the full name.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import itertools
import re
from collections.abc import Iterable, Sequence

from shardgraph.errors import PlanError, nearest
from shardgraph.plans.annotations.kinds import Annotation

Annotated = tuple[str, Annotation]
"""A pattern, and the annotation of what it matches."""


@functools.cache
def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches ``name``.

    Raises:
        PlanError: ``pattern`` is no valid regular expression.
    """
    if not pattern.startswith("re:"):
        return _match(pattern.split(".") if pattern else [], name.split(".") if name else [])
    try:
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise PlanError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _match(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_match(pattern[1:], names[at:]) for at in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _match(pattern[1:], names[1:])


def inside(module: str, pattern: str) -> str:
    """The pattern that matches in a model what ``pattern`` matches in its ``module``."""
    if not module:
        return pattern
    if pattern.startswith("re:"):
        return rf"re:{re.escape(module)}(?:\.|(?!.))(?:{pattern.removeprefix('re:')})"  # (?!.): the module itself
    return f"{glob.escape(module)}.{pattern}" if pattern else glob.escape(module)


def annotations_by_name(
    annotations: Sequence[Annotated], of: type[Annotation], names: Iterable[str], what: str
) -> dict[str, list[Annotated]]:
    """The annotations ``of`` a kind by each of ``names`` that they match; ``what`` describes the names in errors.

    Raises:
        PlanError: a pattern matches none of the names, or two annotations of one name contradict each other.
    """
    names = list(names)
    by_name: dict[str, list[Annotated]] = {}
    for pattern, annotation in annotations:
        if not isinstance(annotation, of):
            continue
        matched = [name for name in names if matches(pattern, name)]
        if not matched:
            known = nearest(pattern, names) or (f"; it has {', '.join(map(repr, names[:4]))}, ..." if names else "")
            raise PlanError(f"{written((pattern, annotation))} matches none of the {what} of this model{known}")
        for name in matched:
            by_name.setdefault(name, []).append((pattern, annotation))
    for name, annotations in by_name.items():
        for one, other in itertools.combinations(annotations, 2):
            if one[1].contradicts(other[1]):
                raise PlanError(
                    f"{written(one)} and {written(other)} contradict each other, and both are of {name!r}: take one "
                    "back, or narrow its pattern"
                )
    return by_name


def written(annotated: Annotated) -> str:
    """The text of an annotation in errors and plans: ``'layers.*': recompute()``."""
    pattern, annotation = annotated
    return f"{pattern!r}: {annotation}"
