"""Names that a plan and what belongs to it have in common."""

from __future__ import annotations

from typing import Literal

# What becomes of what a block's forward leaves for its backward: kept on the device; recomputed; recomputed but for the
# results of products, convolutions and attention; moved to the host and back.
Activations = Literal["keep", "recompute", "selective", "offload"]
