"""What this project does on one CUDA GPU: right values, memory, time, overlap. One command, a table and a JSON file.

    python benchmarks/on_gpu.py --out results.json

Every section runs in a process of its own with a time limit, so that one that fails, hangs or breaks the device stops
no other. Sections that compare values run several at a time, then those that measure, each alone. ``--device cpu
--tiny`` runs the same code without a GPU; sections that need one are skipped. The exit status is 1 when one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Section:
    """``function`` of ``benchmarks.gpu.module``, ended after ``limit`` seconds; ``alone`` when it measures time."""

    module: str
    function: str
    limit: float
    alone: bool = False


SECTIONS = {
    "default-device": Section("equality", "default_device", 90),
    "nccl-1": Section("equality", "one_rank", 120),
    "gloo-2": Section("two_ranks", "two_ranks", 170),
    "context-parallel": Section("two_ranks", "context_parallel", 120),
    "tests": Section("suite", "tests", 150),
    "memory-time": Section("predictions", "memory_and_time", 220, alone=True),
    "speed": Section("speed", "speed", 170, alone=True),
    "recompute-offload-chunks": Section("memory_savers", "memory_savers", 110, alone=True),
    "streams": Section("streams", "streams", 60, alone=True),
}


def run_section(name: str, options: argparse.Namespace, deadline: float, folder: Path) -> dict[str, Any]:
    """Run a section in a process of its own; what it found, also when it did not end well."""
    path, started = folder / f"{name}.json", time.monotonic()
    limit = min(SECTIONS[name].limit * (1 if options.device == "cuda" else 3), deadline - started)
    if limit < 5:
        return {"name": name, "status": "FAILED", "cause": "not started: the time limit of the run had passed"}
    command = [sys.executable, "-X", "faulthandler", __file__, "--child", name, "--out", str(path)]
    command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    log_path = folder / f"{name}.log"
    with log_path.open("w") as log:
        environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ}
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child)
    found = json.loads(path.read_text()) if path.exists() else {}
    failures = found.get("failures", {})
    if code is None:
        status, cause = "FAILED", f"still ran after {limit:.0f} s, in {found.get('running', 'its start')!r}"
    elif failures:
        case, text = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        status, cause = "FAILED", f"{case}{more}: {text.strip().splitlines()[-1]}"
    elif code:
        status, cause = "FAILED", f"ended with exit code {code}, in {found.get('running', 'its start')!r}"
    else:
        status, cause = ("skipped", found["skipped"]) if found.get("skipped") else ("ok", "")
    text = log_path.read_text(errors="replace").splitlines()
    return {"name": name, "status": status, "cause": cause, "seconds": time.monotonic() - started, **found, "log": text}


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child and what it started: its session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def show(result: dict[str, Any]) -> None:
    """A section's own output, shortened, and the end of each traceback."""
    print(f"\n== {result['name']}: {result['status']} ({result.get('seconds', 0):.0f} s)", flush=True)
    for line in result.get("lines", []):
        print(line)
    shown: set[str] = set()
    for case, text in result.get("failures", {}).items():
        lines = text.strip().splitlines()
        print(f"-- {case} failed:")
        print("\n".join(line[:200] for line in (lines[-1:] if lines[-1] in shown else lines[-15:])))
        shown.add(lines[-1])  # the same failure of another case is one line
    if result["status"] == "FAILED" and not result.get("failures"):
        print("\n".join(line[:200] for line in result.get("log", [])[-15:]))


def cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The device and the versions, for the reader of the figures."""
    import torch

    found: dict[str, Any] = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found |= {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0)), "cuda": torch.version.cuda}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["memory"] = torch.cuda.get_device_properties(0).total_memory
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def run_child(options: argparse.Namespace) -> None:
    """What a section's process does."""
    from benchmarks.gpu.cases import Cases, Machine

    section = SECTIONS[options.child]
    cases = Cases(Path(options.out))
    machine = Machine(options.device, options.tiny)
    machine.prepare()
    function = getattr(importlib.import_module(f"benchmarks.gpu.{section.module}"), section.function)
    cases.run(function, machine)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="on_gpu.json", help="the file for all figures (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="these sections alone")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps: a test of this script")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all sections (default: %(default)g)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(options)
        return 0
    if options.device == "cuda" and not cuda_is_available():
        parser.error("torch finds no CUDA device; --device cpu --tiny tests this script without one")
    environment = about(options)
    print(json.dumps(environment), flush=True)
    names = options.only or list(SECTIONS)
    deadline, results = time.monotonic() + options.limit, []

    def save() -> None:
        Path(options.out).write_text(json.dumps({"environment": environment, "sections": results}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="shardgraph-on-gpu-") as name:
        together = [name for name in names if not SECTIONS[name].alone]
        with ThreadPoolExecutor(max_workers=4 if options.device == "cuda" else 1) as pool:
            for result in pool.map(lambda section: run_section(section, options, deadline, Path(name)), together):
                results.append(result)
                show(result)
                save()
        for section in (name for name in names if SECTIONS[name].alone):
            results.append(run_section(section, options, deadline, Path(name)))
            show(results[-1])
            save()
    print(f"\n{'section':<26}{'':<9}{'s':>5}  cause")
    for result in results:
        print(f"{result['name']:<26}{result['status']:<9}{result.get('seconds', 0):>5.0f}  {result['cause'][:160]}")
    return int(any(result["status"] == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())
