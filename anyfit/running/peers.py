"""The other ranks of a run, where there are any: what this one tells them, and how it takes part in what they still do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from anyfit.placing.ranks import HANG_SECONDS, Ranks

from .acts import Act, Kind, Position
from .engine import Engine, Progress
from .extra_state import ExtraState
from .rescue import Before
from .team import Team

if TYPE_CHECKING:
    from .run import Run


class Peers:
    def __init__(self, team: Team | None, ranks: Ranks) -> None:
        if team is None and ranks.are_several:
            team = Team(HANG_SECONDS, ends_process=False)
        self.team, self._ranks = team, ranks
        self.is_mute = False  # takes part in a step of the others, with nothing of its own

    def begin(self, kind: Kind, which: object = "") -> None:
        if self.team is not None:
            self.team.acts.begin(Act(kind, str(which)))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others of an error on this rank, which they would wait for in vain."""
        try:
            yield
        except BaseException as error:
            if self.team is not None:
                self.team.acts.end_with(error, self._ranks.asked())
            raise

    def take_part(self, act: Act, run: Run, engine: Engine, extra: ExtraState) -> None:
        """Takes part in an act that the others have begun, with no data of its own."""
        job, model = engine.job, engine.model
        before = Before(model, job.loss, engine.device, extra)
        before.note_all()
        share = job.sample if job.split is not None else job.with_rows(job.sample, engine.plan.share)
        zeros = [parameter.register_hook(torch.zeros_like) for parameter in model.parameters() if parameter.requires_grad]
        self.is_mute = True
        try:
            match act.kind:
                case Kind.STEP:
                    run.step(share)
                case Kind.EVALUATE:
                    run.evaluate(share)
                case Kind.READ_WEIGHTS:
                    run.state_dict()
                case Kind.SAVE | Kind.BEGIN_TO_SAVE:
                    run.save(act.which, wait=act.kind is Kind.SAVE)
                case Kind.OPEN_WEIGHTS:
                    raise RuntimeError(f"another rank is about to {act}, and this one has left: all ranks do that together")
        finally:
            self.is_mute = False
            for hook in zeros:
                hook.remove()
            before.restore()


def position_of(engine: Engine | None, progress: Progress) -> Position:
    """Where a run is; chunks that it waits for with the names of their parameters."""
    if engine is None or progress.is_closed:
        return Position("at its end", {})
    chunks = engine.placed.state.chunks
    waits = {}
    for kind, label in dict(engine.ranks.doing).items():
        waits[str(kind)] = str(label)
        if label.chunk is not None and label.chunk < len(chunks):
            names = [slot.name for slot in chunks[label.chunk].chunk.slots]
            waits[str(kind)] += f" ({names[0]})" if len(names) == 1 else f" ({names[0]} to {names[-1]})"
    if not waits and engine.device.type == "cuda" and progress.doing.phase.is_within_step:
        waits["device"] = "the GPU, which has been given collectives"  # they are not waited for where they are given
    return Position(str(progress.doing), waits)


def close_at_exit(run: Run) -> None:
    """At the end of a process of several ranks. One that ends without run.close() may still be needed by the others."""
    assert run.team is not None
    try:
        run.close()
    except Exception as error:  # Python would show it on every rank
        run.team.ending.end(run.team.ending.show(error, lambda _: (None, 1)))
