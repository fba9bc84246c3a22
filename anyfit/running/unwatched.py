"""Which weights are read past the watching: by code that torch does not tell of, such as a scripted function or a C++ extension.

Weights that are not there stand for no number, so such a read makes the loss none either, and the step is left out. That must not
look like the model's own doing: the forward is made again with a number in their place.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from anyfit.placing import Placed

from .rescue import Before


def refuse_unwatched(placed: Placed, loss: Callable[[], Tensor]) -> None:
    """Raises where a loss that is no number would be one if absent weights were; names the one that is read."""
    names = [slot.name for each in placed.state.chunks if each.index in placed.residency.watched for slot in each.chunk.slots]
    if not names or placed.ranks.are_several:
        return
    before = Before(placed.model, loss, placed.device)
    before.note_all()

    def is_number(without: list[str]) -> bool:
        placed.residency.part_all()
        placed.state.absent.mark(without)
        before.restore()
        with placed.watching():
            return bool(loss().isfinite())

    try:
        if is_number(names) or not is_number([]):
            return
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = names[len(half) :] if is_number(half) else half
    finally:
        placed.state.absent.mark(placed.state.parameters)
        before.restore()
    raise RuntimeError(
        f"{names[0]} is read by code that torch does not tell of (a scripted or traced function, torch.func, a C++ extension) "
        "while its weights are away, as this plan has them; call such code with a clone() of it, or use a plan with all state on "
        "the device"
    )
