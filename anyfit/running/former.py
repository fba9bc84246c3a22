"""Checkpoints of version 2, as this version reads its own: `upgraded(...)` of what they hold besides tensors.

They have weights, buffers, optimizer, scheduler, data position and the random states of torch, the GPU and Python. They do not
say what a run was begun with, so nothing that is given now is compared with that; and they hold nothing else that changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = 2
SAYS = (
    f"it is of version {VERSION}, which holds weights, buffers, optimizer, scheduler, data position and random state, and "
    "nothing else: attributes of modules, their get_extra_state and numpy's random state are those of the start"
)


def nothing_else() -> dict[str, Any]:
    """Of one rank, that nothing besides has changed."""
    return {"changed": [], "gone": [], "lost": {}, "modules": {}, "buffers": {"changed": {}, "gone": [], "own": {}}}


def upgraded(document: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Its progress. `now` are the settings of the run that takes it up, at its start."""
    found = {key: _upgraded(value) for key, value in document.items()}
    mine = [*now["groups"], *({"names": [], "start": {}} for _ in found["groups"][len(now["groups"]) :])]
    return {
        **found,
        "optimizer": now["optimizer"] if now["optimizer"].endswith(f".{found['optimizer']}") else found["optimizer"],
        "groups": [
            {"names": each["names"], "settings": saved, "start": each["start"]}
            for each, saved in zip(mine, found["groups"], strict=False)
        ],
        "scheduler_start": now["scheduler_start"],
        "scheduler_kind": now["scheduler_kind"],
        "job": now["job"],
        "loader_order": None,
        "random": [{**each, "numpy": None} for each in found["random"]],
    }


def _upgraded(value: Any) -> Any:
    """Counters had a word of their own."""
    if isinstance(value, list):
        return [_upgraded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if {*value} == {"!counter"}:
        return {"!dict": _upgraded(value["!counter"]), "class": "collections.Counter"}
    return {key: _upgraded(item) for key, item in value.items()}
