"""Over meshes: one rank's profile for every tensor axis and layout that is considered, and the fastest of them.

A profile of one rank of a tensor axis (costing/on_axis.py) is a profile like any other: its search is that over the data axis. So
what is left here is to compare:

    minimise    (length of the tensor axis, seconds)
    over        the meshes whose best takes at most (1 + RANKS_TIE) times the least; something on the host counts as slower, as
                between ways to shard

The one without a tensor axis comes first. Another can only be taken if it is faster by RANKS_TIE, so that it is not even profiled
where its `bound` says that it is not: what its passes compute and exchange at the least, with nothing recomputed, updated or
waited for but the first and last micro-batch of a pipeline. The others are searched with nothing on the host, over all ways to
shard the state. Where the best so far has part of it there, or nothing fits, those that need the host are searched too, one for
each length of the tensor axis.

Stages count as slower by STAGES_TIE, as what is left out of their forecast comes to about as much. They draw random numbers by
key: where that makes others of them than a run without stages draws, they are only weighed, and offered (`Pipeline.against`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from anyfit.values.called import Pipeline
from anyfit.values.cut_figures import TITLES, CutFigures
from anyfit.values.doing import doing
from anyfit.values.no_plan import Change, NoPlan
from anyfit.values.plan import Alternative, BlockCut, Decision, Forecast, Plan
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes, show_seconds

from . import searched
from .answers import Typed, in_python, no_plan, shortfall
from .fastest import RANKS_TIE, Found, fastest, fastest_over_devices, most_sharded
from .reasons import explained
from .space import WORTH_LEAVING, Space
from .staged_plans import pipelined

ASKED = "as asked for"
STAGES_TIE = 0.05  # a pipeline is taken unasked only where it is faster by this


@dataclass(frozen=True)
class MeshChoice:
    """One that is considered."""

    data: int
    tensor: int
    layout: str  # of the blocks; "" without a tensor axis
    blocks: int  # that are cut
    bound: float  # seconds of a step that none of its plans is under
    make: Callable[[], Profile]  # of one of its ranks
    tables: tuple[str, ...] = ()  # of words, whose rows the tensor axis divides
    cut: Mapping[str, BlockCut] = field(default_factory=dict)  # how the tensor axis holds blocks
    stages: int = 1  # ranks along the pipeline axis
    # That its stages are cut for, ValueError where they cannot be; the profile is of one rank with all of the model.
    pipeline: Callable[[], Pipeline] | None = None
    pass_seconds: tuple[float, ...] = ()  # that its passes take at the least
    figures: Mapping[str, CutFigures] = field(default_factory=dict)  # by path of a block that is cut
    # Of its largest and smallest micro-batch alone, which is made sooner: where nothing of these fits, nothing does.
    make_ends: Callable[[], Profile] | None = None
    found: Found | None = None  # the fastest of it, where that is known

    @property
    def ends(self) -> Profile:
        return (self.make_ends or self.make)()

    @property
    def is_plain(self) -> bool:
        return self.tensor == self.stages == 1

    @property
    def parts(self) -> tuple[int, int]:
        """That move: fewer are simpler."""
        return self.stages, self.tensor

    @property
    def said(self) -> str:
        """`16 data x 4 tensor x 2 pipeline, Megatron`"""
        return f"{self.axes_said}{f', {self.layouts}' if self.layout else ''}"

    @property
    def axes_said(self) -> str:
        return f"{self.data} data x {self.tensor} tensor{f' x {self.stages} pipeline' if self.stages > 1 else ''}"

    @property
    def typed(self) -> str:
        """
        `--mesh data=16,pipeline=4`"""
        lengths = {"data": self.data, "tensor": self.tensor, "pipeline": self.stages}
        return "--mesh " + ",".join(f"{name}={length}" for name, length in lengths.items() if length > 1 or name == "data")

    @property
    def layouts(self) -> str:
        return TITLES.get(self.layout, self.layout)

    @classmethod
    def of(cls, profile: Profile) -> MeshChoice:
        """One that is profiled already."""
        seconds = tuple(each.played.device_seconds for each in profile.passes)
        bound = bound_of(profile, profile.ranks, seconds)
        made = cls(profile.ranks, profile.tensor, profile.layout, len(profile.cut), bound, lambda: profile, profile.tables)
        return replace(made, cut=profile.cut, pass_seconds=seconds)

    def changed(self, change: Callable[[Profile], Profile]) -> MeshChoice:
        """With another profile, that is not faster."""
        return replace(self, make=cache(lambda: change(self.make())), make_ends=None, found=None)


@dataclass(frozen=True)
class Tried:
    """What a mesh takes, or takes at least; without either, nothing fits."""

    mesh: MeshChoice
    found: Found | Plan | None = None
    least_seconds: float | None = None  # where it was not searched
    verdict: NoPlan | None = None  # of stages
    against: str = ""  # why it is not taken, but where it is asked for
    refused: str = ""  # why there can be no stages
    lacked_bytes: int | None = None  # of the device, where nothing fits with nothing on the host, and the rest was not looked at

    @property
    def is_offered(self) -> bool:
        """It fits, and somebody has to ask for it."""
        return self.found is not None and bool(self.against)

    @property
    def forecast(self) -> Forecast | None:
        if self.found is None:
            return None
        return self.found.chosen if isinstance(self.found, Found) else self.found.forecast

    @property
    def seconds(self) -> float | None:
        return None if self.forecast is None else self.forecast.mean_step_seconds

    @property
    def needed_bytes(self) -> int:
        return 0 if self.forecast is None else self.forecast.needed_bytes

    @property
    def uses_host(self) -> bool:
        return self.forecast is not None and self.forecast.peak_bytes["host"] > 0

    @property
    def handicapped(self) -> float:
        """Seconds to compare by."""
        if self.seconds is None:
            return math.inf
        return self.seconds * _handicap(self.mesh) / (1 - WORTH_LEAVING if self.uses_host else 1.0)


def _handicap(mesh: MeshChoice) -> float:
    return 1 + STAGES_TIE if mesh.stages > 1 else 1.0


def bound_of(profile: Profile, data: int, pass_seconds: Sequence[float], stages: int = 1, *, blocks: int = 0) -> float:
    """Seconds of a step that no plan is under whose passes, each like one of the profile's, take at least so many. Stages of so
    many `blocks` are taken as even: others are as slow as the slowest is."""
    overlaps = profile.host is not None and profile.host.overlaps
    slowness = profile.calibration.overlap_slowdown.value if overlaps else 1.0  # beside what ranks exchange
    share, stages_a_rank = profile.batch_size / data, max(min(max(Pipeline.stages_a_rank), blocks // stages), 1)
    fills = (stages - 1) / stages_a_rank  # of micro-batches, that a pipeline waits for its first and last one
    pairs = zip(profile.passes, pass_seconds, strict=True)
    return min(slowness * (share / each.micro_batch + fills) * took / stages for each, took in pairs)


def search_meshes(
    meshes: Sequence[MeshChoice], steps: int | None = None, typed: Typed = in_python, *, asked: bool = False
) -> Plan:
    """The best plan over all of these, or NoPlan of the one that lacks least. `asked`: for this mesh, which is no choice then."""
    tried = tried_meshes(meshes, explained, steps, asked=asked)
    found = best_of(tried, explained, asked=asked)
    if found is None:
        verdict = no_plan(nearest_to_fit(meshes), typed)
        raise verdict.with_changes((*offers_of(tried), *verdict.changes))
    return found


def nearest_to_fit(meshes: Sequence[MeshChoice]) -> Profile:
    """Of meshes on which nothing fits, the profile that lacks least."""
    whole = [each for each in meshes if each.stages == 1]
    ends = {each.tensor: each for each in (whole[0], whole[-1])}.values()  # the shortest tensor axis, and the longest
    profiles = [each.make() for each in ends]
    return profiles[0] if len(profiles) == 1 else min(profiles, key=lambda each: shortfall(each).shortfall_bytes)


def searched_meshes(
    meshes: Sequence[MeshChoice], finish: Callable[[Found], Plan], steps: int | None = None, *, asked: bool = False
) -> Plan | None:
    """The best plan over all of these as `finish` makes it; None where nothing fits."""
    return best_of(tried_meshes(meshes, finish, steps, asked=asked), finish, asked=asked)


def tried_meshes(
    meshes: Sequence[MeshChoice],
    finish: Callable[[Found], Plan],
    steps: int | None = None,
    *,
    asked: bool = False,
    plain: Plan | None = None,
) -> list[Tried]:
    """`plain`: of the one that is along the data axis alone, where its plan is known."""
    tried = [Tried(each, plain or searched(each.make(), finish, steps, each.found)) for each in meshes if each.is_plain]
    others = sorted((each for each in meshes if not each.is_plain), key=lambda each: each.bound * _handicap(each))
    if not others:
        return tried
    with doing("looking for the best mesh"):
        for mesh in others:
            try:
                tried.append(_tried(mesh, tried, asked=asked))
            except ValueError as refusal:  # it cannot be what a user forces, or be cut into stages, and another can
                if asked:
                    raise
                tried += [Tried(mesh, refused=str(refusal))] * (mesh.stages > 1)
        return _with_host(tried)


def _with_host(tried: list[Tried]) -> list[Tried]:
    """The same where the best does without the host; else with the meshes that need it too searched: of each length of the tensor
    axis the layout that lacks least, as its ranks leave least to the host."""
    best = _best(tried)
    if best is not None and not best.uses_host:
        return tried
    least = math.inf if best is None else best.handicapped
    lacking = [at for at, each in enumerate(tried) if each.lacked_bytes is not None and each.mesh.bound < least]
    nearest: dict[int, int] = {}
    for at in sorted(lacking, key=lambda at: tried[at].lacked_bytes or 0):
        nearest.setdefault(tried[at].mesh.tensor, at)
    found = {at: Tried(tried[at].mesh, fastest(tried[at].mesh.make())) for at in nearest.values()}
    return [found.get(at, each) for at, each in enumerate(tried)]


def best_of(tried: Sequence[Tried], finish: Callable[[Found], Plan], *, asked: bool = False) -> Plan | None:
    """The best of those that were tried, with why; None where nothing fits, NoPlan where all of them have stages."""
    if len(tried) == 1 and tried[0].mesh.is_plain:
        return tried[0].found  # type: ignore[return-value]
    best = _best(tried)
    if best is None or best.found is None:
        if all(each.mesh.stages > 1 for each in tried):
            raise min((each.verdict for each in tried if each.verdict), key=lambda each: each.shortfall_bytes)
        return None
    made = best.found if isinstance(best.found, Plan) else finish(best.found)
    return decided(made, best.mesh, [each for each in tried if each.mesh is not best.mesh], asked=asked)


def offers_of(tried: Sequence[Tried]) -> tuple[Change, ...]:
    """What fits, and is taken only where it is asked for: the fastest of it."""
    offered = [(each.seconds, each) for each in tried if each.is_offered and each.seconds is not None]
    if not offered:
        return ()
    seconds, best = min(offered, key=lambda pair: pair[0])
    return (Change(best.mesh.typed, seconds, best.against),)


def _tried(mesh: MeshChoice, before: Sequence[Tried], *, asked: bool) -> Tried:
    taken = [each for each in before if not each.is_offered]
    simpler = min((each.handicapped for each in taken if each.mesh.parts < mesh.parts), default=math.inf)
    least, bound = min((each.handicapped for each in before), default=math.inf), mesh.bound * _handicap(mesh)
    if bound * (1 + RANKS_TIE) >= simpler or bound >= least:
        return Tried(mesh, least_seconds=mesh.bound)
    if mesh.pipeline is not None:
        pipeline = mesh.pipeline()
        against = "" if asked else pipeline.against
        try:
            return Tried(mesh, pipelined(mesh.make(), pipeline), against=against)
        except NoPlan as verdict:
            return Tried(mesh, verdict=verdict)
    ends = most_sharded(mesh.ends)
    lacked = Space(ends).least_needed_bytes() - ends.device_limit_bytes
    return Tried(mesh, lacked_bytes=lacked) if lacked > 0 else Tried(mesh, fastest_over_devices(mesh.make()))


def _best(tried: Sequence[Tried]) -> Tried | None:
    may = [each for each in tried if each.found is not None and not each.is_offered]
    least = min((each.handicapped for each in may), default=0.0)
    close = [each for each in may if each.handicapped <= (1 + RANKS_TIE) * least]
    return min(close, key=lambda each: (each.mesh.parts, each.handicapped), default=None)


# ---------------------------------------------------------------------- why


def decided(plan: Plan, mesh: MeshChoice, others: Sequence[Tried], *, asked: bool = False) -> Plan:
    """The plan with the decision `layout`, before all others."""
    cut = f"{mesh.layouts} in {mesh.blocks} block{'s' * (mesh.blocks != 1)}" if mesh.blocks else "all blocks whole"
    cut += ", vocabulary divided" * bool(mesh.tables)
    none_fits = any(each.found is None and each.least_seconds is None for each in others)
    usual = "no other fits" if none_fits else "no other could take less"
    why = "; ".join(filter(None, (ASKED if asked else "", _why(plan, mesh, others)))) or usual
    weighed = tuple(
        Alternative("layout", each.mesh.said, each.seconds, each.needed_bytes, fits=True)
        for each in others
        if each.seconds is not None
    )
    return replace(
        plan,
        decisions=(Decision("layout", f"{mesh.axes_said}: {cut}", why), *plan.decisions),
        alternatives=(*weighed, *plan.alternatives),
    )


def _why(plan: Plan, mesh: MeshChoice, others: Sequence[Tried]) -> str:
    """The fastest other mesh that was searched; else the one that would take at least so much; and one that does not fit, where
    it has fewer moving parts."""
    mine, said = plan.forecast.mean_step_seconds, []
    priced = [(each, each.seconds) for each in others if each.seconds is not None and not each.is_offered]
    bounded = [(each, each.least_seconds) for each in others if each.least_seconds is not None]
    if priced:
        other, seconds = min(priced, key=lambda pair: pair[1])
        later, room = seconds - mine, plan.forecast.needed_bytes - other.needed_bytes
        memory = f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
        if later < 0:
            usual = "fewer moving parts" if other.mesh.parts > mesh.parts else "nothing on the host"
            said.append(
                f"{usual}; {other.mesh.said} would take {show_seconds(-later)} less, too close to tell apart, and {memory}"
            )
        else:
            said.append(f"{other.mesh.said} would take {show_seconds(later)} more a step and {memory}")
    elif bounded:
        other, seconds = min(bounded, key=lambda pair: pair[1])
        least = f"at least {show_seconds(seconds - mine)} more a step" if seconds > mine else f"at least {show_seconds(seconds)}"
        said.append(f"{other.mesh.said} would take {least}, with nothing recomputed or waited for")
    lacking = [each for each in others if each.seconds is None and each.least_seconds is None and not each.refused]
    simpler = [each for each in lacking if each.mesh.parts < mesh.parts]
    said += [f"{each.mesh.said} does not fit" for each in simpler[-1:]]
    said += _staged_why(mine, others)
    return "; ".join(said)


def _staged_why(mine: float, others: Sequence[Tried]) -> Iterator[str]:
    """Of a pipeline that would be faster, and is not taken unasked; of why there is none, where one might be."""
    offered = [(each.handicapped, each) for each in others if each.is_offered and each.handicapped < mine]
    if offered:
        _, best = min(offered, key=lambda pair: pair[0])
        less = mine - (best.seconds or 0.0)
        yield f"{best.mesh.said} would take {show_seconds(less)} less a step, and {best.against}: {best.mesh.typed} takes it"
    refused = next((each.refused for each in others if each.refused), "")
    if refused:
        yield f"no pipeline: {refused}"
