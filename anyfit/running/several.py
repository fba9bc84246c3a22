"""One device's plan and machine, for one of several ranks: what each may take, and how the state is divided among them.

The planner plans a rank's share of the batch for one device that has all of the model's state. Divided among the ranks the state
takes less: so what fits, fits. Where everything was to be on the device, weights stay whole on every rank, and the optimizer's
state is divided (as in ZeRO-1); where not, all of it is divided, wherever it lies (ZeRO-3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anyfit.values.machine import Machine
from anyfit.values.plan import AXES, Decision, Placement, Plan

SLOTS, PREFETCH = 4, 2  # where weights on the device are put together for use
STEP_ERROR = 1.0  # of seconds: nothing that ranks exchange is forecast


def machine_of_rank(machine: Machine, places: Sequence[str], rank: int) -> Machine:
    """What one rank may take of the machine. `places` has every rank's node and device. Limits that were given stay."""
    node = places[rank].partition(" ")[0]
    on_node = sum(place.partition(" ")[0] == node for place in places)
    on_device = sum(place == places[rank] for place in places)
    limits = machine.limits
    return machine.with_limits(
        device_memory=machine.device_limit_bytes // on_device if limits.device_bytes is None and on_device > 1 else None,
        host_memory=machine.host_limit_bytes // on_node if limits.host_bytes is None and on_node > 1 else None,
    )


def for_ranks(plan_of_share: Plan, ranks: int) -> Plan:
    """The plan of all ranks, from that of one rank's share of the batch on one device."""
    is_resident = all(each == Placement() for each in plan_of_share.chunks)
    share, forecast = plan_of_share.batch_size, plan_of_share.forecast
    chunks: tuple[Placement, ...]
    if is_resident:
        chunks, how = (Placement(optimizer_shards=ranks),), "weights whole on each, the optimizer's state divided"
        slots, prefetch = plan_of_share.slots, plan_of_share.prefetch
    else:
        chunks = tuple(
            replace(each, weight_shards=ranks, gradient_shards=ranks, optimizer_shards=ranks) for each in plan_of_share.chunks
        )
        how = "all state divided"
        slots, prefetch = max(plan_of_share.slots, SLOTS), max(plan_of_share.prefetch, PREFETCH)
    why = "whole on every rank it was planned for one; what ranks exchange is not forecast"
    return replace(
        plan_of_share,
        batch_size=share * ranks,
        mesh={**dict.fromkeys(AXES, 1), "data": ranks},
        chunks=chunks,
        slots=slots,
        prefetch=prefetch,
        forecast=replace(
            forecast,
            step_error=max(forecast.step_error, STEP_ERROR),
            samples_per_second=forecast.samples_per_second * ranks,
            tokens_per_second=forecast.tokens_per_second * ranks,
        ),
        decisions=(Decision("ranks", f"{ranks}, each with {share} samples of a step; {how}", why), *plan_of_share.decisions),
    )
