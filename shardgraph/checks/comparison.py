"""The original and its program, trained side by side in one process and compared after each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardgraph.capture.casting import casting, computed_dtypes
from shardgraph.capture.double import in_double, is_coarse
from shardgraph.capture.numbers import as_tensor
from shardgraph.capture.synchronized import synchronized_batch_norms
from shardgraph.checks.all_rows import joined, rows_of_rank
from shardgraph.checks.bisect import Divergence, first_divergence, relative_error, shards_of
from shardgraph.checks.coverage import Coverage
from shardgraph.checks.last_digits import moved_by_a_digit
from shardgraph.checks.scaled_products import scaled_products
from shardgraph.checks.shortened_rows import shorten_shards
from shardgraph.checks.step import LockstepStep, Values
from shardgraph.errors import ShardGraphError
from shardgraph.ir import Buffer, Input, IntermediateBase, Output, Parameter, Tangent, placeholders
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import Executor, State
from shardgraph.runtime.pipeline.microbatches import loss_counts, weighted_sum
from shardgraph.runtime.pipeline.statistics import combined
from shardgraph.runtime.rng import HostState, rank_generator, seed_all
from shardgraph.torch_api import pytree

# A gradient below this fraction of the model's largest one, or below the resolution of a coarse dtype, is rounding
# error, which Adam amplifies into noise.
_NOISE = 1e-5
_FEW = 0.01  # of the elements of parameters: more whose gradients are small are compared by sizes of their own
_OTHER_ORDER = 1e3  # how much more than moved weights a program's order of operations may change a gradient
_CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]
Outputs = list[tuple[Any, torch.Tensor]]


@dataclass
class Comparison:
    """The original runs on each data-parallel rank's part of the batch in turn, the program on all ranks in lockstep.

    ``programs`` are those of each microbatch; ``parts`` has the microbatches of each data-parallel rank, as ``(args,
    kwargs)``. With ``loss_in_program`` they return ``loss_fn(output, target)``, of a target among the inputs by name,
    and nothing else; otherwise ``loss_fn(output)`` is computed of what they return. ``errors`` has the relative error
    of each compared tensor by name, ``shown`` whether an error in the gradient of a parameter would show, ``noise`` the
    elements of each whose weights are not compared, because their gradient has been rounding error: none if ``exact``,
    with which all of the model is in double precision.
    """

    original: nn.Module
    plan: Plan
    programs: Sequence[Program]
    parts: list[list[Any]]
    loss_fn: Callable[..., torch.Tensor]
    seed: int
    exact: bool
    loss_in_program: bool = False
    noise: Tensors = field(default_factory=dict)
    shown: dict[str, bool] = field(default_factory=dict)
    limit: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = math.prod(size for _, size in self.plan.mesh)
        self.batch_of = [self.plan.data_rank(rank) for rank in range(self.world)]
        computed = computed_dtypes(self.original, self.plan.precision, self.plan.annotations)
        self.rounding = max((torch.finfo(dtype).eps for dtype in computed.values()), default=0.0)
        self.rounds = not self.exact or any(is_coarse(program.joint.module) for program in self.programs)
        self.dtypes = {name: computed.get(name, p.dtype) for name, p in self.original.named_parameters()}
        self.shards = self._cut()
        # The call with the rows of all ranks, if statistics are of them.
        synchronized = any(synchronized_batch_norms(self.original))
        self.all_rows = joined([parts[0] for parts in self.parts]) if synchronized else None
        self.results = self.programs[0].joint.results
        self.dropping = any(program.joint.choices for program in self.programs)
        self.buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        # What each data rank's attributes are before and after a step, of those that forward sets.
        self.before = self.after = [
            [each.get(self.original) for each in self.results] for _ in range(self.plan.data_size)
        ]

    def train(self, make: Callable[..., torch.optim.Optimizer], steps: int, limit: float) -> Divergence | None:
        """Train both until an error exceeds ``limit``; returns the first node that differs, if a node does.

        Raises:
            ShardGraphError: the steps after the first need another program, or the original's gradients are not finite.
        """
        if steps > 1 and not all(program.joint.repeats for program in self.programs):
            raise ShardGraphError(
                "forward sets attributes with which its next call takes another way, and verify compares one program: "
                "give steps=1, or call the model once before"
            )
        self.limit = limit
        trained = {name: p for name, p in self.original.named_parameters() if p.requires_grad}
        sets = [trained.values(), *([shards[name] for name in trained] for shards in self.shards)]
        optimizers = [make(list(parameters)) for parameters in sets if trained]
        for step in range(steps):
            self._shorten_rows(step)
            if max(self.errors.values(), default=0.0) > limit:
                return None  # before any node
            parameters = {name: p.detach().clone() for name, p in self.original.named_parameters()}
            buffers, self.before = dict(self.buffers), self.after
            self._compare_step(step, buffers)
            if max(self.errors.values(), default=0.0) > limit:
                return self._bisect(step, parameters, buffers, limit)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self._compare_weights("after", step)
            if max(self.errors.values(), default=0.0) > limit:
                return None  # gradients agreed: the optimizer diverges, which no node represents
        return None

    def _cut(self) -> list[Tensors]:
        """Each rank's shards of the original's parameters."""
        shards: list[Tensors] = [{} for _ in range(self.world)]
        for fqn, parameter in self.original.named_parameters():
            parts = shards_of(parameter.detach(), self.programs[0].parameters[fqn], self.plan.mesh)
            for mine, part in zip(shards, parts, strict=True):
                mine[fqn] = part.contiguous().clone().requires_grad_(parameter.requires_grad)
        return shards

    def _shorten_rows(self, step: int) -> None:
        """Shorten the rows of parameters that the batches of all ranks look up: of the original by its own forward,
        whose results are of no use, and of the program's shards as its runtime does before a call."""
        if not any(program.joint.shortened for program in self.programs):
            return
        for rank, parts in enumerate(self._reference_parts()):
            for attribute, value in zip(self.results, self.before[rank], strict=True):
                attribute.put(self.original, value)
            for args, kwargs in parts:
                with torch.no_grad(), in_double(self.exact):
                    self.original(*args, **self._with_target(kwargs)[0])
        _write(self._buffers(), self.buffers)
        numbers, batches = range(len(self.programs)), range(self.plan.data_size)
        values = [[self._inputs_alone(batch, self.buffers, n).__getitem__ for n in numbers] for batch in batches]
        shorten_shards(self.programs, self.shards, values)
        self._compare_weights("when rows are shortened at", step)

    def _compare_step(self, step: int, buffers: Tensors) -> None:
        expected = self._reference(step)
        self._check_finite(step)
        outputs, gradients, written = self._run(step, buffers)
        for rank, results in enumerate(outputs):
            self._compare_outputs(rank, f"rank {rank} at step {step}", results, expected[self.batch_of[rank]])
        floor = 1e-3 * _largest(list(self.buffers.values()))
        for fqn in written[0]:
            errors = (relative_error(values[fqn], self.buffers[fqn], floor) for values in written)
            self.errors[f"buffer {fqn} after step {step}"] = max(errors)
        self._compare_gradients(step, gradients, self._rounding_of_small(step, buffers))

    def _rounding_of_small(self, step: int, buffers: Tensors) -> Mapping[str, float]:
        """How far small gradients move with the last digits of weights, if there are too many to pass them over.

        What moves far less than it is large is small and no rounding, as behind a layer that hardly lets anything pass.
        """
        if self.rounds:
            return {}
        gradients = {name: p.grad for name, p in self.original.named_parameters() if p.grad is not None}
        seen = self._seen * _largest([*gradients.values()])
        small = [name for name, gradient in gradients.items() if 0 < _largest([gradient]) <= seen]
        if sum(gradients[name].numel() for name in small) <= _FEW * sum(each.numel() for each in gradients.values()):
            return {}
        after, written, self.buffers = self.after, self.buffers, dict(buffers)
        self.original.zero_grad()
        with moved_by_a_digit(self.original.parameters()):
            self._reference(step)
        self.after, self.buffers = after, written
        moved = {name: p.grad for name, p in self.original.named_parameters() if p.grad is not None}
        for name, parameter in self.original.named_parameters():
            parameter.grad = gradients.get(name)
        return {name: _largest([moved[name] - gradients[name]]) for name in small if name in moved}

    @property
    def _seen(self) -> float:
        """The size of a gradient of which an error of its own size shows, relative to the largest one."""
        return self.limit * 1e-3

    def _check_finite(self, step: int) -> None:
        for fqn, parameter in self.original.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                raise ShardGraphError(
                    f"the original's gradient of {fqn} is not finite at step {step}, so nothing can be compared with "
                    "it: give inputs, a loss and an optimizer with which the model trains"
                    + (f", or steps={step}" if step else "")
                )

    def _compare_outputs(self, rank: int, where: str, results: list[Any], expected: list[Any]) -> None:
        ((output, loss),), ((original, original_loss),) = results, expected
        leaves = [] if self.loss_in_program else self._pairs(output, original)
        floor = 1e-3 * _largest([theirs for _, theirs in leaves if isinstance(theirs, torch.Tensor)])
        for i, (mine, theirs) in enumerate(leaves):
            if isinstance(theirs, torch.Tensor):
                self.errors[f"output {i} of {where}"] = relative_error(mine, theirs, floor)
        self.errors[f"loss of {where}"] = relative_error(loss, original_loss)

    def _pairs(self, output: Any, original: Any) -> list[tuple[Any, Any]]:
        """The values of two outputs, but for a cache in which the program has a layer that the original dropped."""
        mine, theirs = pytree.tree_leaves(output), pytree.tree_leaves(original)
        if not self.dropping or len(mine) == len(theirs):
            return list(zip(mine, theirs, strict=True))
        if isinstance(original, Mapping):
            parts = [(output[key], value) for key, value in original.items()]
        elif isinstance(original, (tuple, list)) and len(output) == len(original):
            parts = list(zip(output, original, strict=True))
        else:
            return []
        return [pair for part in parts for pair in self._pairs(*part)]

    def _compare_gradients(self, step: int, gradients: list[Tensors], rounding: Mapping[str, float]) -> None:
        largest = _largest([p.grad for p in self.original.parameters() if p.grad is not None])
        for fqn, parameter in self.original.named_parameters():
            shards = [mine.get(fqn) for mine in gradients]
            name = f"gradient of {fqn} at step {step}"
            there = [shard for shard in shards if shard is not None]
            if self.dropping and parameter.grad is None and not any(map(torch.count_nonzero, there)):
                there, shards = [], []  # of a layer that is dropped: zeros
            if parameter.grad is None or len(there) < len(shards):
                self.errors[name] = math.inf if parameter.grad is not None or there else 0.0
                continue
            own = _largest([parameter.grad])
            by_itself = rounding.get(fqn, math.inf) * _OTHER_ORDER < self.limit * own
            self.errors[name] = self._error(fqn, there, parameter.grad, floor=0.0 if by_itself else 1e-3 * largest)
            if self.rounds:
                noise = parameter.grad.abs() < max(_NOISE, self.rounding) * largest
                self.noise[fqn] = self.noise.get(fqn, noise) | noise
            shows = by_itself or own > self._seen * largest
            if fqn in self.shown or shows or own > self._zero * largest:
                self.shown[fqn] = self.shown.get(fqn, False) or shows
            for mine, shard in zip(self.shards, there, strict=True):
                mine[fqn].grad = shard.clone()

    def _compare_weights(self, when: str, step: int) -> None:
        largest = _largest([p.detach() for p in self.original.parameters()])
        for fqn, parameter in self.original.named_parameters():
            shards = [mine[fqn].detach() for mine in self.shards]
            error = self._error(fqn, shards, parameter.detach(), 1e-3 * largest, self.noise.get(fqn))
            self.errors[f"weight {fqn} {when} step {step}"] = error

    def _error(
        self,
        fqn: str,
        shards: list[torch.Tensor],
        full: torch.Tensor,
        floor: float,
        left_out: torch.Tensor | None = None,
    ) -> float:
        """The largest error of all ranks' shards of a parameter or gradient, relative to the ``full`` one's largest."""
        entry, floor = self.programs[0].parameters[fqn], max(floor, _largest([full]))
        masks = [None] * len(shards) if left_out is None else shards_of(left_out, entry, self.plan.mesh)
        errors = [0.0]
        for mine, theirs, mask in zip(shards, shards_of(full, entry, self.plan.mesh), masks, strict=True):
            if mask is not None and mine.shape == mask.shape:
                mine, theirs = mine[~mask], theirs[~mask]
            errors.append(relative_error(mine, theirs, floor))
        return max(errors)

    @property
    def _zero(self) -> float:
        """The size of a gradient that is zero but for rounding, as before a batch norm, relative to the largest one.

        In single precision it might as well be small, which double precision tells.
        """
        if not self.rounds:
            return 1e-12
        return 16 * self.rounding if self.rounding > torch.finfo(torch.float32).eps else 0.0

    @property
    def coverage(self) -> Coverage:
        """What share of the parameters has been compared."""
        parameters = dict(self.original.named_parameters())
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        return Coverage(
            sum(sizes.values()),
            sum(sizes[name] for name in self.shown),
            sum(sizes[name] for name, shown in self.shown.items() if shown),
            hidden=tuple(name for name, shown in self.shown.items() if not shown),
            unreached=tuple(name for name in trained if name not in self.shown),
            frozen=tuple(name for name in parameters if name not in trained),
            noise=sum(int(noise.sum()) for noise in self.noise.values()),
        )

    def _reference(self, step: int) -> list[Outputs]:
        """``(output, loss)`` of every part of every rank's batch; gradients and buffers of the step are left behind."""
        results, after, self.after = [], [], []
        for rank, parts in enumerate(self._reference_parts()):
            seed_all(self.seed + step)
            for attribute, value in zip(self.results, self.before[rank], strict=True):
                attribute.put(self.original, value)
            with rank_generator(rank, self.plan.data_size, _CPU):
                pairs = zip(parts, self._weights(rank, len(parts)), strict=True)
                made = (self._reference_part(part, weight, rank) for part, weight in pairs)
                outputs, written = zip(*made, strict=True)
            results.append(list(outputs))
            self.after.append(_detached([each.get(self.original) for each in self.results]))
            after.append(combined(self.programs, self.buffers, written) if len(written) > 1 else written[0])
        self._average(after)
        return results

    def _average(self, after: Sequence[Tensors]) -> None:
        """The original's buffers are the mean of what they are after the calls of each data-parallel rank."""
        for name in self.buffers:
            values = [buffers.get(name, self.buffers[name]) for buffers in after]
            self.buffers[name] = torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]

    def _reference_parts(self) -> list[list[Any]]:
        """The calls of the original for each data-parallel rank's batch."""
        return self.parts

    def _weights(self, rank: int, parts: int) -> list[float]:
        """What the loss of each part of a data-parallel rank's batch counts for in that of the batch."""
        return [1.0]

    def _reference_part(self, part: Any, weight: float, rank: int) -> tuple[tuple[Any, torch.Tensor], Tensors]:
        """``(output, loss)`` of the original on a microbatch in the plan's precision, and the buffers after it."""
        _write(self._buffers(), self.buffers)
        args, kwargs = part if self.all_rows is None else self.all_rows
        cast = {name: p.to(self.dtypes[name]) for name, p in self.original.named_parameters()}
        policy = self.plan.precision, self.plan.annotations
        with scaled_products(cast, *policy):
            with casting(self.original, *policy), in_double(self.exact):
                inputs, _ = self._with_target(kwargs)
                output = torch.func.functional_call(self.original, cast, args, inputs)
                if self.all_rows is not None:
                    output = rows_of_rank(output, rank, len(self.parts), self.all_rows)
                loss = self.loss_fn(output, *self._with_target(part[1])[1])
            if loss.requires_grad and weight:
                (loss * (weight / self.plan.data_size)).backward()
        written = {name: buffer.clone() for name, buffer in self._buffers().items()}
        return (_detached((output, self._attributes())), loss.detach()), written

    def _run(
        self, step: int, buffers: Tensors
    ) -> tuple[list[list[tuple[Any, torch.Tensor]]], list[Tensors], list[Tensors]]:
        """One step of the program: ``(output, loss)`` of each rank's microbatches, its gradients and its buffers."""
        outputs: list[list[tuple[Any, torch.Tensor]]] = [[] for _ in range(self.world)]
        weights = self._weights_of_ranks()

        def tangents(number: int, results: list[Values]) -> list[dict[Tangent, Any]]:
            scaled = []
            for rank, result in enumerate(results):
                output, loss, gradients = self._evaluate(result, rank, number)
                outputs[rank].append((output, loss))
                scaled.append(_scaled(gradients, weights[rank][number]))
            return scaled

        inputs = [self._inputs(self.shards, buffers, number) for number in range(len(self.programs))]
        generators = self._generators(step)
        self._compare_random_numbers(step, generators)
        return (outputs, *LockstepStep(self.programs, inputs, generators, tangents, weights).run())

    def _compare_random_numbers(self, step: int, generators: list[HostState]) -> None:
        """Data ranks draw different numbers. The original draws what the program does, so that no result shows it."""
        if any(program.random for program in self.programs):
            of_data_rank = dict(zip(self.batch_of, generators, strict=True))
            for one, other in itertools.combinations(sorted(of_data_rank), 2):
                equal = of_data_rank[one].same(of_data_rank[other])
                name = f"random numbers of data ranks {one} and {other} at step {step}"
                self.errors[name] = math.inf if equal else 0.0

    def _weights_of_ranks(self) -> list[list[float]]:
        """What the loss of each microbatch counts for on each rank."""
        weights = [self._weights(batch, len(parts)) for batch, parts in enumerate(self.parts)]
        return [weights[batch] for batch in self.batch_of]

    def _inputs(self, parameters: list[Tensors], buffers: Tensors, number: int = 0) -> list[Values]:
        return [
            {Parameter(n): p.detach() for n, p in parameters[rank].items()}
            | self._inputs_alone(self.batch_of[rank], buffers, number)
            for rank in range(self.world)
        ]

    def _inputs_alone(self, batch: int, buffers: Tensors, number: int) -> Values:
        leaves = pytree.tree_leaves(self.parts[batch][number])
        held = {each.fqn: _as_tensor(value) for each, value in zip(self.results, self.before[batch], strict=True)}
        return {Buffer(n): b for n, b in (buffers | held).items()} | {Input(i): leaf for i, leaf in enumerate(leaves)}

    def _generators(self, step: int) -> list[HostState]:
        """Each rank's generator state at the start of a step's forward."""
        states = []
        for rank in range(self.world):
            seed_all(self.seed + step)
            with rank_generator(self.batch_of[rank], self.plan.data_size, _CPU):
                states.append(HostState.now())
        return states

    def _evaluate(
        self, result: Mapping[Any, Any], rank: int, number: int = 0
    ) -> tuple[Any, torch.Tensor, dict[Tangent, Any]]:
        """``(output, loss, tangents)`` of one rank from its forward results by role, for one microbatch.

        The output is the model's with the attributes that forward sets. A tangent is None where the loss does not
        depend on the output.
        """
        leaves: dict[Any, Any] = {}
        for role, value in result.items():
            if isinstance(role, (Output, IntermediateBase)):
                differentiable = isinstance(value, torch.Tensor) and value.is_floating_point()
                leaves[role] = value.detach().clone().requires_grad_() if differentiable else value
        program, inputs = self.programs[number], pytree.tree_leaves(self.parts[self.batch_of[rank]][number])
        output, attributes = Executor(program, State(self.original, None, _CPU)).rebuild(leaves, inputs)
        loss = self._loss(output)
        needed = placeholders(program.joint.module)
        tangents: dict[Tangent, Any] = {}
        for role, leaf in leaves.items():
            tangent = Tangent(role.index if isinstance(role, Output) else -1 - role.index)
            if tangent in needed:
                (tangents[tangent],) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        return _detached((output, attributes)), loss.detach(), tangents

    def _attributes(self) -> list[Any]:
        """The values that the original's attributes have now, of those that forward sets; numbers as tensors."""
        return [_as_tensor(each.get(self.original)) for each in self.results]

    def _buffers(self) -> Tensors:
        """Buffers and plain tensor attributes, the buffers of a captured graph, but for those that forward sets."""
        tensors = dict(self.original.named_buffers())
        for path, module in self.original.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{path}.{key}" if path else key] = value
        for each in self.results:
            tensors.pop(each.fqn, None)
        return tensors

    def _loss(self, output: Any) -> torch.Tensor:
        """The loss of a program's output."""
        with in_double(self.exact):
            return output if self.loss_in_program else self.loss_fn(output)

    def _with_target(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """What the model takes of inputs by name, and what the loss takes beside the output."""
        inputs = dict(kwargs)
        return inputs, [inputs.pop("target")] if self.loss_in_program and "target" in inputs else []

    def _bisect(self, step: int, parameters: Tensors, buffers: Tensors, limit: float) -> Divergence | None:
        """Run the captured graphs and the program again from the same state, and compare node by node."""
        _write(dict(self.original.named_parameters()), parameters)
        numbers, shards, weights = range(len(self.programs)), self._cut(), self._weights_of_ranks()

        def tangents(number: int, results: list[Values]) -> list[dict[Tangent, Any]]:
            gradients = (self._evaluate(result, rank, number)[2] for rank, result in enumerate(results))
            return [_scaled(each, mine[number]) for each, mine in zip(gradients, weights, strict=True)]

        return first_divergence(
            self.programs,
            [self._inputs([parameters] * self.world, buffers, number) for number in numbers],
            [self._inputs(shards, buffers, number) for number in numbers],
            tangents,
            weights,
            lambda: self._generators(step),
            limit,
        )


@dataclass
class PipelineComparison(Comparison):
    """The comparison of a program of stages and microbatches, with the loss in it, with undivided ``batches``.

    Random numbers and the statistics of a batch norm are a microbatch's own. With these, the original runs microbatch
    by microbatch too.
    """

    batches: list[Any] = field(default_factory=list)

    @property
    def divided(self) -> bool:
        """Whether the original runs microbatch by microbatch."""
        return any(program.random or any(stage.batch_norms for stage in program.stages) for program in self.programs)

    @property
    def reference(self) -> str:
        """Text that says what the program is compared with."""
        if self.divided:
            return ", the original on its microbatches since it draws random numbers or normalizes over the batch"
        return ", the original on undivided batches"

    def _reference_parts(self) -> list[list[Any]]:
        return self.parts if self.divided else [[batch] for batch in self.batches]

    def _weights(self, rank: int, parts: int) -> list[float]:
        if parts < len(self.programs):
            return [1.0]
        values = [self._inputs_alone(rank, self.buffers, number) for number in range(parts)]
        reduction, rows, counts = loss_counts(self.programs, [each.__getitem__ for each in values])
        return reduction.weights(rows, counts)

    def _compare_outputs(self, rank: int, where: str, results: list[Any], expected: list[Any]) -> None:
        mine, theirs = (
            weighted_sum([loss for _, loss in each], self._weights(self.batch_of[rank], len(each)))
            for each in (results, expected)
        )
        self.errors[f"loss of {where}"] = relative_error(mine, theirs)


def _scaled(gradients: Mapping[Tangent, Any], weight: float) -> dict[Tangent, Any]:
    return {role: None if gradient is None else gradient * weight for role, gradient in gradients.items()}


def _detached(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values)


def _as_tensor(value: Any) -> Any:
    """A number that forward counts, as its program takes it; all else as it is."""
    return as_tensor(value, torch.float64) if type(value) in (int, float) else value


@torch.no_grad()
def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _largest(tensors: list[torch.Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors if t.is_floating_point() and t.numel()), default=0.0)
