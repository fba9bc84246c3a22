"""Plans that an earlier version wrote, as JSON: what they do not say is added, so that they are read as ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def up_to_date(document: Mapping[str, Any]) -> Mapping[str, Any]:
    if document.get("version") == 2:  # before losses were looked at
        document = {**document, "version": 3, "loss": None, "rehearsed": False}
    if document.get("version") == 3:  # before clipped steps were forecast
        forecast = document.get("forecast")
        forecast = {**forecast, "clipping": None} if isinstance(forecast, Mapping) else forecast
        document = {**document, "version": 4, "forecast": forecast}
    if document.get("version") == 4:  # before blocks were replayed
        document = {**document, "version": 5, "stages": _with(document.get("stages"), {"replayed": []})}
    if document.get("version") == 5:  # before jobs were described, and trainable parameters counted
        document = {"trainable": None, "described": "", **document, "version": 6}
    if document.get("version") == 6:  # before a plan knew the kind of its device
        document = {"device_kind": None, "assumes_host": False, **document, "version": 7}
    if document.get("version") == 7:  # before blocks were cut over a tensor axis
        document = {**document, "version": 8, "stages": _with(document.get("stages"), {"cut": {}, "tables": []})}
    if document.get("version") == 8:  # before what is written to a disk was forecast, and a plan had a picture of its step
        forecast = document.get("forecast")
        forecast = {"wear": None, **forecast} if isinstance(forecast, Mapping) else forecast
        document = {"picture": None, **document, "version": 9, "forecast": forecast}
    return document


def _with(stages: Any, more: Mapping[str, Any]) -> Any:
    if not isinstance(stages, list):
        return stages
    return [{**more, **each} if isinstance(each, Mapping) else each for each in stages]
