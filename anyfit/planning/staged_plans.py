"""The plan of the fastest way through stages, with its forecast and its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from anyfit.values.called import Pipeline
from anyfit.values.mesh import AXES
from anyfit.values.picture import Picture
from anyfit.values.plan import Alternative, Decision, Forecast, Plan, Stage
from anyfit.values.plan_names import Activations
from anyfit.values.profile import Division, Profile
from anyfit.values.units import show_bytes, show_seconds

from .forecast import start_seconds
from .picture import pictured_in_stages
from .pipelines import Played, StageSearch, Way
from .reasons import NOT_KEPT, facts_of, passes_said, restrictions

ON_DEVICE = "all of a stage's on its device"
STREAMED = "low halves and moments on the host, streamed for each update"


def pipelined(profile: Profile, pipeline: Pipeline) -> Plan:
    """The fastest plan of so many ranks along the pipeline axis; NoPlan where none fits."""
    search = StageSearch(profile, pipeline)
    best, ways = search.best()
    return plan_of(search, best, ways)


def plan_of(search: StageSearch, best: Played, ways: Sequence[Way]) -> Plan:
    profile, pipeline, way = search.profile, search.pipeline, best.way
    forecast = forecast_of(search, best)
    decisions, alternatives = _decisions(search, best, ways)
    data, tensor = way.division.ranks, profile.tensor
    return Plan(
        **facts_of(profile),
        micro_batch=way.each.micro_batch,
        accumulation=way.micro_batches,
        mesh={**dict.fromkeys(AXES, 1), "data": data, "tensor": tensor, "pipeline": pipeline.ranks},
        stages=tuple(_stages(profile, pipeline, way)),
        chunk_bytes=profile.offload_chunk_bytes or profile.chunk_bytes,
        chunks=(way.holding.placement,),
        slots=way.memory.slots,
        prefetch=max(way.memory.slots // 2, 0),
        forecast=forecast,
        decisions=(*decisions, *restrictions(profile, forecast)),
        alternatives=alternatives,
        picture=_pictured(search, best),
    )


def _pictured(search: StageSearch, best: Played) -> Picture:
    way, passes = best.way, ("compute", "recompute", "pipeline bubble")
    after = best.step_seconds - sum(best.split[name] for name in passes)
    choices: dict[str, Activations] = {}
    for (first, last), held in zip(way.borders, way.stages, strict=True):
        choices |= zip(search.called.paths[first : last + 1], held.choices, strict=True)
    return pictured_in_stages(way.each, choices, way.micro_batches, search.drawn(way), after)


def _stages(profile: Profile, pipeline: Pipeline, way: Way) -> list[Stage]:
    found = []
    for border, held in zip(way.borders, way.stages, strict=True):
        paths = pipeline.called.paths[border[0] : border[1] + 1]
        activations = {path: choice for path, choice in zip(paths, held.choices, strict=True) if choice != "keep"}
        cut = {path: profile.cut[path] for path in paths if path in profile.cut}
        found.append(Stage(*border, activations, cut=cut))
    return found


def forecast_of(search: StageSearch, best: Played) -> Forecast:
    profile, way, seconds = search.profile, best.way, best.step_seconds
    data, ranks = way.division.ranks, way.division.ranks * search.pipeline.ranks * profile.tensor
    reserved = int(way.needed_bytes / (1 + profile.reserved_error))
    flops = data * profile.tensor * way.micro_batches * way.each.flops  # a pass's are those of one rank of the tensor axis
    return Forecast(
        step_seconds=seconds,
        step_error=profile.time_error + profile.link_error * best.linked / seconds,
        split_seconds=dict(best.split),
        peak_bytes={"device": reserved - profile.context_bytes, "host": way.host_bytes, "disk": 0},
        peak_error=profile.memory_error,
        reserved_bytes=reserved,
        reserved_error=profile.reserved_error,
        samples_per_second=profile.batch_size / seconds,
        tokens_per_second=data * way.micro_batches * way.each.tokens / seconds,
        compute_share=flops / seconds / profile.peak_flops_per_second / ranks,
        start_seconds=start_seconds(profile, 0),
        clipping=None,
    )


# ---------------------------------------------------------------------- why


def _decisions(search: StageSearch, best: Played, ways: Sequence[Way]) -> tuple[tuple[Decision, ...], tuple[Alternative, ...]]:
    mine, share = best.way, search.share
    of: dict[str, Callable[[Way], str]] = {
        "schedule": schedule_said,
        "ranks": lambda way: _sharded(way.division),
        "model state": lambda way: STREAMED if way.holding.streams else ON_DEVICE,
        "micro-batch": lambda way: passes_said(share, way.each.micro_batch),
    }
    found = [Decision("stages", _lengths(mine), "the slowest stage is as fast as can be")]
    found.append(Decision("activations", _recomputed(mine), "the fastest that fits"))
    alternatives: list[Alternative] = []
    for name, say in of.items():
        way = next((each for each in ways if say(each) != say(mine)), None)
        why = "the only one that fits"
        if way is not None:
            other = search.played(way)
            later, room = other.step_seconds - best.step_seconds, mine.needed_bytes - way.needed_bytes
            memory = f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
            why = f"{say(way)} would take {show_seconds(max(later, 0.0))} more a step and {memory}"
            alternatives.append(Alternative(name, say(way), other.step_seconds, way.needed_bytes, fits=True))
        found.append(Decision(name, say(mine), why))
    if search.profile.link_note:
        found.append(Decision("links", "assumed", search.profile.link_note))
    return tuple(found), tuple(alternatives)


def _lengths(way: Way) -> str:
    """
    `4 of 2 blocks`, or `3, 3, 3 and 2 blocks`"""
    lengths = [last - first + 1 for first, last in way.borders]
    counts = Counter(lengths)
    if len(counts) == 1:
        return f"{len(lengths)} of {lengths[0]} block{'s' * (lengths[0] > 1)}"
    if len(lengths) <= 8:
        return f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]} blocks"
    return " and ".join(f"{count} of {length}" for length, count in counts.most_common()) + " blocks"


def _recomputed(way: Way) -> str:
    choices = Counter(choice for stage in way.stages for choice in stage.choices)
    said = [f"{choices[name]} block{'s' * (choices[name] > 1)} {verb}" for name, verb in NOT_KEPT.items() if choices[name]]
    return ", ".join(said) or "all kept"


def schedule_said(way: Way) -> str:
    return "1F1B" if way.stages_a_rank == 1 else f"interleaved 1F1B, {way.stages_a_rank} stages a rank"


def _sharded(division: Division) -> str:
    if division.ranks == 1:
        return "each stage on one rank of the data axis"
    if division.shards == 1:
        return f"each stage's state on all {division.ranks} ranks of the data axis"
    what = "state" if division.weights else "optimizer and gradients" if division.gradients else "optimizer"
    return f"each stage's {what} sharded over {division.shards} ranks of the data axis"
