"""``shardgraph.prove``: that a program computes what the captured graph does, by its text alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import MADE_BY, SOURCE
from shardgraph.mesh import size_along
from shardgraph.passes.parameters.accumulate_gradients import adding_to_earlier
from shardgraph.passes.program import Halves, Program, StageProgram, gradients_of
from shardgraph.plans.parameter_plan import OWN, unsharded
from shardgraph.proof.definitions import added, filled
from shardgraph.proof.handed import Handed
from shardgraph.proof.held import Held, UntypedError, of_term
from shardgraph.proof.norms import Squared
from shardgraph.proof.recall import Recall, between_layers
from shardgraph.proof.shards import stored, undivided
from shardgraph.proof.terms import Terms
from shardgraph.proof.typing import Typing


@dataclass(frozen=True)
class Unproved:
    """A node, or a result, that is not shown to be what it must be; with the pass that made it and the user's line."""

    what: str
    why: str
    made_by: str = ""
    source: str = ""

    def __str__(self) -> str:
        by = f", made by {self.made_by}" if self.made_by else ""
        where = f" at {self.source}" if self.source else ""
        return f"{self.what}{by}{where}: {self.why}"


@dataclass(frozen=True)
class Proof:
    """``results`` is the number of results that were compared, ``terms`` the number of values that they consist of.

    ``wrong`` are results that are the right value and that ranks hold wrongly: as summands, twice, or another rank's
    part. ``unknown`` are the results that are not shown to be right, and before them the nodes that are the reason: of
    which it is not known what they are, or that are written otherwise than the captured graph.
    """

    results: int
    terms: int
    wrong: tuple[Unproved, ...]
    unknown: tuple[Unproved, ...]

    @property
    def ok(self) -> bool:
        """Whether every result is proved."""
        return bool(self.results) and not self.wrong and not self.unknown

    def raise_if_wrong(self) -> None:
        """Raise ShardGraphError with this proof if a result is wrong; what is not known does not count."""
        if self.wrong:
            raise ShardGraphError(f"the program is not the model, which is a fault of shardgraph: {self}")

    @property
    def summary(self) -> str:
        """One line."""
        if self.ok:
            return f"proved: {self.results:,} results of {self.terms:,} values"
        if self.wrong:
            return f"WRONG: {len(self.wrong)} of {self.results:,} results"
        return f"not proved: {self.unknown[0]}"

    def __str__(self) -> str:
        shown = (*self.wrong[:10], *self.unknown[:10])
        return "\n".join([self.summary, *(f"  {each}" for each in shown)])


def prove(program: Program, *, derived: bool = True) -> Proof:
    """Prove that ``program`` gives what the captured graph gives, on every rank, for all weights and inputs.

    Every value of the program is typed: which value of the captured graph it is, and how the ranks of the mesh hold it
    (whole, divided, as summands, or each for its batch). Outputs must be the captured ones, gradients the mean of the
    captured ones over data-parallel ranks, held as their parameters are. Squared norms of gradients must be of
    these, and of those of each rank. Nothing runs, so sizes do not matter.

    Without ``derived``, the graphs that are made from backward when they are needed are left out: those of ``no_sync``,
    and that which updates parameters.

    What is only numeric (a dtype, the order of a sum) is not proved: see :func:`shardgraph.verify`.
    """
    if cuts := between_layers(program.joint.module):
        proof = _Proving(program, derived, cuts).proof()
        if proof.ok:
            return proof
    return _Proving(program, derived).proof()


