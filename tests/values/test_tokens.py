"""Tokens of a batch: by its shape, and without padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from anyfit.values.tokens import padding_share, real_tokens, tokens_by_shape

IDS = torch.ones(2, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
ANSWERS = torch.tensor([[-100, 7, -100, 8, -100, -100], [-100, -100, -100, -100, -100, 9]])  # prompts are tokens too


@dataclass
class Piece:
    inputs: dict[str, Tensor]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, 12),
        ((IDS, IDS), 12),
        ({"input_ids": IDS, "attention_mask": MASK}, 10),
        ({"input_ids": IDS, "attention_mask": MASK.bool(), "labels": ANSWERS}, 10),
        ({"input_ids": IDS, "labels": ANSWERS}, 10),
        ({"input_ids": IDS, "labels": IDS}, 12),
        ({"input_ids": IDS, "labels": torch.full((2, 6), -100)}, 0),
        ({"input_ids": IDS, "labels": torch.ones(2, 3, dtype=torch.long)}, 12),  # of a decoder of its own
        ([Piece({"input_ids": IDS, "attention_mask": MASK}), Piece({"input_ids": IDS, "labels": ANSWERS})], 20),
        ({"images": torch.ones(2, 3, 4, 4), "label": torch.ones(2, dtype=torch.long)}, math.nan),
        ({"x": torch.ones(2, 3)}, math.nan),
    ],
)
def test_padding_is_no_token(batch: Any, expected: float) -> None:
    assert float(real_tokens(batch)) == pytest.approx(expected, nan_ok=True)


def test_by_its_shape_padding_counts() -> None:
    assert tokens_by_shape({"input_ids": IDS, "attention_mask": MASK}, 2) == 12
    assert tokens_by_shape({"x": torch.ones(2, 3)}, 2) == 2
    assert padding_share({"input_ids": IDS, "attention_mask": MASK}) == pytest.approx(1 / 6)
    assert padding_share({"x": torch.ones(2, 3)}) == 0
