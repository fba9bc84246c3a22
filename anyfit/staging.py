"""A look at a model for a plan with a pipeline axis: which calls a forward makes, on fake weights, and how the plan cuts them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from .running.team import Team
from .stages.calls import callable_modules
from .stages.dry_run import Dry, dry_run
from .stages.looked import Looked
from .stages.pipe import Plumbing
from .tracing.around import dense, leaving_no_mark
from .tracing.blocks import find_blocks
from .tracing.stand_in import FakeMode, fake_model
from .values.called import CalledBlocks, Elements
from .values.demands import StaysInOneStage
from .values.doing import doing
from .values.graph import Graph
from .values.job import Batch, Job
from .values.plan import BlockCut, Plan
from .values.stages import Flow

CPU = torch.device("cpu")


def blocks_of(model: nn.Module) -> list[str]:
    """The modules whose calls stages are counted by: the blocks; without any, the members of the outermost list."""
    found = [each.name for each in find_blocks(model).blocks if each.name]
    if found:
        return found
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            members = [name for name, each in module.named_children() if any(True for _ in each.parameters())]
            if members:
                return [f"{path}.{name}" if path else name for name in members]
    return []


def look(job: Job, plan: Plan, team: Team | None = None) -> Looked | None:
    """None where the plan has no pipeline axis. Of stages that nobody asked for all ranks of a team tell each other whether they
    can: StaysInOneStage where one cannot, or could not evaluate the model."""
    if plan.pipeline == 1:
        return None
    if team is None:
        return _looked(job, plan)
    looked, refusal = None, ""
    try:
        looked = _looked(job, plan)
        refusal = looked.against and f"it cannot be evaluated in stages: {looked.against}"
    except Exception as error:
        refusal = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for each in filter(None, team.refusals(refusal)):
        raise StaysInOneStage(each)
    return looked


def _looked(job: Job, plan: Plan) -> Looked:
    with doing("looking at the model's calls"):
        dry, blocks = _dry(job, plan.micro_batch, training=True)
        stages = dry.flow.cut([(each.first_block, each.last_block) for each in plan.stages])
        training = Plumbing(stages, dry)
        try:
            other, _ = _dry(job, plan.micro_batch, training=False)
        except Exception as error:
            return Looked(blocks, training, None, f"{type(error).__name__}: {error}")
        return Looked(blocks, training, Plumbing(other.flow.cut_like(stages), other))


def _dry(job: Job, rows: int, *, training: bool) -> tuple[Dry, tuple[str, ...]]:
    with leaving_no_mark(job) as memento, torch.set_grad_enabled(training):
        mode = FakeMode()
        with fake_model(job, mode, memento) as model, dense(model):
            blocks = tuple(blocks_of(model))
            if not training:
                model.eval()
            batch = job.prepare(_micro_batch(job, rows), CPU)
            modules = callable_modules(model, blocks)
            return dry_run(model, modules, frozenset(blocks), lambda: job.evaluate(model, batch), mode), blocks


def _micro_batch(job: Job, rows: int) -> Batch:
    """Of the sample, with its numbers: code between blocks may read a mask."""
    if job.split is None:
        return job.with_rows(job.sample, rows)
    whole = job.batch_size
    return job.cut(job.sample, [rows, whole - rows] if whole > rows else [rows])[0]


def dry_of(job: Job, graph: Graph) -> Dry:
    """What a forward of one sample calls, where a pipeline may be cut between these calls."""
    with doing("looking at the model's calls"):
        found = _dry(job, 1, training=True)[0]
    flow = found.flow
    if not flow.blocks:
        raise ValueError("the model calls no blocks that a pipeline could be cut between; train it without a pipeline axis")
    known = {block.name for block in graph.blocks}
    strange = next((flow.calls[at].path for at in flow.blocks if flow.calls[at].path not in known), None)
    if strange is not None:
        raise ValueError(f"{strange} is no block of the trace, so that its seconds are not known; train without a pipeline axis")
    return found


def called_blocks(
    flow: Flow, graph: Graph, tensor: int = 1, cut: Mapping[str, BlockCut] | None = None, tables: Collection[str] = ()
) -> CalledBlocks:
    """What a pipeline may be cut between, of one rank of a tensor axis of so many that holds blocks as `cut` says, and a part of
    the rows of `tables`."""
    users = _users(flow)
    parts = {f"{path}.{name}" for path, each in (cut or {}).items() for name in each.parameters}.union(tables)
    elements: dict[tuple[int, ...], Elements] = {}
    for each in graph.parameters:
        found = tuple(sorted(set().union(*(users.get(name, set()) for name in each.names)))) or (len(flow.blocks) - 1,)
        is_cut = each.name in parts
        own = each.elements // tensor if is_cut else each.elements
        size = Elements(frozen=own) if not each.trainable else Elements(cut=own) if is_cut else Elements(whole=own)
        elements[found] = elements.get(found, Elements()).plus(size)
    return CalledBlocks(tuple(flow.calls[at].path for at in flow.blocks), elements)


def _users(flow: Flow) -> dict[str, set[int]]:
    """By parameter, the block calls that use it; code between two counts for the later one, or for the last."""
    found: dict[str, set[int]] = {}
    position = len(flow.blocks) - 1
    for name in flow.loss.parameters:
        found.setdefault(name, set()).add(position)
    seen = len(flow.blocks)
    for call in reversed(flow.calls):
        if call.is_block:
            seen -= 1
        for name in call.parameters:
            found.setdefault(name, set()).add(min(seen, position))
    return found
