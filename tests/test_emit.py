"""Programs as source: they train without shardgraph, with the compiled module's losses to the bit, and can be read."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from shardgraph.emission.lines import generalized, wrapped
from tests.emit_models import CASES, FURTHER, GPT, deep, gpt, grouped
from tests.emitted import Case, batch_of, compiled_losses, emitted_losses, losses_of_both, under_torchrun, written
from tests.standing import on_ranks


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def scheduled_as(schedule: str, **options: Any) -> shardgraph.Pipeline:
    return shardgraph.Pipeline(schedule=schedule, microbatches=4, **options)


def _equal(cases: list[Case], folder: Path, **options: Any) -> None:
    """Assert that emitted programs have the losses of compiled modules, on all ranks."""
    emitted = emitted_losses(cases, folder, **options)
    ranks = cases[0].ranks
    for case in cases:
        compiled = [compiled_losses(case)] if ranks == 1 else on_ranks(compiled_losses, ranks, args=(case,))
        assert [losses[case.name] for losses in emitted] == compiled, case.name


def _text(folder: Path, plan: str = "fsdp", layers: int = 4, **options: Any) -> str:
    """The program of a small GPT on two ranks."""
    torch.manual_seed(0)
    ids = torch.randint(0, 37, (4, 8))
    mesh = options.pop("mesh", {"dp": 2})
    shardgraph.emit(GPT(layers), folder, plan, example_inputs=(ids, ids), mesh=mesh, cluster="H100", **options)
    return (folder / "program.py").read_text(encoding="utf-8")


def test_an_emitted_program_has_the_losses_of_the_compiled_module_to_the_bit(tmp_path: Path) -> None:
    case = _case("conv:fsdp")
    for emitted, compiled in on_ranks(losses_of_both, case.ranks, args=(case, written(case, tmp_path))):
        assert emitted == compiled


@pytest.mark.quick("loss-in-*", "layers-dropped-*")
@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.name)
def test_what_a_program_has_beside_the_model_is_in_the_file_too(case: Case, tmp_path: Path) -> None:
    for emitted, compiled in on_ranks(losses_of_both, case.ranks, args=(case, written(case, tmp_path))):
        assert emitted == compiled


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_of_their_own_have_them_under_every_preset_on_three_models(ranks: int, tmp_path: Path) -> None:
    _equal([case for case in CASES if case.ranks == ranks], tmp_path)


@pytest.mark.slow
def test_it_has_them_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    _equal([_case(name) for name in ("gpt:fsdp", "gpt:ddp", "llama:tp", "mixture:ep")], tmp_path, scheduled=True)


@pytest.mark.slow
def test_merged_reductions_over_four_ranks_are_added_up_as_in_the_compiled_module(tmp_path: Path) -> None:
    _equal([Case("gpt:ddp4", gpt, "ddp", {"dp": 4})], tmp_path, scheduled=True)


@pytest.mark.slow
def test_half_precision_and_recomputation_are_in_the_program(tmp_path: Path) -> None:
    bf16 = Case("gpt:bf16", gpt, "fsdp", {"dp": 2}, {"precision": "bf16"})
    full = Case("gpt:full", gpt, "fsdp", {"dp": 2}, {"recompute": "full"})
    _equal([bf16, full], tmp_path)


class Odd(nn.Module):
    """Sizes that nothing divides, a scalar, an unused, a frozen, a transposed and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(3, 2).t())
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.tanh(self.up(x))) * self.scale + self.frozen + shift
        return (out @ self.transposed.t()).square().mean() + self.empty.sum()


def odd() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Odd(), (torch.randn(4, 5),), {"shift": torch.randn(4, 3)}


@pytest.mark.slow
def test_parameters_of_odd_sizes_and_kinds_are_stored_as_in_the_compiled_module(tmp_path: Path) -> None:
    _equal([Case("odd:fsdp", odd, "fsdp", {"dp": 2}), Case("odd:zero1", odd, "zero1", {"dp": 2})], tmp_path)


