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

from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.cut_block import CutBlock, Solved, Version
from anyfit.layouts.parts import as_held, part
from anyfit.layouts.problem import OpRates, Posed, kept, pose
from anyfit.planning.layouts import Ask, chained, solve
from anyfit.values.block_layouts import BlockLayout, BlockProblem, LayoutRates
from anyfit.values.cuts import WHOLE, Cut, Held
from anyfit.values.plan import BlockCut
from anyfit.values.profile import Exchange

from .blocks import built, calls_of

STEPS = 3
EXCHANGES = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.3}
OPS = OpRates(1e12, 1e11)
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
    found = []
    for block, each, layout in zip(blocks, posed, layouts, strict=True):
        found.append(cut_block(block, each, layout, axis))
    return found


def cut_block(block: nn.Module, posed: Posed, layout: BlockLayout, axis: Axis) -> CutBlock:
    """The block with its parameters cut as the layout has them; at the length that was posed it has this layout."""

    def choose(captured: Captured, fixed: Mapping[fx.Node, Held], first: Solved | None) -> Solved:
        question = posed_on(axis, captured)
        if captured.key == posed.captured.key:
            return Solved(question, layout, axis)
        same = None if first is None else kept(captured, first.posed, first.layout, OPS, RATES)
        if same is not None:
            return Solved(*same, axis)
        wanted = {question.number(node): held for node, held in fixed.items()}
        answer = solve(question.problem, Ask(fixed=wanted)) if axis.rank == 0 else None
        return Solved(question, axis.agreed(answer), axis)

    solved, parameters = Solved(posed, layout, axis), dict(block.named_parameters())
    held = dict(zip(posed.captured.parameters, solved.held, strict=True))
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    cuts = {name: each for name, each in held.items() if isinstance(each, Cut)}
    borders = (each if isinstance(each, Cut) else None for each in (solved.entry, solved.exit))
    for name, each in cuts.items():
        parameters[name].data = part(parameters[name].data, each, axis.n, axis.rank).clone()
    made = CutBlock("block", block, BlockCut(cuts, *borders), shapes, axis, choose)
    made.install()
    made.close_border()
    return made


def posed_on(axis: Axis, captured: Captured) -> Posed:
    return pose(captured, axis.n, OPS, RATES)


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
        cut = {id(each) for block in blocks for each, held in _held_of(block) if held != WHOLE}
        for parameter in model.parameters():
            if parameter.grad is not None and id(parameter) not in cut and mesh.axis.n > 1:
                dist.all_reduce(parameter.grad, group=mesh.axis.group)
                parameter.grad /= mesh.axis.n
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
    cuts = sum(len(block.cut.parameters) for block in blocks)
    return Trained(
        losses,
        worst,
        [dict(block.versions[0].solved.layout.counts) for block in blocks],
        cuts,
        str(blocks[0].versions[0].solved.entry),
        len(blocks[0].versions),
        _kept(blocks[0]),
    )


def _kept(block: CutBlock) -> int:
    def held(version: Version) -> list[tuple[Held, ...]]:
        steps = zip(version.solved.posed.problem.steps, version.solved.layout.ways, strict=True)
        return [step.ways[way].reads + step.ways[way].gives for step, way in steps]

    return sum(held(version) == held(block.versions[0]) for version in block.versions)


def _held_of(block: CutBlock) -> list[tuple[nn.Parameter, Any]]:
    parameters = dict(block.block.named_parameters())
    return [(each, block.cut.parameters.get(name, WHOLE)) for name, each in parameters.items()]


# ---------------------------------------------------------------------- losses


class Head(nn.Module):
    """The head of a language model, with its loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 8, padding_idx=3)
        self.head = nn.Linear(8, 24, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = self.words(x).tanh() if self.tied else x
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100)


class Losing(NamedTuple):
    loss_error: float
    weight_error: float
    source: str


LOSSES = ("head", "tied", "sequence")


def trained_by_loss(case: str) -> Losing:
    """The vocabulary cut in the head, and in the tied embedding too; or the sequence. Targets that count are not in all parts."""
    axis = Axis.of_all()
    torch.manual_seed(0)
    plain = Head(case == "tied").double()
    if case != "tied":
        del plain.words
    drawn = torch.Generator().manual_seed(1)
    x = torch.randint(24, (3, 8), generator=drawn) if case == "tied" else torch.randn(3, 8, 8, generator=drawn).double()
    targets = torch.randint(24, (3, 8), generator=drawn)
    targets[:, :5] = -100
    targets[0] = -100
    model = copy.deepcopy(plain)
    if x.is_floating_point():
        x.requires_grad_()
    posed = posed_on(axis, capture(model, (x, targets)))
    weight, problem = posed.number(posed.captured.parameter_nodes[0]), posed.problem
    fixed: dict[int, Held] = {problem.entry: Cut(1), weight: WHOLE} if case == "sequence" else {weight: Cut(0)}
    layout = axis.agreed(solve(problem, Ask(fixed=fixed)) if axis.rank == 0 else None)
    block, (held,) = cut_block(model, posed, layout, axis), Solved(posed, layout, axis).held
    losses = [_stepped(each, x, targets, cut) for each, cut in ((plain, None), (model, block))]
    wanted = as_held(plain.head.weight.detach(), held, axis.n, axis.rank)
    error = max(abs(mine - other) / abs(other) for mine, other in zip(losses[1], losses[0], strict=True))
    return Losing(error, float((model.head.weight.detach() - wanted).abs().max()), block.versions[0].solved.code.source)


def _stepped(model: nn.Module, x: Tensor, targets: Tensor, block: CutBlock | None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    found = []
    for _ in range(STEPS):
        loss = model(x, targets)
        loss.backward()
        for name, each in model.named_parameters() if block is not None else ():
            if name not in block.cut.parameters and each.grad is not None:  # as the engine does with whole ones
                dist.all_reduce(each.grad, group=block.axis.group)
                each.grad /= block.axis.n
        if x.grad is not None:
            found.append(float(x.grad.square().sum()))
            x.grad = None
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def refusal_of(what: str) -> str:
    """What a rank is told when ranks, or blocks, do not fit each other."""
    axis = Axis.of_all()
    torch.manual_seed(axis.rank if what == "seeds" else 0)
    rows = 4 + 2 * axis.rank if what == "batches" else 4
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    question = posed_on(axis, capture(block, (x[:4],)))
    weight = question.number(question.captured.parameter_nodes[0])
    layout = axis.agreed(solve(question.problem, Ask(fixed={weight: Cut(0)})))
    cut_block(block, question, layout, axis)
    try:
        block(x)
    except ValueError as error:
        return str(error)
    return "nothing"
