"""Plans that divide the rows of embedding and head over a tensor axis: which tables can be, and what a rank has and does then."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from anyfit import Job, Machine, Plan
from anyfit.costing import cost
from anyfit.costing.on_axis import least_seconds, on_axis
from anyfit.costing.vocabulary import of_words
from anyfit.cutting import cutter_of
from anyfit.targets import job_for
from anyfit.tracing import trace
from anyfit.values.graph import Graph

NODE = Machine.load("h100-node")
N, WORDS = 4, 50304
TABLE = "transformer.wte.weight"  # GPT-2's embedding, and its head


@cache
def gpt2(batch: int = 32) -> Job:
    return job_for("gpt2-small", batch=batch, seq=512)


@cache
def traced() -> Graph:
    return trace(gpt2(), 4, "cuda")


# ---------------------------------------------------------------------- which tables


class Talker(nn.Module):
    """An embedding, positions, one layer, and a head of which `use` says what else is made."""

    def __init__(self, use: str = "", words: int = 64, *, is_tied: bool = False) -> None:
        super().__init__()
        self.use = use
        self.embed, self.positions = nn.Embedding(words, 16), nn.Embedding(32, 16)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, words, bias=False)
        self.register_buffer("added", torch.zeros(1, words))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        logits = self.head(self.layer(x).relu())
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        if self.use == "weight decay":
            loss = loss + 1e-3 * self.head.weight.square().sum()
        if self.use == "bias":
            loss = F.cross_entropy((logits + self.added).flatten(0, 1).float(), ids.flatten())
        if self.use == "z-loss":
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        return loss


def tables_of(model: Talker) -> set[str]:
    ids = torch.randint(0, 64, (8, 32))
    job = Job(lambda: model, lambda model, ids: model(ids), lambda model: torch.optim.AdamW(model.parameters()), ids, 8)
    return set(cutter_of(job, trace(job, 8, "cuda"), NODE).tables_over(2))


def test_embedding_and_head_are_divided_and_positions_are_not() -> None:
    assert tables_of(Talker()) == {"embed.weight", "head.weight"}
    assert tables_of(Talker(is_tied=True)) == {"embed.weight"}
    assert tables_of(Talker("bias")) == {"embed.weight", "head.weight"}


@pytest.mark.parametrize("use", ["weight decay", "z-loss"])
def test_words_stay_whole_where_some_use_of_the_head_would_put_it_together(use: str) -> None:
    assert tables_of(Talker(use)) == set()


def test_a_table_is_divided_too_where_the_axis_does_not_divide_its_rows() -> None:
    assert tables_of(Talker(words=65)) == {"embed.weight", "head.weight"}
    assert tables_of(Talker("z-loss", words=65)) == set()


# ---------------------------------------------------------------------- what a rank has and does


def test_a_rank_holds_its_rows_and_does_its_share_of_the_words() -> None:
    whole, own = traced(), on_axis(traced(), N, {}, (TABLE,))
    shapes = {each.name: each.shape for each in own.parameters}
    assert shapes[TABLE] == (WORDS // N, 768)
    assert shapes["transformer.wpe.weight"] == (1024, 768)
    rows = 4 * 512
    products = 3 * 2 * rows * WORDS * 768  # forward, and both gradients
    flops = [sum(op.flops for op in graph.ops if op.block == graph.outside) for graph in (whole, own)]
    assert flops[0] - flops[1] == pytest.approx(products * (1 - 1 / N), rel=0.01)
    inside = [sum(op.flops for op in graph.ops if op.block != graph.outside) for graph in (whole, own)]
    assert inside[0] == inside[1]


def test_what_is_looked_up_and_a_gradient_over_the_words_are_summed_over_the_ranks() -> None:
    sizes = Counter[str]()
    for at, each in of_words(traced(), (TABLE,), N).exchanges.items():
        assert each.move == "all_reduce"
        sizes[traced().ops[at].name] += each.bytes * 4
    hidden = 4 * 512 * 768 * 2  # bf16
    assert sizes.pop("embedding.default") == hidden
    assert sizes.pop("mm.default") == hidden  # over the slices of the loss
    assert sum(sizes.values()) < hidden / 10  # a few numbers a row


def test_no_pass_of_a_rank_takes_less_than_its_bound_where_words_are_divided() -> None:
    base = cost([traced()], NODE, 32, (8, 1))
    own = cost([on_axis(traced(), N, {}, (TABLE,))], NODE, 32, (8, 1))
    assert least_seconds(base.passes[0], N, {}, NODE, (TABLE,)) <= own.passes[0].played.device_seconds


# ---------------------------------------------------------------------- plans


def test_a_plan_divides_the_words_where_its_weights_are_cut_and_says_so() -> None:
    plan = anyfit.plan(gpt2(8), NODE, mesh={"tensor": N}, layout="megatron")
    assert plan.tables == (TABLE,)
    assert "vocabulary divided" in plan.decision("layout").choice
    assert Plan.from_json(plan.to_json()) == plan
    whole = anyfit.plan(gpt2(8), NODE, mesh={"tensor": N}, layout="ulysses")
    assert whole.tables == ()
