"""`anyfit fit FOLDER --data FILE`: from a folder and a file of rows to a folder that transformers generates with."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import anyfit
from anyfit import cli
from anyfit.finetune.looks import Looks, refuse_leaks
from anyfit.finetune.options import Options
from anyfit.finetune.packing import Packed
from anyfit.finetune.schedule import Schedule
from anyfit.finetune.work import Work
from anyfit.fitting import check_of
from anyfit.running import lines
from anyfit.running.loader import Loader
from anyfit.values.record import decode
from tests.finetune import tiny
from tests.finetune.test_packing import drawn

DOCUMENT = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
MADE, PLANNED, WHOLE, ADAPTED = "".join(re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL)).splitlines()  # all are run here
HOW = ["--eval", "5%", "--lr", "5e-3", "--batch", "4", "--seq", "64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user begins: an empty folder, in which the first line of the document makes a model and data."""
    path = tmp_path_factory.mktemp("place")
    assert MADE == "python examples/tiny_qwen3.py"
    subprocess.run([sys.executable, tiny.EXAMPLE], cwd=path, check=True, capture_output=True)
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "anyfit", "fit", *map(str, arguments)]


def fit(*arguments: str | Path) -> None:
    """In this process: Python needs seconds to begin."""
    before, sys.argv = sys.argv, ["anyfit", "fit", *map(str, arguments)]
    try:
        cli.app(standalone_mode=False)
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The one command, as the document has it."""
    done = subprocess.run([sys.executable, "-m", *WHOLE.split()], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "said").write_text(done.stdout)
    return place / "runs" / "chats"


def generated(folder: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the document's example prints, of this run's weights."""
    [block] = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    capsys.readouterr()
    exec(block.replace("runs/chats", folder), {})
    return capsys.readouterr().out


