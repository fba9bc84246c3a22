"""Names of tensors in a Hugging Face folder and in a model: which become which, by transformers' own rules."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .huggingface import is_pretrained
from .huggingface_adapters import base_of, is_adapted, names_of

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTHING = r"(?!)"  # a pattern
Make: TypeAlias = "Callable[[Callable[[str], Tensor]], dict[str, Tensor]]"  # given how to read
Renamed: TypeAlias = Callable[[str, list[Any], list[Any]], tuple[str, str | None]]  # a name by renamings and converters


@dataclass(frozen=True)
class Recipe:
    """How tensors of one side become those of the other: one is renamed, or several are fused or split."""

    parts: tuple[str, ...]  # that it takes
    name: str  # of what it makes; of the first, where `make` makes several
    make: Make | None = None  # None: the one part as it is


def recipes_from_folder(model: nn.Module, names: Iterable[str]) -> list[Recipe]:
    """For the tensors of a folder, as transformers loads them into this model: it fuses experts, and renames what is older."""
    if not is_adapted(model):
        return _from_folder(model, names, model.state_dict())
    by_plain = names_of(model).by_plain
    found = []
    for recipe in _from_folder(base_of(model), names, by_plain):
        if recipe.make is None:
            found += [Recipe(recipe.parts, name) for name in by_plain.get(recipe.name, (recipe.name,))]
        else:
            found.append(Recipe(recipe.parts, by_plain.get(recipe.name, (recipe.name,))[0], _adapted(recipe.make, by_plain)))
    return found


def _adapted(make: Make, by_plain: Mapping[str, tuple[str, ...]]) -> Make:
    """Makes the same tensors under the names that they have since the model was adapted."""
    return lambda read: {name: made for plain, made in make(read).items() for name in by_plain.get(plain, (plain,))}


def _from_folder(model: Any, names: Iterable[str], known: Any) -> list[Recipe]:
    if not is_pretrained(model):
        return [Recipe((name,), name) for name in names]
    from transformers import conversion_mapping, core_model_loading

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


def ignored_names(model: Any, kind: Literal["missing", "unexpected"]) -> Callable[[str], bool]:
    """Whether transformers does not speak of a name when it is missing in a folder, or in the model. An adapter's own are in
    another folder, if in any."""
    base = base_of(model)
    patterns = set(getattr(base, f"_keys_to_ignore_on_load_{kind}", None) or ()) if is_pretrained(base) else set()
    if kind == "unexpected" and is_pretrained(base):  # buffers that older folders have, and that are now made by the model
        buffers = {name.rpartition(".")[2] for name, _ in base.named_buffers()}
        patterns |= {rf"(^|\.){name}$" for name in ("inv_freq", "position_ids") if name in buffers}
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns) or NOTHING)
    if kind == "unexpected" or base is model:
        return lambda name: ignored.search(name) is not None
    names = names_of(model)
    plain = names.plain
    return lambda name: name in names.own or ignored.search(plain.get(name, name)) is not None
