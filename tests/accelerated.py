"""What each rank does in the tests of Accelerate: one training loop, with Accelerate's own accelerator or ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.trainers.accelerate import ShardGraphAccelerator
from tests.standing import environment

LENGTH, WORDS = 8, 32
Batches = list[dict[str, torch.Tensor]]


def forget_accelerators() -> None:
    """Accelerators of a process share their state; the next one is the first again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator_of(plan: str, **arguments: Any) -> Accelerator:
    """Ours under the plan, or for ``"theirs"`` Accelerate's own."""
    forget_accelerators()
    arguments = {"cpu": True, **arguments}
    return Accelerator(**arguments) if plan == "theirs" else ShardGraphAccelerator(plan, **arguments)


class Net(nn.Module):
    """Two layers, in double precision, so that what differs is no rounding."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        self.register_buffer("flags", torch.tensor([bool(seed), True]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": (output - y).square().mean(), "output": output}


def points(number: int, dtype: torch.dtype = torch.float64) -> Batches:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(number, 5, generator=generator, dtype=torch.float64).to(dtype)
    return [{"x": row[:3], "y": row[3:]} for row in values]


def language_model(seed: int = 0) -> GPT2LMHeadModel:
    """One layer with tied embeddings, without dropout, in double precision."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **dropout, loss_type="ForCausalLM")).double()


def sentences(number: int) -> Batches:
    rows = torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class Run:
    """A model, its optimizer, data and schedule, prepared: the script of Accelerate's manual."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        examples: Batches,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        self.accelerator = accelerator
        made = optimizer(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 4, 0.5)
        data = DataLoader(examples, batch_size=2)
        self.model, self.optimizer, self.data, self.scheduler = accelerator.prepare(model, made, data, scheduler)

    def train(self, first: int = 0, last: int | None = None) -> list[float]:
        """Train with some of the batches; returns each loss and, after it, the norm of the gradients of each step."""
        found = []
        for batch in list(self.data)[first:last]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch)["loss"]
                self.accelerator.backward(loss)
                found.append(loss.item())
                if self.accelerator.sync_gradients:
                    found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return found

    def weights(self) -> list[torch.Tensor]:
        """Whole, on every rank."""
        values = [parameter.detach() for parameter in self.model.parameters()]
        return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def trains(plan: str, of_language: bool, accumulated: int) -> tuple[list[float], list[torch.Tensor]]:
    options = {"options": {"mesh": {"dp_replicate": 2, "dp_shard": 2}}} if plan == "hsdp" else {}
    accelerator = accelerator_of(plan, gradient_accumulation_steps=accumulated, **options)
    run = Run(accelerator, *((language_model(), sentences(16)) if of_language else (Net(), points(16))))
    return run.train(), run.weights()


def takes_weights_of_first_rank() -> tuple[list[torch.Tensor], list[bool]]:
    accelerator = accelerator_of("fsdp")
    run = Run(accelerator, Net(seed=dist.get_rank()), points(4))
    return run.weights(), run.model.flags.tolist()


def prepares_again() -> list[bool]:
    accelerator = accelerator_of("fsdp")
    original, compiled = Net(), shardgraph.compile(Net(), "zero2")
    model = accelerator.prepare(original)
    return [
        accelerator.prepare(model) is model,
        accelerator.prepare(original) is model,
        accelerator.unwrap_model(model) is original,
        accelerator.prepare(compiled) is compiled,
        accelerator._models == [model, compiled],
    ]


def continues(plan: str, then: str, folder: str, optimizer: str) -> list[list[float]]:
    """The losses after a state was saved: of the run that saved it, and of another that loads it."""
    make = _OPTIMIZERS[optimizer]
    accelerator = accelerator_of(plan, gradient_accumulation_steps=2)
    first = Run(accelerator, language_model(), sentences(32), make)
    first.train(last=4)
    accelerator.save_state(folder)
    unbroken = first.train(first=4)
    accelerator = accelerator_of(then, gradient_accumulation_steps=2)
    second = Run(accelerator, language_model(seed=2), sentences(32), make)
    accelerator.load_state(folder)
    return [unbroken, second.train(first=4)]


def _owned_adafactor(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return shardgraph.ShardedOptimizer(parameters, torch.optim.Adafactor, lr=lr)


_OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adafactor": _owned_adafactor}


def saves_models(folder: str) -> dict[str, Any]:
    """Models saved in each of Accelerate's ways, and what they should be."""
    accelerator = accelerator_of("fsdp")
    run = Run(accelerator, language_model(), sentences(8))
    run.train()
    state = dict(accelerator.get_state_dict(run.model))
    accelerator.save_model(run.model, f"{folder}/model")
    accelerator.unwrap_model(run.model).save_pretrained(
        f"{folder}/pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=dict(state),  # which it empties
    )
    accelerator.wait_for_everyone()
    return {"state": state, "weights": run.weights()}


