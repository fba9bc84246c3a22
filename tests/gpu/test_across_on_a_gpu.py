"""What kernels bring to a GPU and back are the same bytes, also while its engines and the computation are busy."""

from __future__ import annotations

import pytest
import torch

from anyfit.kernels.across import Sender, read

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SHAPES = ((), (1,), (3,), (7, 5), (8, 1024), (2, 3, 5, 4), (0,), (4, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_sent_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    for source in (tensor, tensor.pin_memory()):
        found = Sender(CUDA)(source)
        assert found.device == CUDA
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), tensor)


def test_numbers_arrive_bit_by_bit() -> None:
    tensor = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 1e-42])
    assert torch.equal(Sender(CUDA)(tensor).cpu().view(torch.int32), tensor.view(torch.int32))
    assert torch.equal(read(tensor.cuda())().view(torch.int32), tensor.view(torch.int32))


def test_strides_are_kept_and_gaps_are_not_sent() -> None:
    images = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last)
    assert Sender(CUDA)(images).is_contiguous(memory_format=torch.channels_last)
    for source in (images, images.pin_memory(), torch.randn(6, 8)[:, ::2], torch.randn(6, 8).pin_memory()[1:5, 3:6]):
        assert torch.equal(Sender(CUDA)(source).cpu(), source)


def test_what_is_sent_is_kept_until_it_has_been_read() -> None:
    """Many batches are sent while the GPU is at something else: none comes to lie where another has not been read yet."""
    send = Sender(CUDA)
    batches = [torch.full((1 << 14,), index) for index in range(32)]
    send(batches[0])
    torch.cuda._sleep(200_000_000)
    found = [send(batch) for batch in batches]
    for sent, batch in zip(found, batches, strict=True):
        assert torch.equal(sent.cpu(), batch)


def test_nothing_waits_for_the_engine_that_copies() -> None:
    """A batch is there, and a number back, while gigabytes that were given before are still on their way."""
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=CUDA)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    batch, send = torch.arange(2**14), Sender(CUDA)
    read(send(batch).sum())()
    torch.cuda.synchronize()
    with torch.cuda.stream(up):
        for _ in range(8):
            device.copy_(host, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record()
    with torch.cuda.stream(down):
        for _ in range(8):
            host.copy_(device, non_blocking=True)
        received = torch.cuda.Event()
        received.record()
    assert int(read(send(batch).sum())()) == int(batch.sum())
    assert not sent.query()
    assert not received.query()
    torch.cuda.synchronize()
