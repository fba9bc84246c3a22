"""Plans with a tensor axis: what is asked for or refused, what each rank holds by hand, and which mesh is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit import Job, Machine, Plan
from anyfit.costing import cost
from anyfit.costing.links import Links
from anyfit.costing.on_axis import least_seconds, on_axis
from anyfit.cutting import Cutter, _factors, cutter_of, read_elsewhere
from anyfit.meshing import Axes, Meshes
from anyfit.planning import search
from anyfit.planning.fastest import RANKS_TIE, fastest_over_devices
from anyfit.planning.meshes import MeshChoice, bound_of, searched_meshes
from anyfit.planning.reasons import explained
from anyfit.profiling import profile_of, profiled
from anyfit.targets import job_for
from anyfit.tracing import trace
from anyfit.tracing.blocks import find_blocks
from anyfit.values.cut_figures import CutFigures, SolvedLayouts, layout_of
from anyfit.values.cuts import Cut
from anyfit.values.graph import Graph
from anyfit.values.layout import Placeable, lay_out
from anyfit.values.plan import BlockCut
from anyfit.values.profile import Profile
from tests.dist.any_model import ROWS, any_model
from tests.machines import on_slower_links, small_machine

NODE = Machine.load("h100-node")
N = 4


@cache
def gpt2(batch: int = 32, seq: int = 512) -> Job:
    return job_for("gpt2-small", batch=batch, seq=seq)


@cache
def traced(micro_batch: int = 4) -> Graph:
    return trace(gpt2(), micro_batch, "cuda")


@cache
def cutter() -> Cutter:
    return cutter_of(gpt2(), traced(), NODE)


@cache
def sequence() -> dict[str, CutFigures]:
    (found,) = cutter().layouts(N, "sequence")
    return found


@cache
def planned(batch: int, tensor: int | None, layout: str | None = None) -> Plan:
    return anyfit.plan(gpt2(batch), NODE, mesh=None if tensor is None else {"tensor": tensor}, layout=layout)


# ---------------------------------------------------------------------- what is asked for


def test_a_mesh_that_is_asked_for_is_the_plans_with_a_cut_for_every_block() -> None:
    plan = planned(8, N)
    assert (plan.mesh["data"], plan.mesh["tensor"], plan.ranks) == (2, 4, 8)
    assert list(plan.cut) == [f"transformer.h.{index}" for index in range(12)]
    assert plan.share == 4
    assert plan.decision("layout").choice.startswith("2 data x 4 tensor: ")
    assert plan.decision("layout").why.startswith("as asked for")
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("layout", "border", "cuts"),
    [("megatron", None, True), ("sequence", Cut(1), True), ("ulysses", Cut(1), False), ("data", Cut(0), False)],
)
def test_a_layout_that_is_asked_for_by_name_is_found(layout: str, border: Cut | None, cuts: bool) -> None:
    axes = Axes.of({"tensor": N}, layout)
    own = cutter_of(gpt2(), traced(), NODE, N) if layout == "data" else cutter()
    (found,) = own.layouts(N, axes.layout)
    first = found["transformer.h.1"]
    assert first.cut.entry == first.cut.exit == border
    assert bool(first.cut.parameters) == cuts
    if cuts:
        assert first.cut.parameters["attn.c_attn.weight"] == Cut(1, outer=3)
        assert first.cut.parameters["mlp.c_proj.weight"] == Cut(0)


@pytest.mark.parametrize(
    ("mesh", "layout", "said"),
    [
        ({"data": 3, "tensor": 4}, None, "it makes 12 ranks, and 8 are there; the nearest that fits is data=2,tensor=4"),
        ({"tensor": 3}, None, "it does not divide the 8 ranks; the nearest that fits is data=2,tensor=4"),
        ({"data": 5}, None, "it does not divide the 8 ranks; the nearest that fits is data=8,tensor=1"),
        ({"sequence": 2}, None, "unknown axis 'sequence'; known: data, pipeline, tensor"),
        ({"tensor": 0}, None, "tensor is 0; give a whole number from 1 up"),
        ({"tensor": 1}, "ulysses", "blocks are cut over a tensor axis, and mesh tensor=1 leaves it 1"),
        (None, "ulises", "layout 'ulises' is not known; did you mean 'ulysses'?"),
    ],
)
def test_a_mesh_or_layout_that_cannot_be_is_refused_with_what_can(mesh: Any, layout: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        Axes.of(mesh, layout).lengths((8, 1), 32)


def test_a_batch_that_the_data_axis_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of the 4 ranks of the data axis, such as 4"):
        Axes.of({"tensor": 2}, None).lengths((8, 1), 2)
    with pytest.raises(ValueError, match="a multiple of the 64 ranks, such as 64, or of 8 with a tensor axis of 8, such as 8"):
        Axes().lengths((8, 8), 3)
    assert Axes().lengths((8, 8), 16) == [4, 8]


def test_a_named_layout_that_a_block_does_not_have_is_refused_with_the_nearest_that_works() -> None:
    job = gpt2(8, 1022)  # 1022 is 2 x 511
    graph = trace(job, 1, "cuda")
    with pytest.raises(ValueError, match=r"transformer\.h\.0 has no layout 'sequence' over 4 ranks") as refused:
        Meshes(job, (8, 1), Axes(tensor=4, layout="sequence")).choices([graph], profiled(job, [graph], NODE, (8, 1), 8), NODE)
    assert str(refused.value).endswith("the nearest that works is tensor=2 with layout sequence")


def test_the_command_line_has_axes_as_a_script_has() -> None:
    assert Axes.parse("data=2, tensor=4", None) == Axes.of({"data": 2, "tensor": 4}, None)
    for text in ("data", "data=x", "data=2,data=2", "date=2"):
        with pytest.raises(ValueError, match="--mesh"):
            Axes.parse(text, None)


def test_a_profile_is_of_ranks_along_the_data_axis_alone() -> None:
    profile = profile_of(gpt2(), NODE, (8, 1), for_plan=True)
    assert profile.tensor == 1
    assert not profile.cut
    assert search(profile).mesh["tensor"] == 1


# ---------------------------------------------------------------------- what a rank has


def rank_profile(figures: dict[str, CutFigures] | None = None, micro_batch: int = 4) -> Profile:
    own = on_axis(traced(micro_batch), N, figures or sequence())
    return cost([own], NODE, 32, (8, 1))


def test_a_rank_holds_its_parts_and_what_is_whole_to_the_byte() -> None:
    figures, profile = sequence(), rank_profile()
    with torch.device("meta"):
        model = gpt2().build()
    cuts = {f"{path}.{name}": held for path, each in figures.items() for name, held in each.cut.parameters.items()}

    def part(name: str, parameter: Tensor) -> tuple[int, ...]:
        return cuts[name].part(parameter.shape, N) if name in cuts else tuple(parameter.shape)

    placeables = [
        Placeable(name, part(name, each), "bfloat16", 2, trainable=True, group=0, is_cut=name in cuts)
        for name, each in model.named_parameters()
    ]
    by_hand = lay_out(placeables, profile.offload_chunk_bytes, 8 // N)  # for the data axis
    assert [(each.elements, each.is_cut) for each in by_hand] == [(each.elements, each.is_cut) for each in profile.chunks]
    assert [each.weights_bytes for each in profile.chunks] == [2 * each.elements for each in by_hand]
    assert [each.optimizer_bytes for each in profile.chunks] == [10 * each.elements for each in by_hand]
    whole = sum(each.numel() for each in model.parameters())
    assert profile.parameters == profile.trainable == whole
    held = sum(each.numel() // (N if name in cuts else 1) for name, each in model.named_parameters())
    assert 0 <= sum(each.elements for each in profile.chunks) - held < 128 * 8 * len(profile.chunks) + 128 * len(placeables)


def test_a_rank_does_its_share_of_the_blocks_and_all_of_the_rest() -> None:
    whole, own = traced(), on_axis(traced(), N, sequence())
    for before, after in zip(whole.blocks, own.blocks, strict=True):
        index = whole.blocks.index(before)
        flops = [sum(op.flops for op in graph.ops if op.block == index) for graph in (whole, own)]
        assert flops[1] == pytest.approx(flops[0] / (N if before.name else 1), rel=1e-6)
        assert after.is_cut == bool(before.name)
    assert own.backward_starts - whole.backward_starts == sum(
        op.kind == "exchange" or op.name == "clone" for op in own.ops if op.phase == "forward"
    )
    assert sum(own.kept(each) for each in own.values) == sum(whole.kept(each) for each in whole.values)
    for value in own.values:
        assert all(value.born <= at <= max(value.dies, value.born) for at in value.reads) or value.kind == "input"


def test_what_ranks_exchange_is_priced_by_the_machines_links_and_named() -> None:
    profile, links = rank_profile(), Links(NODE, 8, 1)
    seconds = sum(
        links.between(move.move, N).seconds(move.bytes * 4)  # type: ignore[arg-type]
        for each in sequence().values()
        for shares in (each.forward, each.backward)
        for move in shares.moves
        if move.move not in ("slice", "mask")
    )
    assert profile.passes[0].exchange_seconds == pytest.approx(seconds, rel=1e-6)
    found = fastest_over_devices(profile)
    assert found is not None
    assert found.chosen.split_seconds["exposed communication"] >= seconds
    assert sum(found.chosen.split_seconds.values()) == pytest.approx(found.chosen.step_seconds)


def test_no_pass_of_a_rank_takes_less_than_its_bound() -> None:
    base = cost([traced()], NODE, 32, (8, 1))
    for figures in (sequence(), *cutter().layouts(2)):
        n = N if figures is sequence() else 2
        own = cost([on_axis(traced(), n, figures)], NODE, 32, (8, 1))
        least = least_seconds(base.passes[0], n, figures, NODE)
        assert least <= own.passes[0].played.device_seconds * (1 + 1e-9)
        found = fastest_over_devices(own)
        assert found is not None
        assert bound_of(base, 8 // n, [least]) <= found.chosen.step_seconds * (1 + 1e-9)


def test_a_cut_block_is_recomputed_to_its_end_with_all_that_it_exchanges() -> None:
    own = cost([on_axis(traced(), N, sequence())], NODE, 32, (8, 1)).passes[0]
    for index, block in enumerate(own.blocks):
        forward = [each.device_seconds for each in own.segments if each.block == index and each.phase == "forward"]
        if block.name:
            assert block.choices["recompute"].device_seconds == pytest.approx(sum(forward))


def test_ranks_of_a_data_group_lie_as_far_apart_as_the_tensor_axis_is_long() -> None:
    links = Links(NODE, 8, 4)
    assert links.along_data(4) == Links(NODE, 2, 4)
    assert links.along_data(16) == Links(NODE, 1, 2)
    with pytest.raises(ValueError, match="fits neither"):
        links.along_data(3)
    for division in links.divisions(4):
        assert (division.ranks, division.tensor) == (8, 4)
        assert division.reduce_whole.seconds(1e9) > division.reduce.seconds(1e9)
    (alone,) = Links(NODE, 8, 1).divisions(8)
    assert not alone.is_alone
    assert alone.reduce.seconds(1e9) == 0.0 < alone.reduce_whole.seconds(1e9)


def test_layouts_have_the_names_that_people_gave_them() -> None:
    cut, gathers = {"w": Cut(0)}, {"forward all_gather": 2, "backward reduce_scatter": 2}
    assert layout_of(BlockCut(cut), {"forward all_reduce": 2}) == "megatron"
    assert layout_of(BlockCut(cut, Cut(1), Cut(1)), gathers) == "sequence"
    assert layout_of(BlockCut({}, Cut(1), Cut(1)), {"forward all_to_all": 4}) == "ulysses"
    assert layout_of(BlockCut({}, Cut(0), Cut(0)), {}) == "data"
    assert layout_of(BlockCut(cut, Cut(1), Cut(1)), gathers | {"forward all_to_all": 1}) == "mixed"


def test_what_was_solved_is_read_again_and_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cutter().layouts(N)
    monkeypatch.setattr(Cutter, "_solve", None)  # would fail
    again = cutter_of(gpt2(), traced(), NODE)
    assert again.layouts(N) == first
    kept = SolvedLayouts("machine", {"a": tuple(first[0].values())[:1]})
    assert SolvedLayouts.from_json(kept.to_json()) == kept


# ---------------------------------------------------------------------- blocks that do not follow each other


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Skips(nn.Module):
    """The output of the second of four layers is read again after the last."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                skipped = x
        return x + skipped


