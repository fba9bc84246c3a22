"""The one visible order in which a plan becomes a placed model: build, optimizer, layout, chunks, residency, gradients, updates,
activations. A placed model can be lifted and placed again, as another plan says, in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from anyfit.stages.looked import Looked
from anyfit.values.cuts import Parted
from anyfit.values.demands import Demands, demands_of
from anyfit.values.disk_folder import DiskFolder
from anyfit.values.job import Job
from anyfit.values.layout import Chunk, Placeable, lay_out
from anyfit.values.mesh import Mesh
from anyfit.values.plan import Placement, Plan, TierName

from .activations import Activations
from .chunks import Carried, ModelState
from .compiled import CompiledBlocks, watch_users_own
from .cut_weights import of_all_places, together
from .cutting import CutBlocks, Solver, cut_model, parted_by
from .disk_state import DiskRoom, DiskTier, disk_tier
from .gradients import Gradients
from .lanes import Lanes, Task
from .local_gradients import LocalGradients
from .mirrors import Mirrors, casts, refuse_elsewhere
from .optimizers import refuse_unless_by_element, refuse_unless_cut_apart
from .ranks import ALONE, Ranks
from .recompute import set_attribute
from .reduction import ReducedGradients
from .replayed import ReplayedBlocks
from .residency import Residency
from .staging import StagedModel, staged_by
from .stock import Stock
from .tiers import DeviceTier, HostSlabs, HostTier, Tier, Tiers, let_segments_grow
from .updates import Pace, Updates, adam_keys
from .watched import Bound
from .weights import Elements, of_part


@dataclass(frozen=True)
class Placed:
    """A model ready to train, and everything that holds its state."""

    model: nn.Module
    state: ModelState
    residency: Residency
    gradients: Gradients
    updates: Updates
    compiled: CompiledBlocks
    activations: Activations
    lanes: Lanes
    slabs: HostSlabs
    device: torch.device
    mirrors: Mirrors
    bound: Bound
    demands: Demands
    delay: Callable[[], None] | None = None
    ranks: Ranks = ALONE
    cuts: CutBlocks = field(default_factory=CutBlocks)
    stages: StagedModel = field(default_factory=StagedModel)
    disk: DiskTier | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around every forward whose backward will come."""
        with self.lanes.computing(Task.FORWARD), self.residency.watching(), self.activations.watching():
            yield

    def begin(self) -> None:
        """A step begins: what user code has done since the last is taken over, or refused."""
        self.bound.refuse_replaced()
        self.bound.take_back()
        self.residency.heed_all()
        self.updates.ready()
        self.residency.settle_kept()
        self.residency.begin()

    def settle(self) -> None:
        """The host waits for every update; chunks hold all there is to know."""
        self.bound.take_back()
        self.residency.heed_all()
        self.residency.settle_all()
        self.mirrors.collect()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Every whole parameter by name, on the host: fp32 masters where there are any. All ranks do it together."""
        here = {name: self.cuts.joined(name, each, self.device) for name, each in self.state.state_dict().items()}
        return self.stages.whole(here, self.model, self.device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, parameters that a tensor axis cuts are whole, and those of other stages are here. All ranks do it together."""
        with together(self.cuts, self.state, self.residency), of_all_places(self.stages, self.state, self.model):
            yield

    def show_loaded(self) -> None:
        """Chunks were written, from a checkpoint: parameters and `optimizer.state` follow."""
        self.mirrors.write_back()
        self.updates.users.show_hidden()

    def news(self) -> list[str]:
        """Lines for a person, about what does not run as the plan has it."""
        return [*self.compiled.news(), *self.replayed.news(), *self.cuts.news(), *(self.disk.news() if self.disk else ())]

    @property
    def replayed(self) -> ReplayedBlocks:
        return self.activations.replayed

    @property
    def device_bytes(self) -> int:
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        parts = (self.state, self.residency, self.gradients, self.updates, self.mirrors)
        return buffers + sum(part.device_bytes for part in parts)

    @property
    def host_bytes(self) -> int:
        return self.slabs.bytes

    @property
    def disk_bytes(self) -> int:
        return 0 if self.disk is None else self.disk.file.bytes

    @property
    def disk_written_bytes(self) -> int:
        """So far, which wears its drive."""
        return 0 if self.disk is None else self.disk.file.written_bytes

    def close(self) -> None:
        """The model is plain again, with its weights; no thread is left."""
        try:
            self.residency.close()
        finally:
            self.stages.close()
            self.gradients.close()
            self.activations.close()
            self.compiled.close()
            self.cuts.close(self.state.parameters)
            self.lanes.close()
            if self.disk is not None:
                self.disk.file.close()
            self.slabs.close()
            self.ranks.part_ways()

    def lift(self) -> Carried:
        """Takes the state out, to be placed again; the model is plain. All else goes when whoever holds this lets go of it."""
        if self.disk is not None:
            raise RuntimeError(
                "this plan has optimizer state on the disk, and is not changed while the run lasts: save, and resume"
            )
        self.settle()
        pairs = [(state, slot) for state in self.state.chunks for slot in state.chunk.slots]
        carried = Carried(
            weights={slot.name: state.view(state.weights, slot) for state, slot in pairs},
            low={slot.name: state.view(state.low, slot) for state, slot in pairs if state.is_split},
            optimizer_state=self.updates.state_dict(),
            optimizer=self.updates.optimizer,
            demands=self.demands,
        )
        self.updates.users.let_go()
        self.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return carried


