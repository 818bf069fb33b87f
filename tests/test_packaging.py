"""What is installed is what is in the tree."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shardgraph

ROOT = Path(__file__).parent.parent
HOME = {"shardgraph": "shardgraph", "cost_models": "shardgraph.cost_models", "passes": "shardgraph.passes"}


def test_every_package_of_the_tree_is_listed():
    found = set()
    for folder, name in HOME.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            if not any(part.is_symlink() for part in (init, *init.parents)):
                found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == found


def test_every_listed_package_can_be_imported():
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]:
        assert importlib.import_module(name).__name__ == name


def test_every_command_exists():
    for reference in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values():
        assert callable(importlib.metadata.EntryPoint("command", reference, "console_scripts").load())


def test_the_version_is_the_installed_one():
    assert shardgraph.__version__ == importlib.metadata.version("shardgraph")


def test_types_are_shipped():
    for name in ("py.typed", "__init__.pyi"):
        assert importlib.resources.files("shardgraph").joinpath(name).is_file()


def test_every_public_name_exists_and_is_documented():
    for name in shardgraph.__all__:
        assert getattr(shardgraph, name).__doc__, name


def test_importing_the_package_loads_neither_torch_nor_the_compiler() -> None:
    code = "import sys, shardgraph; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'sympy')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="shardgraph attribute compile_all"):
        _ = shardgraph.compile_all
