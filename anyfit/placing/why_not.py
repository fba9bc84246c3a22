"""Blocks that do not run as the plan says, each with its reason, which is said once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WhyNot:
    def __init__(self, instead: str) -> None:
        """`instead`: how such blocks run."""
        self._instead = instead
        self._unsaid: dict[str, str] = {}
        self.reasons: dict[str, str] = {}  # by block

    def stay_eager(self, reasons: Mapping[str, str]) -> None:
        """These blocks run otherwise from now on."""
        for name, reason in reasons.items():
            if self.is_of(name) and name not in self.reasons:
                self.reasons[name] = self._unsaid[name] = reason

    def is_of(self, name: str) -> bool:
        """Whether the plan wants it of this block."""
        raise NotImplementedError

    def news(self) -> list[str]:
        """What is to be said of them, once."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self._unsaid.items():
            by_reason.setdefault(reason, []).append(name)
        self._unsaid.clear()
        return [f"{_listed(names)} {self._instead}: {reason}" for reason, names in by_reason.items()]


def _listed(names: Sequence[str]) -> str:
    return f"block {names[0]!r} runs" if len(names) == 1 else f"blocks {names[0]!r} to {names[-1]!r} ({len(names)}) run"
