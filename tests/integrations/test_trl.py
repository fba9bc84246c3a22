"""TRL's own SFT script, as the package installs it, with one line more, and SFTTrainer in a script of one's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import anyfit

from .trainers import assert_close, numbers

pytestmark = pytest.mark.full  # TRL and datasets take many seconds to import
AFTER = "    from trl import SFTTrainer, get_dataset, get_peft_config, get_quantization_config\n"
LINE = "    from anyfit.integrations.trl import AnyfitSFTTrainer as SFTTrainer\n"
WORDS = [f"w{index}" for index in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, and prompts with answers."""
    folder = tmp_path_factory.mktemp("sft")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    names = {name: index for index, name in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    drawn = random.Random(0)
    (folder / "data").mkdir()
    for name, count in (("train", 24), ("test", 6)):
        rows = [
            {"prompt": " ".join(drawn.choices(WORDS, k=drawn.randint(2, 6))),
             "completion": " " + " ".join(drawn.choices(WORDS, k=drawn.randint(3, 12)))}
            for _ in range(count)
        ]  # fmt: skip
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def script_of(folder: Path, *, with_anyfit: bool) -> Path:
    """TRL's, or that with the one line."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    own = (Path(spec.origin).parent / "scripts" / "sft.py").read_text()
    assert own.count(AFTER) == 1
    script = folder / ("sft_anyfit.py" if with_anyfit else "sft.py")
    script.write_text(own.replace(AFTER, AFTER + LINE) if with_anyfit else own)
    return script


def run(folder: Path, *options: str, with_anyfit: bool, ranks: int = 1, limit: str | None = None) -> list[dict[str, float]]:
    """All that is logged; under a limit of memory, by `anyfit fit`."""
    script = script_of(folder, with_anyfit=with_anyfit)
    output = folder / f"{script.stem}-{ranks}-{limit}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if limit is not None:
        own = folder / "runs"
        launcher = ["-m", "anyfit", "fit", "--gpus", str(ranks), "--device-memory", limit, "--folder", str(own / str(ranks))]
    words = [
        *(sys.executable, *launcher, str(script), "--model_name_or_path", str(folder / "model"), "--dataset_name"),
        *(str(folder / "data"), "--output_dir", str(output), "--learning_rate", "1e-2", "--num_train_epochs", "2"),
        *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--eval_strategy", "steps"),
        *(
            "--eval_steps",
            "2",
            "--save_steps",
            "2",
            "--logging_steps",
            "1",
            "--bf16",
            "False",
            "--use_cpu",
            "--report_to",
            "none",
        ),
        *("--max_length", "16", *options),
    ]
    own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    last = max(output.glob("checkpoint-*"), key=lambda each: int(each.name.partition("-")[2]))
    found: list[dict[str, float]] = numbers(json.loads((last / "trainer_state.json").read_text())["log_history"])
    return found


def test_trls_script_logs_the_same_with_one_line_more_and_resumed(folder: Path) -> None:
    plain = run(folder, with_anyfit=False)
    assert {"loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens"} <= set(plain[0])
    assert run(folder, with_anyfit=True) == plain
    checkpoint = str(folder / "sft_anyfit-1-None" / "checkpoint-2")
    assert_close(_untold(run(folder, "--resume_from_checkpoint", checkpoint, with_anyfit=True)), _untold(plain))


def _untold(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without TRL's count of tokens, which does not go on from a checkpoint."""
    return [{name: value for name, value in entry.items() if not name.endswith("num_tokens")} for entry in logged]


def test_trls_script_logs_the_same_on_two_ranks(folder: Path) -> None:
    plain, found = (run(folder, "--ddp_backend", "gloo", with_anyfit=each, ranks=2) for each in (False, True))
    assert_close(found, plain)


@pytest.mark.parametrize("ranks", [1, 2])
def test_trls_script_logs_the_same_where_a_batch_does_not_fit(ranks: int, folder: Path) -> None:
    backend = ("--ddp_backend", "gloo") if ranks > 1 else ()
    found = run(folder, *backend, with_anyfit=True, ranks=ranks, limit="4MiB")
    assert json.loads((folder / "runs" / str(ranks) / "plan.json").read_text())["micro_batch"] < 4
    assert_close(found, run(folder, *backend, with_anyfit=False, ranks=ranks))


def trained(kind: Any, folder: Path, options: dict[str, Any] | None = None, **args: Any) -> Any:
    from datasets import load_dataset
    from trl import SFTConfig

    data = load_dataset(str(folder / "data"), cache_dir=str(folder / "cache"))
    common = {
        "learning_rate": 1e-2, "num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "bf16": False, "use_cpu": True, "report_to": [], "max_length": 16,
        "disable_tqdm": True, "dataloader_pin_memory": False, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    arguments = SFTConfig(output_dir=str(folder / "out"), **{**common, **args})
    trainer = kind(model=str(folder / "model"), args=arguments, train_dataset=data["train"], **(options or {}))
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("default")  # TRL's and peft's own
@pytest.mark.parametrize("way", ["packed", "adapters", "cut"])
def test_sft_trainer_logs_the_same(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig
    from trl import SFTTrainer

    from anyfit.integrations.trl import AnyfitSFTTrainer

    class Planned(AnyfitSFTTrainer):
        def _step(self, window: Any) -> torch.Tensor:
            self.plan = self.run.plan
            return super()._step(window)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    own = options if way == "adapters" else {}
    limits = {"machine": anyfit.probe().with_limits(device_memory="4MiB")} if way == "cut" else {}
    found = trained(Planned, folder, {**own, **limits}, packing=way == "packed")
    plain = trained(SFTTrainer, folder, own, packing=way == "packed")
    assert (found.plan.micro_batch < 4) == (way == "cut")
    assert_close(numbers(found.state.log_history), numbers(plain.state.log_history))


@pytest.mark.filterwarnings("default")
def test_trls_loss_is_traced_though_it_asks_for_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyfit.integrations.trl import AnyfitSFTTrainer

    planned: list[anyfit.Plan] = []

    class Traced(AnyfitSFTTrainer):
        def _started(self, job: anyfit.Job) -> anyfit.Run:
            planned.append(anyfit.plan(replace(job, real_run=False)))
            assert self._metrics["train"] == {}
            return super()._started(job)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained(Traced, folder, max_steps=1)
    assert planned[0].batch_size == 8
