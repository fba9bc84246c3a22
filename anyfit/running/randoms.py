"""The random generators of a process: torch's, the GPU's, Python's and numpy's."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .plain import plain
from .unplain import unplain


@dataclass(frozen=True)
class Randoms:
    """Their states."""

    torch: bytes
    cuda: bytes | None
    python: Any
    numpy: Any  # None: not kept (former.py)

    @classmethod
    def now(cls) -> Randoms:
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
        return cls(torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def to_json(self) -> dict[str, Any]:
        cuda = None if self.cuda is None else base64.b64encode(self.cuda).decode()
        return {
            "torch": base64.b64encode(self.torch).decode(),
            "cuda": cuda,
            "python": plain(self.python, ("random state",)),
            "numpy": plain(self.numpy, ("random state of numpy",)),
        }

    @classmethod
    def from_json(cls, document: Any) -> Randoms:
        cuda = document["cuda"]
        found = cls(
            base64.b64decode(document["torch"], validate=True),
            None if cuda is None else base64.b64decode(cuda, validate=True),
            unplain(document["python"]),
            None if document["numpy"] is None else unplain(document["numpy"]),
        )
        random.Random().setstate(found.python)  # raises where it is none
        if found.numpy is not None:
            np.random.RandomState(0).set_state(found.numpy)
        torch.Generator().set_state(torch.frombuffer(bytearray(found.torch), dtype=torch.uint8))
        return found

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