def test_a_run_of_blocks_ends_where_something_else_reads_what_one_gives() -> None:
    job = Job(
        Skips,
        lambda model, x: model(x).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters()),
        torch.randn(8, 16, 32),
        8,
    )
    graph = trace(job, 8, "cuda")
    assert read_elsewhere(graph) == {"layers.1"}
    assert [run.paths for run in cutter_of(job, graph, NODE).runs] == [("layers.0", "layers.1"), ("layers.2", "layers.3")]


# ---------------------------------------------------------------------- which mesh is taken


def test_without_need_there_is_no_tensor_axis_and_the_why_names_the_best_other() -> None:
    plan = planned(32, None)
    assert plan.mesh["tensor"] == 1
    assert plan.decision("layout").choice == "8 data x 1 tensor: all blocks whole"
    assert " tensor, " in plan.decision("layout").why
    assert plan.explained("layout")


def test_a_batch_of_fewer_samples_than_ranks_has_a_tensor_axis() -> None:
    plan = planned(2, None)
    assert plan.mesh["tensor"] in (4, 8)
    assert len(plan.cut) == 12
    assert plan.forecast.split_seconds["exposed communication"] > 0


def choices(batch: int = 32) -> list[MeshChoice]:
    graphs = [traced(4)]
    base = cost(graphs, NODE, batch, (8, 1))
    return [each for each in Meshes(gpt2(batch), (8, 1), Axes()).choices(graphs, base, NODE) if each.stages == 1]


