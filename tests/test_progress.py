"""The progress line of a compilation."""

from __future__ import annotations

import pytest
import torch

import shardgraph
from shardgraph.progress import Progress


def test_a_long_compilation_says_what_it_does(capsys: pytest.CaptureFixture[str]):
    with Progress("fsdp", 2, enabled=True) as show:
        show("capture")
        show("rewrite")
    assert "shardgraph fsdp: rewrite" in capsys.readouterr().err


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    shardgraph.compile(torch.nn.Linear(2, 2), "single", example_inputs=(torch.ones(1, 2),))
    assert capsys.readouterr().err == ""
