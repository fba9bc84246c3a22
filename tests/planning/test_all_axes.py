"""Stages that nobody asked for: where they are taken, offered or refused, and that no mesh is better."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from anyfit import Job, Machine, NoPlan
from anyfit.costing import cost
from anyfit.meshing import Axes, Meshes
from anyfit.planning.fastest import RANKS_TIE, fastest_over_devices
from anyfit.planning.meshes import STAGES_TIE, MeshChoice, search_meshes, searched_meshes, tried_meshes
from anyfit.planning.reasons import explained
from anyfit.planning.staged_plans import pipelined
from anyfit.tracing import trace
from anyfit.values.profile import Profile
from tests.machines import on_slower_links

NODE = Machine.load("h100-node")
WIDTH, DEPTH, WORDS = 256, 12, 512


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, *, hidden: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))
        self.hidden, self.seen = hidden, []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        if self.hidden:  # one that leaves its block by an attribute
            x = x + self.blocks[0].up.seen.mean()  # type: ignore[union-attr, operator]
        return self.head(x)  # type: ignore[no-any-return]


def keep(module: Any, _given: Any, result: Tensor) -> None:
    module.seen = result


def hidden() -> Net:
    made = Net(hidden=True)
    made.blocks[0].up.register_forward_hook(keep)  # type: ignore[union-attr]
    return made


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def job_of(model: Any = Net, batch: int = 64) -> Job:
    ids = torch.zeros(1, 128, dtype=torch.long)
    return Job(model, loss, lambda model: torch.optim.AdamW(model.parameters()), ids, batch)


MODELS: dict[str, Any] = {"plain": Net, "dropout": lambda: Net(0.1), "hidden": hidden}


@cache
def choices(model: str = "plain", micro_batches: tuple[int, ...] = (8, 2, 1)) -> tuple[MeshChoice, ...]:
    job = job_of(MODELS[model])
    graphs = [trace(job, each, "cuda") for each in micro_batches]
    base = cost(graphs, NODE, job.batch_size, (8, 1))
    return tuple(Meshes(job, (8, 1), Axes()).choices(graphs, base, NODE))


def on_links(meshes: tuple[MeshChoice, ...], slowness: float, room: float = 80.0, computing: float = 1.0) -> list[MeshChoice]:
    """With links of any speed between the ranks of the data axis, more or less memory, and passes so many times as long."""

    def changed(profile: Profile) -> Profile:
        profile = on_slower_links(profile, slowness)
        passes = tuple(each.scaled(computing) for each in profile.passes)
        return replace(profile, passes=passes, device_limit_bytes=int(room * 2**30))

    return [replace(each.changed(changed), bound=computing * each.bound) for each in meshes]


def seconds_of(mesh: MeshChoice) -> float:
    """Of its best plan; without one, more than any."""
    if mesh.pipeline is None:
        found = fastest_over_devices(mesh.make())
        return float("inf") if found is None else found.chosen.mean_step_seconds
    try:
        return pipelined(mesh.make(), mesh.pipeline()).forecast.mean_step_seconds
    except NoPlan:
        return float("inf")


def test_every_number_of_stages_is_considered_with_every_other_axis() -> None:
    found = {(each.data, each.tensor, each.stages) for each in choices()}
    assert {(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 2, 4), (1, 4, 2)} <= found
    assert all(data * tensor * stages == 8 for data, tensor, stages in found)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([1.0, 30.0, 1e3, 1e5]), st.sampled_from([80.0, 2.5]), st.sampled_from([1.0, 20.0]))
def test_no_mesh_is_faster_than_the_one_that_is_taken_by_more_than_is_told_apart(
    slowness: float, room: float, computing: float
) -> None:
    meshes = on_links(choices(), slowness, room, computing)
    plan = searched_meshes(meshes, explained)
    each = [(seconds_of(mesh), mesh) for mesh in meshes]
    for seconds, mesh in each:
        assert mesh.bound <= seconds * (1 + 1e-9), mesh.said
    assert (plan is None) == all(seconds == float("inf") for seconds, _ in each)
    if plan is not None:
        assert plan.fits
        mine = plan.forecast.mean_step_seconds
        for seconds, mesh in each:
            fair = seconds * (1 + STAGES_TIE if mesh.stages > 1 else 1.0)
            assert mine <= (1 + RANKS_TIE) * fair * (1 + 1e-9), mesh.said


def test_where_ranks_exchange_slowly_stages_are_taken() -> None:
    plan = search_meshes(on_links(choices(), slowness=1e4, computing=20.0))
    assert plan.mesh["pipeline"] > 1
    assert f"x {plan.mesh['pipeline']} pipeline" in plan.decision("layout").choice
    assert " pipeline would take " in plan.decision("layout").why


def test_where_no_rank_waits_for_long_no_stages_are_cut_at_all() -> None:
    """By their bound: nobody looks at the model's calls."""
    uncut = tuple(each for each in choices("hidden") if each.tensor == 1)
    tried = tried_meshes(on_links(uncut, slowness=1.0, computing=1e3), explained)
    assert {each.least_seconds is None for each in tried if each.mesh.stages > 1} == {False}
    assert not any(each.refused for each in tried)


def test_stages_that_would_draw_other_random_numbers_are_offered_and_not_taken() -> None:
    plan = search_meshes(on_links(choices("dropout"), slowness=1e4, computing=20.0))
    assert plan.mesh["pipeline"] == 1
    why = plan.decision("layout").why
    assert "random numbers (" in why
    assert "in blocks.0) would be drawn by key: --mesh data=" in why
    offered = [each for each in plan.alternatives if each.decision == "layout" and "pipeline" in each.choice]
    assert min(each.step_seconds for each in offered) < plan.forecast.step_seconds


def test_a_model_that_cannot_be_cut_into_stages_has_none_and_the_why_keeps_the_reason() -> None:
    plan = search_meshes(on_links(choices("hidden"), slowness=1e4, computing=20.0))
    assert plan.mesh["pipeline"] == 1
    assert "no pipeline: a tensor that 'blocks.0' makes and does not return is read by" in plan.decision("layout").why


def test_where_nothing_fits_but_stages_that_draw_by_key_the_verdict_has_what_to_type() -> None:
    """On hosts that have no memory for ranks with all of the model."""

    def alone(model: str) -> list[MeshChoice]:
        without = (each.changed(lambda profile: replace(profile, host_limit_bytes=2**20)) for each in choices(model))
        return [each for each in without if each.tensor == 1]

    with pytest.raises(NoPlan) as verdict:
        search_meshes(alone("dropout"))
    change = verdict.value.changes[0]
    assert change.what.startswith("--mesh data=")
    assert ",pipeline=" in change.what
    assert "would be drawn by key" in change.note
    assert search_meshes(alone("plain")).mesh["pipeline"] > 1
