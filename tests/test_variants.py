"""Variants of tests: those that a test calls quick run with ``make test``, the others with the slow tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.quick({names})
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "fsdp+tp"])
def test_a_plan(plan):
    print("ran", plan)
"""


def run(folder: Path, names: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_plans.py").write_text(TESTS.format(names=names))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    quick\n")
    command = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "-p", "tests.variants", *options]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )


def test_the_variants_that_are_not_named_are_slow(tmp_path: Path) -> None:
    result = run(tmp_path, "'fsdp*'", "-m", "not slow")
    assert result.returncode == pytest.ExitCode.OK
    assert [line.split()[-1] for line in result.stdout.splitlines() if "ran" in line] == ["fsdp", "fsdp+tp"]


def test_a_name_of_no_variant_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "'ddp', 'zero3'")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_a_plan has no variant 'zero3', which it calls quick" in result.stderr
