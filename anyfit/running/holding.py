"""Which models a run holds: their parameters lie in its chunks and tell it of their use, so that no second run may have them.

Held is a parameter, not a module: a second run of a part of the model, or of one that shares a weight with it, would train on the
first one's as well. It is let go of when the run is closed; one that was forgotten without that holds on.
"""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_held = WeakIdKeyDictionary()  # by parameter, a token of its run


def refuse_held(model: nn.Module) -> None:
    """Raises where an unclosed run holds a parameter of the model."""
    for name, parameter in model.named_parameters():
        if parameter in _held:
            raise RuntimeError(
                f"another run that is not closed holds this {type(model).__name__} ({name}): close the first run, with "
                "run.close() or `with anyfit.start(job) as run`, or give each run a model of its own: Job(model=lambda: Model())"
            )


def hold(model: nn.Module) -> object:
    """From here on; until `let_go` of what this gives."""
    token = object()
    for parameter in model.parameters():
        _held[parameter] = token
    return token


def let_go(model: nn.Module, token: object) -> None:
    for parameter in model.parameters():
        if _held.get(parameter) is token:
            del _held[parameter]
