"""Hugging Face configurations by name: asked of the hub where there is one, else of what is on this machine, without a wait.
And the loss: the model's own, with logits in slices where the model only hands them on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import anyfit
from anyfit import losses, targets
from anyfit.values import huggingface, huggingface_loss
from anyfit.values.huggingface import config_of, imagined_sample
from tests.machines import small_machine

NAME = "nobody/nothing"


@pytest.fixture
def port() -> Iterator[int]:
    """One that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How transformers was asked for a configuration; it knows none."""
    questions: list[dict[str, Any]] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        questions.append(options)
        raise OSError("not found")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    return questions


def test_a_hub_that_answers_is_asked(port: int, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}/")
    with pytest.raises(ValueError, match="nobody/nothing holds no configuration that transformers can read: not found"):
        targets.job_for(NAME)
    assert asked == [{"trust_remote_code": False}]


def test_code_that_comes_with_a_folder_is_not_run_and_the_error_says_how_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "configuration.Mine"}}')
    (tmp_path / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass")
    for ask in (config_of, targets.job_for):
        with pytest.raises(ValueError, match=r"comes with code of its own, which is not run; .*trust_remote_code=True"):
            ask(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_proxy_that_answers_is_as_good(port: int, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    with pytest.raises(ValueError, match="not found"):
        config_of(NAME)
    assert asked == [{"trust_remote_code": False}]


def test_without_a_hub_what_is_kept_is_looked_at_and_the_error_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free}")
    with pytest.raises(ConnectionError, match=f"^{NAME} is not on this machine, and http://127.0.0.1:{free} does not") as error:
        targets.job_for(NAME)
    assert f"hf download {NAME} config.json" in str(error.value)
    assert asked == [{"local_files_only": True, "trust_remote_code": False}]


def test_a_name_that_takes_long_to_look_up_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    def look_up(*_: Any) -> None:
        time.sleep(2)
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", look_up)
    monkeypatch.setattr(huggingface, "PATIENCE_SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        config_of(NAME)
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_a_configuration_on_disk_asks_nobody(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.AutoConfig.for_model("gpt2", n_layer=3).save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface, "_hub_answers", lambda: pytest.fail("the hub was looked for"))
    assert config_of(str(tmp_path / inside)).n_layer == 3
    assert config_of("gpt2").n_layer == 12


def test_a_sample_has_tokens_that_differ_and_is_the_same_every_time() -> None:
    config = transformers.AutoConfig.for_model("gpt2", vocab_size=50)
    first, second = (imagined_sample(config, 4, 16)["input_ids"] for _ in range(2))
    assert torch.equal(first, second)
    assert first.unique().numel() > 10
    assert int(first.max()) < 50


# ---------------------------------------------------------------------- what is imagined, and what is asked for

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def named(kind: str, made_by: str, **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **TINY | options)
    config.architectures = [made_by]
    return config


@pytest.mark.parametrize(
    "config",
    [
        named("bert", "BertForSequenceClassification"),
        named("bert", "BertForTokenClassification"),
        named("bert", "BertForQuestionAnswering"),
        named("bert", "BertForMultipleChoice"),
        named("bert", "BertForPreTraining"),
        named("bert", "BertModel"),
        named("llama", "LlamaForSequenceClassification"),
        named("vit", "ViTForMaskedImageModeling"),
        named("vit", "ViTForImageClassification", problem_type="multi_label_classification"),
        named("vit", "ViTForImageClassification", num_labels=1),
    ],
    ids=lambda config: config.architectures[0],
)
def test_a_batch_whose_labels_are_not_known_is_asked_for(config: Any) -> None:
    with pytest.raises(ValueError, match=f"{config.architectures[0]} reads and what its labels are cannot .* give sample="):
        anyfit.Job.from_huggingface(config, batch_size=2, length=8)
    with pytest.raises(ValueError, match="give sample="):
        anyfit.Job.from_huggingface(huggingface.factory(config)(), batch_size=2, length=8)


@pytest.mark.parametrize(
    "config",
    [
        named("bert", "BertForMaskedLM"),
        named("bert", "BertLMHeadModel", is_decoder=True),
        named("vit", "ViTForImageClassification", image_size=8, patch_size=4),
        transformers.AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2),
    ],
)
def test_an_imagined_batch_can_be_trained_on(config: Any) -> None:
    job = anyfit.Job.from_huggingface(config, batch_size=2, length=8)
    total, weight = job.evaluate(job.build(), job.sample)
    assert total.requires_grad
    assert weight is not None


def test_a_batch_without_labels_says_what_the_model_reads() -> None:
    model = huggingface.factory(named("bert", "BertForQuestionAnswering"))()
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"gives no loss for a batch of input_ids; it reads .*start_positions, end_positions"):
        huggingface_loss.loss(model, {"input_ids": ids})
    with pytest.raises(TypeError, match=r"BertForQuestionAnswering takes its batch by name, .* and got a list"):
        huggingface_loss.loss(model, [ids])  # type: ignore[arg-type]


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_cache_is_off_while_training_and_described_as_the_source_had_it(use_cache: bool) -> None:
    config = named("llama", "LlamaForCausalLM", use_cache=use_cache)
    own: Any = transformers.LlamaForCausalLM(config)
    jobs = [anyfit.Job.from_huggingface(source, batch_size=2, length=8) for source in (config, own, own)]
    assert config.use_cache == use_cache or config is own.config
    for job in jobs:
        model: Any = job.build()
        assert model.config.use_cache is False
        described = huggingface.description(model)
        assert described is not None
        assert described["use_cache"] is use_cache
    plain = transformers.AutoConfig.for_model("vit", **TINY)
    described = huggingface.description(anyfit.Job.from_huggingface(plain, batch_size=2).build())
    assert described is not None
    assert "use_cache" not in described


def test_a_configuration_without_weights_says_that_training_starts_from_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = named("llama", "LlamaForCausalLM", vocab_size=50, num_key_value_heads=1)
    config.save_pretrained(tmp_path)
    job = anyfit.Job.from_huggingface(tmp_path, batch_size=2, length=8)
    anyfit.start(job, machine=small_machine()).close()
    line = f"{tmp_path} is a configuration without weights: training starts from nothing\n"
    assert line in capfd.readouterr().err
    job.build().save_pretrained(tmp_path)
    for given in ({}, {"weights": None}):
        anyfit.start(anyfit.Job.from_huggingface(tmp_path, batch_size=2, length=8, **given), machine=small_machine()).close()
        assert "from nothing" not in capfd.readouterr().err


# ---------------------------------------------------------------------- the loss

VOCABULARY = 100
DECODER = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER |= {"head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
WITHOUT_HEADS = {key: value for key, value in DECODER.items() if key != "head_dim"}
ENCODER = {key: DECODER[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")}
TOKENS = {key: DECODER[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
SLICED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, **TOKENS}),
    "llama": ("llama", DECODER),
    "qwen3": ("qwen3", DECODER | {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", DECODER),
    "gemma2, capped": ("gemma2", DECODER | {"final_logit_softcapping": 2.0}),
    "mixtral": ("mixtral", DECODER | {"num_local_experts": 4}),
    "mixtral, with the routers' loss": ("mixtral", DECODER | {"num_local_experts": 4, "output_router_logits": True}),
    "phi, with a bias": ("phi", WITHOUT_HEADS),
    "bert, with layers between": ("bert", ENCODER | {"vocab_size": VOCABULARY, "is_decoder": True}),
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, scaled": ("cohere", WITHOUT_HEADS),
    "granite, scaled": ("granite", WITHOUT_HEADS | {"logits_scaling": 2.0}),
}
Loss = Callable[[Any, Any], Any]


class Shrinking(transformers.LlamaForCausalLM):
    """Changes its logits by no option that anyone knows."""

    calls = 0

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        type(self).calls += 1
        logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state) * 0.5
        value = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=value, logits=logits)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens went through the sliced loss, by call; it takes 7 at a time."""
    calls: list[int] = []
    plain = losses.sliced_cross_entropy

    def counted(hidden: Any, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(hidden.shape[:-1].numel())
        return plain(hidden, *args, **options, slice_rows=7)

    monkeypatch.setattr(losses, "sliced_cross_entropy", counted)
    monkeypatch.setattr(huggingface_loss, "_unsliced", set())
    return calls


def model_of(kind: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def batch_of(rows: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def result_of(loss: Loss, model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(2)  # dropout
    model.zero_grad()
    found = loss(model, batch)
    value = found[0] / found[1] if isinstance(found, tuple) else found
    value.backward()
    return value.item(), {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}


def assert_the_models_own(model: Any, batch: Any, tolerance: float) -> None:
    value, gradients = result_of(huggingface_loss.loss, model, batch)
    expected, theirs = result_of(lambda model, batch: model(**batch).loss, model, batch)
    assert value == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == theirs.keys()
    largest = max(each.norm() for each in theirs.values())
    for name, gradient in theirs.items():  # those that are zero but for rounding, as of a key's bias, beside the largest
        assert (gradients[name] - gradient).norm() <= tolerance * max(gradient.norm(), 1e-4 * largest), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SLICED)
def test_the_sliced_loss_of_a_causal_language_model_is_its_own(name: str, dtype: torch.dtype, sliced: list[int]) -> None:
    model = model_of(*SLICED[name], dtype)
    attributes = set(vars(model)), set(vars(model.get_output_embeddings()))
    # Behind the head bf16 rounds in every layer what differs in the last bit before it.
    assert_the_models_own(model, batch_of(), 5e-6 if dtype == torch.float32 else 2e-2)
    assert sliced == [2 * 16]
    assert attributes == (set(vars(model)), set(vars(model.get_output_embeddings())))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"lora_dropout": 0.1, "task_type": "CAUSAL_LM"}])
