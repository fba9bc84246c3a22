"""Embedding, head and loss with the vocabulary divided over a tensor axis train what one plain process trains."""

from __future__ import annotations

import pytest

from .axis_work import AxisCase, plainly, trained
from .pool import pool_of
from .talking import TABLES
from .test_tensor_axis import AWAY, SHARDED, SHARDED_AWAY, STREAMED, assert_equal


def case_of(family: str, **options: object) -> AxisCase:
    return AxisCase(family, border=None, tables=TABLES[family], **options)  # type: ignore[arg-type]


CASES = [
    (case_of("tied words", clip_norm=0.3), 2),
    (case_of("padded words", placements=(AWAY,), optimizer="adamw"), 2),
    (case_of("shifted words", placements=(STREAMED,)), 2),
    (case_of("sliced words", placements=(AWAY,)), 2),
    (case_of("unusual words"), 2),
    (case_of("tied", placements=(SHARDED,), clip_norm=0.3), 4),
    (case_of("odd words", placements=(AWAY,), optimizer="adamw", clip_norm=0.1), 2),
    (case_of("gemma's odd words", placements=(SHARDED,), accumulation=2, clip_norm=0.3), 4),
]
MORE = [
    (case_of("llama's words", placements=(SHARDED_AWAY,), accumulation=2, clip_norm=0.3), 4),
    (case_of("gemma's words", tensor=4), 4),
    (case_of("gemma's own loss", placements=(AWAY,)), 2),
    (case_of("unusual words", placements=(AWAY,), tensor=4), 4),
    (case_of("tied", activations="recompute", accumulation=3, placements=(AWAY,)), 2),
    (case_of("padded words", tensor=4, clip_norm=0.1), 4),
    (case_of("odd words", tensor=4, optimizer="adagrad"), 4),
    (case_of("biased words", tensor=4, placements=(AWAY,)), 4),
    (case_of("odd shifted words", placements=(AWAY,), optimizer="adamw"), 2),
    (case_of("odd sliced words", placements=(STREAMED,), tensor=4), 4),
    (case_of("odd unusual words", placements=(AWAY,), tensor=4), 4),
    (case_of("gemma's odd words", placements=(SHARDED_AWAY,), tensor=2), 4),
]


@pytest.mark.parametrize(("case", "ranks"), [*CASES, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)], ids=str)
def test_a_divided_vocabulary_trains_as_one_process(case: AxisCase, ranks: int) -> None:
    assert_equal(pool_of(ranks).run(trained, case), plainly(case))
