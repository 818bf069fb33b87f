"""The tests of the project that need a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.cases import Cases, Machine, Skipped, check

ROOT = Path(__file__).resolve().parents[2]


def tests(cases: Cases, machine: Machine) -> None:
    """``pytest -m gpu tests``."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("needs pytest")
    machine.need_cuda()
    with cases.case("pytest -m gpu") as figures:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=140)
        figures["output"] = ran.stdout.splitlines()
        cases.say(ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else "no output")
        check(ran.returncode == 0, f"exit code {ran.returncode}:\n{ran.stdout[-4000:]}\n{ran.stderr[-1000:]}")