def place(
    job: Job,
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    delay: Callable[[], None] | None = None,
    carried: Carried | None = None,
    arena: torch.Tensor | None = None,
    ranks: Ranks = ALONE,
    elements: Mapping[str, Elements] | None = None,
    agreed: Callable[[nn.Module, Optimizer], None] = lambda _model, _optimizer: None,
    stock: Stock | None = None,
    solver: Solver | None = None,
    looked: Looked | None = None,
    disk: DiskFolder | None = None,
) -> Placed:
    """Moves the state of a real model where the plan wants it. The model object stays the user's own.

    delay      is called before every job of a lane: tests give one that waits for a random time
    carried    what `lift` took out of another placing of the same model; whole also when this fails
    arena      pinned bytes to place on the host in, for whoever places many times: making them takes long; or a `stock`
    ranks      that train it together: all of them place it, with the same plan
    elements   of parameters that do not come from the model itself (`weights.opened`)
    solver     of block layouts, for a plan that cuts blocks over a tensor axis; `looked`, at the model, for one with a pipeline
    disk       the folder for state on the disk
    agreed     is given the optimizer before ranks exchange anything, and refuses one that differs between them
    """
    wanted = _wanted(job, plan, model, device, carried, ranks, elements or {}, agreed, looked)
    with ExitStack() as closing:
        slabs = HostSlabs(device, plan.limit_bytes["host"], arena, stock)
        closing.callback(slabs.close)
        if carried is not None:
            slabs.prepared()  # no memory is made ready before what is to be moved there has made room
        lanes = Lanes(device, delay, several=ranks.are_several, disk=wanted.uses_disk)
        closing.callback(lanes.close)
        tiers, there = _tiers(plan, wanted, lanes, slabs, disk, closing)
        cuts, known = _divided(model, plan, wanted, ranks, device, solver, elements or {})
        more = wanted.demands.kept, stock, wanted.stages.places or wanted.parted
        state = ModelState(model, wanted.layout, wanted.placements, device, tiers, ranks, carried, known, *more)
        mirrors = Mirrors(state.parameters, state.kept)
        cuts.divide(state.parameters)
        closing.callback(cuts.close, state.parameters)
        residency = Residency(state, lanes, plan.slots, plan.prefetch, held=carried.weights.values() if carried else ())
        closing.callback(residency.close)
        bound = Bound(model, state, residency.watched)
        _look_after(model, residency)
        cuts.install()
        compiled = CompiledBlocks(model, plan.compiled, residency, device, job)
        closing.callback(compiled.close)
        gradients = _gradients_for(plan, state, lanes, tiers, residency.moved_gradients)
        closing.callback(gradients.close)
        held = state, gradients, residency, lanes, tiers["host"], mirrors, bound.take_back, Pace.expected(plan.forecast)
        updates = Updates(wanted.optimizer, *held, carried, wanted.demands.together)
        activations = Activations(model, plan.activations, lanes, tiers["host"], residency, gradients, plan.replayed)
        closing.callback(activations.close)
        _close_borders(cuts, wanted.stages, model, device, closing)
        slabs.prepared()
        closing.pop_all()
    parts = lanes, slabs, device, mirrors, bound, wanted.demands, delay, ranks, cuts, wanted.stages, there
    return Placed(model, state, residency, gradients, updates, compiled, activations, *parts)


