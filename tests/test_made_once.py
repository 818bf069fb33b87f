"""Of ranks that would capture, lower and prove the same, one does it for all, and all train as the original."""

import pytest

import shardgraph
from shardgraph.errors import LaunchError
from tests import made_once
from tests.standing import on_ranks


def together(made):
    return {name: sum(counts[name] for counts, _ in made) for name in ("capture", "lower", "prove")}


@pytest.mark.quick("fsdp-mesh0-False-2")
@pytest.mark.parametrize(
    ("plan", "mesh", "later", "programs"),
    [
        ("fsdp", {"dp": 2}, False, 2),
        ("fsdp", {"dp": 2}, True, 2),
        ("zero2+tp", {"dp": 2, "tp": 2}, False, 2),
        ("pp+fsdp", {"pp": 2, "dp": 1}, False, 3),  # once it is sharded, ranks have different parts of the model
    ],
)
def test_one_rank_captures_lowers_and_proves_for_all(plan, mesh, later, programs):
    made = on_ranks(made_once.trained, 2 * mesh.get("tp", 1), args=(plan, mesh, later))
    assert together(made)["lower"] == together(made)["prove"] == programs
    assert max(difference for _, difference in made) < 1e-7  # the norms of Llama compute in single precision


@pytest.mark.parametrize(
    ("kind", "captures"),
    [("asks for its rank", 2), ("sets an attribute", 2), ("differs", 2), ("asks for a type", 1)],
)
def test_a_model_is_captured_by_each_rank_only_if_none_can_do_it_for_others(kind, captures):
    made = on_ranks(made_once.captured, args=(kind,))
    assert together(made)["capture"] == captures
    assert max(difference for _, difference in made) < 1e-6


def test_a_model_that_cannot_be_captured_is_refused_on_every_rank():
    assert on_ranks(made_once.refused) == ["CaptureError", "CaptureError"]


@pytest.mark.slow
def test_when_the_rank_that_captures_ends_the_others_are_told(tmp_path):
    with pytest.raises(LaunchError, match=r"rank \d of 2 ended with exit code 3"):
        shardgraph.launch(made_once.ends_while_capturing, 2, args=(str(tmp_path),), timeout=60)
    told = (tmp_path / "told").read_text()
    assert "has ended" in told and "waiting for all ranks at the captured graph" in told
