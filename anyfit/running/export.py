"""A checkpoint's weights as a folder that `from_pretrained` loads: safetensors of a limited size, their index, a configuration.

Tensors go from the checkpoint to their file one by one, so that only one is in memory; those that transformers fused from several
are split again, one layer's at a time. A model that is not transformers' has no configuration, and the names of its `state_dict`.
Of a model that PEFT adapted, the adapters are written as PEFT does, or the base with them merged.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anyfit.kernels.split import split
from anyfit.placing.weights import Last
from anyfit.values.huggingface import description, factory
from anyfit.values.huggingface_adapters import CONFIG, DEFAULT, SAVED, adapters_of, base_of
from anyfit.values.huggingface_merging import merging_recipes
from anyfit.values.huggingface_names import Recipe, recipes_to_folder
from anyfit.values.job import Job
from anyfit.values.tensor_files import INDEX, SINGLE, header_of
from anyfit.values.weights import Weights

from .files import DTYPES

Dtype = Literal["bf16", "fp32"]
SHARD_BYTES = 5 * 10**9  # as transformers had it
# What tells of a model's words and ways, and not of its weights.
BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Exported:
    tensors: int
    bytes: int
    files: int
    beside: tuple[str, ...]  # of the folder that the run started from


def facts_of(model: nn.Module, job: Job) -> dict[str, Any]:
    """What an export needs to know of a run's model, as JSON; checkpoints hold it."""
    first: dict[int, str] = {id(each): name for name, each in (*model.named_buffers(), *model.named_parameters())}
    tensors = model.state_dict(keep_vars=True).items()
    return {
        "names": {name: first[id(each)] for name, each in tensors if id(each) in first},  # as they are stored
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in job.dtypes(model).items()},  # of the run
        "config": description(base_of(model)),
        "adapters": adapters_of(model),
        "active": list(getattr(model, "active_adapters", ())) if base_of(model) is not model else [],
        "source": None if job.weights is None else str(Weights.of(job.weights).path.absolute()),
    }


def export(
    folder: Path, output: Path, shard_bytes: int = SHARD_BYTES, dtype: Dtype | None = None, *, replaces: bool = False
) -> Exported:
    """Writes the weights of a checkpoint to a new folder, in the dtypes of the run, or all of them in one. Of a model that PEFT
    adapted, these are the adapters."""
    tensors, facts = _opened(folder)
    for name, adapter in facts.get("adapters", {}).items():
        if "unknown" in adapter:
            raise ValueError(
                f"how PEFT saves the adapter {name!r} is not known ({adapter['unknown']}); save it by PEFT itself: "
                "with run.weights() as model: model.save_pretrained(folder)"
            )
    write = _write_adapters if facts.get("adapters") else _write
    return _to_folder(output, lambda aside: write(aside, _in_dtypes(tensors, facts, dtype), facts, shard_bytes), replaces)


def export_merged(folder: Path, output: Path, shard_bytes: int = SHARD_BYTES, dtype: Dtype | None = None) -> Exported:
    """The same of a model that PEFT adapted, as a plain one: its active adapters are added to the weights of their layers."""
    tensors, facts = _opened(folder)
    if not facts.get("adapters"):
        raise ValueError(f"{folder} is of a model that PEFT has not adapted: there is nothing to merge; export it as it is")
    config, names, dtypes = facts["config"], facts["names"], facts["dtypes"]
    recipes, before = merging_recipes(None if config is None else _without_weights(config), facts)
    stored = {plain: names[name] for plain, name in before.items()}
    held = {plain: dtypes[name] for plain, name in stored.items() if name in dtypes}
    made = _made(recipes, {name: tensors[each] for name, each in names.items()})
    found = {plain: _in_dtype(made[plain], _wanted(plain, made[plain], held, dtype)) for plain in stored}
    return _to_folder(output, lambda aside: _write(aside, found, facts | {"names": stored}, shard_bytes))