@pytest.mark.slow
def test_stages_of_one_rank_pass_values_on_without_messages(tmp_path: Path) -> None:
    pipeline = shardgraph.Pipeline(schedule="interleaved-1f1b", microbatches=4)
    _equal([Case("gpt:interleaved", gpt, "pp", {"pp": 2}, {"pipeline": pipeline})], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schedules_that_divide_backward_or_overlap_actions_add_up_gradients_in_their_order(tmp_path: Path) -> None:
    names = ("interleaved-zero-bubble", "zbv", "dualpipev", "looped-bfs")
    made = [Case(f"gpt:{name}", gpt, "pp", {"pp": 2}, {"pipeline": scheduled_as(name)}) for name in names]
    _equal(made, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_are_recomputed_in_backward(schedule: str, tmp_path: Path) -> None:
    made = [
        Case(f"gpt:{kind}", gpt, "pp", {"pp": 2}, {"pipeline": scheduled_as(schedule, checkpoint=kind)})
        for kind in ("always", "except_last")
    ]
    _equal(made, tmp_path)
    text = (tmp_path / "gpt-except_last" / "stage0.py").read_text(encoding="utf-8")
    assert "def backward(" in text and "def backward_last(" in text


class Masked(GPT):
    """The labels of all columns but the last count, so that how many are not ignored depends on their order."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(labels.shape[1], device=labels.device) < 7
        return super().forward(ids, labels.where(seen, -100))


def masked() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    ids, labels = torch.randint(0, 37, (8, 8)), torch.randint(0, 37, (8, 8))
    labels[::2] = -100
    return Masked(), (ids, labels), {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_of_ranks_are_weighed_by_their_tokens(tmp_path: Path) -> None:
    counts = [(batch_of(masked()[1], number)[1][:, :7] != -100).sum().item() for number in (0, 1)]
    assert counts[0] != counts[1]
    weighed = {"loss_weight": "tokens"}
    two = [Case(f"masked:{plan}", masked, plan, {"dp": 2}, weighed) for plan in ("fsdp", "ddp")]
    _equal(two, tmp_path)
    unweighed = emitted_losses([Case("masked:unweighed", masked, "fsdp", {"dp": 2})], tmp_path)
    assert unweighed[0]["masked:unweighed"] != emitted_losses(two[:1], tmp_path)[0]["masked:fsdp"]
    _equal([Case("masked:pp-fsdp", masked, "pp+fsdp", {"pp": 2, "dp": 2}, weighed)], tmp_path)


@pytest.mark.slow
def test_a_file_runs_as_a_script(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args, _ = grouped()
    shardgraph.emit(model, tmp_path, "single", example_inputs=args, mesh={}, cluster="H100")
    run = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert [line.split()[3] for line in run.stdout.splitlines()] == ["0", "1", "2", "3", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "tp", "pp"])
def test_torchrun_runs_it_with_the_losses_of_the_compiled_module_where_torch_alone_is(
    plan: str, tmp_path: Path
) -> None:
    case = _case(f"gpt:{plan}")
    command = ["--nproc-per-node", "2", "--standalone", written(case, tmp_path) / "program.py"]
    assert under_torchrun(command, tmp_path) == on_ranks(compiled_losses, 2, args=(case, 5))


@pytest.mark.slow
def test_equal_layers_are_one_function_called_in_a_loop(tmp_path: Path) -> None:
    few, many = (_text(tmp_path / str(layers), layers=layers) for layers in (4, 12))
    assert few.count("def block_forward") == few.count("def block_backward") == 1
    assert len(many.splitlines()) == len(few.splitlines())
    assert "for i in range(12):" in many and "for i in reversed(range(12)):" in many


@pytest.mark.parametrize("plan", ["fsdp", "pp"])
def test_files_are_clean_and_name_what_they_use(plan: str, tmp_path: Path) -> None:
    _text(tmp_path, plan, mesh={"pp" if plan == "pp" else "dp": 2})
    for file in tmp_path.glob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"))
        assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 120
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    checked = subprocess.run([ruff, "check", "--isolated", "."], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_each_collective_says_what_it_moves_and_for_which_line(tmp_path: Path) -> None:
    lines = _text(tmp_path).split("# -- the model")[1].split("# -- training")[0].splitlines()
    calls = [i for i, line in enumerate(lines) if "all_gather(" in line or "reduce_scatter(" in line]
    assert calls
    for i in calls:
        assert "over dp (" in lines[i - 1] and "emit_models.py:" in lines[i - 1], lines[i]


def test_values_have_names_of_modules_and_operations(tmp_path: Path) -> None:
    text = _text(tmp_path)
    assert 'qkv_weight = all_gather(p["qkv.weight"], "dp")' in text
    assert "grad_ln_1_weight = reduce_scatter(grad_ln_1_weight_local" in text
    assert "primals" not in text and "getitem" not in text and "_default" not in text


@pytest.mark.slow
def test_the_table_of_parameters_says_how_each_is_stored(tmp_path: Path) -> None:
    text = _text(tmp_path, "fsdp+tp", mesh={"dp": 2, "tp": 2})
    assert '"qkv.weight": Layout((48, 16), split={"tp": (0, 3)})' in text.replace('f"blocks.{i}.', '"')


def test_a_compiled_module_writes_its_latest_training_step(tmp_path: Path) -> None:
    model, args, _ = gpt()
    sharded = shardgraph.compile(model, "single")
    sharded.train_step(*args)
    sharded.save_program(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"program.py", "batch.pt", "weights.pt"}
    assert "def block_forward" in (tmp_path / "program.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_an_edited_program_is_not_overwritten(tmp_path: Path) -> None:
    model, args, _ = gpt()
    sharded = shardgraph.compile(model, "single")
    sharded.train_step(*args)
    sharded.save_program(tmp_path)
    sharded.save_program(tmp_path)
    edited = tmp_path / "program.py"
    edited.write_text(edited.read_text(encoding="utf-8").replace("AdamW", "SGD"), encoding="utf-8")
    before = edited.read_bytes()
    with pytest.raises(shardgraph.ShardGraphError, match=r"^program.py in .* was edited after it was emitted"):
        sharded.save_program(tmp_path)
    assert edited.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"program.py", "batch.pt", "weights.pt"}


def test_a_model_on_meta_is_written_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = GPT(2)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    files = shardgraph.emit(model, tmp_path, "fsdp", example_inputs=(ids, ids), mesh={"dp": 2}, cluster="H100")
    assert {file.name for file in files} == {"program.py", "batch.pt"}


class Summed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


class Halves(nn.Linear):
    """Two outputs, of which each depends on a parameter of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.other = nn.Parameter(torch.ones(inputs))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x * self.other


@pytest.mark.parametrize(
    "model, options, message",
    [
        (nn.Linear(4, 2), {"loss_fn": F.mse_loss}, "one was given without the other"),
        (nn.Linear(4, 2), {"plan": "pp", "mesh": {"pp": 1}}, "train_step needs a loss"),
        (nn.Linear(4, 2), {"loss_weight": "tokens"}, "weigh the loss of the training loop"),
        (Halves(4, 2), {}, "some do not depend on 'bias'"),
        (Summed(4, 2), {"loss_weight": "tokens"}, "for a loss that is one mean"),
        (Summed(4, 2), {"offload": shardgraph.Offload(True, disk="shards")}, "offload='parameters'"),
    ],
)
def test_what_cannot_be_written_is_refused_with_what_would_work(
    model: nn.Module, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    ids = torch.randint(0, 37, (8, 8))
    call = (torch.randn(4, 4),) if isinstance(model, nn.Linear) else (ids, ids)
    with pytest.raises(shardgraph.ShardGraphError, match=message):
        shardgraph.emit(
            model, tmp_path / "none", **{"plan": "fsdp", "mesh": {"dp": 2}, "cluster": "H100", **options},
            example_inputs=call,
        )  # fmt: skip
    assert not (tmp_path / "none").exists()


def test_a_compiled_module_without_a_loss_leaves_it_to_the_loop(tmp_path: Path) -> None:
    sharded = shardgraph.compile(nn.Linear(4, 2), "single")
    sharded(torch.randn(3, 4))
    sharded.save_program(tmp_path)
    assert "def criterion(output: Tensor" in (tmp_path / "program.py").read_text(encoding="utf-8")


def test_layers_that_keep_tensors_on_the_host_are_one_function(tmp_path: Path) -> None:
    model, args, _ = deep()
    shardgraph.emit(model, tmp_path, "fsdp", example_inputs=args, mesh={"dp": 2}, cluster="H100", offload="activations")
    text = (tmp_path / "program.py").read_text(encoding="utf-8")
    assert text.count(" = to_host(") and text.count(" = to_device(") == text.count(" = to_host(")
    assert "for i in range(" in text and "for i in reversed(range(" in text


def test_numbers_of_layers_become_an_index() -> None:
    assert generalized(['state["h.2.w"]', 'state["h.3.w"]'], [2, 3], "i") == 'state[f"h.{i}.w"]'
    assert generalized(["saved.h[1].x", "saved.h[2].x"], [2, 3], "i") == "saved.h[i - 1].x"
    assert generalized(["a", "b"], [0, 1], "i") is None


def test_long_lines_are_broken_at_their_arguments() -> None:
    line = f"value = function({', '.join(f'argument_{i}' for i in range(20))})"
    assert ast.dump(ast.parse("\n".join(wrapped(line)))) == ast.dump(ast.parse(line))
    assert max(map(len, wrapped(line))) <= 110


def test_the_batch_of_the_example_is_beside_the_program(tmp_path: Path) -> None:
    _text(tmp_path)
    batch = torch.load(tmp_path / "batch.pt")
    assert set(batch) == {"ids", "labels"} and batch["ids"].shape == (4, 8)
    assert not torch.equal(batch_of(batch["ids"], 0), batch_of(batch["ids"], 1))


@pytest.mark.slow
def test_the_command_says_how_to_train(tmp_path: Path) -> None:
    from tests.test_cli import GPT2, run

    done = run("emit", *GPT2, "--plan", "fsdp", "--mesh", "dp=2", "--cluster", "H100", "-o", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["command"] == "torchrun --nproc-per-node 2 program.py"


def test_the_command_says_that_a_loss_is_to_be_written(tmp_path: Path) -> None:
    from tests.test_cli import run

    done = run("emit", "tests.test_cli:mlp", "--mesh", "dp=2", "--cluster", "H100", "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert "function criterion of program.py" in done.stdout


def test_the_command_refuses_a_plan_that_there_is_not() -> None:
    from tests.test_cli import run

    done = run("emit", "tests.test_cli:mlp", "--plan", "fdsp", "--cluster", "H100")
    assert done.exit_code == 2
    assert "did you mean 'fsdp'" in done.stderr
