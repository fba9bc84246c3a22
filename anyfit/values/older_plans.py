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
        stages = document.get("stages")
        known = [{"replayed": [], **each} if isinstance(each, Mapping) else each for each in stages or ()]
        document = {**document, "version": 5, "stages": known if isinstance(stages, list) else stages}
    if document.get("version") == 5:  # before jobs were described, and trainable parameters counted
        document = {"trainable": None, "described": "", **document, "version": 6}
    return document