def test_the_export_is_loaded_by_transformers_and_answers_as_the_data_does(
    whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert generated("runs/chats", capsys) == "GREEN\n"


def test_the_adapters_of_the_document_learn_the_data_too(
    whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    fit(*ADAPTED.removeprefix("anyfit fit ").split())
    said = capsys.readouterr().out
    assert "tiny-qwen3 (123 k parameters, 32.8 k trainable" in said  # by the name that was typed, not the class
    assert lines.read(place / "runs" / "lora" / "logged.jsonl")[-1]["evaluation_loss"] < 0.5
    (typed,) = re.findall(r"the weights are the adapter alone, for .*/tiny-qwen3; both as one plain model: anyfit (.*)", said)
    monkeypatch.setattr(sys, "argv", ["anyfit", *typed.split()])
    cli.app(standalone_mode=False)
    assert (place / "merged" / "model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match=re.escape("merge it into its base first: anyfit export --merge")) as refused:
        fit("runs/lora/weights", "--data", "chats.jsonl")
    assert str(refused.value).endswith(f" {place / 'runs' / 'lora'} merged")
    assert generated("runs/lora", capsys) == "GREEN\n"
    shutil.rmtree(place / "merged")
    exports = re.findall(r"`(anyfit export [^`]*)`", DOCUMENT)
    for each in exports:
        monkeypatch.setattr(sys, "argv", each.split())
        cli.app(standalone_mode=False)
    assert len(exports) == 3
    assert all((place / folder / "model.safetensors").exists() for folder in ("last", "step-70", "merged"))


def test_the_plan_of_the_document_is_that_of_the_run(
    whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [*PLANNED.split(), "--json"])
    cli.app(standalone_mode=False)
    asked, trained = anyfit.Plan.from_json(json.loads(capsys.readouterr().out)), anyfit.Plan.load(whole / "plan.json")
    assert (asked.precision, asked.micro_batch) == (trained.precision, trained.micro_batch)
    assert asked.forecast.reserved_bytes == pytest.approx(trained.forecast.reserved_bytes, rel=0.1)


def work_of(folder: Path) -> Work:
    return Work.of(decode(Options, json.loads((folder / "run.json").read_text()), "run.json"))


def test_every_loss_is_that_of_a_plain_loop_over_the_same_batches(whole: Path) -> None:
    work = work_of(whole)
    options, rows = work.options, work.training
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    assert options.steps is not None
    scheduler = Schedule(options.schedule, options.steps, round(options.steps * 0.03))(optimizer)
    losses, tokens = [], []
    for batch in Loader(rows, 4, 0, 3, True, collate_fn=rows.collate):  # type: ignore[arg-type]
        loss = model(**batch, use_cache=False).loss  # with a cache, transformers would not see that rows are packed
        losses.append(float(loss.detach()))
        tokens.append(int((batch["input_ids"] != work.tokenizer.pad_token_id).sum()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    trained = lines.read(whole / "metrics.jsonl")
    assert [each["loss"] for each in trained] == pytest.approx(losses, rel=1e-4)  # logits in slices round in another way
    assert len(losses) == options.steps
    assert [each["tokens_per_second"] * each["seconds"] for each in trained] == pytest.approx(tokens)  # without padding


def test_adapters_alone_are_trained_and_exported_as_peft_saves_them(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    how = [*HOW, "--lora", "4", "--epochs", "1", "--report-to", "tensorboard"]
    fit(place / "tiny-qwen3", "--data", place / "chats.jsonl", *how, "--folder", folder)
    for name, key in (("metrics.jsonl", "loss"), ("logged.jsonl", "evaluation_loss")):
        found = [each[key] for each in lines.read(folder / name)]
        assert found[-1] < found[0]
    looked = [each["step"] for each in lines.read(folder / "logged.jsonl")]
    assert [each["step"] for each in lines.read(folder / "samples.jsonl")[::3]] == looked
    assert any((folder / "tensorboard").iterdir())
    plan = anyfit.Plan.load(folder / "plan.json")
    assert 0 < (plan.trainable or 0) < (plan.frozen or 0)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "tiny-qwen3")
    adapted: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights")  # of its base, by name
    trained = {name: each for name, each in adapted.named_parameters() if ".lora_" in name}
    assert sum(each.numel() for each in trained.values()) == plan.trainable
    assert any(each.abs().max() > 0 for name, each in trained.items() if ".lora_B." in name)
    for name, weight in base.named_parameters():
        known = dict(adapted.named_parameters())
        assert torch.equal(known.get(name, known.get(name.replace(".weight", ".base_layer.weight"))), weight), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "weights")
    assert adapted.generate(**tokenizer("3 green?", return_tensors="pt"), max_new_tokens=4, do_sample=False).shape[1] > 4


def test_the_evaluation_is_the_mean_loss_of_the_answers_one_by_one(whole: Path) -> None:
    work = work_of(whole)
    assert work.evaluation is not None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(whole / "weights", dtype=torch.float32)
    total = weight = 0.0
    for sample in work.evaluation.samples:
        ids = torch.from_numpy(sample.ids.astype("int64"))[None]
        labels = torch.where(torch.from_numpy(sample.is_answer)[None], ids, -100)
        with torch.no_grad():
            total, weight = total + float(model(ids, labels=labels).loss) * sample.learnt, weight + sample.learnt
    evaluations = {each["step"]: each["evaluation_loss"] for each in lines.read(whole / "logged.jsonl")}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert evaluations[best] == pytest.approx(total / weight, rel=1e-4)
    assert evaluations[0] > 4 * evaluations[best]
    assert f"{best:08d}" in {path.name for path in (whole / "checkpoints").iterdir()}


def test_samples_are_written_at_every_look(whole: Path) -> None:
    found = lines.read(whole / "samples.jsonl")
    last = work_of(whole).options.steps
    assert sorted({each["step"] for each in found}) == sorted({*range(0, last or 0, 7), last})
    assert len(found) == 3 * len({each["step"] for each in found})
    at_the_end = [each for each in found if each["step"] == last]
    assert [each["written"] for each in at_the_end] == [each["data"] for each in at_the_end]


def test_tensorboard_has_every_loss_the_evaluations_and_the_samples(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    losses = [(each.step, each.value) for each in events.Scalars("loss")]
    assert losses == [(each["step"], pytest.approx(each["loss"])) for each in lines.read(whole / "metrics.jsonl")]
    evaluations = [(each.step, each.value) for each in events.Scalars("evaluation_loss")]
    assert evaluations == [(each["step"], pytest.approx(each["evaluation_loss"])) for each in lines.read(whole / "logged.jsonl")]
    assert "sample 1/text_summary" in events.Tags()["tensors"]


def test_it_says_what_became_of_the_data_and_where_the_best_weights_are(whole: Path, place: Path) -> None:
    said = (place / "said").read_text()
    assert re.search(
        r"data +200 examples of messages: 200 samples, .* learnt; packed into \d+ rows to train on and \d+ to evaluate, ", said
    )
    assert "to evaluate, of 64 tokens, 99% full" in said
    assert "the best by evaluation" in said


# ---------------------------------------------------------------------- resume


def assert_same(folder: Path, other: Path) -> None:
    mine, theirs = (load_file(each / "weights" / "model.safetensors") for each in (folder, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for name, keys in {"metrics.jsonl": ("step", "loss"), "logged.jsonl": ("step", "evaluation_loss")}.items():
        found = [[[line[key] for key in keys] for line in lines.read(each / name)] for each in (folder, other)]
        assert found[0] == found[1]
    assert lines.read(folder / "samples.jsonl") == lines.read(other / "samples.jsonl")


def test_a_run_that_died_between_a_step_and_its_look_goes_on_exactly(
    whole: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Looks.look

    def dies(self: Looks) -> None:
        if self._run.steps == 21:
            raise RuntimeError("the machine died")
        look(self)

    monkeypatch.setattr(Looks, "look", dies)
    arguments = [place / "tiny-qwen3", "--data", place / "chats.jsonl", *HOW, "--folder", tmp_path / "run"]
    with pytest.raises(RuntimeError, match="the machine died"):
        fit(*arguments)
    monkeypatch.undo()
    fit("--resume", tmp_path / "run")
    assert_same(tmp_path / "run", whole)


@pytest.mark.full
@pytest.mark.parametrize("moment", [3, 17, 33])
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(
    whole: Path, place: Path, tmp_path: Path, moment: int
) -> None:
    folder = tmp_path / "run"
    arguments = command(place / "tiny-qwen3", "--data", place / "chats.jsonl", *HOW, "--folder", folder)
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(lines.read(folder / "metrics.jsonl")) < moment:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(command("--resume", folder), check=True, capture_output=True, timeout=300)
    assert_same(folder, whole)


def test_other_data_than_the_run_began_with_is_refused(whole: Path, place: Path, tmp_path: Path) -> None:
    options = json.loads((whole / "run.json").read_text())
    tiny.write(tmp_path / "chats.jsonl", [*tiny.chats(199), {"messages": tiny.chats(7)[5]["messages"]}])
    changed = decode(Options, options | {"data": str(tmp_path / "chats.jsonl")}, "run.json")
    with pytest.raises(ValueError, match="is not the data that the run began with"):
        Work.of(changed)


def test_a_finished_run_that_is_resumed_says_so_and_how_to_train_more(
    whole: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    fit("--resume", tmp_path / "run")
    (typed,) = re.findall(
        r"this run is finished, after 71 of 71 steps; to train more, go on from its weights: anyfit fit (.*)",
        capsys.readouterr().out,
    )
    assert_same(tmp_path / "run", whole)
    fit(*typed.split(), *HOW, "--folder", tmp_path / "more")
    assert lines.read(tmp_path / "more" / "logged.jsonl")[0]["evaluation_loss"] < 0.1


# ---------------------------------------------------------------------- other data, other ways


@pytest.mark.parametrize(
    ("rows", "arguments"),
    [
        (
            [{"prompt": f"{n} and 1 is", "completion": f" {n + 1}"} for n in range(40)],
            ["--no-packing", "--eval", "3", "--samples", "1"],
        ),
        pytest.param(
            [{"text": "once upon a time there was " * 9} for _ in range(8)],
            ["--optimizer", "sgd", "--eval-every", "99"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_instructions_and_text_train_too(
    rows: Any, arguments: Sequence[str], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write(tmp_path / "data.jsonl", rows)
    fit(place / "tiny-qwen3", "--data", tmp_path / "data.jsonl", "--epochs", "1", "--folder", tmp_path / "run", *arguments)
    losses = [each["loss"] for each in lines.read(tmp_path / "run" / "metrics.jsonl")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert (tmp_path / "run" / "weights" / "tokenizer.json").exists()
    said = capsys.readouterr().out
    (padding,) = re.findall(
        r"^note +the plan's tokens/s count padding \((\d+)% of its batch\), those of the run do not$", said, re.M
    )
    assert "--no-packing" in arguments or f" rows of 256 tokens, {100 - int(padding)}% full" in said
    assert "Job(" not in said  # nobody wrote one
    assert all(re.match("('|\").+('|\")$", line[8:]) for line in said.splitlines() if line.startswith("writes"))  # one line each


def test_the_command_that_times_a_run_can_be_typed(
    whole: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = check_of(replace(work_of(whole).options, lora=4))
    assert typed == f"anyfit check {place / 'tiny-qwen3'} --batch 4 --seq 64 --dtype fp32 --lora 4 --optimizer adamw"
    monkeypatch.setattr(sys, "argv", [*typed.split(), "--steps", "3"])
    monkeypatch.setattr("anyfit.probing.cache.keep_pace", lambda *_: None)
    cli.app(standalone_mode=False)
    assert "against forecast" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3next", marks=pytest.mark.full), "lfm2"])
def test_a_model_that_lets_packed_samples_see_each_other_is_refused(family: str) -> None:
    small: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {
        "qwen3": lambda: transformers.Qwen3Config(**small, head_dim=8),
        "lfm2": lambda: transformers.Lfm2Config(**small, layer_types=["conv", "full_attention"]),
        "qwen3next": lambda: transformers.Qwen3NextConfig(
            **small, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    }  # fmt: skip
    rows = Packed.of(drawn(9, 20), 24, padding=258)
    job = anyfit.Job.from_huggingface(configs[family](), batch_size=2, sample=rows.largest(2), precision="fp32")
    with anyfit.start(job) as run:
        if family == "qwen3":
            refuse_leaks(run, rows)
        else:
            with pytest.raises(ValueError, match=r"lets a packed sample see the one before it .*: use --no-packing"):
                refuse_leaks(run, rows)


@pytest.mark.full
def test_in_little_memory_it_has_the_same_losses_evaluations_and_samples(whole: Path, place: Path, tmp_path: Path) -> None:
    asked = [place / "tiny-qwen3", "--data", place / "chats.jsonl", *HOW, "--folder", tmp_path / "run"]
    fit(*asked, "--device-memory", "1.4MiB")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert any(chunk["weights"] == "host" for chunk in plan["chunks"]) or plan["micro_batch"] < 4
    for name, key in (("metrics.jsonl", "loss"), ("logged.jsonl", "evaluation_loss")):
        found, expected = ([each[key] for each in lines.read(where / name)] for where in (tmp_path / "run", whole))
        assert found == pytest.approx(expected, rel=1e-2)
    assert lines.read(tmp_path / "run" / "samples.jsonl")[-3:] == lines.read(whole / "samples.jsonl")[-3:]


@pytest.mark.full
def test_two_ranks_have_the_losses_and_evaluations_of_one(whole: Path, place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = command(place / "tiny-qwen3", "--data", place / "chats.jsonl", *HOW, "--folder", folder, "--ranks", "2")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, key in (("metrics.jsonl", "loss"), ("logged.jsonl", "evaluation_loss")):
        found, expected = ([each[key] for each in lines.read(where / name)] for where in (folder, whole))
        assert found == pytest.approx(expected, rel=1e-3)
    assert len(lines.read(folder / "samples.jsonl")) == len(lines.read(whole / "samples.jsonl"))


@pytest.mark.full
def test_wandb_gets_the_numbers_of_a_run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = command(
        place / "tiny-qwen3",
        "--data",
        place / "chats.jsonl",
        "--epochs",
        "1",
        *HOW,
        "--folder",
        tmp_path / "run",
        "--report-to",
        "wandb",
    )
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    identity = (tmp_path / "run" / "wandb.id").read_text()
    [file] = (tmp_path / "run").rglob(f"run-{identity}.wandb")
    assert b"evaluation_loss" in file.read_bytes()


def decided(rows: Any, folder: Path, place: Path, **options: Any) -> Work:
    """What is made of these, by options as they are when nothing is said."""
    asked = decode(Options, json.loads((place / "runs" / "chats" / "run.json").read_text()), "run.json")
    free: dict[str, Any] = dict.fromkeys(("batch_size", "length", "eval_every", "save_every", "steps", "digest", "evaluation"))
    tiny.write(folder / "data.jsonl", rows)
    return Work.of(replace(asked, **free | {"data": str(folder / "data.jsonl")} | options))


def test_a_short_run_is_not_saved_and_evaluated_after_every_step(whole: Path, place: Path, tmp_path: Path) -> None:
    options = decided(tiny.chats(12), tmp_path, place, epochs=1).options
    assert (options.steps, options.eval_every, options.save_every) == (6, 5, 5)


def test_a_run_may_have_nothing_to_look_at(whole: Path, place: Path, tmp_path: Path) -> None:
    work = decided(tiny.chats(12), tmp_path, place, samples=0)
    assert (work.evaluation, list(work.shown)) == (None, [])


def test_the_data_is_told_by_what_each_file_has(whole: Path, place: Path, tmp_path: Path) -> None:
    assert decided(tiny.chats(1), tmp_path, place).summary[0].startswith("data           1 example of messages: 1 sample, ")
    others = tiny.write(tmp_path / "others.jsonl", [{"prompt": "3 red?", "completion": "RED"}])
    told = decided(tiny.chats(20), tmp_path, place, evaluation=str(others)).summary
    assert told[0].startswith("data           21 examples of messages, or prompt and completion: 21 samples, ")
    assert re.fullmatch(r"evaluation     1 example, every \d+ steps; 20 examples to train on", told[1])


def test_chats_without_an_answer_are_told_from_answers_that_are_cut_off(whole: Path, place: Path, tmp_path: Path) -> None:
    silent = [{"messages": chat["messages"][:1]} for chat in tiny.chats(3)]
    assert "note           left out: 3 examples without an answer to learn" in (
        decided([*tiny.chats(40), *silent], tmp_path, place).summary
    )
    with pytest.raises(
        ValueError, match=r"data\.jsonl has no answer to learn: no message in it has the role assistant, the first chat has user"
    ):
        decided(silent, tmp_path, place)
    with pytest.raises(ValueError, match=r"they all begin after 8 tokens, the first after \d+; use a larger --seq"):
        decided(tiny.chats(9), tmp_path, place, length=8)
    long = [{"messages": [{"role": "user", "content": "why? " * 20}, *chat["messages"][1:]]} for chat in tiny.chats(2)]
    assert "note           left out: 2 samples whose answer begins after 64 tokens (--seq)" in (
        decided([*tiny.chats(40), *long], tmp_path, place, length=64).summary
    )


# ---------------------------------------------------------------------- what is refused, and before anything slow


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tiny-qwen3"], "tiny-qwen3 is a folder; say what to train it on: --data data.jsonl"),
        (["tiny-qwen3", "chats.jsonl"], "tiny-qwen3 is a folder; say what to train it on: --data chats.jsonl"),
        (["tiny-qwen3", "--data", "chat.jsonl"], "chat.jsonl; did you mean 'chats.jsonl'?"),
        (["tiny-qwen3", "--data", "tiny-qwen3"], "tiny-qwen3 is a folder; data is one file, .jsonl or .parquet"),
        (
            ["llama-8b", "--data", "chats.jsonl"],
            "llama-8b is a size to plan with, and has no weights; fetch a folder that has: hf",
        ),
        (["missing", "--data", "chats.jsonl"], "on the hub is fetched first: hf download ORGANISATION/missing"),
        (
            ["one/missing", "--data", "chats.jsonl"],
            "no folder one/missing; a model on the hub is fetched first: hf download one/missing",
        ),
        (
            ["tiny-qwen3/config.json", "--data", "chats.jsonl"],
            "config.json is no script; a model is trained by its folder: anyfit fit tiny-",
        ),
        (["tiny-qwen", "--data", "chats.jsonl"], "--local-dir FOLDER; did you mean 'tiny-qwen3'?"),
        (["--resume", "old/checkpoints"], "no run to resume in old/checkpoints: it has no run.json; --resume old has"),
        (["--data", "chats.jsonl"], "--data is for a Hugging Face folder; name it: anyfit fit FOLDER --data data.jsonl"),
        (["--lr", "1e-3"], "--lr is for a Hugging Face folder"),
        (["--epochs", "2", "script.py"], "--epochs is an option of a folder; give your script its own arguments after its name"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--steps", "3"], "a folder is trained for --epochs"),
        (["tiny-qwen3", "more", "--data", "chats.jsonl"], "'more' is no option"),
        (["tiny-qwen3", "--data", "none.jsonl"], "none.jsonl"),
        (["tiny-qwen3", "--data", "chats.parquet"], "chats.parquet; did you mean 'chats.jsonl'?"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--eval", "half"], "--eval half: give a share such as 5%"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--eval", "200%"], "--eval 200%: there is no more than all of it; give a share"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--eval", "0"], "--eval 0 evaluates nothing: leave it out, or give a share"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--eval", "0 %"], "--eval 0 % evaluates nothing: leave it out"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--eval", "200"], "leaves none of the 200 examples"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--schedule", "cosin"], "--schedule cosin is not known; did you mean 'cosine'?"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--warmup", "slow"], "--warmup slow: give a share"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--warmup", "9999"], "--warmup 9999 is more than the "),
        (["tiny-qwen3", "--data", "chats.jsonl", "--lr", "0"], "--lr 0.0: give a learning rate above 0"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--dtype", "fp8"], "--dtype fp8: bf16 or fp32 today"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--seq", "512"], "--seq 512 is more than the 256 positions of the model"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--batch", "9999"], "that makes no batch of 9999; use --batch"),
        (["tiny-qwen3", "--data", "chats.jsonl", "--samples", "0", "--eval-every", "5"], "there is nothing to look at"),
        (
            ["tiny-qwen3", "--data", "chats.jsonl", "--report-to", "tensorbord"],
            "--report-to tensorbord is not known; did you mean",
        ),
        (["tiny-qwen3", "--data", "chats.jsonl", "--optimizer", "adamv"], "--optimizer adamv: torch.optim has none of that name"),
        (["empty", "--data", "chats.jsonl"], "empty is empty; a Hugging Face folder holds config.json, weights as safetensors"),
        (["old", "--data", "chats.jsonl"], "old has no config.json; a Hugging Face folder holds config.json, weights"),
        (["adapter", "--data", "chats.jsonl"], "adapter holds an adapter alone, and no config.json; merge it"),
        (["pickled", "--data", "chats.jsonl"], "only safetensors are read"),
        (
            ["unknown", "--data", "chats.jsonl"],
            "unknown holds no configuration that transformers can read: The checkpoint you are",
        ),
        (["t5", "--data", "chats.jsonl"], "t5 is a T5ForConditionalGeneration, and fine-tuning is for causal language models"),
        (["mamba", "--data", "chats.jsonl", "--packing"], "MambaForCausalLM takes no position_ids"),
        (["wordless", "--data", "chats.jsonl"], "wordless holds no tokenizer: none of tokenizer.json"),
        (["runs/chats", "--resume", "runs/chats", "--data", "chats.jsonl"], "a resumed run keeps its folder and data"),
        (["--resume", "runs/chats", "--lr", "1e-3"], "a resumed run keeps its options; leave --lr out"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    arguments: list[str], says: str, place: Path, refusable: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusable()
    monkeypatch.chdir(place)
    before = {path.name for path in place.iterdir()}
    with pytest.raises((ValueError, OSError), match=re.escape(says)):
        fit(*arguments)
    assert {path.name for path in place.iterdir()} == before  # nothing was begun


@pytest.fixture
def refusable(place: Path) -> Callable[[], None]:
    def make() -> None:
        if (place / "empty").exists():
            return
        (place / "script.py").write_text("")
        for name in ("empty", "pickled", "wordless", "adapter", "unknown"):
            (place / name).mkdir()
        (place / "adapter" / "adapter_config.json").write_text("{}")
        (place / "unknown" / "config.json").write_text('{"model_type": "newest"}')
        (place / "runs" / "chats").mkdir(parents=True, exist_ok=True)
        (place / "old" / "checkpoints").mkdir(parents=True)
        (place / "old" / "run.json").write_text("{}")
        config = tiny.config().to_json_string()
        (place / "pickled" / "config.json").write_text(config)
        (place / "pickled" / "pytorch_model.bin").write_bytes(b"")
        transformers.Qwen3ForCausalLM(tiny.config()).save_pretrained(place / "wordless")
        small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
        transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).save_pretrained(place / "t5")
        mamba = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=300)
        transformers.MambaForCausalLM(mamba).save_pretrained(place / "mamba")

    return make


def test_a_missing_reporter_is_refused_with_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "wandb").mkdir()  # as wandb itself leaves behind: no package
    monkeypatch.setattr(sys, "path", [str(place)])
    with pytest.raises(ImportError, match=re.escape("--report-to wandb needs wandb: pip install 'anyfit[wandb]'")):
        fit("tiny-qwen3", "--data", "chats.jsonl", "--report-to", "wandb")
