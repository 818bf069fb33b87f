"""What every test shares: one thread, quiet libraries, no downloads, and ranks that start with their imports done."""

import gc
import multiprocessing
import os

import pytest
import torch

import shardgraph
from tests.parts import (  # noqa: F401  hooks of pytest
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
)

pytest_plugins = ["tests.variants"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SHARDGRAPH_CACHE"] = "off"  # but in the tests of it, also if the user has one
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
torch.set_num_threads(1)
multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(
    [
        "shardgraph.api.compile",
        "shardgraph.fairscale",
        "shardgraph.runtime.launch",
        "tests.pipelines",
        "tests.ranks",
        "tests.standing",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ]
)


@pytest.fixture(scope="session", autouse=True)
def guessed_rates_of_this_cpu(tmp_path_factory):
    """Plans are priced alike on every machine that runs the tests, and none is measured for it."""
    from shardgraph.calibration.remembered import measured_file

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        measured_file().parent.mkdir()
        shardgraph.Cluster.detect().save(measured_file())
        yield


@pytest.fixture(scope="session", autouse=True)
def values_are_checked_between_passes():
    """Every value is computed again after the pass that writes it or what it follows from."""
    from shardgraph.passes.base import checking
    from tests.value_check import CheckValues

    with checking(CheckValues()):
        yield


def pytest_collection_finish():
    """Leave what imports have made, millions of objects, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_sessionfinish():
    from tests import standing

    standing.end_all()


@pytest.fixture(scope="module")
def shared_captures():
    """Equal models are captured once; for modules whose tests are of what is done with a captured graph."""
    from tests.captures import sharing_captures

    with sharing_captures():
        yield
