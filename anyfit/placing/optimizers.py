"""The user's own optimizer object: what its `state` shows while chunks hold it, and steps that take all parameters at once.

Where every chunk is updated on the device by torch's own code, `optimizer.state` is the truth, as it is in plain PyTorch: its
arrays are views of the chunks' flat buffers, and whatever user code does to it counts. Elsewhere the state is not to be seen
there: who looks is told so, and who puts another in its place (`load_state_dict`) has that taken over.

An optimizer whose parameters are coupled (values/coupling.py) is stepped as plain PyTorch steps it: once, itself, with all
parameters and gradients in their places; of bf16 weights it sees the fp32 masters.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from anyfit.values.coupling import coupled_from_outside
from anyfit.values.demands import StaysOnDevice, StaysUncut, StaysWhole
from anyfit.values.plan import Placement

from .chunks import quietly
from .optimizer_state import Entries, OptimizerState
from .tables import Divided


def narrowed(optimizer: Optimizer, groups: list[dict[str, Any]], state: Mapping[nn.Parameter, dict[str, Any]]) -> Any:
    """The same optimizer, with these parameters and their state alone."""
    other: Any = object.__new__(type(optimizer))
    other.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    other.param_groups, other.state = groups, defaultdict(dict, state)
    return other


def steps_together(placement: Placement) -> bool:
    """Whether a chunk of this placement can be stepped in one call with all others."""
    return placement.route == "resident" and placement.gradients == "device" and placement.optimizer_shards == 1


def refuse_apart(reason: str | None, placements: Iterable[Placement]) -> None:
    """Raises where parameters have to be stepped together, and a plan does not."""
    if reason is not None and not all(map(steps_together, placements)):
        raise StaysOnDevice(
            reason,
            ": its parameters have to be stepped together, and this plan steps them chunk by chunk, on the host or over "
            "ranks; use a plan with all optimizer state on the device (more device memory, a smaller model), or an optimizer "
            "that treats each parameter by itself, such as torch.optim.AdamW without hooks",
        )


class Elsewhere(defaultdict[Any, Any]):
    """Stands for a state that lies where the plan says: whoever looks at it gets no wrong answer."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "run.optimizer.state is not kept there: the plan has the optimizer's state in chunks, on the host or updated by a "
            "kernel of anyfit; run.save writes it and run.optimizer.load_state_dict replaces it, and a plan with all state on "
            "the device, updated by torch, keeps it readable"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __eq__ = __or__ = __ior__ = _refuse
    get = pop = popitem = clear = update = setdefault = copy = keys = values = items = _refuse
    __reduce__ = __copy__ = __deepcopy__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class UsersOptimizer:
    """Between the optimizer object and the chunks that hold what it knows."""

    def __init__(
        self, optimizer: Optimizer, chunks: Sequence[OptimizerState], parameters: Mapping[str, nn.Parameter], *, is_open: bool
    ) -> None:
        self.optimizer, self._chunks, self.parameters = optimizer, chunks, parameters
        self.is_open = is_open  # its `state` is the truth
        self._groups = _groups_of(optimizer)
        self._hidden: set[str] = set()  # of parameters whose state was loaded, and is not shown yet
        self._elsewhere = Elsewhere()
        self._can_step_together = all(steps_together(each.state.placement) for each in chunks)
        # On the CPU torch steps one parameter after the other: all in one call hold no more than one chunk.
        self._can_step_itself = is_open and all(each.state.device.type == "cpu" and not each.state.is_split for each in chunks)

    def refuse_changed(self) -> None:
        """Before a step: what has been done to the optimizer since the run started and cannot be honoured."""
        now = _groups_of(self.optimizer)
        if now != self._groups:
            raise RuntimeError(
                f"run.optimizer has parameter groups of {list(now)} parameters, and had {list(self._groups)} at the start; what "
                "add_param_group adds is not trained by this run: start a new one (anyfit.start) with all parameters in "
                "Job(optimizer=), frozen ones too"
            )
        reason = coupled_from_outside(self.optimizer)
        if reason is not None and not (self._can_step_together and self.is_open):
            refuse_apart(reason, [each.state.placement for each in self._chunks])
            raise ValueError(f"{reason}, since the run started; do that in Job(optimizer=)")

    def show(self) -> None:
        """`optimizer.state` is what chunks have."""
        if not self.is_open:
            self.optimizer.state = self._elsewhere
            return
        for each in self._chunks:
            self._show(each, [slot.name for slot in each.own_slots if slot.name in each.rest and slot.name not in each.live])
        self._hidden.clear()

    def show_hidden(self) -> None:
        if self._hidden or not self.is_open:
            self.show()

    def _show(self, each: OptimizerState, names: Sequence[str]) -> None:
        each.live |= each.entries(each.moments, names, cloned=False)
        for name in names:
            self.optimizer.state[self.parameters[name]] = each.live[name]

    def hide(self, names: Iterable[str]) -> None:
        """What is known of these parameters is being set anew."""
        if self.is_open:
            for name in names:
                self._hidden.add(name)
                self.optimizer.state.pop(self.parameters[name], None)

    def collect(self, each: OptimizerState) -> None:
        """Takes over what user code did to the state of a chunk's parameters."""
        if not self.is_open:
            return
        state = self.optimizer.state
        for slot in each.own_slots:
            if slot.name in self._hidden:
                continue
            entry = state.get(self.parameters[slot.name])
            if entry:
                each.live[slot.name] = entry
            else:
                each.live.pop(slot.name, None)
                each.rest.pop(slot.name, None)

    def keep(self, each: OptimizerState, made: Entries) -> None:
        """Takes over what a step made for parameters that had no state yet, into flat buffers."""
        each.keep(made)
        if self.is_open:
            self._show(each, list(made))
        else:
            each.live |= each.entries(each.moments, made, cloned=False)

    def replaced(self) -> Mapping[Any, Any] | None:
        """What user code has put in the place of a state that is elsewhere."""
        state = self.optimizer.state
        return None if self.is_open or state is self._elsewhere else state

    def let_go(self) -> None:
        """The chunks' state goes elsewhere."""
        self.optimizer.state = defaultdict(dict)

    def steps_itself(self, coupled: str | None) -> bool:
        """Whether the optimizer is called once for all parameters: it has to be, or that costs least."""
        if coupled is not None or coupled_from_outside(self.optimizer) is not None:
            return True
        return self._can_step_itself and not any(group.get("foreach") for group in self.optimizer.param_groups)

    def step_together(self, gradients: Mapping[str, Tensor], masters: Mapping[str, Tensor], factor: float | None) -> None:
        """One step of the optimizer itself, with these gradients; on fp32 masters where a parameter has them."""
        before: dict[str, Tensor] = {}
        is_divided = any(issubclass(type(each), Divided) for each in self.parameters.values())
        with quietly() if is_divided else contextlib.nullcontext():  # what the optimizer steps is a rank's parts
            try:
                for name, parameter in self.parameters.items():
                    if name in masters:
                        before[name] = parameter.data
                        parameter.data = masters[name]
                    gradient = gradients.get(name)
                    if parameter.grad is not gradient:
                        parameter.grad = gradient
                if factor is not None and gradients:  # a stage of a pipeline may have none
                    torch._foreach_mul_(list(gradients.values()), factor)
                self.optimizer.step()
            finally:
                for name, weights in before.items():
                    self.parameters[name].grad = None
                    self.parameters[name].data = weights


