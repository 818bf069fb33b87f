"""Captured graphs that are kept on disk: read at the next start if capturing would give the same, and only then."""

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardgraph
from shardgraph import torch_api
from shardgraph.cache import entries
from shardgraph.cache.graphs import graph_data, graph_of
from shardgraph.cache.values import NotStorable, Reader, Writer
from shardgraph.capture import remembered
from shardgraph.capture import remembered as graphs_on_disk
from shardgraph.capture.captures import Call, Captures
from shardgraph.ir import UnboundGraph
from shardgraph.module import remembered as programs_on_disk
from shardgraph.passes.lowering import lower
from shardgraph.plans.resolve import resolve_plan
from shardgraph.plans.shards import named_shapes
from shardgraph.search import remembered as search
from shardgraph.search.question import Question
from shardgraph.torch_api import FakeTensorMode

PLAN = resolve_plan("single", (("dp", 1),))
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """A cache of its own, and the list of the models that were captured: those that were not read from it."""
    monkeypatch.setenv("SHARDGRAPH_CACHE", str(tmp_path / "cache"))
    models, capture = [], remembered.capture

    def counting(model, *args, **kwargs):
        models.append(model)
        return capture(model, *args, **kwargs)

    monkeypatch.setattr(remembered, "capture", counting)
    return models


@pytest.fixture
def made(captured, monkeypatch):
    """The list of the programs that were lowered: those that were not read from the cache."""
    programs, lower = [], programs_on_disk.lower

    def counting(*args):
        programs.append(lower(*args))
        return programs[-1]

    monkeypatch.setattr(programs_on_disk, "lower", counting)
    return programs


def joint(model, *args, plan=PLAN, loss_fn=None, **kwargs):
    """The graph of a call, as at a new start."""
    return Captures().joint(Call(model, args, kwargs, loss_fn), plan)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, use_cache=False))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=1, use_cache=False))


def bert():
    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=32))


