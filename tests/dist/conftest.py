"""Pools of ranks end with the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import close_all


@pytest.fixture(autouse=True, scope="session")
def _pools() -> Iterator[None]:
    yield
    close_all()
