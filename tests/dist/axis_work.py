"""What the ranks of a tensor axis do in a test: train a model with some of its blocks cut, as a plan by hand says."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import anyfit
from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import capture
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.planning.layouts import LayoutSolver
from anyfit.running.run import Run
from anyfit.values.cuts import Cut
from anyfit.values.plan import Activations, BlockCut, Placement, Plan
from tests.layouts.blocks import DECODER, DROPPING, GPT2, HIDDEN, ROWS, STILL, VOCABULARY, Residual, built, calls_of
from tests.layouts.work import layouts_of, posed_on
from tests.machines import small_machine
from tests.plans import hand_written

from .pool import HANG_SECONDS
from .talking import LOSSES_OF_WORDS, TALKING
from .work import part_of

STEPS = 3


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    result = model(**batch)
    first = result if isinstance(result, Tensor) else result[0]
    return (first * torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)).square().mean()


def tied_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """With the model's own table of words as its head, where it has one."""
    result = model(**batch)
    first = result if isinstance(result, Tensor) else result[0]
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    words = next((each for each in tables if each.shape == (VOCABULARY, first.shape[-1])), None)
    logits = first if words is None else first @ words.T
    return (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).square().mean()


class Skipping(nn.Module):
    """Blocks whose outputs others read too: a skip, a hook, the first token alone, and a list of all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(HIDDEN, HIDDEN)
        sizes = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN)
        self.blocks = nn.ModuleList(copy.deepcopy(Residual(*sizes)) for _ in range(4))
        self.leave = nn.Linear(HIDDEN, HIDDEN)
        self.leave.weight = self.enter.weight  # tied
        self.blocks[1].register_forward_hook(lambda _block, _given, result: result * result.mean((1, 2), keepdim=True).cosh())

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.enter(x)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        pooled = hidden[3][:, 0] + hidden[-1].mean(1)
        result: Tensor = self.leave(hidden[-1] + hidden[1]) + pooled[:, None] + torch.stack(hidden).sum(0)
        return result


def skipping() -> tuple[nn.Module, list[str], dict[str, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 8, HIDDEN, generator=torch.Generator().manual_seed(1))
    return Skipping(), [f"blocks.{at}" for at in range(4)], {"x": x}


def tied() -> tuple[nn.Module, list[str], dict[str, Tensor]]:
    """GPT-2 with its head, whose weight is the embedding's."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **STILL)).train()
    ids = torch.randint(3, 96, (ROWS, 24), generator=torch.Generator().manual_seed(1))
    return model, ["transformer.h.0", "transformer.h.1"], {"input_ids": ids, "labels": ids}


def long() -> tuple[nn.Module, list[str], dict[str, Tensor]]:
    """Llama for sequences of up to 1024 tokens."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaModel(transformers.LlamaConfig(**DECODER | {"max_position_embeddings": 1024})).train()
    ids = torch.randint(3, 96, (ROWS, 1024), generator=torch.Generator().manual_seed(1))
    return model, ["layers.0", "layers.1"], {"input_ids": ids}


def penalised_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Reads weights of blocks itself: all of them, and those of one as a layer."""
    block: Any = model.get_submodule("blocks.0.inner.1")
    mixed = nn.functional.linear(batch["x"], block.weight, block.bias)
    return loss_of(model, batch) + mixed.square().mean() + 1e-2 * sum(each.square().sum() for each in model.parameters())


MODELS: dict[str, Callable[[], tuple[nn.Module, list[str], dict[str, Tensor]]]] = {
    "skipping": skipping,
    "penalised": skipping,
    "tied": tied,
    "long": long,
    **TALKING,
}
LOSSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "tied": lambda model, batch: model(**batch).loss,
    "penalised": penalised_loss,
    **LOSSES_OF_WORDS,
}

# Columns, then rows: what Megatron does. By family, parameters by the end of their names.
ATTENTION_OF_GPT2 = {
    "attn.c_attn.weight": Cut(1, 3), "attn.c_attn.bias": Cut(0, 3), "attn.c_proj.weight": Cut(0), "mlp.c_fc.weight": Cut(1),
    "mlp.c_fc.bias": Cut(0), "mlp.c_proj.weight": Cut(0),
}  # fmt: skip
COLUMNS_AND_ROWS = {"inner.1.weight": Cut(0), "inner.1.bias": Cut(0), "inner.3.weight": Cut(1)}
MEGATRON = {
    "gpt2": ATTENTION_OF_GPT2,
    "gpt2, dropout": ATTENTION_OF_GPT2,
    "tied": ATTENTION_OF_GPT2,
    "skipping": COLUMNS_AND_ROWS,
    "penalised": COLUMNS_AND_ROWS,
}


