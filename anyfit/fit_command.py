"""`anyfit fit` as it was asked for: a script, a folder, the demo, or a run to go on with; in one process or in several."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import fitting
from .finetune import options as finetune
from .meshing import Axes
from .reporting import Reports
from .targets import SIZES, folders_here
from .values.disk_folder import DiskFolder
from .values.record import nearest

if TYPE_CHECKING:
    from .running.launch import Launch

KEEP = 2  # checkpoints
NO_SCRIPTS = (".json", ".jsonl", ".parquet", ".safetensors", ".bin", ".yaml", ".txt")


@dataclass
class Fit:
    """The options of the command line, by their names there."""

    script: Path | None  # or a folder
    arguments: list[str] | None
    data: Path | None
    evaluation: str | None
    eval_every: int | None
    epochs: int | None
    lr: float | None
    schedule: str | None
    warmup: str | None
    packing: bool | None
    samples: int | None
    lora: int | None
    report_to: str | None
    folder: Path | None
    resume: Path | None
    steps: int | None
    batch: int | None
    seq: int | None
    dtype: str | None
    optimizer: str | None
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
    disk: str | None
    mesh: str | None
    layout: str | None
    gpus: int | None
    ranks: int | None
    restarts: int | None
    hang_seconds: float | None
    disk_folder: Path | None
    any_file_system: bool

    def run(self) -> None:
        self._launched: Launch | None = None
        self._team = fitting.joined(self.hang_seconds)
        self._count = fitting.ranks_asked_for(self.gpus, self.ranks) if self._team is None else 1
        self._reports = Reports(self._report_names)
        is_restarted = fitting.holds_restarted_run(self.folder)
        if is_restarted:
            self.resume, self.folder = self.folder, None
        if self.resume is not None and self.folder is not None:
            raise ValueError("--resume goes on in its own folder; leave --folder out")
        if self.resume is not None and not self.resume.is_dir():
            beside = sorted(str(each.parent) for each in self.resume.parent.glob("*/run.json"))
            there = nearest(str(self.resume), beside) if beside else ""
            raise FileNotFoundError(f"no run folder {self.resume} to resume{there}")
        if self.timeline is not None:
            fitting.refuse_timeline(self.timeline)
        self._axes = Axes.parse(self.mesh, self.layout)
        if self._axes.is_asked and self.plan is not None:
            raise ValueError("--plan has its mesh and layout; leave --mesh and --layout out, or the plan")
        self._refuse_of_others(is_restarted=is_restarted)
        options = self._options()
        try:
            if self._count > 1:
                fitting.fit_in_ranks(self._count, self.restarts or 0, fitting.run_folder(self.resume, self.folder, None))
            elif isinstance(options, finetune.Options):
                self._fit_folder(options)
            elif options is not None:
                fitting.fit_demo(options, self._launch(options), self.log_every)
            elif self.script is not None:
                fitting.fit_script(self.script, self.arguments or [], self._launch(self), self.log_every)
        except KeyboardInterrupt:
            if self._count > 1 or self._has_stepped:
                raise
            if self._team is None or self._team.index == 0:
                print("anyfit: stopped before the first step: nothing to save; the same command begins anew", file=sys.stderr)
            raise typer.Exit(130) from None
        finally:
            self._reports.close()

    @property
    def _has_stepped(self) -> bool:
        return self._launched is not None and bool(self._launched.runs)

    # ------------------------------------------------------------------ what goes with what

    @property
    def _is_folder(self) -> bool:
        return self.script is not None and (self.script.is_dir() or (self.data is not None and not self.script.is_file()))

    @property
    def _of_folder(self) -> dict[str, object]:
        return {
            "--data": self.data, "--eval": self.evaluation, "--eval-every": self.eval_every, "--epochs": self.epochs,
            "--lr": self.lr, "--schedule": self.schedule, "--warmup": self.warmup, "--packing": self.packing,
            "--samples": self.samples, "--lora": self.lora, "--optimizer": self.optimizer,
        }  # fmt: skip

    @property
    def _of_demo(self) -> dict[str, object]:
        return {"--steps": self.steps, "--batch": self.batch, "--seq": self.seq, "--dtype": self.dtype, "--seed": self.seed}

    def _refuse_of_others(self, *, is_restarted: bool) -> None:
        """Options that belong to another kind of run than the one asked for."""
        if self._is_folder:
            return self._refuse_unless_folder(is_restarted=is_restarted)
        of_folder = [name for name, value in self._of_folder.items() if value is not None]
        if self.script is not None:
            if of_folder or (of_demo := [name for name, value in self._of_demo.items() if value is not None]):
                named = of_folder[0] if of_folder else of_demo[0]
                kind = "a folder" if of_folder else "the demo"
                raise ValueError(f"{named} is an option of {kind}; give your script its own arguments after its name")
            if not self.script.is_file():
                raise FileNotFoundError(f"no script {self.script}")
            if self.script.suffix in NO_SCRIPTS:
                raise ValueError(
                    f"{self.script} is no script; a model is trained by its folder: anyfit fit {self.script.parent} "
                    "--data data.jsonl"
                )
        elif self.resume is not None:
            if not is_restarted:
                self._refuse_changed(of_folder)
        elif of_folder:
            raise ValueError(f"{of_folder[0]} is for a Hugging Face folder; name it: anyfit fit FOLDER --data data.jsonl")
        return None

    def _refuse_unless_folder(self, *, is_restarted: bool) -> None:
        if self._axes.has_stages:
            raise ValueError(
                f"--mesh {self.mesh}: a folder's samples are written by the whole model, and a rank of a pipeline has its stages "
                "alone; leave pipeline out"
            )
        if not (self.script and self.script.is_dir()):
            if str(self.script) in SIZES:
                raise FileNotFoundError(
                    f"{self.script} is a size to plan with, and has no weights; fetch a folder that has: "
                    "hf download ORGANISATION/MODEL --local-dir FOLDER"
                )
            near = nearest(str(self.script), folders_here())
            named = self.script if "/" in str(self.script) else f"ORGANISATION/{self.script}"
            raise FileNotFoundError(
                f"no folder {self.script}; a model on the hub is fetched first: hf download {named} --local-dir FOLDER"
                + (near if "?" in near else "")
            )
        if self.data is None:
            named = next((each for each in self.arguments or () if Path(each).is_file()), "data.jsonl")
            raise ValueError(f"{self.script} is a folder; say what to train it on: --data {named}")
        if self.arguments:
            raise ValueError(f"a folder is trained without a script, and {self.arguments[0]!r} is no option")
        if self.steps is not None:
            raise ValueError("--steps is an option of the demo; a folder is trained for --epochs")
        if self.resume is not None and not is_restarted:
            raise ValueError(f"a resumed run keeps its folder and data: anyfit fit --resume {self.resume}")

    def _refuse_changed(self, of_folder: list[str]) -> None:
        kept = self._of_demo | {"--save-every": self.save_every, "--keep": self.keep, "--keep-every": self.keep_every}
        kept |= {"--device-memory": self.device_memory, "--host-memory": self.host_memory, "--disk": self.disk}
        given = of_folder + [name for name, value in kept.items() if value is not None]
        if given or self.deterministic:
            raise ValueError(f"a resumed run keeps its options; leave {given[0] if given else '--deterministic'} out")

    # ------------------------------------------------------------------ what is run

    @property
    def _report_names(self) -> list[str]:
        return [name.strip() for name in (self.report_to or "").split(",") if name.strip()]

    def _fit_folder(self, asked: finetune.Options) -> None:
        from .finetune.work import Work
        from .targets import optimizer_named

        optimizer = optimizer_named(asked.optimizer, lr=asked.learning_rate)
        work = Work.of(asked, 1 if self._team is None else self._team.count)
        self._reports = Reports(self._report_names or asked.report_to)
        fitting.fit_folder(work, work.job(optimizer), self._launch(work.options), self._reports, self.log_every)

    @property
    def _ranks_as_typed(self) -> tuple[str, ...]:
        typed = {"--gpus": self.gpus, "--ranks": self.ranks}
        return next(((name, str(count)) for name, count in typed.items() if count is not None and count > 1), ())

    def _launch(self, told: Fit | fitting.DemoOptions | finetune.Options) -> Launch:
        from .running.launch import Launch

        self._launched = Launch(
            folder=fitting.run_folder(self.resume, self.folder, self._team),
            resume=self.resume is not None,
            save_every=told.save_every or 0,
            keep=told.keep or KEEP,
            keep_every=told.keep_every or 0,
            limits={"device_memory": told.device_memory, "host_memory": told.host_memory, "disk": told.disk},
            plan=self.plan,
            mesh=self._axes.lengths_asked,
            layout=self.layout,
            deterministic=told.deterministic,
            timeline=self.timeline,
            hang_seconds=self.hang_seconds,
            disk=DiskFolder(self.disk_folder, self.any_file_system),
            steps=told.steps,
            model=_name_of(told),
            ranks=self._ranks_as_typed,
            script=() if self.script is None or self._is_folder else (str(self.script), *(self.arguments or [])),
            compiles=not self.no_compile,
            rank=0 if self._team is None else self._team.index,
            on_start=self._reports.attach,
        )
        return self._launched

    def _options(self) -> fitting.DemoOptions | finetune.Options | None:
        """Of the demo, or of a folder; those of a run that is resumed are its own. None for a script."""
        if self.script is not None and not self._is_folder:
            return None
        if self.resume is not None:
            return fitting.resumed_options(self.resume)
        return self._folder_options(self.script) if self.script is not None else self._demo_options()

    def _folder_options(self, model: Path) -> finetune.Options:
        from . import demo

        assert self.data is not None
        made = finetune.Options(
            model=str(model.resolve()),
            data=str(self.data.resolve()),
            evaluation=self.evaluation,
            epochs=self.epochs or finetune.EPOCHS,
            batch_size=self.batch,
            length=self.seq,
            packing=self.packing,
            precision=self.dtype or demo.default_precision(),
            seed=self.seed or 0,
            learning_rate=finetune.usual_learning_rate(self.lora) if self.lr is None else self.lr,
            schedule=self.schedule or finetune.SCHEDULE,
            warmup=self.warmup or finetune.WARMUP,
            optimizer=self.optimizer or finetune.OPTIMIZER,
            eval_every=self.eval_every,
            samples=finetune.SAMPLES if self.samples is None else self.samples,
            lora=self.lora,
            report_to=tuple(self._report_names),
            save_every=self.save_every,
            keep=self.keep or KEEP,
            keep_every=self.keep_every or 0,
            deterministic=self.deterministic,
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            disk=self.disk,
        )
        file = made.evaluation_file
        return made if file is None else replace(made, evaluation=str(file.resolve()))

    def _demo_options(self) -> fitting.DemoOptions:
        from . import demo

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
            disk=self.disk,
        )


def _name_of(told: Fit | fitting.DemoOptions | finetune.Options) -> str:
    """What the model is called; "" of a script's, whose class has a name of its own."""
    return (
        Path(told.model).name if isinstance(told, finetune.Options) else "demo" if isinstance(told, fitting.DemoOptions) else ""
    )
