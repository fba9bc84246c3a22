"""Plans side by side: what differs between some, and which machine is best for a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .no_plan import NoPlan
from .plan import TIERS, Plan, TierName
from .plan_rows import memory_name
from .prices import Price
from .record import encode
from .units import show_bytes, show_count, show_seconds


@dataclass(frozen=True)
class Refused:
    """A job that a machine cannot have at all, whatever its memory."""

    why: str


Outcome: TypeAlias = Plan | NoPlan
ANSWERS = ("device limit", "host limit")  # decisions that answer "what if", and are no part of a plan


def beside(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """By label, what each outcome has: the forecasts, then what is not the same in all. Differences are to the first."""
    plans = [outcome if isinstance(outcome, Plan) else None for outcome in outcomes.values()]
    first = plans[0]
    rows = {
        "step": [
            f"{show_seconds(outcome.forecast.step_seconds)} ± {outcome.forecast.step_error:.0%}"
            if isinstance(outcome, Plan)
            else f"does not fit, {show_bytes(outcome.shortfall_bytes)} too little"
            for outcome in outcomes.values()
        ],
        "tokens/s": ["" if plan is None else show_count(plan.forecast.tokens_per_second) for plan in plans],
    }
    if first is not None:
        rows["difference"] = ["", *("" if plan is None else _difference(first, plan) for plan in plans[1:])]
    facts = [{} if plan is None else _facts(plan) for plan in plans]
    for label in dict.fromkeys(label for fact in facts for label in fact):
        values = [fact.get(label, "" if plan is None else "-") for fact, plan in zip(facts, plans, strict=True)]
        distinct = {value for value, plan in zip(values, plans, strict=True) if plan is not None}
        if len(distinct) > 1 or first is None:
            rows[label] = values
    return rows


def _difference(first: Plan, other: Plan) -> str:
    seconds = other.forecast.step_seconds - first.forecast.step_seconds
    rate = other.forecast.tokens_per_second / first.forecast.tokens_per_second - 1
    step = f"{show_seconds(abs(seconds))} {'less' if seconds < 0 else 'more'} a step" if seconds else "the same step time"
    return f"{step}, {rate:+.1%} tokens/s"


def _facts(plan: Plan) -> dict[str, str]:
    forecast = plan.forecast
    used: dict[TierName, int] = {**forecast.peak_bytes, "device": forecast.reserved_bytes}
    return {
        "model": plan.title,
        "machine": plan.machine,
        **{decision.name: decision.choice for decision in plan.decisions if decision.name not in ANSWERS},
        "of which": ", ".join(f"{name} {show_seconds(took)}" for name, took in forecast.split_seconds.items() if took > 0),
        **{
            memory_name(tier, plan.device_kind): f"{show_bytes(used[tier])} of {show_bytes(plan.limit_bytes[tier])}"
            for tier in TIERS
            if used[tier]
        },
    }


@dataclass(frozen=True)
class Ranked:
    """A job on one machine; seconds and cost are of a number of tokens, None where it does not fit or has no price."""

    machine: str
    devices: int
    outcome: Outcome | Refused
    seconds: float | None
    cost: float | None
    price: Price | None = None  # an hour's

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"machine": self.machine, "devices": self.devices, "seconds": self.seconds, "cost": self.cost}
        found["price"] = None if self.price is None else encode(self.price)
        if isinstance(self.outcome, Plan):
            return found | {"batch": self.outcome.batch_size, "plan": self.outcome.to_json()}
        if isinstance(self.outcome, Refused):
            return found | {"refused": self.outcome.why}
        return found | {"no_plan": str(self.outcome), "shortfall_bytes": self.outcome.shortfall_bytes}


def ranked(
    outcomes: Mapping[str, Outcome | Refused], devices: Mapping[str, int], tokens: int, prices: Mapping[str, Price]
) -> list[Ranked]:
    """The machines, fastest first, those where nothing fits last."""
    found: list[tuple[tuple[int, float], Ranked]] = []
    for name, outcome in outcomes.items():
        price, count = prices.get(name), devices[name]
        if isinstance(outcome, Plan):
            seconds = tokens / outcome.forecast.tokens_per_second
            cost = None if price is None else price.usd_per_hour * seconds / 3600
            found.append(((0, seconds), Ranked(name, count, outcome, seconds, cost, price)))
        else:
            key = (1, outcome.shortfall_bytes) if isinstance(outcome, NoPlan) else (2, 0)
            found.append((key, Ranked(name, count, outcome, None, None, price)))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]
