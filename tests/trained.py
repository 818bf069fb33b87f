"""What each rank does in the tests of the Hugging Face Trainer: one task, with the Trainer itself or ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from shardgraph.trainers.transformers import ShardGraphSeq2SeqTrainer, ShardGraphTrainer
from tests.accelerated import forget_accelerators, language_model, sentences

History = list[dict[str, float]]


def trainer_of(plan: str, folder: str, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """Ours under the plan, or for ``"theirs"`` the Trainer itself."""
    forget_accelerators()
    defaults = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.05, "max_grad_norm": 0.5}
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    args = TrainingArguments(folder, **{**defaults, **quiet, **arguments})
    kind, options = (Trainer, {}) if plan == "theirs" else (ShardGraphTrainer, {"plan": plan})
    model = model or language_model()
    return kind(model=model, args=args, train_dataset=sentences(24), eval_dataset=sentences(6), **options)


def history(trainer: Trainer) -> History:
    """What was logged, but for times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    logged = [{name: value for name, value in entry.items() if name in kept} for entry in trainer.state.log_history]
    return [entry for entry in logged if len(entry) > 1]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """Whole, on every rank."""
    values = [parameter.detach() for parameter in trainer.model.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def trains(plan: str, folder: str, arguments: dict[str, Any]) -> tuple[History, list[torch.Tensor]]:
    trainer = trainer_of(plan, folder, **arguments)
    trainer.train()
    return history(trainer), weights(trainer)


def resumes(plan: str, then: str, folder: str) -> tuple[History, History, History, bool]:
    """What is logged after a checkpoint: in one run, in another that resumes from it, and in that again.

    And whether all of them end with the same weights.
    """
    unbroken = trainer_of(plan, folder, save_strategy="steps", save_steps=2)
    unbroken.train()
    other = trainer_of(then, folder, language_model(seed=2))
    ends, logged = [weights(unbroken)], [history(unbroken)]
    for _ in range(2):
        other.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        logged.append(history(other))
        ends.append(weights(other))
    same = all(torch.allclose(a, b, rtol=0, atol=1e-9) for end in ends for a, b in zip(end, ends[0], strict=True))
    return *(entries[2:] for entries in logged), same


def saves_and_generates(folder: str) -> tuple[list[torch.Tensor], list[list[int]], str]:
    trainer = trainer_of("fsdp", folder)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    with trainer.accelerator.whole_parameters(trainer.model) as model:
        generated = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    return weights(trainer), generated.tolist(), type(trainer.model).__name__


PROMPT = torch.arange(3)[:, None]


def loads_the_best(plan: str, folder: str) -> tuple[list[float], float]:
    """The losses of evaluations, of which the largest is called the best, and the loss of the model that is left."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    each_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(plan, folder, **best, **each_step, learning_rate=0.5)
    trainer.train()
    losses = [entry["eval_loss"] for entry in history(trainer) if "eval_loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


def evaluates_first(plan: str, folder: str) -> tuple[float, History, torch.Tensor]:
    """The loss of an evaluation before training, the training, and predictions of the trained model."""
    trainer = trainer_of(plan, folder)
    before = trainer.evaluate()["eval_loss"]
    if plan == "theirs":  # which would train without DistributedDataParallel then
        trainer = trainer_of(plan, folder)
    trainer.train()
    return before, history(trainer), torch.as_tensor(trainer.predict(sentences(7)).predictions)


def computes_in_bf16(folder: str) -> tuple[History, set[str], set[torch.dtype]]:
    trainer = trainer_of("fsdp", folder, language_model().float(), bf16=True)
    trainer.train()
    products = [n for n in trainer.model_wrapped.forward_graph.graph.nodes if str(n.target) == "aten.addmm.default"]
    stored = {parameter.dtype for parameter in trainer.model.parameters()}
    return history(trainer), {str(node.meta["val"].dtype) for node in products}, stored


def generates_in_evaluation(kind: str, folder: str) -> tuple[History, torch.Tensor, torch.Tensor]:
    """A sequence-to-sequence model's training, and what it generates after it, also for a remainder of a batch."""
    forget_accelerators()
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=0.0)).double()
    rows = torch.randint(2, 16, (12, 5), generator=torch.Generator().manual_seed(1))
    examples = [{"input_ids": row, "labels": row.flip(0)} for row in rows]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    args = Seq2SeqTrainingArguments(
        folder, max_steps=2, learning_rate=0.05, per_device_train_batch_size=2, predict_with_generate=True, **quiet
    )
    make = Seq2SeqTrainer if kind == "theirs" else ShardGraphSeq2SeqTrainer
    trainer = make(model=model, args=args, train_dataset=examples)
    trainer.train()
    predicted = trainer.predict(examples[:7], max_new_tokens=4)
    trainer.train()
    return history(trainer), torch.as_tensor(predicted.predictions), torch.as_tensor(predicted.metrics["test_loss"])
