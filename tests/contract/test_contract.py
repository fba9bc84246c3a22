"""Every hostile job is trained as plain PyTorch trains it, or refused by name before its first step: docs/contract.md."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import pytest
import torch

from tests.dist.pool import close_all

from .case import Case, catalogue
from .columns import outcome_of
from .known_open import ENDS_THE_PROCESS, KNOWN_OPEN
from .page import PAGE, written

SHARE = 20  # of so many cells `make test` tries one
MOST_REFUSED = 0.12  # of all cases, with ample memory
CASES = catalogue()
CELLS = [(case, column) for case in CASES.values() for column in case.columns]


@pytest.fixture(autouse=True, scope="module")
def _pools() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Compiled code of one job is not taken for another's."""
    yield
    torch._dynamo.reset()


def marks(case: Case, column: str) -> list[pytest.MarkDecorator]:
    key = (case.name, column)
    found = []
    if zlib.crc32(f"{case.name} {column}".encode()) % SHARE:
        found.append(pytest.mark.full)
    if key in KNOWN_OPEN:
        found.append(pytest.mark.xfail(reason=KNOWN_OPEN[key], strict=True, run=key not in ENDS_THE_PROCESS))
    return found


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # the jobs' own
@pytest.mark.parametrize(
    ("case", "column"),
    [pytest.param(case, column, marks=marks(case, column), id=f"{case.name}-{column}") for case, column in CELLS],
)
def test_a_job_is_equal_or_refused(case: Case, column: str) -> None:
    outcome = outcome_of(case, column)
    if case.is_refused(column):
        assert outcome.kind == "refused", f"{outcome.kind}, where it is to be refused: {outcome.said}"
        assert re.search(case.expected[column].message, outcome.said), outcome.said
    else:
        assert outcome.kind == "equal", f"{outcome.kind}: {outcome.said}"


def test_the_catalogue_is_large_and_refuses_little_where_there_is_room() -> None:
    assert len(CASES) >= 120
    refused = [case.name for case in CASES.values() if case.is_refused("ample")]
    assert len(refused) <= MOST_REFUSED * len(CASES), refused


def test_what_is_open_is_in_the_catalogue() -> None:
    cells = {(case.name, column) for case, column in CELLS}
    assert set(KNOWN_OPEN) <= cells
    assert set(KNOWN_OPEN) >= ENDS_THE_PROCESS


def test_the_page_lists_the_outcome_of_every_job() -> None:
    page = written()
    if PAGE.read_text() != page:
        PAGE.write_text(page)
        pytest.fail(f"{PAGE.name} was not as the catalogue says; it is now: read what has changed and commit it")