@pytest.mark.parametrize("slowness", [1.0, 1e3])
@pytest.mark.parametrize("room", [80, 3])
def test_the_mesh_that_is_taken_is_as_fast_as_any_but_for_what_is_not_told_apart(room: int, slowness: float) -> None:
    """With links of any speed between the ranks of the data axis, and more or less memory."""

    def slower(profile: Profile) -> Profile:
        profile = on_slower_links(profile, slowness)
        return replace(profile, device_limit_bytes=room * 2**30, host_limit_bytes=2**20)

    meshes = [replace(each, make=lambda each=each: slower(each.make())) for each in choices()]
    plan = searched_meshes(meshes, explained)
    each = [fastest_over_devices(mesh.make()) for mesh in meshes]
    fitting = [found.chosen.mean_step_seconds for found in each if found is not None]
    assert bool(fitting) == (plan is not None)
    if plan is not None:
        assert plan.forecast.mean_step_seconds <= (1 + RANKS_TIE) * min(fitting) * (1 + 1e-9)
        assert plan.fits
        assert (plan.mesh["tensor"] > 1) == (slowness > 1)


def test_an_optimizer_that_looks_at_whole_parameters_leaves_them_whole() -> None:
    job = job_for("gpt2-small", batch=8, seq=512, optimizer="adafactor")
    own = cutter_of(job, trace(job, 1, "cuda"), NODE)
    assert all(not each.cut.parameters for found in own.layouts(2) for each in found.values())
    with pytest.raises(ValueError, match="stays whole: something else holds it too, or its optimizer looks at whole parameters"):
        own.layouts(2, "megatron")


