"""Batches of anything through the engine: as in plain PyTorch, whole and cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import anyfit
from tests.machines import small_machine
from tests.oracle import assert_bit_equal, assert_close, train_plainly
from tests.plans import AWAY, hand_written, started

ROWS, STEPS, WIDTH = 4, 3, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outside(torch.tanh(self.inside(inputs)))


@dataclass
class Record:
    inputs: Tensor
    labels: list[int]


class Pair(NamedTuple):
    inputs: Tensor
    labels: numpy.ndarray


class Graph:
    """Nodes of all samples one after another."""

    def __init__(self, nodes: Tensor, owner: Tensor, labels: Tensor) -> None:
        self.nodes, self.owner, self.labels = nodes, owner, labels


def drawn(seed: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(3, (ROWS,), generator=generator).tolist()


def lengths(seed: int) -> list[int]:
    return [1 + (seed + index) % 3 for index in range(ROWS)]


# ---------------------------------------------------------------------- by name: a batch, and the mean loss of it


def numbers(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return {"x": inputs, "labels": labels, "flag": True, "name": "train", "nothing": None, "scale": torch.tensor(0.5)}


def of_numbers(model: nn.Module, batch: Any) -> Tensor:
    assert len(batch["labels"]) == len(batch["x"])
    return batch["scale"] * F.cross_entropy(model(batch["x"]), torch.tensor(batch["labels"], device=batch["x"].device))


def words(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return [inputs, tuple("abc"[each] for each in labels)]


def of_words(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), torch.tensor(["abc".index(each) for each in labels]))


def arrays(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return Pair(inputs, numpy.array(labels))


def of_arrays(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(batch.labels, numpy.ndarray)
    return F.cross_entropy(model(batch.inputs), torch.from_numpy(batch.labels))


def only_arrays(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return {"x": inputs.numpy(), "y": numpy.array(labels)}


def of_only_arrays(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))


def record(seed: int) -> Any:
    return Record(*drawn(seed))


def of_record(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.inputs), torch.tensor(batch.labels))


def ragged(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return {"x": [each.expand(count, -1) for each, count in zip(inputs, lengths(seed), strict=True)], "y": labels}


def of_ragged(model: nn.Module, batch: Any) -> Tensor:
    parts = [
        F.cross_entropy(model(inputs).mean(0), torch.tensor(label)) for inputs, label in zip(batch["x"], batch["y"], strict=True)
    ]
    return torch.stack(parts).mean()


def dicts(seed: int) -> Any:
    return [{"x": inputs, "y": label, "id": f"{seed}"} for inputs, label in zip(*drawn(seed), strict=True)]


def of_dicts(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([F.cross_entropy(model(each["x"]), torch.tensor(each["y"])) for each in batch]).mean()


def graph(seed: int) -> Any:
    inputs, labels = drawn(seed)
    owner = torch.arange(ROWS).repeat_interleave(torch.tensor(lengths(seed)))
    return Graph(inputs[owner], owner, torch.tensor(labels))


def of_graph(model: nn.Module, batch: Any) -> Tensor:
    samples = torch.zeros(len(batch.labels), 3).index_add(0, batch.owner, model(batch.nodes))
    return F.cross_entropy(samples, batch.labels)


def weighted(seed: int) -> Any:
    inputs, labels = drawn(seed)
    return {"x": inputs, "y": torch.tensor(labels), "of classes": torch.tensor([1.0, 2.0, 0.5])}


def of_weighted(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["of classes"])


def other_lists(seed: int) -> Any:
    return numbers(seed) | {"sizes": [2, 3], "by id": {seed: 1, "set": {1, 2}}}


def of_other_lists(model: nn.Module, batch: Any) -> Tensor:
    return of_numbers(model, batch) * batch["sizes"][1]


def packed(seed: int) -> Any:
    inputs, labels = drawn(seed)
    sequences = [each.expand(count, -1) for each, count in zip(inputs, lengths(seed), strict=True)]
    return {"x": pack_sequence(sequences, enforce_sorted=False), "y": torch.tensor(labels)}


def of_packed(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"].data).square().mean() + 0.0 * batch["y"].sum()


def without_samples(seed: int) -> Any:
    return torch.tensor(seed)


def of_without_samples(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)), torch.arange(ROWS) % 3)


CUT = {
    "lists of numbers": (numbers, of_numbers),
    "words in a tuple": (words, of_words),
    "a named tuple with an array": (arrays, of_arrays),
    "nothing but arrays": (only_arrays, of_only_arrays),
    "a dataclass": (record, of_record),
    "tensors of different lengths": (ragged, of_ragged),
    "a list of dicts": (dicts, of_dicts),
}
WHOLE = {
    "an object": (graph, of_graph, "batch is a Graph|cannot be told"),
    "weights of classes": (
        weighted,
        of_weighted,
        r"batch\['of classes'\] is a tensor of shape \(3,\), and",
    ),
    "lists of other length": (other_lists, of_other_lists, r"batch\['sizes'\] is a list of 2"),
    "a packed sequence": (packed, of_packed, r"batch\['x'\]\[0\] is a tensor of shape"),
    "no samples": (without_samples, of_without_samples, "cannot be told|is a tensor"),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def job_for(make: Any, loss: Any, **options: Any) -> anyfit.Job:
    return anyfit.Job(Net, loss, sgd, make(0), ROWS, precision="fp32", **options)


def plainly(make: Any, loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, losses = Net(), []
    optimizer = sgd(model)
    for step in range(STEPS):
        value = loss(model, make(step))
        value.backward()
        losses.append(float(value.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("name", CUT)
def test_what_has_one_entry_a_sample_trains_alike_in_parts_of_any_size(name: str) -> None:
    make, loss = CUT[name]
    losses, weights = plainly(make, loss)
    job = job_for(make, loss)
    assert job.uncuttable() is None
    for size in (1, 3, ROWS):
        plan = replace(hand_written(job), micro_batch=size, accumulation=-(-ROWS // size))
        with started(job, plan) as run:
            assert [float(run.step(make(step))) for step in range(STEPS)] == pytest.approx(losses, rel=1e-6)
            assert_close(run.state_dict(), weights, 1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_trains_whole_and_is_refused_by_name_in_parts(name: str) -> None:
    make, loss, says = WHOLE[name]
    losses, weights = plainly(make, loss)
    job = job_for(make, loss)
    assert job.uncuttable() is not None
    with started(job, hand_written(job)) as run:
        assert [float(run.step(make(step))) for step in range(STEPS)] == pytest.approx(losses, rel=1e-6)
        assert_close(run.state_dict(), weights, 1e-6)
    with started(job, hand_written(job, accumulation=2)) as run, pytest.raises(ValueError, match=says):
        run.step(make(0))


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_any_batch_can_be_planned_for(name: str) -> None:
    make, loss = (CUT | WHOLE)[name][:2]
    losses, weights = plainly(make, loss)
    with anyfit.start(job_for(make, loss, micro_batch=ROWS), machine=small_machine()) as run:
        assert [float(run.step(make(step))) for step in range(STEPS)] == pytest.approx(losses, rel=1e-6)
        assert_close(run.state_dict(), weights, 1e-6)


class WithTable(Net):
    """Its first layer is a product with the batch as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(inputs, self.table) if inputs.is_sparse else inputs.to_dense() @ self.table)