class Scaled(nn.Module):
    """With what models have: a number, dropout, a submodule."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.scale = nn.Linear(4, 4), nn.Dropout(0.5), 2.0

    def forward(self, x):
        return self.dropout(self.linear(x)) * self.scale


def text(graph):
    return str(graph.module.graph)


def written(graph):
    """A graph as data, with all that passes read."""
    return json.dumps(graph_data(graph.module, Writer()))


@pytest.mark.slow
@pytest.mark.parametrize("family", [gpt2, llama, bert])
def test_a_graph_read_from_disk_is_the_captured_one_node_for_node(family, captured):
    ids = torch.zeros(2, 8, dtype=torch.long)
    first = joint(family(), input_ids=ids, labels=ids)
    second = joint(family(), input_ids=ids, labels=ids)
    assert len(captured) == 1
    assert str(first.module.graph) == str(second.module.graph)
    assert written(first) == written(second)
    assert (first.out_spec, first.aliases, first.stored, first.rows) == (
        second.out_spec,
        second.aliases,
        second.stored,
        second.rows,
    )


def program(plan, make=Scaled, **options):
    """The program of a model under a plan, as at a new start."""
    return programs_on_disk.lowered(*asked(plan, make, **options))


def asked(plan, make, **options):
    """What a program follows from: the graph, the plan and the shapes."""
    ids = torch.zeros(2, 8, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids} if make is llama else {"x": torch.zeros(2, 4)}
    plan = replace(resolve_plan(plan, (("dp", 2), ("tp", 2)) if "tp" in plan else (("dp", 2),)), **options)
    return joint(make(), plan=plan, **call), plan, named_shapes(make())


@pytest.fixture
def kept(made, monkeypatch):
    """The path of the entry of a small program on disk, that was lowered, and it."""
    paths, write = [], entries.write
    monkeypatch.setattr(entries, "write", lambda path, *entry: paths.append(path) or write(path, *entry))
    lowered = program("fsdp")
    return paths[-1], lowered


def records(program):
    """What passes left beside the graphs, for later passes."""
    of_passes = ("fake_mode", "values", "values_on")
    context = {name: value for name, value in vars(program.context).items() if name not in of_passes}
    return context, program.parameters, program.actions, program.shapes


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "zero2+tp"])
def test_a_program_read_from_disk_is_the_lowered_one_node_for_node(plan, made):
    first, second = program(plan, llama), program(plan, llama)
    assert len(made) == 1
    known = second.digest, second.communication, second.reached
    assert known == (first.digest, first.communication, first.reached)
    assert second.text == first.text and records(second) == records(first)
    assert lower(*asked(plan, llama)).text == first.text  # of the graph that is on disk
    writers = Writer(), Writer()
    for name, gm in first.graphs.items():
        assert graph_data(gm, writers[0]) == graph_data(second.graphs[name], writers[1])
    local = [program.graph("local") for program in (first, second)]  # derived from what was read
    assert str(local[0].graph) == str(local[1].graph)


def test_a_program_on_disk_is_of_one_plan_mesh_and_version(made, monkeypatch):
    program("fsdp")
    program("zero2")
    program("fsdp", prefetch=3)
    program("fsdp+tp")
    monkeypatch.setattr(entries, "versions", lambda: ("2.99",))
    program("fsdp")
    assert len(made) == 5


@pytest.mark.parametrize("damage", ["cut", "foreign", "of another form"])
def test_a_program_on_disk_that_is_no_longer_one_is_lowered_again(damage, kept, made, caplog):
    path, first = kept
    parts, tensors = entries.decoded(path.read_bytes())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "foreign":
        entries.write(path, entries.encoded({**parts, "parameters": ["os:system", "reboot"]}, tensors))
    else:
        entries.write(path, entries.encoded({"result": 1}, []))
    assert program("fsdp").text == first.text and len(made) == 2 and "the program is made again" in caplog.text
    assert program("fsdp").text == first.text and len(made) == 2


def test_a_foreign_call_in_a_program_on_disk_is_refused(kept):
    path, _ = kept
    parts, tensors = entries.decoded(path.read_bytes())
    backward = parts["graph backward"]
    next(node for node in backward["nodes"] if node[0] == "call_function")[2] = "os:system"
    entries.write(path, entries.encoded({**parts, "graph backward": backward}, tensors))
    with pytest.raises(NotStorable, match="a call of os:system"):
        program("fsdp").graph("backward")


@pytest.mark.slow
def test_a_second_start_reads_backward_in_its_first_step(made, monkeypatch):
    ids = torch.zeros(2, 8, dtype=torch.long)

    def start():
        return shardgraph.compile(llama(), "single", example_kwargs={"input_ids": ids, "labels": ids})

    start()
    read, graph_of = [], programs_on_disk.graph_of
    for module in (programs_on_disk, graphs_on_disk):
        monkeypatch.setattr(module, "graph_of", lambda *entry: read.append(entry) or graph_of(*entry))
    sharded = start()
    assert len(made) == len(read) == 1  # forward, and not the captured graph
    sharded(input_ids=ids, labels=ids).loss.backward()
    assert len(read) == 2


def test_training_from_disk_equals(captured, made):
    def losses():
        torch.manual_seed(0)
        sharded = shardgraph.compile(gpt2(), "single")
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        found = []
        for step in range(3):
            ids = torch.full((2, 8), step)
            found.append(sharded.train_step(input_ids=ids, labels=ids).item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    cold = losses()
    count = len(captured), len(made)
    assert losses() == cold and (len(captured), len(made)) == count


CHANGES = {
    "an attribute": lambda model: setattr(model, "scale", 3.0),
    "the rate of a dropout": lambda model: setattr(model.dropout, "p", 0.1),
    "the mode": lambda model: model.eval(),
    "the mode of a submodule": lambda model: model.dropout.eval(),
    "a hook": lambda model: model.linear.register_forward_hook(lambda module, args, out: out + 1),
    "a forward of its own": lambda model: setattr(model.linear, "forward", torch.relu),
    "a frozen parameter": lambda model: model.linear.bias.requires_grad_(False),
    "tied parameters": lambda model: setattr(model, "again", model.linear),
    "another module": lambda model: setattr(model, "linear", nn.Linear(4, 4, bias=False)),
    "a dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured(change, captured):
    x = torch.zeros(2, 4)
    joint(Scaled(), x)
    joint(Scaled(), x)
    assert len(captured) == 1
    model = Scaled()
    CHANGES[change](model)
    joint(model, x.double() if change == "a dtype" else x)
    assert len(captured) == 2


@pytest.mark.slow
def test_another_call_is_captured(captured, monkeypatch):
    x = torch.zeros(2, 4)
    joint(Scaled(), x)
    joint(Scaled(), torch.zeros(3, 4))
    joint(Scaled(), x.clone().requires_grad_())
    joint(Scaled(), x, loss_fn=lambda output: output.sum())
    with torch.autocast("cpu", torch.bfloat16):
        joint(Scaled(), x)
    joint(Scaled(), x, plan=resolve_plan("single", (("dp", 1),), precision="bf16"))
    monkeypatch.setattr(entries, "versions", lambda: ("2.99",))
    joint(Scaled(), x)
    assert len(captured) == 7


MODULE = """
import torch
SCALE = {scale}
def helper(x):
    return x {operation} SCALE
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return helper(self.linear(x))
"""


@pytest.fixture
def loaded(tmp_path):
    """Loads a version of a user's file as the module that it is in the next process."""

    def load(scale=2, operation="*"):
        path = tmp_path / "users_model.py"
        path.write_text(MODULE.format(scale=scale, operation=operation))
        spec = importlib.util.spec_from_file_location("users_model", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["users_model"] = module
        exec(compile(path.read_text(), path, "exec"), vars(module))
        return module

    yield load
    sys.modules.pop("users_model", None)


@pytest.mark.parametrize("change", [{"scale": 3}, {"operation": "+"}])
def test_changed_source_is_captured(change, loaded, captured):
    x = torch.zeros(2, 4)
    joint(loaded().Model(), x)
    joint(loaded().Model(), x)
    assert len(captured) == 1
    assert text(joint(loaded(**change).Model(), x)) != text(joint(loaded().Model(), x))


def test_a_function_replaced_at_run_time_is_captured(loaded, captured):
    x = torch.zeros(2, 4)
    joint(loaded().Model(), x)
    module = loaded()
    module.helper = torch.relu
    assert "relu" in str(joint(module.Model(), x).module.graph) and len(captured) == 2
    module = loaded()
    module.Model.forward = lambda self, x: torch.tanh(x)
    assert "tanh" in str(joint(module.Model(), x).module.graph) and len(captured) == 3


def test_after_a_hit_a_change_of_the_model_is_seen_at_the_next_call(captured):
    x = torch.ones(2, 4)
    shardgraph.compile(Scaled().eval(), "single")(x)
    model = Scaled().eval()
    sharded = shardgraph.compile(model, "single")
    before = sharded(x)
    assert len(captured) == 1
    model.scale = 4.0
    assert torch.equal(sharded(x), 2 * before)
    model.linear.register_forward_hook(lambda module, args, out: 0 * out)
    assert not sharded(x).any()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale


def stack():
    """Ten equal layers, of which few are traced; among them is not layer 7."""
    return nn.Sequential(*(Block() for _ in range(10)))


def test_layers_that_were_not_traced_count(captured, monkeypatch):
    traced, trace = [], torch_api.trace

    def counting(model, *args):
        traced.append(len(model.model))
        return trace(model, *args)

    monkeypatch.setattr(torch_api, "trace", counting)
    x = torch.zeros(2, 4)
    first = joint(stack(), x)
    assert traced and max(traced) < 7
    assert written(joint(stack(), x)) == written(first) and len(captured) == 1
    model = stack()
    model[7].scale = 3.0
    joint(model, x)
    assert len(captured) == 2


def test_after_a_hit_a_change_of_a_layer_that_was_not_traced_is_seen_at_the_next_call(captured):
    x = torch.ones(2, 4)
    shardgraph.compile(stack(), "single")(x)
    model = stack()
    sharded = shardgraph.compile(model, "single")
    torch.testing.assert_close(sharded(x), model(x))
    assert len(captured) == 1
    model[7].scale = 0.5
    torch.testing.assert_close(sharded(x), model(x))
    model[7].linear.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(sharded(x), model(x))


@pytest.mark.slow
def test_a_decided_plan_is_remembered(captured, monkeypatch):
    decided, decide = [], search.answer

    def counting(question, captures):
        decided.append(question)
        return decide(question, captures)

    monkeypatch.setattr(search, "answer", counting)

    def plan(**options):
        question = Question.of(gpt2(), "auto", lambda _: (("dp", 2),), cluster="A100", **options)
        ids = torch.zeros(2, 8, dtype=torch.long)
        return search.remembered(question.about((), {"input_ids": ids, "labels": ids}), Captures())

    assert plan() == plan() and len(decided) == len(captured) == 1
    assert plan(memory="1GiB") == plan(memory="1GiB") and len(decided) == 2


def test_a_proof_is_remembered(captured, monkeypatch):
    programs, prove = [], programs_on_disk.prove

    def counting(program, **options):
        programs.append(program)
        return prove(program, **options)

    monkeypatch.setattr(programs_on_disk, "prove", counting)
    x = torch.zeros(2, 4)
    for _ in range(2):
        shardgraph.compile(Scaled(), "single", example_inputs=(x,))
        assert len(programs) == 1
    shardgraph.compile(Scaled(), "single", example_inputs=(x,), precision="bf16")
    assert len(programs) == 2


def entry_files():
    return sorted(entries.directory().glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_entry_is_ignored_and_written_again(damage, captured):
    x = torch.zeros(2, 4)
    first = joint(Scaled(), x)
    (path,) = entry_files()
    content = path.read_bytes()
    other = bytearray(content)
    other[-9] ^= 1
    path.write_bytes({"cut": content[:-20], "changed": bytes(other), "empty": b""}[damage])
    assert text(joint(Scaled(), x)) == text(first) and len(captured) == 2
    assert text(joint(Scaled(), x)) == text(first) and len(captured) == 2


def test_writers_at_once_leave_a_whole_entry(captured):
    path = entries.directory() / "entry.safetensors"
    with ThreadPoolExecutor(4) as pool:
        data = [entries.encoded({"which": [i] * 1000}, [torch.full((100,), i)]) for i in range(40)]
        list(pool.map(partial(entries.write, path), data))
    parts, (tensor,) = entries.decoded(path.read_bytes())
    assert parts["which"] == [int(tensor[0])] * 1000 and [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("target", ["os:system", "builtins:eval", "shardgraph.ir.graph:os", "operator:__class__"])
def test_a_graph_that_calls_something_foreign_is_refused(target):
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    data = graph_data(UnboundGraph(nn.Module(), graph), Writer())
    data["nodes"].insert(1, ["call_function", "bad", target, [], [], []])
    with pytest.raises(NotStorable, match="a call of"):
        graph_of(data, Reader(FakeTensorMode(), []))


def test_a_constant_that_a_hook_holds_counts_by_its_value(captured):
    count = []

    def with_hook(value):
        RemovableHandle.next_id = 0  # as in a new process
        model, held = Scaled(), torch.full((4,), value)
        model.linear.register_forward_hook(lambda module, args, out: out + held)
        return model

    for value in (1.0, 1.0, 2.0):
        joint(with_hook(value), torch.zeros(2, 4))
        count.append(len(captured))
    assert count == [1, 1, 2]


def test_what_cannot_be_described_is_not_kept(captured, caplog):
    model = Scaled()
    model.handle = iter([1])
    with caplog.at_level("INFO", "shardgraph"):
        joint(model, torch.zeros(2, 4))
    assert "list_iterator" in caplog.text and not entries.directory().exists()


def test_a_variable_of_the_environment_that_is_set_later_counts(captured, monkeypatch):
    def model():
        RemovableHandle.next_id = 0  # as in a new process
        found = Scaled()
        found.linear.register_forward_hook(lambda _, args, out: out * len(os.environ.get("FACTOR_OF_A_TEST", "no")))
        return found

    x = torch.zeros(2, 4)
    first = joint(model(), x)
    assert text(joint(model(), x)) == text(first) and len(captured) == 1
    monkeypatch.setenv("FACTOR_OF_A_TEST", "four")
    assert text(joint(model(), x)) != text(first) and len(captured) == 2


@torch.compiler.allow_in_graph
def untraced(x):
    return x * len(NAMES)


NAMES = ["HOME"]
ENVIRONMENT = os.environ
FORWARDS = {
    "a variable whose name is made at run time": (
        lambda x: x * len(os.environ[NAMES[0].upper()]),
        "environment",
    ),
    "one by a function": (lambda x: x * len(os.getenv(NAMES[0], "")), "environment"),
    "one by another name": (lambda x: x * len(ENVIRONMENT.get(NAMES[0], "")), "environment"),
    "whether there is one": (lambda x: x * 2 if NAMES[0] in ENVIRONMENT else x, "environment"),
    "a function that is not traced through": (lambda x: untraced(x), "not traced through"),
    "none of these": (lambda x: x * len(NAMES), ""),
}


@pytest.mark.parametrize("what", FORWARDS)
def test_what_a_trace_does_not_show_is_not_kept(what, captured, caplog):
    forward, reason = FORWARDS[what]
    model = Scaled()
    model.linear.register_forward_hook(lambda module, args, output: forward(output))
    with caplog.at_level("INFO", "shardgraph"):
        joint(model, torch.zeros(2, 4))
    assert reason in caplog.text and entries.directory().exists() == (not reason)


def test_a_function_whose_result_is_taken_as_a_constant_is_not_kept(captured, caplog):
    model = Scaled()
    model.linear.factor = torch.compiler.assume_constant_result(lambda: 2)
    model.linear.register_forward_hook(lambda module, args, output: output * module.factor())
    with caplog.at_level("INFO", "shardgraph"):
        joint(model, torch.zeros(2, 4))
    assert "taken as a constant" in caplog.text and not entries.directory().exists()


def test_the_oldest_entries_make_room(captured, monkeypatch):
    folder = entries.directory()
    for i in range(3):
        entries.write(folder / f"{i}.safetensors", entries.encoded({}, [torch.zeros(1000)]))
        os.utime(folder / f"{i}.safetensors", (i, i))
    monkeypatch.setattr(entries, "_MOST_BYTES", 10_000)
    entries.write(folder / "3.safetensors", entries.encoded({}, [torch.zeros(1000)]))
    assert [path.stem for path in entry_files()] == ["2", "3"]


@pytest.mark.parametrize(
    ("chosen", "directory"), [(None, None), ("", None), ("off", None), ("/somewhere", Path("/somewhere"))]
)
def test_nothing_is_kept_unless_a_directory_is_named(chosen, directory, monkeypatch):
    monkeypatch.delenv("SHARDGRAPH_CACHE")
    if chosen is not None:
        monkeypatch.setenv("SHARDGRAPH_CACHE", chosen)
    assert entries.directory() == directory


def test_the_device_of_a_rank_is_another_one_where_it_is_read():
    first, second, host = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    writer = Writer(first)
    with FakeTensorMode():
        text = [writer.write(each) for each in (first, host, second, torch.empty(2, device=first), torch.empty(2))]
    read = list(map(Reader(FakeTensorMode(), [], second).read, json.loads(json.dumps(text))))
    assert [getattr(each, "device", each) for each in read] == [second, host, second, second, host]
    with pytest.raises(NotStorable, match="a device of another rank"):
        Reader(FakeTensorMode(), []).read(text[0])