def test_the_sliced_loss_of_an_adapted_model_is_its_own(options: dict[str, Any], sliced: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    assert_the_models_own(peft.get_peft_model(model_of(*SLICED["llama"]), config), batch_of(), 5e-6)
    assert sliced == [2 * 16]


def test_a_head_that_is_adapted_itself_is_run(sliced: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    assert_the_models_own(peft.get_peft_model(model_of(*SLICED["llama"]), config), batch_of(), 1e-6)
    assert sliced == []


@pytest.mark.parametrize("name", OWN)
def test_logits_that_are_scaled_stay_the_models_own(name: str, sliced: list[int]) -> None:
    assert_the_models_own(model_of(*OWN[name]), batch_of(), 1e-6)
    assert sliced == []


def test_logits_that_are_changed_in_a_way_nobody_knows_are_seen_to_be_and_once(sliced: list[int]) -> None:
    torch.manual_seed(0)
    model = Shrinking(transformers.AutoConfig.for_model("llama", **DECODER))
    Shrinking.calls = 0
    assert_the_models_own(model, batch_of(), 1e-6)
    huggingface_loss.loss(model, batch_of())
    assert sliced == []
    assert Shrinking.calls == 4  # the first was in vain


def test_a_head_that_others_watch_is_run(sliced: list[int]) -> None:
    model, seen = model_of(*SLICED["llama"]), []
    model.lm_head.register_forward_hook(lambda _module, _args, logits: seen.append(logits.shape))
    huggingface_loss.loss(model, batch_of())
    assert seen == [(2, 16, VOCABULARY)]
    assert sliced == []


def test_an_error_in_the_model_leaves_it_as_it_was(sliced: list[int]) -> None:
    model = model_of(*SLICED["llama"])
    with pytest.raises(IndexError, match="out of bounds"):
        huggingface_loss.loss(model, batch_of() | {"labels": torch.full((2, 16), VOCABULARY)})
    assert model(input_ids=batch_of()["input_ids"]).logits.shape == (2, 16, VOCABULARY)
    assert "_loss_function" not in vars(model)


def test_other_models_have_their_own_loss(sliced: list[int]) -> None:
    for config in (
        transformers.BertConfig(vocab_size=VOCABULARY, **ENCODER),
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
    ):
        model = huggingface.factory(config)()
        total, weight = huggingface_loss.loss(model, imagined_sample(config, 2, 8))
        assert total.requires_grad
        assert int(weight) == 2 * 8
    assert sliced == []
