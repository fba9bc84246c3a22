"""TRL's SFTTrainer on anyfit. A script gets one more line, after its own imports:
`from anyfit.integrations.trl import AnyfitSFTTrainer as SFTTrainer`."""

from __future__ import annotations

from trl import SFTTrainer

from .huggingface import AnyfitMixin


class AnyfitSFTTrainer(AnyfitMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, trained by anyfit."""
