"""What the ranks of a pipeline do in a test: train a family of models in stages, as a plan by hand says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import anyfit
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.planning.layouts import LayoutSolver
from anyfit.running.run import Run
from anyfit.stages.keys import drawing
from anyfit.staging import blocks_of, look
from anyfit.values.cuts import Cut
from anyfit.values.plan import Activations, BlockCut, Placement, Plan
from tests.machines import small_machine
from tests.plans import hand_written, random_delays
from tests.stages.families import Batch
from tests.stages.others import family_of
from tests.stages.work import CPU, drawn_by_key, parts_of

from .axis_work import ATTENTION_OF_GPT2
from .pool import HANG_SECONDS
from .work import part_of

STEPS = 5
EDITED = 0.9  # of what weights were
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


@dataclass(frozen=True)
class PipelineCase:
    family: str = "gpt2"
    pipeline: int = 2
    chunks: int = 1  # stages a rank
    accumulation: int = 4
    clip_norm: float | None = 0.1
    optimizer: str = "sgd"
    placements: tuple[Placement, ...] = (Placement(),)
    activations: Activations = "keep"
    chunk_bytes: int = 4096
    slots: int = 12
    steps: int = STEPS
    delays: int | None = None  # a seed
    precision: Literal["fp32", "bf16"] = "fp32"
    borders: tuple[tuple[int, int], ...] = ()  # none: as many block calls a stage
    compiles: bool = False
    tensor: int = 1
    border: Cut | None = None  # of cut blocks
    lengths: tuple[int, ...] = ()  # of steps, where they are not alike
    agrees: bool = True  # to whatever cutting the batch changes

    def __str__(self) -> str:
        """What differs from the first case."""
        plain = PipelineCase()
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(str(value) for name, value in mine.items() if value != getattr(plain, name)) or "plain"

    @property
    def batches(self) -> list[Batch]:
        """Of all ranks together."""
        torch.manual_seed(7)
        found = [family_of(self.family).batch() for _ in range(self.steps)]
        cut = zip(found, self.lengths or (None,) * self.steps, strict=True)
        return [{key: each[:, :length] if length else each for key, each in batch.items()} for batch, length in cut]

    @property
    def job(self) -> anyfit.Job:
        family, batch = family_of(self.family), self.batches[0]
        return anyfit.Job(
            model=family.model,
            loss=family.loss,
            optimizer=OPTIMIZERS[self.optimizer],
            sample=batch,
            batch_size=len(next(iter(batch.values()))),
            precision=self.precision,
            clip_norm=self.clip_norm,
            agree=["mean-of-micro-batches", "batch-norm-of-micro-batches"] if self.agrees else [],
        )

    def replicas(self, ranks: int) -> int:
        return ranks // (self.pipeline * self.tensor)

    def plan(self, ranks: int) -> Plan:
        job = self.job
        blocks = blocks_of(job.build())
        calls = block_calls(self)
        count = self.pipeline * self.chunks
        ends = [stage * calls // count for stage in range(count + 1)]
        even = tuple((first, last - 1) for first, last in itertools.pairwise(ends))
        return hand_written(
            job,
            *self.placements,
            chunk_bytes=self.chunk_bytes,
            slots=self.slots,
            accumulation=self.accumulation,
            activations=dict.fromkeys(blocks, self.activations),
            compiled=tuple(blocks) if self.compiles else (),
            ranks=ranks,
            pipeline=self.pipeline,
            tensor=self.tensor,
            cut={path: BlockCut(CUTS[self.family], self.border, self.border) for path in blocks} if self.tensor > 1 else {},
            stages=self.borders or even,
        )


def columns_then_rows(columns: Sequence[str], rows: Sequence[str], *, biased: bool) -> dict[str, Cut]:
    """What Megatron does, of parameters by the names of their layers."""
    found = {f"{name}.weight": Cut(0) for name in columns} | {f"{name}.weight": Cut(1) for name in rows}
    return found | ({f"{name}.bias": Cut(0) for name in columns} if biased else {})


CUTS = {
    **dict.fromkeys(("gpt2", "gpt2, dropout"), ATTENTION_OF_GPT2),
    "llama": columns_then_rows(
        [*(f"self_attn.{each}_proj" for each in "qkv"), "mlp.gate_proj", "mlp.up_proj"],
        ["self_attn.o_proj", "mlp.down_proj"],
        biased=False,
    ),
    "bert": columns_then_rows(
        [*(f"attention.self.{each}" for each in ("query", "key", "value")), "intermediate.dense"],
        ["attention.output.dense", "output.dense"],
        biased=True,
    ),
    "vit": columns_then_rows(
        [*(f"attention.{each}_proj" for each in "qkv"), "mlp.fc1"], ["attention.o_proj", "mlp.fc2"], biased=True
    ),
}
CALLS = {"albert": 4, "woven": 7}  # of blocks, where there are not as many as blocks


def block_calls(case: PipelineCase) -> int:
    return CALLS.get(case.family) or len(blocks_of(family_of(case.family).model()))


@dataclass(frozen=True)
class Told:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    held: int = 0  # bytes of model state here
    said: str = ""


def started(case: PipelineCase) -> Run:
    ranks = Ranks.of_process_group(HANG_SECONDS)
    job, plan = case.job, case.plan(ranks.count)
    delay = None if case.delays is None else random_delays(case.delays * 10 + ranks.index)
    looked = look(job, plan)
    torch.manual_seed(job.seed + ranks.index)  # rank 0's weights are everybody's
    solver = LayoutSolver() if plan.cut else None
    return Run(job, plan, place(job, plan, job.build(), CPU, delay, ranks=ranks, looked=looked, solver=solver))


def share(run: Run, batch: Batch) -> Batch:
    return part_of(batch, run.ranks.replica, run.ranks.replicas)  # type: ignore[no-any-return]


def told(run: Run, losses: list[float], norms: list[float]) -> Told:
    names = dict(run.model.named_parameters())
    weights = {name: each for name, each in run.state_dict().items() if name in names}
    return Told(losses, norms, weights, run._engine.placed.state.device_bytes)


def steps_of(run: Run, batches: Sequence[Batch]) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for batch in batches:
        losses.append(float(run.step(share(run, batch))))
        norms.append(run.metrics.gradient_norm)
    return losses, norms


def trained(case: PipelineCase) -> Told:
    with started(case) as run:
        return told(run, *steps_of(run, case.batches))


# ---------------------------------------------------------------------- the plain loop


def plainly(case: PipelineCase, replicas: int = 1) -> Told:
    """A loop of plain PyTorch, which draws its random numbers as stages do."""
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses, norms = job.optimizer(model), [], []
    calls = drawn_by_key(model, blocks_of(model))
    try:
        for step, batch in enumerate(case.batches):
            losses.append(_backward(case, job, model, batch, step, replicas))
            norms.append(_norm(model))
            if case.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        calls.remove()
    return Told(losses, norms, {name: each.detach() for name, each in model.named_parameters()})


def _norm(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))


def _backward(case: PipelineCase, job: anyfit.Job, model: nn.Module, batch: Batch, step: int, replicas: int) -> float:
    total = weights = 0.0
    for replica in range(replicas):
        for at, part in enumerate(parts_of(part_of(batch, replica, replicas), case.accumulation)):
            with drawing(CPU, job.seed, step, replica, at, elsewhere=True):
                loss: Any = job.loss(model, part)
            if isinstance(loss, tuple):
                loss, weight = loss
                weights += float(weight)
            else:
                loss = loss / (replicas * case.accumulation)
            loss.backward()
            total += float(loss.detach())
    for each in model.parameters() if weights else ():
        if each.grad is not None:
            each.grad /= weights
    return total / (weights or 1.0)


def recomputed(case: PipelineCase) -> dict[tuple[int, int, str], list[int]]:
    """By step, micro-batch and module inside of a block, checksums of what it returned each time that it ran on this rank."""
    told: SimpleQueue[tuple[tuple[int, int, str], int]] = SimpleQueue()  # a list would be put back after a block has run again
    with started(case) as run:
        pipe, at = run._engine.placed.stages.pipe, [0]
        passes = vars(pipe)

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(stage: int, micro_batch: int, *rest: Any) -> Any:
                at[0] = micro_batch
                return function(stage, micro_batch, *rest)

            return called

        def note(path: str, result: Tensor) -> None:
            if run.model.training:
                told.put(((run.steps, at[0], path), crc32(result.detach().numpy().tobytes())))

        for path in blocks_of(run.model):
            for name, each in run.model.get_submodule(path).named_modules(prefix=path):
                if next(each.children(), None) is None:
                    each.register_forward_hook(lambda _module, _given, result, name=name: note(name, result))
        passes |= {"forward": noting(pipe.forward), "backward": noting(pipe.backward)}
        steps_of(run, case.batches)
    found: dict[tuple[int, int, str], list[int]] = {}
    while not told.empty():
        key, checksum = told.get()
        found.setdefault(key, []).append(checksum)
    return found


def replaced(case: PipelineCase, **changes: Any) -> PipelineCase:
    return dataclasses.replace(case, **changes)


# ---------------------------------------------------------------------- what users do


def started_by_plan(case: PipelineCase, folder: str | None = None) -> Told:
    """Through `anyfit.start`, from weights in a folder where there is one."""
    job = dataclasses.replace(case.job, weights=folder)
    with anyfit.start(job, case.plan(Ranks.of_process_group().count), small_machine()) as run:
        return told(run, *steps_of(run, case.batches))


def saved(case: PipelineCase, folder: str, *, wait: bool = True) -> Told:
    with started(case) as run:
        losses, norms = steps_of(run, case.batches[:2])
        run.save(folder, wait=wait)
        return Told(losses, norms, {})


def resumed(case: PipelineCase, folder: str) -> Told:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), started(case) as run:
        run.resume(folder)
        return dataclasses.replace(told(run, *steps_of(run, case.batches[2:])), said=said.getvalue())


def refused(case: PipelineCase) -> str:
    """What a rank is told before anything is trained."""
    try:
        with started(case) as run:
            before = run.state_dict()
            try:
                run.step(share(run, case.batches[0]))
            finally:
                assert all(torch.equal(each, before[name]) for name, each in run.state_dict().items())
    except ValueError as error:
        return str(error)
    return "nothing"


def used(case: PipelineCase) -> dict[str, Any]:
    """What comes of looks at a run between its steps; ranks are given batches of their own."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), started(case) as run:
        first, second, third = case.batches[:3]
        found: dict[str, Any] = {"first": float(run.step(share(run, first)))}
        before = torch.random.get_rng_state()
        found["evaluated"] = float(run.evaluate(share(run, third)))
        mine = share(run, second) if run.ranks.place == 0 else share(run, third)
        found["second"] = float(run.step(mine))
        found["is random state kept"] = torch.equal(before, torch.random.get_rng_state())
        found["state"] = run.state_dict()
        found["refusals"] = [_refusal(call) for call in _whole(run, first)]
        found["metrics"] = run.metrics.loss, run.metrics.tokens_per_second > 0
        found["third"] = float(run.step(share(run, third)))
    return found | {"said": said.getvalue()}


