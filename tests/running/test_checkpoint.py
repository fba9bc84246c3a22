"""Checkpoints: exact, whole or not there, and refused when damaged or foreign."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, OneCycleLR, SequentialLR

import anyfit
from anyfit.demo import GPT
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing.tiers import LiveBytes
from anyfit.running import checkpoint, files, loading
from anyfit.running.storage import Writer
from tests.machines import small_machine
from tests.models import Convolutional, Tangled, byte_batches, image_batches, image_loss, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal

ROWS = 4
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 4, 6], gamma=0.5),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
    "sequence": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), MultiStepLR(optimizer, [3])], milestones=[4]),
}


class Counting(torch.optim.Optimizer):
    """Keeps a number that is no tensor, and a mean that is a new tensor after every step."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = parameter.grad / 2 + state.get("mean", torch.zeros_like(parameter)) / 2
                    parameter -= group["lr"] / state["count"] * state["mean"]


OPTIMIZERS: dict[str, Any] = {
    "counting": lambda model: Counting(model.parameters()),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
}


def job_for(model: Any = tiny_gpt, **options: Any) -> anyfit.Job:
    images = model is Convolutional
    defaults = {
        "loss": image_loss if images else next_byte_loss,
        "optimizer": OPTIMIZERS["adamw"],
        "sample": image_batches(1, ROWS)[0] if images else byte_batches(1, ROWS)[0],
        "precision": "fp32",
    }
    return anyfit.Job(model=model, batch_size=ROWS, **(defaults | options))


def start(job: anyfit.Job, resume: Path | None = None) -> anyfit.Run:
    return anyfit.start(job, machine=small_machine(), resume=resume)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with start(job_for()) as run:
        run.step(byte_batches(1, ROWS)[0])
        run.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "optimizer", "scheduler"),
    [
        (tiny_gpt, "adamw", "lambda"),
        (Tangled, "adamw", "milestones"),
        (Tangled, "sgd", "sequence"),
        (Tangled, "counting", "none"),
        (Convolutional, "adagrad", "none"),
        (Convolutional, "adamw", "one cycle"),
    ],
)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(
    tmp_path: Path, model: Any, optimizer: str, scheduler: str, precision: Any
) -> None:
    job = job_for(model, optimizer=OPTIMIZERS[optimizer], scheduler=SCHEDULERS[scheduler], precision=precision, clip_norm=1.0)
    batches = image_batches(8, ROWS) if model is Convolutional else byte_batches(8, ROWS)
    with start(job) as run:
        for batch in batches[:5]:
            run.step(batch)
        run.save(tmp_path / "5")
        expected = [float(run.step(batch)) for batch in batches[5:]]
        weights, rates = run.state_dict(), run.metrics.learning_rates
        after = torch.rand(1)
    with start(job, resume=tmp_path / "5") as run:
        assert run.steps == 5
        assert [float(run.step(batch)) for batch in batches[5:]] == expected
        assert_bit_equal(run.state_dict(), weights)
        assert run.metrics.learning_rates == rates
        assert torch.equal(torch.rand(1), after)


def test_the_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    dataset = list(byte_batches(1, 50)[0])
    job = job_for()
    with start(job) as run:
        loader = run.loader(dataset, epochs=2)
        seen = []
        for batch in loader:
            run.step(batch)
            seen.append(batch)
            if len(seen) == 14:
                run.save(tmp_path / "14")
    assert len(seen) == len(loader) == 25
    with start(job, resume=tmp_path / "14") as run:
        rest = list(run.loader(dataset, epochs=2))
    assert len(rest) == 11
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rest, seen[14:], strict=True))


def test_saving_over_a_checkpoint_replaces_it(saved: Path) -> None:
    with start(job_for(), resume=saved) as run:
        run.step(byte_batches(1, ROWS)[0])
        run.save(saved)
    with start(job_for(), resume=saved) as run:
        assert run.steps == 2
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with start(job_for()) as run, pytest.raises(FileExistsError, match="not a checkpoint"):
        run.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"


def test_an_unwritable_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with start(job_for()) as run, pytest.raises(OSError, match="could not write a checkpoint"):
        run.save(tmp_path / "file" / "checkpoint")


