"""Draw the pictures of docs/concepts.md: operations of a small model before and after each kind of pass.

    python docs/pictures/draw.py            # writes docs/pictures/*.svg

Every box is a node of a graph that was compiled for the picture, in the order in which a rank runs it. Views, copies of
views and other operations that take no time are left out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx, nn
from torch.nn import functional as F

from shardgraph import Offload, Pipeline, Plan, ir, preset
from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, SUBJECT
from shardgraph.nn import MoE
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.pictures.svg import Drawing, document, rect, text

FOLDER = Path(__file__).parent
COLUMNS, WIDTH, HEIGHT, GAP = 11, 84, 38, 6
COLOURS = {"forward": "#cfe2f3", "backward": "#fce5cd", "send": "#d9ead3", "copy": "#ead1dc", "wait": "#eeeeee"}
WORDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "to_host": "to host",
    "to_device": "to device",
    "native_layer_norm": "norm",
    "attention_backward": "attention'",
    "ring_attention": "attention",
    "gelu_backward": "gelu'",
    "_softmax": "softmax",
    "_softmax_backward_data": "softmax'",
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax'",
    "nll_loss_forward": "nll",
    "nll_loss_backward": "nll'",
    "embedding_dense_backward": "embedding'",
}
DRAWN = ("mm", "bmm", "gelu", "attention", "norm", "embedding", "log_softmax", "softmax", "nll", "logsumexp", "grouped")


class Feedforward(nn.Sequential):
    """Three products with a nonlinearity between them."""

    def __init__(self) -> None:
        named = {"up": nn.Linear(32, 64), "act": nn.GELU(), "mid": nn.Linear(64, 64), "act2": nn.GELU()}
        super().__init__(OrderedDict(named, down=nn.Linear(64, 32)))


class Attention(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.down(F.gelu(self.up(x + self.proj(a))))


class Scores(nn.Module):
    """A loss over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(F.gelu(self.body(x))), labels)


class Experts(nn.Module):
    """A layer before a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.moe = nn.Linear(16, 16), MoE(16, 32, 4, k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance = self.moe(self.up(x))
        return out.square().mean() + balance


@dataclass(frozen=True)
class Box:
    """An operation: what it does, for which module or parameter, and of which kind it is."""

    label: str
    of: str
    kind: str


def boxes(gm: fx.GraphModule, half: str, waits: bool = False) -> Iterator[Box]:
    """The operations of a graph that are drawn."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        name = node.target.__name__.split(".")[0]
        word = WORDS.get(name, name)
        if ir.is_collective(node) or name in ("to_host", "to_device") or "send" in name:
            yield Box(word, _subject(node), "copy" if word.startswith("to ") else "send")
        elif ir.is_wait(node):
            if waits:
                yield Box("wait", _subject(node), "wait")
        elif any(part in word for part in DRAWN):
            backward = bool(FORWARD_MODULES.get(node)) or (half == "backward" and word.endswith("'"))
            yield Box(word, _module(node), "backward" if backward else "forward")


def messages(gm: fx.GraphModule) -> Iterator[Box]:
    """What a stage sends when its graph has run."""
    roles = {type(role) for role, _ in ir.outputs(gm)}
    if ir.Forwarded in roles:
        yield Box("send", "to the next", "send")
    if ir.Returned in roles:
        yield Box("send", "grad to before", "send")


def _subject(node: fx.Node) -> str:
    """What a collective or a copy moves: a parameter, its gradient, a bucket of them, or a value of a module."""
    said = SUBJECT.get(node, "")
    if "," in said or " and " in said:
        return "a bucket"
    said = said.removeprefix("parameter ").replace(".weight", ".w").replace(".bias", ".b")
    if said.startswith("gradient of "):
        return f"grad {said.removeprefix('gradient of ').rpartition('moe.')[2]}"
    return (
        "output"
        if said.startswith("Output")
        else said.rpartition(" of ")[2].rpartition(".")[2]
        if " of " in said
        else said
    )


def _module(node: fx.Node) -> str:
    modules = FORWARD_MODULES.get(node) or MODULES.get(node) or {}
    paths = [path for path, _ in modules.values()]
    return paths[-1].removeprefix("L['self']").split(".", 1)[-1] if paths else ""


