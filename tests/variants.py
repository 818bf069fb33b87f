"""Variants of tests that ``make test`` runs: ``@pytest.mark.quick("fsdp-*", "tp")`` names them; the others are slow."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    for marker in item.iter_markers("quick"):
        if not any(fnmatchcase(item.callspec.id, pattern) for pattern in marker.args):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # while all variants are there
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a name that is of no variant, unless single tests were asked for.

    Raises:
        pytest.UsageError: with the test and the name.
    """
    if any("::" in arg for arg in config.args):
        return
    named = {(item.function, pattern) for item in items for mark in item.iter_markers("quick") for pattern in mark.args}
    for function, pattern in named:
        if not any(item.function is function and fnmatchcase(item.callspec.id, pattern) for item in items):
            raise pytest.UsageError(f"{function.__name__} has no variant {pattern!r}, which it calls quick")
