"""How long this device takes for the very calls that a traced model makes.

A curve says what an op of a kind costs by its size. It cannot say which kernel a library has for one shape, and how well that
fits. So each distinct call (values/call.py) is repeated on random data in tensors of the same dtype, shape and strides, and timed
by the device's own clock: the heaviest first, until what is left no longer matters or the budget is spent.

Data that an op must not be given can end the process: a wrong index is an assertion on a GPU, after which nothing runs. So
integers are made only for ops that INTEGERS knows valid values for, and ops that assert something about other data are NEVER
called. What cannot be repeated, or fails, is left out, and priced by the curves.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anyfit.values.call import Call, Other, TensorForm, TheDevice, TorchName

from .cuda import forget_workspaces
from .meters import BURST_SECONDS, Report, Timer, Work, timer_of

aten = torch.ops.aten
NEGLIGIBLE = 0.005  # of all weight: calls that weigh less together are not worth their measurement
BURSTS = 5
LONG_SECONDS = 0.01  # what takes longer varies little, and is looked at twice only
# They look at their data and end a GPU's process when they dislike it: probabilities, a mask with too few values, assertions.
NEVER = {
    *("multinomial", "binary_cross_entropy", "binary_cross_entropy_backward", "masked_scatter", "masked_scatter_"),
    *("_assert_async", "_functional_assert_async", "_assert_tensor_metadata"),
}
PROBABILITIES = {"bernoulli", "bernoulli_"}  # the same where these are a tensor


class NotReplayable(ValueError):  # noqa: N818  (an answer, not a fault)
    """A call that cannot be repeated, or had better not be."""


FAILURES = (RuntimeError, ValueError, TypeError, LookupError)  # NotReplayable, out of memory, what ops say of bad arguments
Given = Mapping[str, Any]  # the arguments of a call by their names in the op's schema
Make = Callable[[Any], Any]  # from a description, what it describes


def measure_calls(
    device: torch.device,
    weights: Mapping[str, float],
    known: Mapping[str, float],
    budget_seconds: float,
    report: Report | None = None,
) -> dict[str, float]:
    """Seconds of each call that is not known yet, as far as the budget reaches. `weights` are shares of the time by estimate."""
    found: dict[str, float] = {}
    began = time.perf_counter()
    left = total = sum(weights.values())
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng([device] if on_gpu else []), torch.no_grad():
            for text in sorted(weights, key=lambda each: -weights[each]):
                spent = time.perf_counter() - began
                if left <= NEGLIGIBLE * total or spent > budget_seconds:
                    break
                left -= weights[text]
                if text in known:
                    continue
                try:
                    work = prepare(text, device)
                    if report is not None:
                        report(Call.read(text).op, max(1 - left / total, spent / budget_seconds))
                    found[text] = float(f"{_timed(work, timer_of(device)):.4g}")
                except FAILURES:
                    continue
    finally:
        if on_gpu:  # whoever called needs the memory
            forget_workspaces()
            torch.cuda.empty_cache()
    return found


def _timed(work: Work, timer: Timer) -> float:
    work()  # loads kernels and touches memory
    once = timer(work, 1)
    if once > LONG_SECONDS:
        return min(once, timer(work, 1))
    times = max(1, int(BURST_SECONDS / max(once, 1e-7)))
    return statistics.median(timer(work, times) for _ in range(BURSTS))


def prepare(text: str, device: torch.device) -> Work:
    """The call, ready to be repeated; its inputs live as long as it does. NotReplayable where it cannot be."""
    call = Call.read(text)
    packet, _, overload = call.op.partition(".")
    if not hasattr(aten, packet) or overload not in getattr(aten, packet).overloads():
        raise NotReplayable(f"{call.op} is not one of aten's ops")
    op = getattr(getattr(aten, packet), overload)
    names = [argument.name for argument in op._schema.arguments]
    given: dict[str, Any] = dict(zip(names, call.arguments, strict=False)) | dict(call.options)
    if packet in NEVER or (packet in PROBABILITIES and isinstance(given.get("p"), TensorForm)):
        raise NotReplayable(f"{packet} asserts something about its data")

    make = functools.partial(_made, device=device)
    if "attention" in packet:
        return _attention(given, make, backward=packet.endswith("backward"))
    if packet in REPLAYS:
        return REPLAYS[packet](given, make)
    bounds = INTEGERS[packet](given) if packet in INTEGERS else {}
    made = {name: _made(item, device, bounds.get(name)) for name, item in given.items()}
    arguments = [made.pop(name) for name in names[: len(call.arguments)]]
    return lambda: op(*arguments, **made)


def _made(item: Any, device: torch.device, bound: int | Sequence[int] | None = None) -> Any:
    """What a description describes; integers below the bound, or each of a list of tensors below its own."""
    if isinstance(item, TensorForm):
        return _tensor(item, device, bound if isinstance(bound, int) else None)
    if isinstance(item, list):
        bounds = bound if isinstance(bound, Sequence) else [bound] * len(item)
        return [_made(each, device, its) for each, its in zip(item, bounds, strict=False)]
    if isinstance(item, TorchName):
        return getattr(torch, item.name)
    if isinstance(item, TheDevice):
        return device
    if isinstance(item, Other):
        raise NotReplayable(f"a {item.kind} cannot be repeated")
    return item


def _tensor(form: TensorForm, device: torch.device, bound: int | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, form.dtype)
    flat = torch.empty(form.extent, dtype=dtype, device=device)
    if dtype == torch.bool:
        flat.bernoulli_(0.5)
    elif dtype.is_floating_point or dtype.is_complex:
        flat.normal_()
    elif not form.shape:
        flat.fill_(1)
    elif bound is None or bound < 1:
        raise NotReplayable("no valid values are known for its integers")
    else:
        flat.random_(bound)
    return flat.as_strided(form.shape, form.stride)  # like the call's even where elements share their memory


# ---------------------------------------------------------------------- integers


DATA = {"self": 2, "src": 2, "source": 2, "values": 2, "other": 2, "tensors": 2, "value": 2}  # of no consequence: 0 or 1


def _classes(given: Given) -> dict[str, Any]:
    shape = given["self"].shape
    return {"target": shape[1 if len(shape) > 1 else 0]}


def _along_dim(given: Given) -> dict[str, Any]:
    return DATA | {"index": given["self"].shape[given["dim"]]}


def _by_dim(given: Given) -> dict[str, Any]:
    if any(isinstance(each, TensorForm) and each.dtype in ("bool", "uint8") for each in given["indices"]):
        raise NotReplayable("a mask chooses as many as it has values")
    return DATA | {"indices": given["self"].shape}


# By op, what its arguments with integers must lie below: one number, or one for each tensor of a list.
INTEGERS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "embedding": lambda given: {"indices": given["weight"].shape[0]},
    "embedding_dense_backward": lambda given: {"indices": given["num_weights"]},
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), _classes),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"), _by_dim),
    **dict.fromkeys(("index_select", "index_add", "index_add_", "index_copy", "index_copy_"), _along_dim),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"), _along_dim),
    **dict.fromkeys(("_to_copy", "clone", "copy_", "cat", "new_zeros", "new_ones", "zeros_like", "ones_like"), lambda _: DATA),
    **dict.fromkeys(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill"), lambda _: DATA),
    **dict.fromkeys(("sort", "cumsum", "sum", "any", "all"), lambda _: DATA),
}


# ---------------------------------------------------------------------- calls that training makes by another name


def _attention(given: Given, make: Make, *, backward: bool) -> Work:
    """Through the function that models call, because which kernel it takes depends on the device, the dtype and the shape."""
    query, key, value = (make(given[name]).requires_grad_() for name in ("query", "key", "value"))
    mask = next((given[name] for name in ("attn_bias", "attn_mask") if isinstance(given.get(name), TensorForm)), None)
    settings = {
        "attn_mask": None if mask is None or 0 in mask.shape else make(mask),
        "dropout_p": given.get("dropout_p", 0.0),
        "is_causal": given.get("is_causal", False),
        "scale": given.get("scale"),
        "enable_gqa": query.shape[-3] != key.shape[-3],
    }

    def forward() -> Tensor:
        with torch.enable_grad():  # what backward needs is written too
            return functional.scaled_dot_product_attention(query, key, value, **settings)

    if not backward:
        return forward
    output, gradient = forward(), make(given["grad_out"] if "grad_out" in given else given["grad_out_"])
    return lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)


def _batch_norm(given: Given, make: Make) -> Work:
    """The op that picks cuDNN's kernel where training would."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    arguments = [make(given[name]) for name in names]
    return lambda: aten._batch_norm_impl_index(*arguments, True)


