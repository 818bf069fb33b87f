"""What ranks compare of a model: its names and shapes, and its values by their bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from shardgraph.module.fingerprint import digest, fingerprint


def test_one_other_element_of_a_small_tensor_is_another_digest():
    one = torch.ones(64, 64)
    other = one.clone()
    other[17, 3] = torch.nextafter(other[17, 3], torch.tensor(2.0))
    assert digest(one) == digest(one.clone()) != digest(other)


def test_values_whose_sum_is_the_same_differ():
    assert digest(torch.tensor([1.0, 2.0])) != digest(torch.tensor([2.0, 1.0]))


def test_the_digest_is_of_bytes_and_so_the_same_on_every_machine():
    expected = hashlib.sha256(bytes.fromhex("0000803f00000040")).hexdigest()[:16]
    assert digest(torch.tensor([1.0, 2.0])) == expected


def test_large_tensors_are_told_apart_by_elements_from_the_first_to_the_last():
    torch.manual_seed(0)
    one = torch.randn(100_000)
    ends = [one.clone(), one.clone()]
    ends[0][0] += 1
    ends[1][-1] += 1
    assert len({digest(each) for each in (one, *ends, torch.randn(100_000))}) == 4


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_any_dtype_and_layout_has_a_digest(dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())


def test_a_tensor_without_values_has_none_to_compare():
    assert digest(torch.empty(4, device="meta")) == "meta"
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_models_of_other_seeds_differ_in_every_line_of_values():
    lines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        lines.append(fingerprint(nn.Linear(4, 4)).splitlines())
    assert lines[0][0] == lines[1][0] == "Linear"
    assert all(one != other for one, other in zip(lines[0][1:], lines[1][1:], strict=True))
