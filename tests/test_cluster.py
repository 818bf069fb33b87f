"""Clusters: what is known of devices, files that round-trip and refuse what they cannot be, prices checked by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from pathlib import Path

import pytest
import torch

from shardgraph.cost_models.cluster import Cluster, known_devices
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.detection import machine_memory
from shardgraph.cost_models.device import Device, Link, Rate
from shardgraph.cost_models.group import Group
from shardgraph.errors import ClusterError, ShardGraphError
from shardgraph.mesh import Mesh
from shardgraph.sizes import parse_bytes
from tests.machines import toy_cluster, toy_device

GIB = 2**30
NAMED = ("A100", "H100", "H200", "B200", "V100", "RTX-4090", "MI300X")


# -- known devices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_a_known_device_attains_less_than_its_peak(name: str) -> None:
    known = Cluster.of(name).device
    for kind, rate in known.rates.items():
        if "/" in kind:
            assert 0.2 < rate.per_second / known.peak[kind.split("/")[1]] < 1, kind
    assert known.source and Cluster.of(name).source


def test_newer_devices_are_faster_and_larger() -> None:
    speeds = [Cluster.of(name).device.rates["matmul/float16"].per_second for name in ("V100", "A100", "H100", "B200")]
    memory = [Cluster.of(name).device.memory for name in ("V100", "A100-40GB", "A100", "H200", "B200")]
    assert speeds == sorted(speeds) and memory == sorted(memory)
    assert (
        Cluster.of("H200").device.rates["pointwise"].per_second
        > Cluster.of("H100").device.rates["pointwise"].per_second
    )


@pytest.mark.parametrize("name", ["h100", "H100-SXM", "nvidia_h100 sxm5", "NVIDIA H100 80GB HBM3"])
def test_a_device_is_found_by_its_other_names(name: str) -> None:
    assert Cluster.of(name).device == known_devices()["H100"]


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match=r"no device 'H10'.*calibrate.*did you mean.*'H100'"):
        Cluster.of("H10")


def test_devices_that_a_name_does_not_cover_are_unknown() -> None:
    with pytest.raises(ClusterError, match="no device 'NVIDIA H100 NVL'"):
        Cluster.of("NVIDIA H100 NVL")


def test_a_cluster_has_as_many_devices_as_asked() -> None:
    assert Cluster.of("H100", nodes=4).world_size == 32
    assert Cluster.of("H100", nodes=2, devices_per_node=4).world_size == 8
    assert Cluster.of("RTX-4090").world_size == 4


def test_a_switch_that_reduces_serves_groups_inside_a_node_however_many_nodes_there_are() -> None:
    def all_reduce(nodes: int, ranks: int) -> float:
        machine = Cluster.of("H100", nodes)
        group = machine.group_of((("dp", ranks),), "dp")
        return collective_seconds("all_reduce", GIB, GIB, group, machine.efficiency)

    assert Cluster.of("H100").efficiency["all_reduce"] > 1
    assert all_reduce(2, 8) == all_reduce(1, 8)
    assert all_reduce(2, 16) > 2 * 15 / 16 * GIB / Cluster.of("H100").intra.bandwidth


def test_a_network_can_be_given_with_a_known_device() -> None:
    machine = Cluster.of("H100", 2, network=12.5e9)
    assert machine.inter is not None and machine.inter.bandwidth == 12.5e9
    assert machine.intra == Cluster.of("H100").intra


@pytest.mark.parametrize(
    ("name", "nodes", "seconds"),
    [
        ("H100", 1, 0.031307),  # NVIDIA/dgxc-benchmarking, nccl/README.md
        ("H200", 1, 0.031319),  # Azure/AI-benchmarking-guide, ND_H200_v5
    ],
)
def test_an_all_reduce_of_8_gib_takes_about_what_was_published(name: str, nodes: int, seconds: float) -> None:
    machine = Cluster.of(name, nodes)
    group = machine.group_of((("dp", 8),), "dp")
    priced = collective_seconds("all_reduce", 8 * GIB, 8 * GIB, group, machine.efficiency)
    assert priced == pytest.approx(seconds, rel=0.15)


def test_an_all_reduce_across_four_h200_nodes_takes_about_what_was_published() -> None:
    machine = Cluster.of("H200", 4)
    group = machine.group_of((("dp", 32),), "dp")
    priced = collective_seconds("all_reduce", 16 * GIB, 16 * GIB, group, machine.efficiency)
    assert priced == pytest.approx(0.090191, rel=0.15)  # stas00/ml-engineering, todo.md


@pytest.mark.parametrize(("name", "dtype", "tflops"), [("A100", "float16", 253.7), ("H100", "float8_e4m3fn", 1290.1)])
def test_a_matmul_takes_about_what_was_published(name: str, dtype: str, tflops: float) -> None:
    rate = replace(Cluster.of(name).device, sustained={}).rate("matmul", dtype)  # of the kernel alone
    work = 2 * 8192**3
    assert rate is not None and rate.seconds(work) == pytest.approx(work / (tflops * 1e12), rel=0.15)


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_devices())
def test_a_known_cluster_round_trips_through_a_file(name: str, tmp_path: Path) -> None:
    saved = Cluster.of(name, nodes=2)
    saved.save(tmp_path / "cluster.yaml")
    loaded = Cluster.load(tmp_path / "cluster.yaml")
    assert loaded == saved and loaded.source == saved.source


def test_awkward_numbers_and_text_round_trip(tmp_path: Path) -> None:
    odd = Device(
        "naïve: yes",
        12345678901,
        {"float32": 1 / 3 * 1e13},
        {"pointwise": Rate(1e17 / 7, 1e-7 / 3)},
        {"memory": 2 / 3},
        1,
        "'s",
    )
    link = Link(1e9 / 3, 0.0, {"all_reduce": 1e-5 / 3})
    saved = Cluster("odd", odd, 3, 1, link, None, 0.1 + 0.2, {"all_reduce": 2 / 3}, source="#")
    saved.save(tmp_path / "cluster.yaml")
    loaded = Cluster.load(tmp_path / "cluster.yaml")
    assert loaded == saved and loaded.source == "#"


HAND_WRITTEN = """
schema: 1
name: lab
nodes: 2
devices_per_node: 8
intra: {bandwidth: 3e11, latency: 5e-6}
inter: {bandwidth: 50000000000, latency: 0}
overlap: 0.5
device:
  name: mine
  memory: 80GiB
  peak: {bfloat16: 1e15}
  rates:
    matmul/bfloat16: {per_second: 7e14}
    pointwise: {per_second: 3e12, overhead: 5e-6}
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "lab.yaml"


