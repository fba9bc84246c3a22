"""Saving beside the steps: what was there when it began is what is saved, and what goes wrong is heard of."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anyfit
from anyfit.placing.tiers import HostSlabs
from anyfit.running import checkpoint, files, saving
from anyfit.running.launch import Launch, launched
from anyfit.running.run import Run
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.machines import small_machine
from tests.models import Convolutional, Tangled, byte_batches, image_batches, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import (
    AWAY,
    AWAY_ON_DISK,
    AWAY_STREAMED,
    DISK_STREAMED,
    ON_HOST,
    STREAMED,
    hand_written,
    placed_of,
    random_delays,
    started,
)

from .test_checkpoint import OPTIMIZERS, ROWS, job_for

PLACEMENTS = {
    "resident": Placement(),
    "streamed": STREAMED,
    "on host": ON_HOST,
    "away": AWAY,
    "away, speculates": replace(AWAY, speculates=True),
    "away, streamed": AWAY_STREAMED,
    "on host, speculates": replace(ON_HOST, speculates=True),
    "streamed, speculates": replace(STREAMED, speculates=True),
    "away, streamed, speculates": replace(AWAY_STREAMED, speculates=True),
    "away and disk": AWAY_ON_DISK,
    "disk, streamed, speculates": replace(DISK_STREAMED, speculates=True),
    "away and disk, speculates": replace(AWAY_ON_DISK, speculates=True),
}


MODELS: dict[str, Any] = {"gpt": tiny_gpt, "tangled": Tangled, "convolutional": Convolutional}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


class Gate:
    """Lets blocks be written when it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        write = files.BlockFile._add_up_and_write

        def wait_and_write(file: files.BlockFile, block: Tensor, count: int, at: int) -> None:
            assert self.is_open.wait(60)
            write(file, block, count, at)

        monkeypatch.setattr(files.BlockFile, "_add_up_and_write", wait_and_write)
        copy = saving.Copies._copy

        def copy_late(*arguments: Any) -> None:  # when the next update would like to begin
            time.sleep(0.02)
            copy(*arguments)

        monkeypatch.setattr(saving.Copies, "_copy", copy_late)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.is_open.set()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    opened = checkpoint.open(folder)
    opened.verify()
    return {name: opened.read(name) for name in opened.tensors}


def begun(run: Run, folder: Path) -> Any:
    run.save(folder, wait=False)
    assert run.saving is not None
    return run.saving


CASES = list(itertools.product(MODELS, PLACEMENTS, ["fp32", "bf16"]))


@pytest.mark.parametrize(("model", "placing", "precision"), CASES if FULL else CASES[::5])
def test_what_is_saved_is_the_state_when_it_began_and_the_steps_are_the_same(
    model: str, placing: str, precision: Any, tmp_path: Path, gate: Gate
) -> None:
    never = 1e9  # and so what is speculated counts
    job = job_for(MODELS[model], precision=precision, clip_norm=never if "speculates" in placing else 1.0, optimizer=adamw)
    batches = image_batches(6, ROWS) if model == "convolutional" else byte_batches(6, ROWS)
    with started(job, hand_written(job, PLACEMENTS[placing], slots=16), random_delays(3)) as run:
        for batch in batches[:2]:
            run.step(batch)
        gate.is_open.set()
        run.save(tmp_path / "waited for")
        gate.is_open.clear()
        under_way = begun(run, tmp_path / "beside")
        for batch in batches[2:]:
            run.step(batch)
        assert under_way.is_beside
        assert not under_way.is_done
        assert under_way.share == 0
        assert not (tmp_path / "beside").exists()
        gate.is_open.set()
        run.finish_saving()
        assert under_way.share == 1
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    assert_bit_equal(tensors_in(tmp_path / "beside"), tensors_in(tmp_path / "waited for"))
    documents = [checkpoint.open(tmp_path / name).document("progress.json") for name in ("beside", "waited for")]
    assert documents[0] == documents[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "waited for"]


