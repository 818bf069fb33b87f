"""When ranks may run other programs than before, each by itself or only together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from shardgraph.module.program_key import ProgramKey
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.runtime.agreement import Agreement


class Switches:
    """What the programs that ranks last agreed on communicate, and the orders of collectives that they have agreed on.

    A rank may switch by itself to programs that communicate nothing, or the same as those that ranks last agreed on.
    They make any other switch together: one that continued alone would block the others.
    """

    def __init__(self, plan: Plan, agreement: Agreement) -> None:
        self.plan, self._agreement = plan, agreement
        self.agreed: list[str] | None = None
        self._orders: dict[str, str] = {}  # communication in the order that ranks have, by its sorted lines

    def communication(self, keys: Iterable[ProgramKey], programs: Iterable[Program]) -> list[str]:
        """The communication of calls of these programs, in order; where ranks share batches, all that they compute."""
        return [
            text if self.plan.is_of_data else f"{text}\n{program.digest} of inputs {key.inputs}"
            for key, program in zip(keys, programs, strict=True)
            if (text := program.communication)
        ]

    def agree(self, keys: Sequence[ProgramKey], programs: Sequence[Program], described: str) -> list[Program]:
        """The programs of a call that ranks make together, after all have agreed to run them.

        Where every rank has a batch of its own, batches may differ, and programs by their computation: then those of
        the first rank say in which order collectives start. Ranks that share batches must have the same program.

        Raises:
            RankMismatchError: on every rank: they do not.
        """
        agreement, topic = self._agreement, "the inputs of a call (shapes, dtypes, mode), and the model's attributes"
        if not self.plan.is_of_data:
            topic += f", which ranks share under plan {self.plan.name!r}"
            agreement.agree(topic, "\n".join([described, *(program.digest for program in programs)]))
            return list(programs)
        mine = self.communication(keys, programs)
        sent = list(map(_sorted, mine))
        if {*sent} <= self._orders.keys():
            agreement.agree(topic, "\n\n".join(mine), shown="\n".join([described, *mine]))
            return list(programs)
        agreement.agree(topic, "\n\n".join(sent), shown="\n".join([described, *sent]))
        orders = json.loads(agreement.from_first_rank("the order of collectives", lambda: json.dumps(mine)))
        self._orders.update(zip(sent, orders, strict=True))
        ordered = list(map(self.following, programs))
        agreement.agree("the order of collectives", "\n\n".join(self.communication(keys, ordered)))
        return ordered

    def following(self, program: Program) -> Program:
        """The same program with the order of collectives that ranks have agreed on, if they have and it can be."""
        order = self._orders.get(_sorted(program.communication))
        return program if order in (None, program.communication) else program.following(order)


def _sorted(communication: str) -> str:
    return "\n".join(sorted(communication.splitlines()))