def _batch_norm_backward(given: Given, make: Make) -> Work:
    inputs, gradient, scale = (make(given[name]) for name in ("input", "grad_out", "weight"))
    mean, variance = (make(given[name]) for name in ("running_mean", "running_var"))
    train, eps, wanted = given["train"], given["eps"], given["output_mask"]
    _, *saved, reserve, kernel = aten._batch_norm_impl_index(inputs, scale, scale, mean, variance, train, 0.1, eps, True)
    return lambda: aten._batch_norm_impl_index_backward(
        kernel, inputs, gradient, scale, mean, variance, *saved, train, eps, wanted, reserve
    )


def _grouped_product(given: Given, make: Make) -> Work:
    """Groups of equal size: offsets say where each ends, along the rows, the columns, or what is summed over."""
    left, right = make(given["self"]), make(given["mat2"])
    settings = [make(given.get(name)) for name in ("bias", "out_dtype")]
    offsets = given.get("offs")
    if offsets is None:
        return lambda: aten._grouped_mm(left, right, None, *settings)
    along = right.shape[1] if left.dim() == 3 else left.shape[0 if right.dim() == 3 else 1]
    (groups,) = offsets.shape
    ends = torch.tensor([along * (group + 1) // groups for group in range(groups)], dtype=torch.int32, device=left.device)
    return lambda: aten._grouped_mm(left, right, ends, *settings)


def _max_pool_backward(given: Given, make: Make) -> Work:
    """With the places of real maxima."""
    gradient, inputs = make(given["grad_output"]), make(given["self"])
    setting = [given[name] for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")]
    _, places = aten.max_pool2d_with_indices(inputs, *setting)
    return lambda: aten.max_pool2d_with_indices_backward(gradient, inputs, *setting, places)


REPLAYS: dict[str, Callable[[Given, Make], Work]] = {
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_grouped_mm": _grouped_product,
    "max_pool2d_with_indices_backward": _max_pool_backward,
}
