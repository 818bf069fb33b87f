"""Which mutants of which programs are made, and what ``verify`` says of those that differ.

``python -m tests.mutation [ID ...]`` tries up to 20 mutants of each pass in these cases (all without an ID) and writes
``docs/mutants.csv`` and the table in ``docs/mutants.md``. With ``--proof-only`` it writes anew what of them is proved.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph import Offload, Pipeline, Plan, Precision, preset
from shardgraph.passes.lowering import passes_of
from shardgraph.passes.placing import placing_passes
from shardgraph.passes.program import Program
from shardgraph.plans.annotations.kinds import shard
from shardgraph.proof.prove import prove
from tests.judge import Judge
from tests.mutants import Mutant, chosen
from tests.zoo import make

PER_PASS = 20
WITH = {
    "shard-operators": "tp+sp-2",
    "divide-experts": "ep-2",
    "chunk-loss": "fsdp-2-loss-chunk",
    "slice-before-scores": "fsdp-2-loss-chunk",
    "recompute": "fsdp-2-recompute",
    "shard-parameters": "hsdp-2x2",
    "mixed-precision": "fsdp-2-precision",
    "offload-parameters": "fsdp-2-offload",
    "reduce-gradients": "hsdp-2x2",
    "offload-gradients": "fsdp-2-offload",
    "average-buffers": "ddp-2-alone",
    "partition": "hsdp-2x2",
    "offload-activations": "fsdp-2-offload",
    "divide-into-stages": "pp+fsdp-2x2-checkpoint",
    "copy-to-recompute": "pp+fsdp-2x2-checkpoint",
    "recompute-stage": "pp+fsdp-2x2-checkpoint",
    "gather-once": "pp+zero2-2x2",
    "reduce-once": "pp+fsdp-2x2-checkpoint",
    "keep-gradients-local": "pp+fsdp-2x2-checkpoint",
    "drop-untrained": "pp+fsdp-2x2-checkpoint",
    "split-backward": "pp-2-zero-bubble",
    "drop-zero-tangents": "ddp-2-logits",
    "remove-constraints": "fsdp-2-constrained",
    "merge-collectives": "hsdp-2x2-buckets",
    "share-heads": "ddp-2-heads",
    "order-rows": "tp+sp-2-rows",
}
"""A case in which each pass has mutants."""
WITHOUT = {
    "check-program": "changes nothing: it refuses programs",
    "mark-scores": "marks the losses that may be computed in chunks; another choice gives the same values",
    "mark-offloaded": "marks what is moved to the host if it is saved; another choice gives the same values",
    "schedule": "reorders: a graph that is valid in two orders has the same values in both",
    "measure-gradients": "adds results that verify does not compare; prove does, and tests compare their numbers",
    "synchronize-batch-norms": (
        "its mutants are in `tests/test_synchronized_batch_norm.py`; the judge of this page calls a model with one "
        "rank's rows"
    ),
    "gather-scaled": (
        "the judge of this page computes with the model as it is written, not in float8; "
        "`tests/test_scaled_products.py` compares training with plain torch"
    ),
    "add-accumulated": (
        "derived for calls that are added up, which the judge of this page does not make; verify finds a fault of "
        "plans that do (`tests/test_accumulation.py`), and prove of all (`tests/test_proof_derived.py`)"
    ),
    "update-parameters": (
        "derived for sharded.step, which verify does not run; prove does not pass its faults, and tests compare it "
        "with torch's step"
    ),
    "shadow": "derived inside of join(), which verify does not run; tests compare it with DDP's",
    "reduce-alone": (
        "derived likewise, for a program that ends a no_sync of another one; prove does not pass its faults"
    ),
}
"""Passes that cannot make a fault that shows in a value, with the reason."""
DOCS = Path(__file__).parents[1] / "docs"
HEADER = ["program", "pass", "made", "differ", "found", "refused", "blamed", "proved", "numeric"]
RIGHT = "none"
"""The pass in the row of a program without a mistake, which has only whether that is proved; empty: not measured."""
NUMERIC = {"rounded to bfloat16"}
"""Faults of which a proof, which does not look at dtypes, says nothing."""


@dataclass(frozen=True)
class Case:
    """A model of the zoo under a plan; ``dropout`` if its random numbers are drawn."""

    model: str
    plan: str
    mesh: tuple[tuple[str, int], ...]
    pipeline: Pipeline | None = None
    options: tuple[tuple[str, Any], ...] = ()
    dropout: bool = False
    rows: int = 12
    remark: str = ""

    @property
    def passes(self) -> list[str]:
        """The names of all passes that lower the case, whatever they find to do."""
        options = dict(self.options)
        offload = {"offload": Offload.of(options["offload"])} if "offload" in options else {}
        chunk = {"loss_chunk": options["loss_chunk"]} if "loss_chunk" in options else {}
        plan = replace(preset(self.plan, self.mesh, self.pipeline), **offload, **chunk)
        placing = placing_passes(plan, repeated_heads=self.model == "grouped-heads")
        return [each.name for each in [*placing, *chain(*passes_of(plan).values())]]

    @property
    def id(self) -> str:
        return "-".join(filter(None, [self.plan, "x".join(str(size) for _, size in self.mesh), self.remark]))


def _case(model: str, plan: str, remark: str = "", *, pipeline: Any = None, dropout: bool = False, rows: int = 12,
          options: Mapping[str, Any] | None = None, **mesh: int) -> Case:  # fmt: skip
    return Case(model, plan, tuple(mesh.items()), pipeline, tuple((options or {}).items()), dropout, rows, remark)


_SINGLE = Precision(parameters="float32", reduce="float32")
CASES = [
    _case("tied-transformer", "fsdp", dp=2),
    _case("tied-transformer", "zero2", dp=3),
    _case("tied-transformer", "hsdp", dp_replicate=2, dp_shard=2),
    _case("tied-transformer", "hsdp", "buckets", options={"bucket": 10**6}, dp_replicate=2, dp_shard=2),
    _case("conv-batch-norm", "ddp", dp=2),
    _case("conv-batch-norm", "ddp", "alone", options={"bucket": 0}, dp=2),
    _case("tied-transformer", "tp", tp=2),
    _case("tied-transformer", "tp+sp", tp=2),
    _case("tied-transformer", "cp", cp=2),
    _case("tied-transformer", "fsdp+tp", dp=2, tp=2),
    _case("mixture", "ep", ep=2, rows=4),
    _case("tied-transformer", "fsdp", "recompute", options={"recompute": "full"}, dropout=True, dp=2),
    _case("tied-transformer", "zero2", "selective", options={"recompute": "selective"}, dp=2),
    _case("next-token", "fsdp", "loss-chunk", options={"loss_chunk": 2000}, rows=8, dp=2),
    _case("tied-transformer", "fsdp", "offload", options={"offload": "all"}, dp=2),
    _case("tied-transformer", "fsdp", "precision", options={"precision": _SINGLE}, dp=2),
    _case("tied-transformer", "pp", pipeline=Pipeline(2, "gpipe"), pp=2),
    _case("tied-transformer", "pp+fsdp", pipeline=Pipeline(2, "1f1b"), pp=2, dp=2),
    _case("tied-transformer", "pp+zero2", pipeline=Pipeline(2, "1f1b"), pp=2, dp=2),
    _case("conv-batch-norm", "pp+ddp", pipeline=Pipeline(2, "1f1b"), pp=2, dp=2),
    _case("tied-transformer", "pp+fsdp", "checkpoint", pipeline=Pipeline(2, "1f1b", checkpoint="except_last"),
          dropout=True, pp=2, dp=2),
    _case("tied-transformer", "pp+tp", pipeline=Pipeline(2, "1f1b"), pp=2, tp=2),
    _case("tied-transformer", "pp", "zero-bubble", pipeline=Pipeline(2, "interleaved-zero-bubble"), pp=2),
    _case("logits", "ddp", "logits", rows=8, dp=2),
    _case("constrained", "fsdp", "constrained", dp=2),
    _case("attention", "cp", "ring", rows=2, cp=3),
    _case("grouped-heads", "ddp", "heads", rows=4, dp=2),
    _case("perceptrons", "tp+sp", "rows", rows=4, tp=2),
    _case("layer", "cp+tp+sp", rows=2, cp=2, tp=2),
]  # fmt: skip


class NextToken(nn.Module):
    """A language model that predicts each next token, and gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(61, 16), nn.Linear(16, 16), nn.Linear(16, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(self.embedding(ids)).tanh())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Logits(nn.Module):
    """A classifier that gives its scores beside their loss; residual layers, so that gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x + self.first(x).tanh()
        x = x + self.second(x).tanh()
        scores = self.head(x).relu()
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


class Constrained(nn.Module):
    """Layers with annotated activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = shardgraph.constrain(self.first(x).tanh(), shard(0, "tp"))
        x = shardgraph.constrain(self.second(x).tanh() + x, shard(1, "tp"))
        return self.third(x).sin() * x