@dataclass(frozen=True)
class AxisCase:
    family: str = "gpt2"
    tensor: int = 2
    objective: int | None = None  # None: the solver's choice; else any
    price: float = 1e-9  # of memory: the solver cuts the weights
    border: Cut | str | None = ""  # of all blocks, cut as Megatron does; otherwise the solver, or the objective, chooses
    placements: tuple[Placement, ...] = (Placement(),)
    accumulation: int = 1
    clip_norm: float | None = None
    chunk_bytes: int = 16384
    slots: int = 12
    activations: Activations = "keep"
    lengths: tuple[int, ...] = ()
    optimizer: str = "sgd"
    precision: Literal["fp32", "bf16"] = "fp32"
    tables: tuple[str, ...] = ()  # whose rows are divided
    drops: bool = False  # some of what it computes, at random
    ties: bool = False  # the table of words, where it has one, to a head

    def __str__(self) -> str:
        """What differs from the first case."""
        plain = AxisCase()
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(str(value) for name, value in mine.items() if value != getattr(plain, name)) or "plain"

    @property
    def job(self) -> anyfit.Job:
        return anyfit.Job(
            model=self.model,
            loss=tied_loss if self.ties else LOSSES.get(self.family, loss_of),
            optimizer=OPTIMIZERS[self.optimizer],
            sample=self.batch,
            batch_size=ROWS,
            precision=self.precision,
            clip_norm=self.clip_norm,
        )

    @property
    def _hub(self) -> tuple[nn.Module, str, dict[str, Tensor]]:
        return built(self.family + (DROPPING if self.drops else ""), torch.float32)

    def model(self) -> nn.Module:
        return MODELS[self.family]()[0] if self.family in MODELS else self._hub[0]

    @property
    def blocks(self) -> list[str]:
        if self.family in MODELS:
            return MODELS[self.family]()[1]
        model, path, _ = self._hub
        parent = path.rpartition(".")[0]
        return [f"{parent}.{name}".removeprefix(".") for name, _ in model.get_submodule(parent).named_children()]

    @property
    def batch(self) -> dict[str, Tensor]:
        if self.family in MODELS:
            return MODELS[self.family]()[2]
        return self._hub[2]

    @property
    def batches(self) -> list[dict[str, Tensor]]:
        batch = self.batch
        if self.lengths:
            return [{name: each[:, :length] for name, each in batch.items()} for length in self.lengths]
        return [batch, {name: each.flip(0).roll(1, 1) for name, each in batch.items()}, batch]

    def cut(self, axis: Axis, rows: int) -> dict[str, BlockCut]:
        """By hand, by the solver, or by a random objective, on the first rank."""
        if not isinstance(self.border, str):
            return dict.fromkeys(self.blocks, BlockCut(MEGATRON.get(self.family, {}), self.border, self.border))
        torch.manual_seed(0)
        model, batch = self.model(), {name: each[:rows] for name, each in self.batch.items()}
        blocks = [model.get_submodule(path) for path in self.blocks]
        posed = [posed_on(axis, capture(*call)) for call in calls_of(model, blocks, batch)]
        layouts = layouts_of(posed, self.objective, self.price)
        found = {}
        for path, each, layout in zip(self.blocks, posed, layouts, strict=True):
            named = zip(each.captured.parameters, each.captured.parameter_nodes, strict=True)
            held = {name: layout.held(each.problem, each.number(node)) for name, node in named}
            borders = [layout.held(each.problem, tensor) for tensor in (each.problem.entry, each.problem.exit)]
            cuts = [border if isinstance(border, Cut) else None for border in borders]
            found[path] = BlockCut({name: cut for name, cut in held.items() if isinstance(cut, Cut)}, *cuts)
        return found

    def plan(self, ranks: int, cut: Mapping[str, BlockCut]) -> Plan:
        blocks = self.blocks if self.activations != "keep" else []
        return hand_written(
            self.job,
            *self.placements,
            chunk_bytes=self.chunk_bytes,
            slots=self.slots,
            accumulation=self.accumulation,
            activations=dict.fromkeys(blocks, self.activations),
            ranks=ranks,
            tensor=self.tensor,
            cut=cut,
            tables=self.tables,
        )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-3),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


@dataclass(frozen=True)
class Told:
    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    cuts: int = 0
    border: str = ""


