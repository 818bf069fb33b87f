"""``shardgraph.MemoryTracker``: measures the memory of a step, module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardgraph import ir, torch_api
from shardgraph.arguments import MODEL, OPTIMIZER, checked
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import IN_PLACE
from shardgraph.module.sharded import ShardedModule
from shardgraph.passes.analysis.liveness import KINDS, kinds_of
from shardgraph.passes.analysis.names import module_of
from shardgraph.runtime.executor import Bound
from shardgraph.tracking.ledger import Ledger, Place
from shardgraph.tracking.trace import MemoryTrace


class MemoryTracker:
    """Measures which module holds how many bytes of what, operation by operation, in what runs inside it.

        with shardgraph.MemoryTracker(sharded, optimizer) as tracker:
            sharded.train_step(batch, target=target)
            optimizer.step()
        print(tracker.trace)
        print(tracker.trace.compare(shardgraph.MemoryTrace.predicted(shardgraph.analyze(model, (batch,)))))

    Every storage on the device is counted once, from its allocation until it is freed, on a CPU and on CUDA: the same
    rule as the prediction's. What kernels take for themselves is not counted; the allocator's own peak on CUDA is
    beside it, in ``trace.allocated``. A compiled module runs operation by operation meanwhile, which computes the same
    and takes longer. Let it run once before: its first call compiles.

    FairScale's ``LayerwiseMemoryTracker`` is the same idea.

    Args:
        model: a compiled module, any other, or one with compiled modules in it.
        optimizer: its state is counted from the start.
    """

    @checked(model=MODEL, optimizer=OPTIMIZER)
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._ledger = Ledger(self._device, self._place)
        self._entered: ExitStack | None = None
        self._stack: list[str] = []  # the modules whose forward is running, outermost first
        self._modules: dict[int, str] = {}  # of the operations that autograd has recorded, by their number
        compiled = {name: each for name, each in model.named_modules() if isinstance(each, ShardedModule)}
        self._paths = {id(each.original): name for name, each in compiled.items()}
        self._here: Place | None = None  # of the operation of a compiled graph that is running
        self._updating = False
        self._before = 0
        self._given = 0  # bytes that were there before the block, and are known since they are given to a model
        self._trace: MemoryTrace | None = None

    @property
    def trace(self) -> MemoryTrace:
        """What was measured.

        Raises:
            ShardGraphError: the block has not ended, or nothing has run in it.
        """
        if self._trace is None or not self._trace.moments:
            raise ShardGraphError(
                "nothing has been measured yet: run a step inside the block, and read it after its end"
            )
        return self._trace

    def __enter__(self) -> MemoryTracker:
        if self._entered is not None or self._trace is not None or Bound.observer is not None:
            raise ShardGraphError(
                "a tracker measures one block, and one tracker at a time: make another one, afterwards"
            )
        self._hold_what_is_there()
        with ExitStack() as stack:
            for remove in self._hooks():
                stack.callback(remove)
            stack.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            if self._device.type == "cuda":
                self._before = torch.cuda.memory_allocated(self._device) - self._held()
                torch.cuda.reset_peak_memory_stats(self._device)
            Bound.observer = self._run
            stack.callback(partial(setattr, Bound, "observer", None))
            stack.enter_context(self._ledger)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._entered is not None
        self._entered.close()
        allocated = None
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device) - self._before + self._given
        modules = {module: dict(own) for module, own in self._ledger.most.items()}
        self._trace = MemoryTrace(self._name(), tuple(self._ledger.moments), modules, allocated)

    def _name(self) -> str:
        if isinstance(self._model, ShardedModule):
            return f"{type(self._model.original).__name__} under {self._model.plan.name}"
        return type(self._model).__name__

    def _hold_what_is_there(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._ledger.hold(parameter, _owner(name), "parameters")
            self._ledger.hold(parameter.grad, _owner(name), "gradients")
        for name, buffer in self._model.named_buffers():
            self._ledger.hold(buffer, _owner(name), "buffers")
        if self._optimizer is not None:
            self._hold_state(self._optimizer)

    def _hold_state(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for parameter, state in optimizer.state.items():
            self._ledger.hold(state, _owner(names.get(id(parameter), "")), "optimizer state")

    def _held(self) -> int:
        return sum(sum(own.values()) for own in self._ledger.most.values())

    # -- where the computation is

    def _place(self) -> Place:
        """Of the operation that is running."""
        if self._updating:
            return Place("optimizer", "")
        if self._here is not None:
            return self._here
        number = torch_api.differentiated()
        if number is not None and not self._stack:  # with modules running in backward, they are recomputed
            return Place("backward", self._modules.get(number, ""))
        module = self._stack[-1] if self._stack else ""
        if number is None and torch.is_grad_enabled():
            self._modules.setdefault(torch_api.next_operation() - 1, module)
        return Place("forward" if number is None else "backward", module)

    def _hooks(self) -> Iterator[Callable[[], Any]]:
        """Install the hooks that follow the computation; yields what removes each."""
        for path, module in _plain_modules(self._model):
            yield module.register_forward_pre_hook(partial(self._enter, path)).remove
            yield module.register_forward_hook(self._leave, always_call=True).remove
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    name = f"{path}.{key}" if path else key
                    yield parameter.register_post_accumulate_grad_hook(partial(self._accumulate, name)).remove
        yield register_optimizer_step_pre_hook(self._before_update).remove
        yield register_optimizer_step_post_hook(self._after_update).remove

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._given += self._ledger.hold(args, path, "inputs")
        self._stack.append(path)

    def _leave(self, *unused: Any) -> None:
        self._stack.pop()

    def _accumulate(self, name: str, parameter: torch.Tensor) -> None:
        self._ledger.rebook(parameter.grad, _owner(name), "gradients")

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._ledger.hold(tensor, self._place().module, "saved")
        return tensor.detach()  # not itself: an operation would keep its own result, and so itself, alive

    def _before_update(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        self._hold_state(optimizer)
        self._updating = True

    def _after_update(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        self._updating = False
        self._hold_state(optimizer)

    # -- compiled graphs

    def _run(self, bound: Bound, inputs: list[Any], _: int | None = None) -> Sequence[Any]:
        """Run a compiled graph operation by operation; empties ``inputs``."""
        kinds, roles = kinds_of(bound.module), [role for role, _ in bound.inputs]
        half = "backward" if any(isinstance(role, (ir.Saved, ir.Tangent)) for role in roles) else "forward"
        path = self._paths.get(id(bound.model))  # None: of a model that is not this one
        for role, value in zip(roles, inputs, strict=True):
            self._given += self._ledger.hold(value, path or "", KINDS[type(role)])

        def run(node: fx.Node, call: Callable[[], Any]) -> Any:
            module = "" if path is None else ".".join(filter(None, (path, module_of(node))))
            self._here = Place(half, module)
            value = call()
            if IN_PLACE.get(node):
                self._ledger.rebook(value, module, *kinds[node])
            # What is unpacked of a bucket is of a module each, and is held one by one.
            elif node.op != "output" and node.target not in (ir.buckets.unpack, ir.buckets.unpack_parts):
                self._ledger.hold(value, module, kinds[node])
            return value

        try:
            results: Sequence[Any] = _Followed(bound.module, run).boxed_run(inputs)
            return results
        finally:
            self._here = None


class _Followed(fx.Interpreter):
    """Runs a graph, each node by ``run(node, call)``."""

    def __init__(self, gm: fx.GraphModule, run: Callable[[fx.Node, Callable[[], Any]], Any]) -> None:
        super().__init__(gm)
        self._run_node = run

    def run_node(self, n: fx.Node) -> Any:
        return self._run_node(n, partial(super().run_node, n))


def _plain_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules whose forward runs as it is written, with their paths: not those of a compiled one."""
    if isinstance(model, ShardedModule):
        return
    yield path, model
    for key, child in model.named_children():
        yield from _plain_modules(child, f"{path}.{key}" if path else key)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
