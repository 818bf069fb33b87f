"""The example scripts of FSDP and of nested wrapping, against the same script in one process, without shards."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples" / "fairscale"
ROUNDED = 5e-5  # single precision, and losses are printed with six digits


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\S+)", printed)]


@pytest.mark.timeout(220)
@pytest.mark.parametrize(("name", "length"), [("fsdp", "EPOCHS"), ("auto_wrap", "STEPS")])
def test_the_example_has_the_losses_of_one_process(name: str, length: str, capsys: pytest.CaptureFixture[str]):
    path = EXAMPLES / f"{name}.py"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        environment = {**os.environ, "MASTER_PORT": str(free.getsockname()[1])}
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200, env=environment)
    assert ran.returncode == 0, ran.stderr
    example = runpy.run_path(str(path))
    capsys.readouterr()
    example["train"](0, 1, example[length])
    expected = losses(capsys.readouterr().out)
    found = losses(ran.stdout)
    assert found == pytest.approx(expected, abs=ROUNDED) and found[-1] < found[0]