def begun(case: AxisCase) -> Run:
    ranks = Ranks.of_process_group(HANG_SECONDS)
    rows = ROWS // (ranks.count // case.tensor) // case.accumulation
    cut = None
    if case.tensor > 1:
        cut = Axis.of_all().agreed(case.cut(Axis(case.tensor), rows) if ranks.index == 0 else None)
    job, plan = case.job, case.plan(ranks.count, cut or {})
    torch.manual_seed(job.seed + ranks.index)  # rank 0's weights are everybody's
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks, solver=LayoutSolver()))


def stepped(case: AxisCase, run: Run, first: int = 0, last: int | None = None) -> Told:
    losses, norms = [], []
    for step, batch in list(enumerate(case.batches))[first:last]:
        torch.manual_seed(step)
        losses.append(float(run.step(part_of(batch, run.ranks.replica, run.ranks.replicas))))
        norms.append(run.metrics.gradient_norm)
    cut = run.plan.cut.values()
    borders = {str(each) for block in cut for each in (block.entry, block.exit)}
    return Told(losses, run.state_dict(), norms, sum(len(each.parameters) for each in cut), ", ".join(sorted(borders)))


def trained(case: AxisCase) -> Told:
    with begun(case) as run:
        return stepped(case, run)


def saved(case: AxisCase, folder: str, *, wait: bool = True) -> Told:
    with begun(case) as run:
        told = stepped(case, run, 0, 2)
        run.save(folder, wait=wait)
        return told


def resumed(case: AxisCase, folder: str) -> Told:
    with begun(case) as run:
        run.resume(folder)
        return stepped(case, run, 2)


def plainly(case: AxisCase, ranks: int | None = None) -> Told:
    """One process, with a loop that anyone would write. What drops some of itself at random is given the shares of so many ranks
    one after the other, as each draws for its own micro-batches."""
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)
    losses, norms = [], []
    for step, batch in enumerate(case.batches):
        torch.manual_seed(step)
        if case.drops and ranks is not None:
            loss = _share_by_share(job, model, batch, step, ranks // case.tensor, case.accumulation)
        else:
            found = job.loss(model, batch)
            loss = found[0] / found[1] if isinstance(found, tuple) else found
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Told(losses, {name: each.detach() for name, each in model.state_dict().items()}, norms)


def _share_by_share(job: anyfit.Job, model: nn.Module, batch: Any, step: int, replicas: int, accumulation: int) -> Tensor:
    total = torch.zeros(())
    for replica in range(replicas):
        torch.manual_seed(step)
        mine = part_of(batch, replica, replicas)
        for at in range(accumulation):
            loss = job.loss(model, part_of(mine, at, accumulation)) / (replicas * accumulation)
            loss.backward()
            total += loss.detach()
    return total


# ---------------------------------------------------------------------- what users do


def used(case: AxisCase) -> dict[str, Any]:
    """Through `anyfit.start`, with a batch of each rank's own; what comes of it, and of looks at the weights in between."""
    ranks = Ranks.of_process_group()
    cut = Axis.of_all().agreed(case.cut(Axis(case.tensor), ROWS) if ranks.index == 0 else None)
    job, said = case.job, io.StringIO()
    found: dict[str, Any] = {}
    with contextlib.redirect_stderr(said), anyfit.start(job, case.plan(ranks.count, cut), small_machine()) as run:
        first, second, *_ = case.batches
        found["losses"] = [float(run.step(first if run.ranks.index == 0 else second))]
        found["evaluated"] = float(run.evaluate(second))
        with run.weights() as model, torch.no_grad():
            found["opened"] = {name: each.detach().clone() for name, each in model.named_parameters()}
            found["by hand"] = float(job.loss(model, second))
            for each in model.parameters():
                each.mul_(0.5)
        found["losses"].append(float(run.step(second)))
        found["weights"] = run.state_dict()
        found["by loop"] = float(_looped(run, first))
        found["drawn"] = float(torch.rand(()))
    found["said"] = said.getvalue()
    return found


def _looped(run: Run, batch: Any) -> Tensor:
    loss = run.loss(batch)
    run.backward(loss)
    run.update()
    return loss.detach()


def used_plainly(case: AxisCase) -> dict[str, Any]:
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)

    def step(batch: Any) -> float:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first, second, *_ = case.batches
    found: dict[str, Any] = {"losses": [step(first)]}
    with torch.no_grad():
        found["evaluated"] = found["by hand"] = float(job.loss(model, second))
        found["opened"] = {name: each.detach().clone() for name, each in model.named_parameters()}
        for each in model.parameters():
            each.mul_(0.5)
    found["losses"].append(step(second))
    found["weights"] = {name: each.detach().clone() for name, each in model.state_dict().items()}
    found["by loop"] = step(first)
    return found


