"""What stands around the user's code in a trace: all that it changes is put back, and its errors say what to change.

Torch's own errors name its ops and files; `explained` says where in the user's model they came from and what to write instead.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

from anyfit.values.demands import sparse_layers
from anyfit.values.job import Batch, Job
from anyfit.values.memento import Memento, leaving_no_trace
from anyfit.values.nests import named_tensors

OURS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent.parent}/")
STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"
OVERFLOWS = ("calculation overflowed", "multiplication overflow", "Overflow when unpacking long", "too large to convert to C")
NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)>")
NO_KERNEL = re.compile(r"Could not run '([\w:.]+)' with arguments from the 'Meta' backend")
NO_META = re.compile(r"(?:^|\s)([\w:.]+): attempted to run this operator with Meta tensors")
NO_CPU_KERNEL = re.compile(r"Could not run '([\w:.]+)' with arguments from the 'CPU' backend")
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices"  # since torch 2.13
OR_FOR_REAL = "or let it be run for real on the CPU, with Job(real_run=True) or --real-run"


@contextmanager
def leaving_no_mark(job: Job) -> Iterator[Memento]:
    """Around any trace: all that the job's code changes is put back, and an error is said in the user's terms."""
    refuse_elsewhere(job.sample if job.max_sample is None else job.max_sample)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own before it raises
    disabled, logger.disabled = logger.disabled, True
    collects = gc.isenabled()
    gc.disable()  # a collection in the middle would let storages die by chance, and takes longer the larger the model is
    try:
        with leaving_no_trace(job) as memento, _eager(), _needless_conversions():
            yield memento
    except Exception as error:
        in_the_users_terms = explained(error)
        if in_the_users_terms is None:
            raise
        raise in_the_users_terms from error
    finally:
        logger.disabled = disabled
        if collects:
            gc.enable()


@contextmanager
def _eager() -> Iterator[None]:
    """Inside, what is compiled runs op by op: a compiler would learn from tensors that no run has."""
    with ExitStack() as inside:
        compile_ = torch.compile
        tell = functools.cache(lambda: inside.enter_context(torch.compiler.set_stance("force_eager")))  # once

        def compile_and_tell(*args: Any, **kwargs: Any) -> Any:
            made = compile_(*args, **kwargs)
            tell()
            return made

        if "torch._dynamo" in sys.modules:
            tell()
        torch.compile = compile_and_tell
        inside.callback(setattr, torch, "compile", compile_)
        yield


@contextmanager
def _needless_conversions() -> Iterator[None]:
    """Inside, `module.to(dtype)` in a forward does nothing where nothing changes. torch would put new fake parameters in the
    place of the old ones, which autograd holds by then, and fails."""
    convert: Callable[..., nn.Module] = nn.Module._apply

    def convert_if_needed(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            held = itertools.chain(module.parameters(recurse), module.buffers(recurse))
            if all(fn(each) is each for each in held):
                return module
        return convert(module, fn, recurse)

    nn.Module._apply = convert_if_needed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


@contextmanager
def dense(model: nn.Module) -> Iterator[None]:
    """Gradients that a run has sparse are dense in a trace: fake tensors have no others, and their bytes are at least as many."""
    modules = list(sparse_layers(model).values())
    for module in modules:
        module.sparse = False
    try:
        yield
    finally:
        for module in modules:
            module.sparse = True


@contextmanager
def saying(doing: str) -> Iterator[None]:
    """Adds what anyfit was doing to the user's own error, which stays what it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"anyfit was {doing} to plan the run")
        raise


class TooDear(Exception):  # noqa: N818  (an answer, not a fault)
    """What a real run takes, where that is more than there is."""


class NeedsValues(ValueError):  # noqa: N818  (a real run would do)
    """What cannot be traced on tensors without values."""


