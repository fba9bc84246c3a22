"""Hugging Face configurations by name: asked of the hub where there is one, else of what is on this machine, without a wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from anyfit import targets
from anyfit.values import huggingface
from anyfit.values.huggingface import config_of, imagined_sample

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
    assert asked == [{}]


def test_a_proxy_that_answers_is_as_good(port: int, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    with pytest.raises(OSError, match="not found"):
        config_of(NAME)
    assert asked == [{}]


def test_without_a_hub_what_is_kept_is_looked_at_and_the_error_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free}")
    with pytest.raises(ConnectionError, match=f"^{NAME} is not on this machine, and http://127.0.0.1:{free} does not") as error:
        targets.job_for(NAME)
    assert f"hf download {NAME} config.json" in str(error.value)
    assert asked == [{"local_files_only": True}]


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
