"""Equal layers are traced once, and the graph is the one of the whole model, node for node."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import shardgraph
from shardgraph.capture import capture as room
from shardgraph.capture import captures, record
from shardgraph.capture.stacks import stacks_of
from shardgraph.ir import JointGraph
from shardgraph.passes.analysis.rows import Row
from shardgraph.plans.annotations.kinds import recompute
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.shards import named_shapes
from shardgraph.report.folding import NotPeriodicError, check_insertion, extend, find_stack, unlike
from shardgraph.report.treatments import treats_alike
from shardgraph.search import stages
from shardgraph.search.depths import Depths
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from tests.machines import toy_cluster

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.linear(self.norm(x))))


class Stack(nn.Module):
    """Blocks that all read a value from before them, and a parameter from outside."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x)
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x), number) * self.scale + shared
        return x

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x


class Alternating(Stack):
    """Every third layer is another one, by its number."""

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x.sin() if number % 3 == 2 else x


class OneIsOther(Stack):
    """What is done after a layer in the middle depends on its number, which is no attribute."""

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x.sin() if number == 5 else x


class MeanOfLayers(Stack):
    """The number of layers is a constant in the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / len(self.layers)


class Mirrored(Stack):
    """Each layer of the second half reads the output of its counterpart in the first, as in a U-Net."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x if number < 5 else x + outputs[9 - number])
            outputs.append(x)
        return x


