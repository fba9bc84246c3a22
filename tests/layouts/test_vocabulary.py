"""The vocabulary cut over ranks, and the loss of cut rows: rules hold on parts, mutants are caught, and training is as plain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.check import distinct, values_of, why_wrong
from anyfit.layouts.forms import FORMS
from anyfit.layouts.graph import name_of, value_of
from anyfit.layouts.meeting import met
from anyfit.layouts.problem import OpRates, pose
from anyfit.layouts.rules.op import Op
from anyfit.layouts.rules.table import outers_of, rules_of
from anyfit.planning.layouts import Ask, solve
from anyfit.values.cuts import SUM, WHOLE, Cut
from tests.dist.pool import pool_of

from .test_known import OPS, link
from .test_rules import mutants
from .work import LOSSES, Losing, trained_by_loss

ROWS, LENGTH, HIDDEN, VOCABULARY = 12, 12, 24, 48
aten = torch.ops.aten


class Loss(nn.Module):
    """Embedding, head and loss."""

    def __init__(self, reduction: str = "mean", ignored: int = -100, weighted: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=30)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.reduction, self.ignored = reduction, ignored
        self.register_buffer("weights", torch.rand(VOCABULARY) if weighted else None)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.words(words)).flatten(0, 1)
        return F.cross_entropy(
            logits, targets.flatten(), weight=self.weights, ignore_index=self.ignored, reduction=self.reduction
        )


CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "a word that does not count": {"ignored": 5},
    "weighted": {"weighted": True},
    "weighted sum": {"weighted": True, "reduction": "sum"},
}


@cache
def seen(case: str) -> tuple[Captured, Mapping[fx.Node, Any]]:
    torch.manual_seed(0)
    block = Loss(**CASES[case]).double()
    words = torch.randint(VOCABULARY, (ROWS, LENGTH))
    words[0, :3] = 30
    targets = torch.randint(VOCABULARY, (ROWS, LENGTH))
    targets[:, :4] = block.ignored
    targets[0, 5] = targets[-1, 5] = 5
    targets[0] = block.ignored  # so that ranks count other numbers
    captured = capture(block, (words, targets))
    (like,) = (value_of(node) for node in captured.tangent_nodes)
    given = [*(each.detach() for each in block.parameters()), *block.buffers(), words, targets, torch.randn(like.shape).to(like)]
    return captured, values_of(captured.module, given)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_rule_of_embedding_head_and_loss_holds(case: str, n: int) -> None:
    captured, values = seen(case)
    outers = outers_of(captured.nodes, n)
    forms = set()
    for node in distinct(captured.nodes):
        for rule in rules_of(node, n, outers):
            assert why_wrong(node, rule, values, n) == "", (name_of(node), rule)
            forms.add(rule.form)
    by_rows = {"joint_mean_nll"} if CASES[case].get("reduction", "mean") == "mean" else set()
    by_classes = {"own_nll", "own_nll_backward"} if "weighted" not in CASES[case] else set()
    assert forms - {"plain"} == set(FORMS) - {"joint_mean_nll", "own_nll", "own_nll_backward"} | by_rows | by_classes


# (op, which tensor): their values are not read. Reduced by a sum, the weight of all is not either.
UNREAD = {("nll_loss_backward.default", 1), ("embedding_dense_backward.default", 1)}


@pytest.mark.parametrize("case", ["mean", "none"])
def test_a_mutated_rule_of_the_loss_is_caught(case: str) -> None:
    n, caught = 2, 0
    captured, values = seen(case)
    outers = outers_of(captured.nodes, n)
    for node in distinct(captured.nodes):
        op, rules = Op(node, n, outers), rules_of(node, n, outers)
        if not op.name.startswith(("nll", "_log_softmax", "embedding")):
            continue
        known = {(rule.reads, rule.gives, rule.form) for rule in rules}
        for rule in rules:
            unformed = [rule._replace(form="plain")] if rule.form in FORMS else []
            for mutant in [*mutants(op, rule), *unformed]:
                changed = [at for at, held in enumerate(mutant.reads) if held != rule.reads[at]]
                unread = any((op.name, at) in UNREAD for at in changed) or (case == "none" and changed == [3])
                if (mutant.reads, mutant.gives, mutant.form) in known or not op.allows(mutant) or unread:
                    continue
                if case == "none" and "nll" in op.name and len(rule.gives) == 2 and mutant.gives[1] != WHOLE:
                    continue  # zero, which is also a sum
                if mutant.form.startswith("own_") and set(mutant.reads) == {WHOLE}:
                    continue  # right, if of no use: the first rank finds all of it
                linear = mutant.gives == (SUM,) * len(mutant.gives) and SUM in mutant.reads
                if not linear:
                    assert why_wrong(node, mutant, values, n) != "", (op.name, rule, mutant)
                    caught += 1
    assert caught > 60


def test_words_and_targets_out_of_range_are_errors_as_they_are_of_the_whole() -> None:
    table, words = torch.randn(4, 3), torch.tensor([1, 8])
    with pytest.raises(RuntimeError, match="out of range"):
        met(2, lambda seat: FORMS["own_embedding"](seat, table, words))  # type: ignore[operator]
    logs, targets = torch.randn(2, 4).log_softmax(1), torch.tensor([-100, 9])
    with pytest.raises(RuntimeError, match="out of range"):
        met(2, lambda seat: FORMS["own_nll"](seat, logs, targets, None, 1, -100))  # type: ignore[operator]


def test_an_error_of_one_rank_ends_the_meeting() -> None:
    def run(seat: Any) -> Tensor:
        if seat.rank == 1:
            raise KeyError("mine")
        return seat.all_reduce(torch.ones(1))  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="mine"):
        met(3, run)


# ---------------------------------------------------------------------- the program, and training


def test_little_memory_cuts_the_vocabulary_and_a_row_of_logits_is_whole_nowhere() -> None:
    block = Loss().bfloat16()
    words = torch.randint(VOCABULARY, (ROWS, LENGTH))
    posed = pose(capture(block, (words, words.clone())), 4, OPS, link(4))
    layout = solve(posed.problem, Ask(price=1.0))
    held = [layout.held(posed.problem, posed.number(node)) for node in posed.captured.parameter_nodes]
    assert all(isinstance(each, Cut) for each in held)
    (logs,) = (node for node in posed.captured.nodes if name_of(node) == "aten._log_softmax.default")
    assert isinstance(layout.held(posed.problem, posed.number(logs)), Cut)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", LOSSES)
def test_a_cut_vocabulary_and_a_cut_sequence_train_as_one_process(case: str, ranks: int) -> None:
    found: list[Losing] = pool_of(ranks).run(trained_by_loss, case)
    for each in found:
        assert each.loss_error < 1e-12
        assert each.weight_error < 1e-10
    expected = {
        "head": ("joint_log_softmax", "own_nll"),
        "tied": ("joint_log_softmax", "own_nll", "own_embedding"),
        "sequence": ("joint_mean_nll",),
    }[case]
    assert all(f"{name}(" in found[0].source for name in expected)


def test_one_rank_has_no_forms() -> None:
    captured, _ = seen("mean")
    assert not any(rule.form in FORMS for node in distinct(captured.nodes) for rule in rules_of(node, 1, {}))
    posed = pose(captured, 1, OpRates(1e12, 1e11), link(1))
    assert solve(posed.problem).counts == {}
