"""Weights: where a run's first weights come from, and Match: what of a model a folder of them has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Weights:
    """A folder of safetensors, as transformers' `save_pretrained` writes it, or the part of it that patterns choose.

    folder    with model.safetensors, or several files and their model.safetensors.index.json
    only      patterns, such as "*.layers.*", of the model's names that are taken from the folder; all where none is given
    ignore    patterns of names, of the model or in the folder, that are left alone
    rename    names in the folder to the model's, with at most one * in each: {"backbone.*": "model.*"}
    adapter   a folder as PEFT's `save_pretrained` writes it, with the adapter of a PeftModel; None: PEFT initialises it

    A name that is missing in the folder, or that the model has not, is an error; with `only` or `ignore` it is shown in a table,
    and what is not taken from the folder is initialised as the model does it.
    """

    folder: str | Path
    only: str | tuple[str, ...] = ()
    ignore: str | tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    adapter: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("only", "ignore"):
            given = getattr(self, name)
            patterns = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(each, str) and each for each in patterns):
                raise TypeError(f'Weights({name}=) takes a pattern such as "*.layers.*", or several, got {given!r}')
            object.__setattr__(self, name, patterns)
        for old, new in self.rename.items():
            if old.count("*") > 1 or old.count("*") != new.count("*"):
                raise ValueError(f"Weights(rename=) takes at most one *, the same in both: {old!r} to {new!r}")

    @classmethod
    def of(cls, given: Weights | str | Path) -> Weights:
        return given if isinstance(given, Weights) else cls(given)

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def is_partial(self) -> bool:
        return bool(self.only or self.ignore)

    def takes(self, name: str) -> bool:
        """Whether a parameter or buffer of the model is to come from the folder."""
        return (not self.only or _fits(name, self.only)) and not _fits(name, self.ignore)

    def ignores(self, name: str) -> bool:
        return _fits(name, self.ignore)

    def renamed(self, name: str) -> str:
        """What a name in the folder is in the model, before anything that transformers knows of it.

        >>> Weights("f", rename={"backbone.*": "model.*"}).renamed("backbone.norm.weight")
        'model.norm.weight'
        """
        for old, new in self.rename.items():
            before, star, after = old.partition("*")
            if not star:
                if name == old:
                    return new
            elif name.startswith(before) and name.endswith(after) and len(name) >= len(before) + len(after):
                return new.replace("*", name[len(before) : len(name) - len(after)])
        return name

    def refuse_idle_patterns(self, names: set[str]) -> None:
        """A pattern that fits no name, of the model or in the folder, is a mistake."""
        for option in ("only", "ignore"):
            for pattern in getattr(self, option):
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(f"Weights({option}={pattern!r}) fits no name of the model or in {self.folder}")


def _fits(name: str, patterns: str | tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Match:
    """The names of a model beside those in a folder."""

    folder: str
    matched: tuple[str, ...]  # of the model, that come from the folder
    missing: tuple[str, ...]  # of the model, that should come from the folder and are not in it
    left_out: tuple[str, ...]  # of the model, by a pattern
    unexpected: tuple[str, ...]  # in the folder, that the model has not
    digest: str  # of what the folder says that it holds
    is_partial: bool  # patterns chose

    @property
    def rows(self) -> list[tuple[str, str, int]]:
        """(what, name, how many), names that differ in numbers alone as one."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "left out": self.left_out, "matched": self.matched}
        return [
            (kind, name, count)
            for kind, names in kinds.items()
            for name, count in Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", each) for each in names).items()
        ]

    @property
    def counted(self) -> str:
        kinds = (self.matched, "matched"), (self.missing, "missing"), (self.unexpected, "unexpected"), (self.left_out, "left out")
        return ", ".join(f"{len(names)} {kind}" for names, kind in kinds)

    def __str__(self) -> str:
        lines = [f"{kind:<10}  {count:>5}  {name}" for kind, name, count in self.rows if kind != "matched"]
        return "\n".join([f"{self.folder}: {self.counted}", *lines])
