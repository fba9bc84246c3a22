"""Checkpoints from somewhere: whatever is in one, nothing of it runs, and what is not a checkpoint's is refused before a run
changes. In all of them the sizes and checksums are right, as whoever makes one on purpose would see to."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import anyfit
from anyfit.running import files
from anyfit.running.export import export
from tests.models import byte_batches
from tests.oracle import assert_bit_equal
from tests.plans import hand_written
from tests.plans import started as start

from .test_checkpoint import ROWS, SCHEDULERS, job_for

JOB = job_for(scheduler=SCHEDULERS["milestones"])


def started(resume: Path | None = None) -> anyfit.Run:
    run = start(JOB, hand_written(JOB))
    if resume is not None:
        run.resume(resume)
    return run


@pytest.fixture(scope="module")
def run() -> Iterator[anyfit.Run]:
    """A run that goes on as if nothing had happened, whatever it is told to resume."""
    with started() as made:
        made.step(byte_batches(1, ROWS)[0])
        made.step(byte_batches(1, ROWS)[0])
        yield made


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once") / "saved"
    with started() as made:
        made.step(byte_batches(1, ROWS)[0])
        made.save(folder)
    return folder


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(once, tmp_path / "saved"))


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def put(folder: Path, name: str, content: bytes) -> None:
    """A file of a checkpoint, with all that its manifest says of it."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    starts = range(0, len(content), files.BLOCK_BYTES)
    sums = [f"{zlib.crc32(content[start : start + files.BLOCK_BYTES]):08x}" for start in starts]
    manifest["files"][name] = {"bytes": len(content), "crc32": sums}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    document = json.loads((folder / name).read_text())
    document = edit(document) or document
    content = json.dumps(document).encode()
    if name == "manifest.json":
        (folder / name).write_bytes(content)
    else:
        put(folder, name, content)


def assert_refused(run: anyfit.Run, folder: Path, said: str) -> None:
    before, drawn = run.state_dict(), torch.get_rng_state()
    with pytest.raises(ValueError, match=said):
        run.resume(folder)
    assert_bit_equal(run.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert run.steps == 2


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "progress.json", "plan.json", "data-00000.safetensors"])
def test_a_pickle_in_place_of_a_file_is_not_unpickled(run: anyfit.Run, saved: Path, tmp_path: Path, name: str) -> None:
    content = pickle.dumps(Payload(tmp_path / "mark"))
    if name == "manifest.json":
        (saved / name).write_bytes(content)
    else:
        put(saved, name, content)
    assert_refused(run, saved, name)
    assert not (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pickle_beside_the_files_is_not_looked_at_and_torchs_own_are_refused(
    run: anyfit.Run, saved: Path, tmp_path: Path
) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    with started(saved) as resumed:
        assert resumed.steps == 1
    dcp.save({"weight": torch.zeros(3)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    with pytest.raises(ValueError, match=r"not an anyfit checkpoint: it has no manifest\.json"):
        run.resume(tmp_path / "torchs")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name",
    ["../secret.json", "/etc/passwd", "data-00000.safetensors/../x.json", "data-1.safetensors", "a/b.json", "manifest.json"],
)
def test_a_name_that_leads_elsewhere_is_refused(run: anyfit.Run, saved: Path, name: str) -> None:
    (saved.parent / "secret.json").write_text("{}")

    def edit(manifest: Any) -> None:
        manifest["files"][name] = {"bytes": 2, "crc32": [f"{zlib.crc32(b'{}'):08x}"]}

    change(saved, "manifest.json", edit)
    assert_refused(run, saved, "list of files")


def test_a_name_that_is_no_file_of_the_checkpoint_is_never_written(saved: Path, tmp_path: Path) -> None:
    def edit(metadata: Any) -> None:
        metadata["weights"]["../../evil"] = metadata["weights"].pop("norm.weight")

    change(saved, "metadata.json", edit)
    with pytest.raises(ValueError, match="does not hold what"):
        export(saved, tmp_path / "out")


TENSOR_EDITS: dict[str, Callable[[Any], Any]] = {
    "shape of 2^124 elements": lambda tensor: tensor.update(shape=[2**62, 2**62], boxes=[[[0, 0], [2**62, 2**62], 0, 0]]),
    "shape larger than its file": lambda tensor: tensor.update(shape=[2**40], boxes=[[[0], [2**40], 0, 0]]),
    "negative shape": lambda tensor: tensor.update(shape=[-1, -32]),
    "shape of numbers with fractions": lambda tensor: tensor.update(shape=[1.0, 32]),
    "shape of truths": lambda tensor: tensor.update(shape=[True, 32]),
    "shape that is a word": lambda tensor: tensor.update(shape="32"),
    "a thousand dimensions": lambda tensor: tensor.update(shape=[1] * 1000, boxes=[[[0] * 1000, [1] * 1000, 0, 0]]),
    "no dtype": lambda tensor: tensor.update(dtype="object"),
    "no boxes": lambda tensor: tensor.update(boxes=[]),
    "too many boxes": lambda tensor: tensor.update(boxes=[[[0], [0], 0, 0]] * 2**17),
    "the same box twice": lambda tensor: tensor.update(boxes=tensor["boxes"] * 2),
    "a box outside": lambda tensor: tensor.update(boxes=[[[1], *tensor["boxes"][0][1:]]]),
    "a box before the file": lambda tensor: tensor.update(boxes=[[*tensor["boxes"][0][:3], -8]]),
    "a box beyond the file": lambda tensor: tensor.update(boxes=[[*tensor["boxes"][0][:3], 2**40]]),
    "a box in another's place": lambda tensor: tensor.update(boxes=[[*tensor["boxes"][0][:3], 0]]),
    "a file that is not there": lambda tensor: tensor.update(boxes=[[*tensor["boxes"][0][:2], 7, 0]]),
    "a file of a huge number": lambda tensor: tensor.update(boxes=[[*tensor["boxes"][0][:2], 10**17, 0]]),
    "not even a tensor": lambda tensor: tensor.clear(),
}


@pytest.mark.parametrize("edit", TENSOR_EDITS.values(), ids=TENSOR_EDITS)
def test_absurd_tensors_are_refused(run: anyfit.Run, saved: Path, edit: Callable[[Any], Any]) -> None:
    def change_one(metadata: Any) -> None:
        edit(metadata["weights"]["norm.weight"])

    change(saved, "metadata.json", change_one)
    assert_refused(run, saved, r"(metadata\.json|data-00000\.safetensors)")


MANIFEST_EDITS: dict[str, Callable[[Any], Any]] = {
    "blocks of nothing": lambda manifest: manifest.update(block_bytes=0),
    "blocks of 2^60 bytes": lambda manifest: manifest.update(block_bytes=2**60),
    "a file of 2^60 bytes": lambda manifest: manifest["files"]["plan.json"].update(bytes=2**60),
    "sums that are no numbers": lambda manifest: manifest["files"]["plan.json"].update(crc32=["zz"]),
    "more sums than blocks": lambda manifest: manifest["files"]["plan.json"].update(crc32=["00"] * 2**16),
    "a list of files": lambda manifest: manifest.update(files=["plan.json"]),
    "a list": lambda manifest: [manifest],
    "a number": lambda _manifest: 1,
}


@pytest.mark.parametrize("edit", MANIFEST_EDITS.values(), ids=MANIFEST_EDITS)
def test_absurd_manifests_are_refused(run: anyfit.Run, saved: Path, edit: Callable[[Any], Any]) -> None:
    change(saved, "manifest.json", edit)
    assert_refused(run, saved, r"manifest\.json")


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "progress.json", "plan.json"])
@pytest.mark.parametrize("what", ["nested", "huge"])
def test_json_that_would_take_the_memory_or_the_stack_is_refused(run: anyfit.Run, saved: Path, name: str, what: str) -> None:
    content = b"[" * 200_000
    if what == "huge":
        with (saved / name).open("r+b") as file:
            file.truncate(2**32)  # takes nothing on the disk
        if name != "manifest.json":
            size = {"bytes": 2**32, "crc32": ["00000000"] * 2**8}
            change(saved, "manifest.json", lambda manifest: manifest["files"].update({name: size}))
    elif name == "manifest.json":
        (saved / name).write_bytes(content)
    else:
        put(saved, name, content)
    assert_refused(run, saved, name)


