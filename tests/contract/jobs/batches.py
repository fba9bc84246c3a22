"""Batches of more than tensors."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import ROWS, STEPS, Chain, Refused, Trial, hostile, labelled, squared, tokens, trial, vectors
from .losses import NO_MEAN, Texts

UNCLEAR = Refused(r"(?is)split")
MISCOUNTED = Refused(r"(?is)has 6 samples.*batch_size=4|split|cuts the batch")


def of(batch: Any, **more: Any) -> dict[str, Any]:
    return {**batch, **more}


@hostile(also=("ranks",))
def a_list_of_labels() -> Trial:
    batches = [of(batch, y=batch["y"].tolist()) for batch in labelled()]
    return trial(lambda: Chain(out=5), lambda model, batch: F.cross_entropy(model(batch["x"]), torch.tensor(batch["y"])), batches)


NAMES = ("ant", "bee", "cow", "dog", "elk")


@hostile(also=("ranks",))
def a_list_of_strings() -> Trial:
    batches = [of(batch, y=[NAMES[label] for label in batch["y"].tolist()]) for batch in labelled()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), torch.tensor([NAMES.index(name) for name in batch["y"]]))

    return trial(lambda: Chain(out=5), loss, batches)


@hostile(also=("ranks",))
def numpy_labels() -> Trial:
    batches = [of(batch, y=batch["y"].numpy()) for batch in labelled()]
    return trial(
        lambda: Chain(out=5), lambda model, batch: F.cross_entropy(model(batch["x"]), torch.from_numpy(batch["y"])), batches
    )


@hostile()
def only_numpy() -> Trial:
    batches = [{key: value.numpy() for key, value in batch.items()} for batch in vectors()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(torch.from_numpy(batch["x"])) - torch.from_numpy(batch["y"])).square().mean()

    return trial(Chain, loss, batches)


@hostile(also=("ranks",))
def ragged_lists() -> Trial:
    """Each sample has another number of tokens."""
    generator = torch.Generator().manual_seed(5)
    batches = [[torch.randint(0, 50, (3 + row,), generator=generator).tolist() for row in range(ROWS)] for _ in range(STEPS)]

    def loss(model: Any, batch: Any) -> Tensor:
        each = [model(torch.tensor(ids))[:-1] for ids in batch]
        return sum(F.cross_entropy(out, torch.tensor(ids)[1:]) for out, ids in zip(each, batch, strict=True)) / len(batch)

    return trial(Texts, loss, batches)


@hostile(cut=NO_MEAN)
def a_list_of_tensors_of_uneven_length() -> Trial:
    generator = torch.Generator().manual_seed(5)
    batches = [[torch.randint(0, 50, (3 + row,), generator=generator) for row in range(ROWS)] for _ in range(STEPS)]

    def loss(model: Any, batch: Any) -> Tensor:
        return torch.stack([F.cross_entropy(model(ids)[:-1], ids[1:]) for ids in batch]).mean()

    return trial(Texts, loss, batches)


@hostile()
def a_list_of_dicts_one_a_sample() -> Trial:
    batches = [[{"x": batch["x"][row], "y": batch["y"][row], "name": str(row)} for row in range(ROWS)] for batch in vectors()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (torch.stack([sample[key] for sample in batch]) for key in ("x", "y"))
        return (model(x) - y).square().mean()

    return trial(Chain, loss, batches)


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: list[str]


@hostile()
def a_dataclass() -> Trial:
    batches = [Sample(batch["x"], batch["y"], [str(row) for row in range(ROWS)]) for batch in vectors()]

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        scale = torch.tensor([1.0 + int(name) for name in batch.names])[:, None]
        return ((model(batch.x) - batch.y).square() * scale).mean()

    return trial(Chain, loss, batches)


Pair = namedtuple("Pair", ["x", "y"])


@hostile()
def a_named_tuple() -> Trial:
    batches = [Pair(batch["x"], batch["y"]) for batch in vectors()]
    return trial(Chain, lambda model, batch: (model(batch.x) - batch.y).square().mean(), batches)


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@hostile(cut=UNCLEAR)
def an_object_of_its_own() -> Trial:
    batches = [Opaque(batch["x"], batch["y"]) for batch in vectors()]
    return trial(Chain, lambda model, batch: (model(batch.x) - batch.y).square().mean(), batches)


@hostile()
def flags_and_names_beside_tensors() -> Trial:
    """One for the whole batch: nothing to cut."""
    batches = [of(batch, task="near", scale=0.5, sharp=True) for batch in vectors()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert batch["task"] == "near"
        return squared(model, batch) * (batch["scale"] if batch["sharp"] else 1.0)

    return trial(Chain, loss, batches)


@hostile(cut=UNCLEAR)
def a_table_for_all_samples() -> Trial:
    """Another number of rows than samples: what belongs to which?"""
    table = torch.linspace(0.5, 1.5, 8)
    batches = [of(batch, table=table[None].expand(3, 8).contiguous()) for batch in vectors()]
    return trial(Chain, lambda model, batch: ((model(batch["x"]) - batch["y"]).square() * batch["table"].mean(0)).mean(), batches)


@hostile(cut=UNCLEAR)
def a_list_that_is_as_long_as_the_batch_by_accident() -> Trial:
    """Four weights of four columns, and four samples. Not to be told apart: Job(split=) is the way out."""
    batches = [of(batch, columns=[1.0, 2.0, 3.0, 4.0]) for batch in vectors(out=4)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch["x"]) - batch["y"]).square() * torch.tensor(batch["columns"])).mean()

    return trial(lambda: Chain(out=4), loss, batches)


@hostile()
def samples_along_the_second_dimension() -> Trial:
    """Time first, and told by split."""
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(6, ROWS, 8, generator=generator) for _ in range(STEPS)]

    def split(batch: Tensor, sizes: Any) -> list[Tensor]:
        return list(batch.split(list(sizes), 1))

    return trial(Chain, lambda model, x: (model(x[:-1]) - x[1:]).square().mean(), batches, split=split)


@hostile(ample=MISCOUNTED, tight=MISCOUNTED, recomputed=MISCOUNTED, host=MISCOUNTED, cut=MISCOUNTED)
def samples_along_the_second_dimension_and_not_said() -> Trial:
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(6, ROWS, 8, generator=generator) for _ in range(STEPS)]
    return trial(Chain, lambda model, x: (model(x[:-1]) - x[1:]).square().mean(), batches)


@hostile()
def a_nested_tensor() -> Trial:
    generator = torch.Generator().manual_seed(5)
    batches = [
        torch.nested.nested_tensor([torch.randn(2 + row, 8, generator=generator) for row in range(ROWS)], layout=torch.jagged)
        for _ in range(STEPS)
    ]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.stack([model(each).square().mean() for each in batch.unbind()]).mean()

    return trial(Chain, loss, batches)


@hostile()
def a_sparse_batch() -> Trial:
    batches = [of(batch, x=(batch["x"] * (batch["x"] > 0)).to_sparse()) for batch in vectors()]
    return trial(Chain, lambda model, batch: (model(batch["x"].to_dense()) - batch["y"]).square().mean(), batches)


@hostile(without=("cut",))
def a_graph_of_nodes_and_edges() -> Trial:
    """One sample of many nodes: index_add by edges."""

    class Messages(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.message, self.own = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return torch.relu(self.own(x).index_add(1, edges[0, 1], self.message(x[:, edges[0, 0]])))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, 12), nn.Linear(12, 8)
            self.blocks = nn.ModuleList(Messages(12) for _ in range(2))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, edges)
            return self.head(x)

    generator = torch.Generator().manual_seed(5)
    batches = [
        {
            "x": torch.randn(1, 7, 8, generator=generator),
            "edges": torch.randint(0, 7, (1, 2, 15), generator=generator),
            "y": torch.randn(1, 7, 8, generator=generator),
        }
        for _ in range(STEPS)
    ]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"], batch["edges"]) - batch["y"]).square().mean()

    return trial(Net, loss, batches, rows=1)


@hostile(cut=UNCLEAR)
def a_batch_of_graphs_glued_together() -> Trial:
    """Nodes of all samples in one table, and which sample each is of: rows are not samples."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(STEPS):
        of_sample = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
        batches.append(
            {"nodes": torch.randn(9, 8, generator=generator), "of": of_sample, "y": torch.randn(ROWS, 8, generator=generator)}
        )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        pooled = torch.zeros(len(batch["y"]), 8).index_add(0, batch["of"], model(batch["nodes"]))
        return (pooled - batch["y"]).square().mean()

    return trial(Chain, loss, batches)


