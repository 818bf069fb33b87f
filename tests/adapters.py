"""What runs on each rank of the tests of fine-tuning: adapters of peft on models of transformers, and layers that are
frozen, trained again and added."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import shardgraph
from tests.as_written import LANGUAGE
from tests.ranks import deterministic, difference, part

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def adapted(name: str) -> Any:
    """A model with adapters, always of the same values."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights="gaussian", task_type="CAUSAL_LM")
    return deterministic(get_peft_model(LANGUAGE[name](), config))


def compiled(model: nn.Module, plan: str, mesh: dict[str, int] | None, call: dict[str, Any]) -> Any:
    example = {"example_kwargs": part(call, shardgraph.preset(plan, mesh or {"tp": 2}))} if "tp" in plan else {}
    return shardgraph.compile(model, plan, mesh=mesh, progress=False, **example)


def logits(model: Any, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**call).logits


def fine_tuned(plan: str, mesh: dict[str, int] | None, name: str, folder: str) -> dict[str, Any]:
    """Errors of a model with adapters that trains, generates, is saved, loaded by peft alone, and merged."""
    original, ids = adapted(name), torch.randint(3, 48, (4, 8), generator=torch.Generator().manual_seed(3))
    call = {"input_ids": ids, "labels": ids}
    sharded = compiled(adapted(name), plan, mesh, call)
    own = part(call, sharded.plan)
    words = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(own["input_ids"]))

    def generates_alike() -> bool:
        texts = [model.generate(input_ids=own["input_ids"], **words) for model in (sharded, original)]
        return torch.equal(*texts)

    def error() -> float:
        return (logits(sharded, own) - logits(original, own)).abs().max().item()

    facts: dict[str, Any] = {"before": generates_alike()}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, original)]
    errors = []
    for _ in range(3):
        sharded(**own).loss.backward()
        original(**call).loss.backward()
        errors.append(difference(sharded, original, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    errors += [difference(sharded, original, gradients=False), error()]
    facts["after"] = generates_alike()
    trained = {parameter for parameter in sharded.parameters() if parameter.requires_grad}
    facts["only adapters"] = trained == {*optimizers[0].state} and len(trained) < len([*sharded.parameters()])
    sharded.save_pretrained(folder)
    facts["files"] = {path.name for path in Path(folder).iterdir()} >= {"adapter_config.json"}
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(LANGUAGE[name]().double(), folder).eval()
    errors.append((logits(loaded, own) - logits(original, own)).abs().max().item())
    with sharded.disable_adapter(), original.disable_adapter():
        errors.append(error())
    with sharded.unsharded():
        sharded.merge_adapter()
    errors.append(error())
    facts["errors"] = max(errors)
    return facts


def merged(plan: str, name: str) -> tuple[float, int]:
    """The error after adapters were merged for good, on whole parameters, and how many parameters are left over."""
    ids = torch.arange(3, 19).reshape(2, 8)
    original, sharded = adapted(name).eval(), shardgraph.compile(adapted(name).eval(), plan, progress=False)
    logits(sharded, {"input_ids": ids})
    with sharded.unsharded():
        base = sharded.merge_and_unload()
    theirs = logits(original.merge_and_unload(), {"input_ids": ids})
    errors = [(logits(model, {"input_ids": ids}) - theirs).abs().max().item() for model in (sharded, base)]
    return max(errors), sum("lora" in parameter for parameter, _ in sharded.named_parameters())


def frozen_and_trained(plan: str) -> float:
    """The error of training in which layers are frozen, trained again, and a head is added."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = whole if plan == "tp" else whole[4 * dist.get_rank() :][:4]
    sharded = shardgraph.compile(
        copy.deepcopy(original), plan, progress=False, example_inputs=(own,) if plan == "tp" else None
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, original)]
    worst = 0.0
    for frozen in ([0, 2], [0], [], [4]):
        for _ in range(2):
            for model, x in ((sharded, own), (original, whole)):
                for number in (0, 2, 4):
                    model[number].requires_grad_(number not in frozen)
                model(x).square().mean().backward()
            worst = max(worst, difference(sharded, original, gradients=True))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return max(worst, difference(sharded, original, gradients=False))
