"""Initialisation of models on ``meta``: the values of the unsharded initialisation, a few parameters at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardgraph.errors import InitializationError
from shardgraph.module.materialize import is_meta, materialize
from shardgraph.runtime.measure import PeakMemory

CPU = torch.device("cpu")


class Shelf:
    """What a caller does with parameters: keeps copies, and counts the ways they travel."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.stored: list[str] = []
        self.fetched: list[str] = []

    def store(self, fqn: str, full: Tensor) -> None:
        self.stored.append(fqn)
        self.values[fqn] = full.clone()

    def fetch(self, fqn: str) -> Tensor:
        self.fetched.append(fqn)
        return self.values[fqn].clone()


def run(model: nn.Module, seed: int = 7) -> Shelf:
    shelf = Shelf()
    torch.manual_seed(seed)
    materialize(model, CPU, store=shelf.store, fetch=shelf.fetch)
    return shelf


def reference(model: nn.Module, seed: int = 7) -> nn.Module:
    """The protocol, on a copy with real memory full of garbage that no comparison forgives."""
    memory: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.full_like(tensor.data, torch.nan if tensor.is_floating_point() else 77, device="cpu")
        memory[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    real = copy.deepcopy(model, memory)
    torch.manual_seed(seed)
    with torch.no_grad():
        if hasattr(real, "init_weights"):
            real.init_weights()
        else:
            for module in real.modules():
                if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    (getattr(module, "reset_parameters", None) or module._reset_parameters)()
    return real


def check_equals_reference(model: nn.Module) -> Shelf:
    """Parameters as stored, buffers as placed, and the random numbers drawn."""
    real = reference(model)
    after = torch.random.get_rng_state()
    shelf = run(model)
    assert torch.equal(torch.random.get_rng_state(), after)
    expected = dict(real.named_parameters())
    assert set(shelf.values) == set(expected)
    for fqn, value in shelf.values.items():
        torch.testing.assert_close(value, expected[fqn].detach(), rtol=0, atol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
    buffers = dict(model.named_buffers())
    for fqn, buffer in real.named_buffers():
        torch.testing.assert_close(buffers[fqn], buffer, rtol=0, atol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
    return shelf


TORCH_MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "embedding with padding": lambda: nn.Embedding(7, 4, padding_idx=2),
    "layer norm": lambda: nn.LayerNorm(6),
    "convolution": lambda: nn.Conv2d(3, 8, 3, groups=1),
    "transposed convolution": lambda: nn.ConvTranspose1d(4, 2, 3),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "lstm": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True),
    "prelu": lambda: nn.PReLU(),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention with separate projections": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "bfloat16": lambda: nn.Linear(40, 30, dtype=torch.bfloat16),
    "no elements": lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(0, 3)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("kind", TORCH_MODULES)
def test_modules_of_torch_have_their_own_values(kind: str) -> None:
    with torch.device("meta"):
        model = TORCH_MODULES[kind]()
    check_equals_reference(model)


class Model(nn.Module):
    """Sixteen square layers; a test gives it its ``init_weights``."""

    def __init__(self, layers: int = 16, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(width, width, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.empty(width), persistent=False)


def initialised_by(init_weights: Callable[[Model], None], **sizes: int) -> Model:
    with torch.device("meta"):
        return type("Model", (Model,), {"init_weights": init_weights})(**sizes)


@torch.no_grad()
def write_everything(self: Model) -> None:
    nn.init.trunc_normal_(self.embed.weight, std=0.02, a=-0.03, b=0.03)
    self.embed.weight[self.embed.padding_idx].zero_()
    for layer in self.layers:
        nn.init.orthogonal_(layer.weight)
        layer.bias.zero_()
    self.scale.copy_(torch.linspace(0, 1, len(self.scale)))
    self.table.copy_(torch.arange(len(self.table)).float())


@torch.no_grad()
def write_in_other_ways(self: Model) -> None:
    write_everything(self)
    first, second, third, fourth, fifth, sixth, seventh, eighth = self.layers[:8]
    first.weight.data.normal_()
    second.weight.data = torch.randn(second.weight.shape)
    third.weight[:3].normal_().mul_(2)
    fourth.weight[torch.arange(4), 1] = 5.0
    fifth.weight[fifth.weight > 0] = 0
    torch.eye(*sixth.weight.shape, out=sixth.weight)
    nn.init.sparse_(seventh.weight, 0.5)
    eighth.weight.copy_(torch.full_like(eighth.weight, float(first.weight.norm())) + first.weight.t())


@torch.no_grad()
def scale_everything_at_the_end(self: Model) -> None:
    write_everything(self)
    for parameter in self.parameters():
        parameter.mul_(0.5)


@torch.no_grad()
def write_through_old_views(self: Model) -> None:
    views = [layer.weight.data[1:] for layer in self.layers]
    write_everything(self)
    for view in views:
        view.fill_(3)


@torch.no_grad()
def tie_and_replace(self: Model) -> None:
    write_everything(self)
    self.layers[0].weight = self.layers[1].weight
    self.layers[2].bias = nn.Parameter(torch.ones_like(self.layers[2].bias))
    self.embed.weight = self.layers[3].weight


@torch.no_grad()
def make_buffer_on_its_device(self: Model) -> None:
    write_everything(self)
    with torch.device(self.table.device):
        self.table = torch.arange(3).float()


@pytest.mark.parametrize(
    "init_weights",
    [
        write_everything,
        write_in_other_ways,
        scale_everything_at_the_end,
        write_through_old_views,
        tie_and_replace,
        make_buffer_on_its_device,
    ],
    ids=lambda f: f.__name__,
)
def test_init_weights_has_its_own_values(init_weights: Callable[[Model], None]) -> None:
    model = initialised_by(init_weights)
    real = reference(model)
    shelf = run(model)
    for fqn, value in real.named_parameters():
        torch.testing.assert_close(shelf.values[fqn], value.detach(), rtol=0, atol=0)
    torch.testing.assert_close(model.table, real.table, rtol=0, atol=0)


def test_a_parameter_written_in_one_go_is_stored_once_and_never_fetched() -> None:
    shelf = run(initialised_by(write_everything))
    assert len(shelf.stored) == len(set(shelf.stored))
    assert shelf.fetched == []


def test_a_parameter_touched_again_is_fetched_once_and_stored_again() -> None:
    shelf = run(initialised_by(scale_everything_at_the_end))
    assert shelf.stored.count("embed.weight") == 2
    assert shelf.fetched.count("embed.weight") == 1


def test_tied_parameters_are_stored_once_under_their_first_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    assert sorted(check_equals_reference(model).stored) == ["0.bias", "0.weight", "1.bias"]


def test_parameters_that_share_memory_keep_sharing_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.data.t())
    shelf = run(model)
    assert torch.equal(shelf.values["0.weight"], shelf.values["1.weight"].t())


@pytest.mark.parametrize("init_weights", [write_everything, scale_everything_at_the_end], ids=lambda f: f.__name__)
def test_the_peak_is_a_few_parameters_and_not_the_model(init_weights: Callable[[Model], None]) -> None:
    model = initialised_by(init_weights, layers=40, width=64)
    matrix = 64 * 64 * 4

    def fetch(fqn: str) -> Tensor:
        return torch.ones(model.get_parameter(fqn).shape)

    with PeakMemory() as memory:
        materialize(model, CPU, store=lambda fqn, full: None, fetch=fetch)
    assert matrix < memory.peak_bytes < 9 * matrix  # 4 whole parameters, and what orthogonal_ computes with
    assert 9 * matrix < 0.25 * sum(p.nbytes for p in model.parameters())


# -- transformers ----------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, pad_token_id=1
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4))


