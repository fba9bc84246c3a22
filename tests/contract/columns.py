"""The columns: ways to run a case, each with the plan that it stands for.

    ample       the planner's plan with all the memory there is
    tight       its plans at the least device memory that it has one for, and half-way to ample
    recomputed  by hand: every block is recomputed in backward
    selective   by hand: every block is, but for its costly ops
    replayed    by hand: every block that can be is, from recordings
    host        by hand: weights, gradients and optimizer state on the host
    both        by hand: recomputed, and on the host
    cut         the planner's plan for micro-batches of half the batch
    resumed     saved half-way, and taken up by a run that knows nothing
    ranks       two processes, each with half of every batch

A case ends as one of: equal; refused, with its message; wrong; dead.
"""

from __future__ import annotations

import gc
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import anyfit
from anyfit.planning import search
from benchmarks.by_hand import hand_written
from tests.dist.pool import pool_of
from tests.machines import small_machine
from tests.plans import AWAY, RESIDENT

from .case import Case, Trial, catalogue
from .plain import Result, assert_equal, generators, seed_everything, seen, trained_plainly
from .plain import cut as parts

TOLERANCE = 1e-5  # normwise, of losses and of every tensor
LEAST_FRACTION = 32  # the least limit is found to this part of what ample takes


@dataclass(frozen=True)
class Outcome:
    kind: Literal["equal", "refused", "wrong", "dead"]
    said: str = ""


class RefusedError(Exception):
    """Before the first step was through."""


class DeadError(Exception):
    """Later."""