def job_of(model: Any, batch: int = 8, loss: Any = None, **options: Any) -> Job:
    return Job(
        model,
        loss or (lambda model, x: model(x).square().mean()),
        lambda model: torch.optim.AdamW(model.parameters()),
        torch.randn(batch, 16, 32),
        batch,
        **options,
    )


def test_a_model_that_does_not_run_with_one_sample_has_no_tensor_axis_and_says_why() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert len(x) > 1, "one sample is too few"
        return model(x).square().mean()

    job = job_of(Skips, loss=loss)
    graph = trace(job, 8, "cpu")
    base = profiled(job, [graph], NODE, (8, 1), 64)
    assert {each.tensor for each in Meshes(job, (8, 1), Axes(), 64).choices([graph], base, NODE)} == {1}
    with pytest.raises(ValueError, match="no block can be cut over 4: Skips stays whole, as it does not run with one sample"):
        Meshes(job, (8, 1), Axes(tensor=4), 64).choices([graph], base, NODE)


def test_blocks_of_a_model_whose_forward_needs_values_are_captured_from_a_real_run() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return y.square().mean() * (2.0 if y.sum().item() > 0 else 1.0)

    job = job_of(Skips, loss=loss)
    assert [run.paths for run in cutter_of(job, trace(job, 8, "cpu"), NODE).runs] == [
        ("layers.0", "layers.1"),
        ("layers.2", "layers.3"),
    ]
    unasked = replace(job, real_run=False)
    assert "needs the value of a tensor" in cutter_of(unasked, trace(job_of(Skips), 8, "cpu"), NODE).whole["Skips"]


