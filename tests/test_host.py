"""Host memory: copies that run beside the computation, what is counted where, and what they cost."""

from __future__ import annotations

import operator
import threading

import pytest
import torch
from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.timeline import simulate
from shardgraph.errors import ClusterError, DeadlockError, GraphInvariantError
from shardgraph.ir import Input, Output, add_output
from shardgraph.ir.attributes import ON_HOST
from shardgraph.ir.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from shardgraph.passes.analysis.collective_order import check_waits
from shardgraph.passes.analysis.liveness import profile_memory
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.analysis.rows import Prices, rows_of
from shardgraph.report.step import tasks_of
from shardgraph.runtime.host import empty_on_host, is_on_host, known_on_host
from shardgraph.runtime.measure import PeakMemory
from tests.as_run import as_run
from tests.machines import toy_cluster

CPU = torch.device("cpu")
KIB = 1024
aten = torch.ops.aten


# -- copies ----------------------------------------------------------------------------------------


def test_a_copy_to_the_host_and_back_is_the_tensor():
    x = torch.randn(30, 7).t()
    there = WAIT_COPY(TO_HOST(x), x)
    back = WAIT_COPY(TO_DEVICE(there, CPU), there)
    assert torch.equal(back, x) and back.stride() == x.stride()
    assert is_on_host(there) and not is_on_host(back) and not is_on_host(x)


def test_copies_are_made_in_inference_mode():
    x = torch.randn(30, 7)
    with torch.inference_mode():
        there = WAIT_COPY(TO_HOST(x), x)
        back = WAIT_COPY(TO_DEVICE(there, CPU), there)
    assert torch.equal(back, x) and back.is_inference()


def test_the_computation_goes_on_while_a_copy_runs(monkeypatch):
    made, computed = torch.Tensor.copy_, threading.Event()

    def held(self, source, **options):
        assert computed.wait(30), "the copy was made before the computation went on"
        return made(self, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", held)
    x = torch.randn(16)
    copy = TO_HOST(x)
    x * 2
    computed.set()
    assert torch.equal(WAIT_COPY(copy, x), x)


def test_an_error_of_a_copy_is_raised_where_it_is_awaited(monkeypatch):
    def fails(self, source, **options):
        raise OSError("no space left")

    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    x = torch.ones(3)
    copy = TO_HOST(x)
    with pytest.raises(OSError, match="no space left"):
        WAIT_COPY(copy, x)


def test_copies_of_fake_tensors_have_their_shape_and_place():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        there = WAIT_COPY(TO_HOST(x), x)
    assert there.shape == (3, 4) and there.dtype == torch.bfloat16


# -- what is where ---------------------------------------------------------------------------------


def test_the_counter_counts_the_host_apart_from_the_device():
    x = torch.ones(256)  # 1 KiB
    with PeakMemory().track([x]) as memory:
        there = WAIT_COPY(TO_HOST(x), x)
        state = torch.zeros_like(there)  # what is made from the host's is the host's
        state.add_(there * 2)
        WAIT_COPY(TO_DEVICE(state, CPU), state)
    assert memory.peak_bytes == 2 * KIB
    assert memory.host_peak_bytes == 3 * KIB


def test_what_exists_can_be_counted_as_the_hosts():
    parameter, state = empty_on_host((256,), torch.float32, CPU), torch.ones(512)
    with PeakMemory().track([parameter]).track([state], host=True) as memory:
        torch.ones_like(parameter)
    assert (memory.peak_bytes, memory.host_peak_bytes) == (0, 4 * KIB)
    assert is_on_host(known_on_host(torch.ones(1)))


def graph(build) -> fx.GraphModule:
    """A graph of one input ``x`` of 256 float32 with what ``build(graph, x)`` returns; all values are of that size."""
    g = fx.Graph()
    x = g.placeholder("x")
    x.meta.update(role=Input(0), val=torch.empty(256, device="meta"))
    result = build(g, x)
    for node in g.nodes:
        node.meta.setdefault("val", torch.empty(256, device="meta"))
    add_output(g, [(Output(0), result)])
    return fx.GraphModule({}, g)


def there_and_back(g: fx.Graph, x: fx.Node) -> fx.Node:
    """x to the host, two additions meanwhile, and back."""
    start = g.call_function(TO_HOST, (x,))
    one = g.call_function(aten.add.Tensor, (x, 1))
    there = g.call_function(WAIT_COPY, (start, x))
    back = g.call_function(TO_DEVICE, (there, CPU))
    two = g.call_function(aten.add.Tensor, (one, 1))
    return g.call_function(aten.add.Tensor, (g.call_function(WAIT_COPY, (back, there)), two))


def test_what_is_made_from_the_hosts_is_on_the_host():
    gm = graph(there_and_back)
    assert [node.name for node in gm.graph.nodes if node in on_host(gm)] == ["to_host_default", "wait_copy_default"]
    ON_HOST.set(next(iter(gm.graph.nodes)), True)
    with pytest.raises(GraphInvariantError, match="copies to the host what is there already"):
        on_host(gm)


def test_an_operation_on_values_of_both_is_refused():
    def mixed(g, x):
        there = g.call_function(WAIT_COPY, (g.call_function(TO_HOST, (x,)), x))
        return g.call_function(aten.add.Tensor, (x, there))

    with pytest.raises(GraphInvariantError, match="takes values of the host and of the device"):
        on_host(graph(mixed))


def test_predicted_peaks_of_device_and_host_are_the_measured_ones():
    gm = graph(there_and_back)
    run, x = as_run(gm), torch.ones(256)
    with PeakMemory().track([x]) as memory:
        run([x])
    predicted = profile_memory(gm)
    assert memory.peak_bytes == predicted.peak_bytes == 3 * KIB  # x, the copy back, and the sums, in one place
    assert memory.host_peak_bytes == max(sum(at) for at in zip(*predicted.host.values(), strict=True)) == KIB


# -- what copies cost ------------------------------------------------------------------------------


def test_copies_have_streams_of_their_own_at_the_rate_of_the_link():
    gm, cluster = graph(there_and_back), Cluster.of("H100")
    rows = list(rows_of({"graph": gm}, profile_memory(gm), Prices(cluster, ()), fused=False))
    copies = [row for row in rows if row.kind == "copy"]
    assert [row.stream for row in copies] == ["to host", "to device"]
    link = cluster.device.linked_host.link
    assert {row.seconds for row in copies} == {link.latency + KIB / link.bandwidth}
    spans = {span.task.node: span for span in simulate(list(tasks_of(rows, cluster))).spans}
    assert spans["add_tensor"].start == spans["to_host_default"].start  # beside each other
    assert spans["to_device_default"].start == spans["to_host_default"].end  # after the wait


def test_a_device_of_whose_host_nothing_is_known_is_refused():
    gm = graph(there_and_back)
    with pytest.raises(ClusterError, match=r"does not describe its host.*calibrate"):
        list(rows_of({"graph": gm}, profile_memory(gm), Prices(toy_cluster(), ()), fused=False))


def test_a_copy_that_nothing_awaits_is_refused():
    gm = graph(lambda g, x: operator.getitem([g.call_function(TO_HOST, (x,)), x], 1))
    with pytest.raises(DeadlockError, match=r"to_host.*awaited 0 times"):
        check_waits(gm)
    with pytest.raises(DeadlockError, match=r"to_host.*returned without being awaited"):
        check_waits(graph(lambda g, x: g.call_function(TO_HOST, (x,))))