def strip(title: str, halves: Sequence[tuple[str, list[Box]]]) -> Drawing:
    """Boxes in the order of execution, a line break after each half and after each full row."""
    body, y = [text(0, 14, title, "strong")], 24
    for name, row in halves:
        if name:
            body.append(text(0, y + 12, name, "small"))
            y += 18
        for start in range(0, len(row), COLUMNS):
            for column, box in enumerate(row[start : start + COLUMNS]):
                x = column * (WIDTH + GAP)
                body.append(rect(x, y, WIDTH, HEIGHT, COLOURS[box.kind]))
                size = 'style="font-size:11px"'
                for line, (words, kind) in enumerate(((box.label, "strong"), (box.of[:15], "small"))):
                    drawn = text(x + WIDTH // 2, y + 15 + 15 * line, words, f"middle {kind}")
                    body.append(drawn.replace("<text ", f"<text {size} ", 1))
            y += HEIGHT + GAP
    return Drawing(COLUMNS * (WIDTH + GAP) - GAP, y, "\n".join(body))


def legend() -> Drawing:
    names = {
        "forward": "forward",
        "backward": "backward",
        "send": "sent between ranks",
        "copy": "copied",
        "wait": "wait",
    }
    body = []
    for column, (kind, words) in enumerate(names.items()):
        body += [rect(column * 170, 0, 14, 14, COLOURS[kind]), text(column * 170 + 20, 12, words, "small")]
    return Drawing(COLUMNS * (WIDTH + GAP) - GAP, 16, "\n".join(body))


def program(model: nn.Module, plan: Plan, *inputs: torch.Tensor) -> Program:
    return build_program(model, plan, inputs)


def halves_of(made: Program, waits: bool = False) -> list[tuple[str, list[Box]]]:
    found = [("forward", list(boxes(made.forward, "forward", waits)))]
    if made.backward is not None:
        found.append(("backward", list(boxes(made.backward, "backward", waits))))
    return found


def bare(name: str, mesh: dict[str, int]) -> Plan:
    """A named plan without buckets and without anything that is started early."""
    return replace(preset(name, mesh), bucket=0, prefetch=0)


ROWS, SEQUENCES = torch.randn(8, 32), torch.randn(2, 16, 32)


def joint() -> list[Drawing]:
    whole = program(Feedforward(), bare("single", {}), ROWS)
    row = list(boxes(whole.joint.module, "joint"))
    return [strip("model(x), and the backward of its loss: one graph, before anything is divided", [("", row)])]


def parameters() -> list[Drawing]:
    before, after = (
        program(Feedforward(), bare(name, mesh), ROWS) for name, mesh in (("single", {}), ("fsdp", {"dp": 2}))
    )
    return [strip("before: parameters are whole", halves_of(before)), strip("after: fsdp on 2 ranks", halves_of(after))]


def buckets() -> list[Drawing]:
    plan = bare("fsdp", {"dp": 2})
    before, after = (program(Feedforward(), each, ROWS) for each in (plan, replace(plan, bucket=1 << 20)))
    titles = ("before: a collective for each parameter", "after: one for those that share a bucket")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def schedule() -> list[Drawing]:
    plan = bare("fsdp", {"dp": 2})
    before, after = (program(Feedforward(), each, ROWS) for each in (plan, replace(plan, prefetch=2)))
    titles = ("before: each is awaited at once", "after: started early, awaited late, computation between")
    return [strip(title, halves_of(made, waits=True)) for title, made in zip(titles, (before, after), strict=True)]


def recomputation() -> list[Drawing]:
    plan = bare("single", {})
    again = replace(plan, recompute=(("act", ("gelu",)), ("mid", ("addmm",)), ("act2", ("gelu",))))
    before, after = (program(Feedforward(), each, ROWS) for each in (plan, again))
    titles = ("before: results are saved for backward", "after: backward computes some again (blue)")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def chunks() -> list[Drawing]:
    inputs = torch.randn(64, 32), torch.zeros(64, dtype=torch.long)
    plan = bare("single", {})
    before, after = (program(Scores(), each, *inputs) for each in (plan, replace(plan, loss_chunk=32 * 512 * 4)))
    titles = ("before: all scores at once", "after: two chunks of rows; backward computes their scores again")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def offload() -> list[Drawing]:
    plan = bare("single", {})
    before = program(Feedforward(), plan, ROWS)
    after = program(Feedforward(), replace(plan, offload=Offload(parameters=True)), ROWS)
    titles = ("before: parameters are on the device", "after: they are in host memory, and copied where they are used")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def tensor() -> list[Drawing]:
    made = [program(Attention(), bare(name, mesh), SEQUENCES) for name, mesh in PLANS_OF_OPERATORS]
    titles = (
        "before",
        "tp on 2 ranks: half of the heads and of the width on each",
        "tp+sp: activations between them too",
    )
    return [strip(title, halves_of(each)) for title, each in zip(titles, made, strict=True)]


PLANS_OF_OPERATORS = (("single", {}), ("tp", {"tp": 2}), ("tp+sp", {"tp": 2}))


def context() -> list[Drawing]:
    before = program(Attention(), bare("single", {}), SEQUENCES)
    after = program(Attention(), bare("cp", {"cp": 2}), SEQUENCES)
    titles = ("before: whole sequences", "after: cp on 2 ranks; keys and values go round")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def experts() -> list[Drawing]:
    x = torch.randn(4, 16, 16)
    before, after = (program(Experts(), bare(name, mesh), x) for name, mesh in (("single", {}), ("ep", {"ep": 2})))
    titles = ("before: all experts", "after: ep on 2 ranks; tokens go to the rank of their experts, and back")
    return [strip(title, halves_of(made)) for title, made in zip(titles, (before, after), strict=True)]


def pipeline() -> list[Drawing]:
    plan = replace(bare("pp", {"pp": 2}), pipeline=Pipeline(microbatches=2, schedule="1f1b", stages=("mid",), ranks=2))
    made = program(Feedforward(), plan, ROWS)
    before = program(Feedforward(), bare("single", {}), ROWS)
    stages = [
        (name.replace("/", ", "), [*boxes(gm, name.rpartition("/")[2]), *messages(gm)])
        for name, gm in made.graphs.items()
    ]
    return [strip("before", halves_of(before)), strip("after: graphs of two stages", stages)]


PICTURES: dict[str, Callable[[], list[Drawing]]] = {
    "joint": joint,
    "parameters": parameters,
    "buckets": buckets,
    "schedule": schedule,
    "recompute": recomputation,
    "chunks": chunks,
    "offload": offload,
    "tensor": tensor,
    "context": context,
    "experts": experts,
    "pipeline": pipeline,
}


def main() -> None:
    torch.manual_seed(0)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(document(name, [*draw(), legend()]), encoding="utf-8")


if __name__ == "__main__":
    main()
