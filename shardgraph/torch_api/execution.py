"""Execution of graphs: below autograd, with inputs that are freed at their last use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch._dynamo as dynamo
import torch._functorch.config as functorch_config
from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(function: F) -> F:
    """``function``, called as it is by what ``torch.compile`` compiles, with nothing inside of it traced."""
    untraced = dynamo.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


ENTER_RANGE = torch.ops.profiler._record_function_enter_new.default
LEAVE_RANGE = torch.ops.profiler._record_function_exit._RecordFunction


def is_transformed() -> bool:
    """Whether a transformation of ``torch.func``, such as ``vmap``, is under way in this thread."""
    return torch._C._functorch.maybe_current_level() is not None


def is_profiled() -> bool:
    """Whether a profiler of torch records this thread."""
    return bool(torch.autograd._profiler_enabled())


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operations in the body go straight to their kernels.

    The graphs have their own backward, so what autograd would do for each operation is wasted; for a collective that is
    a call of Python, longer than starting it. They have their casts too, and the caller's autocast adds none.
    """
    with torch._C._AutoDispatchBelowAutograd(), no_autocast():
        yield


def no_autocast() -> AbstractContextManager[None]:
    """Operations in the body have the precision of their operands, whatever the caller's autocast."""
    return torch._C._DisableAutocast()


def keep_graph() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def will_accumulate(leaf: Any) -> bool:
    """Whether the running backward adds a gradient to that of a leaf, with this autograd node.

    False for ``torch.autograd.grad``, which returns gradients, and for leaves that are not of ``backward(inputs=...)``.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # of torch.autograd.grad
        return False


def next_operation() -> int:
    """The number that autograd gives to the next operation of this thread that it records."""
    return torch._C._autograd._get_sequence_nr()


def differentiated() -> int | None:
    """The number of the operation whose derivative is being computed, in backward; None outside of it."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    """The ambient autocast of a device type, as part of what a program depends on."""
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def global_hooks() -> tuple[int, ...]:
    """The numbers of the hooks of all modules."""
    hooks = torch.nn.modules.module
    return (*hooks._global_forward_pre_hooks, *hooks._global_forward_hooks)


def tracer_settings() -> list[tuple[str, object]]:
    """The switches of the tracer and of its lowering; its own hash of them differs between processes."""
    plain = (bool, int, float, str, type(None))
    both = dynamo.config.get_config_copy(), functorch_config.get_config_copy()
    switches = [(key, value) for each in both for key, value in each.items() if type(value) in plain]
    return sorted(switches, key=repr)


def modes_active() -> bool:
    """Whether a mode of torch, such as a device's context, changes what functions or operations do."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def default_device() -> str:
    """The type of the device on which tensors are made that are given none."""
    # torch looks through the modes too, which takes longer than all else that is asked at every call.
    return torch.get_default_device().type if torch._C._len_torch_function_stack() else "cpu"


def entered_modes() -> tuple[object, ...]:
    """All modes that change what functions do."""
    return tuple(_get_current_function_mode_stack())


def function_modes() -> tuple[object, ...]:
    """The modes that change what functions do, but for those of a default device."""
    if not torch._C._len_torch_function_stack():
        return ()
    return tuple(mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext))


def boxed(gm: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """``gm`` as a function of one list, which it empties: inputs are freed at their last use."""
    graph, own = gm.graph, gm.graph._codegen
    graph.set_codegen(_BoxedCodeGen())
    try:
        return fx.GraphModule(gm, graph).forward  # which generates the code
    finally:
        graph.set_codegen(own)
