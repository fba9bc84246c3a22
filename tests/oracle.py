"""The oracle: plain PyTorch. Every engine is compared with this loop, on the same seed and data.

In bf16 it keeps whole fp32 masters beside bf16 weights, and rounds by the split's rule (ties away from zero), written here
on its own. Gradients of several micro-batches add up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyfit import Job


def train_plainly(
    job: Job, batches: Sequence[Any], accumulation: int | Sequence[int] = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights (fp32 masters in bf16) of plain PyTorch training; `accumulation` may be one number a step."""
    torch.manual_seed(job.seed)
    model = job.build()
    trainer = (PlainFp32 if job.precision == "fp32" else PlainBf16)(job, model)
    counts = [accumulation] * len(batches) if isinstance(accumulation, int) else accumulation
    losses = [trainer.step(batch, count) for batch, count in zip(batches, counts, strict=True)]
    return losses, trainer.weights()


class PlainFp32:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model = job, model
        self.optimizer = job.optimizer(model)
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None

    def step(self, batch: Any, accumulation: int) -> float:
        total = self._backward(batch, accumulation)
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.model.zero_grad()  # those outside the optimizer too
        return total

    def _backward(self, batch: Any, accumulation: int) -> float:
        total = weight = 0.0
        for part in equal_parts(batch, accumulation):
            loss, more = shared(self.job.loss(self.model, part), accumulation)
            loss.backward()
            total, weight = total + float(loss.detach()), weight + more
        if weight:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / weight)
        return total / (weight or 1)

    def weights(self) -> dict[str, Tensor]:
        state = self.model.state_dict().items()
        return {name: each.detach().clone() for name, each in state if isinstance(each, Tensor)}  # others are extra state


class PlainBf16:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model = job, model
        self.optimizer = job.optimizer(model)
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.keeps_fp32 = {
            parameter
            for module in model.modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
            for parameter in module.parameters(recurse=False)
        }
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self.masters: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if parameter in self.keeps_fp32:
                continue
            if parameter.requires_grad and id(parameter) in trained:
                self.masters[parameter] = parameter.detach().clone()
                parameter.data = round_half_away(parameter.data)
            else:
                parameter.data = parameter.data.bfloat16()  # as plain PyTorch does, where there is no master

    def step(self, batch: Any, accumulation: int) -> float:
        total, sums = self._sums(batch, accumulation)
        for parameter, gradient in sums.items():
            parameter.data = self.masters.get(parameter, parameter.data.float())
            parameter.grad = gradient
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.model.zero_grad()
        for parameter in sums:
            if parameter in self.masters:
                self.masters[parameter] = parameter.data
            if parameter not in self.keeps_fp32:
                parameter.data = round_half_away(parameter.data)
        return total

    def _sums(self, batch: Any, accumulation: int) -> tuple[float, dict[nn.Parameter, Tensor]]:
        """The loss, and the gradients in fp32."""
        total, weight, sums = 0.0, 0.0, {}
        for part in equal_parts(batch, accumulation):
            loss, more = shared(self.job.loss(self.model, to_bf16(part)), accumulation)
            loss.backward()
            total, weight = total + float(loss.detach()), weight + more
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                    parameter.grad = None
        for gradient in sums.values() if weight else ():
            gradient.mul_(1 / weight)
        return total / (weight or 1), sums

    def weights(self) -> dict[str, Tensor]:
        masters = {id(parameter): master for parameter, master in self.masters.items()}
        return {
            name: masters.get(id(tensor), tensor.detach()).clone()
            for name, tensor in self.model.state_dict(keep_vars=True).items()
        }


def round_half_away(exact: Tensor) -> Tensor:
    """fp32 to bf16 in float64 arithmetic on the magnitude, ties away from zero."""
    bits = exact.contiguous().view(torch.int32).to(torch.int64)
    magnitude = (bits & 0x7FFFFFFF) + 0x8000
    sign = bits & 0x80000000
    high = ((magnitude & 0xFFFF0000) | sign) >> 16
    return torch.where(high >= 0x8000, high - 0x10000, high).to(torch.int16).view(torch.bfloat16)


def shared(loss: Any, accumulation: int) -> tuple[Tensor, float]:
    """What a micro-batch goes backward with, and the weight that the sum of all is divided by: 0 where each has its share."""
    if isinstance(loss, tuple):
        return (loss[0], float(loss[1])) if accumulation > 1 else (loss[0] / loss[1], 0.0)
    return (loss / accumulation if accumulation > 1 else loss), 0.0


def equal_parts(batch: Any, count: int) -> list[Any]:
    if count == 1:
        return [batch]
    if isinstance(batch, Tensor):
        return list(batch.chunk(count))
    cut = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: parts[index] for key, parts in cut.items()} for index in range(count)]


def to_bf16(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.bfloat16() if batch.is_floating_point() else batch
    return {key: to_bf16(value) for key, value in batch.items()}


def assert_bit_equal(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert mine.keys() == plain.keys()
    for name, expected in plain.items():
        assert mine[name].dtype == expected.dtype, name
        assert torch.equal(mine[name], expected), f"{name}: off by {(mine[name].float() - expected.float()).abs().max()}"


def assert_close(mine: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float) -> None:
    """Per tensor and normwise."""
    assert mine.keys() == plain.keys()
    for name, expected in plain.items():
        difference = float((mine[name].double() - expected.double()).norm())
        scale = float(expected.double().norm())
        assert difference <= tolerance * max(scale, 1e-12), f"{name}: {difference:.3e} against {scale:.3e}"
