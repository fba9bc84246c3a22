"""A plan as labelled lines for people: first whether it fits, then its decisions, then what it is forecast to cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from .plan import DeviceKind, Plan, TierName

CHANGES_HOST = "--host-memory changes it"


def rows_of(plan: Plan) -> list[tuple[str, str]]:
    forecast = plan.forecast
    rows = [("fits", verdict(plan)), ("model", plan.title), ("machine", plan.machine)]
    rows += [(decision.name, f"{decision.choice}: {decision.why}") for decision in plan.decisions]
    step = f"{show_seconds(forecast.step_seconds)} ± {forecast.step_error:.0%}"
    rate = f"{show_count(forecast.tokens_per_second)} tokens/s, {forecast.compute_share:.0%} of peak compute"
    spent = (f"{name} {show_seconds(seconds)}" for name, seconds in forecast.split_seconds.items() if seconds > 0)
    rows += [("step", f"{step}, {rate}"), *_clipped(plan), ("of which", ", ".join(spent)), *_memory(plan)]
    if forecast.start_seconds:
        rows.append(("start", f"about {forecast.start_seconds:.0f} s, once, until the first step begins"))
    return rows


def verdict(plan: Plan) -> str:
    """Whether it fits, what of it is not on the device, and how long a step takes."""
    forecast = plan.forecast
    if not plan.fits:
        memory, limit = memory_name("device", plan.device_kind), show_bytes(plan.limit_bytes["device"])
        return f"no: it needs {show_bytes(forecast.needed_bytes)} of {memory}, and {limit} are allowed"
    device = {"cuda": "on the GPU", "cpu": "in RAM", None: "on the device"}[plan.device_kind]
    choices, away = set(plan.activations.values()), []
    if any("host" in (each.weights, each.optimizer) for each in plan.chunks):
        away.append("part of the model state on the host")
    if any(each.optimizer == "disk" for each in plan.chunks):
        away.append("part of the optimizer state on the disk")
    if choices & {"recompute", "selective"}:
        away.append("some activations recomputed")
    if "offload" in choices:
        away.append("some activations offloaded to the host")
    how = f"with {' and '.join(away)}" if away else f"all {device}"
    among = f" on {plan.ranks} {'processes' if plan.device_kind == 'cpu' else 'GPUs'}" if plan.ranks > 1 else ""
    return f"yes{among}, {how}; a step takes {show_seconds(forecast.step_seconds)}"


def memory_name(tier: TierName, kind: DeviceKind | None) -> str:
    """What people call it: a CPU's own is the machine's.

    >>> memory_name("device", "cpu"), memory_name("device", "cuda"), memory_name("host", "cpu"), memory_name("disk", "cpu")
    ('memory', 'device memory', 'host memory', 'disk')
    """
    if tier == "disk":
        return "disk"
    return "memory" if tier == "device" and kind == "cpu" else f"{tier} memory"


def _memory(plan: Plan) -> list[tuple[str, str]]:
    from .plan import TIERS

    forecast, rows = plan.forecast, []
    for tier in TIERS:
        size, error, reserved = forecast.peak_bytes[tier], forecast.peak_error, ""
        if tier == "device":
            reserved = " reserved," if forecast.reserved_bytes != size else ""  # by the allocator and the runtime, beyond tensors
            size, error = forecast.reserved_bytes, forecast.reserved_error
        ram = " of RAM" if plan.device_kind == "cpu" and tier != "disk" else ""
        assumed = f", assumed by the preset ({CHANGES_HOST})" if tier == "host" and plan.assumes_host else ""
        if size:
            limit = show_bytes(plan.limit_bytes[tier])
            rows.append(
                (memory_name(tier, plan.device_kind), f"{show_bytes(size)} ± {error:.0%}{reserved} of {limit}{ram}{assumed}")
            )
    return rows


def _clipped(plan: Plan) -> list[tuple[str, str]]:
    forecast, clipping = plan.forecast, plan.forecast.clipping
    if clipping is None or not forecast.has_slower_steps:
        return []
    said = f"{show_seconds(clipping.step_seconds)} where every step is"
    if clipping.redone_seconds > forecast.step_seconds:
        said += f", {show_seconds(clipping.redone_seconds)} for one among others that are not"
    return [("clipped step", f"{said}; {show_seconds(forecast.mean_step_seconds)} on average, as many as are expected")]