class AllStates(Stack):
    """The outputs of all layers are results."""

    def forward(self, x: torch.Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states


class StatesAfterFirst(AllStates):
    """Likewise, after a layer before them."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.first(x))


class States:
    """What tensors of a call are kept in, as keys and values are for the next one."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.sums: dict[int, torch.Tensor] = {}

    def keep(self, number: int, x: torch.Tensor) -> None:
        self.seen.append(torch.relu(x))
        self.sums[number] = x.sum(-1)


class Views(States):
    """Views of something that is not returned, and one of something that is."""

    def keep(self, number: int, x: torch.Tensor) -> None:
        hidden, whole = x.sin(), torch.relu(x)
        self.seen += [hidden.t(), hidden[1:], whole, whole[1:]]


class KeepingBlock(Block):
    """Its number, which it reads, is where it keeps what it computes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor, states: States) -> torch.Tensor:
        states.keep(self.number, self.norm(x))
        return super().forward(x)


class Keeping(Stack):
    """Layers keep tensors in an object that is returned."""

    states: type[States] = States

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(KeepingBlock, range(layers)))

    def forward(self, x: torch.Tensor) -> Any:
        states = self.states()
        for layer in self.layers:
            x = layer(x, states)
        return torch.relu(x), states


class KeepingViews(Keeping):
    states = Views


class InOtherOrder(Keeping):
    """What one layer returns comes before what those before it do."""

    def forward(self, x: torch.Tensor) -> Any:
        x, states = super().forward(x)
        states.seen.insert(0, states.seen.pop(1))
        return x, states


class LacksOne(Keeping):
    """One layer's result is not returned."""

    def forward(self, x: torch.Tensor) -> Any:
        x, states = super().forward(x)
        del states.seen[5]
        return x, states


class Plain(Stack):
    """Blocks that read nothing but each other, so that the last one's backward is that of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x), number)
        return torch.relu(x)


class Halved(Plain):
    """Something is done between the layers, and after the last."""

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * 0.5


class PlainButThird(Plain):
    """What is done after the third layer depends on its number."""

    between = Alternating.between


class OfThreeOrMore(Plain):
    """A model that reads its third layer does not run with two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(self.layers[2]._modules) else x


class Marked(Plain):
    """A constant is set on the model, as models of ``transformers`` that are given labels do."""

    mark: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mark = "called"
        return super().forward(x)


class MarkedByOne(Plain):
    """One layer's number decides that a constant is set."""

    mark: Any = None

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if number == 5:
            self.mark = "five"
        return x


class KeepsOne(Plain):
    """What comes out of one layer is kept, which takes no operation."""

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if number == 5:
            self.kept = x
        return x


class Prints(Plain):
    """One layer's number decides that something is printed, in the middle of a line."""

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return (print("layer 5") or x) if number == 5 else x


class Weighted(Plain):
    """A tensor is made in Python for each layer, and one has another value: no operation nor its layout shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0] * 10
        self.weights[5] = 0.5

    def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * torch.tensor(self.weights[number])


class MarkedBlock(Block):
    """A constant is set on each layer."""

    mark: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mark = "called"
        return super().forward(x)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def of_blocks(kind: type[Stack] = Stack, change: Callable[[Any], Any] = lambda model: None) -> Callable[[], Case]:
    def make() -> Case:
        model = kind()
        change(model)
        return model, (X,), {}

    return make


def of_transformers(
    name: str, config: str, inputs: Callable[[], dict[str, Any]] | None = None, **sizes: Any
) -> Callable[[], Case]:
    def make() -> Case:
        transformers = pytest.importorskip("transformers")
        with torch.device("meta"):
            model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
        return model.train(), (), inputs() if inputs else {"input_ids": ids, "labels": ids}

    return make


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.zeros(2, 3, 32, 32, device="meta")}


def labelled_pixels() -> dict[str, Any]:
    return pixels() | {"labels": torch.zeros(2, dtype=torch.long, device="meta")}


def captions() -> dict[str, Any]:
    return pixels() | {"input_ids": torch.zeros(2, 6, dtype=torch.long, device="meta"), "return_loss": True}


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 100, "use_cache": False, "bos_token_id": 0}
NINE: dict[str, Any] = {**DECODER, "num_hidden_layers": 9, "eos_token_id": 0}

REPEATED: dict[str, Callable[[], Case]] = {
    "blocks": of_blocks(),
    "alternating": lambda: (Alternating(20), (X,), {}),
    "sequential": lambda: (nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Block() for _ in range(9)))), (X,), {}),
    "root": lambda: (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(9))), (X,), {}),
    "gradient of the input": lambda: (Stack(), (X.clone().requires_grad_(),), {}),
    "one dropout in the first half": of_blocks(change=lambda model: setattr(model.layers[1].dropout, "p", 0.2)),
    "one layer's parameter in all": of_blocks(
        change=lambda model: [setattr(each.linear, "weight", model.layers[0].linear.weight) for each in model.layers]
    ),
    "first layers frozen": of_blocks(change=lambda model: model.layers[:2].requires_grad_(False)),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 9),
        (torch.zeros(2, 6, 16),),
        {},
    ),
    "llama": of_transformers("LlamaForCausalLM", "LlamaConfig", **NINE),
    "llama with dropout": of_transformers("LlamaForCausalLM", "LlamaConfig", attention_dropout=0.1, **NINE),
    "llama with tied weights": of_transformers("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **NINE),
    "gpt2": of_transformers(
        "GPT2LMHeadModel", "GPT2Config", n_layer=9, n_embd=32, n_head=4, vocab_size=100, use_cache=False
    ),
    "bloom, with a torch.autograd.Function": of_transformers(
        "BloomForCausalLM", "BloomConfig", n_layer=9, n_head=4, hidden_size=32, vocab_size=100, use_cache=False
    ),
    "falcon, with tensors made in Python": of_transformers(
        "FalconForCausalLM",
        "FalconConfig",
        **{"num_hidden_layers": 9, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 100, "use_cache": False},
        **{"bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": of_transformers("BertForMaskedLM", "BertConfig", num_hidden_layers=9, vocab_size=100, **SMALL),
    "vit": of_transformers("ViTModel", "ViTConfig", pixels, num_hidden_layers=9, image_size=32, patch_size=8, **SMALL),
    "vit with labels, which sets its config": of_transformers(
        "ViTForImageClassification",
        "ViTConfig",
        labelled_pixels,
        **{"num_hidden_layers": 9, "image_size": 32, "patch_size": 8, "num_labels": 3, **SMALL},
    ),
    "clip, two stacks and a flag": of_transformers(
        "CLIPModel",
        "CLIPConfig",
        captions,
        text_config={"num_hidden_layers": 9, "vocab_size": 100, "eos_token_id": 0, **SMALL},
        vision_config={"num_hidden_layers": 10, "image_size": 32, "patch_size": 8, **SMALL},
    ),
    "a constant set on the model": of_blocks(Marked),
    "t5, two stacks": of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        **{"num_layers": 10, "num_decoder_layers": 9, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
        **{"vocab_size": 100, "use_cache": False, "decoder_start_token_id": 0},
    ),
    "mixtral": of_transformers(
        "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, experts_implementation="grouped_mm", **NINE
    ),
    "gemma2, two kinds of layers": of_transformers(
        "Gemma2ForCausalLM", "Gemma2Config", **{**NINE, "num_hidden_layers": 12, "head_dim": 8, "sliding_window": 8}
    ),
}

CACHE: dict[str, Any] = {**NINE, "use_cache": True}

REPEATED |= {
    "states that layers keep": of_blocks(Keeping),
    "views that layers keep": of_blocks(KeepingViews),
    "llama with a cache": of_transformers("LlamaForCausalLM", "LlamaConfig", **CACHE),
    "gpt2 with a cache": of_transformers(
        "GPT2LMHeadModel", "GPT2Config", n_layer=9, n_embd=32, n_head=4, vocab_size=100
    ),
    "mistral, whose cache has a tensor for each layer": of_transformers(
        "MistralForCausalLM", "MistralConfig", sliding_window=8, **CACHE
    ),
    "gemma2 with a cache": of_transformers(
        "Gemma2ForCausalLM", "Gemma2Config", **{**CACHE, "num_hidden_layers": 12, "head_dim": 8, "sliding_window": 8}
    ),
    "t5 with caches": of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        **{"num_layers": 10, "num_decoder_layers": 9, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
        **{"vocab_size": 100, "decoder_start_token_id": 0},
    ),
}

WHOLE: dict[str, Callable[[], Case]] = {
    "seven layers": lambda: (Stack(7), (X,), {}),
    "a number in the loop": of_blocks(OneIsOther),
    "the number of layers": of_blocks(MeanOfLayers),
    "mirrored": of_blocks(Mirrored),
    "a constant set for one layer": of_blocks(MarkedByOne),
    "a constant set on each layer": of_blocks(
        Plain, lambda model: setattr(model, "layers", nn.ModuleList(MarkedBlock() for _ in range(10)))
    ),
    "the output of one layer kept": of_blocks(KeepsOne),
    "one layer's number printed": of_blocks(Prints),
    "a tensor made in Python for one layer": of_blocks(Weighted),
    "all states": of_blocks(AllStates),
    "all states, also of what comes before": of_blocks(StatesAfterFirst),
    "what one layer returns comes first": of_blocks(InOtherOrder),
    "what one layer makes is not returned": of_blocks(LacksOne),
    "a number of one layer": of_blocks(Keeping, lambda model: setattr(model.layers[5], "number", 50)),
    "a dropout in the middle": of_blocks(change=lambda model: setattr(model.layers[5].dropout, "p", 0.2)),
    "a wider layer in the middle": of_blocks(change=lambda model: setattr(model.layers[5], "linear", Wide())),
    "one layer ten times": of_blocks(
        change=lambda model: setattr(model, "layers", nn.ModuleList([model.layers[0]] * 10))
    ),
    "a frozen layer in the middle": of_blocks(change=lambda model: model.layers[5].requires_grad_(False)),
}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def asked(case: Case, precision: Precision, annotations: Any) -> room.Asked:
    _, *call = case
    return room.Asked(*call, torch.device("cpu"), None, annotations, precision)


def of_whole(case: Case, precision: Precision = AS_STORED, annotations: Any = ()) -> JointGraph:
    """The graph of a trace of the whole model."""
    return room._traced(case[0], asked(case, precision, annotations))[0]


def of_few(case: Case, precision: Precision = AS_STORED, annotations: Any = ()) -> JointGraph | None:
    """The graph from a trace of few layers, if it was made so."""
    what = asked(case, precision, annotations)
    return room.from_few_layers(
        case[0], lambda few: room._traced(few, what), lambda few, stacks: room._recorded(few, stacks, what)
    )


def written(gm: fx.GraphModule) -> list[Any]:
    """All that a graph says, without what differs between two traces: addresses, and the first sequence number."""
    first = min((node.meta["seq_nr"] for node in gm.graph.nodes if "seq_nr" in node.meta), default=0)

    def described(key: str, value: Any) -> Any:
        if key == "val":
            leaves = pytree.tree_leaves(value)
            return [(each.shape, each.stride(), each.dtype) if torch.is_tensor(each) else each for each in leaves]
        if key.endswith("nn_module_stack"):
            return list(value.values())
        return value - first if key == "seq_nr" else value

    def constant(node: fx.Node) -> Any:
        return getattr(gm, str(node.target)) if node.op == "get_attr" else None

    return [
        (node.name, node.op, str(node.target), str(constant(node)), str(node.args), str(node.kwargs), [
            (key, described(key, value)) for key, value in sorted(node.meta.items())
        ])
        for node in gm.graph.nodes
    ]  # fmt: skip


@pytest.mark.quick("root", "blocks", "a constant*")
@pytest.mark.parametrize("name", REPEATED)
def test_the_graph_is_the_one_of_the_whole_model(name):
    case = REPEATED[name]()
    few, whole = of_few(case), of_whole(case)
    assert few is not None
    for one, other in zip(written(few.module), written(whole.module), strict=True):
        assert one == other
    assert (few.aliases, few.out_spec) == (whole.aliases, whole.out_spec)
    assert few.attributes == whole.attributes


def test_the_forward_alone_is_the_one_of_the_whole_model():
    case = REPEATED["sequential"]()
    with torch.no_grad():
        few = of_few(case)
        assert few is not None and written(few.module) == written(of_whole(case).module)


@pytest.mark.slow
def test_in_mixed_precision_it_is_the_one_of_the_whole_model():
    case, precision = REPEATED["blocks"](), Precision(parameters="bfloat16")
    few = of_few(case, precision)
    assert few is not None and written(few.module) == written(of_whole(case, precision).module)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_are_not_equal_are_all_traced(name):
    assert of_few(WHOLE[name]()) is None


def test_a_hook_that_only_one_layer_has_is_traced():
    case, calls = Stack(), []
    case.layers[5].register_forward_hook(lambda *_: calls.append(1))  # no operation shows it
    assert of_few((case, (X,), {})) is None


def test_what_forward_sets_for_one_of_many_layers_is_set():
    model = MarkedByOne()
    sharded = shardgraph.compile(model, "single", example_inputs=(X,), progress=False)
    assert sharded.mark is None
    sharded(X)
    assert sharded.mark == "five"


def test_what_forward_prints_for_one_of_many_layers_is_refused():
    with pytest.raises(shardgraph.CaptureError, match=r"forward calls print.*\n.*in between"):
        shardgraph.compile(Prints(), "single", example_inputs=(X,), progress=False)


def test_a_debugger_is_there_again_after_a_capture():
    def debugger(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        assert of_few(REPEATED["blocks"]()) is not None
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)


def _first_is_marked() -> nn.Module:
    """What the tracer reads of the first layer differs, and changes no operation."""

    class Marked(Block):
        first = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(+x if self.first else x)

    model = Plain(40)
    model.layers = nn.ModuleList(Marked() for _ in range(40))
    model.layers[0].first = True
    return model


@pytest.mark.parametrize(
    ("model", "traced"),
    [(lambda: Plain(40), [2]), (lambda: Stack(40), [4]), (_first_is_marked, [2, 4])],
    ids=["alike", "gradients of what all layers read", "alike but for what is read of the first"],
)
def test_layers_that_are_left_out_are_not_traced(model, traced, monkeypatch):
    layers, trace = [], room._traced
    monkeypatch.setattr(room, "_traced", lambda model, *rest: layers.append(len(model.layers)) or trace(model, *rest))
    room.capture(model(), (X,), {}, device=torch.device("cpu"))
    assert layers == traced


def test_the_record_of_equal_operations_is_that_of_running_each(monkeypatch):
    asked = room.Asked((X,), {}, torch.device("cpu"), None, (), AS_STORED)

    def segments():
        model = Stack()
        return [vars(each) for each in room._recorded(model, stacks_of(model), asked).segments]

    made, again = [], record.again
    monkeypatch.setattr(record, "again", lambda *given: made.append(given) or again(*given))
    recalled, runs = segments(), len(made)
    monkeypatch.setattr(record, "again", lambda *given: made.append(given) and None)
    assert segments() == recalled and 0 < runs < (len(made) - runs) / 2


CHANGES: dict[str, Callable[[Stack], Any]] = {
    "an attribute": lambda model: setattr(model.layers[6].dropout, "p", 0.5),
    "a mode": lambda model: model.layers[6].eval(),
    "a hook": lambda model: model.layers[6].linear.register_forward_hook(lambda *_: None),
    "a layer": lambda model: model.layers.append(Block()),
    "the last layer": lambda model: setattr(model.layers[9].dropout, "p", 0.5),
    "a module": lambda model: setattr(model.layers[6], "linear", nn.Identity()),
}


@pytest.mark.parametrize("kind", [Stack, Plain, Keeping])  # of which four layers are traced, and two
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_layer_that_was_not_traced_makes_another_program(change, kind):
    model = kind()
    guards = room.capture(model, (X,), {}, device=torch.device("cpu")).take_guards(model)
    assert guards.hold, guards.failing
    CHANGES[change](model)
    assert not guards.hold


def test_the_number_of_a_layer_that_was_not_traced_is_guarded():
    model = Keeping()
    guards = room.capture(model, (X,), {}, device=torch.device("cpu")).take_guards(model)
    assert guards.hold, guards.failing
    model.layers[6].number = 7
    assert not guards.hold and "layers.6.number == 6" in guards.failing


def test_a_hook_of_a_layer_after_those_that_are_left_out_is_guarded():
    model = Stack()
    hook = model.layers[7].linear.register_forward_hook(lambda module, args, out: out + 1)
    assert of_few((model, (X,), {})) is not None
    guards = room.capture(model, (X,), {}, device=torch.device("cpu")).take_guards(model)
    assert guards.hold, guards.failing
    hook.remove()
    assert not guards.hold


def test_numbers_from_the_rows_are_those_of_all_layers():
    class OfRows(Stack):
        def between(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return x / len(x)

    joint = room.capture(OfRows(), (X,), {}, device=torch.device("cpu"))
    numbers = joint.row_numbers()
    assert numbers is not None and len(numbers) == 10
    assert all(math.isclose(each.longer, 5) for each in numbers)


@pytest.mark.parametrize("kind", [Stack, Plain, KeepingViews])
def test_the_program_trains_like_the_original(kind):
    model = kind()
    assert of_few((model, (X,), {})) is not None
    assert shardgraph.verify(model, (X,), "fsdp", world_size=2, steps=3).ok


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "schedule"), [("pp", "zbv"), ("pp+fsdp", "1f1b"), ("pp+zero2", "zbv")])
@pytest.mark.parametrize("kind", [lambda: nn.Sequential(*(Block() for _ in range(12))), Plain], ids=["four", "two"])
def test_a_pipeline_takes_the_memory_that_it_takes_of_a_whole_trace(plan, schedule, kind, monkeypatch):
    mesh = {"pp": 2} if plan == "pp" else {"pp": 2, "dp": 2}

    def found() -> Any:
        pipeline = shardgraph.Pipeline(4, schedule=schedule)
        model, cluster = kind(), shardgraph.Cluster.of("H100")
        joint = room.capture(model, (X,), {}, device=torch.device("cpu"))
        wanted = shardgraph.preset(plan, mesh, pipeline)
        blocks = stages._blocks_of(joint, wanted, named_shapes(model), cluster)
        return blocks, str(shardgraph.analyze(model, (X,), wanted, cluster=cluster, fold=False))

    of_few_layers = found()
    monkeypatch.setattr(room, "from_few_layers", lambda *_: None)
    assert of_few_layers == found()


class ViewWithGradient(nn.Module):
    """As encoders of sound do for checkpointing: autograd makes the view's function anew when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None]
        h.requires_grad = True
        for layer in self.layers:
            h = layer(h)
        return h


@pytest.mark.timeout(60)
def test_a_view_that_autograd_is_asked_about_while_it_records_does_not_wait_for_itself():
    with pytest.raises(shardgraph.CaptureError, match=r"requires_grad"):
        shardgraph.compile(ViewWithGradient(), "single", example_inputs=(torch.ones(2, 4),), progress=False)


# -- programs of several depths ----------------------------------------------------------------------------------------


def test_programs_of_all_plans_and_depths_are_made_of_one_trace(monkeypatch):
    traced, trace = [], captures.remembered
    monkeypatch.setattr(captures, "remembered", lambda *args, **kwargs: traced.append(args) or trace(*args, **kwargs))
    model, mesh = Stack(12).to("meta"), (("dp", 2),)
    stack = find_stack(model)
    assert stack is not None
    depths, programs = Depths(model, stack), []
    for plan in ("fsdp", "zero2"):
        question = Question.of(model, plan, lambda plan: mesh, cluster=toy_cluster()).about(
            (torch.zeros(2, 8, device="meta"),), {}
        )
        source = Source(question, depths=depths)
        programs += [source.at(depths, layers, question.plan).program() for layers in (4, 5, 4, 6)]
    assert len(traced) == 1
    assert len({id(program.context.values) for program in programs}) == 1, "values of new nodes are computed once"


FOUR: dict[str, tuple[Callable[[], Case], int]] = {
    "plain": (of_blocks(Plain), 2),
    "llama": (REPEATED["llama"], 2),
    "llama with a cache": (REPEATED["llama with a cache"], 2),
    "gpt2": (REPEATED["gpt2"], 2),
    "bert": (REPEATED["bert"], 2),
    "vit with labels": (REPEATED["vit with labels, which sets its config"], 2),
    "clip, which returns the last layer's output": (REPEATED["clip, two stacks and a flag"], 4),
    "gradients of what all layers read": (of_blocks(Stack), 4),
    "between the layers": (of_blocks(Halved), 4),
    "a number in the loop": (of_blocks(PlainButThird), 4),
    "a dropout in the middle": (of_blocks(Plain, lambda model: setattr(model.layers[2].dropout, "p", 0.0)), 4),
    "a third layer by its number": (of_blocks(OfThreeOrMore), 4),
    "another first layer": (of_blocks(Plain, lambda model: setattr(model.layers[0].dropout, "p", 0.0)), 4),
}


@pytest.mark.quick("plain", "a *", "another*")
@pytest.mark.parametrize("name", FOUR)
def test_four_layers_are_those_of_a_trace_of_them_made_of_one_of_two_if_all_are_alike(name, monkeypatch):
    make, layers = FOUR[name]
    (model, args, kwargs), traced, trace = make(), [], captures.remembered
    monkeypatch.setattr(captures, "remembered", lambda *args, **kwargs: traced.append(args) or trace(*args, **kwargs))
    stack = find_stack(model)
    assert stack is not None
    depths, plan = Depths(model, stack), shardgraph.preset("fsdp", {"dp": 2})
    made = depths.captures(4).joint(captures.Call(depths.model(4), args, kwargs), plan)
    whole = captures.Captures().joint(captures.Call(depths.model(4), args, kwargs), plan)
    for one, other in zip(written(made.module), written(whole.module), strict=True):
        assert one == other
    assert len(traced[-2][0].model.get_submodule(stack.path)) == layers


def rows(*operations: str) -> list[Row]:
    fixed: dict[str, Any] = {"half": "forward", "kind": "pointwise", "read": 0, "written": 0, "seconds": 1.0}
    return [Row(node=each, operation=each, label=each, memory={}, **fixed) for each in operations]


@pytest.mark.parametrize("more", ["abc", "ab", "bab"])
def test_two_programs_of_which_one_does_not_insert_a_layer_are_not_folded(more):
    check_insertion(rows(*"ab"), rows(*"abb"))
    with pytest.raises(NotPeriodicError, match="one more layer does not insert"):
        check_insertion(rows(*"ab"), rows(*more))


def live(layers: int, state: Callable[[int], int]) -> list[Row]:
    """The rows of a program that saves 3 bytes in each layer, and in which ``state(layers)`` bytes are always live."""
    saved = [1 + 3 * min(position, layers) for position in range(layers + 2)]
    named = enumerate(rows("in", *["layer"] * layers, "out"))
    return [
        row.but(memory={"parameters": state(layers), "saved": saved[at]}, node=f"{row.node}{at}") for at, row in named
    ]


def test_two_programs_tell_the_rows_of_a_deep_one():
    few = [live(layers, lambda layers: 10 * layers) for layers in (5, 6, 7)]
    whole = live(20, lambda layers: 10 * layers)
    for programs, least in ((few[1:], 6), (few, 5)):
        extended = extend(programs, least, 20)
        assert [row.memory for row in extended] == [row.memory for row in whole]
        assert [row.operation for row in extended] == [row.operation for row in whole]
        assert len({row.node for row in extended}) == len(whole)


def test_a_third_program_tells_whether_layers_that_were_traced_one_by_one_are_alike():
    few = [live(layers, lambda layers: 10 * layers**2) for layers in (5, 6, 7)]
    with pytest.raises(NotPeriodicError, match="do not grow evenly"):
        extend(few, 5, 20)


# -- unlike first layers, and layers of several kinds in turns ---------------------------------------------------------


def _of_kinds(kinds: str) -> Chain:
    """A block for each letter, whose width its kind is."""
    return Chain(
        nn.ModuleList(nn.Sequential(Block(), nn.Linear(8, ord(kind)), nn.Linear(ord(kind), 8)) for kind in kinds)
    )


@pytest.mark.parametrize(
    ("kinds", "head", "period"),
    [
        (8 * "a", 0, 1),
        ("bcb" + 8 * "a", 3, 1),
        ("b" + 6 * "ba", 1, 2),
        ("a" + 6 * "ba", 1, 2),  # rather than a unit that is cut off
        ("c" + 6 * "aab", 1, 3),
        (7 * "a", None, None),
        (5 * "ab", None, None),
        (8 * "a" + "b", None, None),
        ("abcdefghijklmnop", None, None),
    ],
)
def test_a_stack_has_units_of_the_fewest_kinds_behind_what_is_unlike_them(kinds, head, period):
    stack = find_stack(_of_kinds(kinds))
    assert (stack and (stack.head, stack.period)) == (None if head is None else (head, period))
    assert stack is None or stack.layers == len(kinds) == stack.up_to(stack.units)


def test_a_stack_has_units_of_layers_that_their_attributes_tell_apart_in_turns():
    model, _ = _widened(*range(0, 20, 2))
    stack = find_stack(model)
    assert stack is not None and (stack.head, stack.period) == (0, 2) and unlike(model, stack) == ""
    model.layers[14].wide = False
    stack = find_stack(model)
    assert (
        stack is not None and stack.period == 1 and unlike(model, stack).startswith("wide of layers 2, 4, 6 and 5 more")
    )


def test_an_attribute_that_some_layers_lack_tells_them_apart():
    model, _ = _widened()
    model.layers[7].other = True
    stack = find_stack(model)
    assert stack is not None and unlike(model, stack) == "other, which some layers lack"


def test_a_plan_that_names_first_layers_or_one_of_the_kinds_treats_units_alike():
    kinds, annotated = "bb" + 7 * "ca", shardgraph.preset("fsdp", {"dp": 2})
    model = _of_kinds(kinds)
    stack = find_stack(model)
    assert stack is not None

    def treated(*layers: str) -> bool:
        annotations = tuple((f"layers.{pattern}", recompute()) for pattern in layers)
        return treats_alike(replace(annotated, annotations=annotations), model, stack)

    assert treated("0") and treated("1", "*[02468]") and treated("*")
    assert not treated("3") and not treated("[2-7]")


SEVERAL: dict[str, Callable[[], Case]] = {
    "other first layers": lambda: (_of_kinds("bcb" + 8 * "a"), (X,), {}),
    "two kinds in turns": lambda: (_of_kinds(6 * "ab"), (X,), {}),
    "deepseek, whose first layers are dense": of_transformers(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", num_hidden_layers=10, first_k_dense_replace=2, hidden_size=32,
        intermediate_size=64, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, vocab_size=100, use_cache=False,
    ),
    "t5, whose first layer has the positions": of_transformers(
        "T5ForConditionalGeneration", "T5Config", num_layers=9, num_decoder_layers=2, d_model=32, d_ff=64, d_kv=8,
        num_heads=4, vocab_size=100, use_cache=False, decoder_start_token_id=0,
    ),
    "gemma2, two kinds of layers": REPEATED["gemma2, two kinds of layers"],
    "gpt-oss, two kinds of attention": of_transformers(
        "GptOssForCausalLM", "GptOssConfig", num_hidden_layers=12, hidden_size=32, intermediate_size=32, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=100,
        sliding_window=4, use_cache=False,
    ),
}  # fmt: skip


@pytest.mark.quick("other*", "two*")
@pytest.mark.parametrize("name", SEVERAL)
def test_more_units_are_those_of_a_trace_of_them_made_of_one_of_four(name, monkeypatch):
    (model, args, kwargs), traced, trace = SEVERAL[name](), [], captures.remembered
    monkeypatch.setattr(captures, "remembered", lambda *args, **kwargs: traced.append(args) or trace(*args, **kwargs))
    stack = find_stack(model)
    assert stack is not None and (stack.head or stack.period > 1)
    depths, plan = Depths(model, stack), shardgraph.preset("fsdp", {"dp": 2})
    made = depths.captures(5).joint(captures.Call(depths.model(5), args, kwargs), plan)
    assert [len(asked[0].model.get_submodule(stack.path)) for asked in traced] == [stack.up_to(4)]
    whole = captures.Captures().joint(captures.Call(depths.model(5), args, kwargs), plan)
    for one, other in zip(written(made.module), written(whole.module), strict=True):
        assert one == other


# -- layers of one form that their attributes tell apart -------------------------------------------------------


class Widened(Block):
    """A block that some attribute makes compute more."""

    def __init__(self, number: int, wide: bool) -> None:
        super().__init__(64)
        self.number, self.wide = number, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return torch.relu(h @ h.transpose(0, 1)) @ h if self.wide else h


def _widened(*wide: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    layers = nn.ModuleList(Widened(number, number in wide) for number in range(20))
    return Chain(layers), (torch.randn(16, 64),)


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_an_analysis_does_not_take_layers_with_other_attributes_for_equal():
    model, call = _widened(14, 19)
    found = [shardgraph.analyze(model, call, "single", cluster=toy_cluster(), fold=fold) for fold in (True, False)]
    assert found[0].time == found[1].time and found[0].peak_memory == found[1].peak_memory


def test_attributes_that_count_layers_or_are_rates_are_alike_and_others_are_told():
    model, _ = _widened(14, 19)
    stack = find_stack(model)
    assert stack is not None and unlike(model, stack) == "wide of layers 14, 19"
    model, _ = _widened(0)
    for number, layer in enumerate(model.layers):
        layer.dropout.p = 0.01 * (number + 1)
    assert unlike(model, stack) == ""


@pytest.mark.slow
def test_a_search_says_which_layers_it_prices_as_others():
    model, call = _widened(14, 19)
    plan = shardgraph.plan(model, call, cluster=toy_cluster(), devices=2, global_batch=32)
    assert "as if all layers of layers were like the second, though they differ in wide of layers 14, 19" in " ".join(
        plan.explain().split()
    )
