"""Whether an optimizer treats each parameter by itself: then chunks may be stepped one by one, on device or host, alike.

Those of torch are known. Any other is stepped on small stand-ins for its parameters, once all together and once one by one: where
the two differ, or it keeps something beside the state of each parameter, its parameters are coupled. Hooks, and a step that was
put in the place of the class's own, see all parameters at once and couple them too.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .nests import is_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

BY_PARAMETER = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor", "Muon",
)  # fmt: skip
STEPS = 6  # of a trial: some optimizers do something else in every second or fifth
SIDE = 6  # of a stand-in, at most
STAND_INS = 3  # of a group, with different numbers of dimensions where it has them


def coupled(optimizer: Optimizer) -> str | None:
    """Why the parameters of this optimizer have to be stepped together; None where they need not be."""
    return coupled_from_outside(optimizer) or _coupled_by_itself(optimizer)


def coupled_from_outside(optimizer: Optimizer) -> str | None:
    """The part of it that can change at any time. Quick: it is asked in every step."""
    own: Any = optimizer
    base: Any = sys.modules["torch.optim.optimizer"]
    name = type(optimizer).__name__
    if own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks:
        return f"{name} has hooks around its step (register_step_pre_hook, register_step_post_hook)"
    if base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks:
        return "hooks are registered around the step of every optimizer (register_optimizer_step_pre_hook or _post_hook)"
    if "step" in vars(optimizer) and _is_replaced(own):
        return f"the step of {name} was replaced by other code"
    return None


def _is_replaced(optimizer: Any) -> bool:
    """Whether `optimizer.step` is something else than the class's own, which torch's schedulers wrap."""
    step = vars(optimizer)["step"]
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return getattr(step, "__func__", step) is not type(optimizer).step


def _coupled_by_itself(optimizer: Optimizer) -> str | None:
    import torch

    kind, name = type(optimizer), type(optimizer).__name__
    if kind.__module__.startswith("torch.optim.") and name in BY_PARAMETER:
        return None
    beside = {key: value for key, value in vars(optimizer).items() if key not in _own_attributes()}
    for key, value in beside.items():
        if not _is_plain(value):
            return f"{name} keeps {key!r} for all its parameters together"
    state = torch.get_rng_state()
    try:
        return _tried(optimizer, beside)
    except Exception as error:  # of the optimizer's own code
        return f"{name} cannot be tried on small parameters ({type(error).__name__}: {' '.join(str(error).split()):.120})"
    finally:
        torch.set_rng_state(state)


def _own_attributes() -> frozenset[str]:
    """What every torch optimizer has, and what schedulers add to it."""
    from torch import nn, ones
    from torch.optim import SGD

    return frozenset(vars(SGD([nn.Parameter(ones(1))]))) | {"step", "_opt_called", "_step_count"}


def _is_plain(value: Any) -> bool:
    """Whether a copy of it is as good: numbers, words, functions, and containers of such."""
    import torch

    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, tuple | list | set | frozenset):
        return all(_is_plain(each) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float | complex | str | bytes | None | type | FunctionType | torch.dtype | torch.device)


def _tried(optimizer: Optimizer, beside: Mapping[str, Any]) -> str | None:
    import torch

    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    first = [
        [_parameter(torch.randn(shape, generator=generator), each) for each, shape in _stand_ins(group["params"])]
        for group in optimizer.param_groups
    ]
    steps: list[list[list[Any]]] = [
        [[torch.randn(each.shape, generator=generator) for each in group] for group in first] for _ in range(STEPS)
    ]
    last = steps[STEPS // 2][-1]  # parameters may be without a gradient
    last[:] = [None for _ in last] if len(first) > 1 else [*last[:-1], None][: len(last)]
    together, apart = (_Trial(optimizer, beside, first) for _ in range(2))
    before = torch.get_rng_state()
    for gradients in steps:
        together.step([list(range(len(group))) for group in first], gradients)
        for group, members in enumerate(first):
            for index in range(len(members)):
                apart.step([[index] if other == group else [] for other in range(len(first))], gradients)
    if not torch.equal(before, torch.get_rng_state()):
        return f"{name} draws random numbers in its step"
    for key in beside.keys() | (vars(together.optimizer).keys() - vars(optimizer).keys() - _own_attributes()):
        if not _same(beside.get(key), vars(together.optimizer).get(key)):
            return f"{name} changes its {key!r} in a step, for all its parameters together"
    for before_step, after in zip(optimizer.param_groups, together.optimizer.param_groups, strict=True):
        for key in after.keys() - {"params"}:
            if key not in before_step or not _same(before_step[key], after[key]):
                return f"{name} changes its group's {key!r} in a step, for all parameters of the group"
    if not all(is_tensor(key) for key in together.optimizer.state):
        return f"{name} keeps state that is no parameter's"
    if any(vars(each).keys() != vars(mine).keys() for mine, each in zip(_flat(first), _flat(together.parameters), strict=True)):
        return f"{name} keeps what it knows on the parameters themselves"
    pairs = zip(_flat(together.parameters), _flat(apart.parameters), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        return f"{name} steps parameters otherwise together than one by one"
    return None


def _flat(groups: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group]


def _same(one: Any, other: Any) -> bool:
    if is_tensor(one) or is_tensor(other):
        return is_tensor(one) and is_tensor(other) and bool(one.cpu().equal(other.cpu()))
    return bool(one is other or one == other)


def _stand_ins(parameters: Sequence[Tensor]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """A few of a group's parameters, and a small shape like that of each."""
    found: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dim(), []).append(parameter)
    chosen = [members[0] for members in found.values()][:STAND_INS]
    chosen += [each for members in found.values() for each in members[1:2]][: STAND_INS + 1 - len(chosen)]
    return [(each, tuple(min(size, SIDE) for size in each.shape)) for each in chosen]


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    from torch import nn

    made = nn.Parameter(values)
    vars(made).update(vars(like))  # marks that user code has set
    return made


class _Trial:
    """The optimizer as it would be for other parameters: what it keeps besides them is copied."""

    def __init__(self, optimizer: Optimizer, beside: Mapping[str, Any], like: Sequence[Sequence[nn.Parameter]]) -> None:
        self.parameters = [[_parameter(each.detach().clone(), each) for each in group] for group in like]
        made: Any = object.__new__(type(optimizer))
        made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
        made.__dict__.update(copy.deepcopy(dict(beside)))
        made.state = defaultdict(dict)
        made.param_groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.optimizer = made

    def step(self, which: Sequence[Sequence[int]], gradients: Sequence[Sequence[Tensor | None]]) -> None:
        for group, members, chosen, given in zip(self.optimizer.param_groups, self.parameters, which, gradients, strict=True):
            group["params"] = [members[index] for index in chosen]
            for index in chosen:
                gradient = given[index]
                members[index].grad = None if gradient is None else gradient.clone()
        self.optimizer.step()


def _copied(value: Any) -> Any:
    return value.detach().clone() if is_tensor(value) else copy.deepcopy(value)