def _whole(run: Run, batch: Batch) -> list[Callable[[], Any]]:
    """Uses that need all of the model at once."""

    def by_hand() -> None:
        with run.forward():
            raise AssertionError

    zero = torch.zeros(())
    return [
        lambda: run.loss(batch),
        by_hand,
        lambda: run.accept(zero, samples=1),
        lambda: run.backward(zero),
        lambda: run.job.loss(run.model, batch),
    ]


def opened(case: PipelineCase) -> dict[str, Any]:
    """The model whole between steps: read, run, edited, and trained on."""
    with started(case) as run:
        first, second, third = case.batches[:3]
        losses = [float(run.step(share(run, first)))]
        with run.weights() as model:
            found: dict[str, Any] = {"state": {name: each.detach().clone() for name, each in model.state_dict().items()}}
            with torch.no_grad():
                model.eval()
                found["evaluated"] = float(_mean(run.job.loss(model, third)))
                model.train()
                for each in model.parameters():
                    each.mul_(EDITED)
        stages = run._engine.placed.stages
        others = [each for name, each in run.model.named_parameters() if not stages.holds(name)]
        found["is a part again"] = bool(others) and all(not any(each.stride()) for each in others)
        losses += [float(run.step(share(run, each))) for each in (second, third)]
        return found | {"losses": losses, "weights": run.state_dict()}


