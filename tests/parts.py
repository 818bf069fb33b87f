"""Options of pytest for long runs: ``--part 2/4`` is a quarter of the tests, ``--resume FILE`` goes on after a stop."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, default=(1, 1), metavar="K/N", help="run every N-th test, from the K-th")
    parser.addoption(
        "--resume",
        type=Path,
        metavar="FILE",
        help="leave out tests that FILE says have passed with the sources as they are, and write down there which pass",
    )


def _part(text: str) -> tuple[int, int]:
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise ValueError(f"--part {text}: it may be 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(count)


def pytest_configure(config: pytest.Config) -> None:
    """Start the file anew where the sources or torch are not those that it was written with."""
    file = config.getoption("resume")
    if file is not None and not hasattr(config, "workerinput"):  # the workers of pytest-xdist read only
        tested = f"tests passed with {_digest(config.rootpath)}, torch {version('torch')}"
        if not file.exists() or file.read_text().partition("\n")[0] != tested:
            file.write_text(f"{tested}\n")
        config.pluginmanager.register(_Passed(file))


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, count = config.getoption("part")
    file = config.getoption("resume")
    passed = set(file.read_text().splitlines()) if file is not None else set()
    kept = [item for item in items[part - 1 :: count] if item.nodeid not in passed]
    left_out = set(items) - set(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Say of the last phase of a test whether all of it went well, since that is what passes with it."""
    report = yield
    item.stash[_WELL] = item.stash.get(_WELL, True) and not report.failed
    report.all_well = report.when == "teardown" and item.stash[_WELL]
    return report


_WELL = pytest.StashKey[bool]()


class _Passed:
    """Writes down what passes; registered in the process that hears of all tests."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "all_well", False):
            with self.file.open("a") as passed:
                passed.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and len(self.file.read_text().splitlines()) > 1:
            session.exitstatus = pytest.ExitCode.OK  # all of them have passed before


def _digest(root: Path) -> str:
    """Of every file of Python and every document, which tests run too."""
    files = (path for kind in ("*.py", "*.md", "*.ipynb", "*.toml", "*.yaml") for path in root.rglob(kind))
    sources = [path for path in files if not path.relative_to(root).parts[0].startswith((".", "build"))]
    total = hashlib.sha256()
    for path in sorted(sources):
        total.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return total.hexdigest()[:16]