def calls_the_original(rows: int) -> tuple[list[int], list[int], bool]:
    """Sentences generated during training, and by the model that was saved; whether parameters are shards again."""
    accelerator = accelerator_of("fsdp")
    run = Run(accelerator, language_model(), sentences(8))
    run.train()
    prompt = torch.arange(rows)[:, None]
    with accelerator.whole_parameters(run.model) as original:
        generated = original.generate(prompt, max_new_tokens=4, do_sample=False)
    whole = language_model()
    whole.load_state_dict(dict(zip(dict(whole.named_parameters()), run.weights(), strict=True)), strict=False)
    expected = whole.generate(prompt, max_new_tokens=4, do_sample=False)
    run.train()
    return generated.tolist(), expected.tolist(), all(isinstance(each, DTensor) for each in run.model.parameters())


def evaluates(plan: str, number: int) -> torch.Tensor:
    """The outputs for all points, of which the last batches have fewer."""
    accelerator = accelerator_of(plan)
    run = Run(accelerator, Net(), points(number))
    run.model.eval()
    outputs = []
    with torch.no_grad():
        for batch in run.data:
            outputs.append(accelerator.gather_for_metrics(run.model(**batch)["output"]))
    return torch.cat(outputs)


def clips_values(plan: str) -> list[torch.Tensor]:
    accelerator = accelerator_of(plan)
    run = Run(accelerator, Net(), points(4))
    batch = next(iter(run.data))
    accelerator.backward(run.model(**batch)["loss"])
    accelerator.clip_grad_value_(run.model.parameters(), 0.05)
    run.optimizer.step()
    return run.weights()


def in_mixed_precision(mixed_precision: str, options: dict[str, Any]) -> dict[str, Any]:
    """The dtypes of a model in mixed precision, and losses."""
    accelerator = accelerator_of(
        "fsdp", mixed_precision=mixed_precision, options=options, kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    run = Run(accelerator, Net(dtype=torch.float32), points(16, torch.float32))
    losses = run.train()
    products = [n for n in run.model.forward_graph.graph.nodes if str(n.target) == "aten.addmm.default"]
    output = run.model(**next(iter(run.data)))["output"]
    return {
        "losses": losses,
        "computed": {str(n.meta["val"].dtype) for n in products},
        "output": output.dtype,
        "stored": {each.dtype for each in run.model.parameters()},
    }


def overflows() -> tuple[list[bool], list[float], bool]:
    """Of a step with an infinity in one rank's batch: whether it was skipped, scales before and after, the weights."""
    scale = GradScalerKwargs(init_scale=4.0)  # at which float16 has room for all other gradients
    accelerator = accelerator_of("fsdp", mixed_precision="fp16", kwargs_handlers=[scale])
    examples = points(16, torch.float32)
    examples[9]["x"][0] = torch.inf  # in the third batch of one rank
    run = Run(accelerator, Net(dtype=torch.float32), examples)
    skipped, scales = [], [accelerator.scaler.get_scale()]
    for batch in run.data:
        accelerator.backward(run.model(**batch)["loss"])
        accelerator.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(accelerator.scaler.get_scale())
    return skipped, scales, all(bool(each.isfinite().all()) for each in run.weights())


def refusals() -> list[str]:
    """What is refused on ranks only."""
    return [
        _refused(lambda: accelerator_of("tp", options={"mesh": {"tp": 2}})),
        _refused(lambda: accelerator_of("local-sgd")),
        _refused(lambda: accelerator_of("fsdp").join_uneven_inputs([])),
        _refused(lambda: accelerator_of("fsdp", cpu=False)),
    ]


def _refused(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except ShardGraphError as error:
        return str(error)
    return "nothing"


def runs(code: str, folder: str) -> Any:
    """What ``train()`` of a script returns, in a folder."""
    forget_accelerators()
    space: dict[str, Any] = {"__name__": "example"}
    exec(code, space)
    with contextlib.chdir(folder), environment():
        return space["train"]()