@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_models_of_transformers_have_their_own_values(build: Callable[[], nn.Module]) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build()
    shelf = check_equals_reference(model)
    assert shelf.fetched in ([], ["transformer.wte.weight"])  # tied: initialised as embedding and as head
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_tied_models_of_transformers_stay_tied() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = gpt2()
    shelf = run(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in shelf.values


def test_rotary_frequencies_are_those_of_a_model_built_on_cpu() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = llama()
    run(model)
    buffers = dict(llama().named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    for fqn, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[fqn]), fqn


def test_a_model_of_transformers_that_was_real_once_is_initialised_again() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        never_real = llama()
    assert all(map(torch.equal, run(llama().to("meta")).values.values(), run(never_real).values.values()))


def test_a_default_device_of_meta_does_not_reach_the_initialisation() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = llama()
        shelf = run(model)
    assert not any(value.is_meta for value in shelf.values.values())


# -- models that are partly real -------------------------------------------------------------------


def test_is_meta_sees_one_meta_buffer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not is_meta(model)
    model[1].running_mean = torch.empty(2, device="meta")
    assert is_meta(model)


@pytest.mark.parametrize("init_weights", [None, write_in_other_ways], ids=["reset_parameters", "init_weights"])
def test_what_is_real_already_is_left_alone(init_weights: Callable[[Model], None] | None) -> None:
    model = initialised_by(init_weights) if init_weights else nn.Sequential(nn.Linear(3, 3, device="meta"))
    layer = model.layers[0] if init_weights else model[0]
    weight = layer.weight = nn.Parameter(torch.full(layer.weight.shape, 9.0))
    shelf = run(model)
    assert layer.weight is weight
    assert (weight == 9).all()
    assert not any(value is weight for value in shelf.values.values())
    assert len(shelf.values) == sum(p.is_meta for p in model.parameters())


# -- what cannot be initialised --------------------------------------------------------------------


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("offset", torch.empty(3))


def test_a_module_without_initialisation_is_named_with_what_would_work() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Gain())
    with pytest.raises(InitializationError, match=r"'1.gain', '1.offset'.*reset_parameters.*initialize=False"):
        run(model)


def test_scaling_what_was_never_written_is_no_initialisation() -> None:
    def scale_only(self: Model) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(2)

    with pytest.raises(InitializationError, match=r"'scale', 'embed.weight'"):
        run(initialised_by(scale_only))


def test_a_helper_called_init_weights_is_refused() -> None:
    def helper(self: Model, module: nn.Module) -> None:
        module.reset_parameters()

    with pytest.raises(InitializationError, match=r"without arguments.*rename"):
        run(initialised_by(helper))


def test_a_value_computed_from_an_unregistered_meta_tensor_is_refused() -> None:
    with torch.device("meta"):
        lost = torch.arange(24.0)

    def copy_lost(self: Model) -> None:
        self.scale.data.copy_(lost)

    with pytest.raises(InitializationError, match=r"'scale'.*neither a parameter nor a buffer"):
        run(initialised_by(copy_lost))


def test_errors_of_the_users_initialisation_pass_through() -> None:
    def fail(self: Model) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(initialised_by(fail))
