"""Names of tensors in a Hugging Face folder and in a model: which become which, by transformers' own rules."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .huggingface import is_pretrained

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTHING = r"(?!)"  # a pattern
Renamed: TypeAlias = Callable[[str, list[Any], list[Any]], tuple[str, str | None]]  # a name by renamings and converters


@dataclass(frozen=True)
class Recipe:
    """How tensors of one side become those of the other: one is renamed, or several are fused or split."""

    parts: tuple[str, ...]  # that it takes
    name: str  # of what it makes; of the first, where `make` makes several
    make: Callable[[Callable[[str], Tensor]], dict[str, Tensor]] | None = None  # given how to read; None: the one part as it is


def recipes_from_folder(model: nn.Module, names: Iterable[str]) -> list[Recipe]:
    """For the tensors of a folder, as transformers loads them into this model: it fuses experts, and renames what is older."""
    if not is_pretrained(model):
        return [Recipe((name,), name) for name in names]
    from transformers import conversion_mapping, core_model_loading

    known: Any = model.state_dict()
    prefix: Any = getattr(model, "base_model_prefix", None)
    changes = conversion_mapping.get_model_conversion_mapping(model)
    rename: Any = core_model_loading.rename_source_key

    def renamed(name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        target, pattern = rename(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # it is the model's own already
            target, pattern = rename(name, [], [], prefix, known)
        return target, pattern

    return _recipes(model, names, changes, renamed)


def recipes_to_folder(model: nn.Module, names: Iterable[str]) -> list[Recipe]:
    """The other way, as `save_pretrained` writes them."""
    from transformers import conversion_mapping, core_model_loading

    changes = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    changes = [each.reverse_transform() for each in changes[::-1] if not isinstance(each, core_model_loading.PrefixChange)]
    rename: Any = core_model_loading.rename_source_key
    options = {"reverse": True} if "reverse" in inspect.signature(rename).parameters else {}
    return _recipes(model, names, changes, lambda name, renamings, converters: rename(name, renamings, converters, **options))


def _recipes(model: Any, names: Iterable[str], changes: list[Any], renamed: Renamed) -> list[Recipe]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: list[Recipe] = []
    groups: dict[str, list[tuple[str, str]]] = {}  # by what is made of them: pattern and name of each
    for name in sorted(names, key=dot_natural_key):
        target, pattern = renamed(name, renamings, converters)
        if pattern is None:
            found.append(Recipe((name,), target))
        else:
            groups.setdefault(target, []).append((pattern, name))
    for target, parts in groups.items():

        def make(read: Callable[[str], Tensor], target: str = target, parts: list[tuple[str, str]] = parts) -> dict[str, Tensor]:
            converter: Any = copy.deepcopy(by_pattern[parts[0][0]])
            for pattern, name in parts:
                converter.add_tensor(target, name, pattern, lambda name=name: read(name))
            made = converter.convert(target, model=model, config=model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        found.append(Recipe(tuple(name for _, name in parts), target, make))
    return found


def ignored_names(model: Any, kind: Literal["missing", "unexpected"]) -> re.Pattern[str]:
    """Names that transformers does not speak of when they are missing in a folder, or in the model."""
    if not is_pretrained(model):
        return re.compile(NOTHING)
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected":  # buffers that older folders have, and that are now made by the model
        buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
        patterns |= {rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if name in buffers}
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or NOTHING)
