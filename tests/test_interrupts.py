"""When the command line heeds an interrupt that comes while a module is imported, and the status that it ends with."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shardgraph.cli import interrupts

INTERRUPTED = """
import os, signal
raised = True
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
    raised = False
except BaseException:  # as for a dependency that is missing
    pass
"""


@pytest.fixture
def deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, while interrupts are deferred."""
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = signal.signal(signal.SIGINT, interrupts.Deferred())
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def written(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


def test_an_interrupt_amid_the_import_of_a_library_is_heeded_after_it(deferred: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "_LIBRARIES", (str(deferred),))
    library = importlib.import_module(written(deferred, "interrupted_library", INTERRUPTED))
    assert not library.raised
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)


def test_an_interrupt_amid_the_import_of_a_module_of_the_user_is_heeded_at_once(deferred: Path):
    assert importlib.import_module(written(deferred, "interrupted_module", INTERRUPTED)).raised


def test_an_import_that_does_not_end_is_interrupted_after_a_while(deferred: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interrupts, "_LIBRARIES", (str(deferred),))
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.2)
    text = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(written(deferred, "endless_library", text))


@pytest.mark.quick("exec*")
@pytest.mark.parametrize("way", ["os.kill(os.getpid(), 2)", "exec('os.kill(os.getpid(), 2)')"])
def test_the_status_is_that_of_an_interrupt_wherever_it_came(way: str, tmp_path: Path):
    written(tmp_path, "jobs", f"import os\ndef model():\n    {way}\n    raise AssertionError\n")
    command = [sys.executable, "-m", "shardgraph", "lint", "jobs:model"]
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if the tests run in the background
    path = os.pathsep.join([str(Path(__file__).parent.parent), str(tmp_path)])
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": path}, "preexec_fn": heeded}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
