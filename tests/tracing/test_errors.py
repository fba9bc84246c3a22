"""Models and samples that cannot be traced: one error that says where, and what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

import anyfit
from anyfit.tracing import trace

ROWS = 4


class Model(nn.Module):
    """A layer, and then whatever the test does to its output."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def job_of(model: Callable[[], nn.Module], sample: Any = None) -> anyfit.Job:
    return anyfit.Job(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.ones(ROWS, 8) if sample is None else sample,
        batch_size=ROWS,
        precision="fp32",
        real_run=False,
    )


def refused(then: Callable[[Tensor], Tensor]) -> ValueError:
    with pytest.raises(ValueError, match="tensor") as error:
        trace(job_of(lambda: Model(then)), ROWS)
    assert not getattr(error.value, "__notes__", None)  # so that the command line says it in one line
    return error.value


# ---------------------------------------------------------------------- values that fakes do not have


def takes_an_item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def lists(x: Tensor) -> Tensor:
    return x * x.tolist()[0][0]


def leaves_for_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize("then", [takes_an_item, branches, lists, leaves_for_numpy])
def test_a_forward_that_needs_values_is_refused_with_its_own_line(then: Callable[[Tensor], Tensor]) -> None:
    error = refused(then)
    source, start = inspect.getsourcelines(then)
    assert str(error).startswith(f"{__file__}:{start + 1}, in {then.__name__}: `{source[1].strip()}` needs the value of a tensor")
    assert "torch.where" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_the_original_error_is_kept_as_the_cause() -> None:
    assert isinstance(refused(branches).__cause__, DataDependentOutputException)


def test_a_line_in_a_library_of_models_is_named_too(tmp_path: Any) -> None:
    file = tmp_path / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text("def scaled(x):\n    return x / x.max().item()\n")
    library: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), library)
    assert f"{file}:2, in scaled" in str(refused(library["scaled"]))


def test_a_size_that_depends_on_values_is_refused() -> None:
    error = refused(lambda x: x[x > 0])
    assert re.search(
        r"test_errors.py:\d+, in <lambda>.* makes a tensor whose size depends on values \(aten::nonzero\)", str(error)
    )
    assert isinstance(error.__cause__, DynamicOutputShapeException)


# ---------------------------------------------------------------------- custom ops and functions


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("anyfit_tests", "DEF")
    yield made
    made._destroy()


def test_an_op_without_a_fake_is_named_with_how_to_register_one(library: torch.library.Library) -> None:
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: 3 * x, "CPU")
    error = refused(lambda x: torch.ops.anyfit_tests.triple(x))
    assert "calls anyfit_tests::triple" in str(error)
    assert 'torch.library.register_fake("anyfit_tests::triple"' in str(error)
    assert isinstance(error.__cause__, UnsupportedOperatorException)


def test_a_custom_op_is_traced_once_its_fake_is_registered() -> None:
    @torch.library.custom_op("anyfit_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    torch.library.register_autograd("anyfit_tests::double", lambda ctx, gradient: 2 * gradient)
    error = refused(double)
    assert "calls anyfit_tests::double" in str(error)
    assert 'torch.library.register_fake("anyfit_tests::double"' in str(error)
    torch.library.register_fake("anyfit_tests::double", lambda x: torch.empty_like(x))
    graph = trace(job_of(lambda: Model(double)), ROWS)
    assert any("double" in op.name for op in graph.ops)


class Clipped(torch.autograd.Function):
    """A gradient of its own making."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.sigmoid(x)


def test_a_custom_autograd_function_is_traced() -> None:
    graph = trace(job_of(lambda: Model(Clipped.apply)), ROWS)
    assert [op.phase for op in graph.ops if op.name.startswith("sigmoid")] == ["backward"]
    assert all(parameter.used for parameter in graph.parameters)


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].max().item()


def test_a_value_needed_in_backward_is_refused_with_its_own_line() -> None:
    assert re.search(r"test_errors.py:\d+, in backward: .* needs the value of a tensor", str(refused(Careless.apply)))


# ---------------------------------------------------------------------- models and samples


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters: there is nothing to train"):
        trace(job_of(nn.ReLU), ROWS)


@pytest.mark.parametrize("sizes", [(2**40, 2**40), (2**70, 2)])
def test_a_weight_whose_bytes_overflow_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=r"test_errors\.py:\d+, in .* makes a tensor.* with more bytes than 64 bits can count"
    ) as error:
        trace(job_of(lambda: nn.Linear(*sizes)), ROWS)
    assert len(str(error.value)) < 400  # torch's own error has its C++ stack in it
    assert error.value.__cause__ is not None


def test_an_activation_whose_bytes_overflow_is_refused() -> None:
    assert f"of sizes [{4 * 2**40}, {8 * 2**40}]" in str(refused(lambda x: x.repeat(2**40, 2**40)))


def test_a_sample_on_another_device_is_refused_with_what_to_do() -> None:
    sample = {"ids": torch.ones(ROWS, 8), "mask": torch.ones(ROWS, 8, device="meta")}
    with pytest.raises(ValueError, match=re.escape("Job(sample=): sample['mask'] is on meta")) as error:
        trace(job_of(lambda: Model(torch.relu), sample), ROWS)
    assert "torch.empty_like(sample['mask'], device='cpu')" in str(error.value)


def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    def mistaken(x: Tensor) -> Tensor:
        raise KeyError("a key of mine")

    with pytest.raises(KeyError, match="a key of mine") as error:
        trace(job_of(lambda: Model(mistaken)), ROWS)
    assert any("anyfit was running the model on a fake batch" in note for note in error.value.__notes__)