class _Proving:
    def __init__(self, program: Program, derived: bool, cuts: Collection[fx.Node] = ()) -> None:
        self.program, self.mesh, self.cuts, self.derived = program, program.plan.mesh, cuts, derived
        self.data = {axis: size for axis, size in program.plan.data_mesh if size > 1}
        self.terms = Terms()
        self.recall = Recall(self.terms) if cuts else None
        self.wrong: list[Unproved] = []
        self.unknown: list[Unproved] = []
        self.results = 0

    def proof(self) -> Proof:
        joint = self.program.joint.module
        whole = self._typing({})
        self.captured = whole.run(joint, self._captured, self.cuts)
        self.unknown += [self._of_node(node, why) for node, why in whole.untyped]
        if not self.unknown:
            self.originals = {node.name: node for node in joint.graph.nodes}
            pipeline = self.program.plan.pipeline
            count = 1 if pipeline is None else pipeline.parts
            for recomputes in sorted({pipeline is not None and pipeline.recomputes(n, count) for n in range(count)}):
                self._microbatch(recomputes)
            for absent in self.program.without if pipeline is None else ():
                self._without(absent)
        return Proof(self.results, len(self.terms), tuple(self.wrong), tuple(self.unknown))

    def _typing(self, originals: Mapping[str, fx.Node]) -> Typing:
        data = frozenset(self.data)
        return Typing(self.terms, lambda group: size_along(self.mesh, group), data, originals, recall=self.recall)

    def _captured(self, role: ir.Role, node: fx.Node) -> Any:
        """What an input of the captured graph is."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        varies = self.data if isinstance(role, (ir.Input, ir.Tangent)) else ()
        return of_term(self.terms.make("input", [repr(role)], value.shape, varies))

    def _microbatch(self, recomputes: bool) -> None:
        """All graphs that a step runs for a microbatch whose forward backward recomputes, or does not."""
        totals: dict[str, Any] = {}
        received: dict[ir.Role, Any] = {}
        typing = self._typing(self.originals)
        saved: list[dict[ir.Role, Any]] = []
        for stage in self.program.stages:
            given = {} if stage.gather is None else self._run(typing, stage.gather, {})
            halves = stage.again if recomputes else stage.kept
            results = self._run(typing, halves.forward, {**given, **received})
            saved.append(results)
            received = {role: value for role, value in results.items() if isinstance(role, ir.Forwarded)}
            self._compare_forward(results)
        returned: dict[ir.Role, Any] = {}
        for stage, own in zip(reversed(self.program.stages), reversed(saved), strict=True):
            halves = stage.again if recomputes else stage.kept
            if halves.backward is not None:
                drawn = typing.drawn
                results = self._backward(typing, stage, halves, {**own, **returned})
                returned = {role: value for role, value in results.items() if isinstance(role, ir.Returned)}
                self._collect(typing, stage, results, totals, self.captured)
                self._compare_norms(results, self.captured)
        self._compare_gradients(totals, self.captured)
        self.unknown[:0] = [self._of_node(node, why) for node, why in typing.untyped]
        if self.derived and self.program.differentiable and not self.wrong and not self.unknown:
            self._derived(typing, saved[0], drawn)
            self.unknown[:0] = [self._of_node(node, why) for node, why in typing.untyped]

    def _derived(self, typing: Typing, saved: dict[ir.Role, Any], drawn: int) -> None:
        """The graphs that are made from backward: that hands gradients over to an updater, that keeps them to itself,
        that adds those of earlier batches to them, and the one that reduces such alone."""

        def results_of(gm: fx.GraphModule, given: Mapping[ir.Role, Any]) -> dict[ir.Role, Any]:
            typing.drawn = drawn  # it runs instead of backward
            return self._run(typing, gm, {**saved, **given}, derived=True)

        made, handed = self.program.glimpse, Handed()
        left = results_of(made("update"), {ir.Updater(): handed})
        self._compare_gradients({**gradients_of(left.items()), **handed.gradients}, self.captured)
        if not self.data:
            return
        own, alone = gradients_of(results_of(made("local"), {}).items()), made("reduce")
        reduced = {ir.Gradient(role.of): role for role in ir.placeholders(alone) if isinstance(role, ir.Accumulated)}
        kept = {role: self._kept(role, own.get(role.of.fqn)) for role in reduced.values()}
        self._compare_gradients(own, {role: held for role, held in self.captured.items() if role not in reduced})
        earlier = {gradient: self._earlier(role, self.captured[gradient]) for gradient, role in reduced.items()}
        both = {role: self._both(typing, role, self.captured[role], held) for role, held in earlier.items()}
        for gm, expected in ((made("accumulate"), {**self.captured, **both}), (alone, earlier)):
            results = results_of(gm, kept)
            self._compare_gradients(gradients_of(results.items()), expected)
            self._compare_norms(results, expected, (True,))

    def _kept(self, role: ir.Accumulated, value: Any) -> Held | None:
        """What ranks have kept of earlier batches, if of one they keep ``value``: as they hold that, they hold the sum
        of several, in whatever parts, summands or multiples. That it is enough is shown where it is reduced."""
        self.results += 1
        expected = self.captured[ir.Gradient(role.of)]
        if isinstance(value, Held) and value.term is expected.term and value.uneven is None:
            return self._earlier(role, value)
        self._unknown(role, f"it is {value}, which is not shown to be {expected}")
        return None

    def _earlier(self, role: ir.Accumulated, held: Held) -> Held:
        """The same of earlier batches."""
        return replace(held, term=self.terms.make("input", [repr(role)], held.term.shape, held.term.varies))

    def _accumulated(self, typing: Typing, gm: fx.GraphModule, given: dict[ir.Role, Any], own: dict[Any, Any]) -> None:
        """The graph of later microbatches of a pipeline, which adds the gradients of those before to its own."""
        gradients = {r: v for r, v in own.items() if isinstance(r, ir.Gradient) and isinstance(r.of, ir.Parameter)}
        kept = {r: self._earlier(ir.Accumulated(r.of), v) for r, v in gradients.items() if isinstance(v, Held)}
        given = given | {ir.Accumulated(role.of): held for role, held in kept.items()}
        results = self._run(typing, adding_to_earlier(gm), given, derived=True) if kept else {}
        for role, held in kept.items():
            expected = self._both(typing, role, gradients[role], held)
            if expected is not None:
                self._compare(role, results.get(role), expected)

    def _both(self, typing: Typing, role: ir.Role, one: Held, other: Held) -> Held | None:
        """The sum of gradients of this batch and of earlier ones; None if it is not known how ranks have it."""
        try:
            return added(typing, one, other)
        except UntypedError as error:
            self._unknown(role, str(error))
            return None

    def _without(self, absent: frozenset[ir.Tangent]) -> None:
        """Backward of a loss that does not depend on some outputs: as with gradients of zero."""

        def inputs(role: ir.Role, node: fx.Node) -> Any:
            return filled(self, node.meta["val"].shape, 0) if role in absent else self._captured(role, node)

        captured, typing = self._typing({}), self._typing(self.originals)
        expected = captured.run(self.program.joint.module, inputs, self.cuts)
        saved = self._run(typing, self.program.forward, {})
        results = self._run(typing, self.program.graph("backward", absent), saved)
        totals: dict[str, Any] = {}
        (stage,) = self.program.stages
        self._collect(typing, stage, results, totals, expected)
        self._compare_norms(results, expected)
        self._compare_gradients(totals, expected)
        self.unknown[:0] = [self._of_node(node, why) for node, why in (*captured.untyped, *typing.untyped)]

    def _backward(self, typing: Typing, stage: StageProgram, halves: Halves, given: dict[ir.Role, Any]) -> Any:
        """The results of the graphs that the schedule runs, in its order: of backward, or of its two parts."""
        actions = (action for place in self.program.actions for action in place if action.stage == stage.number)
        results: dict[ir.Role, Any] = {}
        for kind in dict.fromkeys(action.kind for action in actions if action.kind != "F"):
            gm, drawn = self.program.graph(halves.name(kind)), typing.drawn
            before = {**given, **results}
            own = self._run(typing, gm, before)
            results |= own
            if self.derived and self.program.plan.pipeline is not None:
                after, typing.drawn = typing.drawn, drawn
                self._accumulated(typing, gm, before, own)
                typing.drawn = after
        return results

    def _run(
        self, typing: Typing, gm: fx.GraphModule, given: dict[ir.Role, Any], *, derived: bool = False
    ) -> dict[ir.Role, Any]:
        def inputs(role: ir.Role, node: fx.Node) -> Any:
            if role in given:
                return given[role]
            if isinstance(role, ir.Parameter):
                return self._stored(role, node)
            if isinstance(role, (ir.Buffer, ir.Input, ir.Tangent)):
                return self._captured(role, node)
            raise UntypedError(f"no graph before it gives {role}")

        return typing.run(gm, inputs, derived=derived)

    def _stored(self, role: ir.Parameter, node: fx.Node) -> Held:
        full = of_term(self.terms.make("input", [repr(role)], self.program.shapes[role.fqn]))
        return stored(self.terms, full, self.program.parameters[role.fqn], self.mesh)

    def _collect(
        self,
        typing: Typing,
        stage: StageProgram,
        results: dict[Any, Any],
        totals: dict[str, Any],
        captured: dict[ir.Role, Any],
    ) -> None:
        """Add a stage's gradients of parameters to the totals, and compare those of inputs."""
        own = {r: v for r, v in results.items() if isinstance(r, ir.Gradient) and isinstance(r.of, ir.Parameter)}
        if stage.reduce is not None:
            given = {ir.Accumulated(role.of): value for role, value in own.items()}
            own |= self._run(typing, stage.reduce, given)
        for role, value in own.items():
            fqn = role.of.fqn
            if stage.number not in self.program.owners[fqn]:
                continue
            try:
                totals[fqn] = self._total(typing, fqn, totals[fqn], value) if fqn in totals else value
            except UntypedError as error:
                totals[fqn] = None
                self._unknown(role, str(error))
        for role, value in results.items():
            if isinstance(role, ir.Gradient) and not isinstance(role.of, ir.Parameter):
                self._compare(role, value, captured[role])

    def _total(self, typing: Typing, fqn: str, one: Any, other: Any) -> Any:
        """The sum of two stages' gradients of a parameter, of which neither knows the other's."""
        if one is None or other is None:
            return None
        if one.uneven is None and other.uneven is None:
            return added(typing, one, other)
        total = added(typing, self._before_division(fqn, one), self._before_division(fqn, other))
        return stored(self.terms, total, self.program.parameters[fqn], self.mesh)

    def _before_division(self, fqn: str, held: Held) -> Held:
        """The whole of which ranks hold unequal parts: parts of a sum are the sums of parts."""
        whole = undivided(held)
        if not _same(stored(self.terms, whole, self.program.parameters[fqn], self.mesh), held):
            raise UntypedError("stages divide their gradients of a parameter otherwise than the parameter")
        return whole

    def _compare_forward(self, results: dict[ir.Role, Any]) -> None:
        for role, value in results.items():
            if isinstance(role, (ir.Output, ir.IntermediateBase, ir.Checked)):
                self._compare(role, value, self.captured[role])
            elif isinstance(role, ir.Mutation):
                expected = self.captured[role]
                in_graph = self.program.plan.pipeline is None  # whose runtime averages buffers after a step
                averaged = in_graph and isinstance(role.of, ir.Buffer) and isinstance(expected, Held)
                self._compare(role, value, self._mean(expected) if averaged else expected)

    def _compare_gradients(self, totals: dict[str, Any], captured: dict[ir.Role, Any]) -> None:
        for role, gradient in captured.items():
            if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and gradient is not None:
                fqn = role.of.fqn
                try:
                    entry = self.program.parameters[fqn]
                    due = gradient if entry.gradient == OWN else self._mean(gradient)
                    expected = stored(self.terms, due, entry, self.mesh)
                except UntypedError as error:
                    self._unknown(role, str(error))
                else:
                    self._compare(role, totals.get(fqn), expected)

    def _compare_norms(
        self, results: dict[ir.Role, Any], captured: dict[ir.Role, Any], of_reduced: Sequence[bool] = (False, True)
    ) -> None:
        """A squared norm is of what a rank has of its batch's gradient, as operators divide it, or of the mean."""
        gradients = {r.of: v for r, v in captured.items() if isinstance(r, ir.Gradient) and v is not None}
        for of, gradient in gradients.items() if self.program.plan.measures_gradients else ():
            if not isinstance(of, ir.Parameter):
                continue
            entry = self.program.parameters[of.fqn]
            for reduced in of_reduced:
                role = ir.SquaredNorm(of, reduced)
                value = results.get(role)
                try:
                    expected = self._mean(gradient) if reduced else gradient
                    expected = stored(self.terms, expected, entry if reduced else unsharded(entry), self.mesh)
                except UntypedError as error:
                    self._unknown(role, str(error))
                else:
                    self._compare(role, value.of if isinstance(value, Squared) else None, expected)

    def _mean(self, held: Held) -> Held:
        """The mean over data-parallel ranks."""
        axes = held.term.varies & frozenset(self.data)
        size = 1
        for axis in axes:
            size *= self.data[axis]
        return replace(held, factor=held.factor / size, summed=axes)

    def _compare(self, role: ir.Role, value: Any, expected: Any) -> None:
        self.results += 1
        if isinstance(expected, Held) and isinstance(value, Held):
            if not value.factor and not expected.factor and value.shape == expected.shape:
                return
            if value.term is not expected.term:
                self._unknown(role, f"it is {value}, which is not shown to be {expected}")
            elif not _same(value, expected):
                self.wrong.append(Unproved(str(role), f"it is {value}, and {expected} would be right"))
        elif value is None and expected is not None:
            self._unknown(role, "it follows from what is not known")
        elif value != expected:
            self._unknown(role, f"it is {value}, which is not shown to be {expected}")

    def _unknown(self, role: ir.Role, why: str) -> None:
        self.unknown.append(Unproved(str(role), why))

    def _of_node(self, node: fx.Node, why: str) -> Unproved:
        return Unproved(node.name, why, MADE_BY.get(node, ""), SOURCE.get(node, ""))


def _same(value: Any, expected: Held) -> bool:
    """Whether ranks hold the same; where their coordinates stand among the dimensions moves no element."""
    if not isinstance(value, Held) or abs(value.factor - expected.factor) > 1e-9 * abs(expected.factor):
        return False
    if (value.term, value.partial, value.uneven) != (expected.term, expected.partial, expected.uneven):
        return False
    local = ([[atom for atom in dim if atom.axis is None] for dim in each.dims] for each in (value, expected))
    one, other = local
    return one == other and value.marks == expected.marks and value.summed == expected.summed