@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_step_that_was_speculated_does_not_wait_for_the_copy(
    is_clipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the generation that is saved as it is, which the next overwrites; one that is clipped is made again in place."""
    job = job_for(precision="bf16", clip_norm=1e-3 if is_clipped else 1e9, optimizer=adamw)
    batches, may_copy, waited = byte_batches(6, ROWS), threading.Event(), threading.Event()
    copy, wait_for = saving.Copies._copy, saving.Copies.wait_for

    def copy_when_told(*arguments: Any) -> None:
        assert may_copy.wait(60)
        copy(*arguments)

    def wait_and_tell(copies: saving.Copies, chunk: int) -> None:
        waited.set()
        wait_for(copies, chunk)

    monkeypatch.setattr(saving.Copies, "_copy", copy_when_told)
    monkeypatch.setattr(saving.Copies, "wait_for", wait_and_tell)
    with started(job, hand_written(job, replace(ON_HOST, speculates=True))) as run:
        for batch in batches[:2]:
            run.step(batch)
        run.save(tmp_path / "waited for")
        begun(run, tmp_path / "beside")
        if is_clipped:
            threading.Thread(target=lambda: (waited.wait(60), may_copy.set())).start()
        for batch in batches[2:]:
            run.step(batch)
            assert waited.is_set() == is_clipped or batch is not batches[2]
            if batch is batches[2] and not is_clipped:
                threading.Thread(target=lambda: (waited.wait(60), may_copy.set())).start()  # the next speculates
        run.finish_saving()
        assert waited.is_set()
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    assert_bit_equal(tensors_in(tmp_path / "beside"), tensors_in(tmp_path / "waited for"))


def test_the_copy_is_of_what_updates_change_and_its_memory_is_taken_once(tmp_path: Path) -> None:
    job = job_for(Tangled, precision="bf16", optimizer=adamw)
    with started(job, hand_written(job, AWAY, slots=16)) as run:
        run.step(byte_batches(1, ROWS)[0])
        before = placed_of(run).host_bytes
        begun(run, tmp_path / "1")
        run.finish_saving()
        taken = placed_of(run).host_bytes - before
        trained = sum(each.numel() for each in run.model.parameters() if each.requires_grad)
        assert 12 * trained <= taken <= 12.5 * trained
        begun(run, tmp_path / "2")
        run.finish_saving()
        assert placed_of(run).host_bytes == before + taken


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_are_not_trained_take_no_memory_in_the_copy(precision: Any, tmp_path: Path) -> None:
    job = job_for(Tangled, precision=precision, optimizer=adamw)
    with started(job, hand_written(job)) as run:
        run.step(byte_batches(1, ROWS)[0])
        begun(run, tmp_path / "1")
        run.finish_saving()
        copies: Any = run.saves.copies
        start = len((data := (tmp_path / "1" / "data-00000.safetensors").read_bytes()).partition(b"}}")[0])
        for at in range(start + 64, len(data)):  # all that is in the image is as in the file
            held = copies.image.holds(at, at + 1)
            assert int(copies.image.memory[at]) == (data[at] if held else 0)
        assert 0 < sum(end - first for first, end in copies.image.ranges) < len(data)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_room_is_made_once_and_a_save_uses_it(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(Tangled, precision="bf16", optimizer=OPTIMIZERS[optimizer])
    batches = byte_batches(3, ROWS)
    with started(job, hand_written(job, AWAY, slots=16)) as run:
        run.step(batches[0])
        before = placed_of(run).host_bytes
        run.make_room_to_save()
        taken = placed_of(run).host_bytes - before
        assert taken > 0
        run.make_room_to_save()
        monkeypatch.setattr(saving, "in_huge_pages", lambda _size: pytest.fail("taken again"))
        for batch in batches[1:]:
            begun(run, tmp_path / str(run.steps))
            run.step(batch)
            run.finish_saving()
            assert placed_of(run).host_bytes == before + taken
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    for steps in (1, 2):
        weights = {name: each for name, each in tensors_in(tmp_path / str(steps)).items() if "/" not in name}
        expected = train_plainly(job, batches[:steps])[1]
        assert_bit_equal(weights, {name: expected[name] for name in weights})


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_launch_that_will_save_has_room_made_after_the_first_step(save_every: int, tmp_path: Path) -> None:
    job, batches = job_for(precision="bf16", optimizer=adamw), byte_batches(2, ROWS)
    with launched(Launch(tmp_path, save_every=save_every)), anyfit.start(job, machine=small_machine()) as run:
        before = placed_of(run).host_bytes
        run.step(batches[0])
        taken = placed_of(run).host_bytes - before
        parameters = sum(each.numel() for each in run.model.parameters())
        assert (12 * parameters <= taken <= 13 * parameters) if save_every else not taken
        run._replacing.move(hand_written(job, AWAY, slots=16))  # and again, where it is planned anew
        assert (run.saves.copies is not None) == bool(save_every)
        run.step(batches[1])
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_no_room_is_made_where_there_is_none(tmp_path: Path) -> None:
    job = job_for(precision="bf16", optimizer=adamw)
    with started(job, hand_written(job, AWAY, slots=16)) as run:
        needed = placed_of(run).host_bytes
    with started(job, hand_written(job, AWAY, slots=16, host_bytes=needed + 2**16)) as run:
        run.make_room_to_save()
        assert placed_of(run).host_bytes == needed
        run.step(byte_batches(1, ROWS)[0])
        assert not begun(run, tmp_path / "1").is_beside


def test_a_save_waits_for_room_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch, is_touched = saving.Copies._touch, threading.Event()

    def touch_late(*arguments: Any) -> None:
        assert is_touched.wait(60)
        arguments[1].zero_()  # as a kernel that cannot touch without writing
        touch(*arguments)

    monkeypatch.setattr(saving.Copies, "_touch", touch_late)
    job = job_for(optimizer=adamw)
    with started(job, hand_written(job)) as run:
        run.step(byte_batches(1, ROWS)[0])
        run.save(tmp_path / "waited for")
        run.make_room_to_save()
        under_way = begun(run, tmp_path / "beside")
        time.sleep(0.1)
        assert under_way.share == 0
        is_touched.set()
        run.finish_saving()
    assert_bit_equal(tensors_in(tmp_path / "beside"), tensors_in(tmp_path / "waited for"))


def test_a_state_that_has_grown_since_gets_more_room(tmp_path: Path) -> None:
    job = job_for(precision="bf16", optimizer=OPTIMIZERS["sgd"])  # which makes its state in the first step
    with started(job, hand_written(job)) as run:
        run.make_room_to_save()
        small = placed_of(run).host_bytes
        run.step(byte_batches(1, ROWS)[0])
        assert begun(run, tmp_path / "1").is_beside
        run.finish_saving()
        assert placed_of(run).host_bytes > small
        run.save(tmp_path / "2")
    assert_bit_equal(tensors_in(tmp_path / "1"), tensors_in(tmp_path / "2"))


def test_without_room_for_a_copy_it_is_written_at_once(tmp_path: Path) -> None:
    job = job_for(precision="bf16", optimizer=adamw)
    with started(job, hand_written(job, AWAY, slots=16)) as run:
        needed = placed_of(run).host_bytes
    with started(job, hand_written(job, AWAY, slots=16, host_bytes=needed + 2**16)) as run:
        run.step(byte_batches(1, ROWS)[0])
        under_way = begun(run, tmp_path / "1")
        assert under_way.is_done
        assert not under_way.is_beside
        assert placed_of(run).host_bytes == needed
        checkpoint.check(tmp_path / "1")


def test_a_run_that_is_planned_anew_meanwhile_saves_what_was_there(tmp_path: Path, gate: Gate) -> None:
    job, batches = job_for(precision="bf16", optimizer=adamw), byte_batches(4, ROWS)
    with started(job, hand_written(job)) as run:
        run.step(batches[0])
        begun(run, tmp_path / "1")
        run.step(batches[1])
        threading.Timer(0.2, gate.is_open.set).start()
        run._replacing.move(hand_written(job, AWAY, slots=16))
        run.step(batches[2])
        begun(run, tmp_path / "3")
        run.step(batches[3])
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    for steps in (1, 3):
        weights = {name: each for name, each in tensors_in(tmp_path / str(steps)).items() if "/" not in name}
        expected = train_plainly(job, batches[:steps])[1]
        assert_bit_equal(weights, {name: expected[name] for name in weights})


def test_one_is_in_flight_at_most_and_closing_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    job = job_for()
    with started(job, hand_written(job)) as run:
        run.step(byte_batches(1, ROWS)[0])
        first = begun(run, tmp_path / "1")
        threading.Timer(0.2, gate.is_open.set).start()
        second = begun(run, tmp_path / "2")
        assert first.is_done
    assert second.is_done
    for name in ("1", "2"):
        checkpoint.check(tmp_path / name)


@pytest.mark.parametrize("how", ["step", "close", "save"])
def test_what_went_wrong_beside_the_steps_is_heard_of(
    how: str, tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    job, (batch, *_) = job_for(), byte_batches(1, ROWS)
    run = started(job, hand_written(job))
    run.step(batch)
    under_way = begun(run, tmp_path / "1")
    run.step(batch)
    while not (tmp_path / ".1.writing" / "data-00000.safetensors").exists():
        pass
    shutil.rmtree(tmp_path / ".1.writing")  # as somebody might who cleans up
    gate.is_open.set()
    while not under_way.is_done:
        pass
    if how == "save":
        run.save(tmp_path / "2")
        assert "could not write a checkpoint to" in capsys.readouterr().err
        checkpoint.check(tmp_path / "2")
        run.close()
        return
    with pytest.raises(OSError, match=r"could not write a checkpoint to .*1: .*No such file"):
        run.step(batch) if how == "step" else run.close()
    if how == "step":
        assert run.steps == 2
        run.step(batch)  # the run goes on
        run.save(tmp_path / "2")
        run.close()
    assert run.is_closed


def test_a_copy_that_fails_is_the_saves_concern_and_not_the_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, batches = job_for(optimizer=adamw), byte_batches(3, ROWS)
    monkeypatch.setattr(HostSlabs, "has_room", lambda slabs, size: slabs.bytes + size <= 2**18)  # told so, and then there is not
    with started(job, hand_written(job)) as run:
        run.step(batches[0])
        assert placed_of(run).slabs.has_room(2**17)
        monkeypatch.setattr(saving.Copies, "has_room", lambda _copies, _content: True)
        run.save(tmp_path / "1", wait=False)
        with pytest.raises(OSError, match=r"could not write .*MemoryError: the plan's host memory"):
            run.finish_saving()
        for batch in batches[1:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys
from pathlib import Path
from tests.running.test_checkpoint import job_for
from tests.plans import hand_written, started
from tests.models import byte_batches
job = job_for()
run = started(job, hand_written(job))
run.step(byte_batches(1, 4)[0])
run.save(Path(sys.argv[1]), wait=False)
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    run.save(Path(sys.argv[2]), wait=False)
"""


def test_a_script_that_ends_meanwhile_ends_when_it_is_written(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "1")]
    subprocess.run(command, cwd=root, check=True, timeout=120)
    checkpoint.check(tmp_path / "1")
    done = subprocess.run([*command, str(tmp_path / "2")], cwd=root, check=True, timeout=120, capture_output=True, text=True)
    assert "anyfit: could not write a checkpoint" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_files_are_laid_out_anew_only_when_tensors_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = checkpoint.Layout.plan

    def counted(layout: Any, tensors: Any, *others: Any) -> None:
        planned.append(len(tensors))
        plan(layout, tensors, *others)

    monkeypatch.setattr(checkpoint.Layout, "plan", counted)
    job = job_for(tiny_gpt, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    batches = byte_batches(3, ROWS)
    with started(job, hand_written(job)) as run:
        run.save(tmp_path / "0")  # before there is momentum
        weights = len(tensors_in(tmp_path / "0"))
        for number, batch in enumerate(batches, start=1):
            run.step(batch)
            run.save(tmp_path / str(number), wait=number == 2)
            run.finish_saving()
            found = tensors_in(tmp_path / str(number))
            assert len(found) > weights
            assert_bit_equal(weights_in(found, run), run.state_dict())
    assert planned == [weights, len(found)]
    with started(job, hand_written(job)) as other:
        other.resume(tmp_path / "2")
        other.step(batches[2])
        assert_bit_equal(other.state_dict(), weights_in(found, other))


def weights_in(found: dict[str, Tensor], run: Run) -> dict[str, Tensor]:
    """Under all their names: those that are tied are stored once."""
    first = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return {name: found[first[id(tensor)]] for name, tensor in run.model.state_dict(keep_vars=True).items()}
