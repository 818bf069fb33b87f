"""Runs in parts and runs that go on: all parts are all tests, and what passed is not run again until sources change."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOOKS = "from tests.parts import *\n"
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(7))
def test_a_number(number):
    pathlib.Path("ran").open("a").write(f"{number} ")
    assert number != 5 or pathlib.Path("mended").exists()
"""

Run = Callable[..., tuple[int, list[int]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(*options)`` gives pytest's exit status for seven tests of numbers, and the numbers that ran."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(HOOKS)
    (tmp_path / "tests" / "test_numbers.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = slow\n")

    def ran(*options: str) -> tuple[int, list[int]]:
        (tmp_path / "ran").write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", *options]
        status = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
        return status.returncode, sorted(map(int, (tmp_path / "ran").read_text().split()))

    return ran


@pytest.mark.slow
def test_all_parts_are_all_tests_and_each_is_in_one(run: Run) -> None:
    parts = [run("--part", f"{part}/3")[1] for part in (1, 2, 3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "a/b"])
def test_a_part_that_there_is_not_is_refused(run: Run, part: str) -> None:
    status, ran = run("--part", part)
    assert (status, ran) == (pytest.ExitCode.USAGE_ERROR, [])


def test_a_run_goes_on_with_what_has_not_passed(run: Run, tmp_path: Path) -> None:
    assert run("--resume", "passed", "-x") == (1, [0, 1, 2, 3, 4, 5])
    (tmp_path / "mended").touch()
    assert run("--resume", "passed") == (0, [5, 6])
    assert run("--resume", "passed") == (0, [])


@pytest.mark.slow
def test_a_run_by_several_workers_goes_on_too(run: Run) -> None:
    assert run("--resume", "passed", "-n", "2") == (1, [0, 1, 2, 3, 4, 5, 6])
    assert run("--resume", "passed", "-n", "2") == (1, [5])


@pytest.mark.slow
def test_the_command_of_make_test_all_runs_a_part_and_goes_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    command = ["make", "-n", "--no-print-directory", "test-all", "PART=1/2", "VENV=venv"]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    python, _, pytest_, folder, *options = shlex.split(printed.splitlines()[-1])
    assert (python, pytest_, folder) == ("venv/bin/python", "pytest", "tests")
    assert run(*options) == (0, [0, 2, 4, 6])
    assert run(*options) == (0, [])


def test_after_a_change_of_the_sources_all_tests_run_again(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    run("--resume", "passed")
    (tmp_path / "source.py").write_text("x = 1")
    assert run("--resume", "passed") == (0, [0, 1, 2, 3, 4, 5, 6])
