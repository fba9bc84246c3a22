"""Eager or compiled, by distinct block: passes with the costs of compiled code where that was measured.

A compiled block is one autograd node. Its weights are needed together, forward and backward, all it saved comes back at once, and
what it saves is its own: less than eager's, mostly, as what is cheap is computed again in backward. So what is recomputed,
offloaded or resident beside compiled blocks is other than beside eager ones, and plans of both kinds are searched whole:

    minimise    steps * seconds(plan) + seconds to compile
    over        all eager; compiled, all distinct blocks whose code is faster than eager
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from anyfit.values.compiled import BlockFigures, BlockTime, PhaseTime
from anyfit.values.plan import Decision, Plan
from anyfit.values.precision import ELEMENT_BYTES, PRECISIONS
from anyfit.values.profile import BlockCost, ChoiceCost, Pass, Profile, Segment, Timing
from anyfit.values.units import show_seconds

LEAST_SPEEDUP = 1.02  # of a block, for it to be compiled
ASSUMED_STEPS = 1000  # of a run whose length nobody has said


@dataclass(frozen=True)
class Compiling:
    """Which blocks are compiled, and what that takes once."""

    blocks: tuple[str, ...]
    seconds: float


def worth_compiling(profile: Profile) -> Compiling:
    """Blocks whose compiled code is faster, in passes of every size that was measured."""
    chosen: dict[str, BlockFigures] = {}
    for each in profile.passes:
        for block in each.blocks:
            if block.figures is not None and block.figures.compiled is not None and block.figures.speedup >= LEAST_SPEEDUP:
                chosen[block.name] = block.figures
    seconds = {each.key: each.compile_seconds for each in chosen.values()}
    return Compiling(tuple(chosen), sum(seconds.values()))


def measured(profile: Profile) -> Profile:
    """The same with the times of eager blocks that were measured beside their compiled code: what is compared is of one kind."""

    def timed(each: Pass) -> Pass:
        own = {index: block.figures.eager for index, block in enumerate(each.blocks) if block.figures and block.figures.eager}
        return _with_times(each, own, {}, 0) if own else each

    return replace(profile, passes=tuple(map(timed, profile.passes)))


def compiled(profile: Profile, names: tuple[str, ...]) -> Profile:
    """The same with these blocks compiled. Sizes of micro-batches for which one of them was not measured are left out."""
    passes, gradient_bytes = [], ELEMENT_BYTES[PRECISIONS[profile.precision].gradient]
    for each in profile.passes:
        chosen = {index: block.figures for index, block in enumerate(each.blocks) if block.name in names}
        pairs = {index: (of.eager, of.compiled) for index, of in chosen.items() if of and of.eager and of.compiled}
        if len(pairs) == len(chosen):
            eager, code = ({index: pair[place] for index, pair in pairs.items()} for place in (0, 1))
            passes.append(_with_times(each, code, eager, gradient_bytes))
    return replace(profile, passes=tuple(passes))


def _with_times(each: Pass, times: Mapping[int, BlockTime], eager: Mapping[int, BlockTime], gradient_bytes: int) -> Pass:
    """A pass whose blocks take these times; `eager`: of those that are compiled, what they take otherwise. Bytes are the trace's,
    times what was measured of both: the trace knows what blocks share. A compiled block hands out all gradients at its end, so
    none of them leave before: `gradient_bytes` a parameter."""
    blocks, segments, more = list(each.blocks), list(each.segments), 0
    for index, time in times.items():
        whole = eager.get(index)
        kept = 1.0 if whole is None else time.saved_bytes / max(whole.saved_bytes, 1)
        blocks[index] = _block(each.blocks[index], time, kept, is_whole=whole is not None)
        more += blocks[index].kept_bytes - each.blocks[index].kept_bytes
        for place, segment in enumerate(each.segments):
            if segment.block == index:
                held = gradient_bytes * each.blocks[index].parameters if segment.phase == "backward" else 0
                segments[place] = _segment(each, segment, time, time if whole is None else whole, held)
    return replace(
        each,
        blocks=tuple(blocks),
        segments=tuple(segments),
        peak_bytes=max(each.peak_bytes + more, 0),
        peak_bytes_accumulating=max(each.peak_bytes_accumulating + more, 0),
        reserved_bytes=max(each.reserved_bytes + more, 0),
    )


def _block(block: BlockCost, time: BlockTime, kept: float, *, is_whole: bool) -> BlockCost:
    """`is_whole`: one autograd node, which is not recomputed in part."""
    scale = time.forward.alone_seconds / block.seconds_forward if block.seconds_forward else 1.0
    choices: dict[str, ChoiceCost] = {}
    for name, choice in block.choices.items():
        if name == "recompute":
            choices[name] = replace(choice, seconds=time.forward.alone_seconds, timing=_timing(time.forward))
        elif name != "selective":
            sizes = int(choice.kept_bytes * kept), int(choice.moved_bytes * kept)
            choices[name] = ChoiceCost(*sizes, choice.seconds * kept, choice.timing)
        elif not is_whole:
            slower = None if choice.timing is None else choice.timing.slowed(scale, scale)
            choices[name] = replace(choice, seconds=choice.seconds * scale, timing=slower)
    return replace(
        block,
        seconds_forward=time.forward.alone_seconds,
        seconds_backward=time.backward.alone_seconds,
        seconds_recompute=0.0,
        kept_bytes=int(block.kept_bytes * kept),
        choices=choices,
    )


def _segment(each: Pass, segment: Segment, time: BlockTime, eager: BlockTime, held_bytes: int) -> Segment:
    """One in which a block is called, of several where it is called more than once. `held_bytes` wait for its end."""
    own = [other.seconds for other in each.segments if (other.block, other.phase) == (segment.block, segment.phase)]
    share = segment.seconds / sum(own) if sum(own) else 1 / len(own)
    if segment.phase == "forward":
        phase, more = time.forward, time.forward_peak_bytes - eager.forward_peak_bytes
    else:
        phase, more = time.backward, time.backward_peak_bytes - eager.backward_peak_bytes
    timing = _timing(phase)
    return replace(
        segment,
        seconds=phase.alone_seconds * share,
        work_bytes=max(segment.work_bytes + more, 0) + held_bytes,
        timing=None if timing is None else timing.slowed(share, share),
    )


def _timing(phase: PhaseTime) -> Timing | None:
    """None on a CPU device."""
    if not phase.launch_seconds:
        return None
    return Timing(1, phase.launch_seconds, phase.device_seconds, phase.alone_seconds)


def chosen_of(eager: Plan | None, code: Plan, compiling: Compiling, steps: int | None) -> Plan:
    """The plan that is through first, with the decision and its reason."""
    count, wanted = len(compiling.blocks), ASSUMED_STEPS if steps is None else steps
    blocks = "1 block" if count == 1 else f"{count} blocks"
    length = f"a run of {wanted} steps" if steps is not None else f"a run of {wanted} steps, as none were named (--steps)"
    took = f"about {show_seconds(compiling.seconds)} to compile them, once"
    if eager is None:
        return _decided(code, compiling.blocks, f"{blocks} compiled", f"eager nothing fits; {took}")
    gain = eager.forecast.step_seconds - code.forecast.step_seconds
    if gain * wanted <= compiling.seconds:
        why = "compiled code would not be faster" if gain <= 0 else f"{took}, which {length} would not win back"
        return _decided(eager, (), "no block compiled", why)
    why = f"eager would take {show_seconds(gain)} more a step"
    if compiling.seconds:  # else it has been done
        why += f"; {took}, pays after {-(-compiling.seconds // gain):.0f} steps"
    return _decided(code, compiling.blocks, f"{blocks} compiled", why)


def _decided(plan: Plan, blocks: tuple[str, ...], choice: str, why: str) -> Plan:
    stages = tuple(replace(each, compiled=blocks) for each in plan.stages[:1]) + plan.stages[1:]
    return replace(plan, stages=stages, decisions=(*plan.decisions, Decision("compile", choice, why)))
