"""State on the disk: the file that it lies in, and runs that have it there."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing import disk
from anyfit.placing.disk import DiskError, DiskFile, Stored, room_for
from anyfit.placing.place import place
from anyfit.placing.tiers import HostSlabs
from anyfit.running.run import Run
from anyfit.values.disk_folder import DiskFolder
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Placement
from anyfit.values.units import show_bytes
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, AWAY_ON_DISK, ON_DISK, ON_HOST, hand_written, placed_of, random_delays, started

ROWS = 4
BLOCK = 2 * PAGE_BYTES


def opened(folder: Path, limit: int = 2**30, host: int | None = None) -> DiskFile:
    return DiskFile(folder, BLOCK, limit, HostSlabs(torch.device("cpu"), host))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    found = opened(tmp_path)
    yield found
    found.close()


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    flat = room_for(count, torch.float32)
    return flat.copy_(torch.randn(count, generator=torch.Generator().manual_seed(seed)))


def read(file: DiskFile, stored: Stored, count: int) -> torch.Tensor:
    flat = room_for(count, torch.float32)
    file.read([(stored, flat)], "numbers")
    return flat


def test_what_was_written_is_read_whatever_was_written_and_freed_since(file: DiskFile, tmp_path: Path) -> None:
    chance, there = random.Random(0), dict[int, tuple[Stored, torch.Tensor]]()
    for turn in range(120):
        at = chance.randrange(6)
        flats = [numbers(chance.randint(1, 9000), 1000 * turn + each) for each in range(2)]
        written = file.write(flats, "numbers")
        if at in there:
            file.free([there.pop(at)[0]])
        there[at] = written[0], flats[0]
        file.free(written[1:])
        for stored, flat in there.values():
            assert torch.equal(read(file, stored, len(flat)), flat)
            start = chance.randrange(len(flat))
            end = chance.randint(start, len(flat))
            some = file.some(stored, 4 * start, 4 * end, "numbers").view(torch.float32)
            assert torch.equal(some, flat[start:end])
    assert file.bytes <= 10 * 2 * padded(9000 * 4)  # blocks that became free were taken again
    assert list(tmp_path.iterdir()) == []  # the file has no name


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def test_a_call_that_moves_less_than_it_was_asked_to_is_asked_for_the_rest(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, calls = random.Random(0), []

    def short(call: Any) -> Any:
        def some(file: int, views: Any, at: int) -> int:
            asked = len(views[0])
            given = max(chance.randrange(asked + 1), PAGE_BYTES)
            calls.append(given < asked)
            whole = given // PAGE_BYTES * PAGE_BYTES  # what the system itself would do past the page cache
            return min(call(file, [views[0][:whole]], at), given)

        return some

    monkeypatch.setattr(disk, "_read_at", short(os.preadv))
    monkeypatch.setattr(disk, "_write_at", short(os.pwritev))
    flat = numbers(50_000)
    assert torch.equal(read(file, file.write([flat], "numbers")[0], 50_000), flat)
    assert any(calls)


@pytest.mark.parametrize("way", ["_read_at", "_write_at"])
def test_a_failed_call_names_what_where_and_why(
    way: str, file: DiskFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, other = file.write([numbers(9000, each) for each in range(2)], "numbers")
    file.free([other])
    free = len(file._free)

    def fail(*_args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, way, fail)
    done = "read from" if way == "_read_at" else "written to"
    use = (lambda: read(file, stored, 9000)) if way == "_read_at" else (lambda: file.write([numbers(9000)], "numbers"))
    with pytest.raises(DiskError, match=rf"numbers could not be {done} anyfit's file in {tmp_path}: .*Input/output error"):
        use()
    assert len(file._free) == free  # what it was to be written to is free again
    monkeypatch.setattr(disk, way, lambda *_args: 0)
    with pytest.raises(DiskError, match=rf"numbers could not be {done} .*: it ends after 0 of {BLOCK} bytes"):
        use()


def test_a_bit_that_has_changed_on_the_disk_is_found(file: DiskFile) -> None:
    flat = numbers(9000)
    stored = file.write([flat], "numbers")[0]
    place = stored.blocks[1] * BLOCK
    block = room_for(BLOCK, torch.uint8)
    os.preadv(file._file, [memoryview(block.numpy())], place)
    block[777] ^= 4
    os.pwritev(file._file, [memoryview(block.numpy())], place)
    with pytest.raises(DiskError, match=r"its checksum is [0-9a-f]{8}, and was [0-9a-f]{8}"):
        read(file, stored, 9000)
    with pytest.raises(DiskError, match="its checksum"):
        file.some(stored, BLOCK, BLOCK + 8, "numbers")
    assert torch.equal(file.some(stored, 0, 64, "numbers").view(torch.float32), flat[:16])  # of another block


def test_a_file_takes_no_more_than_it_may(tmp_path: Path) -> None:
    file = opened(tmp_path, limit=4 * BLOCK, host=2 * PAGE_BYTES)
    file.reserve(4)
    with pytest.raises(DiskError, match=r"the plan's disk is 32\.0 KiB, and 40\.0 KiB are needed"):
        file.reserve(1)
    with pytest.raises(MemoryError, match="the plan's host memory"):
        file.keep([numbers(5 * PAGE_BYTES)])
    kept = file.keep([numbers(100)])
    assert torch.equal(read(file, kept[0], 100), numbers(100))
    file.free(kept)
    file.close()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with_all = opened(tmp_path, limit=2**62)
    with pytest.raises(DiskError, match=rf"of optimizer state are to lie in {tmp_path}, where .* are free; name a folder on an"):
        with_all.reserve(free // BLOCK + 2**17)
    with_all.close()


def test_a_file_system_without_direct_access_serves_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT or flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EINVAL, "no")
        return before(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    file = opened(tmp_path)
    assert not file.is_direct
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(read(file, file.write([numbers(5000)], "numbers")[0], 5000), numbers(5000))
    file.close()
    job = job_for()
    placed = place(job, hand_written(job, AWAY_ON_DISK, slots=8), job.build(), torch.device("cpu"), disk=DiskFolder(tmp_path))
    where = f"{show_bytes(placed.disk_bytes)} in {tmp_path}, through the page cache: its file system refuses O_DIRECT"
    assert placed.news() == [f"optimizer state on the disk: {where}"]  # once
    assert placed.news() == []
    placed.close()


def test_a_closed_file_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    before = threading.active_count(), descriptors()
    file = opened(tmp_path)
    file.write([numbers(50_000)], "numbers")
    file.close()
    assert (threading.active_count(), descriptors()) == before


def test_several_threads_look_at_parts_at_once(file: DiskFile) -> None:
    flat = numbers(200_000)
    stored = file.write([flat], "numbers")[0]

    def look(start: int) -> bool:
        some = file.some(stored, 4 * start, 4 * start + 4000, "numbers").view(torch.float32)
        return torch.equal(some, flat[start : start + 1000])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(look, range(0, 199_000, 250)))


# ---------------------------------------------------------------------- runs


def job_for(**options: Any) -> anyfit.Job:
    return anyfit.Job(
        **{
            "model": tiny_gpt,
            "loss": next_byte_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "sample": byte_batches(1, ROWS)[0],
            "batch_size": ROWS,
            "clip_norm": 0.5,
            **options,
        }
    )


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize(("optimizer", "precision"), [*itertools.product(OPTIMIZERS, ["fp32", "bf16"])])
def test_state_on_the_disk_gives_the_weights_of_plain_pytorch(optimizer: str, precision: Any) -> None:
    job = job_for(optimizer=OPTIMIZERS[optimizer], precision=precision)
    batches = byte_batches(6, ROWS)
    chunks = [ON_DISK, AWAY_ON_DISK, AWAY, ON_HOST, Placement()]
    plan = hand_written(job, *itertools.islice(itertools.cycle(chunks), count(job)), chunk_bytes=4096, slots=8)
    with started(job, plan, random_delays(1)) as run:
        for batch in batches:
            run.step(batch)
        weights = run.state_dict()
        assert run.metrics.peak_bytes["disk"] == placed_of(run).disk_bytes > 0
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def count(job: anyfit.Job) -> int:
    with started(job, hand_written(job, AWAY, chunk_bytes=4096)) as run:
        return len(placed_of(run).state.chunks)


def test_what_lies_on_the_disk_takes_no_host_memory_but_for_the_carriers() -> None:
    job = job_for(precision="bf16")
    taken = {}
    for placement in (AWAY, AWAY_ON_DISK):
        with started(job, hand_written(job, placement, chunk_bytes=4096, slots=8)) as run:
            run.step(byte_batches(1, ROWS)[0])
            placed = placed_of(run)
            own = [state.own.elements for state in placed.state.chunks]
            taken[placement.optimizer] = placed.host_bytes
    parts = 3 * (2 + 2 + 4 + 4) * max(own) + 3 * 4 * PAGE_BYTES
    assert sum(own) * 8 < taken["host"]
    assert taken["host"] - taken["disk"] > 10 * sum(own) - parts


def test_weights_that_are_edited_are_their_own_new_masters() -> None:
    job, batches = job_for(precision="bf16", clip_norm=None), byte_batches(4, ROWS)
    found = []
    for placement in (AWAY, AWAY_ON_DISK):
        with started(job, hand_written(job, placement, chunk_bytes=4096, slots=8)) as run:
            for batch in batches:
                with run.weights() as weights, torch.no_grad():
                    for each in weights.parameters():
                        each.view(-1)[::3] *= 0.5
                run.step(batch)
            found.append(run.state_dict())
    assert_bit_equal(*found)


def test_a_state_that_user_code_loads_is_taken_over() -> None:
    job, batches = job_for(precision="bf16"), byte_batches(4, ROWS)
    with started(job, hand_written(job, chunk_bytes=4096)) as run:
        for batch in batches[:2]:
            run.step(batch)
        state = run.optimizer.state_dict() if placed_of(run).updates.users.is_open else None
    found = []
    for placement in (AWAY, AWAY_ON_DISK):
        with started(job, hand_written(job, placement, chunk_bytes=4096, slots=8)) as run:
            if state is not None:
                run.step(batches[0])
                run.optimizer.load_state_dict(state)
            for batch in batches[2:]:
                run.step(batch)
            found.append(run.state_dict())
    assert state is not None
    assert_bit_equal(*found)


def test_a_plan_with_state_on_the_disk_is_not_changed_while_a_run_lasts() -> None:
    job = job_for()
    with (
        started(job, hand_written(job, AWAY_ON_DISK, slots=8)) as run,
        pytest.raises(RuntimeError, match="state on the disk, and is not changed"),
    ):
        placed_of(run).lift()


def test_a_disk_with_too_little_room_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    job = job_for()
    plan, model = hand_written(job, AWAY_ON_DISK, slots=8, disk_bytes=2**12), job.build()
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    with pytest.raises(DiskError, match=rf"the plan's disk is 4\.00 KiB, and .* are needed in {tmp_path}"):
        place(job, plan, model, torch.device("cpu"), disk=DiskFolder(tmp_path))
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before


def test_a_folder_that_goes_while_the_run_lasts_takes_nothing_with_it(tmp_path: Path) -> None:
    job, batches, folder = job_for(), byte_batches(4, ROWS), tmp_path / "disk"
    plan = hand_written(job, AWAY_ON_DISK, slots=8)
    torch.manual_seed(job.seed)
    with Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), disk=DiskFolder(folder))) as run:
        run.step(batches[0])
        folder.rmdir()  # which is empty
        for batch in batches[1:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DiskError, match=rf"no file for optimizer state could be made in {tmp_path}/file/disk: .*; name a folder"):
        opened(tmp_path / "file" / "disk")
