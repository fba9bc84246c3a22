"""Settings of the process that user code may change: random numbers, torch's defaults and switches."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any


def process_settings(torch: Any, numpy: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Of the process, as they are, and what sets them."""
    yield random.getstate(), random.setstate
    if numpy is not None:
        yield numpy.random.get_state(), numpy.random.set_state
    yield torch.get_rng_state(), torch.set_rng_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all(), torch.cuda.set_rng_state_all
    yield torch.get_default_dtype(), torch.set_default_dtype
    if _default_device(torch) is None:  # one that was set outside stays; one that is set meanwhile goes
        yield None, lambda _: torch.set_default_device(None) if _default_device(torch) is not None else None
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])
    yield torch.is_grad_enabled(), torch.set_grad_enabled
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), functools.partial(torch.set_autocast_enabled, kind)
        yield torch.get_autocast_dtype(kind), functools.partial(torch.set_autocast_dtype, kind)
    for name in ("benchmark", "deterministic", "allow_tf32", "enabled"):
        yield getattr(torch.backends.cudnn, name), functools.partial(setattr, torch.backends.cudnn, name)


def _default_device(torch: Any) -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