class Attention(nn.Module):
    """Causal attention, and attention within two documents of six positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 24)
        self.same: torch.Tensor
        self.register_buffer("same", torch.eye(2, dtype=torch.bool).repeat_interleave(6, 0).repeat_interleave(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _attended(self.first(x), is_causal=True)
        return x + _attended(self.second(x), attn_mask=self.same).tanh()


def _attended(x: torch.Tensor, **options: Any) -> torch.Tensor:
    heads = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in x.chunk(3, -1))
    return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2).flatten(2)


class GroupedHeads(nn.Module):
    """Causal attention whose four heads of queries share two of keys and values, which it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(8, width, bias=False) for width in (8, 4, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.queries, self.keys, self.values)
        )
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Perceptrons(nn.Module):
    """Residual layers of sequences; in the second one positions differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.weights: torch.Tensor
        self.register_buffer("weights", torch.arange(1.0, 9.0).sqrt().unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.downs[0](self.ups[0](self.norms[0](x)).tanh())
        return x + self.downs[1](self.weights * self.ups[1](self.norms[1](x)).tanh())


class Layer(nn.Module):
    """Causal attention between two residual additions; then positions differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.weights: torch.Tensor
        self.register_buffer("weights", torch.arange(1.0, 9.0).sqrt().unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(_attended(self.first(self.norm(x)), is_causal=True))
        return x + (self.weights * x).sin()


def _made(case: Case) -> Any:
    if case.model == "layer":
        return Layer(), ((torch.randn(case.rows, 8, 32),), {})
    if case.model == "perceptrons":
        return Perceptrons(), ((torch.randn(case.rows, 8, 32),), {})
    if case.model == "grouped-heads":
        return GroupedHeads(), ((torch.randn(case.rows, 6, 8),), {})
    if case.model == "attention":
        return Attention(), ((torch.randn(case.rows, 12, 8),), {})
    if case.model == "next-token":
        return NextToken(), ((torch.randint(0, 61, (case.rows, 9)),), {})
    if case.model == "logits":
        return Logits(), ((torch.randn(case.rows, 8), torch.randint(0, 5, (case.rows,))), {})
    if case.model == "constrained":
        return Constrained(), ((torch.randn(case.rows, 8),), {})
    return make(case.model, case.rows)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in the programs of pipelines: the model's own, or a mean that depends on every output."""
    return output["loss"] if isinstance(output, dict) else output.sin().mean() + output.square().mean()


@dataclass
class Subject:
    """A case made: the model in double precision, its inputs, its program, and what ``verify`` says of that."""

    case: Case
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Plan | None = None
    program: Program | None = None
    report: Any = None
    judges: list[Judge] = field(default_factory=list)

    @property
    def loss_fn(self) -> Any:
        return loss_of if self.case.pipeline is not None else None

    def verify(self) -> Any:
        plan: Any = self.case.plan
        mesh, pipeline, options = dict(self.case.mesh), self.case.pipeline, dict(self.case.options)
        if "bucket" in options:
            plan, mesh = replace(preset(plan, self.case.mesh), bucket=options.pop("bucket")), None
        if self.plan is not None:
            plan, mesh, pipeline, options = self.plan, None, None, {}
        return shardgraph.verify(
            self.model, self.args, plan, mesh=mesh, pipeline=pipeline,
            example_kwargs=self.kwargs, loss_fn=self.loss_fn, fp64=True, **options,
        )  # fmt: skip

    def differs(self, program: Program) -> bool:
        """Whether a program differs from the model, by the judge; one that cannot be run does."""
        if not self.judges:
            absent = frozenset(role for _, roles in self.program._made for role in roles)
            call = self.program.plan, self.model, self.args, self.kwargs
            self.judges = [Judge(*call, seed, self.loss_fn, absent) for seed in range(3)]
        try:
            return any(judge.differs(program) for judge in self.judges)
        except (RuntimeError, KeyError, shardgraph.ShardGraphError):
            return True

    def proved(self, mutant: Mutant) -> bool:
        """Whether a mutant is proved although it differs. The judge takes longer than a proof, so it comes second."""
        program = mutant.of(self.program)
        return is_proved(program) and self.differs(program)

    def found(self, mutant: Mutant) -> str:
        """What verify says of a mutant: "missed", "refused", or the pass that it blames."""
        with lowered(lambda *_, **__: mutant.of(self.program)):
            try:
                report = self.verify()
            except (RuntimeError, KeyError, shardgraph.ShardGraphError):
                return "refused"
        if report.ok:
            return "missed"
        return report.first_divergence.made_by if report.first_divergence else "nothing"


def is_proved(program: Program) -> bool:
    """Whether a program is proved; one with a fault may be none that a rule was written for."""
    try:
        return prove(program).ok
    except Exception:
        return False


@contextmanager
def lowered(lower: Any) -> Iterator[None]:
    """Within, ``verify`` takes for its program what ``lower`` returns."""
    module = importlib.import_module("shardgraph.api.verify")
    before, module.lower = module.lower, lower
    try:
        yield
    finally:
        module.lower = before


@cache
def subject(case: Case) -> Subject:
    """A case, with the program that verify makes of it."""
    torch.manual_seed(0)
    model, (args, kwargs) = _made(case)
    model = model.double() if case.dropout or "batch-norm" in case.model else model.double().eval()
    args = tuple(x.double() if x.is_floating_point() else x for x in args)
    made = Subject(case, model, args, kwargs)
    build = importlib.import_module("shardgraph.api.verify").lower

    def kept(*args: Any, **kwargs: Any) -> Program:
        made.program = build(*args, **kwargs)
        return made.program

    with lowered(kept):
        made.report = made.verify()
    made.plan = made.report.plan
    return made


def tried(case: Case, per_pass: int) -> tuple[list[Mutant], dict[Mutant, str]]:
    """The mutants chosen of a case, and what verify says of those that differ."""
    made = subject(case)
    mutants = chosen(made.program, 0, per_pass)
    return mutants, {mutant: made.found(mutant) for mutant in mutants if made.differs(mutant.of(made.program))}


def proved_of(case: Case, per_pass: int) -> dict[str, list[int]]:
    """By pass, how many of the chosen mutants are proved: those that are not only numeric, and those that are."""
    made = subject(case)
    counts = {RIGHT: [int(is_proved(made.program)), 0]}
    for mutant in chosen(made.program, 0, per_pass):
        count = counts.setdefault(mutant.made_by, [0, 0])
        if made.proved(mutant):
            print(f"{case.id}: {mutant}: proved", flush=True)
            count[mutant.fault in NUMERIC] += 1
    return counts


def rows_of(case: Case, per_pass: int) -> list[list[Any]]:
    """The rows of the table for a case, one for each pass and one for the program without a mistake."""
    mutants, verdicts = tried(case, per_pass)
    proofs = proved_of(case, per_pass)
    rows = [[case.id, RIGHT, 0, 0, 0, 0, 0, *proofs[RIGHT]]]
    for made_by, made in sorted(Counter(mutant.made_by for mutant in mutants).items()):
        own = {mutant: verdict for mutant, verdict in verdicts.items() if mutant.made_by == made_by}
        for mutant, verdict in own.items():
            if verdict not in (made_by, "refused"):
                print(f"{case.id}: {mutant}: {verdict}", flush=True)
        refused = sum(verdict == "refused" for verdict in own.values())
        found = sum(verdict != "missed" for verdict in own.values())
        blamed = sum(verdict == made_by for verdict in own.values())
        rows.append([case.id, made_by, made, len(own), found, refused, blamed, *proofs[made_by]])
    return rows


def rows_with_proofs(case: Case, per_pass: int) -> list[list[Any]]:
    """The rows of the table for a case that was measured before, with what is proved now."""
    proofs = proved_of(case, per_pass)
    before = [row[:-2] for row in read() if row[0] == case.id and row[1] != RIGHT]
    return [[*row, *proofs[row[1]]] for row in [[case.id, RIGHT, *[0] * 5], *before]]


def read() -> list[list[str]]:
    """The rows of the table that were last measured."""
    file = DOCS / "mutants.csv"
    return list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []


def write(rows: list[list[Any]]) -> None:
    """Replace the rows of the same cases in the file and in the document."""
    fresh = {str(row[0]) for row in rows}
    order = {case.id: i for i, case in enumerate(CASES)}
    kept = [row for row in read() if row[0] not in fresh and row[0] in order]
    every = sorted([*kept, *([str(each) for each in row] for row in rows)], key=lambda row: (order[row[0]], row[1]))
    with (DOCS / "mutants.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *every])
    (DOCS / "mutants.md").write_text(document(every))


def document(rows: list[list[str]]) -> str:
    """The page with the table."""
    right = {name: proved == "1" for name, made_by, *_, proved, _ in rows if made_by == RIGHT}
    rows = [row for row in rows if row[1] != RIGHT]
    sums: dict[str, list[int]] = {}
    for _, made_by, *numbers in rows:
        total = sums.setdefault(made_by, [0] * len(numbers))
        sums[made_by] = [a + int(b or 0) for a, b in zip(total, numbers, strict=True)]
    everything = [sum(column) for column in zip(*sums.values(), strict=True)]
    by_pass = [[made_by, *numbers] for made_by, numbers in sorted(sums.items())]
    return _PAGE.format(
        numeric=", ".join(sorted(NUMERIC)),
        summary=_table(["pass", *HEADER[2:]], [*by_pass, ["all", *everything]]),
        rows=_table(HEADER, rows),
        proved=_listed(name for name, proved in right.items() if proved),
        unproved=_listed(name for name, proved in right.items() if not proved),
        without="\n".join(
            textwrap.fill(f"* `{name}`: {why}.", 99, subsequent_indent="  ") for name, why in WITHOUT.items()
        ),
    )


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) or "none", 99, break_on_hyphens=False)


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * 1 + ["---:" if each in HEADER[2:] else "---" for each in header[1:]], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


