"""transformers' Trainer on anyfit: `Trainer(...)` becomes `AnyfitTrainer(...)`, and nothing else changes.

    trainer = AnyfitTrainer(model=model, args=args, train_dataset=dataset, ...)
    trainer.train()

The Trainer stays in charge of data, schedules, callbacks, logs, evaluation and folders. What it does to weights goes to a run:

    Trainer                                     here
    accelerator.prepare(model, optimizer)       anyfit.start(job), with the Trainer's own compute_loss as the job's loss
    training_step, clipping, optimizer.step     run.step, once for the batches of an accumulation window (windows.py)
    model.state_dict, optimizer.state_dict      run.state_dict, run.save: on all ranks, since these gather
    after train()                               the run is closed, and the model is the user's again

`AnyfitMixin` does the same to a subclass: class MyTrainer(AnyfitMixin, SFTTrainer).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

import anyfit

from .losses import TrainerLoss, TrainerOptimizer, plain_data
from .metrics import is_sft, put_together
from .refusals import refuse_arguments, refuse_devices, refuse_model
from .samples import samples_of
from .windows import Piece, Window, cut, weighted

if TYPE_CHECKING:

    class Base(Trainer):  # type: ignore[misc]
        """What the mixin goes before."""

        lr_scheduler: Any
        optimizer: Any
        _created_lr_scheduler: bool
else:
    Base = object

FOLDER = "anyfit"  # in a checkpoint: what the run goes on from
SCHEDULER = "scheduler.pt"  # as the Trainer names it
# Methods of Trainer that are replaced and not called: what a subclass makes of them would be lost.
REPLACED = ("training_step", "_prepare_for_training", "_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler")


class AnyfitMixin(Base):
    """Goes before Trainer, or a class made from it: class MyTrainer(AnyfitMixin, SFTTrainer).

    machine    what to plan for, with its limits, such as anyfit.probe().with_limits(device_memory="24GiB"); this machine when
               not given
    """

    def __init__(self, *args: Any, machine: anyfit.Machine | None = None, **options: Any) -> None:
        _refuse_overrides(type(self))
        given = inspect.signature(super().__init__).bind_partial(*args, **options).arguments.get("args")
        if given is not None:
            refuse_arguments(given)
        self.run: anyfit.Run | None = None  # while it trains
        self._machine, self._window = machine, list[Piece]()
        self._whole: dict[str, Tensor] | None = None  # weights that are being saved
        self._put_back: Callable[[], None] | None = None
        self._has_trained, self._rescues = False, 0
        self._placed_as: tuple[anyfit.Job, anyfit.Plan] | None = None  # by the last run, where the device has not all weights
        super().__init__(*args, **options)
        self._optimizer_given = self.optimizer
        refuse_devices(self.args, torch.cuda.is_available())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        refuse_arguments(self.args)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "accelerate was configured for DeepSpeed or FSDP, and the plan shards by itself; start with torchrun or `anyfit "
                "fit --gpus`"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The plan says what lies where."""

    # ------------------------------------------------------------------ training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        if self._has_trained and not resume_from_checkpoint and self.model_init is None:
            raise RuntimeError(
                "this trainer has trained, and its optimizer's state went with that run; go on from a checkpoint, "
                "train(resume_from_checkpoint=True), or make a new trainer"
            )
        self._window.clear()
        self.optimizer = self._optimizer_given
        try:
            return super().train(resume_from_checkpoint, *args, **options)
        except BaseException as error:
            if self.run is not None:
                run, self.run = self.run, None
                run.__exit__(type(error), error, error.__traceback__)
            raise

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        refuse_model(self.model, bf16=self.args.bf16)
        folder = None if resume_from_checkpoint is None else _resumable(Path(resume_from_checkpoint))
        with _random_numbers_untouched():
            self.run = self._started(self._job(train_dataloader))
        self.optimizer = RunOptimizer(self.run)
        # Known to the accelerator as prepared: so evaluation leaves the model where it is, and skipped steps are told.
        self.accelerator._models.append(self.model)
        self.accelerator._optimizers.append(self.optimizer)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=max_steps)
        if folder is not None:  # after the scheduler, which has set the learning rates of a first step
            with _random_numbers_untouched():  # which the Trainer restores when it has skipped the batches that were seen
                self.run.resume(folder, finds_place=True)
            self.lr_scheduler.load_state_dict(torch.load(folder.parent / SCHEDULER, weights_only=True))
        self.model_wrapped = self.model
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _job(self, loader: Any) -> anyfit.Job:
        args, rows = self.args, self._train_batch_size
        accumulated = args.gradient_accumulation_steps

        def window(batch: Mapping[str, Any]) -> list[Piece]:
            items = self._get_num_items_in_batch([batch] * accumulated, args.device)
            return weighted([Piece(batch, items, accumulated) for _ in range(accumulated)])

        usual, largest = samples_of(loader, rows, self.args.device)
        return anyfit.Job(
            model=self.model,
            loss=TrainerLoss(self),
            optimizer=TrainerOptimizer(self) if self.optimizer is None else functools.partial(_given, self.optimizer),
            sample=window(usual),
            max_sample=None if largest is None else window(largest),
            batch_size=rows * accumulated * args.world_size,
            clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
            precision="bf16" if args.bf16 else "fp32",
            seed=args.seed,
            split=cut,
            compile=False,  # the numbers are the Trainer's
        )

    def _started(self, job: anyfit.Job) -> anyfit.Run:
        """With whole batches where they fit, as the Trainer has them; else with the largest pieces that do."""
        rows = self._train_batch_size
        start = functools.partial(
            anyfit.start,
            machine=self._machine,
            mesh={"tensor": 1},  # the Trainer gives each rank samples of its own, padded to a length of their own
            deterministic=self.args.full_determinism,
        )
        try:
            # No batch is cut: what compares samples, and a batch norm, sees what it sees under the Trainer.
            agreed = ("mean-of-micro-batches", "batch-norm-of-micro-batches")
            return start(replace(job, micro_batch=rows, agree=agreed))
        except anyfit.NoPlan as verdict:
            found = verdict
        for pieces in (size for size in range(rows // 2, 0, -1) if rows % size == 0):
            try:
                return start(replace(job, micro_batch=pieces))
            except anyfit.NoPlan as verdict:
                found = verdict
            except ValueError as error:
                if "cuts the batch" not in str(error):
                    raise
                accumulated = job.batch_size // self.args.world_size // pieces
                raise ValueError(
                    f"a batch of {rows} samples does not fit, and is not cut, since its loss is not made of those of its parts: "
                    f"lower per_device_train_batch_size to {pieces} and raise gradient_accumulation_steps to {accumulated}"
                ) from error
        raise found

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Collects the batches of a window; with the last one the run makes its step of them."""
        assert self.run is not None
        model.train()
        inputs = self._prepare_inputs(inputs)
        items = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=self.args.device)
        self._window.append(Piece(inputs, items, self.current_gradient_accumulation_steps))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        window = weighted(self._window)
        self._window.clear()
        return self._step(window).to(self.args.device)

    def _step(self, window: Window) -> Tensor:
        assert self.run is not None
        with self._stepping():
            loss = self.run.step(window)
        if any(map(is_sft, type(self).__mro__)):
            put_together(self, window, self.run.plan.micro_batch)
        return loss

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Inside, what the loss tells loggers counts; once, also where the run repeats a step that ran out of memory."""
        assert self.run is not None
        self._put_back, self._rescues = plain_data(self), self.run.rescues
        try:
            yield
        finally:
            self._put_back = None

    @property
    def is_stepping(self) -> bool:
        """Whether a loss that is asked for is one to train on."""
        if self._put_back is not None and self.run is not None and self.run.rescues > self._rescues:
            self._put_back()
            self._rescues = self.run.rescues
        return self._put_back is not None

    def _clip_grad_norm(self, model: nn.Module) -> float:
        """The step has clipped."""
        assert self.run is not None
        return self.run.metrics.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._clip_grad_norm(model)

    # ------------------------------------------------------------------ folders

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All ranks gather the weights, which one writes."""
        self._whole = None if self.run is None else self.run.state_dict()
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict=self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.run is not None
        self.run.save(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    # ------------------------------------------------------------------ the end

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._give_back_model()
        self._has_trained = True
        return super()._finalize_training(*args, **options)

    def _give_back_model(self) -> None:
        """The model whole and plain, on every rank, in the precision it came in."""
        assert self.run is not None
        run, self.run = self.run, None
        is_whole = all(each.weights == "device" and each.weight_shards == 1 for each in run.plan.chunks)
        self._placed_as = None if is_whole else (run.job, run.plan)
        whole = run.state_dict() if self.args.world_size > 1 or self.args.bf16 else {}
        run.close()
        for name, parameter in self.model.named_parameters():
            if name in whole:
                parameter.data = whole[name]
        self.accelerator._models.clear()
        self.accelerator._optimizers.clear()

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """After training, a model that does not fit the device whole is placed again as it was in training."""
        if self.run is not None or self._placed_as is None:
            return super().evaluation_loop(*args, **options)
        job, plan = self._placed_as
        with _random_numbers_untouched():
            self.run = anyfit.start(job, plan, self._machine)
        self.accelerator._models.append(self.model)
        try:
            return super().evaluation_loop(*args, **options)
        finally:
            self._give_back_model()


class AnyfitTrainer(AnyfitMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer, trained by anyfit."""


class RunOptimizer(Optimizer):
    """What the Trainer has as its optimizer: the groups of the run's, whose steps the run makes."""

    def __init__(self, run: anyfit.Run) -> None:  # without torch's: there is nothing to step here
        self._run, self._skipped = run, run.skipped
        self.defaults = run.optimizer.defaults
        self.step_was_skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._run.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._run.optimizer.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The run has made it, or left it out where a gradient was not finite."""
        self.step_was_skipped, self._skipped = self._run.skipped > self._skipped, self._run.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The run takes gradients away when it has used them."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the optimizer's state is in the run: trainer.run.save(folder) writes it")


def _given(optimizer: Optimizer, _model: nn.Module) -> Optimizer:
    return optimizer


def _resumable(checkpoint: Path) -> Path:
    if not (checkpoint / FOLDER).is_dir():
        raise ValueError(
            f"{checkpoint} has no {FOLDER} folder: it was written by another Trainer, or with save_only_model=True. To start "
            f"from its weights: from_pretrained({str(checkpoint)!r}), and train() without resume_from_checkpoint"
        )
    return checkpoint / FOLDER


def _refuse_overrides(kind: type) -> None:
    """Raises where a subclass has changed what is replaced here."""
    after = kind.__mro__[kind.__mro__.index(AnyfitMixin) + 1 :]
    for name in REPLACED:
        owner = next((each for each in after if name in vars(each)), None)
        if owner is None:
            raise TypeError(
                f"{kind.__name__} has no Trainer.{name} to replace: use the versions of transformers in docs/trainer.md"
            )
        if owner is not Trainer and not is_sft(owner):  # which adds what is refused: activation_offloading
            raise TypeError(
                f"{owner.__name__}.{name} would not be called with anyfit; put what it does into compute_loss or a callback"
            )


@contextlib.contextmanager
def _random_numbers_untouched() -> Iterator[None]:
    """Planning draws: the Trainer's own draws are to be those that it would make without."""
    python, arrays, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