def opened_plainly(case: PipelineCase) -> dict[str, Any]:
    job, batches = case.job, case.batches[:3]
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses, found = job.optimizer(model), list[float](), dict[str, Any]()
    calls = drawn_by_key(model, blocks_of(model))
    for step, batch in enumerate(batches):
        losses.append(_backward(case, job, model, batch, step, 1))
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            found = {"state": {name: each.detach().clone() for name, each in model.state_dict().items()}}
            with torch.no_grad():
                model.eval()
                found["evaluated"] = float(_mean(job.loss(model, batches[2])))
                model.train()
                for each in model.parameters():
                    each.mul_(EDITED)
    calls.remove()
    return found | {"losses": losses, "weights": {name: each.detach() for name, each in model.named_parameters()}}


def _mean(loss: Any) -> Any:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def used_plainly(case: PipelineCase) -> dict[str, Any]:
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, found, batches = job.optimizer(model), dict[str, Any](), case.batches[:3]
    calls = drawn_by_key(model, blocks_of(model))
    for step, (name, batch) in enumerate(zip(("first", "second", "third"), batches, strict=True)):
        found[name] = _backward(case, job, model, batch, step, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            model.eval()
            with torch.no_grad():
                found["evaluated"] = float(job.loss(model, batches[2]))  # type: ignore[arg-type]
            model.train()
        if step == 1:
            found["state"] = {key: each.detach().clone() for key, each in model.state_dict().items()}
    calls.remove()
    return found


def ends_early(case: PipelineCase) -> Told:
    """The last replica has a batch less; its ranks take part in the others' last step with nothing of their own."""
    with started(case) as run:
        losses, norms = steps_of(run, case.batches[: case.steps - run.ranks.replica])
        return Told(losses, norms, {})


def ends_early_plainly(case: PipelineCase) -> Told:
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses = job.optimizer(model), []
    for step, batch in enumerate(case.batches):
        mine = part_of(batch, 0, 2) if step == case.steps - 1 else batch
        loss = job.loss(model, mine)
        loss.backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
    return Told(losses, [], {})


def by_torch(case: PipelineCase) -> Told:
    """torch's own stages and schedule, of a model that is a chain."""
    job, rank = case.job, dist.get_rank()
    torch.manual_seed(job.seed)
    model: Any = job.build()
    mine = model[2 * rank : 2 * rank + 2]
    schedule = Schedule1F1B(PipelineStage(mine, rank, 2, CPU), case.accumulation, nn.functional.mse_loss)
    optimizer, means = job.optimizer(mine), []
    for batch in case.batches:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["x"])
        else:
            schedule.step(target=batch["y"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        means += [float(torch.stack(losses).detach().mean())] if losses else []
    return Told(means, [], {name: each.detach() for name, each in mine.named_parameters()})
