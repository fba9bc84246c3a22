"""A cache for what datasets reads, of this run of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import datasets
import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))  # of the processes that tests start
        yield