FULL_DISK = """
import resource, sys
import torch, anyfit
from tests.running.test_checkpoint import job_for, start
from tests.models import byte_batches
from pathlib import Path
folder = Path(sys.argv[1])
with start(job_for(), resume=folder) as run:
    run.step(byte_batches(1, 4)[0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a real write error half-way through a file
    try:
        run.save(folder)
    except OSError as error:
        print(error)
"""


def test_a_write_that_fails_half_way_leaves_the_previous_checkpoint_whole(saved: Path, root: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(saved)], cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    assert "could not write a checkpoint" in done.stdout
    assert "untouched" in done.stdout
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from anyfit.running.files import Aside
from tests.running.test_checkpoint import job_for, start
from tests.models import byte_batches
disk = Path(sys.argv[1])
with start(job_for()) as run:
    run.step(byte_batches(1, 4)[0])
    run.save(disk / "1")
    (disk / "other").write_bytes(bytes(4 * 2**20 - 2 * sum(file.stat().st_size for file in (disk / "1").iterdir()) + 100_000))
    for name in ("2", "2", "1"):
        try:
            run.save(disk / name)
        except OSError as error:
            print(error)
        Aside.refuse_without_room = lambda *_given: None  # as where somebody else fills the disk meanwhile
    run.step(byte_batches(1, 4)[0])
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        run.save(disk / "3")
    except OSError as error:
        print(error)
    run.resume(disk / "1")
    print(run.steps, sorted(path.name for path in disk.iterdir()))
