"""Cutting: blocks that the ranks of a tensor axis hold together.

A parameter of such a block is cut to this rank's part before anything else is made of it: what lies in chunks is the part, and
every route, tier and shard of the data axis works on it as on any parameter. What the block does is generated code
(layouts/cut_block.py), made when the block is first called: captured, posed, solved on the first rank of the axis and told to
the others. Blocks whose graphs are equal share what was solved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from anyfit.layouts.alike import Alike
from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import Captured
from anyfit.layouts.cut_block import CutBlock, Solved
from anyfit.layouts.guard import NotCaptured
from anyfit.layouts.parts import filled_up, part, rows_of
from anyfit.layouts.problem import kept, pose
from anyfit.values.block_layouts import BlockLayout, BlockProblem, LayoutRates, OpRates
from anyfit.values.cuts import Held, Parted
from anyfit.values.demands import StaysUncut, shared_memory
from anyfit.values.mesh import TENSOR, Mesh
from anyfit.values.plan import Plan
from anyfit.values.record import nearest

from .chunks import quietly
from .ranks import Ranks
from .tables import divide, divided, undivide


class Solver(Protocol):
    """The planner's, which rooms do not import."""

    @property
    def rates(self) -> tuple[OpRates, LayoutRates]:
        """Of one device, and of what ranks exchange: by them ways are compared."""
        ...

    def solve(self, problem: BlockProblem, fixed: Mapping[int, Held]) -> BlockLayout:
        """With tensors that enter the block held so."""


