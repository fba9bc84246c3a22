"""PEFT's adapters: which parameters are theirs, under which names PEFT saves them, and what the others are called without them.

...q_proj.base_layer.weight               of the base: model.layers.0.self_attn.q_proj.weight in a folder
...q_proj.lora_A.default.weight           the adapter's own
...lm_head.modules_to_save.default.weight    a copy of the base's lm_head.weight, which is trained
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT = "default"  # PEFT's name of an adapter that was given none
CONFIG, SAVED = "adapter_config.json", "adapter_model.safetensors"
INDEPENDENT = (True, False, "gaussian", "orthogonal")  # ways to initialise LoRA that do not look at the base's weights


def is_adapted(model: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")  # which whoever adapted a model has imported
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: Any) -> Any:
    """What PEFT adapted, with the adapters in it; a model that it did not adapt is its own."""
    return model.get_base_model() if is_adapted(model) else model


def in_use(module: Any) -> Any:
    """The copy of a module that PEFT trains and calls in its place, where there is one."""
    wrapper: Any = sys.modules.get("peft.utils.other")
    if wrapper is None or not isinstance(module, wrapper.ModulesToSaveWrapper):
        return module
    copies = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.modules_to_save]
    return module.modules_to_save[copies[0]] if copies else module.original_module


@dataclass(frozen=True)
class Names:
    """The names of an adapted model's parameters and buffers."""

    by_plain: Mapping[str, tuple[str, ...]]  # those of each one of the base; several, where a copy of it is trained
    own: frozenset[str]  # of adapters

    @property
    def plain(self) -> dict[str, str]:
        """By name, what it is called in the base's own folder."""
        return {name: plain for plain, names in self.by_plain.items() for name in names}


def names_of(model: nn.Module) -> Names:
    base = base_of(model)
    prefix = next(name for name, each in model.named_modules(remove_duplicate=False) if each is base)
    found: dict[str, list[str]] = {}
    for plain, name in _walk(base, "", f"{prefix}." if prefix else ""):
        found.setdefault(plain, []).append(name)
    known = {name for names in found.values() for name in names}
    every = {name for name, _ in _tensors(model)}
    return Names({plain: tuple(names) for plain, names in found.items()}, frozenset(every - known))


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse, remove_duplicate=False)


def _walk(module: nn.Module, plain: str, name: str) -> Iterator[tuple[str, str]]:
    """(plain name, name) of all that is the base's: of a layer that PEFT put around another, only what is in that one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        yield from _walk(module.get_submodule("base_layer"), plain, f"{name}base_layer.")
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _walk(module.original_module, plain, f"{name}original_module.")
        for copied, each in getattr(module, "modules_to_save", {}).items():
            yield from _walk(each, plain, f"{name}modules_to_save.{copied}.")
        return
    for own, _ in _tensors(module, recurse=False):
        yield plain + own, name + own
    for own, child in module.named_children():
        yield from _walk(child, f"{plain}{own}.", f"{name}{own}.")


# ---------------------------------------------------------------------- as PEFT saves them


def saved_names(model: Any, adapter: str = DEFAULT) -> dict[str, str]:
    """By the name under which PEFT saves it, the model's own name of each tensor of an adapter."""
    import torch
    from peft import get_peft_model_state_dict

    tags = {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}
    name_of = {id(tag): name for name, tag in tags.items()}
    config = model.peft_config[adapter]
    source = config.base_model_name_or_path
    try:
        if source and not (Path(source) / "config.json").is_file():
            config.base_model_name_or_path = None  # PEFT would ask the hub whether the vocabulary was another there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that embeddings are saved as well, where they are adapted
            found = get_peft_model_state_dict(model, state_dict=tags, adapter_name=adapter)
    finally:
        config.base_model_name_or_path = source
    if any(id(tag) not in name_of for tag in found.values()):
        raise ValueError(f"PEFT's {config.peft_type.value} saves other tensors than the model has")
    return {saved: name_of[id(tag)] for saved, tag in found.items()}


def adapters_of(model: Any) -> dict[str, dict[str, Any]]:
    """By name of an adapter, what PEFT saves of it: its configuration as JSON, and the names of its tensors, saved and own; or
    why it is not known, for whoever wants to export it."""
    found: dict[str, dict[str, Any]] = {}
    for name in model.peft_config if is_adapted(model) else ():
        try:
            found[name] = {"config": _document(model, name), "names": saved_names(model, name)}
        except Exception as error:  # of PEFT's own code, for a kind that works in another way
            found[name] = {"config": {}, "names": {}, "unknown": f"{type(error).__name__}: {error}"}
    return found


def _document(model: Any, adapter: str) -> dict[str, Any]:
    """What PEFT's `save_pretrained` writes as adapter_config.json."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = base_of(model)
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    config.inference_mode = True
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        document: dict[str, Any] = json.loads((Path(folder) / CONFIG).read_text())
    return document


# ---------------------------------------------------------------------- given to a job


def lora_config(rank: int) -> Any:
    """LoRA of this rank on every linear layer but the head: what --lora stands for."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise ImportError("--lora needs PEFT: pip install 'anyfit[peft]'") from None
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def adapter_config(given: Any) -> Any:
    """A configuration of PEFT to train with: as it is given, or that of a folder with a saved adapter."""
    try:
        import peft
    except ImportError:
        raise ImportError("adapters need peft: pip install 'anyfit[peft]'") from None
    if isinstance(given, peft.PeftConfig):
        return given
    if not isinstance(given, str | Path):
        raise TypeError(
            f"adapter= takes a configuration of PEFT, such as peft.LoraConfig(r=16), or a folder, got {type(given).__name__}"
        )
    if not (Path(given) / CONFIG).is_file():
        raise FileNotFoundError(f"{given} holds no {CONFIG}; PEFT's model.save_pretrained and anyfit export write one")
    config = peft.PeftConfig.from_pretrained(str(given))
    config.inference_mode = False  # else nothing would be trained
    config.base_model_name_or_path = None  # the job says which
    return config


def refuse_dependent(model: Any) -> None:
    """Raises for an adapter that begins with what its base's weights are, or changes them: they are not there when it is made."""
    for name, config in model.peft_config.items():
        way = getattr(config, "init_lora_weights", True)
        if (way.lower() if isinstance(way, str) else way) not in INDEPENDENT:
            raise ValueError(f"init_lora_weights={way!r} of adapter {name!r} {MADE_OF_WEIGHTS}")


MADE_OF_WEIGHTS = (
    "looks at the base's weights, which a run reads only after the model is made; make it with them: "
    "Job(model=peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config), ...), without weights="
)
