"""Job: what to train. The only value that holds the user's own Python objects; it never travels as JSON."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from . import batches, nests
from .layout import Placeable
from .loss_rule import AGREEMENTS
from .precision import PRECISIONS
from .record import nearest
from .weights import Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch: TypeAlias = Any  # tensors in any nest of mappings, sequences and dataclasses
LossValue: TypeAlias = "Tensor | tuple[Tensor, Tensor | float]"
# Of torch.optim. Any other optimizer works that steps without a closure and treats the elements of dense gradients alike.
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@dataclass(frozen=True, eq=False, repr=False)
class Job:
    """A model, a loss, an optimizer and a batch size: all that is needed to plan and train.

    model         an nn.Module, or a function that makes one (it is called on the meta device for planning, for real once)
    loss          (model, batch) -> a scalar tensor, the mean over the batch's samples; or (sum, weight), two scalars:
                  gradients are then normalised by the weight of the whole batch, so padding is exact
    optimizer     model -> a torch optimizer, parameter groups included
    sample        a batch like those to come; only its shapes and dtypes matter, unless real_run
    batch_size    samples a step, over all micro-batches
    scheduler     optimizer -> a torch learning-rate scheduler, stepped once an update
    clip_norm     gradients are scaled down to this global norm when they exceed it
    precision     "bf16": weights are bf16 with exact fp32 masters; "fp32": all is fp32
    seed          of weights, data order and dropout
    micro_batch   samples a forward pass; None lets the plan choose
    max_sample    the largest batch to expect, when sizes vary; memory is planned for it
    split         (batch, sizes) -> as many batches, or fewer, where samples are not along dim 0 of tensors or entries of lists
    weights       a folder of safetensors to start from, as `save_pretrained` writes it, or a `Weights` that takes a part of one;
                  the model is then built without them, and never whole in memory
    real_run      the model may be run for real to plan it, on the CPU, for a forward that needs the values of tensors; None
                  lets small models, of at most 100 million parameters
    agree         differences from plain PyTorch that you agree to: "mean-of-micro-batches", where the loss of a batch may be the
                  mean of its micro-batches' losses; "batch-norm-of-micro-batches", where batch norms may see micro-batches
    compile       None: as the plan says, with eager's numerics; False: nothing is compiled; "fast": as inductor rounds and draws
    replay        False: no block is launched at once, as CUDA graphs; else those are for which a step would wait for the host
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], LossValue]
    optimizer: Callable[[nn.Module], Optimizer]
    sample: Batch
    batch_size: int
    _: KW_ONLY
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    precision: Literal["bf16", "fp32"] = "bf16"
    seed: int = 0
    micro_batch: int | None = None
    max_sample: Batch | None = None
    split: Callable[[Batch, Sequence[int]], Sequence[Batch]] | None = None
    weights: Weights | str | Path | None = None
    real_run: bool | None = None
    agree: Collection[str] = ()
    compile: Literal[False, "fast"] | None = None
    replay: bool = True

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "scheduler", "split"):
            value = getattr(self, name)
            if not callable(value) and not (name in ("scheduler", "split") and value is None):
                raise TypeError(f"Job({name}=) must be callable, got {_describe(value)}{_HINTS.get(name, '')}")
        if isinstance(self.optimizer, type):
            raise TypeError(
                f"Job(optimizer=) takes a function of the model, got {_describe(self.optimizer)}{_HINTS['optimizer']}"
            )
        for name in ("batch_size", "micro_batch", "seed"):
            value = getattr(self, name)
            if name == "micro_batch" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Job({name}=) must be an int, got {_describe(value)}")
            least = 0 if name == "seed" else 1
            if value < least:
                raise ValueError(f"Job({name}=) must be at least {least}, got {value}")
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise ValueError(f"Job(micro_batch={self.micro_batch}) is larger than batch_size={self.batch_size}")
        if self.clip_norm is not None:
            if not isinstance(self.clip_norm, int | float) or isinstance(self.clip_norm, bool):
                raise TypeError(f"Job(clip_norm=) must be a number or None, got {_describe(self.clip_norm)}")
            if not self.clip_norm > 0:
                raise ValueError(f"Job(clip_norm=) must be positive, got {self.clip_norm}; None does not clip")
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            raise ValueError(f"Job(precision={self.precision!r}) is not known" + nearest(str(self.precision), PRECISIONS))
        _check_choices(self)
        if isinstance(self.agree, str) or not isinstance(self.agree, Collection):
            raise TypeError(f"Job(agree=) must be a list of names, got {_describe(self.agree)}; agree=['mean-of-micro-batches']")
        for name in self.agree:
            if name not in AGREEMENTS:
                raise ValueError(f"Job(agree=[{name!r}]) is not known" + nearest(str(name), AGREEMENTS))
        if self.weights is not None and not isinstance(self.weights, Weights | str | Path):
            raise TypeError(f"Job(weights=) must be a folder or a Weights, got {_describe(self.weights)}")
        if self.sample is None:
            raise TypeError("Job(sample=) is None; give a batch like those to come, for example next(iter(loader))")
        for name in ("sample", "max_sample"):
            batches.refuse_iterators(getattr(self, name), name)

    def build(self) -> nn.Module:
        """The model itself, or what the factory makes."""
        from torch import nn

        if isinstance(self.model, nn.Module):
            return self.model
        model = self.model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"Job(model=) made {_describe(model)}, not an nn.Module")
        return model

    def placeables(self, model: nn.Module, group_of: Mapping[int, int]) -> list[Placeable]:
        """What is to be laid out in chunks; by identity of a parameter, its optimizer group."""
        dtypes = self.dtypes(model)
        return [
            Placeable(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(dtypes[name]).removeprefix("torch."),
                element_bytes=dtypes[name].itemsize,
                trainable=parameter.requires_grad,
                group=group_of.get(id(parameter), -1),
            )
            for name, parameter in model.named_parameters()
        ]

    def dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """By parameter name, the dtype in which a run holds it: as `precision` says, batch norms and integers as they are."""
        import torch
        from torch.nn.modules.batchnorm import _BatchNorm

        kept = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            for parameter in module.parameters(recurse=False)
        }
        weight: torch.dtype = getattr(torch, PRECISIONS[self.precision].weight)
        allowed = tuple(dict.fromkeys((torch.float32, weight)))
        dtypes = {}
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "_local_tensor"):
                raise TypeError(
                    f"parameter {name} is a {type(parameter).__name__}, sharded over devices by other code; anyfit shards state "
                    "itself, as its plan says: give it the plain model"
                )
            if parameter.dtype.is_floating_point and parameter.dtype not in allowed:
                raise TypeError(
                    f"parameter {name} is {parameter.dtype}, which precision={self.precision!r} cannot hold exactly; "
                    f"build the model in {' or '.join(map(str, allowed))}"
                )
            is_cast = parameter.dtype.is_floating_point and id(parameter) not in kept
            dtypes[name] = weight if is_cast else parameter.dtype
        return dtypes

    def build_optimizer(self, model: nn.Module) -> tuple[Optimizer, dict[int, int]]:
        """The user's optimizer over `model`, and by parameter identity the group each parameter is in."""
        from torch.optim import Optimizer

        optimizer = self.optimizer(model)
        if isinstance(optimizer, tuple | list | dict | set):
            raise TypeError(
                f"Job(optimizer=) made a {type(optimizer).__name__} of {len(optimizer)}, and a run steps one optimizer, once "
                "a step; put the parameters of all into one: AdamW([{'params': a, 'lr': 1e-3}, {'params': b, 'lr': 4e-4}])"
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"Job(optimizer=) made {_describe(optimizer)}, not a torch.optim.Optimizer")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(optimizer).__name__} steps with a closure that runs the model many times, and a step here runs it once; "
                f"these of torch.optim work: {', '.join(OPTIMIZERS)}"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__}(differentiable=True) cannot step a training loop's parameters, which are leaves; "
                "leave differentiable out"
            )
        of_the_model = {id(parameter) for parameter in model.parameters()}
        group_of = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in of_the_model:
                    raise ValueError(
                        f"Job(optimizer=) holds a parameter of shape {tuple(parameter.shape)} that is not of the model it "
                        f"was given{_HINTS['optimizer']}"
                    )
                group_of[id(parameter)] = index
        return optimizer, group_of

    def fingerprint(self, model: nn.Module) -> str:
        """Names, shapes, dtypes and trainability of all parameters, and the batch: what a plan for this job depends on."""
        facts: list[Any] = [type(model).__qualname__, self.precision, self.batch_size]
        dtypes = self.dtypes(model)
        first: dict[int, str] = {}  # by identity, so that a tied weight is not taken for two
        for name, parameter in model.named_parameters(remove_duplicate=False):
            own = first.setdefault(id(parameter), name)
            facts.append([name, own, list(parameter.shape), str(dtypes[own]), parameter.requires_grad])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def cut(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        """The batch as consecutive micro-batches of these sizes: by `split`, or sample by sample; one is the batch as it is."""
        if self.split is None:
            return batches.cut(batch, sizes)
        parts = list(self.split(batch, sizes))
        if not 0 < len(parts) <= len(sizes):
            raise ValueError(f"Job(split=) made {len(parts)} micro-batches where {len(sizes)} were asked for")
        return parts

    def rows(self, batch: Batch, expected: int | None = None) -> int | None:
        """Samples in a batch, `expected` (or batch_size) where they may be as many; None where only the user's `split` knows, or
        nobody."""
        return batches.rows_of(batch, expected or self.batch_size) if self.split is None else None

    def uncuttable(self, batch: Batch | None = None, share: int | None = None) -> str | None:
        """Why batches like this one (the sample) cannot be cut where they have `share` samples (batch_size), and what to type;
        None where they can."""
        if self.split is not None:
            return None
        batch = self.sample if batch is None else batch
        rows, share = self.rows(batch), share or self.batch_size
        if rows is None:
            return batches.NO_SAMPLES
        reason = batches.uncuttable(batch, rows)
        if reason is None and rows != share:
            reason = batches.uncuttable(self.with_rows(batch, share), share)
        return reason

    def reordered(self, batch: Batch, order: Sequence[int]) -> Batch:
        """The samples of a batch, which are as many as these, in another order."""
        return batches.reordered(batch, order)

    def with_rows(self, batch: Batch, wanted: int) -> Batch:
        """As many samples of a batch, its own again where it has fewer."""
        return batches.with_rows(batch, self.rows(batch), wanted, lambda tensor: batches.repeated(tensor, wanted))

    def prepare(self, batch: Batch, device: torch.device, send: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Batch:
        """The batch on the device; `send` may bring its tensors there first. In bf16 those of fp32 are cast to it. All others
        keep their dtype, as in plain PyTorch: fp16, fp64 and integers, and numpy's arrays, which stay on the host."""
        import torch

        weight: torch.dtype = getattr(torch, PRECISIONS[self.precision].weight)
        cast = {torch.float32: weight}
        return nests.map_tensors(batch, lambda tensor: send(tensor).to(device, cast.get(tensor.dtype, tensor.dtype)))

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss as (mean, None), or (sum, weight) where the user's function says so; refuses what cannot be trained on."""
        try:
            value = self.loss(model, batch)
        except (RuntimeError, ValueError) as error:
            if "is read-only" in str(error):
                error.add_note(
                    "a weight that lives on the host is read-only as a numpy array, in which nobody would see what is written; "
                    "edit the tensor, or use a plan with all state on the device"
                )
            if self.precision == "bf16" and any(word in str(error) for word in ("dtype", "scalar type")):
                error.add_note(
                    "weights and floating inputs are bf16 in this run, and buffers keep their dtype: "
                    "cast inside the model, or use Job(precision='fp32')"
                )
            raise
        return checked_loss(value, "Job(loss=) must return")

    @classmethod
    def from_huggingface(
        cls,
        source: Any,
        *,
        batch_size: int,
        length: int | None = None,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        adapter: Any = None,
        **options: Any,
    ) -> Self:
        """A Job for a Hugging Face model.

        source       a configuration, a folder or name `AutoConfig` knows, or a model. Weights in a folder are what a run starts
                     from, unless `weights=None` says otherwise; a name or config.json gives the configuration alone
        length       tokens a sample, for models that read or write text
        optimizer    AdamW at 3e-4 when not given
        adapter      a configuration of PEFT, such as peft.LoraConfig(r=16), or a folder with an adapter that PEFT saved: the
                     model is frozen, and the adapter trained
        options      any other argument of Job. `sample` is imagined for language models, speech to text and classes of images,
                     and has to be given for all others; `loss` is the model's own when not given, as (sum, weight) where it is
                     a mean over labels, with a causal language model's logits in slices of tokens
        """
        from .huggingface_job import arguments

        return cls(batch_size=batch_size, **arguments(source, batch_size, length, optimizer, adapter, options))


_HINTS = {
    "model": "; pass an nn.Module or a function that makes one, such as lambda: GPT(config)",
    "loss": "; pass a function such as lambda model, batch: model(**batch).loss",
    "optimizer": "; pass a function such as lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)",
    "scheduler": "; pass a function such as lambda optimizer: CosineAnnealingLR(optimizer, 1000)",
}


def checked_loss(value: Any, whose: str) -> tuple[Tensor, Tensor | None]:
    """A loss as (mean, None) or (sum, weight); raises for what cannot be trained on."""
    import torch

    is_pair = isinstance(value, tuple) and len(value) == 2
    total, weight = value if is_pair else (value, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.dtype.is_floating_point:
        raise ValueError(f"{whose} a scalar tensor, or (sum, weight), got {_instead_of_a_loss(value, total)}")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ValueError("the loss is not connected to any trainable parameter: was it detached, or made under no_grad?")
    return total.reshape(()), _weight_of(weight, total) if is_pair else None


def _check_choices(job: Job) -> None:
    if not isinstance(job.real_run, bool | None):
        raise TypeError(f"Job(real_run=) must be True, False or None, got {_describe(job.real_run)}")
    if job.compile not in (None, False, "fast"):
        raise ValueError(f"Job(compile={job.compile!r}) is not known; it is None (the plan chooses), False or 'fast'")
    if not isinstance(job.replay, bool):
        raise TypeError(f"Job(replay=) must be True or False, got {_describe(job.replay)}")


def _weight_of(weight: Any, total: Tensor) -> Tensor:
    """The second of the pair that a loss returned, which divides the first."""
    import torch

    meant = "return the loss alone, or (sum, weight): weight counts what the sum is over, such as mask.sum()"
    if not isinstance(weight, torch.Tensor | int | float):
        raise TypeError(f"Job(loss=) returned a pair whose second is {_describe(weight)}; (sum, weight) are two scalars: {meant}")
    if not isinstance(weight, torch.Tensor):
        return torch.full((), float(weight), device=total.device)
    if weight.requires_grad:
        shown = "of one number" if weight.numel() == 1 else f"of shape {tuple(weight.shape)}"
        raise ValueError(
            f"Job(loss=) returned a pair whose second is a tensor {shown} that needs gradients, and a weight has none: for two "
            f"losses return their sum; else {meant}"
        )
    if weight.numel() != 1 or weight.dtype.is_complex:
        raise ValueError(f"the weight of a loss must be one number, got shape {tuple(weight.shape)}; take its .sum(), or {meant}")
    return weight.reshape(()).to(total.device, torch.float32)


def _instead_of_a_loss(value: Any, total: Any) -> str:
    """What a loss function returned in its place, and how to get at the loss."""
    if nests.is_tensor(total):
        mended = "; take its .mean()" if total.numel() != 1 else ""
        return f"a {total.dtype} tensor of shape {tuple(total.shape)}{mended}"
    if isinstance(value, Mapping) and "loss" in value:
        return f"{type(value).__name__} with {', '.join(map(repr, value))[:60]}; return its ['loss']"
    if nests.is_tensor(getattr(value, "loss", None)):
        return f"{type(value).__name__}; return its .loss"
    if isinstance(value, list | tuple) and any(map(nests.is_tensor, value)):
        return f"{type(value).__name__} of {len(value)}; return the loss alone, or the sum of several"
    instead = "; return the tensor itself, without .item() or float()" if isinstance(value, float) else ""
    return _describe(value) + instead


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__} {' '.join(repr(value).split()):.60}"  # in one line, as an error is read
