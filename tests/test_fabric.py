"""Lightning Fabric under plans: losses, checkpoints and refusals."""

from __future__ import annotations

import pytest

from tests import fabricated
from tests.standing import on_ranks


@pytest.mark.quick("fsdp")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("plan", ["ddp", "zero2", "fsdp"])
def test_it_trains_like_fabrics_own_strategy(plan):
    ours, theirs = (on_ranks(fabricated.trained, args=(each,)) for each in (plan, "theirs"))
    assert ours[0] == ours[1] == pytest.approx(theirs[0], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("first", "second"), [("fsdp", "zero1"), ("fsdp", "theirs"), ("theirs", "fsdp")])
def test_a_run_continues_from_its_checkpoint_under_another_strategy_too(first, second, tmp_path):
    whole = on_ranks(fabricated.trained, args=("fsdp",))
    for (losses, step), expected in zip(
        on_ranks(fabricated.resumed, args=(first, second, str(tmp_path))), whole, strict=True
    ):
        assert losses == pytest.approx(expected[4:], rel=1e-12) and step == 3


@pytest.mark.parametrize(
    ("case", "words"),
    [("tp", "plan 'tp' has ranks that share a batch"), ("precision", "precision='bf16-true' of Fabric cannot be")],
)
def test_what_cannot_be_is_refused_in_words(case, words):
    assert all(words in found for found in on_ranks(fabricated.refused, args=(case,)))
