"""Files of a checkpoint: whatever the file system takes, each byte is where it belongs, or the error is heard of."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels.bytes import crc32
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing.stretches import Fetcher, Stretch
from anyfit.running import files
from anyfit.running.boxes import strips_of, whole
from anyfit.running.files import BlockFile, Content, Entry, FileRecord, Image, Whole, padded
from anyfit.running.saved import Part
from anyfit.values.tensor_files import header_bytes
from tests.conftest import FULL

BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", BLOCK)


def content_of(tensors: Sequence[Tensor]) -> tuple[Content, bytes]:
    """Some tensors as a file, and its bytes put together in the simplest way."""
    parts, entries, end = [], [], 0
    for index, tensor in enumerate(sorted(tensors, key=lambda each: -each.itemsize)):
        entries.append(Entry(f"t{index}", tensor.dtype, whole(tensor.shape), True, end))
        parts.append((entries[-1], Whole(tensor)))
        end += tensor.nbytes
    data = [part.tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for _, part in parts]
    return Content(parts), header_bytes(files.header_of(entries)) + b"".join(data)


def random_tensor(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def with_bytes(size: int) -> tuple[Content, bytes]:
    """A file of just so many."""
    header = len(content_of([random_tensor(size, torch.uint8)])[1]) - size
    return content_of([random_tensor(size - header, torch.uint8)])


def write(path: Path, content: Content, threads: int = files.THREADS, image: Image | None = None) -> FileRecord:
    with closing(BlockFile(path, content, lambda _count: None, image)) as file:
        return file.write(threads)


def is_right(path: Path, record: FileRecord, expected: bytes) -> bool:
    starts = range(0, len(expected), files.BLOCK_BYTES)
    sums = tuple(crc32(expected[start : start + files.BLOCK_BYTES]) for start in starts)
    return path.read_bytes() == expected and record == FileRecord(len(expected), sums)


@pytest.mark.parametrize("block_bytes", [BLOCK, 4096, 1000])  # the last can be written through the page cache alone
@pytest.mark.parametrize("size", [2 * BLOCK + off for off in (-4097, -4096, -4095, -8, -1, 0, 1, 8, 4095, 4096, 4097)])
def test_a_file_may_end_anywhere(size: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    content, expected = with_bytes(size)
    assert len(expected) == size
    assert is_right(tmp_path / "file", write(tmp_path / "file", content), expected)


dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8])
sizes = st.lists(st.tuples(st.integers(0, 3000), dtypes, st.booleans()), min_size=1, max_size=12)


@settings(max_examples=400 if FULL else 40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_sizes=sizes, threads=st.integers(1, 5))
def test_what_lies_in_an_image_is_written_from_there_and_the_rest_from_where_it_is(
    given_sizes: list[tuple[int, torch.dtype, bool]], threads: int, tmp_path: Path
) -> None:
    content, expected = content_of([random_tensor(elements, dtype) for elements, dtype, _ in given_sizes])
    memory = in_huge_pages(padded(content.bytes))
    chosen = [content.header]
    for piece, (_, _, is_copied) in zip(content.pieces[1:], given_sizes, strict=False):
        if is_copied:
            chosen.append(piece)
    for piece in chosen:
        piece.read(piece.start, piece.end, memory[piece.start : piece.end], Fetcher())
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    assert is_right(path, write(path, content, threads=threads, image=Image(memory, chosen)), expected)
    path.unlink()
    assert is_right(path, write(path, content, threads=threads), expected)


def test_a_block_that_an_image_holds_is_not_copied_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = content_of([random_tensor(3 * BLOCK // 4), random_tensor(BLOCK, torch.uint8)])
    header, trained, frozen = content.pieces
    memory = in_huge_pages(padded(content.bytes))
    for piece in (header, trained):
        piece.read(piece.start, piece.end, memory[piece.start : piece.end], Fetcher())
    from_image: dict[int, bool] = {}
    add_up_and_write = BlockFile._add_up_and_write

    def note(file: BlockFile, block: Tensor, count: int, at: int) -> None:
        from_image[at] = block.data_ptr() == memory.data_ptr() + at
        add_up_and_write(file, block, count, at)

    monkeypatch.setattr(BlockFile, "_add_up_and_write", note)
    record = write(tmp_path / "file", content, image=Image(memory, [trained, header]))
    assert is_right(tmp_path / "file", record, expected)
    assert from_image == {at: at + BLOCK <= trained.end for at in range(0, content.bytes, BLOCK)}
    assert not memory[frozen.start : frozen.end].any()  # and so takes no memory


def test_halves_that_cross_blocks_are_put_together(tmp_path: Path) -> None:
    exact = torch.randn(5 * BLOCK // 4 + 3)
    bits = exact.view(torch.int32)
    low = bits.to(torch.int16)
    high = (bits - low >> 16).to(torch.int16).view(torch.bfloat16)
    entry = Entry("t", torch.float32, whole(exact.shape), True, 0)
    (strip,) = strips_of(tuple(exact.shape), 0, exact.numel())
    content = Content([(entry, Part(Stretch("t", tuple(exact.shape), 0, high, low), strip))])
    write(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes().endswith(exact.numpy().tobytes())


# ---------------------------------------------------------------------- past the page cache, or through it


def test_writes_go_past_the_page_cache_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open(tmp_path / "try", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("this file system has no O_DIRECT")
    content, expected = with_bytes(3 * BLOCK + 100)
    written, pwrite = [], os.pwrite

    def note(file: int, data: memoryview, at: int) -> int:
        written.append((at, len(data)))
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", note)
    assert is_right(tmp_path / "file", write(tmp_path / "file", content), expected)
    assert sorted(written) == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, BLOCK), (3 * BLOCK, 4096)]


def test_a_file_system_that_refuses_to_open_files_so_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, expected = with_bytes(3 * BLOCK + 100)
    open_ = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return open_(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert is_right(tmp_path / "file", write(tmp_path / "file", content), expected)


@pytest.mark.parametrize("after", [0, 2])
def test_one_that_refuses_to_write_them_so_as_well(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = with_bytes(5 * BLOCK + 100)
    open_, pwrite, direct, done = os.open, os.pwrite, set(), []

    def note(path: Any, flags: int, *rest: Any) -> int:
        file = open_(path, flags & ~os.O_DIRECT, *rest)
        if flags & os.O_DIRECT:
            direct.add(file)
        return file

    def refuse(file: int, data: memoryview, at: int) -> int:
        if file in direct:
            if len(done) >= after:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            done.append(at)
        return pwrite(file, data[:5000] if file in direct else data, at)  # and writes some of it, at times

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(os, "pwrite", refuse)
    assert is_right(tmp_path / "file", write(tmp_path / "file", content), expected)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_a_file_system_in_memory_is_written_whether_it_has_a_page_cache_to_pass_or_not() -> None:
    path = Path("/dev/shm") / f"anyfit-test-{os.getpid()}"
    content, expected = with_bytes(3 * BLOCK + 100)
    try:
        assert is_right(path, write(path, content), expected)
    finally:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- errors


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_error_in_the_middle_ends_all_threads(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, _ = with_bytes(400 * BLOCK)
    pwrite, written = os.pwrite, []

    def fill_up(file: int, data: memoryview, at: int) -> int:
        if len(written) >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), len(written))
        written.append(at)
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", fill_up)
    before = threading.active_count(), open_files()
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", content, threads=threads)
    assert len(written) <= 10 + threads
    assert (threading.active_count(), open_files()) == before


def test_what_cannot_be_read_is_an_error_and_not_a_hole(tmp_path: Path) -> None:
    class Broken:
        def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
            raise RuntimeError(f"elements {start} to {end} are gone")

    entry = Entry("t", torch.float32, whole((BLOCK,)), True, 0)
    with pytest.raises(RuntimeError, match="are gone"):
        write(tmp_path / "file", Content([(entry, Broken())]))
