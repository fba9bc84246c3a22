"""How long one call of a block takes forward and backward, eager or compiled, and what it holds: on the inputs of a real call.

On a GPU a phase has three times (values/compiled.py): the host's, to launch it; the device's own, seen behind a pause that lets
the host run ahead; and from the first launch to the last result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from anyfit.values.compiled import BlockTime, PhaseTime

from .compiled_trial import Block, Trial, without_history

WARM_UP, TIMED = 2, 5
PAUSE_CYCLES_PER_SECOND = 3e9  # more than any GPU's clock: a pause that is too short would count waits

_cuda: Any = torch.cuda


def times_of(block: Block, trial: Trial) -> tuple[BlockTime, BlockTime]:
    """Eager, and compiled."""
    return _time(block, trial, block.eager_forward), _time(block, trial, block.run)


def _time(block: Block, trial: Trial, forward: Callable[..., Any]) -> BlockTime:
    calls = [_Call(block, trial, forward) for _ in range(WARM_UP + TIMED)]
    for each in calls:
        each.run(pauses=False)
    timed = calls[WARM_UP:]
    launch = [statistics.median(column) for column in zip(*(each.launched for each in timed), strict=True)]
    alone = [statistics.median(column) for column in zip(*(each.alone for each in timed), strict=True)]
    device = alone
    if block.device.type == "cuda":
        behind = _Call(block, trial, forward)
        behind.run(pauses=True, seconds=2 * sum(launch))
        device = [min(own, whole) for own, whole in zip(behind.alone, alone, strict=True)]
    else:
        launch = [0.0, 0.0]
    last = timed[-1]
    phases = [PhaseTime(*each) for each in zip(launch, device, alone, strict=True)]
    return BlockTime(phases[0], phases[1], last.saved_bytes, *last.peaks)


class _Call:
    """One call, and its backward."""

    def __init__(self, block: Block, trial: Trial, forward: Callable[..., Any]) -> None:
        self._block, self._trial, self._forward, self._device = block, trial, forward, block.device
        self._storages: dict[int, int] = {}
        self._own = {each.untyped_storage()._cdata for each in block.module.parameters()}
        self.launched, self.alone, self.peaks = [0.0, 0.0], [0.0, 0.0], [0, 0]

    @property
    def saved_bytes(self) -> int:
        return sum(self._storages.values())

    def run(self, *, pauses: bool, seconds: float = 0.0) -> None:
        with self._trial.inside(saved_tensors_hooks(self._saved, _as_it_is)):
            leaves, (args, kwargs) = self._trial.given()
            wanted = self._trial.wanted(leaves)
            self._wait()
            base = self._allocated()
            marks = self._marks(pauses, seconds)
            start = time.perf_counter()
            found = self._forward(*args, **kwargs)
            self._end(0, start, base, marks)
            outputs = [each for each in tree_leaves(found) if isinstance(each, Tensor) and each.requires_grad]
            slopes = self._trial.slopes(outputs)
            if not pauses:
                self._wait()
            start = time.perf_counter()
            made = torch.autograd.grad(outputs, wanted, slopes, allow_unused=True) if outputs and wanted else None
            self._end(1, start, base, marks)
            self._wait()
            if marks:
                self.alone = [marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3]
            del found, made

    def _end(self, phase: int, start: float, base: int, marks: list[Any]) -> None:
        self.launched[phase] = time.perf_counter() - start
        if marks:
            marks.append(_cuda.Event(enable_timing=True))
            marks[-1].record()
            return
        self._wait()
        self.alone[phase] = time.perf_counter() - start
        if self._device.type == "cuda":
            self.peaks[phase] = _cuda.max_memory_allocated(self._device) - base
            _cuda.reset_peak_memory_stats(self._device)

    def _marks(self, pauses: bool, seconds: float) -> list[Any]:
        if not pauses:
            return []
        _cuda._sleep(int(seconds * PAUSE_CYCLES_PER_SECOND))
        first = _cuda.Event(enable_timing=True)
        first.record()
        return [first]

    def _saved(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own:
                self._storages[storage._cdata] = storage.nbytes()
        return without_history(tensor)

    def _allocated(self) -> int:
        if self._device.type != "cuda":
            return 0
        _cuda.reset_peak_memory_stats(self._device)
        return int(_cuda.memory_allocated(self._device))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            _cuda.synchronize(self._device)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
