"""Costs of divisions among ranks of several nodes, or along two axes, from those along one axis inside a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardgraph.cost_models.cluster import Cluster
from shardgraph.search.divided_costs import Slower, among, both, slower
from shardgraph.search.layer_costs import LayerCosts, Part
from tests.machines import toy_cluster

LAYER = Part(forward=8.0, backward=16.0, saved=800.0, parameters=80.0, gathered=80.0, reduced=80.0, tensors=4.0)


def costs(layer: Part) -> LayerCosts:
    return LayerCosts(Part(), layer, Part(), 4, 1, 64.0, 8.0, (0.25,) * 4, (8.0,) * 4)


def divided(ranks: int, sent: float, parameters: float = 1.0) -> LayerCosts:
    """Work divided evenly, and ``sent`` seconds of waiting, half in forward and half in backward."""
    layer = LAYER._replace(
        forward=LAYER.forward / ranks + sent / 2,
        backward=LAYER.backward / ranks + sent / 2,
        sent=sent,
        exposed=sent / 2,
        exposed_back=sent / 2,
        saved=LAYER.saved / ranks,
        **{name: getattr(LAYER, name) * parameters for name in ("parameters", "gathered", "reduced")},
    )
    return replace(costs(layer), working=64.0 / ranks, crossing=8.0 / ranks)


def test_twice_the_ranks_have_half_the_work_each_and_wait_as_much_longer_as_their_collectives_take():
    found = among(costs(LAYER), divided(8, sent=1.0, parameters=1 / 8), "tp", 8, 16, Slower(3.0, 3.0))
    expected = divided(16, sent=3.0, parameters=1 / 16)
    assert found.layer == pytest.approx(expected.layer)
    assert (found.working, found.crossing) == pytest.approx((expected.working, expected.crossing))


def test_as_many_ranks_at_links_as_fast_cost_the_same():
    known = divided(8, sent=1.0)
    assert among(costs(LAYER), known, "ep", 8, 8, Slower(1.0, 1.0)) == known


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 0.5), (6.0, 3.0)])
def test_a_ring_waits_only_for_what_attention_does_not_hide(factor, seconds):
    hidden = divided(8, sent=0.0).layer._replace(sent=1.0)
    found = among(costs(LAYER), replace(divided(8, sent=0.0), layer=hidden), "cp", 8, 16, Slower(1.0, factor))
    assert found.layer.forward == pytest.approx(max(0.5, seconds))


def test_two_axes_divide_the_work_of_each_other_and_what_they_send():
    found = both(costs(LAYER), "ep", divided(2, sent=1.0), 2, divided(4, sent=2.0, parameters=1 / 4), 4)
    assert found.layer.forward == pytest.approx(8.0 / 8 + (1.0 / 4 + 2.0 / 2) / 2)
    assert found.layer.sent == pytest.approx(1.0 / 4 + 2.0 / 2)
    assert found.layer.saved == pytest.approx(800.0 / 8) and found.layer.parameters == pytest.approx(20.0)
    assert found.layer.tensors == 4.0 and found.working == pytest.approx(64.0 / 8)


@pytest.mark.parametrize(("axis", "sent"), [("cp", 1.0 / 4), ("ep", 1.0)])
def test_a_ring_sends_the_heads_that_a_rank_has_though_it_saves_all(axis, sent):
    """What else is sent is as much as what is saved."""
    inner = divided(4, sent=0.0)
    inner = replace(inner, layer=inner.layer._replace(saved=LAYER.saved))
    found = both(costs(LAYER), axis, divided(2, sent=1.0), 2, inner, 4)
    assert found.layer.forward == pytest.approx(8.0 / 8 + sent / 2)


def test_what_neither_of_two_axes_divides_stays_whole():
    def whole(ranks: int) -> LayerCosts:
        return replace(divided(ranks, sent=0.0), working=32.0 + 32.0 / ranks)

    assert both(costs(LAYER), "cp", whole(2), 2, whole(4), 4).working == pytest.approx(32.0 + 32.0 / 8)


def test_what_attention_hides_of_a_ring_is_not_saved_by_faster_links():
    hidden = divided(8, sent=0.0).layer._replace(sent=1.0)
    ring = replace(divided(8, sent=0.0), layer=hidden)
    found = among(costs(LAYER), ring, "cp", 8, 16, Slower(1.0, 1.0)).layer
    assert found.with_links_faster(2).forward == pytest.approx(found.forward)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_collectives_beyond_a_node_take_as_much_longer_as_its_links_are_faster(axis):
    cluster = toy_cluster(2, 4)
    far = cluster.group_of((("ep", 2), ("tp", 4)) if axis == "ep" else ((axis, 8),), axis)
    most = 10 * (7 / 8) / (3 / 4) if axis != "ep" else 10  # each of more ranks sends more of the whole
    assert 2 < slower(cluster, axis, far, 4 if axis != "ep" else 2, 2**24).bandwidth <= most + 1e-6
    assert slower(cluster, axis, cluster.group_of(((axis, 4),), axis), 4, 2**24) == (1, 1)


@pytest.mark.parametrize(("whole", "rounds"), [(False, 1), (True, 2)])
def test_a_ring_of_fewer_ranks_has_fewer_latencies(whole, rounds):
    """Of gathers and scatters as many as it has ranks less one, of reductions twice as many; or twice the logarithm."""
    cluster = Cluster.of("H100")
    found = slower(cluster, "tp", cluster.group_of((("tp", 2),), "tp"), 8, 2**24, whole)
    assert found == pytest.approx((rounds * 1 / 6, (1 / 2) / (7 / 8)))


def test_among_fewer_ranks_latencies_and_bytes_shrink_apart():
    known = divided(8, sent=1.0)
    known = replace(known, layer=known.layer._replace(latency=0.5))
    found = among(costs(LAYER), known, "tp", 8, 2, Slower(0.1, 0.6)).layer
    assert (found.latency, found.sent) == pytest.approx((0.05, 0.35))
    assert found.forward == pytest.approx(8.0 / 2 + 0.35 / 2)


def test_computation_hides_as_large_a_part_of_less_that_is_sent_and_as_much_of_more():
    """Half of the second that each half sends is hidden."""
    half_hidden = divided(8, sent=1.0)
    half_hidden = replace(half_hidden, layer=half_hidden.layer._replace(sent=2.0))
    seconds = [among(costs(LAYER), half_hidden, "tp", 8, 8, Slower(1.0, factor)).layer.forward for factor in (0.5, 2.0)]
    assert seconds == pytest.approx([1.0 + 0.25, 1.0 + 0.5 + 1.0])


def test_a_part_that_sends_nothing_but_for_rounding_waits_for_nothing():
    known = divided(8, sent=0.0)
    known = replace(known, layer=known.layer._replace(latency=1e-19))
    assert among(costs(LAYER), known, "tp", 8, 2, Slower(0.1, 0.6)).layer.forward == pytest.approx(8.0 / 2)


def test_latencies_do_not_grow_with_the_batch_and_other_axes_do_not_divide_them():
    waits = LAYER._replace(forward=10.0, sent=4.0, latency=2.0, exposed=2.0, exposed_back=1.0)
    assert waits.seconds(3.0) == pytest.approx((1.0 + 9.0 * 3, 0.5 + 15.5 * 3))
    faster = waits.with_links_faster(2)
    assert (faster.sent, faster.forward, faster.exposed_back) == pytest.approx((3.0, 9.5, 0.75))
    outer = divided(2, sent=1.0)
    outer = replace(outer, layer=outer.layer._replace(latency=1.0))
    found = both(costs(LAYER), "ep", outer, 2, divided(4, sent=2.0), 4).layer
    assert found.sent == pytest.approx(1.0 + 2.0 / 2) and found.latency == 1.0
    assert found.forward == pytest.approx(8.0 / 8 + 0.5 + (2.0 / 2) / 2)