def explained(error: Exception) -> ValueError | None:
    """The error in the user's terms; None where it is best as it is. The caller raises it from the original."""
    said = str(error)
    if isinstance(error, TooDear):
        return ValueError(f"a real run of this batch takes {said}; fewer samples or shorter ones take less: --batch, --seq")
    if "cannot be called on meta tensors" in said:
        return ValueError(
            f"{_place(error)} needs the value of a tensor while the model is built, and for planning it is built without values; "
            "give Job(model=) the model itself and not a function that makes it, or compute the number without tensors"
        )
    if isinstance(error, DataDependentOutputException) or ".numpy() is not supported for tensor subclasses" in said:
        return NeedsValues(
            f"{_place(error)} needs the value of a tensor, and a model is planned on tensors that have none; branch on shapes or "
            "on plain Python numbers, choose with torch.where, and keep .item(), .tolist() and .numpy() out of the forward; "
            f"{OR_FOR_REAL}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return NeedsValues(
            f"{_place(error)} makes a tensor whose size depends on values ({_short(str(error.func))}), and a model is planned on "
            "tensors that have none; keep the size fixed: mask with torch.where or masked_fill, or give sizes as plain numbers; "
            f"{OR_FOR_REAL}"
        )
    if said.startswith("_apply(): Couldn't swap"):
        return ValueError(
            f"{_place(error)} converts weights while the model runs, and a run keeps them as they were when it started; convert "
            "them where the model is made, or, if that is to float32, train with precision='fp32'"
        )
    op = _op_without_rule(error)
    if op is not None:
        return NeedsValues(
            f"{_place(error)} calls {op}, which does not say what it returns for tensors without values; register it: "
            f'torch.library.register_fake("{op}", lambda x: torch.empty_like(x)), with a function of the same arguments that '
            f"returns empty tensors of the right shapes; {OR_FOR_REAL}"
        )
    if said.startswith(TWO_DEVICES) or "FakeTensor" in said:
        return NeedsValues(
            f"{_place(error)} does not run on tensors without values ({' '.join(said.split()):.200}); {OR_FOR_REAL}"
        )
    missing = NO_CPU_KERNEL.search(said)
    if missing is not None:
        return ValueError(
            f"{_place(error)} calls {missing[1]}, which does not run on a CPU, and a real run is made there; register it: "
            f'torch.library.impl("{missing[1]}", "CPU", function), or leave real_run out'
        )
    if any(words in said for words in OVERFLOWS):
        sizes = re.search(r"sizes=(\[[\d, ]*\])", said)
        return ValueError(
            f"{_place(error)} makes a tensor{f' of sizes {sizes[1]}' if sizes else ''} with more bytes than 64 bits can count; "
            "are two of its sizes swapped or multiplied twice?"
        )
    return None


def refuse_elsewhere(sample: Batch) -> None:
    """Batches come from a loader, on the CPU, and a run moves each to its device: one elsewhere is no example of them."""
    for path, tensor in named_tensors(sample, "sample"):
        if tensor.device.type != "cpu":
            mended = f"torch.empty_like({path}, device='cpu')" if tensor.is_meta else f"{path}.cpu()"
            raise ValueError(
                f"Job(sample=): {path} is on {tensor.device}; give a batch as the loader will, on the CPU: {mended}. "
                "A run moves every batch to its device"
            )


def _op_without_rule(error: Exception) -> str | None:
    if isinstance(error, UnsupportedOperatorException):
        return _short(str(error.func))
    if isinstance(error, RuntimeError):  # NotImplementedError is one
        found = NO_FAKE.search(str(error)) or NO_KERNEL.search(str(error)) or NO_META.search(str(error))
        return None if found is None else found[1]
    return None


def _short(op: str) -> str:
    """aten.nonzero.default -> aten::nonzero, as torch.library writes it."""
    namespace, _, name = op.removesuffix(".default").partition(".")
    return f"{namespace}::{name}"


def _place(error: Exception) -> str:
    return place_of(traceback.extract_tb(error.__traceback__))


def place_of(stack: traceback.StackSummary, unknown: str = "the model") -> str:
    """The line of the model, or of the library it comes from, at which it left for torch: with what it says."""
    frames = [frame for frame in stack if _is_the_models(frame.filename)]
    if not frames:
        return unknown
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}" + (f": `{last.line}`" if last.line else "")


def _is_the_models(file: str) -> bool:
    in_standard_library = file.startswith(STANDARD_LIBRARY) and "-packages/" not in file
    return not (file.startswith(("<", *OURS)) or in_standard_library)
