"""The sliced loss beside the plain one: the same loss and gradients, whatever the slices, in a fraction of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anyfit
from anyfit.losses import SLICE_BYTES, default_slice_rows, sliced_cross_entropy
from anyfit.placing.tiers import LiveBytes
from anyfit.tracing import trace
from tests.models import byte_batches
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, random_delays, started

PLACEMENTS = {"resident": RESIDENT, "streamed": STREAMED, "on host": ON_HOST, "away": AWAY, "away, streamed": AWAY_STREAMED}
# Shares of what is added up. Of fp32 the order of sums is left; of bf16, a rounding of each slice's part of the weight's
# gradient, and those of what is multiplied by the incoming gradient after and not before them, each up to 2**-9.
# The worst of 40,000 examples were 2.6e-6 and 1.8e-2.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=ignore_index, reduction=reduction)


def made(
    shape: Sequence[int], width: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).requires_grad_()

    return (
        drawn(*shape, width),
        drawn(vocabulary, width),
        drawn(vocabulary),
        torch.randint(vocabulary, shape, generator=generator),
    )


def apart(one: Tensor, other: Tensor) -> float:
    difference = (one.double() - other.double()).norm()
    return float(difference / other.double().norm().clamp_min(1e-30))


@given(data=st.data())
def test_loss_and_gradients_are_those_of_whole_logits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    vocabulary, width = data.draw(st.integers(2, 40)), data.draw(st.integers(1, 24))
    hidden, weight, bias, targets = made(shape, width, vocabulary, dtype, data.draw(st.integers(0, 99)))
    ignored = data.draw(st.sampled_from([-100, 0, vocabulary - 1]))
    if ignored == -100:
        targets[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3] = ignored
    hypothesis.assume((targets != ignored).any())
    options: dict[str, Any] = {
        "bias": data.draw(st.sampled_from([None, bias])),
        "softcap": data.draw(st.sampled_from([None, 3.0])),
        "reduction": data.draw(st.sampled_from(["mean", "sum"])),
        "ignore_index": ignored,
    }
    learnt = [each for each in (hidden, weight, options["bias"]) if each is not None]
    times = data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))  # what comes in
    expected = plain(hidden, weight, targets, **options)
    loss = sliced_cross_entropy(hidden, weight, targets, slice_rows=data.draw(st.sampled_from([None, 1, 2, 5, 64])), **options)
    assert loss.dtype == torch.float32
    tokens = targets.numel() if options["reduction"] == "sum" else 1
    assert abs(loss.item() - expected.item()) < TOLERANCE[torch.float32] * (expected.item() + 0.1 * tokens)
    ours, theirs = (torch.autograd.grad(each * times, learnt) for each in (loss, expected))
    sizes = sizes_of_gradients(hidden, weight, targets, **options)
    off = [
        float((a.double() - b.double()).abs().div(times * size).max()) for a, b, size in zip(ours, theirs, sizes, strict=False)
    ]
    assert max(off) < TOLERANCE[dtype]
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]


def sizes_of_gradients(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, **options: Any) -> list[Tensor]:
    """What each element of the gradients would be, were all that is added up for it of one sign: rounding is a share of that."""
    logits = F.linear(hidden, weight, bias).detach().requires_grad_()
    nothing = torch.eye(weight.shape[0], dtype=weight.dtype)
    (gradient,) = torch.autograd.grad(plain(logits, nothing, targets, **options), logits)
    share = 1 if options["reduction"] == "sum" else 1 / float((targets != options["ignore_index"]).sum())
    size = gradient.double().abs() + 0.1 * share  # of softmax less one, which may be next to nothing
    rows, columns = (each.detach().double().abs().flatten(0, -2) for each in (hidden, weight))
    return [size @ columns, size.flatten(0, -2).t() @ rows, size.flatten(0, -2).sum(0)]


@pytest.mark.parametrize("slice_rows", [None, 5])
def test_bf16_gradients_are_as_near_the_true_ones_as_those_of_whole_logits(slice_rows: int | None) -> None:
    hidden, weight, bias, targets = made((64, 16), 32, 300, torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    true = torch.autograd.grad(F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten()) / 3, exact)
    ours = torch.autograd.grad(
        sliced_cross_entropy(hidden, weight, targets, bias=bias, slice_rows=slice_rows) / 3, [hidden, weight, bias]
    )
    theirs = torch.autograd.grad(plain(hidden, weight, targets, bias=bias) / 3, [hidden, weight, bias])
    for mine, whole, truth in zip(ours, theirs, true, strict=True):
        assert apart(mine, truth) < 1.5 * apart(whole, truth)


def test_one_slice_in_bf16_is_equal_to_the_bit() -> None:
    hidden, weight, _, targets = made((4, 16), 32, 300, torch.bfloat16)
    ours = torch.autograd.grad(sliced_cross_entropy(hidden, weight, targets), [hidden, weight])
    theirs = torch.autograd.grad(plain(hidden, weight, targets), [hidden, weight])
    assert all(map(torch.equal, ours, theirs))


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, bias, targets = made((6,), 4, 9)
    for wanted in ([hidden], [weight], [bias], [hidden, bias]):
        for each in (hidden, weight, bias):
            each.requires_grad_(any(each is one for one in wanted))
        loss = sliced_cross_entropy(hidden, weight, targets, bias=bias, slice_rows=4)
        assert sum(each is not None for each in loss.grad_fn.saved_tensors) == len(wanted)
        ours = torch.autograd.grad(loss, wanted)
        theirs = torch.autograd.grad(plain(hidden, weight, targets, bias=bias), wanted)
        assert max(map(apart, ours, theirs)) < TOLERANCE[torch.float32]


def test_without_grad_mode_no_gradient_is_made() -> None:
    hidden, weight, _, targets = made((512,), 8, 4000)
    with torch.no_grad(), LiveBytes() as live:
        loss = sliced_cross_entropy(hidden, weight, targets, slice_rows=8)
    assert not loss.requires_grad
    assert live.peak_bytes < 3 * 8 * 4000 * 4  # a slice and its log-softmax
    assert live.peak_bytes < weight.nbytes * 3


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_no_token_counts_loss_and_gradients_are_torchs(rows: int, reduction: Any) -> None:
    hidden, weight, _, targets = made((rows,), 4, 9)
    targets[:] = -100
    loss = sliced_cross_entropy(hidden, weight, targets, slice_rows=2, reduction=reduction)
    expected = plain(hidden, weight, targets, reduction=reduction)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert loss.isnan() == (reduction == "mean")
    for gradient in torch.autograd.grad(loss, [hidden, weight]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_backward_may_be_asked_twice_and_recomputed() -> None:
    hidden, weight, _, targets = made((6,), 4, 9)
    expected = torch.autograd.grad(plain(hidden, weight, targets) / 3, [hidden, weight])
    loss = sliced_cross_entropy(hidden, weight, targets, slice_rows=4) / 3
    again = checkpoint(
        lambda hidden: sliced_cross_entropy(hidden, weight, targets, slice_rows=4) / 3, hidden, use_reentrant=False
    )
    for ours in (
        torch.autograd.grad(loss, [hidden, weight], retain_graph=True),
        torch.autograd.grad(loss, [hidden, weight]),
        torch.autograd.grad(again, [hidden, weight]),
    ):
        assert max(map(apart, ours, expected)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slice_rows": 0}, "at least 1, got 0"),
        ({"reduction": "none"}, "'mean' and 'sum' are"),
        ({"targets": torch.zeros(5, dtype=torch.long)}, r"\(5,\) do not belong to hidden states of \(6, 4\)"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    hidden, weight, _, targets = made((6,), 4, 9)
    with pytest.raises(ValueError, match=says):
        sliced_cross_entropy(hidden, weight, **{"targets": targets, **options})


def test_a_target_outside_the_vocabulary_is_refused_as_torch_does() -> None:
    hidden, weight, _, _ = made((6,), 4, 9)
    with pytest.raises(IndexError, match="out of bounds"):
        sliced_cross_entropy(hidden, weight, torch.full((6,), 9))


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("vocabulary", [2, 256, 50257, 262144, 2**27])
def test_a_default_slice_is_as_large_as_it_may_be_and_no_larger(vocabulary: int) -> None:
    rows = default_slice_rows(2**40, vocabulary, 4096)
    assert rows == 1 or 4 * rows * vocabulary <= SLICE_BYTES
    assert 4 * 2 * rows * vocabulary > SLICE_BYTES
    assert rows % 128 == 0 or rows < 128
    assert default_slice_rows(rows, vocabulary, 0) == rows


def test_slices_that_would_save_nothing_are_not_made() -> None:
    assert default_slice_rows(2048, 128256, 4096) == 2048  # their sum in fp32 would take 2 GiB
    assert default_slice_rows(2048, 128256, 0) == 512  # nothing is summed
    assert default_slice_rows(8192, 128256, 4096) == 512


def test_a_large_vocabulary_takes_a_slices_memory_and_not_the_logits() -> None:
    rows, width, vocabulary, slice_rows = 1024, 8, 8000, 64
    hidden, weight, _, targets = made((rows,), width, vocabulary, torch.bfloat16)
    logits = 2 * rows * vocabulary

    def peak(loss: Any) -> int:
        with LiveBytes() as live:
            loss().backward()
        return live.peak_bytes

    whole = peak(lambda: plain(hidden, weight, targets))
    ours = peak(lambda: sliced_cross_entropy(hidden, weight, targets, slice_rows=slice_rows))
    assert whole > 5 * logits
    slices = 8 * slice_rows * vocabulary  # logits in fp32, and their log-softmax
    kept = hidden.nbytes + 2 * weight.nbytes  # gradients: the weight's in fp32
    assert ours < 1.5 * (slices + 2 * kept)
    assert ours < whole / 10


# ---------------------------------------------------------------------- in a run


class Headless(nn.Module):
    """Hidden states out; the head, tied to the embedding, is for the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embed(ids))


