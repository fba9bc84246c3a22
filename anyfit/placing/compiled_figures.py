"""What compiling the blocks of a placed model is worth: one block of each kind is compiled and timed, eager beside it, on the
inputs of a call. The placement stays as it is: what stands in for a block's forward, to recompute or replay it, runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from typing import Any

from torch import nn

from anyfit.values.compiled import BlockFigures, code_of, key_of
from anyfit.values.job import Job

from .compiled import CompiledBlock, CompiledBlocks, backend_for, no_compiler
from .place import Placed
from .recompute import own_forward, set_attribute


def figures_of(
    job: Job, placed: Placed, names: Sequence[str], micro_batch: int, versions: str, forward: Callable[[], None]
) -> dict[str, BlockFigures]:
    """By block. `forward` runs the model in training, once; `versions` are the compiler's."""
    modules = dict(placed.model.named_modules())
    keys = {name: key_of(job, code_of(modules[name]), micro_batch, versions) for name in names}
    # A later one of each kind: the input of the first may need no gradient, as only its own does.
    chosen = {key: [name for name in names if keys[name] == key][:2][-1] for key in keys.values()}
    with _tried(job, placed, modules, chosen.values()) as blocks:
        forward()
    found = {key: _figures(key, blocks[name], micro_batch) for key, name in chosen.items()}
    return {name: found[keys[name]] for name in names}


@contextmanager
def _tried(
    job: Job, placed: Placed, modules: Mapping[str, nn.Module], names: Iterable[str]
) -> Iterator[dict[str, CompiledBlock]]:
    """Inside, each of these is compiled and timed when it is first called."""
    residency, device = placed.residency, placed.device
    backend, none = backend_for("fast" if job.compile == "fast" else "eager"), no_compiler(device)
    of = CompiledBlocks(placed.model, (), residency, device, job)
    backend.measures, before = True, backend.measures
    with ExitStack() as undoing:
        undoing.callback(setattr, backend, "measures", before)
        for name in names:
            own = placed.activations.own_forwards.get(name) or own_forward(modules[name])
            made = CompiledBlock(of, name, modules[name], residency, device, job.precision, backend, own)
            of.blocks[name] = made
            if none or made.unfit:
                of.stay_eager({name: none or made.unfit or ""})
            undoing.callback(set_attribute(modules[name], "forward", _trying(made, modules[name].forward)))
        yield of.blocks


def _trying(block: CompiledBlock, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        block.try_once(args, kwargs)
        return forward(*args, **kwargs)

    return call


def _figures(key: str, block: CompiledBlock, micro_batch: int) -> BlockFigures:
    reason = block.reason
    eager, code, seconds = block.backend.times.get(block.key, (None, None, 0.0)) if reason is None else (None, None, 0.0)
    if reason is None and eager is None:
        reason = "no call in training was seen"
    today = date.today().isoformat()
    return BlockFigures(key, type(block.module).__name__, micro_batch, eager, code, seconds, reason or "", today)
