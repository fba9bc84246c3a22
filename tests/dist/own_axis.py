"""What ranks do that start without a plan, with a tensor axis that the planner chose or that was asked for."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from anyfit.values.machine import Collective, Machine
from tests.machines import figure, small_machine
from tests.plans import hand_written

from .script import ROWS, Model, data, job_for
from .talking import LOSSES_OF_WORDS, TALKING, words

STEPS = 4
FAMILY = "llama's words"


def job_of(rows: int, **options: Any) -> anyfit.Job:
    batch = {name: each[:rows] for name, each in TALKING[FAMILY]()[2].items()}
    made = anyfit.Job(
        model=lambda: TALKING[FAMILY]()[0],
        loss=LOSSES_OF_WORDS[FAMILY],
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
        sample=batch,
        batch_size=rows,
        precision="fp32",
        clip_norm=0.5,
    )
    return replace(made, **options)


def told(run: anyfit.Run, losses: list[float], said: str = "") -> dict[str, Any]:
    return {"losses": losses, "weights": run.state_dict(), "mesh": dict(run.plan.mesh), "tables": run.plan.tables, "said": said}


def by_loader(rows: int) -> dict[str, Any]:
    """A batch that is not for the ranks to share, from the run's own loader."""
    with anyfit.start(job_for(rows), machine=small_machine()) as run:
        losses = [float(run.step(batch)) for batch in run.loader(list(data(rows * STEPS)), shuffle=False)]
        return told(run, losses)


def by_loader_plainly(rows: int) -> dict[str, Any]:
    return plainly(job_for(rows), list(data(rows * STEPS).split(rows)))


def of_words(mesh: dict[str, int]) -> dict[str, Any]:
    job = job_of(4)
    with anyfit.start(job, machine=small_machine(), mesh=mesh) as run:
        return told(run, [float(run.step(job.sample)) for _ in range(STEPS)])


def of_words_plainly() -> dict[str, Any]:
    job = job_of(4)
    return plainly(job, [job.sample] * STEPS)


def by_own_sampler() -> dict[str, Any]:
    """Each rank has a part of every batch, as a sampler gives it that knows ranks alone; and batches of its own to evaluate."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), anyfit.start(job_for(), machine=small_machine(), mesh={"tensor": 2}) as run:
        index, count = run.ranks.index, run.ranks.count
        losses = [float(run.step(batch.chunk(count)[index])) for batch in data(ROWS * STEPS).split(ROWS)]
        first, *others = data(20).split([11, 9])
        evaluated = float(run.evaluate(first if index == 0 else others[0]))
        return told(run, losses) | {"evaluated": evaluated, "said": said.getvalue()}


def by_own_sampler_plainly() -> dict[str, Any]:
    job = job_for()
    found = plainly(job, list(data(ROWS * STEPS).split(ROWS)))
    with torch.no_grad():
        evaluated = float(job.loss(found.pop("model"), data(20)))
    return found | {"evaluated": evaluated}


def of_unlike_lengths() -> str:
    with anyfit.start(job_of(4), machine=small_machine(), mesh={"tensor": 2}) as run:
        length = 10 - 2 * run.ranks.index
        batch = {name: each[:2, :length] for name, each in words().items()}
        try:
            run.step({"input_ids": batch["ids"], "labels": batch["targets"]})
        except ValueError as error:
            return str(error)
    return "nothing"


def long_job() -> anyfit.Job:
    """One sample, long beside the model."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, pad_token_id=0)
    ids = torch.randint(1, 64, (1, 256), generator=torch.Generator().manual_seed(2))
    return anyfit.Job(
        model=lambda: transformers.LlamaForCausalLM(config).train(),
        loss=LOSSES_OF_WORDS[FAMILY],
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3),
        sample={"input_ids": ids, "labels": ids},
        batch_size=1,
        precision="fp32",
    )