def _tiers(
    plan: Plan, wanted: _Wanted, lanes: Lanes, slabs: HostSlabs, folder: DiskFolder | None, closing: ExitStack
) -> tuple[Tiers, DiskTier | None]:
    """Also the disk, where the plan has it: a file with room for all that is known beforehand. Other optimizers than Adam make
    their moments in the first step."""
    tiers: dict[TierName, Tier] = {"device": DeviceTier(lanes), "host": HostTier(lanes, slabs)}
    if not wanted.uses_disk:
        return tiers, None
    sizes = []
    for chunk, placement in zip(wanted.layout, wanted.placements, strict=True):
        if placement.optimizer == "disk" and chunk.is_updated:
            elements = chunk.elements // placement.optimizer_shards
            moments = len(adam_keys(wanted.optimizer, chunk)) * [torch.float32.itemsize * elements]
            parts = moments + [chunk.precision.low_bytes * elements] * chunk.is_split
            sizes.append(DiskRoom(tuple(parts), has_second=placement.speculates))
    there = disk_tier((folder or DiskFolder()).found(), sizes, plan.limit_bytes["disk"], lanes, slabs)
    closing.callback(there.file.close)
    return {**tiers, "disk": there}, there


class _Wanted(NamedTuple):
    optimizer: Optimizer
    layout: tuple[Chunk, ...]
    placements: tuple[Placement, ...]
    demands: Demands
    parted: dict[str, Parted]
    stages: StagedModel

    @property
    def uses_disk(self) -> bool:
        return any(each.optimizer == "disk" for each in self.placements)


def _wanted(
    job: Job,
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    carried: Carried | None,
    ranks: Ranks,
    elements: Mapping[str, Elements],
    agreed: Callable[[nn.Module, Optimizer], None],
    looked: Looked | None,
) -> _Wanted:
    """The optimizer, and what goes where. Nothing of the model is changed; raises where the plan cannot be followed."""
    if plan.ranks != ranks.count:
        raise ValueError(f"the plan is for {plan.ranks} ranks, and {ranks.count} are there; plan again with anyfit.plan(job)")
    parted = parted_by(plan, model, ranks) if plan.cut or plan.tables else {}
    stages = staged_by(plan, model, ranks, looked)
    optimizer, group_of = _optimizer_for(job, model, device, carried, agreed)
    placeables = [_in_part(each, parted.get(each.name)) for each in job.placeables(model, group_of)]
    stages.note_trained(placeables)
    layouts = [lay_out(stages.here(placeables, place), plan.chunk_bytes, plan.replicas) for place in range(plan.pipeline)]
    place = ranks.index * plan.pipeline // plan.ranks
    layout, placements = layouts[place], _placements(plan, [len(each) for each in layouts], place)
    if carried is not None and any(each.optimizer == "disk" for each in placements):
        raise ValueError("a run is not placed anew by a plan with optimizer state on the disk: save, and resume with that plan")
    demands = carried.demands if carried else None
    demands = demands or demands_of(model, optimizer, casts=casts(job.precision, device), elsewhere=elements)
    refuse_elsewhere(demands, layout, placements, job.precision, device)
    if any(each.optimizer_shards > 1 for each in placements):
        refuse_unless_by_element(optimizer)
    if parted:
        refuse_unless_cut_apart(optimizer, demands.coupled, min(parted))
    return _Wanted(optimizer, layout, placements, demands, parted, stages)


