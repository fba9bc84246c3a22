"""Batches of any nest are cut sample by sample, each once and in order; what cannot be told apart is refused by name."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from anyfit.values.batches import cut, rows_of, uncuttable, with_rows
from anyfit.values.nests import map_tensors, named_tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Framed:
    inside: Any
    count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", self.count + 1)


@dataclass(slots=True)
class Slotted:
    inside: Any


class Graph:
    """As torch_geometric has them: nodes of all samples one after another."""

    def __init__(self) -> None:
        self.nodes, self.edges = torch.randn(7, 3), torch.zeros(2, 9, dtype=torch.long)
        self.store = {"owner": torch.tensor([0, 0, 1, 1, 2, 2, 3])}


class Labelled(list[Any]):
    """A list that knows something else."""

    name = ""


# ---------------------------------------------------------------------- any nest

# A batch of any samples is made from its description, so that every part of a cut can be made from it as well.
Make = Callable[[Sequence[int]], Any]  # by the numbers of the samples, the entry that holds them


def of_tensors(rows: int, width: list[int], layout: str) -> Make:
    whole = torch.arange(rows * max(1, torch.Size(width).numel())).reshape(rows, *width)
    if layout == "expanded":
        whole = whole.unsqueeze(-1).expand(*whole.shape, 2)
    if layout == "transposed":
        whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
    return lambda samples: whole[list(samples)]


def ragged(sample: int) -> Tensor:
    return torch.full((sample % 4 + 20, 2), sample)


BY_SAMPLE: dict[str, Make] = {
    "array": lambda samples: numpy.array([[each, -each] for each in samples]),
    "words": lambda samples: [f"caption {each}" for each in samples],
    "numbers": lambda samples: [each * 0.5 for each in samples],
    "a tuple of numbers": lambda samples: tuple(samples),
    "some are missing": lambda samples: [None if each % 2 else f"id {each}" for each in samples[:-1]] + ["last"] * bool(samples),
    "ragged tensors": lambda samples: [ragged(each) for each in samples],
    "ragged arrays": lambda samples: [ragged(each).numpy() for each in samples],
    "dicts": lambda samples: [{"id": each, "boxes": ragged(each), "text": "a"} for each in samples],
    "lists of words": lambda samples: [["a"] * (20 + each) for each in samples],
    "numbers of torch": lambda samples: [torch.tensor(each) for each in samples],
    "queue": lambda samples: deque(f"{each}" for each in samples),
}
FOR_ALL = [None, "text", 7, 0.5, True, b"x", torch.float32, torch.Size([3, 4]), [], (), numpy.float64(2.0), torch.tensor(3.0)]


def nests(rows: int) -> st.SearchStrategy[Make]:
    shapes, layouts = st.lists(st.integers(1, 3), max_size=2), st.sampled_from(["plain", "expanded", "transposed"])
    fixed = {name: make for name, make in BY_SAMPLE.items() if name != "some are missing"}
    leaves = st.one_of(
        st.builds(of_tensors, st.just(rows), shapes, layouts),
        st.sampled_from(list(fixed.values())),
        st.sampled_from(FOR_ALL).map(lambda value: lambda _samples: value),
    )

    def put(kind: Callable[[Any], Any]) -> Callable[[Any], Make]:
        def into(items: Any) -> Make:
            if isinstance(items, dict):
                return lambda samples: kind({key: make(samples) for key, make in items.items()})
            return lambda samples: kind([make(samples) for make in items])

        return into

    keys = st.sampled_from(["a", "b", 3, (1, 2)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, max_size=3).map(put(dict)),
            st.dictionaries(keys, inner, max_size=2).map(put(OrderedDict)),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(put(BatchEncoding)),
            st.lists(inner, max_size=3).map(put(list)),
            st.lists(inner, max_size=3).map(put(tuple)),
            st.lists(inner, min_size=2, max_size=2).map(put(lambda items: Pair(*items))),
            st.lists(inner, min_size=1, max_size=1).map(put(lambda items: Framed(*items))),
            st.lists(inner, min_size=1, max_size=1).map(put(lambda items: Slotted(*items))),
        ),
        max_leaves=8,
    )


def holds_nothing(value: Any) -> bool:
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else [value]
    return all(each is not value and holds_nothing(each) for each in entries)


def is_ambiguous(value: Any, rows: int) -> bool:
    """Whether it has as many empty things as there are samples: one for each, or so many for all."""
    if isinstance(value, Framed | Slotted):
        return is_ambiguous(value.inside, rows)
    is_list = isinstance(value, list | tuple | deque)
    if is_list and len(value) == rows and all(map(holds_nothing, value)):
        return True
    inside = value.values() if isinstance(value, Mapping) else value if is_list else ()
    return any(is_ambiguous(each, rows) for each in inside)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Make, list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    certain, nest = of_tensors(sum(sizes), [2], "plain"), draw(nests(sum(sizes)))
    assume(not is_ambiguous(nest(range(sum(sizes))), sum(sizes)))
    return lambda samples: {"certain": certain(samples), "nest": nest(samples)}, sizes


def assert_same(mine: Any, wanted: Any) -> None:
    assert type(mine) is type(wanted)
    if isinstance(wanted, Tensor | numpy.ndarray):
        assert mine.dtype == wanted.dtype
        assert mine.shape == wanted.shape
        assert bool((mine == wanted).all())
    elif isinstance(wanted, Mapping):
        assert list(mine) == list(wanted)
        for key, item in wanted.items():
            assert_same(mine[key], item)
    elif isinstance(wanted, list | tuple | deque):
        assert len(mine) == len(wanted)
        for one, other in zip(mine, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Framed | Slotted):
        assert_same(mine.inside, wanted.inside)
        assert getattr(mine, "count", 1) == 1
    else:
        assert mine == wanted


@given(cuts())
def test_every_sample_meets_its_own_in_one_part_or_the_batch_is_refused(made_and_sizes: tuple[Make, list[int]]) -> None:
    make, sizes = made_and_sizes
    rows = sum(sizes)
    batch = make(range(rows))
    reason = uncuttable(batch, rows)
    if len(sizes) > 1 and reason is not None:  # a list of as many fields as there are samples
        assert "fields or" in reason or "is a list of" in reason or "is a tuple of" in reason or "is a dict" in reason
        with pytest.raises(ValueError, match=r"give Job\(split=\)"):
            cut(batch, sizes)
        return
    assert rows_of(batch, rows) == rows
    start = 0
    for part, size in zip(cut(batch, sizes), sizes, strict=True):
        assert_same(part, make(range(start, start + size)))
        start += size
    assert_same(batch, make(range(rows)))


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_what_has_one_entry_a_sample_is_cut_with_the_samples(name: str) -> None:
    batch = {"entry": BY_SAMPLE[name](range(5)), "x": torch.arange(5)}
    parts = cut(batch, [2, 3])
    whole = list(batch["entry"])
    assert_same([list(part["entry"]) for part in parts], [whole[:2], whole[2:]])
    assert rows_of(BY_SAMPLE[name](range(5)), 5) == 5


def test_parts_of_tensors_and_arrays_are_views() -> None:
    batch = {"tensor": torch.arange(6).reshape(3, 2), "array": numpy.arange(3)}
    for part in cut(batch, [1, 2]):
        assert part["tensor"].untyped_storage().data_ptr() == batch["tensor"].untyped_storage().data_ptr()
        assert part["array"].base is batch["array"]


@given(cuts())
def test_mapping_tensors_changes_them_and_nothing_else(made_and_sizes: tuple[Make, list[int]]) -> None:
    make, sizes = made_and_sizes
    batch = make(range(sum(sizes)))
    changed = map_tensors(map_tensors(batch, lambda tensor: tensor + 1), lambda tensor: tensor - 1)
    assert_same(changed, batch)
    for (path, before), (other_path, after) in zip(named_tensors(batch), named_tensors(changed), strict=True):
        assert path == other_path
        assert after is not before


@given(cuts(), st.integers(1, 9))
def test_a_batch_of_another_size_has_the_samples_again_and_again(made_and_sizes: tuple[Make, list[int]], wanted: int) -> None:
    make, sizes = made_and_sizes
    rows = sum(sizes)
    batch = make(range(rows))
    chosen = [index % rows for index in range(wanted)]
    if rows > 1 and uncuttable(batch, rows) is None:
        found = with_rows(batch, rows, wanted, lambda tensor: tensor[chosen], lambda tensor: tensor)
        assert_same(found, make(chosen))


# ---------------------------------------------------------------------- what is refused, and what goes through whole

UNCLEAR: dict[str, tuple[Any, str]] = {
    "weights of classes": (torch.ones(10), "batch['other'] is a tensor of shape (10,), and the batch has 4 samples"),
    "an array of another size": (numpy.ones((2, 4)), "batch['other'] is an array of shape (2, 4)"),
    "numbers of another length": ([1, 2, 3], "batch['other'] is a list of 3"),
    "words of another length": (("a", "b"), "batch['other'] is a tuple of 2"),
    "a graph": (Graph(), "batch['other'] is a Graph"),
    "a set": ({1, 2, 3, 4}, "batch['other'] is a set"),
    "numbers by sample": ({7: 0.1, 3: 0.2, 9: 0.3, 4: 0.4}, "batch['other'] is a dict"),
    "as many fields as samples": ([torch.ones(4, 2)] * 4, "batch['other'] is a list of 4, and the batch has 4 samples: 4 fields"),
    "as many lists as samples": ([[1, 2, 3, 4]] * 4, "4 fields or 4 samples, both can be"),
    "things that are not alike": ([1, "a", 2, "b"], "batch['other'] is a list of 4"),
    "inside": (Framed([Pair(torch.ones(3), 1)]), "batch['other'].inside[0][0] is a tensor of shape (3,)"),
    "packed": (pack_sequence([torch.ones(4), torch.ones(2)]), "batch['other'][0] is a tensor of shape (6,)"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_told_apart_is_refused_by_name_and_goes_through_whole(name: str) -> None:
    other, says = UNCLEAR[name]
    batch = {"x": torch.zeros(4, 2), "y": torch.zeros(4), "other": other}
    with pytest.raises(ValueError) as error:  # noqa: PT011  (compared below)
        cut(batch, [2, 2])
    assert says in str(error.value)
    assert str(error.value).endswith("; give Job(split=) to say how such a batch is cut")
    assert rows_of(batch, 4) == 4
    assert cut(batch, [4])[0] is batch


@pytest.mark.parametrize("rows", [2, 5])
def test_inputs_and_labels_in_a_list_are_fields_also_of_two_samples(rows: int) -> None:
    batch = [torch.randn(rows, 3), torch.arange(rows)]  # as torch's own collate makes it
    parts = cut(batch, [1, rows - 1])
    assert [part[1].tolist() for part in parts] == [[0], list(range(1, rows))]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch[0])


def test_images_of_any_size_and_their_targets_are_cut_sample_by_sample() -> None:
    images = [torch.full((3, 4 + each, 5), each) for each in range(4)]
    targets = [{"boxes": torch.full((each, 4), each), "labels": torch.full((each,), each)} for each in range(4)]
    batch = tuple(zip(*zip(images, targets, strict=True), strict=True))
    assert rows_of(batch) == 4
    (first, wanted), (second, others) = cut(batch, [1, 3])
    assert [int(each.max()) for each in (*first, *second)] == [0, 1, 2, 3]
    assert [len(each["boxes"]) for each in (*wanted, *others)] == [0, 1, 2, 3]


def test_samples_are_as_many_as_expected_where_that_can_be() -> None:
    batch = [torch.ones(3, 8), torch.ones(3, 8)]
    assert rows_of(batch) == 3
    assert rows_of(batch, 2) == 2  # of three rows each
    assert [len(part) for part in cut(batch, [1, 1])] == [1, 1]
    assert rows_of({"x": torch.ones(7, 2), "weights": torch.ones(9)}, 9) == 9
    assert rows_of({"x": torch.ones(7, 2), "weights": torch.ones(9)}) is None
    assert rows_of({"x": torch.ones(7, 2), "y": torch.ones(7), "weights": torch.ones(9)}) == 7


@pytest.mark.parametrize("batch", [{}, [], "text", {"scale": torch.tensor(1.0)}, Graph(), 3])
def test_a_batch_whose_samples_cannot_be_told_goes_through_whole(batch: Any) -> None:
    assert rows_of(batch, 4) is None
    assert cut(batch, [4])[0] is batch


def test_an_iterator_is_refused_by_name_whatever_the_plan() -> None:
    batch = {"x": torch.zeros(2), "more": [(each for each in range(2))]}
    with pytest.raises(TypeError, match=r"batch\['more'\]\[0\] is a generator, which can be read only once.*make it a list"):
        cut(batch, [2])


@pytest.mark.parametrize("sizes", [[], [3], [2, 3], [4, 1]])
def test_sizes_that_do_not_make_the_batch_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot cut 4 samples into micro-batches of"):
        cut(torch.zeros(4), sizes)


# ---------------------------------------------------------------------- tensors of other layouts


def layouts() -> dict[str, Tensor]:
    dense = torch.eye(4) * torch.arange(1.0, 5)
    parts = [torch.full((each, 2), float(each)) for each in range(1, 5)]
    return {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "nested": torch.nested.as_nested_tensor(parts),
        "jagged": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
    }


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
@pytest.mark.parametrize("name", ["coo", "csr", "nested", "jagged"])
def test_sparse_and_nested_tensors_are_cut_too(name: str) -> None:
    whole = layouts()[name]
    assert rows_of({"x": whole, "y": torch.zeros(4)}) == 4
    parts = [part["x"] for part in cut({"x": whole}, [1, 3])]
    assert all(part.layout is whole.layout for part in parts)
    if whole.is_nested:
        mine, wanted = [each for part in parts for each in part.unbind()], list(whole.unbind())
    else:
        mine, wanted = list(torch.cat([part.to_dense() for part in parts])), list(whole.to_dense())
    assert len(mine) == 4
    assert all(torch.equal(one, other) for one, other in zip(mine, wanted, strict=True))


def test_a_layout_that_cannot_be_cut_is_refused_by_name() -> None:
    blocks = torch.eye(4).to_sparse_bsr((2, 2))
    assert uncuttable({"x": blocks}, 4) == (
        "batch['x'] is a sparse_bsr tensor of shape (4, 4), and the batch has 4 samples; "
        "give Job(split=) to say how such a batch is cut"
    )


# ---------------------------------------------------------------------- nests keep what they are


def test_a_tensor_is_named_by_the_expression_that_reaches_it() -> None:
    batch = {"ids": torch.zeros(2), "more": [Framed(Pair("text", torch.zeros(2)))], "graph": Graph()}
    names = [path for path, _ in named_tensors(batch)]
    assert names[:2] == ["batch['ids']", "batch['more'][0].inside[1]"]
    assert names[2:] == ["batch['graph'].nodes", "batch['graph'].edges", "batch['graph'].store['owner']"]
    for name, tensor in named_tensors(batch):
        assert eval(name, {"batch": batch}) is tensor


def test_mappings_and_lists_keep_their_class_and_what_else_they_know() -> None:
    encoding = BatchEncoding({"ids": torch.arange(4)}, n_sequences=2)
    output = BaseModelOutput(last_hidden_state=torch.arange(4))  # type: ignore[arg-type]
    labelled = Labelled("abcd")
    labelled.name = "words"
    batch = {
        "a": encoding,
        "b": output,
        "c": defaultdict(list, ids=torch.arange(4)),
        "d": UserDict(ids=torch.arange(4)),
        "e": labelled,
    }
    first, second = cut(batch, [1, 3])
    for part, wanted in ((first, [0]), (second, [1, 2, 3])):
        assert [type(each) for each in part.values()] == [type(each) for each in batch.values()]
        assert part["a"].n_sequences == 2
        assert part["b"].last_hidden_state.tolist() == part["b"]["last_hidden_state"].tolist() == wanted
        assert part["c"]["new"] == []
        assert part["d"]["ids"].tolist() == wanted
        assert part["e"].name == "words"
    assert encoding["ids"].tolist() == [0, 1, 2, 3]
    assert len(output.last_hidden_state) == 4


def test_a_mapping_whose_copy_shares_its_items_is_left_as_it_was() -> None:
    class Sharing(UserDict[str, Any]):
        def __copy__(self) -> Sharing:
            twin = Sharing()
            twin.data = self.data
            return twin

    batch = Sharing(ids=torch.arange(4))
    assert [part["ids"].tolist() for part in cut(batch, [1, 3])] == [[0], [1, 2, 3]]
    assert batch["ids"].tolist() == [0, 1, 2, 3]


def test_objects_that_hold_tensors_are_copied_and_others_are_not() -> None:
    graph, module = Graph(), torch.nn.Linear(2, 2)
    batch = {"graph": graph, "module": module, "held": PackedSequence(torch.ones(3), torch.tensor([2, 1]))}
    changed = map_tensors(batch, lambda tensor: tensor.double())
    assert changed["graph"].nodes.dtype == changed["graph"].store["owner"].dtype == torch.float64
    assert graph.nodes.dtype == torch.float32
    assert graph.store["owner"].dtype == torch.long
    assert changed["module"] is module
    assert type(changed["held"]) is PackedSequence
    assert changed["held"].batch_sizes.dtype == torch.long  # which the host reads