def sliced_loss(model: Any, ids: Tensor) -> Tensor:
    return sliced_cross_entropy(model(ids[:, :-1]), model.head.weight, ids[:, 1:], bias=model.head.bias, slice_rows=7)


def whole_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model(ids[:, :-1])).flatten(0, 1).float(), ids[:, 1:].flatten())


def job_for(precision: Any, loss: Any) -> anyfit.Job:
    return anyfit.Job(
        model=Headless,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=byte_batches(1, 4)[0],
        batch_size=4,
        clip_norm=1.0,
        precision=precision,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tied_head_may_be_anywhere(placement: str, precision: Any) -> None:
    batches, job = byte_batches(10, 4), job_for(precision, sliced_loss)
    losses, weights = train_plainly(job, batches, accumulation=2)
    plan = hand_written(job, PLACEMENTS[placement], chunk_bytes=1024, slots=2, accumulation=2)
    with started(job, plan, random_delays(3)) as run:
        assert [float(run.step(batch)) for batch in batches] == pytest.approx(losses, rel=1e-6)  # sums of two
        assert_bit_equal(run.state_dict(), weights)


def test_training_with_slices_follows_training_without() -> None:
    batches = byte_batches(10, 4)
    sliced, _ = train_plainly(job_for("fp32", sliced_loss), batches)
    whole, _ = train_plainly(job_for("fp32", whole_loss), batches)
    assert sliced == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_trace_sees_every_slice(device: Any) -> None:
    graph = trace(job_for("bf16", sliced_loss), 4, device)
    softmaxes = [op for op in graph.ops if "log_softmax" in op.name]
    assert len(softmaxes) == -(-4 * 16 // 7)
    assert {op.phase for op in softmaxes} == {"forward"}
