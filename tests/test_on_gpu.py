"""The command that checks the project on a GPU, here on the CPU: its sections end one by one, whatever they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.traces import Work, described, overlap
from benchmarks.on_gpu import ROOT


def run(out: Path, *options: str) -> tuple[int, dict]:
    command = [sys.executable, "benchmarks/on_gpu.py", "--device", "cpu", "--tiny", "--out", str(out), *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert out.exists(), ran.stderr
    sections = json.loads(out.read_text())["sections"]
    return ran.returncode, {section["name"]: section for section in sections}


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_sections_run_or_say_why_not(tmp_path):
    code, sections = run(tmp_path / "found.json", "--only", "default-device", "streams")
    assert code == 0
    assert sections["default-device"]["figures"]["init_process_group()"]["device"] == "cpu"
    assert (sections["streams"]["status"], sections["streams"]["cause"]) == ("skipped", "needs CUDA")


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_a_section_that_takes_too_long_is_ended_and_reported(tmp_path):
    code, sections = run(tmp_path / "found.json", "--only", "gloo-2", "--limit", "6")
    assert code == 1
    assert sections["gloo-2"]["status"] == "FAILED" and "still ran after" in sections["gloo-2"]["cause"]


def test_the_overlap_of_streams_is_counted_once():
    copies = [Work("Memcpy DtoH", "gpu_memcpy", 20, 0.0, 4000.0), Work("Memcpy HtoD", "gpu_memcpy", 24, 3000.0, 9000.0)]
    kernels = [Work("gemm", "kernel", 7, 1000.0, 2000.0), Work("gemm", "kernel", 7, 3500.0, 5000.0)]
    assert overlap(copies, kernels) == 2.5
    assert [(each["stream"], each["beside_compute_ms"]) for each in described(copies + kernels)] == [
        (7, 0.0),
        (20, 1.5),
        (24, 1.5),
    ]