@dataclass(eq=False)
class CutBlocks:
    """Of a model, those that a plan cuts."""

    parameters: Mapping[str, Parted] = field(default_factory=dict)  # by name in the model
    blocks: list[CutBlock] = field(default_factory=list)
    axis: Axis = field(default_factory=Axis)
    lines: list[str] = field(default_factory=list)  # to be said
    tables: Collection[str] = ()  # of the parameters, those outside of blocks

    @property
    def are_captured(self) -> bool:
        """All of them, for some call."""
        return all(each.versions for each in self.blocks)

    def divide(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From now on what reads them outside of cut blocks has all of them."""
        divide(parameters, self._here(parameters), self.tables, self.axis)

    def _here(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Parted]:
        """Without those of other stages."""
        return {name: each for name, each in self.parameters.items() if name in parameters}

    def install(self) -> None:
        for each in self.blocks:
            each.install()

    def close_borders(self) -> None:
        for each in self.blocks:
            each.close_border()

    def news(self) -> list[str]:
        found, self.lines[:] = list(self.lines), []
        return found

    def shape_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.parameters[name].shape if name in self.parameters else tuple(parameter.shape)

    def joined(self, name: str, mine: Tensor, device: torch.device) -> Tensor:
        """The whole parameter, or anything of its shape, on the host. Ranks of the axis do it together."""
        if name not in self.parameters:
            return mine
        return self.of_all(name, mine.to(device)).to("cpu")

    def of_all(self, name: str, mine: Tensor) -> Tensor:
        """A cut parameter put together."""
        parted = self.parameters[name]
        return self.axis.all_gather(mine, parted.cut).narrow(parted.cut.dim, 0, parted.shape[parted.cut.dim])

    def close(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The blocks are the user's own. Cut parameters stand for no number: a part would be taken for a whole."""
        for each in self.blocks:
            each.remove()
        here = self._here(parameters)
        undivide(parameters, here)
        with quietly():
            for name, parted in here.items():
                parameter = parameters[name]
                parameter.data = torch.full((1,), float("nan"), dtype=parameter.dtype, device=parameter.device).expand(
                    parted.shape
                )


def parted_by(plan: Plan, model: nn.Module, ranks: Ranks) -> dict[str, Parted]:
    """By name in the model, the parameters that the plan cuts. Nothing is changed; raises where the plan cannot be followed."""
    members = Mesh.of(plan.mesh).group(ranks.index, (TENSOR,))
    tables = divided(plan.tables, model, len(members), members.index(ranks.index), plan.cut)
    names = {id(each): name for name, each in model.named_parameters()}
    blocks = {path: _block(model, path, plan) for path in plan.cut}
    found: dict[str, Parted] = {}
    for path, block in blocks.items():
        _refuse_hooks(path, block)
        own = dict(block.named_parameters())
        for name, cut in plan.cut[path].parameters.items():
            if name not in own:
                raise ValueError(f"the plan cuts {name!r} of block {path!r}, which has none" + nearest(name, list(own)))
            parted = Parted(tuple(own[name].shape), cut, len(members), members.index(ranks.index))
            _refuse_uneven(f"{path}.{name}", parted)
            found[names[id(own[name])]] = parted
    _refuse_shared(model, blocks, found, tables)
    return found | tables


def cut_model(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    parted: Mapping[str, Parted],
    ranks: Ranks,
    device: torch.device,
    solver: Solver | None,
) -> CutBlocks:
    """The model's cut parameters, and what the optimizer keeps of them, become this rank's parts of what rank 0 has."""
    if not parted:
        return CutBlocks()
    assert solver is not None, "a plan that cuts blocks needs the planner's solver"
    blocks = {path: model.get_submodule(path) for path in plan.cut}
    shapes = {path: {name: tuple(each.shape) for name, each in block.named_parameters()} for path, block in blocks.items()}
    for name, each in model.named_parameters():
        if name in parted:
            known: dict[str, Any] = optimizer.state.get(each, {})
            for key, value in known.items():
                if isinstance(value, Tensor) and tuple(value.shape) == parted[name].shape and value.dim():
                    known[key] = of_rank(value, parted[name])
            each.data = of_rank(_of_first(each.data, ranks, device), parted[name]).to(each.device)
    found = CutBlocks(parted, axis=ranks.axis, tables=plan.tables)
    choose, alike = _Choice(found.axis, solver), Alike()
    found.blocks += [
        CutBlock(path, block, plan.cut[path], shapes[path], found.axis, choose, found.lines.append, alike)
        for path, block in blocks.items()
    ]
    return found


def of_rank(whole: Tensor, parted: Parted) -> Tensor:
    if parted.is_even:
        return part(whole, parted.cut, parted.n, parted.rank).clone()
    mine = rows_of(whole, parted.cut.dim, parted.n, parted.rank)
    return filled_up(mine, parted.cut.dim, parted.part[parted.cut.dim]).clone()


def _of_first(tensor: Tensor, ranks: Ranks, device: torch.device) -> Tensor:
    if not tensor.numel() or 0 in tensor.stride():  # it is read from a folder, and has no numbers yet
        return tensor
    whole = tensor.to(device, copy=True).contiguous()
    ranks.broadcast(whole)
    return whole


def _block(model: nn.Module, path: str, plan: Plan) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if path not in modules:
        raise ValueError(f"the plan cuts block {path!r}, and the model has none" + nearest(path, list(modules)))
    inside = next((each for each in (*plan.cut, *plan.activations, *plan.compiled) if each.startswith(f"{path}.")), None)
    if inside is not None:
        raise ValueError(f"the plan cuts block {path!r}, and names {inside!r} inside of it; a cut block is one piece of code")
    return modules[path]


def _refuse_uneven(name: str, parted: Parted) -> None:
    cut, n = parted.cut, parted.n
    if not cut.divides(parted.shape, n):
        pieces = f", in {cut.outer} pieces," if cut.outer > 1 else ""
        raise StaysUncut(
            f"the plan cuts {name} of shape {parted.shape} along dimension {cut.dim}{pieces} over {n} ranks, which do not divide "
            "it evenly; hold it whole, or use a tensor axis that does"
        )


def _refuse_hooks(path: str, block: nn.Module) -> None:
    for name, each in block.named_parameters():
        if each._backward_hooks or each._post_accumulate_grad_hooks:
            raise StaysUncut(
                f"{path}.{name} has a hook on its gradient, and is part of a block that is cut over ranks, where no rank has all "
                f"of it; leave {path!r} out of `cut`"
            )


def _refuse_shared(
    model: nn.Module, blocks: Mapping[str, nn.Module], parted: Mapping[str, Parted], tables: Collection[str]
) -> None:
    """A part that two blocks hold is nobody's whole; a table tells all who use it."""
    holders: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(each), []).append(name)
    for name, each in model.named_parameters():
        paths = holders[id(each)]
        around = next((path for path in blocks if name in parted and all(at.startswith(f"{path}.") for at in paths)), None)
        if name in parted and around is None:
            raise StaysUncut(
                f"the plan cuts {name}, which is also {next(at for at in paths if at != name)}; tied weights are held whole: "
                "leave it out of the block's cut parameters"
            )
    shared, held = shared_memory(model)
    for name, why in {**held, **shared}.items():
        if name in parted or name in tables:
            raise StaysUncut(f"{why}. The plan cuts it over ranks, which gives it memory of its own")


@dataclass(eq=False)
class _Choice:
    """Solves on the first rank of the axis, once for graphs that are equal, and tells the others."""

    axis: Axis
    solver: Solver
    _known: dict[Any, Solved] = field(default_factory=dict)

    def __call__(self, captured: Captured, fixed: Mapping[fx.Node, Held], first: Solved | None) -> Solved:
        places = {node: at for at, node in enumerate(captured.placeholders)}
        key = captured.key, tuple(sorted((places[node], str(held)) for node, held in fixed.items()))
        if key not in self._known:
            self._known[key] = self._solved(captured, fixed, first)
        return self._known[key]

    def _solved(self, captured: Captured, fixed: Mapping[fx.Node, Held], first: Solved | None) -> Solved:
        same = None if first is None else kept(captured, first.posed, first.layout, *self.solver.rates)  # alike on all ranks
        if same is not None and all(same[1].held(same[0].problem, same[0].number(node)) == held for node, held in fixed.items()):
            return Solved(*same, self.axis)
        posed = pose(captured, self.axis.n, *self.solver.rates)
        layout, refused = None, ""
        if self.axis.rank == 0:
            try:
                layout = self.solver.solve(posed.problem, {posed.number(node): held for node, held in fixed.items()})
            except ValueError as error:
                refused = str(error)
        layout, refused = self.axis.agreed((layout, refused))
        if refused:
            raise NotCaptured(refused)
        return Solved(posed, layout, self.axis)
