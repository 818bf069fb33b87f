"""Runs the initialisation of a model on ``meta``, a few parameters at a time.

The initialisation protocol:

1. If the model has a method ``init_weights``, as in torchtitan and ``transformers``, it is called once, without
   arguments, and initialises everything.
2. Otherwise, in the order of ``model.modules()``, every module that itself holds a parameter or buffer on ``meta``
   has its ``reset_parameters()`` called, or its ``_reset_parameters()``. All modules of ``torch.nn`` have one.

Other initialisation in a constructor (``self.apply(self._init)``) is not repeated: move it to ``init_weights``.

The values are those of the same protocol under the same seed on a copy of the model with real, empty memory (in which
tied parameters are still tied; ``to_empty`` unties them): in the arguments of each operation a temporary real tensor
replaces a meta parameter, and the least recently used ones are stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph.errors import InitializationError
from shardgraph.runtime.host import empty_on_host
from shardgraph.torch_api import pytree

Store = Callable[[str, Tensor], None]
Fetch = Callable[[str], Tensor]

_LIVE = 4  # unsharded parameters in memory at once: as many as modules such as attention write in turn


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of ``model`` is on ``meta``."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def materialize(model: nn.Module, device: torch.device, *, store: Store, fetch: Fetch, on_host: bool = False) -> None:
    """Run the model's own initialisation for its parameters and buffers on ``meta``; see the module's docstring.

    Parameters are passed to ``store`` and stay on ``meta`` in the model; buffers become real in the model. Real tensors
    keep their values, although the initialisation draws random numbers for them as usual.

    Args:
        device: where unsharded parameters are while they are initialised, and buffers in the end.
        store: ``store(fqn, full)`` receives each parameter's unsharded value, and copies what it keeps. Tied parameters
            are passed once, under their first name; one that is written after it was stored is passed once more.
        fetch: ``fetch(fqn)`` returns the unsharded value that was stored last. Called for few parameters or none,
            and, like ``store``, in the same order on every rank.
        on_host: initialise in host memory, for parameters that do not fit on ``device``.

    Raises:
        InitializationError: nothing writes some parameters or buffers, ``init_weights`` needs arguments, or
            a value is computed from a tensor on ``meta`` that has none.
    """
    device = torch.device("cpu") if on_host else device
    memory = _Memory(model, device, store, fetch, on_host)
    steps = _protocol(model)
    _forget_claims(model)
    default: AbstractContextManager[Any] = (
        torch.device(device) if torch.get_default_device().type == "meta" else nullcontext()
    )
    with torch.no_grad():
        with default, _SeemReal(memory), _OnRealMemory(memory):
            for step in steps:
                step()
        memory.finish()


def _protocol(model: nn.Module) -> list[Callable[[], Any]]:
    init_weights = getattr(model, "init_weights", None)
    if callable(init_weights):
        try:
            inspect.signature(init_weights).bind()
        except TypeError as error:
            raise InitializationError(
                f"{type(model).__name__}.init_weights cannot be called without arguments ({error}), and a model on "
                "'meta' is initialised by init_weights(): give its parameters defaults, or rename the method if it is "
                "a helper for one module"
            ) from error
        return [init_weights]
    steps = []
    for module in model.modules():
        if any(tensor.is_meta for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                steps.append(reset)
    return steps


def _forget_claims(model: nn.Module) -> None:
    # transformers marks what it has initialised and skips it, but nothing on meta has been initialised.
    modules = [module for module in model.modules() if is_meta(module)]
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_meta]
    for part in (*modules, *tensors):
        vars(part).pop("_is_hf_initialized", None)


@dataclass(eq=False)
class _Slot:
    """One meta storage, the parameters or buffers in it, and its real memory while it has any."""

    storage: torch.UntypedStorage
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None
    written: bool = False  # has an initialised value, in memory or stored
    unsaved: bool = False  # the memory has a value that has not been stored
    stored: bool = False


class _Memory:
    """Real memory for the meta tensors of a model, a few parameters at a time.

    Tensors are identified by their storage: views of a parameter (``weight[0]``, ``weight.data``) remain valid.
    """

    def __init__(self, model: nn.Module, device: torch.device, store: Store, fetch: Fetch, on_host: bool) -> None:
        self.model, self.device, self.store, self.fetch, self.on_host = model, device, store, fetch, on_host
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.slots: dict[int, _Slot] = {}
        self.real: dict[int, torch.UntypedStorage] = {}  # whose values are kept; alive, so that an id stays unique
        self.live: dict[_Slot, None] = {}  # slots of parameters that have memory, least recently used first
        for fqn, tensor in chain(self.parameters.items(), model.named_buffers()):
            storage = tensor.untyped_storage()
            if tensor.is_meta:
                slot = self.slots.setdefault(id(storage), _Slot(storage))
                (slot.parameters if fqn in self.parameters else slot.buffers)[fqn] = tensor
            else:
                self.real[id(storage)] = storage

    def slot_of(self, tensor: Tensor) -> _Slot | None:
        return self.slots.get(id(tensor.untyped_storage()))

    def touch(self, slots: list[_Slot]) -> None:
        """Allocate memory for all of these slots; the least recently used others are stored and freed."""
        for slot in slots:
            if not slot.buffers:
                self.live.pop(slot, None)
                self.live[slot] = None  # now the most recently used
        for slot in [slot for slot in self.live if slot not in slots][: max(0, len(self.live) - _LIVE)]:
            self._save(slot)
            slot.memory = None
            del self.live[slot]
        for slot in slots:
            if slot.memory is None:
                size = (slot.storage.nbytes(),)
                if self.on_host and not slot.buffers:
                    slot.memory = empty_on_host(size, torch.uint8, self.device)
                else:
                    slot.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
                if slot.stored:
                    for fqn, tensor in slot.parameters.items():
                        self.view(tensor).copy_(self.fetch(fqn))

    def view(self, tensor: Tensor) -> Tensor:
        """The real tensor of a meta tensor, whose slot has memory."""
        slot = self.slot_of(tensor)
        assert slot is not None and slot.memory is not None
        whole = slot.memory[: slot.memory.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _save(self, slot: _Slot) -> None:
        if slot.unsaved:
            for fqn, tensor in slot.parameters.items():
                self.store(fqn, self.view(tensor))
            slot.unsaved, slot.stored = False, True

    def finish(self) -> None:
        """Store the remaining parameters and make buffers real.

        Raises:
            InitializationError: nothing wrote a parameter or buffer.
        """
        missing = []
        for fqn, tensor in chain(self.model.named_parameters(), self.model.named_buffers()):
            slot = self.slot_of(tensor)
            if tensor.is_meta and tensor.numel() and (slot is None or not slot.written):
                missing.append(fqn)
        if missing:
            shown = ", ".join(map(repr, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise InitializationError(
                f"the model is on 'meta' and its own initialisation writes nothing to {shown}: give the model an "
                "init_weights(), or the module that holds them a reset_parameters(), that writes them; or call "
                "compile(..., initialize=False) and load a checkpoint"
            )
        for slot in self.slots.values():
            if not slot.stored and not slot.storage.nbytes():  # nn.init skips empty tensors
                slot.unsaved = True
                self.touch([slot])
            self._save(slot)
        # The initialisation may have replaced a parameter (tied it, or created a new one).
        for fqn, parameter in self.model.named_parameters():
            if self.parameters.get(fqn) is not parameter:
                if (slot := self.slot_of(parameter)) is not None:
                    self.touch([slot])
                self.store(fqn, parameter.detach() if slot is None else self.view(parameter))
        placed: dict[int, Tensor] = {}
        for fqn, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if (slot := self.slot_of(buffer)) is not None:
                self.touch([slot])
                owner, _, name = fqn.rpartition(".")
                setattr(self.model.get_submodule(owner), name, placed.setdefault(id(buffer), self.view(buffer)))


class _OnRealMemory(TorchDispatchMode):
    """Runs every operation on a model's meta tensors on their real memory instead."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs first, and its operations on plain tensors are intercepted
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # of a meta tensor, a meta tensor that shares its storage

        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = {id(tensor): kind for tensor, kind in _written(func, args, kwargs)}
        slots = list(dict.fromkeys(slot for tensor in tensors if (slot := self.memory.slot_of(tensor)) is not None))
        self._check_values(func, tensors, written, slots)
        self.memory.touch(slots)

        # An operation that returns an argument must return the caller's tensor: found by the id of the real tensor,
        # which is kept alive here.
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return self.memory.device
            if not isinstance(leaf, Tensor):
                return leaf
            if self.memory.slot_of(leaf) is not None:
                value = self.memory.view(leaf)
            elif id(leaf) in written and id(leaf.untyped_storage()) in self.memory.real:
                value = leaf.clone()
            else:
                return leaf
            originals[id(value)] = leaf, value
            return value

        args, kwargs = pytree.tree_map(real, (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in tensors:
            if id(tensor) in written and (slot := self.memory.slot_of(tensor)) is not None:
                slot.written |= written[id(tensor)]
                slot.unsaved |= slot.written
        return pytree.tree_map(lambda leaf: originals.get(id(leaf), (leaf,))[0], result)

    def _check_values(self, func: Any, tensors: list[Tensor], written: dict[int, bool], slots: list[_Slot]) -> None:
        lacking = [tensor for tensor in tensors if tensor.is_meta and self.memory.slot_of(tensor) is None]
        if len(lacking) < len(tensors) and any(id(tensor) not in written for tensor in lacking):
            names = ", ".join(repr(fqn) for slot in slots for fqn in (*slot.parameters, *slot.buffers))
            raise InitializationError(
                f"initialising {names or 'the model'} ({func}) reads a tensor on 'meta' that is neither a parameter "
                "nor a buffer of the model, so it has no values: compute it in init_weights() or reset_parameters(), "
                "or register it as a buffer that these write"
            )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation writes, each with whether the operation can initialise them.

    ``mul_`` and the like compute a new value from the old one, so an uninitialised tensor stays uninitialised.
    Results (``out=``) and ``fill_``, ``copy_``, ``normal_`` do not read the old value.
    """
    schema = func._schema
    updates = torch.Tag.pointwise in func.tags or schema.name.startswith("aten::_foreach_")
    updates &= schema.name not in ("aten::_foreach_copy_", "aten::_foreach_zero_")
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield leaf, argument.name != "self" or not updates


_tensor: Any = Tensor
_GET_DEVICE, _GET_IS_META, _SET_DATA = _tensor.device.__get__, _tensor.is_meta.__get__, _tensor.data.__set__


class _SeemReal(TorchFunctionMode):
    """Makes a model's meta tensors report the device of their real memory.

    Initialisations depend on it: ``nn.init.orthogonal_`` does nothing on ``meta``, and models compute on a parameter's
    device. ``parameter.data = value`` copies, because torch refuses to replace a meta tensor by a real one.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_GET_DEVICE, _GET_IS_META, _SET_DATA) and self.memory.slot_of(args[0]) is not None:
            if func == _GET_DEVICE:
                return self.memory.device
            if func == _GET_IS_META:
                return False
            if (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype):
                args[0].copy_(args[1])
                return None
        return func(*args, **(kwargs or {}))
