"""What the ranks of a pool do: train a model with cut blocks, beside the plain one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from anyfit.layouts.axis import Axis, leaving
from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.cut_block import CutBlock, Version
from anyfit.layouts.parts import as_held
from anyfit.layouts.problem import OpRates, Posed, pose
from anyfit.planning.layouts import Ask, chained, kept, solve
from anyfit.values.block_layouts import BlockLayout, BlockProblem, LayoutRates
from anyfit.values.cuts import WHOLE, Cut, Held
from anyfit.values.profile import Exchange

from .blocks import built, calls_of

STEPS = 3
EXCHANGES = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.3}
RATES = LayoutRates({name: Exchange(1e-7, times * 1e-10) for name, times in EXCHANGES.items()}, 1e-11)  # type: ignore[misc]


class Trained(NamedTuple):
    loss_error: float  # relative, at worst
    weight_error: float
    counts: list[dict[str, int]]  # of exchanges, by block
    cuts: int  # parameters that are cut
    border: str
    versions: int  # of the first block
    kept: int  # of them, those with the ways of the first


def layouts_of(problems: list[Posed], objective: int | None, price: float) -> list[BlockLayout]:
    """The solver's choice; or, by a random objective, any."""
    if objective is None:
        by_key = {each.captured.key: each.problem for each in problems}
        return chained([by_key[each.captured.key] for each in problems], Ask(price=price))
    drawn = np.random.default_rng(objective)
    first = problems[0].problem
    options = [
        held for held in first.borders(first.entry) if all(held in each.problem.borders(each.problem.exit) for each in problems)
    ]
    border = options[int(drawn.integers(len(options)))]
    found = []
    for each in problems:
        fixed = {each.problem.entry: border, each.problem.exit: border}
        found.append(solve(_random(each.problem, drawn), Ask(fixed=fixed, gap=0.5)))
    return found


def _random(problem: BlockProblem, drawn: np.random.Generator) -> BlockProblem:
    """The same block with any seconds for each way, and moves that take next to nothing."""
    steps = [
        replace(step, ways=tuple(way._replace(seconds=float(drawn.random()) * 1e-6) for way in step.ways))
        for step in problem.steps
    ]
    cheap = LayoutRates(dict.fromkeys(EXCHANGES, Exchange(2e-7, 0.0)), 0.0)  # type: ignore[arg-type]
    return replace(problem, steps=tuple(steps), rates=cheap)


def cut(model: nn.Module, path: str, batch: dict[str, Tensor], axis: Axis, objective: int | None, price: float) -> list[CutBlock]:
    """All blocks beside the one at the path, in the model's own place."""
    parent, _, _ = path.rpartition(".")
    blocks = list(model.get_submodule(parent).children())
    posed = [posed_on(axis, capture(*call)) for call in calls_of(model, blocks, batch)]
    layouts = axis.agreed(layouts_of(posed, objective, price) if axis.rank == 0 else None)

    def choose(captured: Captured, fixed: Mapping[fx.Node, Held], first: Version) -> tuple[Posed, BlockLayout]:
        question = posed_on(axis, captured)
        by_number = {question.number(node): held for node, held in fixed.items()}
        layout = None
        if axis.rank == 0 and captured.form == first.captured.form:
            layout = kept(first.layout, first.posed.problem, question.problem)
        if axis.rank == 0 and layout is None:
            layout = solve(question.problem, Ask(fixed=by_number))
        return question, axis.agreed(layout)

    found = [
        CutBlock(block, each, layout, axis, choose, follows=block is not blocks[0])
        for block, each, layout in zip(blocks, posed, layouts, strict=True)
    ]
    for each in found:
        each.install()
    blocks[-1].register_forward_hook(lambda _, args, result: _left(result, axis))
    return found


def posed_on(axis: Axis, captured: Captured) -> Posed:
    return pose(captured, axis.n, OpRates(1e12, 1e11), RATES)


def _left(result: Any, axis: Axis) -> Any:
    if isinstance(result, Tensor):
        return leaving(result, axis)
    return (leaving(result[0], axis), *result[1:])


