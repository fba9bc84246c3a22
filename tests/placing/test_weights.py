"""Weights from a folder: as transformers loads them, whatever the family, the dtypes and the placement; or a clear refusal."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import anyfit
from anyfit.kernels import split as split_module
from anyfit.placing import chunks as chunks_module
from anyfit.placing import weights as weights_module
from anyfit.placing.weights import opened, read
from anyfit.values.plan import Placement
from anyfit.values.tensor_files import read_header
from anyfit.values.weights import Weights
from tests.families import DECODER, FAMILIES, saved
from tests.machines import small_machine
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import PlainBf16, PlainFp32, assert_bit_equal
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written

ROWS = 4


def started(job: anyfit.Job, *placements: Placement, **options: Any) -> anyfit.Run:
    return anyfit.start(job, hand_written(job, *placements, chunk_bytes=2**14), small_machine(), **options)


def job_of(folder: Path | str, precision: Literal["fp32", "bf16"] = "fp32", **options: Any) -> anyfit.Job:
    return anyfit.Job.from_huggingface(folder, batch_size=ROWS, length=8, precision=precision, **options)


# ---------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_with_what_transformers_loads(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family)
    with started(job_of(tmp_path), AWAY) as run:
        assert_bit_equal(run.state_dict(), model.state_dict())
        mine, theirs = dict(run.model.named_buffers()), dict(model.named_buffers())
        assert_bit_equal(mine, theirs)  # those that are in no file too


@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED], ids=lambda each: each.route)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_are_what_the_file_has_to_the_bit(
    tmp_path: Path, placement: Placement, dtype: torch.dtype, precision: Literal["fp32", "bf16"]
) -> None:
    model = saved(tmp_path, "llama, tied", dtype)
    with started(job_of(tmp_path, precision), placement) as run:
        assert_bit_equal(run.state_dict(), {name: each.float() for name, each in model.state_dict().items()})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_from_a_folder_are_those_of_plain_pytorch(tmp_path: Path, precision: Literal["fp32", "bf16"]) -> None:
    saved(tmp_path, "gpt2")
    job = job_of(tmp_path, precision, clip_norm=0.5)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for each in plain.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    oracle = (PlainFp32 if precision == "fp32" else PlainBf16)(job, plain.train())
    with started(job, AWAY_STREAMED) as run:
        for each in run.model.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
        for _ in range(3):
            assert float(run.step(job.sample)) == oracle.step(job.sample, 1)
        assert_bit_equal(run.state_dict(), oracle.weights())


def test_only_the_stretch_that_is_asked_for_is_read(tmp_path: Path) -> None:
    values = torch.randn(7, 11)
    save_file({"before": torch.ones(3), "a": values}, tmp_path / "file")
    entry = read_header(tmp_path / "file")["a"]
    for start, end in ((0, 77), (5, 6), (13, 60), (77, 77)):
        assert torch.equal(read(entry, start, end), values.reshape(-1)[start:end])


def test_nothing_but_buffers_has_bytes_before_the_model_is_placed(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    model = opened(job_of(tmp_path)).model
    assert {each.untyped_storage().nbytes() for each in model.parameters()} == {4}
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert all(each.requires_grad for each in model.parameters())


def test_names_without_the_models_prefix_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt2", size="1GB")
    bare = {name.removeprefix("transformer."): each for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, tmp_path / "model.safetensors")  # as older ones have
    with started(job_of(tmp_path)) as run:
        assert_bit_equal(run.state_dict(), model.state_dict())


def test_weights_none_takes_the_configuration_alone(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama")
    with started(job_of(tmp_path, weights=None)) as run:
        assert not torch.equal(run.state_dict()["lm_head.weight"], model.lm_head.weight)
    assert job_of(tmp_path / "config.json").weights is None


# ---------------------------------------------------------------------- models that are not transformers'


def gpt_job(weights: Any = None, **options: Any) -> anyfit.Job:
    sample = byte_batches(1, ROWS)[0]
    return anyfit.Job(
        **{
            "model": tiny_gpt,
            "loss": next_byte_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "sample": sample,
            "batch_size": ROWS,
            "precision": "fp32",
            "weights": weights,
            **options,
        }
    )


def gpt_folder(folder: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """A tiny GPT with a tied head, whose weights are in the folder; with some of them other, or gone."""
    torch.manual_seed(11)
    weights: Mapping[str, Tensor | None] = {**tiny_gpt().state_dict(), "head.weight": None, **changes}
    folder.mkdir(exist_ok=True)
    save_file({name: each for name, each in weights.items() if each is not None}, folder / "model.safetensors")
    torch.manual_seed(11)
    return dict(tiny_gpt().state_dict())


def test_a_plain_model_with_tied_weights_starts_from_a_folder(tmp_path: Path) -> None:
    weights = gpt_folder(tmp_path)
    with started(gpt_job(tmp_path), AWAY) as run:
        assert_bit_equal(run.state_dict(), weights)
        assert run.model.head.weight is run.model.bytes.weight


def test_a_tied_weight_may_come_under_its_other_name_or_both(tmp_path: Path) -> None:
    weights = gpt_folder(tmp_path)
    tied = weights["bytes.weight"]
    for changes in ({"bytes.weight": None, "head.weight": tied}, {"head.weight": tied.clone()}):
        gpt_folder(tmp_path, **changes)
        with started(gpt_job(tmp_path), AWAY) as run:
            assert_bit_equal(run.state_dict(), weights)
    gpt_folder(tmp_path, **{"head.weight": tied + 1})
    with pytest.raises(ValueError, match=r"bytes\.weight and head\.weight are one in this model, and differ in the folder"):
        started(gpt_job(tmp_path), AWAY)


def test_a_model_that_is_already_built_takes_the_folders_weights(tmp_path: Path) -> None:
    weights = gpt_folder(tmp_path)
    with started(gpt_job(tmp_path, model=tiny_gpt()), STREAMED) as run:
        assert_bit_equal(run.state_dict(), weights)


class Odd(nn.Module):
    """A parameter in two places from the beginning, a frozen one, one that counts, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first.weight = shared
        self.second.weight = shared
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("made", torch.arange(4.0), persistent=False)
        self.several = nn.ParameterList([torch.ones(2), torch.zeros(2)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.second(self.first(x))) * self.frozen + self.made + self.several[0].sum()
        return out


def test_ties_frozen_parameters_and_buffers_survive_a_build_without_bytes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Odd()
    model.norm.running_mean.fill_(7)
    state = model.state_dict()
    save_file({name: each for name, each in state.items() if name != "second.weight"}, tmp_path / "model.safetensors")
    job = gpt_job(tmp_path, model=Odd, sample=torch.randn(ROWS, 4), loss=lambda model, batch: model(batch).pow(2).mean())
    found = opened(job).model
    assert found.first.weight is found.second.weight
    assert [each.requires_grad for each in found.parameters()] == [each.requires_grad for each in model.parameters()]
    with started(job, AWAY) as run:
        assert_bit_equal(run.state_dict(), state)
        assert torch.equal(run.model.made, torch.arange(4.0))
        run.step(job.sample)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_that_begin_with_a_state_have_it(tmp_path: Path, optimizer: Any) -> None:
    gpt_folder(tmp_path)
    job = gpt_job(tmp_path, optimizer=lambda model: optimizer(model.parameters(), lr=1e-2))
    torch.manual_seed(11)
    oracle = PlainFp32(job, tiny_gpt())
    with started(job, AWAY) as run:
        for batch in byte_batches(2, ROWS):
            run.step(batch)
            oracle.step(batch, 1)
        assert_bit_equal(run.state_dict(), oracle.weights())


# ---------------------------------------------------------------------- what does not fit


def test_a_missing_or_unexpected_name_is_an_error_with_a_table(tmp_path: Path) -> None:
    gpt_folder(tmp_path, **{"blocks.0.mix.weight": None, "blocks.1.mix.weight": None, "extra.bias": torch.ones(1)})
    with pytest.raises(ValueError, match=r"2 missing, 1 unexpected") as error:
        started(gpt_job(tmp_path))
    assert "missing         2  blocks.*.mix.weight" in str(error.value)
    assert "unexpected      1  extra.bias" in str(error.value)
    assert "Weights(folder, rename=" in str(error.value)


def test_a_folder_of_another_family_is_refused_and_not_trained_from_nothing(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    transformers.AutoConfig.for_model("llama", **DECODER).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="0 matched, 21 missing"):
        started(job_of(tmp_path))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    gpt_folder(tmp_path, **{"places.weight": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"places\.weight is \[3, 3\] in the folder and"):
        started(gpt_job(Weights(tmp_path, ignore="head*")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_would_not_be_held_exactly_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    there = gpt_folder(tmp_path)["bytes.weight"]
    gpt_folder(tmp_path, **{"bytes.weight": there.to(dtype)})
    with pytest.raises(ValueError, match=rf"bytes\.weight is {dtype} in the folder, which torch\.float32 does not hold"):
        started(gpt_job(tmp_path))


def test_quantised_folders_are_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **DECODER)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantised"):
        job_of(tmp_path)


def test_a_configuration_cannot_have_just_anything_called(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **DECODER)
    config.architectures = ["logging"]
    assert type(job_of(config).build()).__name__ == "LlamaForCausalLM"


# ---------------------------------------------------------------------- a part of it


def test_what_no_pattern_takes_is_initialised_as_the_model_does_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = gpt_folder(tmp_path, extra=torch.ones(1))
    found = []
    for _ in range(2):
        with started(gpt_job(Weights(tmp_path, only="blocks.*", ignore="blocks.1.*")), AWAY) as run:
            found.append(run.state_dict())
    for name, each in found[0].items():
        is_taken = name.startswith("blocks.0.")
        assert torch.equal(each, weights[name]) == (is_taken or bool(each.eq(0).all() or each.eq(1).all())), name
        assert torch.isfinite(each).all()
    assert_bit_equal(found[0], found[1])
    said = capfd.readouterr().err
    assert "unexpected" in said
    assert "extra" in said
    assert "left out" in said
    assert "0 missing" in said


def test_a_new_head_on_a_known_body_is_missing_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path, "llama")
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=3)
    config.architectures = ["LlamaForSequenceClassification"]
    sample = {"input_ids": torch.ones(ROWS, 8, dtype=torch.long), "labels": torch.zeros(ROWS, dtype=torch.long)}
    job = job_of(config, sample=sample, weights=Weights(tmp_path, ignore="lm_head.*"))
    with started(job, AWAY) as run:
        mine = run.state_dict()
        assert torch.equal(mine["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)
        assert 0.01 < float(mine["score.weight"].std()) < 0.03  # as its configuration says
        run.step(sample)
    assert "1 missing, 0 unexpected" in capfd.readouterr().err


def test_names_can_be_taken_over(tmp_path: Path) -> None:
    weights = gpt_folder(tmp_path)
    torch.manual_seed(11)
    old = {f"net.{name}": each for name, each in tiny_gpt().state_dict().items() if name != "head.weight"}
    old["net.words"] = old.pop("net.bytes.weight")
    save_file(old, tmp_path / "model.safetensors")
    with started(gpt_job(Weights(tmp_path, rename={"net.words": "bytes.weight", "net.*": "*"})), AWAY) as run:
        assert_bit_equal(run.state_dict(), weights)
    with pytest.raises(ValueError, match="makes two of"):
        started(gpt_job(Weights(tmp_path, rename={"net.words": "x", "net.places.weight": "x"})))


def test_patterns_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    gpt_folder(tmp_path)
    with pytest.raises(ValueError, match=r"Weights\(only='block\.\*'\) fits no name"):
        started(gpt_job(Weights(tmp_path, only=("blocks.*", "block.*"))))
    with pytest.raises(ValueError, match="nothing of the folder is taken"):
        started(gpt_job(Weights(tmp_path, ignore="*")))
    with pytest.raises(TypeError, match="takes a pattern"):
        Weights(tmp_path, only=(7,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most one"):
        Weights(tmp_path, rename={"a.*": "b"})
    with pytest.raises(TypeError, match=r"Job\(weights=\) must be a folder or a Weights"):
        gpt_job(7)


# ---------------------------------------------------------------------- going on


def test_a_run_that_is_resumed_does_not_need_the_folder_it_started_from(tmp_path: Path) -> None:
    gpt_folder(tmp_path / "folder")
    job = gpt_job(tmp_path / "folder", precision="bf16")
    with started(job, AWAY) as run:
        run.step(byte_batches(1, ROWS)[0])
        run.save(tmp_path / "saved")
        expected = run.state_dict()
    (tmp_path / "folder" / "model.safetensors").unlink()
    with started(job, AWAY, resume=tmp_path / "saved") as run:
        assert_bit_equal(run.state_dict(), expected)


def test_a_plan_does_not_depend_on_where_weights_come_from(tmp_path: Path) -> None:
    gpt_folder(tmp_path)
    job, without = gpt_job(tmp_path), gpt_job()
    assert job.fingerprint(opened(job).model) == without.fingerprint(without.build())
    plan = anyfit.plan(without, small_machine())
    with anyfit.start(job, plan, small_machine()) as run:
        run.step(byte_batches(1, ROWS)[0])


class Derived(nn.Module):
    """A parameter that is made of another."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Linear(4, 4)
        self.twin = nn.Linear(4, 4)
        self.twin.weight = nn.Parameter(self.source.weight.detach() * 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twin(self.source(x))
        return out


def test_a_parameter_that_is_made_of_another_is_initialised_too(tmp_path: Path) -> None:
    save_file({"source.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    sample = torch.randn(ROWS, 4)
    job = gpt_job(Weights(tmp_path, only="source.weight"), model=Derived, sample=sample, loss=lambda model, x: model(x).mean())
    torch.manual_seed(job.seed)
    built = Derived().state_dict()
    with started(job, AWAY) as run:
        mine = run.state_dict()
    assert torch.equal(mine["source.weight"], torch.ones(4, 4))
    assert torch.equal(mine["twin.weight"], built["twin.weight"])


def test_a_model_on_the_meta_device_must_be_all_in_the_folder(tmp_path: Path) -> None:
    weights = gpt_folder(tmp_path)
    with torch.device("meta"):
        model = tiny_gpt()
    with pytest.raises(ValueError, match=r"norm\.bias is on the meta device and not in the folder"):
        started(gpt_job(Weights(tmp_path, ignore="norm.*"), model=model))
    with torch.device("meta"):
        model = tiny_gpt()
    with started(gpt_job(tmp_path, model=model)) as run:
        assert_bit_equal(run.state_dict(), weights)


def test_pieces_that_are_read_ahead_go_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more pieces than are read ahead, by threads that take their time, and between them parameters that are initialised."""
    state = gpt_folder(tmp_path)
    for module in (split_module, chunks_module):
        monkeypatch.setattr(module, "WRITTEN_AT_ONCE", 100)
    reading, busy, most = read, 0, 0

    def slowly(*stretch: Any) -> Tensor:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        time.sleep(random.random() * 1e-3)
        busy -= 1
        return reading(*stretch)

    monkeypatch.setattr(weights_module, "read", slowly)
    for ignored in ((), ("norm.*", "*.bias")):
        with started(gpt_job(Weights(tmp_path, ignore=ignored), precision="bf16"), AWAY) as run:
            found = run.state_dict()
        names = [name for name in found if not any(fnmatchcase(name, pattern) for pattern in ignored)]
        assert_bit_equal({name: found[name] for name in names}, {name: state[name] for name in names})
    assert most > 1
