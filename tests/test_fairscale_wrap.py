"""FairScale's wrap, auto_wrap and their policy."""

from __future__ import annotations

import pytest
from torch import nn

from shardgraph import ShardGraphError
from shardgraph.fairscale import FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap, wrap


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **options: object) -> None:
        super().__init__()
        self.module, self.options = module, options


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


def test_wrap_wraps_inside_enable_wrap_only():
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer and auto_wrap(layer, min_num_params=1) is layer
    with enable_wrap(wrapper_cls=FSDP, verbose=True):
        wrapped = wrap(layer, reshard_after_forward=False)
    assert isinstance(wrapped, FSDP) and wrapped.options["verbose"] and not wrapped.options["reshard_after_forward"]
    assert wrap(layer) is layer


def test_the_innermost_enable_wrap_counts():
    with enable_wrap(wrapper_cls=Wrapper, depth=1):
        with enable_wrap(wrapper_cls=Wrapper, depth=2):
            assert wrap(nn.Linear(2, 2)).options == {"depth": 2}
        assert wrap(nn.Linear(2, 2), more=True).options == {"depth": 1, "more": True}


def test_auto_wrap_wraps_what_is_large():
    with enable_wrap(wrapper_cls=Wrapper):
        found = auto_wrap(layers(2, 8, 6), min_num_params=40)
    # the layer of 64 by itself; the two others have 40 together
    assert isinstance(found, Wrapper)
    assert [type(each) for each in found.module] == [nn.Linear, Wrapper, nn.Linear]


def test_the_policy_of_enable_wrap_and_options_of_the_wrapper():
    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        return recurse or (isinstance(module, nn.Linear) and not module_is_root)

    with enable_wrap(auto_wrap_policy=policy, wrapper_cls=Wrapper):
        found = auto_wrap(layers(2, 3), depth=1)
    assert isinstance(found, nn.Sequential) and [each.options for each in found] == [{"depth": 1}, {"depth": 1}]


def test_the_default_policy_looks_into_no_leaf_and_wraps_no_list():
    attention, several = nn.MultiheadAttention(4, 1), nn.ModuleList([nn.Linear(4, 4)])
    few = {"unwrapped_params": 20, "min_num_params": 10}
    assert not default_auto_wrap_policy(attention, recurse=True, **few)
    assert default_auto_wrap_policy(attention, recurse=False, **few)
    assert default_auto_wrap_policy(several, recurse=True, **few)
    assert not default_auto_wrap_policy(several, recurse=False, **few)
    assert default_auto_wrap_policy(several, recurse=False, exclude_wrap_modules=[], **few)
    assert not default_auto_wrap_policy(nn.Linear(4, 4), recurse=True, force_leaf_modules=[nn.Linear], **few)


def test_the_default_policy_may_wrap_a_root_however_small():
    small = {"module": nn.Linear(1, 1), "recurse": False, "unwrapped_params": 2}
    assert not default_auto_wrap_policy(**small, module_is_root=True)
    assert default_auto_wrap_policy(**small, module_is_root=True, skip_params_check_for_root=True)


def test_auto_wrap_refuses_what_is_wrapped_in_part():
    with enable_wrap(wrapper_cls=Wrapper), pytest.raises(ShardGraphError, match="wrapped in Wrapper already"):
        auto_wrap(nn.Sequential(wrap(nn.Linear(2, 2))))


def test_enable_wrap_needs_a_class():
    with pytest.raises(ShardGraphError, match="wrapper_cls=FSDP"), enable_wrap(verbose=True):
        pass
