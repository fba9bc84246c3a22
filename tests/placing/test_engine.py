"""The chunk engine beside plain PyTorch: any placement of any chunk gives the same losses and the same weights, to the bit."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anyfit
from anyfit.placing import activations
from anyfit.placing.compiled import backend_for, no_compiler
from anyfit.values.plan import Plan
from tests.conftest import FULL
from tests.models import (
    Branching,
    Convolutional,
    EncoderDecoder,
    Experts,
    Normalised,
    Tangled,
    byte_batches,
    image_batches,
    image_loss,
    next_byte_loss,
    tiny_gpt,
    tiny_llama,
)
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import chunk_count, hand_written, placed_of, random_delays, started
from tests.values.strategies import placements

ROWS, STEPS = 4, 30
CAN_COMPILE = no_compiler(torch.device("cpu")) is None
# By model, the blocks whose activations a plan may choose for.
MODELS: dict[str, tuple[Any, list[str]]] = {
    "gpt": (tiny_gpt, ["blocks.0", "blocks.1"]),
    "llama": (tiny_llama, ["llama.model.layers.0", "llama.model.layers.1"]),
    "encoder-decoder": (EncoderDecoder, ["both.encoder", "both.decoder"]),
    "convolutional": (Convolutional, ["layers.0", "layers.1"]),
    "experts": (Experts, [f"experts.{index}" for index in range(6)]),
    "branching": (Branching, ["left", "after"]),
    "tangled": (Tangled, ["twice"]),
    "normalised": (Normalised, ["blocks.0", "blocks.1"]),
}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3}], lr=1e-3)


OPTIMIZERS = {
    "adamw": two_groups,
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "some": lambda model: torch.optim.AdamW([each for each in model.parameters() if each.dim() > 1]),
}


def job_for(model: str, **options: Any) -> anyfit.Job:
    images = model == "convolutional"
    options = {"optimizer": two_groups, "precision": "fp32"} | options
    sample = image_batches(1, ROWS)[0] if images else byte_batches(1, ROWS)[0]
    loss = image_loss if images else next_byte_loss
    return anyfit.Job(model=MODELS[model][0], loss=loss, sample=sample, batch_size=ROWS, **options)


def batches_for(model: str, count: int = STEPS) -> list[Any]:
    return image_batches(count, ROWS) if model == "convolutional" else byte_batches(count, ROWS)


def trained(job: anyfit.Job, plan: Plan, model: str, delay: Any) -> tuple[list[float], dict[str, Tensor], set[int], int]:
    """Losses, weights, what was held on the device after each step, and what on the host."""
    if plan.compiled:  # which are to find no code of others
        torch._dynamo.reset()
        backend_for.cache_clear()
    before, activations.LEAST_BYTES = activations.LEAST_BYTES, 256
    try:
        with started(job, plan, delay) as run:
            placed, losses, held = placed_of(run), list[float](), set[int]()
            for batch in batches_for(model):
                losses.append(float(run.step(batch)))
                held.add(placed.device_bytes)
            return losses, run.state_dict(), held, placed.host_bytes
    finally:
        activations.LEAST_BYTES = before


# Nothing is shrunk: an example takes a second, and a failing one says all that was drawn.
@pytest.mark.timeout(1800)  # all of them beside other work
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore::UserWarning")  # of torch's own, when it compiles
@hypothesis.settings(max_examples=300 if FULL else 40, phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate])
@given(data=st.data())
def test_any_plan_gives_the_losses_and_weights_of_plain_pytorch(data: st.DataObject) -> None:
    draw = data.draw
    model = draw(st.sampled_from(sorted(MODELS)), "model")
    precision: Any = draw(st.sampled_from(["fp32", "bf16"]), "precision")
    accumulation = draw(st.sampled_from([1, 2, 4]), "accumulation")
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)), "optimizer")
    clip_norm = draw(st.sampled_from([None, 0.3, 1e6]), "clip_norm")
    if optimizer == "some" and precision == "bf16" and accumulation > 1:
        clip_norm = None  # bf16 gradients that nobody applies add up in bf16, which only the norm could show
    if model == "normalised" and accumulation > 1:
        accumulation = 1  # batch norm sees other batches then, in plain PyTorch too, but its oracle cuts in other dtypes
    job = job_for(
        model,
        precision=precision,
        optimizer=OPTIMIZERS[optimizer],
        clip_norm=clip_norm,
        scheduler=draw(st.sampled_from([None, lambda optimizer: CosineAnnealingLR(optimizer, STEPS)]), "scheduler"),
    )
    chunk_bytes = draw(st.sampled_from([1, 2048, 8192, 2**26]), "chunk_bytes")
    count = chunk_count(job, chunk_bytes)
    blocks = MODELS[model][1]
    is_compiled = CAN_COMPILE and draw(st.sampled_from([False] * 9 + [True]), "compiled")  # compiling takes seconds
    is_compiled = is_compiled and (FULL or model in ("gpt", "tangled"))
    choices: Any = st.sampled_from(["keep", "recompute", "offload", *([] if is_compiled else ["selective"])])
    chosen = {block: draw(choices, block) for block in blocks}
    replayed = [block for block, choice in chosen.items() if choice in ("keep", "recompute")]
    is_replayed = draw(st.sampled_from([False] * 4 + [True]), "replayed")
    plan = hand_written(
        job,
        *draw(st.one_of(st.tuples(placements()), st.tuples(*[placements()] * count)), "chunks"),
        chunk_bytes=chunk_bytes,
        # A recomputed block's weights, and those that one op reads, are there together.
        slots=draw(st.integers(max(8, count // 2), count + 8), "slots") if chunk_bytes < 2**20 else 8,
        prefetch=draw(st.integers(0, 4), "prefetch"),
        accumulation=accumulation,
        activations=chosen,
        replayed=tuple(replayed) if is_replayed else (),
        compiled=tuple(blocks) if is_compiled else (),
    )
    delay = random_delays(draw(st.integers(0, 99), "delays")) if draw(st.booleans(), "delayed") else None
    losses, weights, held, host_bytes = trained(job, plan, model, delay)
    plain_losses, plain_weights = train_plainly(job, batches_for(model), accumulation)
    if is_compiled or (is_replayed and model == "encoder-decoder"):
        # The same code has the same numbers wherever chunks and activations are; eager's differ by rounding. So do sums of
        # gradients of an encoder's output, where replayed blocks read it.
        assert losses[:5] == pytest.approx(plain_losses[:5], rel=1e-5 if precision == "fp32" else 1e-2)
        compiled, recorded = (tuple(blocks) if is_compiled else ()), (tuple(replayed) if is_replayed else ())
        resident = hand_written(job, accumulation=accumulation, compiled=compiled, replayed=recorded)
        plain_losses, plain_weights, _, _ = trained(job, resident, model, None)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)
    if optimizer in ("adamw", "amsgrad", "some"):
        assert len(held) == 1  # pools are taken at the start, and never grow
    assert host_bytes <= plan.limit_bytes["host"]
