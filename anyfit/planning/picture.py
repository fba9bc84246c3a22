"""The picture of a plan's step: the model's blocks as the plan has them, the device's memory over one micro-batch, and who works
when, as the simulator plays it.

Memory is that of footprint.py, by kind: what the step holds all along, what grows and shrinks with each stretch of the pass, and
what the allocator and the runtime take on top. A plan with all state on the device and all activations kept was not simulated:
its lanes are the stretches of its passes one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyfit.values.picture import BlockPart, MemoryOver, Picture
from anyfit.values.plan_names import Activations
from anyfit.values.profile import Pass, Profile, Segment
from anyfit.values.schedule import Span as Stretch

from .candidate import Candidate
from .evaluation import Evaluation, Offer
from .fastest import Found
from .footprint import live_parts, updating_bytes
from .forecast import passes_of
from .knobs import Knobs
from .simulation import Span, played
from .space import space_of

NARROW = 1 / 400  # of what is drawn: what is shorter is joined with its neighbour of the same kind
GAP = 1 / 1500  # of it, that may lie between such neighbours
MOST_SPANS = 600  # of a lane
MOST_LANES = 16  # of the places of a pipeline
MOST_PASSES = 4  # that are drawn of a plan that was not simulated
Row = tuple[float, float, str, str]
# By lane and queue of the simulator, what the engine calls that in a timeline.
KINDS = {
    ("up", "fresh"): "upload",
    ("up", "activations"): "return",
    ("down", "activations"): "offload",
    ("link", "all_gather"): "gather",
}


def pictured(found: Found) -> Picture:
    """Of one rank."""
    if found.offer is None:
        return _resident(found)
    space, offer = found.in_space
    at = space.laid_out_like(offer.candidate)
    return Picture(
        _blocks(offer.candidate),
        _memory(at.evaluation, offer),
        *_lanes(offer.candidate, at.evaluation),
    )


def pictured_in_stages(
    each: Pass, choices: Mapping[str, Activations], micro_batches: int, spans: Sequence[Sequence[Stretch]], after_seconds: float
) -> Picture:
    """Of a pipeline: what becomes of each block, and by rank when it makes which stage of which micro-batch, as far as that is
    played; then the sums and updates of all. Ranks hold different things, so that no memory is drawn."""
    last = max(row[-1].ends for row in spans)
    lanes: dict[str, tuple[Row, ...]] = {}
    rows: list[Row]
    update = last, last + after_seconds, "update", "sums of gradients, norm and update"
    for rank, row in enumerate(spans[:MOST_LANES]):
        rows = [(begins, ends, of, f"stage {stage}, micro-batch {at}") for (_, of, stage, at), begins, ends in row]
        lanes[f"rank {rank}"] = tuple(_joined([*rows, update], last + after_seconds))
    count = max(one.action.micro_batch for one in spans[0]) + 1
    of = "a step" if count == micro_batches else f"{count} of {micro_batches} micro-batches, and the update"
    if len(spans) > MOST_LANES:
        of += f", on the first {MOST_LANES} of {len(spans)} places"
    names = {block.name: index for index, block in enumerate(each.blocks)}
    return Picture(tuple(_part(each, names[path], choice) for path, choice in choices.items()), None, lanes, of)


def _resident(found: Found) -> Picture:
    profile = found.profile
    each = next(one for one in profile.passes if one.micro_batch == found.micro_batch)
    passes = passes_of(profile.batch_size, each.micro_batch)
    lanes, of = _one_after_another(each, passes, found.chosen.split_seconds.get("update", 0.0))
    space = found.space or space_of(profile)
    if space is None:
        blocks = tuple(_part(each, index, "keep") for index in range(len(each.blocks)) if each.blocks[index].name)
        return Picture(blocks, None, lanes, of)
    candidate = space.candidates.of(Knobs(each.micro_batch, resident=len(space.candidates.chunks)))
    footprint = space.evaluation.footprint_of(candidate)
    memory = _memory_of(space.evaluation, candidate, footprint.pool_bytes, found.chosen.reserved_bytes)
    return Picture(_blocks(candidate), memory, lanes, of)


# ---------------------------------------------------------------------- blocks


def _blocks(candidate: Candidate) -> tuple[BlockPart, ...]:
    each = candidate.profile_pass
    pairs = enumerate(candidate.activations)
    return tuple(_part(each, index, choice) for index, choice in pairs if each.blocks[index].name)


def _part(each: Pass, index: int, choice: str) -> BlockPart:
    block = each.blocks[index]
    cost = block.choices.get(choice)
    again = 0.0 if cost is None or cost.moved_bytes else cost.seconds
    return BlockPart(
        block.name,
        block.kind,
        block.parameters,
        choice,  # type: ignore[arg-type]
        block.kept_bytes if cost is None else cost.kept_bytes,
        block.seconds_forward + block.seconds_backward + again,
    )


# ---------------------------------------------------------------------- memory


def _memory(evaluation: Evaluation, offer: Offer) -> MemoryOver:
    reserved = evaluation.reserved_bytes(offer.footprint)
    return _memory_of(evaluation, offer.candidate, offer.footprint.pool_bytes, reserved)


def _memory_of(evaluation: Evaluation, candidate: Candidate, pools: int, reserved: int) -> MemoryOver:
    """What is held between steps, divided by what it is; and on top what lives, stretch by stretch."""
    profile, each = evaluation.profile, candidate.profile_pass
    lives = list(live_parts(candidate, updating_bytes(profile, candidate)))[-len(each.segments) - 1 :]
    weights, optimizer = _on_device(candidate)
    names = [f"{segment.phase} {each.blocks[segment.block].name or '(outside blocks)'}" for segment in each.segments]
    count = len(lives)
    kept, work, gradients, moving = (tuple(column) for column in zip(*lives, strict=True))
    held = {
        "weights": weights,
        "optimizer state": optimizer,
        "buffers and gradient sums": max(pools - weights - optimizer, 0),
    }
    live = {"kept for backward": kept, "gradients": gradients, "activations on their way": moving, "work of the op": work}
    highest = max(map(sum, lives), default=0)
    above = max(reserved - pools - highest, 0)
    return MemoryOver(
        (*names, "update"),
        (*(segment.seconds for segment in each.segments), _update_seconds(profile, candidate)),
        {
            **{name: (size,) * count for name, size in held.items() if size},
            **{name: sizes for name, sizes in live.items() if any(sizes)},
            **({"allocator and runtime": (above,) * count} if above else {}),
        },
    )


def _on_device(candidate: Candidate) -> tuple[int, int]:
    weights = optimizer = 0
    for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True):
        if placement.weights == "device":
            weights += chunk.weights_bytes // (candidate.shards if candidate.gathers else 1)
        if placement.optimizer == "device":
            optimizer += chunk.optimizer_bytes // candidate.shards
    return weights, optimizer


def _update_seconds(profile: Profile, candidate: Candidate) -> float:
    """Of what is resident."""
    resident = sum(
        chunk.elements
        for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True)
        if placement.route == "resident" and chunk.is_updated
    )
    return profile.update.seconds * resident / candidate.shards / max(profile.trainable, 1)


# ---------------------------------------------------------------------- lanes


def _lanes(candidate: Candidate, evaluation: Evaluation) -> tuple[Mapping[str, tuple[Row, ...]], str]:
    spans, seconds, passes = played(candidate, evaluation.rates)
    lanes: dict[str, list[Row]] = {}
    for span in sorted(spans, key=lambda span: span[1]):
        lane, start, end, _, segment = span
        lanes.setdefault(lane, []).append((start, end, *_named(candidate, span, segment)))
    joined = {lane: tuple(_joined(rows, seconds)) for lane, rows in lanes.items()}
    return _ordered(joined), _part_of_step(passes, candidate.accumulation)


def _part_of_step(passes: int, of: int) -> str:
    return "a step" if passes == of else f"{passes} of {of} passes, and the update"


def _named(candidate: Candidate, span: Span, segment: Segment | None) -> tuple[str, str]:
    lane, _, _, queue, _ = span
    if lane != "compute":
        return KINDS.get((lane, queue), queue), ""
    if segment is None:
        return "update", "norm and resident updates"
    block = candidate.profile_pass.blocks[segment.block].name or "(outside blocks)"
    again = segment.phase == "backward" and candidate.activations[segment.block] in ("recompute", "selective")
    return segment.phase, f"{block}, recomputed first" if again else block


def _one_after_another(each: Pass, passes: int, update_seconds: float) -> tuple[Mapping[str, tuple[Row, ...]], str]:
    now, rows = 0.0, list[Row]()
    for _ in range(min(passes, MOST_PASSES)):
        for segment in each.segments:
            name = each.blocks[segment.block].name or "(outside blocks)"
            rows.append((now, now + segment.seconds, segment.phase, name))
            now += segment.seconds
    rows.append((now, now + update_seconds, "update", "all parameters"))
    return {"compute": tuple(_joined(rows, now + update_seconds))}, _part_of_step(min(passes, MOST_PASSES), passes)


def _joined(rows: Sequence[Row], seconds: float) -> Iterator[Row]:
    """With neighbours of a kind as one, where the eye could not tell them apart; and no more rows than can be drawn."""
    narrow, gap = NARROW * seconds, GAP * seconds
    found = list(_neighbours(rows, narrow, gap))
    while len(found) > MOST_SPANS:
        narrow, gap = 2 * narrow, 2 * gap
        found = list(_neighbours(found, narrow, gap))
        if gap > seconds:
            found = found[:MOST_SPANS]
    return ((round(start, 7), round(end, 7), kind, label) for start, end, kind, label in found)


def _neighbours(rows: Iterable[Row], narrow: float, gap: float) -> Iterator[Row]:
    last: Row | None = None
    for row in rows:
        if (
            last is not None
            and row[2] == last[2]
            and row[0] - last[1] <= gap
            and min(row[1] - row[0], last[1] - last[0]) < narrow
        ):
            label = last[3] if last[3] == row[3] else f"{last[3].partition(' … ')[0]} … {row[3].rpartition(' … ')[2]}"
            last = (last[0], row[1], row[2], label if row[3] else "")
            continue
        if last is not None:
            yield last
        last = row
    if last is not None:
        yield last


def _is_narrow(row: Row, other: Row, narrow: float) -> bool:
    return min(row[1] - row[0], other[1] - other[0]) < narrow


def _ordered(lanes: Mapping[str, tuple[Row, ...]]) -> dict[str, tuple[Row, ...]]:
    known = ("compute", "up", "down", "link", "host")
    order = [*(name for name in known if name in lanes), *(name for name in lanes if name not in known)]
    return {name: lanes[name] for name in order}
