"""What `Job.from_huggingface` gives to Job: a model by its configuration, weights of its folder, its loss, a batch to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .huggingface import Factory, config_of, factory, imagined_sample, pretrained_of, refuse_to_imagine, without_cache
from .huggingface_adapters import adapter_config
from .huggingface_loss import loss
from .tensor_files import holds_weights, without_pickles
from .weights import Weights

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def arguments(
    source: Any,
    batch_size: int,
    length: int | None,
    optimizer: Callable[[nn.Module], Optimizer] | None,
    adapter: Any,
    options: dict[str, Any],
) -> dict[str, Any]:
    """All but the batch size."""
    import torch

    config = config_of(source)
    model: Any = source if isinstance(source, torch.nn.Module) else factory(config)
    if "weights" not in options and isinstance(source, str | Path) and holds_weights(Path(source)):
        options["weights"] = without_pickles(source)  # refused now, and not when the run is planned
    if adapter is not None:
        model = _adapted(model, adapter, source, options)
    if model is not source and "weights" not in options:
        named = source if isinstance(source, str | Path) else type(config).__name__
        model = replace(model, from_nothing=f"{named} is a configuration without weights: training starts from nothing")
    if options.get("sample") is None:
        refuse_to_imagine(config, type(pretrained_of(model)) if model is source else model.made_by)
        options["sample"] = imagined_sample(config, batch_size, length)
    if model is source:
        without_cache(pretrained_of(model))
    usual = {"model": model, "loss": loss, "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4)}
    return usual | ({} if optimizer is None else {"optimizer": optimizer}) | options


def _adapted(model: Any, adapter: Any, source: Any, options: dict[str, Any]) -> Factory:
    """The factory with an adapter, whose weights are an option as well where it has been saved."""
    if not isinstance(model, Factory):
        raise ValueError("adapter= is for a configuration or folder; adapt a model by peft.get_peft_model(model, config)")
    if isinstance(adapter, str | Path):
        if options.get("weights") is None:
            raise ValueError(f"adapter={str(adapter)!r} adapts weights, and {source} has none; give the folder of its base")
        options["weights"] = replace(Weights.of(options["weights"]), adapter=adapter)
    return replace(model, adapter=adapter_config(adapter))