def of_long_samples() -> dict[str, Any]:
    """On a machine whose ranks exchange quickly."""
    names: tuple[Any, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    machine = small_machine(flops_per_second=1e9)
    links = tuple(Collective(name, "node", 4, figure(1e-6), figure(1e10)) for name in names)
    machine = replace(machine, device=replace(machine.device, count=4), collectives=links)
    job = long_job()
    with anyfit.start(job, machine=machine) as run:
        losses = [float(run.step(job.sample)) for _ in range(STEPS)]
        cuts = {(str(each.entry), str(each.exit)) for each in run.plan.cut.values()}
        return told(run, losses) | {"cuts": cuts, "layout": run.plan.decision("layout").choice}


def of_long_samples_plainly() -> dict[str, Any]:
    job = long_job()
    return plainly(job, [job.sample] * STEPS)


class Hooked(Model):
    """Each block has a hook, as no block that is cut may have."""

    def __init__(self) -> None:
        super().__init__(0.0)
        for block in self.blocks:
            block[0].weight.register_hook(lambda gradient: gradient * 2)


def uncut() -> dict[str, Any]:
    """Blocks that cannot be cut, where an axis would have to cut them or nothing fits."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        job = replace(job_for(7), model=Hooked)
        try:
            anyfit.start(job, machine=small_machine())
        except ValueError as error:
            return {"error": str(error)}
    return {"error": ""}


def plainly(job: anyfit.Job, batches: list[Any]) -> dict[str, Any]:
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses = job.optimizer(model), []
    for batch in batches:
        value = job.loss(model, batch)
        loss: Tensor = value[0] / value[1] if isinstance(value, tuple) else value
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "weights": {name: each.detach() for name, each in model.named_parameters()}, "model": model}


def staged(mesh: dict[str, int]) -> dict[str, Any]:
    """By stages of the planner's; and a look at the loss in between."""
    job = replace(job_for(), clip_norm=0.5)
    with anyfit.start(job, machine=small_machine(), mesh=mesh) as run:
        batches = list(data(ROWS * STEPS).split(ROWS))
        share = ROWS // run.ranks.replicas
        mine = slice(run.ranks.replica * share, (run.ranks.replica + 1) * share)
        losses = [float(run.step(batch[mine])) for batch in batches]
        evaluated = float(run.evaluate(batches[0][mine]))
        return told(run, losses) | {"evaluated": evaluated, "stages": len(run.plan.stages)}


def staged_plainly() -> dict[str, Any]:
    job, batches = replace(job_for(), clip_norm=0.5), list(data(ROWS * STEPS).split(ROWS))
    found = plainly(job, batches)
    with torch.no_grad():
        return found | {"evaluated": float(job.loss(found["model"], batches[0]))}


def of_a_loss_that_mixes_samples() -> str:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch[:, :16])
        return nn.functional.cross_entropy(out, batch[:, 16].long()) + out.mean(0).square().sum().sqrt()

    job = replace(job_for(), loss=loss, micro_batch=2)
    with anyfit.start(job, machine=small_machine(), mesh={"pipeline": 2}) as run:
        try:
            run.step(data(ROWS))
        except ValueError as error:
            return str(error)
    return "nothing"


def far_apart() -> Machine:
    """Ranks send to each other quickly, and take long for all else that they do together."""
    slow, quick = figure(1e5), figure(1e9)
    names: tuple[Any, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    links = [Collective(name, "node", 2, figure(1e-6), slow) for name in names]
    return replace(small_machine(), collectives=(*links, Collective("send", "node", 2, figure(1e-6), quick)))


class Unlike(Model):
    """In evaluation a tensor leaves its block by an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out if self.training else out + self.blocks[0][0].seen.sum()


def keep(module: Any, _given: Any, result: Tensor) -> None:
    module.seen = result.detach() * 0.01


def unlike() -> Unlike:
    made = Unlike(0.0)
    made.blocks[0][0].register_forward_hook(keep)  # type: ignore[index]
    return made


def compiled() -> Model:
    """Blocks lie in a module that is compiled."""
    made = Model(0.0)
    made._compiled_call_impl = made._call_impl  # type: ignore[assignment]
    return made


MODELS = {"plain": lambda: Model(0.0), "unlike": unlike, "compiled": compiled}


def unasked_job(model: str) -> anyfit.Job:
    return replace(job_for(), model=MODELS[model], clip_norm=0.5)


def unasked(model: str) -> dict[str, Any]:
    """Without a word of a mesh, where the ranks of a data axis would wait for each other for long."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), anyfit.start(unasked_job(model), machine=far_apart()) as run:
        batches = list(data(ROWS * STEPS).split(ROWS))
        share = ROWS // run.ranks.replicas
        mine = slice(run.ranks.replica * share, (run.ranks.replica + 1) * share)
        losses = [float(run.step(batch[mine])) for batch in batches]
        found = told(run, losses) | {"evaluated": float(run.evaluate(batches[0][mine]))}
    return found | {"said": said.getvalue()}


def unasked_plainly(model: str) -> dict[str, Any]:
    job, batches = unasked_job(model), list(data(ROWS * STEPS).split(ROWS))
    found = plainly(job, batches)
    found["model"].eval()
    with torch.no_grad():
        return found | {"evaluated": float(job.loss(found["model"], batches[0]))}


CALLS: SimpleQueue[None] = SimpleQueue()  # of all blocks; a list would be put back before a block runs again


class Counting(nn.Module):
    """A block that does not give the same when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.put(None)
        made: Tensor = torch.tanh(self.inner(x)) * (1 + 0.01 * (CALLS.qsize() % 7))
        return made


class CountingModel(Model):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.blocks = nn.ModuleList(Counting() for _ in range(4))


def of_blocks_that_differ(plan: anyfit.Plan) -> str:
    try:
        anyfit.start(replace(job_for(), model=CountingModel), plan, small_machine()).close()
    except ValueError as error:
        return str(error)
    return "nothing"


def plan_of_blocks_that_differ() -> anyfit.Plan:
    return hand_written(
        replace(job_for(), model=CountingModel),
        accumulation=2,
        activations={f"blocks.{index}": "recompute" for index in range(4)},
        ranks=2,
        pipeline=2,
        stages=((0, 1), (2, 3)),
    )