def _divided(
    model: nn.Module,
    plan: Plan,
    wanted: _Wanted,
    ranks: Ranks,
    device: torch.device,
    solver: Solver | None,
    elements: Mapping[str, Elements],
) -> tuple[CutBlocks, dict[str, Elements]]:
    """Ranks meet; the model's parameters, and those that come from elsewhere, become this rank's."""
    _make_ready(model, plan, device)
    shards = {each.optimizer_shards for each in plan.chunks or wanted.placements}
    ranks.meet(Mesh.of(plan.mesh), shards, wanted.stages.shared)
    cuts = cut_model(model, wanted.optimizer, plan, wanted.parted, ranks, device, solver)
    wanted.stages.make(model, wanted.optimizer, device, {*wanted.parted, *elements})
    return cuts, {name: of_part(each, wanted.parted.get(name)) for name, each in elements.items()}


def _close_borders(cuts: CutBlocks, stages: StagedModel, model: nn.Module, device: torch.device, closing: ExitStack) -> None:
    """Around all else that stands before a block's forward."""
    cuts.close_borders()
    stages.install(model, device)
    closing.callback(stages.close)


def _optimizer_for(
    job: Job, model: nn.Module, device: torch.device, carried: Carried | None, agreed: Callable[[nn.Module, Optimizer], None]
) -> tuple[Optimizer, dict[int, int]]:
    """The optimizer, and by parameter the group that it is in."""
    if carried is None:
        optimizer, group_of = job.build_optimizer(model)
        agreed(model, optimizer)
    else:
        optimizer = carried.optimizer
        group_of = {id(each): index for index, group in enumerate(optimizer.param_groups) for each in group["params"]}
    if device.type == "cpu" and any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(f"{type(optimizer).__name__}(capturable=True) steps on a GPU alone; leave capturable out")
    return optimizer, group_of


def _in_part(each: Placeable, parted: Parted | None) -> Placeable:
    return each if parted is None else replace(each, shape=parted.part, is_cut=True)


def _placements(plan: Plan, chunks: Sequence[int], place: int) -> tuple[Placement, ...]:
    """Of one place of the pipeline; a plan has them of one place after the other."""
    placements = plan.chunks or (Placement(),)
    if len(placements) == 1:
        return placements * chunks[place]
    if len(placements) != sum(chunks):
        among = f" ({' + '.join(map(str, chunks))} over the places of the pipeline)" if len(chunks) > 1 else ""
        raise ValueError(
            f"the plan places {len(placements)} chunks, and this model makes {sum(chunks)}{among} of about "
            f"{plan.chunk_bytes} bytes"
        )
    return placements[sum(chunks[:place]) : sum(chunks[: place + 1])]


def _gradients_for(plan: Plan, state: ModelState, lanes: Lanes, tiers: Tiers, moved: set[str]) -> Gradients:
    if not state.ranks.are_several:
        return LocalGradients(state, lanes, tiers["host"], plan.accumulation, moved)
    return ReducedGradients(state, lanes, tiers, plan.accumulation, moved, torch.float32 if plan.reduction == "fp32" else None)


def _make_ready(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """The allocator for what comes, and the model's buffers."""
    if plan.chunks and device.type == "cuda":
        let_segments_grow()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _look_after(model: nn.Module, residency: Residency) -> None:
    """What the user compiled or scripted; and an LSTM's `flatten_parameters` does nothing: on a GPU, cuDNN would take weights out
    of a chunk."""
    watch_users_own(model, residency)
    for module in model.modules():
        if callable(getattr(module, "flatten_parameters", None)) and not isinstance(module, torch.jit.ScriptModule):
            residency.undo.append(set_attribute(module, "flatten_parameters", lambda: None))