def test_a_file_written_by_hand_is_read(written: Path) -> None:
    written.write_text(HAND_WRITTEN)
    loaded = Cluster.load(written)
    assert loaded.intra == Link(3e11, 5e-6) and loaded.device.memory == 80 * GIB
    assert loaded.device.rates["matmul/bfloat16"] == Rate(7e14) and loaded.device.allocation == 512


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory: 80GiB", "memory: -5", r"lab\.yaml: device\.memory is -5; it may be a positive number of bytes"),
        ("memory: 80GiB", "memory: 80 gigs", r"device\.memory is '80 gigs'"),
        ("nodes: 2", "nodes: 0", "nodes is 0; it may be a whole number from 1"),
        ("nodes: 2", "nodes: true", "nodes is True"),
        ("schema: 1", "schema: 2", "schema is 2; it may be 1"),
        ("schema: 1\n", "", "schema is None; it may be 1"),
        ("name: lab\n", "", "the field name is missing"),
        ("  name: mine\n", "", r"the field device\.name is missing"),
        (", latency: 5e-6}", "}", r"the field intra\.latency is missing"),
        ("overlap:", "overlp:", "unknown field overlp; did you mean 'overlap'"),
        ("overlap: 0.5", "overlap: 1.5", "overlap is 1.5; it may be a number from 0 to 1"),
        ("overlap: 0.5", "sync: -1", "sync is -1; it may be a number of seconds from 0"),
        ("overlap: 0.5", "efficiency: {all_redcue: 1}", r"unknown field efficiency\.all_redcue"),
        ("latency: 0}", "latency: -1}", r"inter\.latency is -1; it may be a number of seconds from 0"),
        ("latency: 0}", "latency: 0, latencies: {all_redcue: 1}}", r"unknown field inter\.latencies\.all_redcue"),
        ("latency: 0}", "latency: 0, latencies: {all_reduce: -1}}", r"inter\.latencies\.all_reduce is -1"),
        ("bandwidth: 3e11", "bandwidth: fast", r"intra\.bandwidth is 'fast'; it may be a number above 0"),
        ("bandwidth: 3e11", "bandwidth: .nan", r"intra\.bandwidth is nan"),
        ("per_second: 7e14", "per_second: [7]", r"device\.rates\.matmul/bfloat16\.per_second is \[7\]"),
        ("matmul/bfloat16", "matmull/bfloat16", r"unknown field device\.rates\.matmull/bfloat16"),
        ("    pointwise: ", "    gather: ", "no rate 'pointwise'"),
        ("{bfloat16: 1e15}", "{bfloat61: 1e15}", r"unknown field device\.peak\.bfloat61"),
        ("{bfloat16: 1e15}", "7", r"device\.peak is 7; it may be a mapping"),
        ("inter: ", "# ", "2 nodes and no link 'inter'"),
        (HAND_WRITTEN, "[]", "the file is "),
        (HAND_WRITTEN, "{", "is not YAML"),
    ],
)
def test_an_invalid_file_is_refused_naming_the_field(written: Path, old: str, new: str, message: str) -> None:
    assert old in HAND_WRITTEN
    written.write_text(HAND_WRITTEN.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message):
        Cluster.load(written)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        Cluster.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(7, 7), ("80GiB", 80 * GIB), ("1.5 GB", 1_500_000_000), ("512", 512), ("8e10", 80_000_000_000), ("2kib", 2048)],
)
def test_sizes_are_read(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize("size", [0, -1, "-1GiB", "GiB", "many", "1.2.3 GB", "80XB", "", True, float("nan"), "1e999"])
def test_sizes_that_are_none_are_refused(size: float | str) -> None:
    with pytest.raises(ShardGraphError, match="is no size: it may be"):
        parse_bytes(size)


# -- links and prices --------------------------------------------------------------------------------------


def test_a_mesh_that_is_larger_than_the_cluster_is_refused() -> None:
    toy_cluster(nodes=2).check_mesh((("dp", 16),))
    with pytest.raises(ClusterError, match="needs 32 devices, and cluster 'toy' has 2 nodes of 8, 16 in all"):
        toy_cluster(nodes=2).check_mesh((("dp", 4), ("tp", 8)))


def test_a_group_inside_a_node_uses_the_link_inside() -> None:
    group = toy_cluster(nodes=2).group_of((("dp", 2), ("tp", 8)), "tp")
    assert (group.ranks, group.inside, group.nodes, group.inter) == (8, 8, 1, None)


def seconds_in(cluster: Cluster, mesh: Mesh, axis: str, operation: str = "all_gather_into_tensor") -> float:
    """Of a collective whose larger tensor has as many GB as the group has ranks."""
    group = cluster.group_of(mesh, axis)
    nbytes = group.ranks * 10**9
    return collective_seconds(operation, nbytes, nbytes, group, {})


def test_a_group_of_one_rank_for_each_node_has_one_share_of_the_network() -> None:
    assert seconds_in(toy_cluster(nodes=2), (("dp", 2), ("tp", 8)), "dp") == pytest.approx(1e9 / 1e9)


def test_a_group_over_whole_nodes_has_all_shares_of_the_network() -> None:
    assert seconds_in(toy_cluster(nodes=2), (("dp", 16),), "dp") == pytest.approx(15e9 / 8e9)
    larger = toy_cluster(nodes=2, devices_per_node=16)
    assert seconds_in(larger, (("dp", 32),), "dp") == pytest.approx(31e9 / 1e10)  # not above intra's


def test_in_an_all_to_all_each_rank_sends_what_leaves_its_node_through_its_own_share() -> None:
    cluster = toy_cluster(nodes=2)
    assert seconds_in(cluster, (("ep", 16),), "ep", "all_to_all_single") == pytest.approx(8e9 / 1e9)


GROUP = Group.of_node(4, Link(bandwidth=1e9, latency=1e-3))


def test_an_all_gather_of_few_ranks_takes_a_ring() -> None:
    assert collective_seconds("all_gather_into_tensor", 1000, 4000, GROUP, {}) == pytest.approx(3 * 1e-3 + 3e-6)


def test_a_reduce_scatter_takes_a_ring_at_its_efficiency() -> None:
    priced = collective_seconds("reduce_scatter_tensor", 4000, 1000, GROUP, {"reduce_scatter_tensor": 0.5})
    assert priced == pytest.approx(3 * 1e-3 + 6e-6)


def test_an_operation_takes_its_own_latency_inside_a_node_and_between_nodes() -> None:
    intra, inter = (Link(1e9, 1e-3, {"all_gather_into_tensor": own}) for own in (2e-3, 5e-3))
    cluster = replace(toy_cluster(nodes=2, devices_per_node=2), intra=intra, inter=inter)
    for ranks, gathered, scattered in ((2, 2e-3, 1e-3), (4, 2e-3 + 5e-3, 2e-3)):
        group = cluster.group_of((("dp", ranks),), "dp")
        assert collective_seconds("all_gather_into_tensor", 0, 0, group, {}) == pytest.approx(gathered)
        assert collective_seconds("reduce_scatter_tensor", 0, 0, group, {}) == pytest.approx(scattered)


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(ClusterError, match="latencies of at least 0"):
        Link(1e9, 1e-3, {"all_reduce": -1e-3})


def test_an_all_reduce_of_two_takes_a_ring_and_of_many_a_tree() -> None:
    two = collective_seconds("all_reduce", 4000, 4000, replace(GROUP, ranks=2), {})
    many = collective_seconds("all_reduce", 4000, 4000, replace(GROUP, ranks=64), {})
    assert two == pytest.approx(2 * 1e-3 + 4e-6)
    assert many == pytest.approx(2 * log2(64) * 1e-3 + 2 * 63 / 64 * 4e-6)


@pytest.mark.parametrize("operation", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"])
def test_a_collective_of_one_rank_takes_no_time(operation: str) -> None:
    assert collective_seconds(operation, 4000, 4000, replace(GROUP, ranks=1), {}) == 0


@pytest.mark.parametrize("nbytes", [2**10, 2**20, 2**30])
@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 2048])
@pytest.mark.parametrize("name", ["A100", "H100", "V100"])
def test_a_collective_is_never_cheaper_than_one_that_it_contains(name: str, ranks: int, nbytes: int) -> None:
    machine = Cluster.of(name, -(-ranks // 8))

    def priced(operation: str, size: int, ranks: int = ranks) -> float:
        return collective_seconds(operation, size, size, machine.group_of((("dp", ranks),), "dp"), machine.efficiency)

    for part in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert priced("all_reduce", nbytes) >= priced(part, nbytes)
        assert priced(part, nbytes) >= priced(part, nbytes // 2, max(2, ranks // 2))  # of half of the ranks
        assert priced(part, 2 * nbytes) >= priced(part, nbytes)


def test_the_latency_of_a_collective_grows_with_the_logarithm_of_the_nodes() -> None:
    def latency(nodes: int) -> float:
        group = Cluster.of("H100", nodes).group_of((("dp", 8 * nodes),), "dp")
        return collective_seconds("all_gather_into_tensor", 0, 0, group, {})

    assert latency(2048) - latency(1024) == pytest.approx(latency(1024) - latency(512))


def test_kinds_that_a_device_does_not_tell_apart_cost_what_the_plainer_costs() -> None:
    toy = toy_device()
    assert toy.rate("attention", "float32") == toy.rate("convolution", "float32") == toy.rates["matmul/float32"]
    assert toy.rate("gather") == toy.rate("optimizer") == toy.rates["pointwise"]
    own = replace(toy, rates={**toy.rates, "gather": Rate(1.0)})
    assert own.rate("gather") == Rate(1.0)


def test_views_are_free_where_nothing_is_said() -> None:
    toy = toy_device()
    assert toy.rate("view").seconds(0) == 0
    assert replace(toy, rates={**toy.rates, "view": Rate(1.0, 5e-6)}).rate("view").seconds(0) == 5e-6


def test_a_rate_with_traffic_round_trips(tmp_path: Path) -> None:
    known = Cluster.of("A100")
    rates = {**known.device.rates, "convolution/float32": Rate(1e13, 1e-5, moved_per_second=1e10, bandwidth=1e11)}
    changed = replace(known, device=replace(known.device, rates=rates))
    changed.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == changed


def test_arithmetic_that_a_device_lacks_has_no_rate() -> None:
    assert Cluster.of("V100").device.rate("matmul", "bfloat16") is None


# -- this machine ------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_machine_without_a_gpu_is_described_and_says_that_it_guesses(tmp_path: Path) -> None:
    found = Cluster.detect()
    assert "guess" in found.source and found.world_size >= 1 and found.device.memory > 0
    found.save(tmp_path / "cpu.yaml")
    assert Cluster.load(tmp_path / "cpu.yaml") == found


def test_a_machine_with_known_gpus_is_described_by_their_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        total_memory = 70 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    found = Cluster.detect()
    assert (found.name, found.world_size, found.device.memory) == ("A100", 2, 70 * GIB)
    assert found.device.rates == Cluster.of("A100").device.rates
    assert found.device.host is not None and found.device.host.memory == int(0.8 * machine_memory() / 2)
    found.save(tmp_path / "two.yaml")
    assert Cluster.load(tmp_path / "two.yaml") == found