_PAGE = """# Mutants

A mutant is a program in which one pass has made a mistake. `tests/faults.py` makes them: a
collective dropped, doubled, over another axis or in another order; a wrong scale, dtype, part or
padding; a stale gather, or one that is read before it has arrived; random numbers drawn again; a
mutation lost; values that graphs exchange swapped, lost or scaled; an operation on another operand.
The columns:

* *made*: up to 20 mutants of each pass and program, of as many kinds as there are;
* *differ*: those that an independent run of all ranks, stages and microbatches in double precision
  shows to be wrong (`tests/judge.py`: a difference of 1e-9 for one of 3 seeds);
* *found*: those of them that `verify` does not let pass; among these, *refused* are those that
  cannot be run, where it raises an error, and *blamed* those that it blames on the pass that made
  the mistake;
* *proved*: those that differ, but that the symbolic proof (`shardgraph/proof`) claims to be right;
  any of these would be a bug in one of its rules;
* *numeric*: proved ones in which only the rounding is wrong ({numeric}), which the proof
  does not look at.

Programs without a mistake raise no false alarm, neither of `verify` nor of the judge;
`tests/test_mutants.py` checks that too. The figures are from `python -m tests.mutation`; with
`--proof-only` only the last two columns are measured, and which programs are proved.

{summary}

Programs without a mistake that are proved:

{proved}

Those that the proof cannot decide:

{unproved}

Two pairs of passes cannot be told apart: `partition` and `shard-operators`, where backward returns
one gradient of shards in place of another and no value of the model equals either (whichever of
them exchanged the two, the text is the same); and `remove-constraints` and the passes that copy the
operation that reads an annotated value.

Passes without mutants:

{without}

`verify` cannot see what no value shows: an order in which collectives block for ever
(`check-program` refuses it), and an output that is a copy where the model returns an alias, which
differs once the caller writes to it.

## By program

A program is a plan, the sizes of its mesh, and an option.

{rows}
"""


def main() -> None:
    from tests.captures import sharing_captures

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="ID", help="all without one")
    parser.add_argument("--per-pass", type=int, default=PER_PASS, help="at most so many mutants of a pass and case")
    parser.add_argument("--proof-only", action="store_true", help="measure what is proved; all else stays as it is")
    asked = parser.parse_args()
    of = {case.id: case for case in CASES}
    torch.set_num_threads(1)  # tensors are small: more threads only wait for each other
    with sharing_captures():
        for case in [of[name] for name in asked.cases] or CASES:
            start = time.perf_counter()
            made = subject(case)
            assert made.report.ok, made.report
            assert not made.differs(made.program), f"false alarm of the judge on {case.id}"
            measure = rows_with_proofs if asked.proof_only else rows_of
            write(rows := measure(case, asked.per_pass))
            sums = [sum(int(row[i]) for row in rows if row[1] != RIGHT) for i in range(2, len(HEADER))]
            print(f"{case.id}: {sums} in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
