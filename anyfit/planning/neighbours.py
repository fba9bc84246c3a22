"""What an offer chose, in words, and the neighbours it was chosen from: the best with one decision taken otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from anyfit.values.plan import Activations
from anyfit.values.units import show_bytes, show_count

from .evaluation import Offer
from .forecast import forecast_of, passes_of
from .found import Found, Neighbour, handicapped
from .space import Space

NOT_KEPT: dict[Activations, str] = {
    "recompute": "made again in backward",
    "selective": "made again but for the costly ops",
    "offload": "moved to the host and back",
}
UPDATED = {"resident": "on the device", "streamed": "streamed through it", "host": "on the host"}


def settled(found: Found) -> Found:
    """The same with its neighbours. One of them that is faster, which the search passed by, takes its place."""
    while found.offer is not None and found.neighbours is None:
        space, offer = found.in_space
        neighbours = tuple(_neighbours(found))
        offers = [each.offer for each in neighbours if each.offer is not None]
        best = min([offer, *offers], key=lambda offer: handicapped(space, offer))
        if best is offer:
            return replace(found, neighbours=neighbours)
        found = replace(found, micro_batch=best.candidate.micro_batch, chosen=forecast_of(space, best), offer=best)
    return found


def _neighbours(found: Found) -> Iterator[Neighbour]:
    """The best plans with one decision taken otherwise, all others searched anew."""
    whole, offer = found.in_space
    space, micro_batch = whole.laid_out_like(offer.candidate), found.micro_batch
    for decision, choice, size, forced in _others(space, offer, micro_batch):
        other = space.best(size, starts=1, **forced)
        if other is None or other.candidate != offer.candidate:
            yield Neighbour(decision, choice, other)
    for each in whole.sizes:
        if each is not space:
            choice = f"chunks of {show_bytes(each.profile.offload_chunk_bytes)}"
            yield Neighbour("chunk size", choice, each.best_like(offer))


def _others(space: Space, offer: Offer, micro_batch: int) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """By decision and choice: the micro-batch, and the knobs that force it."""
    candidates, elements = space.candidates, by_route(offer)
    if space.is_gpu and elements["host"] + elements["streamed"]:
        if elements["streamed"]:
            yield "updates", "none streamed", micro_batch, {"streamed": 0.0}
        if elements["host"]:
            yield "updates", "none on the host", micro_batch, {"streamed": 1.0, "host_first": 0.0}
        if not offer.candidate.adds_up:
            said = "updates that wait for the norm" if speculates(offer) else "updates before the norm is known"
            yield "speculation", said, micro_batch, {"speculates": not speculates(offer)}
    last, all_moved = candidates.last_rung(micro_batch), candidates.all_moved(micro_batch)
    if last:
        yield "activations", "all made again", micro_batch, {"rung": last, "moved": 0}
        yield "activations", "all kept", micro_batch, {"rung": 0, "moved": 0}
    if offer.candidate.offloaded:
        yield "activations", "none moved", micro_batch, {"moved": 0}
    elif all_moved:
        yield "activations", "all moved", micro_batch, {"rung": 0, "moved": all_moved}
    others = set(space.micro_batches) - {micro_batch}
    for size in sorted(others, key=lambda size: abs(size - micro_batch))[:1]:
        yield "micro-batch", passes_said(space.profile.batch_size, size), size, {}


def choices_of(offer: Offer, *, is_gpu: bool) -> dict[str, str]:
    """By decision, what was chosen, where there was a choice: a CPU's updates always wait, as nothing runs beside it."""
    found: dict[str, str] = {}
    elements = by_route(offer)
    if elements["streamed"] or elements["host"]:
        found["updates"] = ", ".join(
            f"{show_count(elements[route])} {name}" for route, name in UPDATED.items() if elements[route]
        )
        if is_gpu:
            found["speculation"] = "updates begin before the norm is known" if speculates(offer) else "updates wait for the norm"
    blocks = Counter(offer.candidate.activations)
    said = [f"{blocks[name]} block{'s' * (blocks[name] > 1)} {verb}" for name, verb in NOT_KEPT.items() if blocks[name]]
    found["activations"] = ", ".join(said) or "all kept"
    return found


def where(offer: Offer) -> str:
    """Model state is."""
    elements = by_route(offer)
    pairs = zip(offer.candidate.chunks, offer.candidate.placements, strict=True)
    away = [chunk for chunk, placement in pairs if placement.weights == "host"]
    parts = []
    if elements["resident"] < sum(elements.values()):
        parts.append(f"optimizer of {show_count(elements['resident'])} parameters on the device, of the others on the host")
    if away:
        size = show_bytes(sum(chunk.weights_bytes for chunk in away))
        parts.append(f"{size} of weights on the host, fetched through {offer.candidate.slots} slots")
    return "; ".join(parts) or "all on the device"


def by_route(offer: Offer) -> Counter[str]:
    """Parameters that are updated so."""
    elements = Counter[str]()
    for chunk, placement in zip(offer.candidate.chunks, offer.candidate.placements, strict=True):
        elements[placement.route] += chunk.elements if chunk.is_updated else 0
    return elements


def speculates(offer: Offer) -> bool:
    return any(placement.speculates for placement in offer.candidate.placements)


def passes_said(batch_size: int, micro_batch: int) -> str:
    count = passes_of(batch_size, micro_batch)
    return f"{batch_size} in one pass" if count == 1 else f"{micro_batch}, {count} passes a step"