PROGRESS_EDITS: dict[str, Callable[[Any], Any]] = {
    "steps that are a word": lambda progress: progress.update(steps="many"),
    "steps before the first": lambda progress: progress.update(steps=-1),
    "no steps": lambda progress: progress.pop("steps") and None,
    "groups of nothing": lambda progress: progress.update(groups=None),
    "parameters in a group": lambda progress: progress["groups"][0].update(params=[1]),
    "a scheduler without a method": lambda progress: progress["scheduler"].update(step=1),
    "a scheduler of another optimizer": lambda progress: progress["scheduler"].update(optimizer=1),
    "state of a parameter that is not there": lambda progress: progress["optimizer_scalars"].update({"evil": {}}),
    "a dtype that is a function": lambda progress: progress["optimizer_scalars"].update(
        {"norm.weight": {"step": {"!number": ["load", 1.0]}}}
    ),
    "random numbers too few": lambda progress: progress["random"][0].update(torch="AAAA"),
    "random numbers that are none": lambda progress: progress["random"][0].update(torch="?"),
    "random numbers of Python too few": lambda progress: progress["random"][0].update(python=[3, [1], None]),
    "random numbers of nobody": lambda progress: progress.update(random={"torch": 1}),
    "a list": lambda progress: [progress],
}


@pytest.mark.parametrize("edit", PROGRESS_EDITS.values(), ids=PROGRESS_EDITS)
def test_absurd_progress_is_refused(run: anyfit.Run, saved: Path, edit: Callable[[Any], Any]) -> None:
    change(saved, "progress.json", edit)
    assert_refused(run, saved, "saved")


def test_the_plan_is_for_reference_and_may_be_of_any_version(saved: Path) -> None:
    change(saved, "plan.json", lambda plan: plan.update(version=77, chunks="other"))
    with started(saved) as resumed:
        assert resumed.steps == 1


def test_a_checkpoint_that_was_left_alone_is_resumed(saved: Path) -> None:
    for name in ("metadata.json", "progress.json", "plan.json"):
        change(saved, name, lambda document: document)
    put(saved, "data-00000.safetensors", (saved / "data-00000.safetensors").read_bytes())
    with started(saved) as resumed:
        assert resumed.steps == 1
