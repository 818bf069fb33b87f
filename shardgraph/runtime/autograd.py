"""A program without a pipeline as an autograd function: its forward graph, and its backward graph in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.errors import BackwardError, ShardGraphError
from shardgraph.ir.attributes import SHARD_OF
from shardgraph.passes.program import Program, gradients_of
from shardgraph.runtime.checked import check
from shardgraph.runtime.executor import Executor, State, mesh_rank
from shardgraph.runtime.gradients import check_plain, check_unchanged, on_any_data_rank, tangent_of
from shardgraph.runtime.inner_outputs import Watched, check_unhooked, inner_outputs, watched
from shardgraph.runtime.joined import announce, has_gradients
from shardgraph.runtime.pipeline.messages import in_layout
from shardgraph.runtime.rng import common_draw, rank_seed, seeded
from shardgraph.runtime.sample_rows import SampleRows
from shardgraph.runtime.shortened_rows import shorten_rows
from shardgraph.runtime.written_inputs import check_apart, written_inputs


class Differentiable(Executor):
    """An :class:`Executor` of a program of one stage, called like the model."""

    def __init__(self, program: Program, state: State) -> None:
        super().__init__(program, state)
        self.sample_rows = SampleRows(program, state) if state.random == "samples" and program.random else None
        self.forward = self.graph("forward")
        self.inputs = [role for role, _ in self.forward.inputs]
        self.results = [role for role, _ in self.forward.results]
        needed = [(i, role) for i, role in enumerate(self.inputs) if isinstance(role, ir.Parameter)]
        self.needed = [(i, role.fqn) for i, role in needed if program.differentiable and role.fqn in program.needed]
        first = len(list(takewhile(lambda role: isinstance(role, ir.Parameter), self.inputs)))
        self.settable = range(first)  # autograd counts tensors only
        self.saved = [i for i, role in enumerate(self.results) if isinstance(role, ir.Saved)]
        self.mutated = [(i, role.of) for i, role in enumerate(self.results) if isinstance(role, ir.Mutation)]
        self.written = written_inputs(self.results)
        self.checked = [(i, role) for i, role in enumerate(self.results) if isinstance(role, ir.Checked)]
        inputs = program.reached if program.differentiable else ()
        # The results that the user sees, or a view of them, by position: with their tangents those that autograd
        # returns, and those that require no gradient.
        seen = {
            i: tangent
            for i, (role, value) in enumerate(ir.outputs(self.forward.module))
            if isinstance(value, fx.Node) and (tangent := tangent_of(role, program)) is not None
        }
        self.returned = [(i, tangent) for i, tangent in seen.items() if tangent in inputs]
        self.detached = [i for i, tangent in seen.items() if tangent not in inputs]
        self._known: tuple[Any, list[Any]] = None, []
        self.optional = program.optional if program.differentiable else []

    def __call__(self, leaves: Sequence[Any], sync: Callable[[], bool]) -> Any:
        """Run on the flattened inputs of a call; returns the model's output. ``sync()`` is called in backward."""
        check_apart(leaves, self.written)
        inputs = self.values(leaves)
        if not self.program.differentiable:
            with torch.no_grad():
                results = self.run_forward(inputs, leaves)
        else:
            box: list[Any] = []
            hooked: Watched = []
            tensors = _Run.apply(self, leaves, sync, box, hooked, *inputs)
            results = box[0]
            for position in self.detached:  # may be one tensor with a result that autograd returns
                results[position] = results[position].detach()
            for (position, _), tensor in zip(self.returned, tensors, strict=True):
                results[position] = tensor
        output = self.deliver(dict(zip(self.results, results, strict=True)), leaves)
        if len(self.returned) > 1:
            hooked += watched(output)
        return output

    @cached_property
    def inner(self) -> frozenset[int]:
        """The outputs that others are computed from: this reads the captured graph."""
        return inner_outputs(self.program)

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs of the forward graph: parameters, buffers, and those of a call."""
        return [self.state.value(each, leaves) if isinstance(each, ir.Role) else each for each in self._parameters()]

    def _parameters(self) -> list[Any]:
        """The parameters among the inputs, and the roles of the others; looked up again only if the model's parameters
        have changed."""
        known, values = self._known
        if known is not self.state.layout.parameters:
            values = [self.state.value(r, ()) if isinstance(r, ir.Parameter) else r for r in self.inputs]
            self._known = self.state.layout.parameters, values
        return values

    def run_forward(self, inputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Run the forward graph on the local tensors of ``inputs`` and write its mutations; returns its raw results.
        Rows of parameters that it has shortened are shortened before."""
        if self.program.communication:
            announce(self.state, lambda: ("forward", self.program.communication))
        shorten_rows(self.program, self.state, [(self.program, lambda role: self.state.value(role, leaves))])
        with self._drawing():
            results = self.forward([torch_api.local_tensor(value) for value in inputs])
        for i, checked in self.checked:
            check(checked, results[i])
        for i, role in self.mutated:
            if isinstance(role, ir.Buffer) and role.fqn in self.program.joint.replaced:
                self.state.layout.replace(role.fqn, results[i])
            else:
                torch_api.local_tensor(self.state.value(role, leaves)).copy_(results[i])
        return results

    def _drawing(self) -> AbstractContextManager[None]:
        """Random numbers of the body are those of this rank's batch."""
        if self.sample_rows is not None:
            return self.sample_rows.drawing()
        mesh, plan, seed = self.state.mesh, self.program.plan, None
        batches = plan.data_size if mesh is not None else 1
        on_host = self.program.draws_on_host  # where NumPy's generators may be seeded unlike
        if self.program.random and (plan.copies * batches > 1 or (on_host and mesh is not None)):
            seed = rank_seed(common_draw(), self.state.replica * batches + plan.data_rank(mesh_rank(mesh)))
        return seeded(seed, self.state.device, on_host)

    def as_run(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A graph as this executor binds it."""
        return gm if self.sample_rows is None else self.sample_rows.in_graph(gm)

    @cached_property
    def updated(self) -> dict[str, int]:
        """The parameters that get a gradient, each with its place in the order in which backward could update them."""
        gm = self.graph("update").module
        handed = (node.args[1] for node in gm.graph.find_nodes(op="call_function", target=ir.update))
        names: Any = dict.fromkeys([*chain.from_iterable(handed), *gradients_of(ir.outputs(gm))])
        return {fqn: place for place, fqn in enumerate(names)}

    def run_backward(
        self, saved: list[Any], tangents: dict[ir.Tangent, Any], sync: bool, updater: ir.Updates | None = None
    ) -> dict[ir.Role, Any]:
        """Run the backward graph, consuming ``saved`` and ``tangents``; returns the gradients of inputs by role, but
        for those that the ``updater`` is given."""
        state, local = self.state, self.keeps_local(sync)
        if not local or self._sends("local"):
            event = "local" if local else "backward"
            announce(state, lambda: (event, self.program.communication, not has_gradients(state)))
        if state.joining is not None and state.joining.factor != 1.0:
            tangents.update(
                {role: grad if grad is None else grad * state.joining.factor for role, grad in tangents.items()}
            )
        absent = frozenset(role for role, grad in tangents.items() if grad is None)
        reached = (self.program.reached[role] for role, grad in tangents.items() if grad is not None)
        used = frozenset().union(state.unreduced, *reached) if self.optional else frozenset()
        left_out = self._left_out(used, reduces=not local)
        if local:
            bound = self.adding("local", absent) if state.unreduced else self.graph("local", absent)
        else:
            reduces = "accumulate" if state.unreduced else "backward" if updater is None else "update"
            bound = self.graph(reduces, absent)
        inputs = []
        for role, traced in bound.inputs:
            if isinstance(role, ir.Saved):
                inputs.append(saved[role.index])
            elif isinstance(role, ir.Tangent):
                inputs.append(in_layout(tangents.pop(role), traced))
            elif isinstance(role, ir.Accumulated):
                inputs.append(self._accumulated(role.of.fqn, traced))
            elif isinstance(role, ir.Updater):
                inputs.append(updater)
        saved.clear()
        tangents.clear()
        results = [(role, value) for (role, _), value in zip(bound.results, bound(inputs), strict=True)]
        values: dict[ir.Role, Any] = {role.of: value for role, value in results if isinstance(role, ir.Gradient)}
        if local:  # later ones are added to them
            values |= _copied(values, {role.of for role in bound.own if isinstance(role, ir.Gradient)})
        for fqn in left_out:
            values.pop(ir.Parameter(fqn), None)
        state.statistics.add(_squared_norms(results, reduced=False))
        if local:
            state.unsynced[self] = None
        else:
            norms = _squared_norms(results, reduced=True)
            for fqn in left_out:
                norms.pop(fqn, None)
            norms |= self._reduce_rest()
            if state.mesh is not None:
                state.statistics.reduce(norms, self.program.parameters, self.program.plan, state.mesh)
        return values

    def _sends(self, name: str) -> bool:
        """Whether ranks communicate in a graph, while that may be without some of them."""
        return self.state.joining is not None and any(map(ir.is_collective, self.program.graph(name).graph.nodes))

    def shadow_forward(self) -> None:
        """Take part in the forward of other ranks without a batch; buffers that ranks average are written, and rows of
        parameters that they look up shortened."""
        shorten_rows(self.program, self.state, [])
        for role, value in self._shadowed("forward"):
            assert isinstance(role, ir.Mutation) and isinstance(role.of, ir.Buffer)
            self.state.layout.buffer(role.of.fqn).copy_(value)

    def shadow_backward(self, local: bool) -> None:
        """Take part in a backward of other ranks with gradients of zero. Parameters get the mean, unless ranks keep
        their gradients ``local``."""
        left_out = [] if local else self._left_out(frozenset(), reduces=True)
        gradients = gradients_of(self._shadowed("local" if local else "backward"))
        if not local:
            self.state.add_gradients({fqn: value for fqn, value in gradients.items() if fqn not in left_out})

    def _shadowed(self, name: str) -> list[tuple[ir.Role | None, Any]]:
        bound, inputs = self.shadow(name), self.shadow_inputs(name)
        with torch.no_grad():
            return [(role, value) for (role, _), value in zip(bound.results, bound(inputs), strict=True)]

    def shadow_inputs(self, name: str) -> list[Any]:
        """What a rank without a batch takes part in a graph with.

        Raises:
            ShardGraphError: it would need what comes of a batch.
        """
        return [self._own_value(name, role, node) for role, node in ir.placeholders(self.shadow(name).module).items()]

    def _own_value(self, name: str, role: ir.Role, node: fx.Node) -> Any:
        """A value that does not depend on a batch: of a parameter or a buffer."""
        fqn = SHARD_OF.get(node)
        if not isinstance(role, (ir.Parameter, ir.Buffer)) and fqn is None:
            raise ShardGraphError(
                f"a rank without data cannot take part in {name}: it would need {node.name}, which comes of a batch"
            )
        value = self.state.value(role if fqn is None else ir.Parameter(fqn), ())
        return torch_api.local_tensor(value).to(node.meta["val"].dtype)

    def keeps_local(self, sync: bool) -> bool:
        """Whether a backward pass keeps this rank's gradients, to be reduced with later ones."""
        return not sync and self.state.mesh is not None and self.program.plan.data_size > 1

    def _accumulated(self, fqn: str, traced: torch.Tensor) -> torch.Tensor:
        """The gradient of earlier backward passes that is not reduced yet, which is now."""
        earlier = self.state.unreduced.pop(fqn, None)
        if earlier is not None:
            return earlier
        return torch.empty_strided(
            traced.shape, traced.stride(), dtype=traced.dtype, device=self.state.device
        ).zero_()  # which nothing fake is given to, so it is not

    def reduce_by_hook(self) -> None:
        """Have the hook reduce all gradients that are not reduced yet; parameters that no rank's loss has reached get
        none."""
        state = self.state
        programs = [executor for executor in state.unsynced if isinstance(executor, Differentiable)]
        names = sorted(frozenset().union(*(executor.program.trained for executor in programs)))
        flags = [fqn in state.unreduced for fqn in names]
        if any(executor.optional for executor in programs):
            flags = on_any_data_rank(flags, self.program.plan, state)
        state.hook.reduce(state, dict(zip(names, flags, strict=True)))

    def _reduce_rest(self) -> dict[str, torch.Tensor]:
        """Reduce what other programs have accumulated of parameters that this one has no gradient of.

        Returns the squared norms of these gradients, if the plan measures them.
        """
        state, done = self.state, self.program.trained
        norms: dict[str, torch.Tensor] = {}
        for executor in state.unsynced:
            assert isinstance(executor, Differentiable)
            rest, done = executor.program.trained - done, done | executor.program.trained
            # All ranks have the same, but for those that their losses may leave out.
            names = rest & {*state.unreduced, *executor.optional}
            if not names:
                continue
            if state.joining is not None and state.joining.missing:
                raise ShardGraphError(
                    "inside of join() gradients that were accumulated under no_sync() are reduced by a call that has "
                    f"none of {sorted(names)[:3]}, and ranks without data cannot follow: end no_sync() with a call "
                    "that trains the same parameters"
                )
            names -= {*executor._left_out(frozenset(state.unreduced), reduces=True)}
            bound = executor.graph("reduce")
            inputs = [(role.of.fqn, traced) for role, traced in bound.inputs if isinstance(role, ir.Accumulated)]
            values = bound([self._accumulated(fqn, traced) for fqn, traced in inputs])
            results = [(role, value) for (role, _), value in zip(bound.results, values, strict=True)]
            state.add_gradients({fqn: value for fqn, value in gradients_of(results).items() if fqn in names})
            measured = _squared_norms(results, reduced=True)
            norms |= {fqn: value for fqn, value in measured.items() if fqn in names}
        state.add_gradients(state.unreduced)  # of parameters whose gradients need no reduction
        state.unreduced.clear()
        state.unsynced.clear()
        return norms

    def _left_out(self, used: Set[str], reduces: bool) -> list[str]:
        """The parameters without a gradient, as in PyTorch: those that no loss depends on, of this rank or, if
        gradients are reduced, of any data rank, since they were last. This rank's losses have ``used`` the others."""
        if not self.optional:
            return []
        flags = [fqn in used for fqn in self.optional]
        if reduces:
            flags = on_any_data_rank(flags, self.program.plan, self.state)
        return [fqn for fqn, flag in zip(self.optional, flags, strict=True) if not flag]

    def gradients(self, values: dict[ir.Role, Any], local: bool) -> list[Any]:
        """The gradient of each input for autograd: a DTensor for a DTensor; None while a gradient is kept local."""
        gradients = []
        for role, parameter in zip(self.inputs, self._parameters(), strict=True):
            value = values.pop(role, None)
            if value is not None and isinstance(parameter, DTensor):
                if local:
                    assert isinstance(role, ir.Parameter)
                    if parameter._backward_hooks:
                        raise BackwardError(
                            f"the parameter {role.fqn!r} has a hook (register_hook), and this backward has no gradient "
                            "for it: inside of no_sync(), and with a communication hook, gradients are reduced "
                            "later. register_post_accumulate_grad_hook has one called then, with the gradient in "
                            "parameter.grad"
                        )
                    earlier = self.state.unreduced.get(role.fqn)
                    self.state.unreduced[role.fqn] = value if earlier is None else earlier.add_(value)
                    value = None
                else:
                    value = torch_api.as_placed(value, parameter)
            gradients.append(value)
        return gradients

    def set_gradients(self, gradients: list[torch.Tensor | None], leaves: Sequence[tuple[Any, int]]) -> None:
        """Set the gradients of parameters that have none, and take them from ``gradients``, which autograd adds.

        For each DTensor autograd would make another one of the same shard, which for small parameters takes longer than
        their part of the backward graph. What must see a gradient first, or adds it, is left to it.
        """
        parameters = self._parameters()
        for i in self.settable:
            parameter, value = parameters[i], gradients[i]
            if (
                isinstance(value, DTensor)
                and parameter.grad is None
                and not parameter._backward_hooks
                and not parameter._post_accumulate_grad_hooks
                and value.dtype == parameter.dtype
                and torch_api.will_accumulate(leaves[i][0])
            ):
                parameter.grad, gradients[i] = value, None


def _copied(gradients: Mapping[ir.Role, torch.Tensor | None], own: Set[ir.Role]) -> dict[ir.Role, torch.Tensor]:
    """Copies of the gradients of parameters that are not in memory of their own."""
    return {
        of: gradient.clone()
        for of, gradient in gradients.items()
        if gradient is not None and isinstance(of, ir.Parameter) and of not in own
    }


def _squared_norms(results: Iterable[tuple[ir.Role | None, Any]], reduced: bool) -> dict[str, torch.Tensor]:
    """The squared norms among results by role, of reduced gradients or of this rank's own, by parameter."""
    norms = ((role, value) for role, value in results if isinstance(role, ir.SquaredNorm))
    return {role.of.fqn: value for role, value in norms if role.reduced is reduced}


class _Run(torch.autograd.Function):
    """The two graphs as an autograd function. Parameters are DTensors and get DTensor gradients."""

    @staticmethod
    def forward(
        ctx: Any, executor: Differentiable, leaves: Any, sync: Any, box: list[Any], hooked: Watched, *inputs: Any
    ) -> Any:
        results = executor.run_forward(inputs, leaves)
        saved = [results[i] for i in executor.saved]
        ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)])
        ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in saved]
        ctx.executor, ctx.sync, ctx.steps, ctx.hooked = executor, sync, executor.state.steps, hooked
        local = ((fqn, torch_api.local_tensor(inputs[i])) for i, fqn in executor.needed)
        ctx.versions = [(fqn, shard, shard._version) for fqn, shard in local]
        ctx.set_materialize_grads(False)
        box.append(results)
        return tuple(results[i] for i, _ in executor.returned)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        executor: Differentiable = ctx.executor
        check_unchanged(ctx.versions, stepped=executor.state.steps != ctx.steps)
        check_unhooked(ctx.hooked, lambda: executor.inner)
        tensors = list(ctx.saved_tensors)
        if not torch_api.keep_graph():
            ctx.maybe_clear_saved_tensors()
        restored = iter(tensors)
        saved = [next(restored) if value is None else value for value in ctx.constants]
        check_plain(grads)
        pairs = zip(executor.returned, grads, strict=True)
        tangents = {tangent: grad for (_, tangent), grad in pairs}
        del tensors, restored, grads, pairs
        sync = ctx.sync()
        hooked = sync and executor.state.hook is not None and executor.keeps_local(False)
        sync = sync and not hooked
        values, local = executor.run_backward(saved, tangents, sync), executor.keeps_local(sync)
        gradients = executor.gradients(values, local)
        if hooked:
            executor.reduce_by_hook()
        if torch.is_grad_enabled():  # with create_graph=True
            gradients = _Once.apply(torch.empty(0, requires_grad=True, device="cpu"), *gradients)
        else:
            executor.set_gradients(gradients, ctx.next_functions)
        return (None, None, None, None, None, *gradients)


class _Once(torch.autograd.Function):
    """The identity of gradients, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: Any) -> Any:
        return tuple(None if each is None else each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise BackwardError(
            "a module that shardgraph compiled can be differentiated once: its backward has no backward of its own. "
            "Compute what needs second derivatives, such as a gradient penalty, in forward, where "
            "torch.autograd.grad(..., create_graph=True) is part of the program, or through sharded.original(...), "
            "which runs as it is written"
        )
