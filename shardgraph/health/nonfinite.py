"""``shardgraph.find_nonfinite``: the first operation of a step whose result is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardgraph import ir
from shardgraph.arguments import SECONDS, checked
from shardgraph.capture.capture import own_loss
from shardgraph.errors import ShardGraphError
from shardgraph.health.observed import Observer, Place
from shardgraph.ir.attributes import FORWARD_MODULES, MADE_BY, MODULES, SOURCE
from shardgraph.module.joining import refuse_inside
from shardgraph.module.sharded import COMPILED, ShardedModule
from shardgraph.runtime.exchange import Ranks
from shardgraph.runtime.executor import Bound, mesh_rank


@dataclass(frozen=True)
class NonFinite:
    """Where a step stopped being finite.

    ``value`` is "NaN" or "inf"; ``operation`` made it of finite values, in the ``graph`` ("forward", "backward"), on
    ``rank``; ``module`` is the path of the user's module, with its class, and ``source`` the user's line. ``then`` says
    where an infinity became a NaN. ``seen`` has the same of every rank, for those on which anything was not finite.
    ``stage`` and ``microbatch`` are those of a pipeline, by number from 0; a graph that runs once for all has none.
    """

    value: str
    operation: str
    graph: str
    module: str
    source: str
    rank: int
    then: str
    seen: tuple[str, ...] = ()
    stage: int | None = None
    microbatch: int | None = None

    def __str__(self) -> str:
        lines = [f"the first value that is not finite: {self._told()}"]
        if self.then:
            lines.append(f"  it became NaN in {self.then}")
        return "\n".join([*lines, *(f"  {each}" for each in self.seen)])

    def _told(self) -> str:
        where = f" in module {self.module}" if self.module else ""
        line = f", at {self.source}" if self.source else ""
        part = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        part += "" if self.stage is None else f" in stage {self.stage}"
        return f"{self.value} by {self.operation} in {self.graph}{part}{where}{line}, on rank {self.rank}"


@checked(sharded=COMPILED, timeout=SECONDS)
def find_nonfinite(sharded: ShardedModule, *args: Any, timeout: float = 300.0, **kwargs: Any) -> NonFinite | None:
    """Run a training step of this call once more, operation by operation, and tell which one made the first NaN or
    infinity that reaches the loss or a gradient. All ranks must call it, with the batches of the step in question.

    Call it before the optimizer's step, which would put the NaN into the parameters::

        loss = sharded.train_step(ids)
        if not sharded.clip_grad_norm_(1.0).isfinite():  # the same on all ranks
            raise RuntimeError(shardgraph.find_nonfinite(sharded, ids))

    Ranks run the step together, and each one looks at its own values; the first in the order of the program is
    returned, on all ranks; in a pipeline, of the first microbatch, forward before backward. Infinities that are meant,
    as in masks, are passed over if they do no harm. Parameters, buffers, gradients and torch's generators are as before
    afterwards. It takes several times as long as a step.

    Args:
        sharded: what ``shardgraph.compile`` returned.
        args: of :meth:`ShardedModule.train_step`; for a model without a loss, of its forward.
        timeout: seconds that ranks wait for each other's findings.
        kwargs: likewise.

    Returns:
        what was found, or None if the loss and all gradients are finite on all ranks.

    Raises:
        ShardGraphError: a tracker is active.
    """
    refuse_inside("find_nonfinite")
    if Bound.observer is not None:
        raise ShardGraphError("a tracker runs the graphs: call find_nonfinite outside of its block")
    observer = Observer(sharded.original)
    with _as_before(sharded):
        _run(sharded, observer, args, kwargs)
    ranks = Ranks(timeout)
    found = _first_of(_behind(observer, sharded, ranks), ranks.rank)
    return _agreed(ranks.gather("find_nonfinite", None if found is None else [found[0], asdict(found[1])]))


def _run(sharded: ShardedModule, observer: Observer, args: Any, kwargs: Any) -> None:
    Bound.observer = observer
    try:
        if sharded.loss_fn is not None and "target" in kwargs:
            sharded.train_step(*args, **kwargs)
            return
        with torch.enable_grad():
            loss = own_loss(sharded(*args, **kwargs))
        if isinstance(loss, torch.Tensor) and not loss.dim() and loss.requires_grad:
            loss.backward()
    finally:
        Bound.observer = None


@contextmanager
def _as_before(sharded: ShardedModule) -> Iterator[None]:
    """What a step changes is as before afterwards."""
    state, device = sharded._state, sharded._state.device
    buffers = [(each, each.detach().clone()) for each in sharded.buffers()]
    gradients = [(each, each.grad) for each in sharded.parameters()]
    collected: list[dict[Any, Any]] = [*state.accumulated, state.unsynced]
    kept = [dict(each) for each in collected]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type))
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            for each in collected:
                each.clear()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for each, before in zip(collected, kept, strict=True):
                each.clear()
                each.update(before)
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


def _behind(observer: Observer, sharded: ShardedModule, ranks: Ranks) -> list[Place]:
    """What was not finite on this rank and reaches the loss or a gradient, of this rank or by messages of another."""
    ends, asked = observer.ends(), set[Any]()
    while True:
        behind = _ancestors(ends, lambda place: bool(place.value))
        if (pipeline := sharded.plan.pipeline) is None:
            return behind
        mesh = sharded.mesh
        column = 0 if mesh is None else mesh_rank(mesh) % (mesh.size() // pipeline.ranks)
        posts = ranks.gather("find_nonfinite", [[column, *each] for each in sorted(observer.received(behind))])
        wanted = {tuple(each) for post in posts for each in post}
        if wanted == asked:
            return behind
        asked = wanted
        ends += observer.sent([message for own, *message in wanted if own == column])


def _first_of(behind: list[Place], rank: int) -> tuple[tuple[int, ...], NonFinite] | None:
    """What this rank has seen first of what is ``behind`` the loss or a gradient, with its place in the step."""
    if not behind:
        return None
    nans = sorted((each for each in behind if each.makes_nan()), key=lambda each: each.order)
    first, then = (nans[0], "") if nans else (None, "")
    # Of an infinity that is meant, a NaN is made too: the one that was computed is told, and what became of it.
    source = [first] if first is not None else list(behind)
    infs = [each for each in _ancestors(source, lambda place: place.value.inf or place == first) if each.makes_inf()]
    if infs:
        then = _where(first) if first is not None and first not in infs else ""
        first = min(infs, key=lambda each: each.order)
    if first is None:  # it came from another rank, or was there before
        first = min(behind, key=lambda each: each.order)
    return first.order, NonFinite(
        "NaN" if first.value.nan else "inf",
        _operation(first),
        "backward" if first.run.name in ("inputs", "weights") else first.run.name,
        _module(first),
        _source(first),
        rank,
        then,
        stage=first.run.stage,
        microbatch=first.run.microbatch,
    )


def _ancestors(places: list[Place], follows: Callable[[Place], bool]) -> list[Place]:
    """These and all that they are computed from, as far as it ``follows``."""
    found: dict[Place, None] = {}
    waiting = list(places)
    while waiting:
        place = waiting.pop()
        if place not in found and follows(place):
            found[place] = None
            waiting += place.inputs()
    return list(found)


def _operation(place: Place) -> str:
    role = ir.attributes.ROLE.get(place.node)
    if isinstance(role, (ir.Parameter, ir.Buffer)):
        return f"what was there before the step: {type(role).__name__.lower()} {role.fqn!r}"
    if isinstance(role, ir.Input):
        return f"what was given: tensor {role.index} of the call's inputs"
    if isinstance(role, ir.Tangent):
        return f"what is computed outside of the module of output {role.index}"
    if ir.is_wait(place.node):
        return "what came from other ranks"
    if isinstance(role, (ir.Forwarded, ir.Returned)):
        return f"what came from the {'stage before' if isinstance(role, ir.Forwarded) else 'next stage'}"
    target = place.node.target
    return str(target.name()) if hasattr(target, "name") else getattr(target, "__name__", str(target))


def _module(place: Place) -> str:
    stack = list((FORWARD_MODULES.get(place.node) or MODULES.get(place.node) or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    return f"{path or 'the model'} ({getattr(kind, '__name__', str(kind).rpartition('.')[2])})"


def _source(place: Place) -> str:
    maker = f"{MADE_BY.of(place.node)} for " if place.node in MADE_BY else ""
    line = SOURCE.get(place.node, "")
    return f"{maker}{line}" if line else ""


def _where(place: Place) -> str:
    module, source = _module(place), _source(place)
    return f"{_operation(place)}{f' in module {module}' if module else ''}{f', at {source}' if source else ''}"


def _agreed(findings: list[Any]) -> NonFinite | None:
    """The first of all ranks' findings in the order of the program, with what each has seen."""
    found = [(tuple(each[0]), NonFinite(**{**each[1], "seen": ()})) for each in findings if each is not None]
    if not found:
        return None
    _, first = min(found, key=lambda each: (each[0], each[1].rank))
    seen = [f"rank {each.rank} saw {each._told().rpartition(', on rank')[0]}" for _, each in found]
    return NonFinite(**{**asdict(first), "seen": tuple(seen) if len(findings) > 1 else ()})
