"""`anyfit fit` as it was asked for: a script, the demo, or a run to go on with; in one process or in several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import fitting

if TYPE_CHECKING:
    from .running.launch import Launch

KEEP = 2  # checkpoints


@dataclass
class Fit:
    """The options of the command line, by their names there."""

    script: Path | None
    arguments: list[str] | None
    folder: Path | None
    resume: Path | None
    steps: int | None
    batch: int | None
    seq: int | None
    dtype: str | None
    seed: int | None
    plan: Path | None
    save_every: int | None
    keep: int | None
    keep_every: int | None
    log_every: int
    deterministic: bool
    no_compile: bool
    timeline: Path | None
    device_memory: str | None
    host_memory: str | None
    gpus: int | None
    ranks: int | None
    restarts: int | None
    hang_seconds: float | None

    def run(self) -> None:
        self._team = fitting.joined(self.hang_seconds)
        self._count = fitting.ranks_asked_for(self.gpus, self.ranks) if self._team is None else 1
        is_restarted = fitting.holds_restarted_run(self.folder)
        if is_restarted:
            self.resume, self.folder = self.folder, None
        if self.resume is not None and self.folder is not None:
            raise ValueError("--resume goes on in its own folder; leave --folder out")
        if self.resume is not None and not self.resume.is_dir():
            raise FileNotFoundError(f"no run folder {self.resume} to resume")
        if self.timeline is not None:
            fitting.refuse_timeline(self.timeline)
        if self.script is not None:
            self._refuse_of_demo(self.script)
        elif self.resume is not None and not is_restarted:
            self._refuse_changed()
        options = None if self.script is not None else self._demo_options()
        if self._count > 1:
            fitting.fit_in_ranks(self._count, self.restarts or 0, fitting.run_folder(self.resume, self.folder, None))
        elif options is not None:
            fitting.fit_demo(options, self._launch(options), self.log_every)
        elif self.script is not None:
            fitting.fit_script(self.script, self.arguments or [], self._launch(self), self.log_every)

    @property
    def _of_demo(self) -> dict[str, object]:
        return {"--steps": self.steps, "--batch": self.batch, "--seq": self.seq, "--dtype": self.dtype, "--seed": self.seed}

    def _refuse_of_demo(self, script: Path) -> None:
        given = [name for name, value in self._of_demo.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} is an option of the demo; give your script its own arguments after its name")
        if not script.is_file():
            raise FileNotFoundError(f"no script {script}")

    def _refuse_changed(self) -> None:
        kept = self._of_demo | {"--save-every": self.save_every, "--keep": self.keep, "--keep-every": self.keep_every}
        kept |= {"--device-memory": self.device_memory, "--host-memory": self.host_memory}
        given = [name for name, value in kept.items() if value is not None]
        if given or self.deterministic:
            raise ValueError(f"a resumed run keeps its options; leave {given[0] if given else '--deterministic'} out")

    def _launch(self, told: Fit | fitting.DemoOptions) -> Launch:
        from .running.launch import Launch

        return Launch(
            folder=fitting.run_folder(self.resume, self.folder, self._team),
            resume=self.resume is not None,
            save_every=told.save_every or 0,
            keep=told.keep or KEEP,
            keep_every=told.keep_every or 0,
            limits={"device_memory": told.device_memory, "host_memory": told.host_memory},
            plan=self.plan,
            deterministic=told.deterministic,
            timeline=self.timeline,
            hang_seconds=self.hang_seconds,
            steps=told.steps,
            compiles=not self.no_compile,
            rank=0 if self._team is None else self._team.index,
        )

    def _demo_options(self) -> fitting.DemoOptions:
        from . import demo

        if self.resume is not None:
            return fitting.resumed_options(self.resume)
        return fitting.DemoOptions(
            steps=self.steps or demo.STEPS,
            batch_size=self.batch or demo.BATCH,
            length=self.seq or demo.LENGTH,
            precision=self.dtype or demo.default_precision(),
            seed=self.seed or 0,
            save_every=50 if self.save_every is None else self.save_every,
            keep=self.keep or KEEP,
            keep_every=self.keep_every or 0,
            deterministic=self.deterministic,
            device_memory=self.device_memory,
            host_memory=self.host_memory,
        )
