"""What a rehearsal has found (rehearsal.py): what a plan may do to a model without changing its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from anyfit.values.loss_rule import LossRule
from anyfit.values.plan import Plan
from anyfit.values.profile import Profile


@dataclass(frozen=True)
class Findings:
    """What a plan may do to this model."""

    loss: LossRule
    kept: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be recomputed, and why
    not_selective: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be recomputed in part

    def against(self, plan: Plan) -> str | None:
        """What speaks against the plan."""
        if plan.cuts and not self.loss.may_be_cut:
            return f"the plan cuts the batch, and {self.loss.why}"
        for name, choice in plan.stages[0].activations.items():
            if choice in ("recompute", "selective") and name in self.kept:
                return f"the plan recomputes {name}, and {self.kept[name]}"
            if choice == "selective" and name in self.not_selective:
                return f"the plan recomputes {name} in part, and {self.not_selective[name]}"
        return None

    def ways_out(self, plan: Plan) -> str:
        """Of a plan that was given."""
        if plan.cuts and not self.loss.may_be_cut:
            return f"use a plan with micro_batch {plan.batch_size}; {self.loss.ways_out}"
        return "use a plan that keeps it, or let anyfit.plan(job) make one"

    def restrict(self, profile: Profile) -> Profile:
        """The profile without what must not be done."""
        if not self.loss.may_be_cut and profile.ranks > 1:
            raise ValueError(f"{profile.ranks} ranks cut the batch among them, and {self.loss.why}; {self.loss.ways_out}")
        if not self.loss.may_be_cut and profile.passes[0].micro_batch < profile.batch_size:
            raise ValueError(
                f"Job(micro_batch={profile.passes[0].micro_batch}) cuts the batch, and {self.loss.why}; {self.loss.ways_out}"
            )
        profile = profile.ruled(self.loss).keeping(self.kept)
        return profile.keeping(self.not_selective, ("selective",)) if self.not_selective else profile

    def joined(self, others: list[Findings]) -> Findings:
        """Those of all ranks: what one of them must not do, none does."""
        rule = next((each.loss for each in others if not each.loss.may_be_cut), self.loss)
        if len({(each.loss.kind, each.loss.divisor) for each in others}) > 1 and rule.may_be_cut:
            rule = replace(rule, kind="whole", why="the loss is cut by other rules on other ranks")
        kept = {name: why for each in others for name, why in each.kept.items()}
        return Findings(rule, kept, {name: why for each in others for name, why in each.not_selective.items()})