class Mesh(NamedTuple):
    """The ranks as replicas of a tensor axis: neighbours hold a block together, and others another part of the batch."""

    axis: Axis
    replicas: int = 1
    replica: int = 0
    group: Any = None  # of those that hold the same parts

    @classmethod
    def of(cls, tensor: int | None) -> Mesh:
        if tensor is None:
            return cls(Axis.of_all())
        rank, count = dist.get_rank(), dist.get_world_size()
        along = [dist.new_group(list(range(first, first + tensor))) for first in range(0, count, tensor)]
        across = [dist.new_group(list(range(first, count, tensor))) for first in range(tensor)]
        axis = Axis(tensor, rank % tensor, along[rank // tensor])
        return cls(axis, count // tensor, rank // tensor, across[rank % tensor])

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.chunk(self.replicas)[self.replica] for name, each in batch.items()}

    def mean(self, x: Tensor) -> Tensor:
        if self.replicas > 1:
            dist.all_reduce(x, group=self.group)
            x /= self.replicas
        return x


def losses_of(model: nn.Module, batches: list[dict[str, Tensor]], blocks: list[CutBlock], mesh: Mesh) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        result = model(**batch)
        first = result if isinstance(result, Tensor) else result[0]
        loss = (first * torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)).square().mean()
        loss.backward()
        for block in blocks:
            for name in block.last.summed:
                dist.all_reduce(block.block.get_parameter(name).grad, group=mesh.axis.group)
        for parameter in model.parameters():
            if parameter.grad is not None:
                mesh.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(mesh.mean(loss.detach().clone())))
    return found


def trained(
    family: str,
    objective: int | None = None,
    price: float = 0.0,
    *,
    recomputes: bool = False,
    lengths: tuple[int, ...] = (),
    tensor: int | None = None,
) -> Trained:
    """Some steps of the same batch; or one step for each of some lengths, of which the first is the batch's own."""
    mesh = Mesh.of(tensor)
    axis = mesh.axis
    model, path, batch = built(family)
    plain = copy.deepcopy(model)
    batches = [{name: each[:, :length] for name, each in batch.items()} for length in lengths] or [batch] * STEPS
    wanted = losses_of(plain, batches, [], Mesh(Axis()))
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    blocks = cut(model, path, mesh.share(batch), axis, objective, price)
    got = losses_of(model, [mesh.share(each) for each in batches], blocks, mesh)
    held = {id(each): each_held for block in blocks for each, each_held in _held_of(block)}
    worst = 0.0
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        wanted_part = as_held(theirs[name].detach(), held.get(id(parameter), WHOLE), axis.n, axis.rank)
        worst = max(worst, float((parameter.detach() - wanted_part).abs().max() / wanted_part.abs().max().clamp(min=1e-3)))
    losses = max(abs(mine - other) / abs(other) for mine, other in zip(got, wanted, strict=True))
    cuts = sum(each != WHOLE for block in blocks for each in block.held.values())
    return Trained(
        losses,
        worst,
        [dict(block.first.layout.counts) for block in blocks],
        cuts,
        str(blocks[0].first.entry),
        len(blocks[0].versions),
        _kept(blocks[0]),
    )


def _kept(block: CutBlock) -> int:
    def held(version: Version) -> list[tuple[Held, ...]]:
        steps = zip(version.posed.problem.steps, version.layout.ways, strict=True)
        return [step.ways[way].reads + step.ways[way].gives for step, way in steps]

    return sum(held(version) == held(block.first) for version in block.versions)


def _held_of(block: CutBlock) -> list[tuple[nn.Parameter, Any]]:
    parameters = dict(block.block.named_parameters())
    return [(parameters[name], held) for name, held in block.held.items()]


def refusal_of(what: str) -> str:
    """What a rank is told when ranks, or blocks, do not fit each other."""
    axis = Axis.of_all()
    torch.manual_seed(axis.rank if what == "seeds" else 0)
    rows = 4 + 2 * axis.rank if what == "batches" else 4
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    block, another = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))
    another[0].weight = block[0].weight
    questions = [posed_on(axis, capture(each, (x,))) for each in ((block, another) if what == "shared" else (block,))]
    try:
        for each, question in zip((block, another), questions, strict=False):
            weight = question.number(question.captured.parameter_nodes[0])
            layout = axis.agreed(solve(question.problem, Ask(fixed={weight: Cut(0)})))
            CutBlock(each, question, layout, axis).install()
    except ValueError as error:
        return str(error)
    return "nothing"