def started_from(case: AxisCase, folder: str) -> Told:
    """Through `anyfit.start`, from weights in a folder, of which every rank reads its part."""
    ranks = Ranks.of_process_group()
    cut = Axis.of_all().agreed(case.cut(Axis(case.tensor), ROWS // case.accumulation) if ranks.index == 0 else None)
    job = replace(case.job, weights=folder)
    with anyfit.start(job, case.plan(ranks.count, cut), small_machine()) as run:
        return stepped(case, run)


def generated(case: AxisCase) -> dict[str, Any]:
    """Tokens that the model writes in a run, with a cache, which is no plain argument; and a step after it."""
    with begun(case) as run:
        run.step(case.batch)
        found: dict[str, Any] = {"written": _written(run.model)}
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            found["loss"] = float(run.step(case.batch))
        return found | {"said": said.getvalue()}


def generated_plainly(case: AxisCase) -> dict[str, Any]:
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)
    for step in range(2):
        loss = job.loss(model, case.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            written = _written(model)
    return {"written": written, "loss": float(loss.detach())}


@torch.no_grad()
def _written(model: Any) -> list[int]:
    model.eval()
    ids = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    model.train()
    written: list[int] = ids[0].tolist()
    return written


def refused(what: str) -> str:
    """What a rank is told of a plan, or a model, that does not fit."""
    case = AxisCase("skipping", border=None, optimizer="adafactor" if what == "an optimizer" else "sgd")
    ranks = Ranks.of_process_group(HANG_SECONDS)
    job, columns = case.job, MEGATRON["skipping"]
    model = job.build()
    cuts = {
        "a block": {"blocks.9": BlockCut(columns)},
        "a parameter": {"blocks.0": BlockCut({"inner.1.weights": Cut(0)})},
        "an uneven one": {"blocks.0": BlockCut({"inner.1.weight": Cut(0, outer=5)})},
        "a tied one": {"enter": BlockCut({"weight": Cut(0)})},
    }.get(what, {"blocks.0": BlockCut(columns)})
    block: Any = model.get_submodule("blocks.0")
    if what == "a hook inside":
        block.inner[1].register_forward_hook(lambda *_: None)
    if what == "a hook on a gradient":
        block.inner[1].weight.register_hook(lambda gradient: gradient)
    if what == "shared memory":
        block.inner[1].weight.data = model.get_submodule("blocks.1").inner[1].weight.data  # type: ignore[union-attr, index]
    plan = case.plan(ranks.count, cuts)
    try:
        placed = place(job, plan, model, torch.device("cpu"), ranks=ranks, solver=LayoutSolver())
        with Run(job, plan, placed) as run:
            if what == "a gradient by hand":
                torch.autograd.grad(model(**case.batches[0]).square().mean(), [model.get_parameter("blocks.0.inner.1.weight")])
            if what == "slightly other losses":
                with run.forward():
                    loss = loss_of(model, case.batches[0]) * (1 + 0.01 * ranks.index)
                run.accept(loss, samples=ROWS)
                run.backward(loss)
                run.update()
            if what == "other losses":
                with run.forward():
                    loss = model(case.batches[0]["x"] * (1 + ranks.index)).square().mean()
                run.accept(loss, samples=ROWS)
                run.backward(loss)
                run.update()
            else:
                run.step(case.batches[0])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def ends_early(case: AxisCase) -> Told:
    """The second replica has one batch less than the first, and takes part in the last step with nothing of its own."""
    with begun(case) as run:
        losses, mine = [], [part_of(batch, run.ranks.replica, run.ranks.replicas) for batch in case.batches]
        for batch in mine[: len(mine) - run.ranks.replica]:
            losses.append(float(run.step(batch)))
        run.await_others()
        return Told(losses, {name: each.detach().clone() for name, each in run.model.named_parameters()})


def ends_early_plainly(case: AxisCase) -> Told:
    job = case.job
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses = job.optimizer(model), []
    for at, batch in enumerate(case.batches):
        loss = job.loss(model, batch if at < len(case.batches) - 1 else part_of(batch, 0, 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Told(losses, {name: each.detach() for name, each in model.named_parameters()})
