"""Where `anyfit fit --report-to` sends the numbers of a run: TensorBoard's files, Weights & Biases. Users of `run.on_step` and
`run.on_log`, as a script's own logger would be."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .values.record import nearest

if TYPE_CHECKING:
    from .running.run import Run


class Writer(Protocol):
    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...
    def text(self, step: int, name: str, text: str) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder's `tensorboard`: look with tensorboard --logdir runs."""

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=run.steps + 1 if run.steps else None)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a signal may end the process

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, named as its folder, which a resumed run goes on with."""

    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        self._wandb: Any = wandb
        known = folder / "wandb.id"
        if not known.exists():
            known.write_text(secrets.token_hex(8))
        self._run: Any = wandb.init(
            project="anyfit",
            name=folder.name,
            id=known.read_text(),
            resume="allow",
            dir=folder,
            config={"plan": run.plan.to_json()},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own steps cannot be repeated, and those of a resumed run are

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(text.replace("<", "&lt;").replace("\n", "<br>"))})

    def close(self) -> None:
        self._run.finish()


WRITERS: Mapping[str, Callable[[Run, Path], Writer]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Reports:
    """The writers that were asked for, for each run that starts."""

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in WRITERS:
                raise ValueError(f"--report-to {name} is not known{nearest(name, WRITERS)}")
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:  # a folder of that name, such as wandb leaves behind, is no package
                raise ImportError(f"--report-to {name} needs {name}: pip install 'anyfit[{name}]'")
        self._names, self._writers = tuple(dict.fromkeys(names)), list[Writer]()

    def attach(self, run: Run, folder: Path) -> None:
        for name in self._names:
            writer = WRITERS[name](run, folder)
            self._writers.append(writer)
            run.on_step(lambda run, writer=writer: writer.numbers(run.steps, figures_of(run)))
            run.on_log(writer.numbers)

    def text(self, step: int, name: str, text: str) -> None:
        for writer in self._writers:
            writer.text(step, name, text)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()


def figures_of(run: Run) -> dict[str, float]:
    metrics = run.metrics
    worn = {"disk_written_bytes": float(metrics.disk_written_bytes)} if metrics.disk_written_bytes else {}
    return worn | {
        "loss": metrics.loss,
        "gradient_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rates[0],
        "seconds": metrics.seconds,
        "tokens_per_second": metrics.tokens_per_second,
        "device_bytes": metrics.peak_bytes["device"],
    }
