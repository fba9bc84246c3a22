"""What compiling a job's blocks is worth: measured once, kept for later plans, and used by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import anyfit
from anyfit.measuring import measure_blocks
from anyfit.placing import compiled
from anyfit.planning import search
from anyfit.probing import cache
from anyfit.profiling import profile_of
from anyfit.values.compiled import BlockTime, PhaseTime, code_of
from tests.models import byte_batches, byte_job, tiny_gpt
from tests.oracle import train_plainly

pytestmark = [
    pytest.mark.skipif(compiled.no_compiler(torch.device("cpu")) is not None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own, when it compiles
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("fresh_compiler"),
]
ROWS = 4


def ten_times_as_fast(time: BlockTime) -> BlockTime:
    def phase(each: PhaseTime) -> PhaseTime:
        return PhaseTime(0.0, each.device_seconds / 10, each.alone_seconds / 10)

    return replace(time, forward=phase(time.forward), backward=phase(time.backward))


def test_blocks_are_measured_once_and_later_plans_compile_by_what_was_found() -> None:
    job, machine = byte_job(ROWS, micro_batch=ROWS), anyfit.probe()
    (found,) = measure_blocks(job, machine)  # both blocks of the model are alike
    assert found.why_not == ""
    assert found.eager is not None
    assert found.compiled is not None
    assert min(found.eager.seconds, found.compiled.seconds, found.compile_seconds) > 0
    assert 0 < found.compiled.saved_bytes < 2 * found.eager.saved_bytes
    known = profile_of(job, machine, (1, 1)).passes[0].blocks
    assert [block.figures for block in known if block.name] == [found] * 2
    others = profile_of(byte_job(ROWS, length=9, micro_batch=ROWS), machine, (1, 1)).passes[0].blocks
    assert {block.figures for block in others} == {None}  # of another length
    cache.keep_compiled(machine, [replace(found, compiled=ten_times_as_fast(found.eager))])
    profile = profile_of(job, machine, (1, 1))
    assert search(profile, 1).compiled == ()
    plan = search(profile, 10**7)
    assert plan.compiled == ("blocks.0", "blocks.1")
    assert profile_of(replace(job, compile=False), machine, (1, 1)).passes[0].blocks[0].figures is None
    batches = byte_batches(3, ROWS)
    with anyfit.start(job, plan) as run:
        losses = [float(run.step(batch)) for batch in batches]
        assert run.plan.compiled == plan.compiled
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-5)


def test_a_traced_block_has_code_too() -> None:
    traced = torch.jit.trace(torch.nn.Linear(4, 4), torch.randn(2, 4))  # type: ignore[no-untyped-call]
    assert code_of(traced) == code_of(traced) != code_of(torch.nn.Linear(4, 4))


def test_the_code_of_a_block_is_its_source_and_settings_but_not_its_number() -> None:
    model = tiny_gpt()
    first, second = model.blocks
    assert code_of(first) == code_of(second)
    first.layer_idx, second.layer_idx = 2, 3
    assert code_of(first) == code_of(second)
    first.scale, second.scale = 1.0, 2.0
    assert code_of(first) != code_of(second)
