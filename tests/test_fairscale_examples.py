"""The example scripts of FSDP and of nested wrapping, against the same script in one process, without shards."""

from __future__ import annotations

import pytest

from tests.example_scripts import ROUNDED, loaded, losses_in, printed_by


@pytest.mark.slow
@pytest.mark.timeout(220)
@pytest.mark.parametrize(("name", "length"), [("fsdp", "EPOCHS"), ("auto_wrap", "STEPS")])
def test_the_example_has_the_losses_of_one_process(name: str, length: str, capsys: pytest.CaptureFixture[str]):
    printed, example = printed_by(name), loaded(name)
    capsys.readouterr()
    example.train(0, 1, getattr(example, length))
    expected = losses_in(capsys.readouterr().out)
    found = losses_in(printed)
    assert found == pytest.approx(expected, abs=ROUNDED) and found[-1] < found[0]
