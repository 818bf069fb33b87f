"""What a caller of ``compile``, ``analyze`` or ``verify`` asks for beside a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.plan import Plan
from shardgraph.sizes import parse_bytes


@dataclass(frozen=True)
class Asked:
    """Recomputation, a budget of memory, chunks of a loss and offloading, each None where the plan's own is meant.

    ``memory`` and ``loss_chunk`` are bytes or texts such as ``"64MiB"``.
    """

    recompute: str | None = None
    memory: int | str | None = None
    loss_chunk: int | str | None = None
    offload: str | Offload | None = None

    def of(self, plan: Plan) -> Plan:
        """``plan`` with what is asked for; ``memory`` alone asks for the recomputation ``"budget"``.

        Raises:
            ShardGraphError: there is no such recomputation, size or offloading.
        """
        if self.recompute is not None:
            plan = replace(plan, recompute=self.recompute)
        elif self.memory is not None and plan.recompute == "none":
            plan = replace(plan, recompute="budget")
        if self.loss_chunk is not None:
            plan = replace(plan, loss_chunk=parse_bytes(self.loss_chunk))
        return plan if self.offload is None else replace(plan, offload=Offload.of(self.offload))