@hostile()
def pairs_and_lengths_that_vary() -> Trial:
    """Batches of uneven length; memory is planned for the longest."""
    generator = torch.Generator().manual_seed(5)
    lengths = [5, 9, 7, 3, 9, 4, 6, 8, 5, 9]
    batches = [torch.randint(0, 50, (ROWS, length), generator=generator) for length in lengths]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return trial(Texts, loss, batches, max_sample=batches[1])


@hostile()
def images_as_bytes() -> Trial:
    generator = torch.Generator().manual_seed(5)
    batches = [
        {"x": torch.randint(0, 256, (ROWS, 8), generator=generator, dtype=torch.uint8), "y": each["y"]} for each in labelled()
    ]
    return trial(lambda: Chain(out=5), lambda model, batch: F.cross_entropy(model(batch["x"] / 255.0), batch["y"]), batches)


@hostile()
def numbers_that_differ_by_batch() -> Trial:
    """A plain number beside the tensors, another in each batch."""
    batches = [of(batch, scale=0.5 + 0.1 * index) for index, batch in enumerate(vectors())]
    return trial(Chain, lambda model, batch: squared(model, batch) * batch["scale"], batches)


@hostile()
def a_tensor_without_dimensions_beside_others() -> Trial:
    batches = [of(batch, scale=torch.tensor(0.5 + 0.1 * index)) for index, batch in enumerate(vectors())]
    return trial(Chain, lambda model, batch: squared(model, batch) * batch["scale"], batches)


@hostile()
def none_in_the_batch() -> Trial:
    batches = [of(batch, mask=None) for batch in vectors()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert batch["mask"] is None
        return squared(model, batch)

    return trial(Chain, loss, batches)


@hostile()
def an_array_of_objects() -> Trial:
    batches = [of(batch, y=np.array([NAMES[label] for label in batch["y"].tolist()], dtype=object)) for batch in labelled()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), torch.tensor([NAMES.index(name) for name in batch["y"]]))

    return trial(lambda: Chain(out=5), loss, batches)


@hostile()
def random_timesteps_drawn_in_the_batch() -> Trial:
    batches = [of(batch, t=torch.tensor([0.1, 0.4, 0.6, 0.9])) for batch in vectors()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        t = batch["t"][:, None]
        return (model(t * batch["x"] + (1 - t) * batch["y"]) - batch["y"]).square().mean()

    return trial(Chain, loss, batches)


assert tokens
