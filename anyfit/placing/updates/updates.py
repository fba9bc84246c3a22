"""What the rest of the engine sees of updates: `Updates` owns the parts, and each does one thing (`__init__.py` lists them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..chunks import Carried, ModelState
from ..gradients import Gradients
from ..lanes import Lanes
from ..mirrors import Mirrors
from ..optimizer_state import Entries, OptimizerState
from ..optimizers import UsersOptimizer, steps_together
from ..residency import Residency
from ..tiers import HostSlabs
from .host import OnHost
from .resident import Resident
from .route import Context, Route, SpeculatingRoute
from .schedule import Schedule
from .speculation import Speculation
from .states import OptimizerStates
from .stepper import Stepper
from .streamed import Streamed


class Updates:
    """`take_back` has tensors that user code has put in the place of weights taken over."""

    def __init__(
        self,
        optimizer: Optimizer,
        state: ModelState,
        gradients: Gradients,
        residency: Residency,
        lanes: Lanes,
        slabs: HostSlabs,
        mirrors: Mirrors,
        take_back: Callable[[], None],
        carried: Carried | None = None,
        coupled: str | None = None,
    ) -> None:
        self.optimizer, self._take_back = optimizer, take_back
        self.chunks = [OptimizerState(chunk) for chunk in state.chunks if chunk.chunk.is_updated]
        self._by_index = {chunk.state.index: chunk for chunk in self.chunks}
        stepper = Stepper(optimizer, state.device, coupled)
        together = all(steps_together(chunk.state.placement) for chunk in self.chunks)
        by_torch = all(stepper.one_pass(chunk.state) is None for chunk in self.chunks)
        self.users = UsersOptimizer(optimizer, self.chunks, state.parameters, is_open=together and by_torch)
        context = self._context = Context(
            state.device, state.ranks, lanes, gradients, residency, mirrors, self.chunks, self.users, stepper
        )
        self.pace = context.pace
        self._states = OptimizerStates(context)
        self.names = self._states.names
        self._states.make(carried)
        resident = Resident(context)
        others: dict[str, SpeculatingRoute] = {"streamed": Streamed(context), "host": OnHost(context)}
        self._routes: dict[str, Route] = {"resident": resident, **others}
        self._schedule = Schedule(context, resident, others, Speculation(context, others, slabs))
        self.users.show()
        for chunk in self.chunks:
            self._routes[chunk.state.placement.route].furnish(chunk)

    # ------------------------------------------------------------------ a step

    def ready(self) -> None:
        """Before a step: takes over what user code has done to the optimizer since the last, or raises where it cannot."""
        self.users.refuse_changed()
        given = self.users.replaced()
        if given is not None:
            self._context.residency.settle_all()
            self._states.replace(given)
        self.users.show_hidden()

    def begin(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        """Gives the GPU the updates of resident chunks before the host knows the norm, which the GPU will: it goes on with them
        while the host waits, and then starts the others. `apply` or `leave_out` has to follow. Times `scale` the gradients have
        this norm."""
        self.check()
        self._schedule.begin(norm, clip_norm, scale)

    def leave_out(self) -> None:
        """Nothing is to change in this step."""
        self._schedule.leave_out()

    def apply(self, factor: float | None) -> None:
        """One optimizer step with the gradients at hand (times `factor`) on every parameter that has one."""
        self.check()
        self._take_back()
        self._context.residency.heed_all()
        self._context.residency.refuse_kept()
        self._context.mirrors.collect()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers, which would warn
        self._schedule.apply(factor)

    def forget(self) -> None:
        """The step is over, however it ended: what was speculated in it is not to be used by another."""
        self._schedule.forget()

    def check(self) -> None:
        """Raises where the state is not that of whole steps."""
        self._context.integrity.check()

    # ------------------------------------------------------------------ read beside the steps

    def turn_of(self, chunk: int) -> tuple[int, int]:
        """In which order chunks are changed: those on the device first; those of two generations a step later, the last first.
        So are those finished that have moments pending."""
        return self._schedule.turn_of(self._by_index.get(chunk), chunk)

    def let_read(self, wait_for: Callable[[int], None]) -> None:
        """Somebody reads the state as it is now. From here on `wait_for` is asked before any of a chunk's is overwritten."""
        self._context.readers.begin(wait_for, self.chunks)

    # ------------------------------------------------------------------ state, by parameter name

    def state_dict(self) -> Entries:
        """The optimizer's state of every parameter that has any, as far as it is this rank's."""
        self.settle()
        return self._states.read()

    def settle(self) -> None:
        """All that is known of parameters is in chunks."""
        self.check()
        self._context.mirrors.collect()
        self._states.settle()

    def forget_all(self) -> None:
        """Nothing is known of any parameter, as before the first step: to be set anew, by `home` and `load_scalars`."""
        self._states.forget_all()

    def home(self, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[OptimizerState, Tensor] | None:
        """Where an array of that shape belongs that the optimizer keeps for a parameter; None where it is other ranks' alone."""
        return self._states.home(name, key, shape, dtype)

    def load_scalars(self, name: str, entries: Mapping[str, Any]) -> None:
        """What is kept for a parameter that is no array."""
        self._states.load_scalars(name, entries)

    @property
    def device_bytes(self) -> int:
        """Held between steps: the optimizer's state and the scratch buffers."""
        return self._states.device_bytes + sum(route.device_bytes for route in self._routes.values())
