"""What all tests share: few threads, a probe made once, and two tiers of random examples.

`make test` takes a seeded share of the random examples; ANYFIT_TESTS=full (`make test-all`) takes all of them, and the
tests marked `full`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

FULL = os.environ.get("ANYFIT_TESTS") == "full"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)

COMMON = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "print_blob": True}
hypothesis.settings.register_profile("share", max_examples=8, derandomize=True, database=None, **COMMON)
hypothesis.settings.register_profile("full", max_examples=200, **COMMON)
hypothesis.settings.load_profile("full" if FULL else "share")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            return False
        return FULL or item.get_closest_marker("full") is None

    left_out = [item for item in items if not wanted(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if wanted(item)]


@pytest.fixture(scope="session", autouse=True)
def probe_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this run of the tests, for the processes they start too: the machine is probed once."""
    before = os.environ.get("ANYFIT_CACHE")
    os.environ["ANYFIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["ANYFIT_CACHE"]
    else:
        os.environ["ANYFIT_CACHE"] = before


@pytest.fixture(autouse=True)
def same_randomness() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """With nothing compiled before, and nothing left."""
    from anyfit.placing import compiled

    compiled.backend_for.cache_clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def root() -> Path:
    """The repository."""
    return Path(__file__).parent.parent


# torch notes once which functions make tensors, for `torch.device("meta")`. Were transformers first to ask, while it replaces
# torch.linspace to load a model, torch would not know its own from then on.
with torch.device("meta"):
    torch.empty(0)
