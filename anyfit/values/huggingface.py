"""Hugging Face models as jobs: which head a configuration trains with, and what its batches look like.

Nothing here knows a model by name: the head comes from transformers' own tables, the batch from what the model says it reads.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


IMAGE_SIDE = 224  # where a configuration does not say
PATIENCE_SECONDS = 3.0  # to wait for a hub that may not answer
# Of all these the batches can be imagined: what they read is in their configuration, and labels are tokens or one class a sample.
HEADS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification")
ENCODER_DECODER_HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")


def config_of(source: Any) -> Any:
    """The configuration behind a model, a folder, a name or itself."""
    try:
        import transformers
    except ImportError:
        raise ImportError("Hugging Face models need transformers: pip install 'anyfit[hf]'") from None
    import torch

    if isinstance(source, torch.nn.Module):
        if getattr(source, "config", None) is None:
            raise TypeError(f"{type(source).__name__} has no Hugging Face config; use anyfit.Job for a plain module")
        return source.config
    if isinstance(source, transformers.PretrainedConfig):
        return copy.deepcopy(source)
    if not isinstance(source, str | Path):
        raise TypeError(f"expected a Hugging Face configuration, folder, name or model, got {type(source).__name__}")
    if source in transformers.CONFIG_MAPPING and not Path(source).exists():
        return transformers.AutoConfig.for_model(source)  # a kind of model: its default configuration
    _refuse_without_config(Path(source))
    try:
        if Path(source).exists() or _hub_answers():
            return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ConnectionError:
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code" not in str(error):
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{source} holds no configuration that transformers can read: {first}") from error
        raise ValueError(
            f"{source} comes with code of its own, which is not run; where you trust it, make the model yourself and give that: "
            f"Job.from_huggingface(AutoModelForCausalLM.from_pretrained({str(source)!r}, trust_remote_code=True), ...)"
        ) from error
    try:  # what an earlier lookup left; transformers itself would ask a hub that does not answer again and again
        return transformers.AutoConfig.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise ConnectionError(
            f"{source} is not on this machine, and {_hub()} does not answer; give a folder or config.json, a model type such as "
            f"llama, or fetch it where there is a network: hf download {source} config.json"
        ) from error


def _refuse_without_config(folder: Path) -> None:
    """A folder that is no model's: transformers would miss a model_type in a file that is not there."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        run = folder.parent if (folder.parent / "checkpoints").is_dir() else "RUN"
        merge = f"anyfit export --merge {run} merged"
        raise FileNotFoundError(f"{folder} holds an adapter alone, and no config.json; merge it into its base first: {merge}")
    lacks = "has no config.json" if any(folder.iterdir()) else "is empty"
    raise FileNotFoundError(
        f"{folder} {lacks}; a Hugging Face folder holds config.json, weights as safetensors and a tokenizer: "
        f"hf download ORGANISATION/MODEL --local-dir {folder}"
    )


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _hub_answers() -> bool:
    """Whether the Hugging Face hub, or the proxy on the way to it, takes a connection."""
    place = urllib.parse.urlsplit(_hub())
    proxy = urllib.request.getproxies().get(place.scheme)
    if proxy is not None and not urllib.request.proxy_bypass(place.hostname or ""):
        place = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = place.port or (443 if place.scheme == "https" else 80)
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((place.hostname, port), PATIENCE_SECONDS):
            answered.set()

    trying = threading.Thread(target=connect, daemon=True)  # since looking up a name has no time limit of its own
    trying.start()
    trying.join(PATIENCE_SECONDS)
    return answered.is_set()


@dataclass(frozen=True)
class Factory:
    """Makes a model from its configuration, and adapts it. The cache that only generation needs is off while it trains."""

    config: Any
    made_by: Any  # a class of transformers
    adapter: Any = None  # a configuration of PEFT
    from_nothing: str | None = None  # what a run says when it starts, where there are no weights to start from

    def __call__(self) -> nn.Module:
        model: Any = self.made_by(copy.deepcopy(self.config))
        without_cache(model)
        if self.adapter is not None:
            import peft

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT sees itself how a layer lays out its weights
                model = peft.get_peft_model(model, copy.deepcopy(self.adapter))
        made: nn.Module = model.train()
        return made


