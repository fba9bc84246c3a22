"""The loss of Hugging Face models: their own, as (sum, weight) where it is a mean, with logits in slices where they allow it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .huggingface_adapters import base_of, in_use

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from anyfit.losses import Means

    from .job import LossValue

# Options of configurations that change logits on their way to the loss. Caps are known; with any other the loss stays the
# model's own.
CAPS = ("final_logit_softcapping", "logits_soft_cap")
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_logit_soft_cap", "unpadded_vocab_size")
_unsliced: set[type] = set()  # classes whose logits were seen to be changed in a way that no option tells
_sliced_before: set[type] = set()  # classes whose logits were seen not to be


class _Changed(Exception):  # noqa: N818  (an answer, not a fault)
    """The loss is not of the head's output as it is."""


def loss(model: nn.Module, batch: Mapping[str, Any]) -> LossValue:
    """The model's own loss, as (sum, weight) where it is a mean over the labels that count: so padding may be cut anywhere. A
    causal language model's logits are made in slices, and never exist whole. A loss of another kind, or several that do not count
    the same labels, is the model's own mean: what routers add for all tokens together is in no sum."""
    from anyfit.losses import Means

    if not isinstance(batch, Mapping):
        raise TypeError(
            f"{type(model).__name__} takes its batch by name, such as input_ids and labels, and got a {type(batch).__name__}; "
            "collate batches to a dict, or give loss="
        )
    base = base_of(model)
    head = _sliceable_head(base) if batch.get("labels") is not None else None
    if head is None:
        return _own_loss(model, batch, Means())
    generators = [] if type(base) in _sliced_before else _generators(head.weight.device)
    means = Means()
    try:
        with _sliced(base, head, means):
            found = _own_loss(model, batch, means)
        _sliced_before.add(type(base))
        return found
    except _Changed:
        _unsliced.add(type(base))
    for generator, state in generators:  # the model draws the same numbers again
        generator.set_state(state)
    return _own_loss(model, batch, Means())


def _own_loss(model: Any, batch: Mapping[str, Any], means: Means) -> LossValue:
    is_compiled = model._compiled_call_impl is not None or hasattr(model, "_orig_mod")
    takes = inspect.signature(base_of(model).forward).parameters
    options = {"use_cache": False} if "use_cache" in takes and "use_cache" not in batch else {}
    with contextlib.nullcontext() if is_compiled else means.left_by(_parts_of(model)):
        outputs = model(**batch, **options)
        found = outputs[0] if type(outputs) is tuple else getattr(outputs, "loss", None)
    if found is None:
        labels = [name for name in takes if "label" in name or name.endswith("_positions")] or ["labels"]
        raise ValueError(
            f"{type(model).__name__} gives no loss for a batch of {', '.join(map(str, batch))}; it reads {', '.join(labels)}: "
            "add them to the batch, or give loss="
        )
    value: LossValue = means.of(found) or found
    return value


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that do not make the loss: the children of the outermost module that transformers made, and of those
    that are such modules too: some models call a decoder past the one that holds it."""
    import transformers

    if isinstance(model, transformers.PreTrainedModel):
        inner = [each for each in model.children() if isinstance(each, transformers.PreTrainedModel)]
        return [*model.children(), *(part for each in inner for part in each.children())]
    return [part for child in model.children() for part in _parts_of(child)]


def _generators(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    """Those of random numbers, each with its state as it is now."""
    import torch

    on_device = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [(each, each.get_state()) for each in (torch.default_generator, *on_device)]


def _sliceable_head(model: Any) -> Any:
    """The linear layer that makes a causal language model's logits, if nothing but the loss is known to read them; or None."""
    import transformers
    from torch import nn
    from transformers.loss.loss_utils import ForCausalLMLoss

    if not isinstance(model, transformers.PreTrainedModel) or type(model) in _unsliced:
        return None
    forward = inspect.unwrap(type(model).forward)
    head = in_use(model.get_output_embeddings())
    config = model.config.get_text_config()
    plain = (
        type(head) is nn.Linear
        and "forward" not in vars(head)
        and not (head._forward_hooks or head._forward_pre_hooks)
        and all(each._compiled_call_impl is None for each in (model, head))
    )
    hands_on = "loss_function" in forward.__code__.co_names and model.loss_function is ForCausalLMLoss
    return head if plain and hands_on and all(getattr(config, name, None) is None for name in SCALES) else None


@contextlib.contextmanager
def _sliced(model: Any, head: Any, means: Means) -> Iterator[None]:
    """Inside, the head makes no logits, and the loss function takes what the head was given in their place. The model's own
    forward stays in charge: what it does before the head, its shift of labels and its other losses are its own."""
    import torch

    from anyfit.losses import sliced_cross_entropy

    caps = (getattr(model.config.get_text_config(), name, None) for name in CAPS)
    cap = next((value for value in caps if value is not None), None)
    read: list[tuple[Tensor, Tensor]] = []  # by the head, and what it gave in return

    def no_logits(hidden: Tensor) -> Tensor:
        # Already in fp32 and without rows: what a model does to make logits so gives back this very tensor.
        nothing = torch.empty(*hidden.shape[:-2], 0, head.out_features, dtype=torch.float32, device=hidden.device)
        read.append((hidden, nothing))
        return nothing

    def sliced_loss(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if len(read) != 1 or vocab_size != head.out_features:
            raise _Changed
        hidden, nothing = read[0]
        if logits is not nothing and cap is None:
            raise _Changed
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.reshape(hidden.shape[:-1])
        total = sliced_cross_entropy(
            hidden,
            head.weight,
            shift_labels,
            bias=head.bias,
            ignore_index=ignore_index,
            reduction="sum",
            softcap=None if logits is nothing else cap,
        )
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        return means.keep(total, (shift_labels != ignore_index).sum(), "labels")

    head.forward = no_logits
    model.loss_function = sliced_loss
    try:
        yield
    finally:
        del head.forward, model._loss_function  # uncovers what the classes have
