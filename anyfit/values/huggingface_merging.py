"""PEFT's adapters merged into their base: which tensors of an adapted model make those of the plain one, layer by layer.

Each layer that is adapted is merged by PEFT's own code, in fp32, from its tensors alone: one layer is in memory at a time.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .huggingface_adapters import CONFIG, Names, names_of
from .huggingface_names import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

BY_PEFT = "merge it by PEFT itself: with run.weights() as model: copy.deepcopy(model).merge_and_unload().save_pretrained(folder)"


def merging_recipes(base: nn.Module | None, facts: Mapping[str, Any]) -> tuple[list[Recipe], dict[str, str]]:
    """What makes the tensors of the plain model of those in a checkpoint; and by plain name, that of the tensor it was before.
    `base` is on the meta device."""
    names: Mapping[str, str] = facts["names"]
    is_known = base is not None and not any("unknown" in each for each in facts["adapters"].values())
    model = None if base is None or not is_known else _adapted(base, facts["adapters"])
    if model is None or set(model.state_dict()) != set(names):
        raise ValueError(f"the adapted model is not one that transformers and PEFT make of its configurations; {BY_PEFT}")
    of_model = names_of(model)
    layers = _adapted_layers(model)
    beyond = next((name for name in of_model.own if not any(name.startswith(f"{path}.") for path in layers)), None)
    if beyond is not None:
        raise ValueError(f"{beyond} is of an adapter that is no part of a layer, and cannot be merged into one; {BY_PEFT}")
    found, before = list[Recipe](), dict[str, str]()
    for path, layer in layers.items():
        inside = {name: plain for name, plain in of_model.plain.items() if name.startswith(f"{path}.")}
        if not inside:
            raise ValueError(f"{path} shares its base with another module, and is not merged; {BY_PEFT}")
        _refuse_tied(path, inside, names)
        parts = tuple(f"{path}.{own}" for own in layer.state_dict())
        found.append(Recipe(parts, next(iter(inside.values())), functools.partial(_merged, layer, path, inside, facts["active"])))
        before |= {plain: name for name, plain in inside.items()}
    others = {plain: _used(plain, of_model, facts["active"]) for plain in of_model.by_plain.keys() - before.keys()}
    others = {plain: name for plain, name in others.items() if name in names}  # not buffers that nobody saves
    return [*found, *(Recipe((name,), plain) for plain, name in others.items())], before | others


def _adapted(base: nn.Module, adapters: Mapping[str, Any]) -> Any:
    import peft
    import torch

    model: Any = None
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT said it when the model was made
        for name, adapter in adapters.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / CONFIG).write_text(json.dumps(adapter["config"]))
                config: Any = peft.PeftConfig.from_pretrained(folder)
            config.base_model_name_or_path = None
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = False  # others come from the checkpoint
            if model is None:
                model = peft.get_peft_model(base, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    return model


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """By path, the layers that PEFT put around others: the outermost, where one is around another."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def _merged(
    layer: nn.Module, path: str, inside: Mapping[str, str], active: Sequence[str], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The tensors of the layer's base with its adapters in them, by their plain names."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    layer = copy.deepcopy(layer)
    values = {own: read(f"{path}.{own}") for own in layer.state_dict()}
    values = {own: each.float() if each.is_floating_point() else each for own, each in values.items()}
    layer.load_state_dict(values, assign=True)
    with torch.no_grad():
        for each in reversed(list(layer.modules())):  # the innermost first
            if isinstance(each, BaseTunerLayer):
                each.merge(adapter_names=list(active))
    state = layer.state_dict()
    return {plain: state[name.removeprefix(f"{path}.")] for name, plain in inside.items()}


def _refuse_tied(path: str, inside: Mapping[str, str], names: Mapping[str, str]) -> None:
    stored = {names[name]: name for name in inside if name in names}
    for other, same in names.items():
        if same in stored and not other.startswith(f"{path}."):
            raise ValueError(
                f"{stored[same]} is adapted and tied to {other}: merging would change both; train with tie_word_embeddings=False "
                "in the configuration to merge, or export the adapter"
            )


def _used(plain: str, of_model: Names, active: Sequence[str]) -> str:
    """The name of what the model computes with: the trained copy of a module, where there is one."""
    names = of_model.by_plain[plain]
    return next((name for name in names if any(f".modules_to_save.{each}." in name for each in active)), names[0])
