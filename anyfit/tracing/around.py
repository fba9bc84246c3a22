"""What stands around the user's code in a trace: all that it changes is put back, and its errors say what was being done."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from anyfit.values.demands import sparse_layers
from anyfit.values.job import Job
from anyfit.values.memento import Memento, leaving_no_trace

from .errors import explained, refuse_elsewhere


@contextmanager
def leaving_no_mark(job: Job) -> Iterator[Memento]:
    """Around any trace: all that the job's code changes is put back, and an error is said in the user's terms."""
    refuse_elsewhere(job.sample if job.max_sample is None else job.max_sample)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own before it raises
    disabled, logger.disabled = logger.disabled, True
    collects = gc.isenabled()
    gc.disable()  # a collection in the middle would let storages die by chance, and takes longer the larger the model is
    try:
        with leaving_no_trace(job) as memento, _eager():
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
        compile_, told = torch.compile, False

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                inside.enter_context(torch.compiler.set_stance("force_eager"))

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