def _groups_of(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip
CUT = 21  # of 48 elements: inside a row


def refuse_unless_by_element(optimizer: Optimizer) -> None:
    """Ranks shard chunks, and the cut goes through matrices. Optimizers that look at a row, a matrix or its norm would quietly
    train something else on a piece, so one that is not known is tried on a small matrix, whole and in flat pieces."""
    if type(optimizer) not in BY_ELEMENT and not all(_is_by_element(optimizer, group) for group in optimizer.param_groups):
        raise StaysWhole(
            f"{type(optimizer).__name__} steps a piece of a parameter otherwise than the whole, and this plan shards parameters "
            "over ranks; use a plan with optimizer_shards 1, or an optimizer that treats every element by itself, such as AdamW"
        )


def refuse_unless_cut_apart(optimizer: Optimizer, coupled: str | None, name: str) -> None:
    """The same for parameters of which ranks of a tensor axis have parts."""
    if coupled is None and (
        type(optimizer) in BY_ELEMENT or all(_is_by_element(optimizer, group) for group in optimizer.param_groups)
    ):
        return
    why = coupled or f"{type(optimizer).__name__} steps a part of a parameter otherwise than the whole"
    raise StaysUncut(
        f"{why}, and this plan cuts {name} over the ranks of a tensor axis; use a plan without `cut`, or an optimizer that "
        "treats every element by itself, such as AdamW"
    )


def _is_by_element(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (torch.randn(6, 8, generator=generator) for _ in range(3))
    try:
        whole = _stepped(optimizer, group, [weights], [[gradient] for gradient in gradients])
        pieces = [[flat[:CUT], flat[CUT:]] for flat in (each.flatten() for each in (weights, *gradients))]
        cut = _stepped(optimizer, group, pieces[0], pieces[1:])
    except Exception:  # it wants matrices, or a closure, or what only its constructor makes
        return False
    return torch.allclose(whole, cut, rtol=1e-5, atol=1e-7)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Tensor:
    """These weights after a step with each of the gradients, by an optimizer that knows of nothing else."""
    parameters = [nn.Parameter(each.clone()) for each in weights]
    other = narrowed(optimizer, [{**group, "params": parameters}], {})
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        other.step()
    return torch.cat([each.detach().flatten() for each in parameters])
