"""Runs over several nodes: how many there are, and the network between them, measured once by the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.calibration import fit, fit_table, network
from shardgraph.calibration.fitting import fit_network
from shardgraph.calibration.timings import COLLECTIVES, Measurements, Sample, Transfer
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.device import Link
from shardgraph.cost_models.group import BETWEEN_NODES, IN_A_NODE, Group
from shardgraph.errors import ClusterError
from shardgraph.runtime.nodes import nodes_of_run, ranks_per_node
from tests import two_nodes
from tests.machines import toy_cluster
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(300)


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def of_eight(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A run of eight ranks, of whose launcher nothing is known."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "said",
    [
        {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "8"},
        {"MPI_LOCALNRANKS": "4", "PMI_SIZE": "8"},
        {"SLURM_NTASKS_PER_NODE": "4", "SLURM_NTASKS": "8"},
        {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "8"},
    ],
)
def test_a_launcher_says_how_many_ranks_a_node_has(of_eight: pytest.MonkeyPatch, said: dict[str, str]) -> None:
    for name, value in said.items():
        of_eight.setenv(name, value)
    assert (ranks_per_node(), nodes_of_run()) == (4, 2)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "1"},  # a job of one process, which has started ranks itself
        {"SLURM_NTASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "8"},
        {"LOCAL_WORLD_SIZE": "16"},
    ],
)
def test_all_ranks_are_on_one_node_where_nothing_is_said_of_this_run(
    of_eight: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    for name, value in said.items():
        of_eight.setenv(name, value)
    assert (ranks_per_node(), nodes_of_run()) == (8, 1)


def test_nodes_of_different_numbers_of_ranks_are_taken_for_one(of_eight: pytest.MonkeyPatch) -> None:
    of_eight.setenv("LOCAL_WORLD_SIZE", "3")
    assert nodes_of_run() == 1


# -- the link between them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_link_may_have_its_own_efficiency(nodes: int) -> None:
    link = Link(1e9, 0.0, efficiency={"all_reduce": 0.5})
    cluster = toy_cluster(nodes, devices_per_node=2 // nodes)
    cluster = replace(cluster, intra=link) if nodes == 1 else replace(cluster, inter=link)
    group = cluster.group_of((("dp", 2),), "dp")
    of_cluster = {"all_reduce": 0.25, "all_gather_into_tensor": 0.25}
    assert collective_seconds("all_reduce", 10**9, 10**9, group, of_cluster) == pytest.approx(2.0)
    assert collective_seconds("all_gather_into_tensor", 10**9 // 2, 10**9, group, of_cluster) == pytest.approx(2.0)


def test_a_link_between_nodes_has_its_own_overlap() -> None:
    cluster = toy_cluster(nodes=2, devices_per_node=2, overlap=0.0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    options = {"plan": "ddp", "mesh": {"dp": 4}}

    def slowed(on: Cluster) -> float:
        analysis = shardgraph.analyze(model, (torch.ones(8, 512),), cluster=on, **options)
        return sum(each.slows for each in analysis.transfers) / analysis.time.communication

    assert cluster.inter is not None
    assert slowed(cluster) == pytest.approx(1.0)
    assert slowed(replace(cluster, inter=replace(cluster.inter, overlap=0.75))) == pytest.approx(0.25)


def test_a_link_without_an_overlap_has_the_clusters() -> None:
    cluster = replace(toy_cluster(overlap=0.25), inter=Link(1e9, 0.0, overlap=0.75))
    assert (cluster.overlap_on(IN_A_NODE), cluster.overlap_on(BETWEEN_NODES)) == (0.25, 0.75)
    cluster = replace(cluster, intra=Link(1e9, 0.0, overlap=0.5), inter=Link(1e9, 0.0))
    assert (cluster.overlap_on(IN_A_NODE), cluster.overlap_on(BETWEEN_NODES)) == (0.5, 0.25)


def test_what_a_link_has_of_its_own_round_trips_through_a_file(tmp_path: Path) -> None:
    inter = Link(1e9, 1e-5, {"all_reduce": 2e-5}, {"all_reduce": 0.5}, 0.75)
    cluster = replace(toy_cluster(nodes=2), inter=inter)
    cluster.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == cluster


@pytest.mark.parametrize("overlap", [-0.1, 1.5])
def test_an_overlap_that_is_no_part_is_refused(overlap: float) -> None:
    with pytest.raises(ClusterError, match="from 0 to 1"):
        Link(1e9, 0.0, overlap=overlap)


def test_nodes_of_one_device_are_as_close_as_devices_of_a_node() -> None:
    assert toy_cluster(nodes=4, devices_per_node=1).closest == 4
    assert toy_cluster(nodes=4, devices_per_node=2).closest == 2


def test_operators_are_divided_over_nodes_of_one_device_where_that_is_faster() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(4)))
    cluster = toy_cluster(nodes=2, devices_per_node=1)
    asked = {"example_inputs": (torch.ones(8, 2048),), "cluster": cluster, "devices": 2, "progress": False}
    plan = shardgraph.plan(model, **asked)
    best = min(
        shardgraph.analyze(model, asked["example_inputs"], preset, mesh=mesh, cluster=cluster).time.total
        for preset, mesh in (("ddp", {"dp": 2}), ("zero2", {"dp": 2}), ("fsdp", {"dp": 2}), ("tp", {"tp": 2}))
    )
    found = plan.considered[0]
    assert plan.name == "tp" and found.seconds <= best * 1.001


# -- measured ----------------------------------------------------------------------------------------------------------


def transfers(link: Link, efficiency: dict[str, float], hidden: float) -> list[Transfer]:
    """What two nodes of one rank would measure over a link, of which a computation hides this part."""
    found = []
    for size in (2**12, 2**18, 2**24):
        for operation in COLLECTIVES:
            given = size // 2 if operation == "all_gather_into_tensor" else size
            gotten = size // 2 if operation == "reduce_scatter_tensor" else size
            seconds = collective_seconds(operation, given, gotten, Group.of_node(2, link), efficiency)
            found.append(Transfer(operation, given, gotten, seconds, (1 - hidden) * seconds, seconds))
    return found


def test_the_link_between_nodes_is_recovered_with_what_computation_hides_of_it() -> None:
    efficiency = {"all_gather_into_tensor": 0.5, "reduce_scatter_tensor": 0.25, "all_reduce": 1.0}
    found = fit_network(transfers(Link(1e8, 1e-3), efficiency, hidden=0.75), nodes=2)
    assert (found.bandwidth, found.latency, found.overlap) == pytest.approx((1e8, 1e-3, 0.75), rel=1e-3)
    assert found.efficiency == pytest.approx(efficiency, rel=1e-3)


def test_the_table_of_a_calibration_has_the_network_too() -> None:
    efficiency = dict.fromkeys(COLLECTIVES, 1.0)
    between = tuple(transfers(Link(1e8, 1e-3), efficiency, hidden=0.75))
    samples = (Sample("pointwise", 1e6, 1e-3), Sample("pointwise", 1e9, 1.0))
    measured = Measurements("cpu", 1, 1, 2**30, samples, (), nodes=2, between=between)
    cluster = fit(measured)
    assert (cluster.nodes, cluster.devices_per_node, cluster.overlap_on(BETWEEN_NODES)) == (2, 1, pytest.approx(0.75))
    table = fit_table(measured, cluster)
    assert (
        "all_reduce between nodes" in table and "overlap of communication between nodes with computation: 75%" in table
    )


@pytest.mark.slow
def test_the_ranks_of_a_run_measure_their_nodes_and_the_network_together(tmp_path: Path) -> None:
    by_rank = on_ranks(two_nodes.calibrated, 2, args=(str(tmp_path),))
    assert by_rank[0] == by_rank[1]
    assert (by_rank[0].nodes, by_rank[0].devices_per_node) == (2, 1)
    inter = by_rank[0].inter
    assert 1e6 < inter.bandwidth < 1e12 and set(inter.efficiency) == set(COLLECTIVES) and 0 <= inter.overlap <= 1


def test_a_rank_of_a_run_does_not_start_ranks_to_measure(tmp_path: Path) -> None:
    for said in on_ranks(two_nodes.refused, 2, args=(str(tmp_path),)):
        assert "leave nproc out" in said


def test_the_network_is_measured_once_and_known_to_all_ranks(tmp_path: Path) -> None:
    fast = Link(1e9, 1e-4, overlap=0.5)
    assert on_ranks(two_nodes.measured_once, 2, args=(str(tmp_path),)) == [(0, fast, fast)] * 2


def test_steps_over_several_nodes_correct_the_prices_of_runs_over_as_many(tmp_path: Path) -> None:
    def seconds(cluster: Cluster) -> tuple[float, float]:
        """Of some computation, and of some communication between nodes."""
        return 1 / cluster.device.rates["pointwise"].per_second, 1 / cluster.inter.bandwidth

    for before, inside, after, alone, then in on_ranks(two_nodes.learned, 2, args=(str(tmp_path),)):
        computed, sent = seconds(before)
        assert seconds(inside) == (pytest.approx(2 * computed, rel=0.05), sent)
        assert seconds(after) == pytest.approx((2 * computed, 3 * sent), rel=0.1)
        assert then == alone


def test_a_plan_for_several_nodes_is_priced_with_the_network_that_its_ranks_have_measured(tmp_path: Path) -> None:
    for name, before, after, files in on_ranks(two_nodes.planned, 2, args=(str(tmp_path),)):
        assert name and (before.nodes, after.nodes, after.devices_per_node) == (2, 2, 1)
        assert before.inter == network._ETHERNET
        assert after.inter.overlap is not None and set(after.inter.efficiency) == set(COLLECTIVES)
        assert "network" in files
