"""Several documents in one row are kept apart under every plan, however a model is told of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph
from shardgraph.errors import CaptureError

pytestmark = pytest.mark.usefixtures("shared_captures")

WIDTH, HEADS, WORDS, LENGTH, ROWS = 16, 2, 37, 16, 4
MESHES = {
    "fsdp": {"dp": 2},
    "tp+sp": {"tp": 2},
    "cp": {"cp": 2},
    "fsdp+cp": {"dp": 2, "cp": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "pp": {"pp": 2},
}

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 8, [0] * 16, [0] + [1] * 14 + [2], [0] * 8 + [1] * 8])
POSITIONS = torch.stack(
    [torch.cat([torch.arange(int((row == each).sum())) for each in row.unique()]) for row in DOCUMENTS]
)
OFFSETS = torch.tensor([0, 5, 11, 14, 16])  # of documents in every row
GIVEN = {
    "mask": (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]).tril()[:, None],
    "numbers of documents": DOCUMENTS,
    "numbers of documents, scores written out": DOCUMENTS,
    "positions that restart": POSITIONS,
    "offsets": OFFSETS,
    "offsets, one document after the other": OFFSETS,
}


def attended(how: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Causal attention within documents."""
    if how == "mask":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given)
    if how == "offsets, one document after the other":
        cuts = given.tolist()
        parts = [[each[:, :, start:end] for each in (q, k, v)] for start, end in pairwise(cuts)]
        return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
    document = given
    if how == "positions that restart":
        document = (given == 0).cumsum(-1)
    elif how == "offsets":
        document = torch.searchsorted(given, torch.arange(q.shape[2], device=q.device), right=True)[None]
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    if "written out" in how:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Packed(nn.Module):
    """A language model of one layer, told of documents in one of these ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, given: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        heads = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.project(self.norm(x)).chunk(3, -1))
        x = x + self.out(attended(self.how, *heads, given).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def call(given: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "given": given, "labels": ids.roll(-1, 1)}


def check(model: nn.Module, inputs: dict[str, Any], plan: str) -> None:
    report = shardgraph.verify(model, (), plan, mesh=MESHES[plan], example_kwargs=inputs, steps=1, fp64=True)
    assert report.ok, str(report)


@pytest.mark.quick("numbers of documents-cp", "offsets-fsdp", "mask-pp")
@pytest.mark.parametrize("plan", MESHES)
@pytest.mark.parametrize("how", GIVEN)
def test_documents_of_a_row_are_kept_apart(how, plan):
    if how == "offsets, one document after the other" and "cp" in plan:
        pytest.skip("parts of sequences do not divide, and say so")
    torch.manual_seed(0)
    check(Packed(how), call(GIVEN[how]), plan)


def llama() -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=WIDTH, num_hidden_layers=2, intermediate_size=24, vocab_size=WORDS, **heads)
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", MESHES)
def test_models_of_transformers_keep_documents_apart_by_positions(plan):
    ids = call(POSITIONS)["ids"]
    check(llama(), {"input_ids": ids, "position_ids": POSITIONS, "labels": ids}, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp+sp", "cp", "fsdp+cp", "fsdp+tp"])
def test_batches_of_a_flattening_collator_keep_documents_apart(plan):
    ids = call(POSITIONS)["ids"][:1]
    offsets = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8}
    check(llama(), {"input_ids": ids, "position_ids": POSITIONS[:1], "labels": ids, **lengths}, plan)


def test_a_document_that_ranks_do_not_divide_is_refused_with_the_lengths_that_work():
    with pytest.raises(shardgraph.PlanError, match=r"a sequence of 5 and is to be cut among 2 ranks"):
        check(Packed("offsets, one document after the other"), call(OFFSETS), "cp")


def test_as_many_offsets_as_rows_are_refused_in_a_pipeline():
    with pytest.raises(shardgraph.ShardGraphError, match=r"as many offsets as the batch has rows.*position's document"):
        ids = torch.zeros(8, LENGTH, dtype=torch.long)  # two rows for each microbatch
        check(Packed("offsets"), {"ids": ids, "given": torch.arange(0, LENGTH, 2), "labels": ids}, "pp")


def test_masks_in_python_are_refused_with_the_tensor_that_works():
    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
            heads = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))

            def within(batch: Any, head: Any, query: Any, key: Any) -> Any:
                return (query >= key) & (document[batch, query] == document[batch, key])

            mask = create_block_mask(within, ROWS, None, LENGTH, LENGTH, device="cpu")
            return flex_attention(*heads, block_mask=mask)

    for _ in range(2):  # torch's tracer fails otherwise the second time
        with pytest.raises(CaptureError, match=r"masks of flex_attention are Python: .*attn_mask="):
            shardgraph.compile(Flex(), "single", example_inputs=(torch.randn(ROWS, LENGTH, WIDTH), DOCUMENTS))
