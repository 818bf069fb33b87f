"""The garbage collector and what a compilation makes: it is neither visited inside nor again right after."""

import gc
import weakref

import pytest

import shardgraph
from shardgraph import garbage
from shardgraph.garbage import collect_if_many, collected_later
from shardgraph.search import recomputation
from tests.machines import toy_cluster
from tests.zoo import make


@pytest.fixture
def unfrozen(monkeypatch):
    """A collector without frozen objects; tests freeze what imports have made."""
    monkeypatch.setattr(garbage, "_caller_freezes", False)
    gc.unfreeze()
    yield
    gc.freeze()


def generation_of(wanted: object) -> int | None:
    return next((n for n in range(3) if any(each is wanted for each in gc.get_objects(generation=n))), None)


def test_what_was_made_is_old_afterwards(unfrozen):
    with collected_later():
        made = [[] for _ in range(10)]
    assert generation_of(made) == 2 and gc.isenabled()


def test_what_the_caller_has_frozen_stays_frozen(unfrozen):
    frozen = [[]]
    gc.freeze()
    with collected_later():
        made = [[]]
    assert generation_of(frozen) is None and generation_of(made) is not None


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("many", [100, 10_000_000], ids=["many", "few"])
def test_garbage_is_looked_for_once_there_are_many_objects(monkeypatch, many):
    monkeypatch.setattr(garbage, "_MANY", many)
    with collected_later():
        dropped = weakref.ref(Cycle())
        kept = [[] for _ in range(1000)]
        collect_if_many()
        assert (dropped() is None) == (len(kept) > many)


def test_a_search_keeps_few_programs_at_a_time(monkeypatch):
    """Each is garbage when the next one is made, which nothing looked for: a model of six layers took 14 GiB."""
    made = []

    def noted(*args, **kwargs):
        program = lower(*args, **kwargs)
        made.append(weakref.ref(program.forward))
        alive.append(sum(each() is not None for each in made))
        return program

    alive: list[int] = []
    lower = recomputation.lower
    monkeypatch.setattr(recomputation, "lower", noted)
    monkeypatch.setattr(garbage, "_MANY", 1000)
    model, (args, kwargs) = make("odd-mlp", 4)
    shardgraph.plan(model, args, example_kwargs=kwargs, cluster=toy_cluster(1, 4), memory="40KiB")
    assert max(alive) <= 3 < len(made)


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_first_call_returns_is_freed_without_the_collector():
    model, (args, kwargs) = make("llama", 2)  # whose code catches exceptions, which the tracer keeps
    sharded = shardgraph.compile(model, plan="single")
    gc.disable()
    try:
        output = sharded(*args, **kwargs)
        scores = weakref.ref(output.logits)
        del output
        assert scores() is None
    finally:
        gc.enable()