def outcome_of(case: Case, column: str) -> Outcome:
    try:
        RUNS[column](case)
    except RefusedError as refusal:
        error = refusal.__cause__
        return Outcome(
            "refused", f"{type(error).__name__}: {error}" + "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        )
    except DeadError as death:
        return Outcome("dead", "".join(traceback.format_exception(death.__cause__)))
    except AssertionError as difference:
        return Outcome("wrong", str(difference))
    finally:
        gc.collect()
    return Outcome("equal")


def train(case: Case, prepare: Callable[[Trial], dict[str, Any]]) -> None:
    """Runs the case, started with what `prepare` says of its job, beside plain PyTorch."""
    seed_everything()
    made, run = case.make(), None
    try:
        try:
            run = anyfit.start(made.job, **prepare(made))
            first = stepped(made, run, made.batches[:1]) if made.train is None else []
        except Exception as error:
            raise RefusedError from error
        losses = first + guarded(made, run, made.batches[len(first) :])
        compare(case, run, losses)
    finally:
        if run is not None:
            run.close()


def stepped(made: Trial, run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
    if made.train is not None:
        return made.train(run, batches)
    return [float(run.step(batch)) for batch in batches]


def guarded(made: Trial, run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
    try:
        return stepped(made, run, batches)
    except Exception as error:
        # A loop of its own does more than to step: what it asks for may be refused where it asks.
        raise (DeadError if made.train is None else RefusedError) from error


def result_of(run: anyfit.Run, losses: list[float]) -> Result:
    drawn = generators()
    try:
        weights = {name: tensor.clone() for name, tensor in run.state_dict().items() if isinstance(tensor, Tensor)}
        with run.weights():
            return Result(losses, weights, seen(run.model), drawn)
    except Exception as error:
        raise DeadError from error


def compare(case: Case, run: anyfit.Run, losses: list[float]) -> None:
    mine = result_of(run, losses)
    sizes = tuple(run.micro_batches)
    is_cut = len(sizes) > 1
    plain = trained_plainly(case.name, sizes if is_cut and case.draws else ())
    assert run.skipped == 0, f"{run.skipped} steps skipped"
    assert_equal(mine, plain, case.tolerance_when_cut if is_cut else TOLERANCE, same_draws=not is_cut or case.draws)


# ---------------------------------------------------------------- one function a column


def ample(case: Case) -> None:
    train(case, lambda _made: {"machine": small_machine()})


def tight(case: Case) -> None:
    least, need = limits_of(case)
    for _ in range(8):
        try:
            train_within(case, least)
            break
        except RefusedError as refusal:
            # What was found out by running the job (that its batch may not be cut, a block not be recomputed) needs more.
            if not isinstance(refusal.__cause__, anyfit.NoPlan):
                raise
            least += refusal.__cause__.shortfall_bytes * 17 // 16 + 64
    else:
        raise RefusedError from RuntimeError(f"there is no plan for {least} B, and {need} are ample")
    train_within(case, (least + max(least, need)) // 2)


def train_within(case: Case, device_bytes: int) -> None:
    train(case, lambda _made: {"machine": small_machine().with_limits(device_memory=device_bytes)})


def limits_of(case: Case) -> tuple[int, int]:
    """The least device memory that there is a plan for, and what ample takes."""
    seed_everything()
    made = case.make()
    try:
        profile = anyfit.profile(made.job, small_machine())
        need = search(profile).forecast.peak_bytes["device"]
    except Exception as error:
        raise RefusedError from error
    while not has_plan(profile, need):  # the margin of its error comes on top
        need += need // 16
    least, none = need, 0
    while least - none > need // LEAST_FRACTION:
        limit = (least + none) // 2
        least, none = (limit, none) if has_plan(profile, limit) else (least, limit)
    return least, need


def has_plan(profile: Any, device_bytes: int) -> bool:
    try:
        search(replace(profile, device_limit_bytes=device_bytes))
    except anyfit.NoPlan:
        return False
    return True


def by_hand(case: Case, placement: Any, activations: str | None, *, replays: bool = False) -> None:
    blocks = case.blocks if case.blocks is not None else children_of(case.make().job.build())

    def prepare(made: Trial) -> dict[str, Any]:
        chosen: Any = {} if activations is None else dict.fromkeys(blocks, activations)
        plan = hand_written(made.job, placement, slots=24, activations=chosen, replayed=tuple(blocks) if replays else ())
        return {"plan": plan, "machine": small_machine()}

    train(case, prepare)


def children_of(model: nn.Module) -> list[str]:
    """What a plan by hand recomputes: each child of the model; of lists each member."""
    found = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += [f"{name}.{path}" for path in children_of(child)]
        else:
            found.append(name)
    return found


def cut(case: Case) -> None:
    def prepare(made: Trial) -> dict[str, Any]:
        return {"machine": small_machine()}

    half = replace_micro_batch(case)
    train(half, prepare)


def replace_micro_batch(case: Case) -> Case:
    def make() -> Trial:
        made = case.make()
        return replace(made, job=replace(made.job, micro_batch=made.job.batch_size // 2))

    return replace(case, make=make)


def resumed(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "saved"
        seed_everything()
        made, run = case.make(), None
        half = len(made.batches) // 2
        try:
            try:
                run = anyfit.start(made.job, machine=small_machine())
                first = stepped(made, run, made.batches[:1]) if made.train is None else []
            except Exception as error:
                raise RefusedError from error
            losses = first + guarded(made, run, made.batches[len(first) : half])
            try:
                run.save(where)
            except Exception as error:  # a run that cannot be saved says so
                raise RefusedError from error
        finally:
            if run is not None:
                run.close()
        seed_everything(99)  # another process, that has drawn other numbers
        made, run = case.make(), None
        try:
            try:
                run = anyfit.start(made.job, machine=small_machine(), resume=where)
            except Exception as error:
                raise RefusedError from error
            losses += guarded(made, run, made.batches[half:])
            compare(case, run, losses)
        finally:
            if run is not None:
                run.close()


def ranks(case: Case) -> None:
    pool = pool_of(2)
    try:
        told = pool.run(trained_by_a_rank, case.name)
    except (EOFError, TimeoutError, AssertionError) as error:
        pool.close()
        raise DeadError from error
    for kind, what in told:
        if kind == "refused":
            raise RefusedError from RuntimeError(what)
        if kind == "dead":
            raise DeadError from RuntimeError(what)
    plain = trained_plainly(case.name)
    for _, mine in told:
        assert_equal(mine, plain, TOLERANCE, same_draws=False)


def trained_by_a_rank(name: str) -> tuple[str, Any]:
    """One rank's part of a case: how it ended, and with what."""
    case = catalogue()[name]
    seed_everything()
    made = case.make()
    losses: list[float] = []
    try:
        with anyfit.start(made.job, machine=small_machine()) as run:
            for batch in made.batches:
                shares = list(parts(batch, [made.job.batch_size // 2] * 2))
                losses.append(float(run.step(shares[run.ranks.index])))
            return "done", result_of(run, losses)
    except Exception as error:
        return "refused" if not losses else "dead", f"{type(error).__name__}: {error}"


RUNS: dict[str, Callable[[Case], None]] = {
    "ample": ample,
    "tight": tight,
    "recomputed": lambda case: by_hand(case, RESIDENT, "recompute"),
    "replayed": lambda case: by_hand(case, RESIDENT, None, replays=True),
    "selective": lambda case: by_hand(case, RESIDENT, "selective"),
    "host": lambda case: by_hand(case, AWAY, None),
    "both": lambda case: by_hand(case, AWAY, "recompute"),
    "cut": cut,
    "resumed": resumed,
    "ranks": ranks,
}
