"""A run's checkpoints: one that is being written, beside the steps or while they wait, and the one that a run goes on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .acts import Kind
from .engine import Engine, Phase, Progress
from .export import facts_of
from .extra_state import ExtraState
from .files import FORMER_VERSION
from .launch import seed_of
from .loader import Data
from .loading import FORMER_HOLDS, load, replicas_of
from .saving import Copies, Saving
from .settings import Settings
from .team import Peers


class Saves:
    def __init__(
        self, engine: Engine, progress: Progress, peers: Peers, data: Data, settings: Settings, extra: ExtraState
    ) -> None:
        self._engine, self._progress, self._peers, self._data = engine, progress, peers, data
        self._settings, self._extra = settings, extra
        self.saving: Saving | None = None  # the checkpoint that is being written, or the last one
        self.copies: Copies | None = None  # of the state, that it is written from
        self.failed_on_some = False  # rank, as all know after the step
        self._layout = checkpoint.Layout()  # of the files that it is written to
        self._facts: dict[str, Any] | None = None  # of the model, for whoever reads these

    def save(self, folder: str | Path, *, wait: bool, then: Callable[[], None] = lambda: None) -> None:
        """`then` is called on rank 0 once the checkpoint is in its place."""
        engine, progress, folder = self._engine, self._progress, Path(folder).absolute()
        self._peers.begin(Kind.SAVE if wait else Kind.BEGIN_TO_SAVE, folder)
        try:
            self.finish()
        except OSError as error:
            progress.say(str(error))  # and here comes another
        before = progress.doing
        progress.enter(Phase.SAVING)
        self.saving, content = checkpoint.prepared(
            folder, engine.placed, self._to_json(), self._extra, engine.plan, self._peers.team, self._layout
        )
        for line in self._extra.unsaid():
            progress.say(line)
        self.saving.then = then
        copies = self._copies()
        has_room = not wait and copies.has_room(content)
        if not wait and engine.ranks.are_several:
            has_room = all(engine.ranks.objects(has_room))
        if has_room:
            chunks = engine.placed.state.chunks
            copies.begin(content, engine.placed.updates.turn_of, lambda chunk: chunks[chunk].update.finish())
            engine.placed.updates.let_read(copies.wait_for)
            self.saving.begin(copies)
        else:
            try:
                engine.placed.settle()
                self.saving.finish()
            finally:
                self.saving = None if wait or self.saving.has_failed else self.saving
        progress.doing = before

    def make_room(self) -> None:
        self._copies().make_room(*checkpoint.room_to_save(self._engine.placed, self._layout))

    def _copies(self) -> Copies:
        if self.copies is None:
            self.copies = Copies(self._engine.placed.slabs, self._engine.device)
        return self.copies

    def finish(self) -> None:
        saving, self.saving, self.failed_on_some = self.saving, None, False
        if saving is not None:
            saving.result()

    @property
    def has_failed(self) -> bool:
        return self.saving is not None and self.saving.has_failed

    def heed(self) -> None:
        """Before a step. Raises the error of a save beside the steps, on all ranks in the same step."""
        if self.saving is not None and (self.failed_on_some if self._engine.ranks.are_several else self.has_failed):
            self.finish()

    def let_go(self) -> None:
        """Frees the placement: waits for what is read from it, and drops the copies."""
        if self.saving is not None:
            self.saving.wait()
        self.close()

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()
        self.copies = None

    def resume(self, folder: str | Path, *, finds_place: bool = False) -> None:
        self.finish()
        engine, say = self._engine, self._progress.say
        found = load(Path(folder), engine.placed, self._settings, self._extra, self._peers.team)
        if replicas_of(found, found["ranks"]) != engine.ranks.replicas:
            torch.manual_seed(seed_of(engine.job.seed, engine.ranks.replica, found["steps"]))
            saved_by = "one rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
            now = engine.ranks.count
            say(f"{folder} was saved by {saved_by}, and {now} go on: the same weights and data, other random numbers")
        if (found.get("pipeline", 1) > 1) != (engine.ranks.pipeline > 1):
            say(
                f"{folder}: a plan with a pipeline axis draws random numbers by key, and one without from torch's stream: the "
                "same weights and data, other random numbers"
            )
        engine.placed.show_loaded()
        if found["version"] == FORMER_VERSION:
            say(f"{folder}: {FORMER_HOLDS}")
        for difference in self._settings.differences(found):
            say(f"{folder}: {difference}")
        self._progress.steps, self._progress.skipped = found["steps"], found["skipped"]
        self._data.take_up(self._settings.position(found), found["loader_order"])
        if self._data.is_of_no_loader and found["steps"] and not finds_place:
            say(f"{folder}: its batches were not from run.loader; the next one to hand over is number {found['steps'] + 1}")
        self._settings.load(found)

    def _to_json(self) -> dict[str, Any]:
        self._facts = self._facts or facts_of(self._engine.model, self._engine.job)
        return {
            "steps": self._progress.steps,
            "skipped": self._progress.skipped,
            **({"tensor": self._engine.ranks.tensor} if self._engine.ranks.tensor > 1 else {}),
            **({"pipeline": self._engine.ranks.pipeline} if self._engine.ranks.pipeline > 1 else {}),
            **self._data.to_json(),
            "model": self._facts,
            **self._settings.to_json(),
        }
