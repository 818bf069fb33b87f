"""Every rule of the proof, on small random tensors: what it says that ranks have, they have.

The ranks of a mesh of 2 x 2 hold the operands of one operation in many ways: dimensions divided, in blocks too,
repeated elements, summands, each rank's own batch along ``dp`` or all batches. A rule may refuse; where it accepts,
every rank runs the operation on its own tensors, and must get what the rule says, where a term is what the operation
makes of whole operands. Collectives are tested in ``tests/test_proof_exchanges.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardgraph.proof import rules
from shardgraph.proof.definitions import DEFINED
from shardgraph.proof.held import Held
from shardgraph.proof.labels import Rule, jointly, linear
from shardgraph.proof.moves import MOVES
from shardgraph.proof.rules import RULES
from shardgraph.proof.terms import Terms
from shardgraph.proof.typing import Typing
from shardgraph.torch_api import pytree
from tests.held_values import Values
from tests.held_ways import MESH, Way, held, ways
from tests.rule_cases import CASES, WITHOUT, Case

aten = torch.ops.aten


# -- one operation, typed and run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stand:
    """What a function of arguments sees of an operand: its sizes."""

    node: fx.Node
    held: Held

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape


class Judge:
    """Compares what rules say with what ranks compute; terms are in common, so that equal ones must be equal values."""

    def __init__(self) -> None:
        self.terms, self.values = Terms(), Values(MESH)
        self.faults: list[str] = []
        self._learned: set[tuple[Case, tuple[str, ...]]] = set()

    def accepts(self, each: Case, together: Sequence[Way]) -> bool:
        """Whether the rule says what ranks have; a fault if they do not have it."""
        pairs = [
            held(self.terms, self.values, operand, number, way)
            for number, (operand, way) in enumerate(zip(each.operands, together, strict=True))
        ]
        if None in pairs:
            return False
        local, whole = zip(*pairs, strict=True) if pairs else ((), ())
        typed = self._typed(each, local)
        if not typed:
            return False
        key = each, tuple(map(repr, whole))
        if key not in self._learned:
            self._learned.add(key)
            self._judge(each, whole, self._typed(each, whole), learn=True)
        return self._judge(each, local, typed)

    def _judge(self, each: Case, operands: Sequence[Held], typed: dict[int, Held], learn: bool = False) -> bool:
        placed = [self.values.placed(one, seed) for seed, one in enumerate(operands)]
        try:
            results = [_results(each, [one[rank].clone() for one in placed]) for rank in range(len(self.values.ranks))]
        except (RuntimeError, IndexError):  # operands that do not fit, which no program can have
            return False
        known = False
        for position, said in typed.items():
            local = [result[position] for result in results]
            if learn:
                self.values.learn(said, local)
            expected = self.values.held(said)
            if expected is None:
                continue  # a term that whole operands do not give: nothing is proved by it
            known, combined = True, self.values.combined(said, local)
            if not all(map(_equal, combined, expected)) or not self.values.alike(said, local):
                self.faults.append(f"{each}: of {', '.join(map(str, operands)) or 'nothing'} it says {said}")
        return known

    def _typed(self, each: Case, operands: Sequence[Held]) -> dict[int, Held]:
        """What the rule says of each result; of none where the operation cannot be run, or the rule refuses."""
        graph, known = fx.Graph(), {}
        meta = [torch.empty(one.shape, dtype=self.values.of(one.term)[0].dtype, device="meta") for one in operands]
        for one, value in zip(operands, meta, strict=True):
            node = graph.placeholder("operand")
            node.meta["val"], known[node] = value, one
        stands = [Stand(*each) for each in known.items()]
        args, kwargs = pytree.tree_map_only(Stand, lambda stand: stand.node, _arguments(each, stands))
        node = graph.call_function(each.target, tuple(args), kwargs)
        try:
            args, kwargs = _arguments(each, meta)
            node.meta["val"] = each.target(*args, **kwargs)
        except Exception:  # operands that do not fit, which may end a kernel's process
            return {}
        try:
            typing = Typing(self.terms, MESH.__getitem__, frozenset({"dp"}))
            typed = typing._typed(torch.nn.Module(), node, known, lambda role, node: None)
        except Exception:  # as Typing.run takes it
            return {}
        each_result = [typed] if isinstance(typed, Held) else typed
        return {k: one for k, one in enumerate(each_result) if isinstance(one, Held)}


def _arguments(each: Case, operands: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    args = each.arguments(*operands)
    return (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})


def _results(each: Case, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    args, kwargs = _arguments(each, tensors)
    result = each.target(*args, **kwargs)
    return [result] if isinstance(result, Tensor) else result


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-8, atol=1e-9, equal_nan=True)


def judged(each: Case, judge: Judge, count: int = 6) -> int:
    """The number of accepted ways in which ranks do not all have whole operands."""
    divided = [way for way in ways(each.operands, count) if any(w != Way(factor=w.factor) for w in way)]
    return sum(judge.accepts(each, way) for way in divided)


def of(target: Any) -> list[Case]:
    return [each for each in CASES if each.target is target]


REGISTERED = {*RULES, *MOVES, *DEFINED, *rules._LINEAR_IN_ONE}
TARGETS = sorted({each.target for each in CASES} | (REGISTERED - set(WITHOUT)), key=str)


def test_only_operations_that_have_a_rule_are_left_out():
    assert set(WITHOUT) <= REGISTERED


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_ranks_have_what_a_rule_says(target):
    judge = Judge()
    accepted = [judged(each, judge) for each in of(target)]
    assert not judge.faults, f"{len(judge.faults)} faults:\n" + "\n".join(judge.faults[:20])
    assert accepted, "it has no case in tests/rule_cases.py"
    assert all(accepted), f"of its cases so many ways in which ranks share operands are accepted: {accepted}"


@pytest.mark.parametrize("target", sorted({each.target for each in CASES if each.shares}, key=str), ids=str)
def test_ranks_may_share_the_dimensions_that_run_through(target):
    for each in of(target):
        for size in each.shares:
            cut = Way(cuts=((size, "tp", 1),))
            assert Judge().accepts(each, [cut for _ in each.operands]), f"ranks may not share the dimension of {size}"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_ranks_have_what_a_rule_says_of_many_random_ways(target):
    judge = Judge()
    for each in of(target):
        judged(each, judge, count=300)
    assert not judge.faults, "\n".join(judge.faults[:20])


def _softmax_of_parts(x, dim, *_):
    return [x], [dim], Rule([rules.names(x)], [rules.names(x)])


def _product_of_sums(left, right):
    return [left, right], None, Rule(["mk", "kn"], ["mn"], {"k": "sum"}, jointly(0, 1))


@pytest.mark.parametrize(
    ("table", "target", "wrong"),
    [
        (RULES, aten._softmax.default, _softmax_of_parts),
        (RULES, aten.mm.default, _product_of_sums),
        (rules._LINEAR_IN_ONE, aten.exp.default, linear(0)),
    ],
    ids=["softmax-of-parts", "product-of-sums", "linear-exponential"],
)
def test_a_wrong_rule_is_found(monkeypatch, table, target, wrong):
    monkeypatch.setitem(table, target, wrong)
    judge = Judge()
    for each in of(target):
        judged(each, judge)
    assert judge.faults
