"""What kernels take for themselves: the rules beside what torch's allocator recorded on an H200."""

from __future__ import annotations

import pytest

from anyfit.costing.workspaces import workspaces
from anyfit.values.call import Call, TensorForm


def tensor(dtype: str, *shape: int) -> TensorForm:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorForm(dtype, shape, tuple(strides))


def taken(op: str, *arguments: object) -> list[int]:
    return [each.bytes for each in workspaces(Call(op, arguments, {}).text(), processors=132)]


def convolution(
    dtype: str, source: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int, groups: int = 1
) -> list[int]:
    return taken(
        "convolution.default",
        tensor(dtype, *source),
        tensor(dtype, *weight),
        None,
        [stride, stride],
        [padding, padding],
        [1, 1],
        False,
        [0, 0],
        groups,
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "recorded"),
    [
        ("bfloat16", (16384, 768), 100663296),
        ("bfloat16", (16384, 2304), 139198464),
        ("bfloat16", (16384, 3072), 138412032),
        ("float32", (8192, 768), 50331648),
        ("float32", (8192, 30522), 31254528),
    ],
)
def test_adding_up_the_rows_of_a_matrix_takes_partial_sums(dtype: str, shape: tuple[int, int], recorded: int) -> None:
    assert taken("sum.dim_IntList", tensor(dtype, *shape), [0], True) == [recorded]


@pytest.mark.parametrize(("shape", "dims"), [((16384, 768), [1]), ((16384, 768), [-1]), ((16, 1024, 768), [0])])
def test_sums_along_rows_and_short_sums_take_none(shape: tuple[int, ...], dims: list[int]) -> None:
    assert taken("sum.dim_IntList", tensor("float32", *shape), dims, True) == []


@pytest.mark.parametrize(
    ("dtype", "source", "weight", "stride", "padding", "recorded"),
    [
        ("bfloat16", (128, 3, 224, 224), (64, 3, 7, 7), 2, 3, 308331536),
        ("bfloat16", (128, 64, 56, 56), (64, 64, 3, 3), 1, 1, 102834323),
        ("bfloat16", (128, 256, 56, 56), (512, 256, 1, 1), 2, 0, 308281491),
        ("bfloat16", (128, 2048, 7, 7), (512, 2048, 1, 1), 1, 0, 32112656),
        ("float32", (64, 128, 28, 28), (128, 128, 3, 3), 1, 1, 51970195),
    ],
)
def test_a_convolution_copies_what_it_reads_and_writes(
    dtype: str, source: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int, recorded: int
) -> None:
    assert convolution(dtype, source, weight, stride, padding) == [pytest.approx(recorded, abs=512)]


def test_a_convolution_that_is_a_product_and_one_by_channels_take_none() -> None:
    assert convolution("bfloat16", (128, 64, 56, 56), (256, 64, 1, 1), 1, 0) == []
    assert convolution("bfloat16", (256, 96, 56, 56), (96, 1, 7, 7), 1, 3, groups=96) == []


@pytest.mark.parametrize(
    ("dtype", "source", "weight", "stride", "result", "recorded"),
    [
        ("bfloat16", (128, 256, 56, 56), (512, 256, 1, 1), 2, (128, 512, 28, 28), [308281491, 311951983]),
        ("float32", (64, 128, 28, 28), (128, 128, 3, 3), 1, (64, 128, 28, 28), [51970195, 60228263]),
        ("bfloat16", (128, 64, 56, 56), (256, 64, 1, 1), 1, (128, 256, 56, 56), [8388608]),
    ],
)
def test_the_gradient_of_a_weight_takes_more_than_that_of_an_input(
    dtype: str, source: tuple[int, ...], weight: tuple[int, ...], stride: int, result: tuple[int, ...], recorded: list[int]
) -> None:
    forms = [tensor(dtype, *shape) for shape in (result, source, weight)]
    found = taken(
        "convolution_backward.default", *forms, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    assert found == [pytest.approx(each, rel=0.02) for each in recorded]
    assert found == sorted(found)


def test_attention_backward_holds_the_querys_gradient_in_fp32() -> None:
    bf16, fp32 = tensor("bfloat16", 16, 12, 1024, 64), tensor("float32", 16, 12, 512, 64)
    assert taken("_scaled_dot_product_cudnn_attention_backward.default", bf16, bf16, bf16, bf16) == [51118336]
    assert taken("_scaled_dot_product_efficient_attention_backward.default", fp32, fp32, fp32, fp32) == [25165824, 25190400]


@pytest.mark.parametrize(("tokens", "recorded"), [(16384, [55363584]), (2048, [])])
def test_the_gradient_of_many_embedded_tokens_is_summed_in_fp32(tokens: int, recorded: list[int]) -> None:
    rows, places = tensor("bfloat16", tokens, 768), tensor("int64", tokens)
    assert taken("embedding_dense_backward.default", rows, places, 50257, -1, False) == recorded
