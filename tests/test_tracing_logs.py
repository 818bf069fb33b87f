"""What the tracer would do for its logs alone is not done, unless they are written."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._dynamo import funcname_cache, symbolic_convert

from shardgraph.capture.capture import capture

CPU = torch.device("cpu")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, str]]:
    """The files that are parsed for the names of their functions."""
    files: dict[str, dict[int, str]] = {}
    monkeypatch.setattr(funcname_cache, "cache", files)
    monkeypatch.setattr(funcname_cache, "_add_file", lambda name: files.update({name: {}}))
    return files


def captured() -> None:
    capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.zeros(2, 4),), {}, device=CPU)


def test_files_of_a_model_are_not_parsed_for_a_log_that_nobody_reads(parsed: dict[str, dict[int, str]]) -> None:
    captured()
    assert not parsed


def test_they_are_parsed_where_the_log_of_calls_is_written(
    parsed: dict[str, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic_convert.trace_call_log, "isEnabledFor", lambda level: level >= logging.DEBUG)
    monkeypatch.setattr(symbolic_convert.trace_call_log, "debug", lambda *args: None)
    captured()
    assert parsed
