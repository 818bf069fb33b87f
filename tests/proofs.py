"""A plugin that counts the programs that tests make and what the symbolic proof says of each.

``python -m pytest -n 2 -p tests.proofs`` ends with a table. Programs of equal text are counted once, and those that a
test has made wrong (``tests/faults.py``) not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardgraph.proof.prove import Proof, _Proving

FILE = Path(__file__).parents[1] / "build" / "proofs.jsonl"
FAULTY = ("test_mutants", "test_published_faults", "fault")


def pytest_configure(config: pytest.Config) -> None:
    """Note every proof from now on."""
    if not hasattr(config, "workerinput"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.unlink(missing_ok=True)
    prove = _Proving.proof

    def noted(self: _Proving) -> Proof:
        proof = prove(self)
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if not any(name in test for name in FAULTY):
            _note(test, self.program, proof)
        return proof

    _Proving.proof = noted  # type: ignore[method-assign]


def _note(test: str, program: Any, proof: Proof) -> None:
    digest = hashlib.sha256(f"{program.plan.mesh}\n{program.text}".encode()).hexdigest()
    said = "proved" if proof.ok else "WRONG" if proof.wrong else "not proved"
    why = "" if proof.ok else str((*proof.wrong, *proof.unknown)[0])
    with FILE.open("a") as file:
        file.write(json.dumps([digest, said, why, test]) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The numbers, and what is not proved."""
    programs = (
        {digest: rest for digest, *rest in map(json.loads, FILE.read_text().splitlines())} if FILE.exists() else {}
    )
    counts = Counter(said for said, *_ in programs.values())
    terminalreporter.section("proofs")
    terminalreporter.line(f"{len(programs)} programs: {', '.join(f'{n} {said}' for said, n in sorted(counts.items()))}")
    for said, why, test in sorted(programs.values()):
        if said != "proved":
            terminalreporter.line(f"{said}: {test}: {why}")
