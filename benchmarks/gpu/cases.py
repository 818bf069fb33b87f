"""The cases of a section: each has figures, may fail without stopping the next, and is on disk as soon as it ends."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Skipped(Exception):
    """A section cannot run on this machine, for the reason that is its text."""


@dataclass(frozen=True)
class Machine:
    """Where sections run: ``"cuda"``, or ``"cpu"`` for a test of the script; ``tiny``: how large."""

    kind: str
    tiny: bool

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        """What communicates between such devices."""
        return "nccl" if self.kind == "cuda" else "gloo"

    def prepare(self) -> None:
        """Set this process up: full float32 products, no downloads, the GPU selected."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if self.kind == "cuda":
            torch.cuda.set_device(0)

    def need_cuda(self) -> None:
        """Skip the section on any other device."""
        if self.kind != "cuda":
            raise Skipped("needs CUDA")

    def settle(self) -> None:
        """Wait for the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of tensors on the device; 0 without a GPU."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    def peak(self) -> int:
        """The most bytes of tensors on the device since :meth:`reset_peak`; 0 without a GPU."""
        return torch.cuda.max_memory_allocated() if self.kind == "cuda" else 0

    def reset_peak(self) -> None:
        """Count the peak from here."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def free(self) -> None:
        """Give unused memory back, so that no case starts with another's."""
        gc.collect()
        torch.compiler.reset()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def process_group(self, backend: str | None) -> Iterator[None]:
        """A process group of this process alone; None: as of ``init_process_group()``."""
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        dist.init_process_group(backend)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Cases:
    """What a section found, by case."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.lines: list[str] = []
        self.running = self.skipped = ""

    def run(self, section: Callable[[Cases, Machine], None], machine: Machine) -> None:
        """Run a section; its own failure, outside of any case, is one of its failures."""
        try:
            section(self, machine)
        except Skipped as reason:
            self.skipped = str(reason)
        except Exception:
            self.failures["the section"] = traceback.format_exc()
        self.save()

    @contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """The figures of one case, to be filled; what is raised inside is recorded and goes no further."""
        self.running, figures = name, self.figures.setdefault(name, {})
        self.save()
        try:
            yield figures
        except Exception:
            self.failures[name] = traceback.format_exc()
        self.running = ""
        self.save()

    def say(self, line: str) -> None:
        """A line for the reader of the terminal."""
        self.lines.append(line)
        self.save()

    def save(self) -> None:
        """Write everything so far; whole or not at all, since this process may be ended any moment."""
        found = {name: getattr(self, name) for name in ("figures", "failures", "lines", "running", "skipped")}
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(found, default=str))
        draft.rename(self.path)


def check(condition: bool, message: str) -> None:
    """Fail the case with ``message`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(message)