def thinned(seed: int) -> Tensor:
    inputs, _ = drawn(seed)
    return inputs * (inputs > 0)


def nested(seed: int, layout: torch.layout) -> Tensor:
    inputs, _ = drawn(seed)
    return torch.nested.nested_tensor(
        [each.expand(count, -1) for each, count in zip(inputs, lengths(seed), strict=True)], layout=layout
    )


OF_PARTS: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "coo": (WithTable, lambda seed: thinned(seed).to_sparse(), lambda model, batch: model(batch).square().mean()),
    "csr": (WithTable, lambda seed: thinned(seed).to_sparse_csr(), lambda model, batch: model(batch).square().mean()),
    "bsr": (WithTable, lambda seed: thinned(seed).to_sparse_bsr((1, 1)), lambda model, batch: model(batch).square().mean()),
    "nested": (
        Net,
        lambda seed: nested(seed, torch.strided),
        lambda model, batch: model(batch.to_padded_tensor(0.0)).sum(1).square().mean(),
    ),
    "jagged": (
        Net,
        lambda seed: nested(seed, torch.jagged),
        lambda model, batch: model(batch).to_padded_tensor(0.0).sum(1).square().mean(),
    ),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|Sparse .* support is in beta)")
@pytest.mark.parametrize("name", OF_PARTS)
def test_sparse_and_nested_batches_are_planned_for_and_train_alike(name: str) -> None:
    make_model, make, loss = OF_PARTS[name]
    batches = [make(step) for step in range(STEPS)]
    job = anyfit.Job(make_model, loss, sgd, batches[0], ROWS, precision="fp32")
    losses, weights = train_plainly(job, batches)
    plans = [None] if name == "jagged" else [None, hand_written(job, AWAY, chunk_bytes=2**10)]
    for plan in plans:
        with anyfit.start(job, plan, small_machine()) as run:
            assert [float(run.step(batch)) for batch in batches] == losses
            assert_bit_equal(run.state_dict(), weights)


def test_a_jagged_tensor_reads_weights_past_the_watching_and_is_refused_where_they_are_away() -> None:
    make_model, make, loss = OF_PARTS["jagged"]
    job = anyfit.Job(make_model, loss, sgd, make(0), ROWS, precision="fp32")
    with (
        started(job, hand_written(job, AWAY)) as run,
        pytest.raises(RuntimeError, match="is read by code that torch does not tell of"),
    ):
        run.step(make(0))


def test_a_short_batch_is_refused_whatever_it_is_made_of() -> None:
    job = job_for(dicts, of_dicts)
    with started(job, hand_written(job)) as run, pytest.raises(ValueError, match="the batch has 3 samples, and Job"):
        run.step(dicts(0)[:3])


# ---------------------------------------------------------------------- fewer samples than a step has


def by_rows(batch: Tensor, sizes: Any) -> list[Tensor]:
    return list(batch.split(sizes[0]))


def with_weight(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


@pytest.mark.parametrize("placement", [None, AWAY])
def test_the_users_split_may_make_fewer_micro_batches_of_fewer_samples(placement: Any) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(rows, WIDTH) for rows in (4, 3, 1, 4)]
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    job = anyfit.Job(model, with_weight, sgd, batches[0], 4, split=by_rows, precision="fp32", micro_batch=2)
    plain = sgd(twin)
    with started(job, hand_written(job, placement, accumulation=2) if placement else hand_written(job, accumulation=2)) as run:
        for batch in batches:
            loss = twin(batch).square().sum() / len(batch)
            loss.backward()
            plain.step()
            plain.zero_grad()
            assert float(run.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-6)
        assert_close(run.state_dict(), twin.state_dict(), 1e-6)


def test_fewer_micro_batches_need_a_weight() -> None:
    job = anyfit.Job(
        Net(), lambda model, batch: model(batch).square().mean(), sgd, torch.randn(4, WIDTH), 4, split=by_rows, precision="fp32"
    )
    with started(job, hand_written(job, accumulation=2)) as run:
        with pytest.raises(ValueError, match="made fewer micro-batches than the plan has"):
            run.step(torch.randn(2, WIDTH))
        run.step(torch.randn(4, WIDTH))
