"""The one visible order in which a plan becomes a placed model: build, optimizer, layout, chunks, residency, gradients, updates,
activations. A placed model can be lifted and placed again, as another plan says, in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from anyfit.values.demands import Demands, demands_of
from anyfit.values.job import Job
from anyfit.values.layout import lay_out
from anyfit.values.mesh import Mesh
from anyfit.values.plan import Placement, Plan

from .activations import Activations
from .chunks import Carried, ModelState
from .compiled import CompiledBlocks, watch_users_own
from .gradients import Gradients
from .lanes import Lanes, Task
from .local_gradients import LocalGradients
from .mirrors import Mirrors, casts, refuse_elsewhere
from .optimizers import refuse_unless_by_element
from .ranks import ALONE, Ranks
from .recompute import set_attribute
from .reduction import ReducedGradients
from .replayed import ReplayedBlocks
from .residency import Residency
from .stock import Stock
from .tiers import DeviceTier, HostSlabs, HostTier, Tiers, let_segments_grow
from .updates import Pace, Updates
from .watched import Bound
from .weights import Elements


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

    def show_loaded(self) -> None:
        """Chunks were written, from a checkpoint: parameters and `optimizer.state` follow."""
        self.mirrors.write_back()
        self.updates.users.show_hidden()

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

    def close(self) -> None:
        """The model is plain again, with its weights; no thread is left."""
        try:
            self.residency.close()
        finally:
            self.gradients.close()
            self.activations.close()
            self.compiled.close()
            self.lanes.close()
            self.slabs.close()
            self.ranks.part_ways()

    def lift(self) -> Carried:
        """Takes the state out, to be placed again; the model is plain. All else goes when whoever holds this lets go of it."""
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
) -> Placed:
    """Moves the state of a real model where the plan wants it. The model object stays the user's own.

    delay      is called before every copy and update on a lane: tests give one that waits for a random time
    carried    what `lift` took out of another placing of the same model; whole also when this fails
    arena      pinned bytes to place on the host in, for whoever places many times: making them takes long; or a `stock`
    ranks      that train it together: all of them place it, with the same plan
    elements   of parameters that do not come from the model itself (`weights.opened`)
    agreed     is given the optimizer before ranks exchange anything, and refuses one that differs between them
    """
    if plan.ranks != ranks.count:
        raise ValueError(f"the plan is for {plan.ranks} ranks, and {ranks.count} are there; plan again with anyfit.plan(job)")
    optimizer, group_of = _optimizer_for(job, model, device, carried, agreed)
    layout = lay_out(job.placeables(model, group_of), plan.chunk_bytes, ranks.count)
    placements = _placements(plan, len(layout))
    cast = casts(job.precision, device)
    demands = carried.demands if carried else demands_of(model, optimizer, casts=cast, elsewhere=elements or ())
    refuse_elsewhere(demands, layout, placements, job.precision, device)
    if any(each.optimizer_shards > 1 for each in placements):
        refuse_unless_by_element(optimizer)
    _make_ready(model, plan, device)
    with ExitStack() as closing:
        slabs = HostSlabs(device, plan.limit_bytes["host"], arena, stock)
        closing.callback(slabs.close)
        if carried is not None:
            slabs.prepared()  # no memory is made ready before what is to be moved there has made room
        lanes = Lanes(device, delay, several=ranks.are_several)
        closing.callback(lanes.close)
        ranks.meet(Mesh.of(plan.mesh), (each.optimizer_shards for each in placements))
        tiers: Tiers = {"device": DeviceTier(lanes), "host": HostTier(lanes, slabs)}
        state = ModelState(model, layout, placements, device, tiers, ranks, carried, elements, demands.kept, stock)
        mirrors = Mirrors(state.parameters, state.kept)
        residency = Residency(state, lanes, plan.slots, plan.prefetch, held=carried.weights.values() if carried else ())
        closing.callback(residency.close)
        bound = Bound(model, state, residency.watched)
        _look_after(model, residency)
        compiled = CompiledBlocks(model, plan.compiled, residency, device, job)
        closing.callback(compiled.close)
        gradients = _gradients_for(plan, state, lanes, tiers, residency.moved_gradients)
        closing.callback(gradients.close)
        held = state, gradients, residency, lanes, tiers["host"], mirrors
        updates = Updates(optimizer, *held, bound.take_back, Pace.expected(plan.forecast), carried, demands.together)
        activations = Activations(model, plan.activations, lanes, tiers["host"], residency, gradients, plan.replayed)
        closing.callback(activations.close)
        slabs.prepared()
        closing.pop_all()
    parts = lanes, slabs, device, mirrors, bound, demands, delay, ranks
    return Placed(model, state, residency, gradients, updates, compiled, activations, *parts)


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


def _placements(plan: Plan, chunks: int) -> tuple[Placement, ...]:
    placements = plan.chunks or (Placement(),)
    if len(placements) == 1:
        placements *= chunks
    if len(placements) != chunks:
        raise ValueError(
            f"the plan places {len(placements)} chunks, and this model makes {chunks} of about {plan.chunk_bytes} bytes"
        )
    return placements


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
