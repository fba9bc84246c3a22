"""The optimizer's state of all chunks by parameter name: read, set, adopted from the optimizer object or from another placing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..chunks import Carried, ChunkState
from ..optimizer_state import Entries, Flat, OptimizerState
from .route import Context
from .stepper import moved


class OptimizerStates:
    def __init__(self, context: Context) -> None:
        self._chunks, self._users, self._stepper, self._device = context.chunks, context.users, context.stepper, context.device
        self.names = {slot.name: chunk for chunk in self._chunks for slot in chunk.state.chunk.slots}

    def make(self, carried: Carried | None) -> None:
        """The first state: from the optimizer's constructor (Adagrad's), its earlier steps, a load, or another placing."""
        state, parameters = self._users.optimizer.state, self._users.parameters
        before = {} if carried is None else carried.optimizer_state
        arrays = _arrays([*state.values(), *before.values()])
        for chunk in self._chunks:
            self._stepper.make_adam(chunk)
            known = {slot.name: state.pop(parameters[slot.name], None) for slot in chunk.state.chunk.slots}
            self._load({name: entry for name, entry in known.items() if entry}, arrays)
            if carried is not None:
                names = [slot.name for slot in chunk.own_slots if slot.name in carried.optimizer_state]
                self._load({name: carried.optimizer_state[name] for name in names}, arrays)
                carried.optimizer_state.update(chunk.entries(chunk.moments, names, cloned=False))
        self.put_away()

    def put_away(self) -> None:
        """What was changed of state on the disk is there."""
        disk = next((each.state.disk for each in self._chunks if each.state.disk is not None), None)
        if disk is not None:
            disk.tier.put_away()

    def replace(self, given: Mapping[Any, Mapping[str, Any]]) -> None:
        """Takes over a state that user code has put in the place of this one."""
        names = {id(parameter): name for name, parameter in self._users.parameters.items()}
        self.forget_all()
        for chunk in self._chunks:
            chunk.clear_moments()
            self._stepper.make_adam(chunk)
        mine = {names[id(parameter)]: entry for parameter, entry in given.items() if names.get(id(parameter)) in self.names}
        self._load(mine, _arrays(mine.values()))
        self.put_away()

    def read(self) -> Entries:
        found: Entries = {}
        for chunk in self._chunks:
            found |= chunk.entries(chunk.moments_here(), [slot.name for slot in chunk.own_slots if slot.name in chunk.rest])
        return found

    def settle(self) -> None:
        """All that is known is in flat buffers, and beside them: an optimizer may have replaced what a resident chunk gave it."""
        for chunk in self._chunks:
            self._users.collect(chunk)
            chunk.keep(chunk.live)

    def forget_all(self) -> None:
        """Nothing is known of any parameter, as before the first step: to be set anew, by `home` and `load_scalars`."""
        self._users.hide(self.names)
        for chunk in self._chunks:
            chunk.rest.clear()
            chunk.live.clear()

    def home(self, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[OptimizerState, Tensor] | None:
        """Where an array of that shape belongs that the optimizer keeps for a parameter; None where it is other ranks' alone."""
        chunk = self.names[name]
        mine = next((slot for slot in chunk.own_slots if slot.name == name), None)
        if mine is None:
            return None
        whole = next(slot for slot in chunk.state.chunk.slots if slot.name == name)
        rest = chunk.rest.setdefault(name, {})
        if shape == whole.shape and dtype == torch.float32:
            if key not in chunk.moments:
                chunk.moments[key] = chunk.zeros()
            rest[key] = Flat()
            return chunk, chunk.state.view(chunk.moments[key], mine)
        rest[key] = torch.zeros(mine.shape if shape == whole.shape else shape, dtype=dtype, device=self._device_of(chunk))
        return chunk, rest[key]

    def load_scalars(self, name: str, entries: Mapping[str, Any]) -> None:
        """What is kept for a parameter that is no array."""
        chunk = self.names[name]
        mine = next((slot for slot in chunk.own_slots if slot.name == name), None)
        if mine is None:
            return
        counts, rest = self._stepper.counts_device(chunk.state), chunk.rest.setdefault(name, {})
        for key, value in entries.items():
            if key in chunk.moments and isinstance(value, Tensor):  # of a parameter that is one number
                chunk.state.view(chunk.flat(key), mine).fill_(value)
                rest[key] = Flat()
            else:
                rest[key] = _scalar_on(value, counts)

    @torch.no_grad()
    def _load(self, state: Mapping[str, Mapping[str, Any]], arrays: Collection[str]) -> None:
        """Of whole parameters; of one that is a single number, these keys are as it is."""
        for name, entries in state.items():
            chunk = self.names[name]
            made = moved(_pieces(chunk.state, {name: dict(entries)}, arrays), self._device_of(chunk))
            if not made:
                continue
            counts = self._stepper.counts_device(chunk.state)
            made[name] = {key: _scalar_on(_exact(value), counts) for key, value in made[name].items()}
            mine = next(slot for slot in chunk.own_slots if slot.name == name)
            for key in chunk.moments.keys() & made[name].keys():
                if isinstance(number := made[name][key], Tensor) and not number.dim():
                    chunk.state.view(chunk.flat(key), mine).fill_(number)
                    made[name][key] = Flat()
            self._users.hide([name])
            chunk.keep(made)
            chunk.live.pop(name, None)

    def _device_of(self, chunk: OptimizerState) -> torch.device:
        return self._device if chunk.state.placement.optimizer == "device" else torch.device("cpu")

    @property
    def device_bytes(self) -> int:
        on_device = [chunk for chunk in self._chunks if chunk.state.placement.optimizer == "device"]
        return sum(tensor.nbytes for chunk in on_device for tensor in chunk.tensors)


def _arrays(entries: Iterable[Mapping[str, Any]]) -> set[str]:
    """Of what an optimizer keeps of parameters, the keys of what is an array for some."""
    return {key for entry in entries for key, value in entry.items() if isinstance(value, Tensor) and value.dim()}


def _pieces(state: ChunkState, entries: Entries, arrays: Collection[str]) -> Entries:
    """What this rank has of the state of whole parameters."""
    if state.shards == 1:
        return dict(entries)
    wholes = {slot.name: slot for slot in state.chunk.slots}
    found: Entries = {}
    for slot in state.own.slots:
        start = state.start_in(wholes[slot.name], slot)
        for key, value in entries.get(slot.name, {}).items():
            is_array = isinstance(value, Tensor) and value.shape == wholes[slot.name].shape and (value.dim() > 0 or key in arrays)
            piece = value.reshape(-1)[start : start + slot.elements] if is_array else value
            found.setdefault(slot.name, {})[key] = piece
    return found


def _exact(value: Any) -> Any:
    """Moments of bf16 parameters, as the masters have them."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _scalar_on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and not value.dim() else value
