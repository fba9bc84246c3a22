"""What an export writes is what `save_pretrained` would write: names, values, files, a configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import anyfit
from anyfit.placing.tiers import LiveBytes
from anyfit.running.export import export
from anyfit.values.tensor_files import INDEX, TensorFolder
from tests.families import FAMILIES, saved
from tests.machines import small_machine
from tests.models import Tangled, byte_batches, next_byte_loss
from tests.oracle import assert_bit_equal
from tests.plans import AWAY, hand_written

ROWS = 4


def job_of(folder: Path, **options: Any) -> anyfit.Job:
    options = {"precision": "fp32", "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)} | options
    return anyfit.Job.from_huggingface(folder, batch_size=ROWS, length=8, **options)


def trained(job: anyfit.Job, checkpoint: Path, steps: int = 0) -> dict[str, Tensor]:
    """The weights that the checkpoint has."""
    with anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine()) as run:
        for _ in range(steps):
            run.step(job.sample)
        run.save(checkpoint)
        return run.state_dict()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_as_it_went_in(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    saved(tmp_path / "in", family, dtype)
    trained(job_of(tmp_path / "in", precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]), tmp_path / "saved")
    done = export(tmp_path / "saved", tmp_path / "out", shard_bytes=20_000)
    first, last = tensors_in(tmp_path / "in"), tensors_in(tmp_path / "out")
    assert_bit_equal(last, first)
    assert done.tensors == len(last)
    assert done.bytes == sum(each.nbytes for each in last.values())
    assert done.files == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert TensorFolder.open(tmp_path / "out").entries.keys() == last.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_by_transformers_as_it_was_trained(tmp_path: Path, family: str) -> None:
    saved(tmp_path / "in", family)
    weights = trained(job_of(tmp_path / "in"), tmp_path / "saved", steps=1)
    export(tmp_path / "saved", tmp_path / "out")
    made_by: Any = getattr(transformers, FAMILIES[family][0])
    model, said = made_by.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert_bit_equal(model.state_dict(), weights)
    before, after = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("in", "out"))
    assert before | {"_name_or_path": None} == after | {"_name_or_path": None}


def test_the_dtype_is_the_runs_or_the_one_asked_for(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama")
    masters = trained(job_of(tmp_path / "in", precision="bf16"), tmp_path / "saved", steps=1)
    found = {}
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), (None, torch.bfloat16)):
        export(tmp_path / "saved", tmp_path / str(dtype), dtype=dtype)  # type: ignore[arg-type]
        found[dtype] = tensors_in(tmp_path / str(dtype))
        assert {each.dtype for each in found[dtype].values()} == {torch_dtype}
        assert json.loads((tmp_path / str(dtype) / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
    assert_bit_equal(found["fp32"], masters)
    assert_bit_equal(found[None], found["bf16"])
    with anyfit.start(job_of(tmp_path / "in", precision="bf16"), resume=tmp_path / "saved", machine=small_machine()) as run:
        assert_bit_equal(found["bf16"], dict(run.model.state_dict()))  # the very weights that it computes with


def test_a_large_tensor_has_a_file_of_its_own_and_one_file_needs_no_index(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama")
    trained(job_of(tmp_path / "in"), tmp_path / "saved")
    assert export(tmp_path / "saved", tmp_path / "one").files == 1
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert export(tmp_path / "saved", tmp_path / "many", shard_bytes=1).files == len(tensors_in(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors_in(tmp_path / "one").values())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")


def test_the_tokenizer_comes_along_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "in", "llama")
    for name in ("tokenizer.json", "merges.txt", "notes.txt", "modeling.py", "optimizer.bin"):
        (tmp_path / "in" / name).write_text(name)
    trained(job_of(tmp_path / "in"), tmp_path / "saved")
    done = export(tmp_path / "saved", tmp_path / "out")
    assert done.beside == ("generation_config.json", "tokenizer.json", "merges.txt")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    assert export(tmp_path / "saved", tmp_path / "later").beside == ()


def tangled_job(**options: Any) -> anyfit.Job:
    return anyfit.Job(
        model=Tangled,
        loss=next_byte_loss,
        optimizer=lambda model: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2),
        sample=byte_batches(1, ROWS)[0],
        batch_size=ROWS,
        **options,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plain_model_takes_its_state_back_strictly(tmp_path: Path, precision: Any) -> None:
    weights = trained(tangled_job(precision=precision), tmp_path / "saved", steps=2)
    export(tmp_path / "saved", tmp_path / "out", dtype="fp32")
    model = Tangled()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert_bit_equal(dict(model.state_dict()), {name: each.float() for name, each in weights.items()})
    assert not (tmp_path / "out" / "config.json").exists()
    job = tangled_job(precision=precision, weights=tmp_path / "out")
    with anyfit.start(job, hand_written(job, AWAY), small_machine()) as run:
        assert_bit_equal(run.state_dict(), weights)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    trained(tangled_job(), tmp_path / "saved")
    (tmp_path / "out").mkdir()
    export(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(FileExistsError, match="out exists; choose a new folder"):
        export(tmp_path / "saved", tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="could not write weights to"):
        export(tmp_path / "saved", tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "saved"]


class RealBytes(LiveBytes):
    def _watch(self, storage: Any) -> None:
        if storage.device.type != "meta":
            super()._watch(storage)


def test_an_export_takes_the_memory_of_a_few_tensors_and_not_of_all(tmp_path: Path) -> None:
    saved(tmp_path / "in", "mixtral", num_hidden_layers=8)
    trained(job_of(tmp_path / "in", precision="bf16"), tmp_path / "saved")
    with RealBytes() as live:
        done = export(tmp_path / "saved", tmp_path / "out")
    assert live.peak_bytes < done.bytes / 3


def test_the_command_line_exports_a_run_folder(tmp_path: Path, root: Path) -> None:
    saved(tmp_path / "in", "llama")
    weights = trained(job_of(tmp_path / "in"), tmp_path / "run" / "checkpoints" / "00000001", steps=1)
    command = [sys.executable, "-m", "anyfit", "export", "run", "out", "--shard-size", "20kB", "--dtype", "fp32"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(weights)} tensors of run/checkpoints/00000001, ")
    assert "also generation_config.json" in done.stdout
    assert_bit_equal(tensors_in(tmp_path / "out"), weights)


STRANGE: dict[str, Any] = {
    "a list": [],
    "names of nothing": {"names": {"a": "nothing"}},
    "names to print": {"names": {"\x1b[31m": "embed.weight"}},
    "names of no text": {"names": {"a": ["embed.weight"]}},
    "a dtype that is a function": {"dtypes": {"embed.weight": "load"}},
    "a dtype that is none": {"dtypes": {"embed.weight": "nothing"}},
    "a configuration of no object": {"config": "/etc/passwd"},
    "a source of no text": {"source": ["/etc"]},
}


@pytest.mark.parametrize("facts", STRANGE.values(), ids=STRANGE)
def test_a_checkpoint_that_says_strange_things_of_its_model_is_refused(
    tmp_path: Path, facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyfit.running.saves.facts_of", lambda _model, _job: facts or [1])
    trained(tangled_job(), tmp_path / "saved")
    with pytest.raises(ValueError, match="does not describe its model"):
        export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
