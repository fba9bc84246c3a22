"""Still: random ops give what is expected of them instead of chance, so that two forwards can be compared.

Dropout keeps everything; what is drawn is the middle of its distribution, the same for every sample. A random permutation is a
reversal: it is to show that samples are mixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DRAWN = 0.25  # in the place of normal numbers: not 0, which would hide what is added or multiplied


class Still(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        given = {each.name: each.default_value for each in arguments if each.has_default_value()}  # torch leaves these out
        given |= dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
        name = func._overloadpacket.__name__.rstrip("_")
        if name in ("native_dropout", "_fused_dropout"):
            kept: Any = given.get("input", given.get("self"))
            return kept.clone(), torch.ones_like(kept, dtype=torch.bool if name == "native_dropout" else torch.uint8)
        if given.get("dropout_p"):  # fused attention
            args = tuple(0.0 if each.name == "dropout_p" else arg for each, arg in zip(arguments, args, strict=False))
            return func(*args, **{key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()})
        made = func(*args, **kwargs)  # for its shape and dtype
        if isinstance(made, Tensor):
            self._settle(made, name, given)
        return made

    @staticmethod
    def _settle(made: Tensor, name: str, given: dict[str, Any]) -> None:
        if name == "randperm":
            made.copy_(torch.arange(made.numel() - 1, -1, -1, device=made.device))
        elif name == "bernoulli":
            chance = given.get("p", given.get("self"))
            made.copy_(torch.as_tensor(chance).expand(made.shape))
        elif name in ("rand", "rand_like"):
            made.fill_(0.5)
        elif name == "uniform":
            made.fill_((given.get("from", 0.0) + given.get("to", 1.0)) / 2)
        elif name in ("randint", "randint_like", "random"):
            low, high = given.get("low", given.get("from", 0)) or 0, given.get("high", given.get("to"))
            made.fill_((low + high) // 2 if high is not None else 1)
        elif name == "normal":
            mean, deviation = given.get("mean", 0.0), given.get("std", 1.0)
            made.copy_(torch.as_tensor(mean + DRAWN * deviation).expand(made.shape))
        elif name == "multinomial":
            made.copy_(torch.arange(made.shape[-1], device=made.device).expand(made.shape))
        elif made.dtype.is_floating_point:
            made.fill_(DRAWN if name.startswith("randn") else 1.0)