def _to_folder(output: Path, write: Callable[[Path], Exported], replaces: bool = False) -> Exported:
    if output.exists() and not (replaces or (output.is_dir() and not any(output.iterdir()))):
        raise FileExistsError(f"{output} exists; choose a new folder, or remove it")
    aside = output.absolute().with_name(f".{output.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        done = write(aside)
        if output.exists():
            shutil.rmtree(output)
        aside.rename(output)
    except OSError as error:
        raise OSError(f"could not write weights to {output}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return done


def _opened(folder: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a checkpoint, and what it knows of its model: nothing, where it is older."""
    from . import checkpoint

    opened = checkpoint.open(folder)
    opened.verify()
    weights, read = opened.weights.items(), opened.read
    tensors = {name: Stored(each.dtype, each.shape, functools.partial(read, name)) for name, each in weights}
    return tensors, _checked(opened.document(checkpoint.PROGRESS).get("model") or {}, tensors, opened.folder)


def _checked(facts: Any, tensors: Mapping[str, Stored], folder: Path) -> dict[str, Any]:
    """Facts that are what `facts_of` gives; or an error."""
    try:
        names, dtypes = facts.get("names", {}), facts.get("dtypes", {})
        is_fine = all(stored in tensors and name.isprintable() for name, stored in names.items())
        is_fine &= all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in dtypes.values())
        is_fine &= isinstance(facts.get("config"), dict | None) and isinstance(facts.get("source"), str | None)
        for name, adapter in facts.get("adapters", {}).items():
            is_fine &= name.isprintable() and not set(name) & set("./\\:") and isinstance(adapter["config"], dict)
            is_fine &= all(saved.isprintable() and own in names for saved, own in adapter["names"].items())
        is_fine &= set(facts.get("active", [])) <= set(facts.get("adapters", {}))
    except (AttributeError, KeyError, TypeError):
        is_fine = False
    if not is_fine:
        raise ValueError(f"{folder} does not describe its model as a checkpoint does; take another checkpoint")
    return facts  # type: ignore[no-any-return]


def _in_dtypes(tensors: Mapping[str, Stored], facts: Mapping[str, Any], dtype: str | None) -> Mapping[str, Stored]:
    """By the model's names, in the dtypes that are to be written."""
    names: Mapping[str, str] = facts.get("names") or {name: name for name in tensors}
    held: Mapping[str, str] = facts.get("dtypes") or {}
    return {name: _in_dtype(tensors[stored], _wanted(stored, tensors[stored], held, dtype)) for name, stored in names.items()}


def _write(aside: Path, found: Mapping[str, Stored], facts: Mapping[str, Any], shard_bytes: int) -> Exported:
    config = facts.get("config")
    if config is not None:
        found = _as_pretrained(config, facts["names"], found)
        _write_config(aside, config, found.values())
    shards = _shards(found, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        _write_tensors(aside / file, shard)
    total = sum(each.bytes for each in found.values())
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Exported(len(found), total, len(files), _copy_beside(facts.get("source"), aside))


def _write_adapters(aside: Path, found: Mapping[str, Stored], facts: Mapping[str, Any], _shard_bytes: int) -> Exported:
    """As PEFT's `save_pretrained`: the adapter of no name in the folder itself, others in folders in it, each in one file."""
    written = list[Stored]()
    for name, adapter in facts["adapters"].items():
        inside = aside if name == DEFAULT else aside / name
        inside.mkdir(exist_ok=True)
        tensors = {saved: found[own] for saved, own in adapter["names"].items()}
        _write_tensors(inside / SAVED, tensors)
        (inside / CONFIG).write_text(json.dumps(adapter["config"], indent=2, sort_keys=True))
        written += tensors.values()
    total, beside = sum(each.bytes for each in written), _copy_beside(facts.get("source"), aside)
    return Exported(len(written), total, len(facts["adapters"]), beside)


def _wanted(name: str, tensor: Stored, held: Mapping[str, str], dtype: str | None) -> torch.dtype:
    """For a parameter the dtype asked for, or the run's; for a buffer its own."""
    if name not in held or not tensor.dtype.is_floating_point:
        return tensor.dtype
    found: torch.dtype = getattr(torch, held[name])
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype or "", found)


def _in_dtype(tensor: Stored, dtype: torch.dtype) -> Stored:
    if dtype == tensor.dtype:
        return tensor

    def read() -> Tensor:
        values = tensor.read()
        if dtype != torch.bfloat16 or values.dtype != torch.float32:
            return values.to(dtype)
        high = torch.empty_like(values, dtype=torch.bfloat16)  # the weights that the run computes with, of their masters
        split(values, high, torch.empty_like(values, dtype=torch.int16))
        return high

    return Stored(dtype, tensor.shape, read)


def _as_pretrained(config: Mapping[str, Any], names: Mapping[str, str], tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """The tensors under the names, and in the parts, of `save_pretrained`."""
    model = _without_weights(config)
    if model is None or set(model.state_dict()) != set(names):
        return tensors  # a class of the user's own: it knows its own names
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    once: dict[str, list[str]] = {}
    for name, stored in names.items():
        once.setdefault(stored, []).append(name)
    kept = [next((name for name in same if name not in tied), same[0]) for same in once.values()]
    return _made(recipes_to_folder(model, kept), tensors)


def _made(recipes: Iterable[Recipe], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """What recipes make of tensors, each when it is read."""
    made: dict[str, Stored] = {}
    last = Last()
    for recipe in recipes:
        if recipe.make is None:
            made[recipe.name] = tensors[recipe.parts[0]]
            continue
        shapes = recipe.make(lambda name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta"))
        make = functools.partial(recipe.make, lambda name: tensors[name].read())
        for name, shape in shapes.items():
            made[name] = Stored(shape.dtype, tuple(shape.shape), functools.partial(last.one_of, make, name))
    return made


def _without_weights(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a configuration, on the meta device; None where transformers has no such model."""
    try:
        import transformers
    except ImportError:
        raise ImportError("the checkpoint is of a Hugging Face model: pip install 'anyfit[hf]'") from None
    kind, named = config.get("model_type"), (config.get("architectures") or [""])[0]
    if kind not in transformers.CONFIG_MAPPING or not hasattr(transformers, named):
        return None
    with torch.device("meta"):
        return factory(transformers.CONFIG_MAPPING[kind].from_dict(dict(config)))()


def _write_config(aside: Path, config: Mapping[str, Any], tensors: Iterable[Stored]) -> None:
    floating = [each for each in tensors if each.dtype.is_floating_point]
    most = max({each.dtype for each in floating}, key=lambda dtype: sum(each.bytes for each in floating if each.dtype == dtype))
    document = {**config, "dtype": str(most).removeprefix("torch.")}
    (aside / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _copy_beside(source: str | None, aside: Path) -> tuple[str, ...]:
    if source is None:
        return ()
    found = [name for name in BESIDE if (Path(source) / name).is_file()]
    for name in found:
        shutil.copyfile(Path(source) / name, aside / name)
    return tuple(found)


def _shards(tensors: Mapping[str, Stored], most: int) -> Sequence[Mapping[str, Stored]]:
    """Tensors in their order, in files of at most so many bytes; a larger tensor has its own file."""
    shards: list[dict[str, Stored]] = [{}]
    taken = 0
    for name, tensor in tensors.items():
        if shards[-1] and taken + tensor.bytes > most:
            shards.append({})
            taken = 0
        shards[-1][name] = tensor
        taken += tensor.bytes
    return shards


def _write_tensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each starts at a multiple of its size
    with file.open("wb") as out:
        out.write(header_of((name, DTYPES[each.dtype], each.shape) for name, each in ordered))
        for name, each in ordered:
            flat = each.read().contiguous().reshape(-1)
            assert flat.dtype == each.dtype, name
            assert flat.nbytes == each.bytes, name
            out.write(flat.view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