"""
# Mounts in a namespace of its own, which needs no rights where the system lets users have one.
IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def can_mount(folder: Path) -> bool:
    try:
        done = subprocess.run([*IN_NAMESPACE, f"mount -t tmpfs tmpfs {folder}"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def test_a_full_disk_and_a_read_only_one_are_said_and_what_was_there_stays_whole(tmp_path: Path, root: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("this system lets nobody mount a small disk")
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run([*IN_NAMESPACE, mount, SMALL_DISK], cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    too_large, full, over_another, read_only, end = done.stdout.splitlines()
    assert too_large.startswith(f"could not write a checkpoint to {tmp_path / '2'}: it takes ")
    assert too_large.endswith(" left; save to another disk, or remove older checkpoints")
    assert full.startswith(f"could not write a checkpoint to {tmp_path / '2'}: [Errno 28] No space left on device")
    assert over_another.endswith(f"No space left on device; the checkpoint that was there is untouched in {tmp_path / '1'}")
    assert f"could not write a checkpoint to {tmp_path / '3'}: [Errno 30] Read-only file system" in read_only
    assert end == "1 ['1', 'other']"


FILES = ("metadata.json", "progress.json", "plan.json", "data-00000.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_damage_is_found_before_anything_changes(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
    with start(job_for()) as run:
        before = run.state_dict()
        with pytest.raises(ValueError, match=name):
            run.resume(saved)
        assert_bit_equal(run.state_dict(), before)
        assert run.steps == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ('{"anyfit": "plan", "version": 2, "files": {}}', "plan version 2"),
        ('{"anyfit": "checkpoint", "version": 4, "files": {}}', "version 4.*a newer anyfit wrote it: upgrade"),
        ('{"anyfit": "checkpoint", "version": 1, "files": {}}', "version 1.*cannot be read any more"),
        ('{"anyfit": "checkpoint", "version": 3, "block_bytes": 8, "files": {}}', "list of files"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(saved: Path, content: str, said: str) -> None:
    (saved / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        start(job_for(), resume=saved)


def make_former(folder: Path) -> None:
    """A checkpoint as version 2 had it: no extra state, groups as they are, counters by a word of their own."""

    def put(name: str, document: Any) -> None:
        content = json.dumps(document).encode()
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "crc32": [f"{zlib.crc32(content):08x}"]}

    def counters(value: Any) -> Any:
        if isinstance(value, dict):
            if str(value.get("class")).endswith("Counter"):
                return {"!counter": value["!dict"]}
            return {key: counters(each) for key, each in value.items()}
        return [counters(each) for each in value] if isinstance(value, list) else value

    manifest, metadata, progress = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("manifest", "metadata", "progress")
    )
    manifest["version"] = 2
    assert not metadata.pop("extra")
    del manifest["files"]["extra.json"]
    (folder / "extra.json").unlink()
    for key in ("job", "scheduler_start", "scheduler_kind", "loader_order"):
        del progress[key]
    for each in progress["random"]:
        del each["numpy"]
    progress["optimizer"] = progress["optimizer"].rpartition(".")[2]
    progress["groups"] = [each["settings"] for each in progress["groups"]]
    put("metadata.json", metadata)
    put("progress.json", counters(progress))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_of_the_version_before_goes_on_and_says_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, dataset = job_for(scheduler=SCHEDULERS["milestones"]), list(byte_batches(1, 40)[0])
    with start(job) as run:
        batches = iter(run.loader(dataset))
        for _ in range(4):
            run.step(next(batches))
        run.save(tmp_path / "saved")
        expected = [float(run.step(batch)) for batch in batches]
        weights, rates, after = run.state_dict(), run.metrics.learning_rates, torch.rand(1)
    make_former(tmp_path / "saved")
    capsys.readouterr()
    with start(job, resume=tmp_path / "saved") as run:
        said = [line for line in capsys.readouterr().err.splitlines() if str(tmp_path) in line]
        assert len(said) == 1
        assert (
            "version 2, which holds weights, buffers, optimizer, scheduler, data position and random state, and nothing"
            in said[0]
        )
        assert run.steps == 4
        assert [float(run.step(batch)) for batch in run.loader(dataset)] == expected
        assert_bit_equal(run.state_dict(), weights)
        assert run.metrics.learning_rates == rates
        assert torch.equal(torch.rand(1), after)
    with pytest.raises(ValueError, match="AdamW"):
        start(job_for(optimizer=OPTIMIZERS["sgd"], scheduler=SCHEDULERS["milestones"]), resume=tmp_path / "saved")


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(saved: Path) -> None:
    with pytest.raises(ValueError, match="another model"):
        start(job_for(Tangled), resume=saved)
    with pytest.raises(ValueError, match="AdamW"):
        start(job_for(optimizer=OPTIMIZERS["sgd"]), resume=saved)
    with pytest.raises(ValueError, match="scheduler"):
        start(job_for(scheduler=SCHEDULERS["lambda"]), resume=saved)


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        start(job_for(), resume=tmp_path / "nothing")
    (tmp_path / "foreign").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "foreign" / "weights.safetensors")
    with pytest.raises(ValueError, match="not an anyfit checkpoint"):
        start(job_for(), resume=tmp_path / "foreign")


def test_a_process_that_died_between_the_two_renames_loses_nothing(saved: Path) -> None:
    saved.rename(saved.with_name(".saved.old"))
    with start(job_for(), resume=saved) as run:
        assert run.steps == 1


def test_the_newest_whole_checkpoint_is_taken_and_the_rest_explained(saved: Path) -> None:
    parent = saved.parent / "checkpoints"
    for step in (10, 9, 100):
        shutil.copytree(saved, parent / f"{step:08d}")
    (parent / "00000100" / "data-00000.safetensors").write_bytes(b"")
    (parent / ".00000101.writing").mkdir()
    found, passed_over = checkpoint.newest(parent)
    assert found == parent / "00000010"
    assert len(passed_over) == 1
    assert "00000100" in passed_over[0]
    checkpoint.remove_older(parent, keep=2)
    assert sorted(path.name for path in parent.iterdir()) == ["00000010", "00000100"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_planned_for_the_memory_that_there_is_and_its_curve_goes_on(tmp_path: Path, precision: Any) -> None:
    job = job_for(precision=precision, micro_batch=ROWS, optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    batches = byte_batches(8, ROWS)
    with start(job) as run:
        for batch in batches[:4]:
            run.step(batch)
        run.save(tmp_path / "4")
        expected = [float(run.step(batch)) for batch in batches[4:]]
        weights, resident = run.state_dict(), run.plan
    limit = int(0.65 * resident.forecast.peak_bytes["device"])
    with anyfit.start(job, machine=small_machine().with_limits(device_memory=limit), resume=tmp_path / "4") as run:
        assert any(each.optimizer == "host" for each in run.plan.chunks)
        assert not any(each.optimizer == "host" for each in resident.chunks)
        assert [float(run.step(batch)) for batch in batches[4:]] == expected
        assert_bit_equal(run.state_dict(), weights)


def test_latest_stands_for_the_newest_whole_one_and_says_what_was_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(job_for()) as run:
        for step in (1, 2, 3):
            run.step(byte_batches(1, ROWS)[0])
            run.save(tmp_path / str(step))
    (tmp_path / "3" / "progress.json").unlink()
    (tmp_path / ".4.writing").mkdir()
    with start(job_for(), resume=tmp_path / "latest") as run:
        assert run.steps == 2
    said = capsys.readouterr().err
    assert f"passed over a checkpoint: {tmp_path / '3' / 'progress.json'} is missing" in said
    assert f"going on from {tmp_path / '2'}" in said
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "2" / "manifest.json").write_text("{")
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint in .*progress\.json is missing.*manifest\.json is damaged"):
        start(job_for(), resume=tmp_path / "latest")


def test_the_newest_are_kept_and_those_of_every_so_many_steps(saved: Path) -> None:
    parent = saved.parent / "checkpoints"
    for step in (5, 10, 15, 20, 25):
        shutil.copytree(saved, parent / f"{step:08d}")
    shutil.copytree(saved, parent / ".00000030.old")  # of a process that died between the two renames
    checkpoint.remove_older(parent, keep=2, keep_every=10)
    assert sorted(int(path.name) for path in parent.iterdir()) == [10, 20, 25, 30]


def test_what_another_process_is_writing_is_not_taken_for_left_behind(tmp_path: Path) -> None:
    writing, left = files.Aside(tmp_path / "1"), tmp_path / ".2.writing"
    writing.make()
    left.mkdir()
    with start(job_for()) as run:
        run.save(tmp_path / "3")
    assert writing.path.exists()
    assert not left.exists()
    writing.remove()


def test_scheduler_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        made = LambdaLR(optimizer, lambda step: 1.0)
        made.gadget = object()  # type: ignore[attr-defined]
        return made

    with start(job_for(scheduler=scheduler)) as run, pytest.raises(TypeError, match=r"scheduler\.gadget"):
        run.save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}
    for path in saved.glob("*.json"):
        json.loads(path.read_text())


def test_saving_and_loading_take_the_memory_of_a_few_blocks_and_not_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 2**12)
    monkeypatch.setattr(loading, "READ_AT_ONCE", 2**10)
    job = job_for(lambda: GPT(width=64, layers=12, heads=2, length=16), precision="bf16")
    with start(job) as run:
        run.step(byte_batches(1, ROWS)[0])
        buffers: list[int] = []  # of the threads that write, which LiveBytes does not see
        monkeypatch.setattr(files, "in_huge_pages", lambda size: buffers.append(size) or in_huge_pages(size))
        with LiveBytes() as live:
            run.save(tmp_path / "saved")
        whole = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
        assert buffers
        assert live.peak_bytes + sum(buffers) <= 4 * files.THREADS * files.BLOCK_BYTES < whole / 40
        with LiveBytes() as live:
            run.resume(tmp_path / "saved")
        assert live.peak_bytes <= 64 * loading.READ_AT_ONCE < whole / 40


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", sorted(files.DTYPES, key=str), ids=str)
def test_every_dtype_is_written_as_the_library_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.arange(6).view(2, 3).to(dtype).T,
        "none": torch.empty(0, 4, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    tensors["byte"] = torch.ones(3, dtype=torch.uint8)
    dcp.save(tensors, storage_writer=Writer(tmp_path / "saved"), no_dist=True)
    assert_bit_equal(load_file(tmp_path / "saved" / "data-00000.safetensors"), tensors)
    opened = checkpoint.open(tmp_path / "saved")
    opened.verify()
    assert_bit_equal({name: opened.read(name) for name in opened.weights}, tensors)