def test_an_axis_that_is_asked_for_cuts_what_is_not_worth_cutting() -> None:
    """Small blocks on a machine whose ranks exchange slowly."""
    model, batch = any_model("in place", drops=False)
    job = Job(model, lambda model, batch: model(**batch)[0], lambda model: torch.optim.AdamW(model.parameters()), batch, ROWS)
    graph, machine = trace(job, ROWS, "cpu"), small_machine()
    assert not cutter_of(job, graph, machine).layouts(2)
    base = profiled(job, [graph], machine, (2, 1), ROWS)
    (first, *_) = Meshes(job, (2, 1), Axes(tensor=2)).choices([graph], base, machine)
    assert list(first.cut) == [f"blocks.{index}" for index in range(3)]
    assert all(each.parameters for each in first.cut.values())
    assert {each.tensor for each in Meshes(job, (2, 1), Axes()).choices([graph], base, machine)} == {1}


class Statistics(Skips):
    """Before its blocks a norm takes its statistics from the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def test_ranks_that_cannot_share_the_batch_hold_the_model_together() -> None:
    two = NODE.with_devices(2, 1)
    job = job_of(Statistics)
    plan = anyfit.plan(job, two)
    assert (plan.mesh["data"], plan.mesh["tensor"]) == (1, 2)
    assert plan.micro_batches == [8]
    said = "takes its statistics from the whole batch"
    with pytest.raises(ValueError, match=f"2 ranks cut the batch among them, and norm {said}"):
        anyfit.plan(job, two, mesh={"tensor": 1})
    with pytest.raises(ValueError, match=rf"{said}.*; nor can they hold the model together: no block can be cut"):
        anyfit.plan(job_of(lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(32, 32))), two)


class Windows(nn.Module):
    """Of a sample's 64 rows, four windows; and as wide as these are many."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.view(-1, 16, 32)
        out: Tensor = x + self.down(torch.relu(self.up(parts))).view(x.shape)
        return out


def test_a_width_has_no_factors_because_it_is_as_large_as_the_rows_of_a_sample() -> None:
    job = replace(job_of(lambda: nn.Sequential(Windows(), Windows())), sample=torch.randn(8, 64, 32))
    own = cutter_of(job, trace(job, 8, "cuda"), NODE)
    found = [*own.layouts(2, "sequence"), *own.at_any_price(2)]
    cuts = [cut for layout in found for each in layout.values() for cut in each.cut.parameters.values()]
    assert cuts
    assert all(cut.outer == 1 for cut in cuts)
    (run,) = own.runs
    assert (64, 4) in _factors(run.captured[0], 2)
    assert own._inner_factors(run, 2) == {(size, outer) for size, outer in own._inner_factors(run, 2) if outer != 4}


def test_blocks_whose_weights_are_made_of_others_are_a_chain() -> None:
    made = [nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU()) for _ in range(3)]
    assert [each.name for each in find_blocks(nn.Sequential(*made)).blocks] == ["0", "1", "2", ""]
