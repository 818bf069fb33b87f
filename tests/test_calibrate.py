"""Calibration: fits recover what made the data, and a measured cluster says all that a cluster file can."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardgraph.calibration import fit, fit_table, measure
from shardgraph.calibration.collectives import sizes_to_time
from shardgraph.calibration.fitting import behind_computation, fit_link, fit_rate, fit_sync
from shardgraph.calibration.timings import COLLECTIVES, Measurements, Sample, Transfer
from shardgraph.cli.main import main
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.device import BYTE_KINDS, FLOP_KINDS, VIEW, Link, Rate
from shardgraph.cost_models.group import Group
from shardgraph.errors import ClusterError

pytestmark = pytest.mark.timeout(120)

SIZES = [10.0**exponent for exponent in range(3, 11)]


def timed(rate: Rate, noise: float = 0.0) -> list[Sample]:
    """What a device of this rate would measure, each time off by up to ``noise`` of it."""
    chance = random.Random(0)
    return [Sample("pointwise", work, rate.seconds(work) * (1 + chance.uniform(-noise, noise))) for work in SIZES * 5]


def test_a_rate_is_recovered() -> None:
    fitted = fit_rate(timed(Rate(per_second=5e9, overhead=3e-6)))
    assert fitted.per_second == pytest.approx(5e9) and fitted.overhead == pytest.approx(3e-6)


def test_a_rate_is_recovered_from_noise() -> None:
    fitted = fit_rate(timed(Rate(per_second=5e9, overhead=3e-6), noise=0.2))
    assert fitted.per_second == pytest.approx(5e9, rel=0.15) and fitted.overhead == pytest.approx(3e-6, rel=0.15)


def test_what_operands_cost_beside_arithmetic_is_recovered() -> None:
    rate = Rate(per_second=1e11, overhead=1e-5, moved_per_second=2e9)
    works = [(flops, moved) for flops in (1e6, 1e8, 1e10) for moved in (1e4, 1e6, 1e8)]
    fitted = fit_rate([Sample("matmul/float32", flops, rate.seconds(flops, moved), moved) for flops, moved in works])
    assert (fitted.per_second, fitted.overhead) == pytest.approx((1e11, 1e-5), rel=1e-3)
    assert fitted.moved_per_second == pytest.approx(2e9, rel=1e-3)


def test_what_products_move_at_most_is_recovered_from_those_of_few_rows() -> None:
    rate = Rate(per_second=1e11, overhead=1e-5, bandwidth=6e9)
    many = [Sample("matmul/float32", flops, rate.seconds(flops), flops / 50) for flops in (1e6, 1e8, 1e10)]
    few = [Sample("matmul/float32", 2 * moved, rate.overhead + moved / 6e9, moved) for moved in (4e6, 8e6, 16e6)]
    fitted = fit_rate([*many, *few])
    assert (fitted.per_second, fitted.overhead) == pytest.approx((1e11, 1e-5), rel=1e-3)
    assert fitted.bandwidth == pytest.approx(6e9)


def test_what_moves_nothing_costs_its_overhead() -> None:
    assert fit_rate([Sample("view", 0, seconds) for seconds in (1e-6, 3e-6, 9e-6)]).overhead == 3e-6


def test_an_overhead_is_never_negative() -> None:
    samples = [Sample("pointwise", work, work**1.2 * 1e-9) for work in SIZES]  # slower the larger: a line through 0
    assert fit_rate(samples).overhead == 0 and fit_rate(samples).per_second > 0


def test_one_operation_that_is_slow_for_its_own_reasons_changes_little() -> None:
    rate = Rate(per_second=5e9, overhead=3e-6)
    fitted = fit_rate([*timed(rate) * 3, Sample("pointwise", 1e6, 50 * rate.seconds(1e6))])
    assert fitted.per_second == pytest.approx(5e9, rel=0.25) and fitted.overhead == pytest.approx(3e-6, rel=0.25)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_link_is_recovered_with_what_each_collective_attains_of_it(ranks: int) -> None:
    latencies = {"all_gather_into_tensor": 1e-4, "reduce_scatter_tensor": 3e-4, "all_reduce": 2e-4}
    link = Link(bandwidth=2e9, latency=1e-4, latencies=latencies)
    efficiency = {"all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 0.25, "all_reduce": 1.0}
    transfers = []
    for size in (2**12, 2**18, 2**24):
        for operation in COLLECTIVES:
            given = size // ranks if operation == "all_gather_into_tensor" else size
            gotten = size // ranks if operation == "reduce_scatter_tensor" else size
            seconds = collective_seconds(operation, given, gotten, Group.of_node(ranks, link), efficiency)
            transfers.append(Transfer(operation, given, gotten, seconds, added=0.0, awaited=seconds))
    fitted, attained = fit_link(transfers, ranks)
    assert (fitted.bandwidth, fitted.latency) == pytest.approx((link.bandwidth, link.latency), rel=1e-3)
    assert fitted.latencies == pytest.approx(latencies, rel=1e-3)
    assert attained == pytest.approx(efficiency, rel=1e-3)


@pytest.mark.parametrize(
    ("takes", "timed"),
    [
        ({12: 0.1, 15: 0.1, 18: 0.1, 21: 0.2, 24: 1.0}, [12, 15, 18, 21, 24]),
        ({12: 3.0, 15: 3.0, 18: 3.1, 21: 4.0, 24: 16.0}, [12, 24]),  # much latency
        ({12: 3.0, 15: 3.0, 18: 3.1, 21: 4.0, 24: 18.0}, [12, 15, 18, 21]),
        ({12: 40.0, 15: 41.0, 18: 42.0, 21: 60.0, 24: 200.0}, [12, 21]),  # too much for the time that there is
        ({12: 1.0, 15: 50.0}, [12, 15]),
    ],
)
def test_the_smallest_and_the_largest_sizes_are_timed_that_there_is_time_for(takes, timed) -> None:
    assert sizes_to_time(takes, within=20.0) == timed


def transfers_adding(*parts: float) -> list[Transfer]:
    """All-reduces of a second each that make a computation longer by these parts of it."""
    return [Transfer("all_reduce", 4000, 4000, seconds=1.0, added=part, awaited=1.0) for part in parts]


def test_the_computation_hides_what_a_collective_does_not_add_to_it() -> None:
    transfers, overlap = behind_computation(transfers_adding(0.1, 0.25, 0.9))
    assert overlap == 0.75 and [transfer.seconds for transfer in transfers] == [1.0, 1.0, 1.0]


def test_a_collective_that_adds_more_than_its_own_time_takes_that_and_is_not_hidden() -> None:
    transfers, overlap = behind_computation(transfers_adding(1.0, 1.5, 2.5))
    assert overlap == 0 and [transfer.seconds for transfer in transfers] == [1.5, 1.5, 1.5]


def test_an_operation_that_adds_more_than_others_takes_longer_as_far_as_it_is_not_hidden() -> None:
    def seconds(*parts: float) -> list[float]:
        """Of an operation that adds as much as most do, and one that adds twice that."""
        usual, more = transfers_adding(*parts), transfers_adding(*(2 * part for part in parts))
        scattered, gathered = (
            [replace(each, operation=operation) for each in transfers]
            for operation, transfers in (("reduce_scatter_tensor", usual), ("all_gather_into_tensor", more))
        )
        transfers, _ = behind_computation([*usual, *scattered, *gathered])
        return [transfers[0].seconds, transfers[-1].seconds]

    assert seconds(0.5) == [1.0, 1.5]
    assert seconds(0.02) == [1.0, pytest.approx(1.02)]


def test_a_computation_that_noise_made_shorter_hides_all() -> None:
    assert behind_computation(transfers_adding(-0.1))[1] == 1


@pytest.mark.parametrize(("more", "sync"), [([0.5, 0.25, -2.0], 0.25), ([-0.5], 0.0), ([], 0.0)])
def test_what_a_rank_waits_longer_for_a_collective_after_a_computation(more: list[float], sync: float) -> None:
    assert fit_sync([Transfer("all_reduce", 8, 8, 1.0, 0.0, awaited=1.0 + each) for each in more]) == sync


def test_one_rank_needs_no_link() -> None:
    alone = Measurements("cpu", 1, 1, 2**30, tuple(timed(Rate(1e9))), ())
    assert fit(alone).world_size == 1


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(2, seconds=1, progress=False)


@pytest.fixture(scope="module")
def cluster(measured: Measurements) -> Cluster:
    return fit(measured)


@pytest.mark.slow
def test_every_kind_of_work_is_measured(cluster: Cluster) -> None:
    assert set(cluster.device.rates) == {f"{kind}/float32" for kind in FLOP_KINDS} | {*BYTE_KINDS, VIEW}
    assert set(cluster.efficiency) == set(COLLECTIVES)
    assert all(0 < part <= 1 for part in cluster.efficiency.values())


@pytest.mark.slow
def test_the_cluster_is_this_machine(cluster: Cluster) -> None:
    assert (cluster.nodes, cluster.devices_per_node, cluster.inter) == (1, 2, None)
    assert cluster.device.name.endswith("(measured)") and cluster.device.memory > 2**20
    assert set(cluster.device.peak) == {"float32"}


@pytest.mark.slow
def test_the_table_has_a_line_for_all_that_was_fitted(measured: Measurements, cluster: Cluster) -> None:
    lines = fit_table(measured, cluster).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [
        *cluster.device.rates, "host/optimizer", "host/copy", *COLLECTIVES
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:-2] if "/s" not in line] == [VIEW]  # which moves nothing


@pytest.mark.slow
def test_the_host_is_measured(cluster: Cluster) -> None:
    host = cluster.device.linked_host
    assert 1e8 < host.link.bandwidth < 1e12 and 1e7 < host.optimizer.per_second < 1e12


@pytest.mark.slow
def test_the_command_writes_a_file_that_loads(
    measured: Measurements,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardgraph.calibration.measure", lambda *_, **__: measured)  # once is enough
    path = tmp_path / "cluster.yaml"
    assert main(["calibrate", "--nproc", "2", "--out", str(path), "--seconds", "1"]) == 0
    loaded = Cluster.load(path)
    assert loaded.device.rates["pointwise"].per_second == pytest.approx(cluster.device.rates["pointwise"].per_second)
    assert loaded.world_size == 2
    assert "pointwise" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", "--nproc", "2"]) == 2
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_under_torchrun_the_command_measures_the_ranks_of_the_run_and_one_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "shardgraph", "calibrate", "--seconds", "1", "--out", str(path)]
    ended = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Wrote") == 1
    assert (Cluster.load(path).nodes, Cluster.load(path).devices_per_node) == (1, 2)


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ClusterError, match="'flaot32'"):
        measure(dtypes=["flaot32"])
