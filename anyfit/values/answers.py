"""Plans side by side: what differs between some, and which machine is best for a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .plan import TIERS, NoPlan, Plan, TierName
from .units import show_bytes, show_count, show_seconds

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
        **{f"{tier} memory": f"{show_bytes(used[tier])} of {show_bytes(plan.limit_bytes[tier])}" for tier in TIERS if used[tier]},
    }


@dataclass(frozen=True)
class Ranked:
    """A job on one machine; seconds and cost are of a number of tokens, None where it does not fit or has no price."""

    machine: str
    outcome: Outcome
    seconds: float | None
    cost: float | None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"machine": self.machine, "seconds": self.seconds, "cost": self.cost}
        if isinstance(self.outcome, Plan):
            return found | {"plan": self.outcome.to_json()}
        return found | {"no_plan": str(self.outcome), "shortfall_bytes": self.outcome.shortfall_bytes}


def ranked(outcomes: Mapping[str, Outcome], tokens: int, prices: Mapping[str, float]) -> list[Ranked]:
    """The machines, fastest first, those where nothing fits last; prices are an hour's."""
    found: list[tuple[tuple[bool, float], Ranked]] = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, Plan):
            seconds = tokens / outcome.forecast.tokens_per_second
            cost = prices[name] * seconds / 3600 if name in prices else None
            found.append(((False, seconds), Ranked(name, outcome, seconds, cost)))
        else:
            found.append(((True, outcome.shortfall_bytes), Ranked(name, outcome, None, None)))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]