def factory(config: Any) -> Factory:
    """Makes the model with the head it is trained with: the one the configuration names, else the first that exists."""
    import transformers

    config.dtype = None  # of weights on a hub; here the run's precision decides
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"the weights of this {type(config).__name__} are quantised, and cannot be trained as they are; take the folder that "
            "they were made from, or set config.quantization_config to None to train from nothing"
        )
    named = (getattr(config, "architectures", None) or [None])[0]
    made_by: Any = getattr(transformers, str(named), None)
    if isinstance(made_by, type) and issubclass(made_by, transformers.PreTrainedModel):
        return Factory(config, made_by)
    heads = (*(ENCODER_DECODER_HEADS if getattr(config, "is_encoder_decoder", False) else ()), *HEADS)
    for head in heads:
        if classes := _classes(getattr(transformers, head), config):
            return Factory(config, classes[0])
    raise ValueError(
        f"transformers trains {type(config).__name__} with none of {', '.join(heads)}; "
        "set config.architectures, or build the model yourself and use anyfit.Job"
    )


def _classes(head: Any, config: Any) -> tuple[type, ...]:
    """The classes that an Auto class may make of a configuration, the usual one first; none where it knows no such model."""
    found = head._model_mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def without_cache(model: Any) -> None:
    """Turns off the cache that only generation needs; an export has it as the source had."""
    config = model.config
    before = getattr(config, "use_cache", None)
    if before is not False or not hasattr(model, "use_cache_of_source"):
        model.use_cache_of_source = before
    config.use_cache = False


def pretrained_of(model: nn.Module) -> Any:
    """What transformers made of a model that wraps it, or the model itself."""
    return next((each for each in model.modules() if is_pretrained(each)), model)


def refuse_to_imagine(config: Any, made_by: type) -> None:
    """Of a head whose labels have another form, or none."""
    import transformers

    classes = tuple(made for head in (*HEADS, *ENCODER_DECODER_HEADS) for made in _classes(getattr(transformers, head), config))
    is_single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    is_classifier = "ImageClassification" in made_by.__name__
    if not issubclass(made_by, classes) or (is_classifier and (not is_single or getattr(config, "num_labels", 2) < 2)):
        raise ValueError(
            f"what {made_by.__name__} reads and what its labels are cannot be told from its configuration: give sample=, a batch "
            "like those to come"
        )


def imagined_sample(config: Any, batch_size: int, length: int | None) -> dict[str, Tensor]:
    """A batch of the right shapes. Its values are drawn: only a real run sees them, and one whose tokens are all alike would
    send them all to the same experts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    reads = _main_input(config)
    if reads == "pixel_values":
        side = getattr(config, "image_size", None) or IMAGE_SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        pixels = torch.randn(batch_size, getattr(config, "num_channels", 3), height, width, generator=generator)
        return {"pixel_values": pixels, "labels": torch.zeros(batch_size, dtype=torch.long)}
    if length is None:
        raise ValueError(f"{type(config).__name__} handles text: give length=, the tokens of a sample")
    longest = longest_sample(config)
    if longest is not None and length > longest:
        raise ValueError(f"length {length} is more than the {longest} positions of {type(config).__name__}")
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or 1
    tokens = torch.randint(vocabulary, (batch_size, length), generator=generator)
    if reads == "input_features":
        features = torch.randn(batch_size, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": features, "labels": tokens}
    if reads != "input_ids":
        raise ValueError(f"{type(config).__name__} reads {reads!r}: give sample=, a batch like those to come")
    sample = {"input_ids": tokens, "labels": tokens.clone()}
    if getattr(config, "is_encoder_decoder", False):
        sample["decoder_input_ids"] = tokens.clone()
    return sample


def reads_text(config: Any) -> bool:
    """Whether a sample has a length in tokens; images have their own size."""
    return _main_input(config) != "pixel_values"


def longest_sample(config: Any) -> int | None:
    """The most tokens a sample may have; None where the model sets no limit."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)


def _main_input(config: Any) -> str:
    import transformers

    made: Any = _classes(transformers.AutoModel, config)[0]
    return str(made.main_input_name)


def is_pretrained(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # which whoever made such a model has imported
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def description(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a transformers model as JSON, as `save_pretrained` writes it; None for any other model."""
    if not is_pretrained(model):
        return None
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    source = getattr(model, "use_cache_of_source", config)
    if source is not config:  # turned off for training
        config.use_cache = source
    document: dict[str, Any] = json.loads(config.to_json_string())
    if document.get("use_cache", 0) is None:
        del document["use_cache"]
    return document
