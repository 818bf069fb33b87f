"""What is installed is what is in the tree."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

import shardgraph

ROOT = Path(__file__).parent.parent
VERSION = shardgraph.__version__
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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A folder with the source distribution of the tracked files, and the wheel that is built from it."""
    tree, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    backend = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    for kind in ("build_sdist", "build_wheel"):
        if kind == "build_wheel":
            (source,) = built.glob("*.tar.gz")
            tree = tmp_path_factory.mktemp("unpacked")
            with tarfile.open(source) as archive:
                archive.extractall(tree, filter="data")
            (tree,) = tree.iterdir()
        command = [sys.executable, "-c", backend, kind, str(built)]
        subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    return built


def test_the_wheel_of_the_source_distribution_has_every_module_and_what_pages_are_made_of(distributions):
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        "/".join([*home.split("."), *path.relative_to(ROOT / folder).parts])
        for folder, home in HOME.items()
        for path in (ROOT / folder).rglob("*.py")
        if not any(part.is_symlink() for part in (path, *path.parents))
    }
    data = {"py.typed", "__init__.pyi", "cost_models/devices.yaml", "pictures/page/page.html", "pictures/page/page.js"}
    assert modules | {f"shardgraph/{name}" for name in data} <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)


@pytest.mark.slow
def test_an_installed_wheel_verifies_a_plan_and_has_its_command(distributions, tmp_path):
    (wheel,) = distributions.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").rglob("site-packages")
    # What it needs is where these tests have it; the package itself comes from the wheel, not from this tree.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, timeout=120, cwd=tmp_path)
    script = tmp_path / "verify.py"
    script.write_text(
        "import torch, shardgraph\n"
        "model, x = torch.nn.Linear(4, 6), torch.randn(4, 4)\n"
        "print(shardgraph.__file__); print(shardgraph.verify(model, (x,), plan='fsdp', world_size=2))\n"
    )
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=alone, check=True)
    where, verdict, *_ = run([python, script]).stdout.splitlines()
    assert where.startswith(str(site)) and verdict.startswith("equal: plan fsdp")
    assert run([tmp_path / "venv" / "bin" / "shardgraph", "--version"]).stdout.strip() == f"shardgraph {VERSION}"


def test_the_changelog_and_the_citation_are_of_this_version():
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_importing_every_name_leaves_those_of_torch_and_python_as_they_are():
    names: dict[str, object] = {}
    exec("from torch import nn\nfrom shardgraph import *", names)
    assert names["nn"] is torch.nn and names["plan"] is shardgraph.plan and not {"input", "compile"} & names.keys()


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
