"""The scripts of examples/fairscale: run as a user runs them, and loaded for what a test asks of their functions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

EXAMPLES = Path(__file__).parent.parent / "examples" / "fairscale"
ROUNDED = 5e-5  # single precision, and losses are printed with six digits


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(name: str) -> str:
    """What the script prints. Its ranks meet at a store served here: a port that is only chosen here could be taken."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **meeting})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def losses_in(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\S+)", printed)]
