"""A Job refuses what cannot be trained, by the name of the argument and with what to type instead."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit import Job
from tests.machines import small_machine
from tests.models import Convolutional, Tangled, byte_batches, next_byte_loss


class Outputs(OrderedDict[str, Any]):
    """As transformers has them."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def a_job(**changes: Any) -> Job:
    arguments: dict[str, Any] = {
        "model": Tangled,
        "loss": next_byte_loss,
        "optimizer": adamw,
        "sample": byte_batches(1, 4)[0],
        "batch_size": 4,
        "precision": "fp32",
    }
    return Job(**arguments | changes)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("argument", "value", "kind", "says"),
    [
        ("model", "gpt2", TypeError, "must be callable, got str 'gpt2'; pass an nn.Module or a function that makes one"),
        ("model", None, TypeError, "must be callable, got NoneType None"),
        ("loss", 0.5, TypeError, "must be callable, got float 0.5; pass a function such as lambda model, batch: "),
        ("loss", None, TypeError, "must be callable"),
        ("optimizer", "adamw", TypeError, "must be callable, got str 'adamw'; pass a function such as lambda model: torch.optim"),
        ("optimizer", torch.optim.AdamW, TypeError, "takes a function of the model, got the class AdamW; pass a function"),
        ("scheduler", 0.1, TypeError, "must be callable, got float 0.1; pass a function such as lambda optimizer: "),
        ("split", [2, 2], TypeError, "must be callable, got list [2, 2]"),
        ("batch_size", 0, ValueError, "must be at least 1, got 0"),
        ("batch_size", 4.0, TypeError, "must be an int, got float 4.0"),
        ("batch_size", True, TypeError, "must be an int, got bool True"),
        ("batch_size", "4", TypeError, "must be an int, got str '4'"),
        ("micro_batch", -2, ValueError, "must be at least 1, got -2"),
        ("micro_batch", 2.5, TypeError, "must be an int, got float 2.5"),
        ("seed", -1, ValueError, "must be at least 0, got -1"),
        ("seed", None, TypeError, "must be an int, got NoneType None"),
        ("clip_norm", 0, ValueError, "must be positive, got 0; None does not clip"),
        ("clip_norm", float("nan"), ValueError, "must be positive, got nan"),
        ("clip_norm", "1.0", TypeError, "must be a number or None, got str '1.0'"),
        ("clip_norm", True, TypeError, "must be a number or None, got bool True"),
        ("sample", None, TypeError, "is None; give a batch like those to come, for example next(iter(loader))"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_got(argument: str, value: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=re.escape(f"Job({argument}=) {says}")):
        a_job(**{argument: value})


def test_an_optimizer_that_is_made_already_is_refused_with_what_to_type() -> None:
    with pytest.raises(
        TypeError, match=r"Job\(optimizer=\) must be callable, got AdamW .*; pass a function such as lambda model"
    ):
        a_job(optimizer=adamw(Tangled()))


@pytest.mark.parametrize(
    ("given", "offered"), [("bf6", "did you mean 'bf16'?"), ("fp23", "did you mean 'fp32'?"), (64, "known: bf16, fp32")]
)
def test_an_unknown_precision_offers_the_nearest(given: Any, offered: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Job(precision={given!r}) is not known; {offered}")):
        a_job(precision=given)


def test_a_micro_batch_larger_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Job(micro_batch=8) is larger than batch_size=4")):
        a_job(micro_batch=8)


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="micro_bach"):
        a_job(micro_bach=2)


def test_a_job_cannot_be_changed_but_can_be_made_anew() -> None:
    job = a_job()
    with pytest.raises(AttributeError):
        job.batch_size = 8  # type: ignore[misc]
    assert replace(job, batch_size=8).batch_size == 8


# ---------------------------------------------------------------------- the model and its optimizer


def test_a_module_is_trained_itself_and_a_factory_makes_a_new_one() -> None:
    model = Tangled()
    assert a_job(model=model).build() is model
    job = a_job(model=Tangled)
    assert job.build() is not job.build()


def test_a_factory_that_makes_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("Job(model=) made dict {}, not an nn.Module")):
        a_job(model=dict).build()


def test_an_optimizer_function_that_makes_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("Job(optimizer=) made NoneType None, not a torch.optim.Optimizer")):
        a_job(optimizer=lambda model: None).build_optimizer(Tangled())


def test_an_optimizer_of_another_models_parameters_is_refused() -> None:
    other = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"holds a parameter of shape \(5, 3\) that is not of the model it was given; pass a "):
        a_job(optimizer=lambda model: adamw(other)).build_optimizer(Tangled())


def test_each_parameter_is_known_by_the_group_it_is_in() -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        return torch.optim.SGD([{"params": matrices}, {"params": [p for p in parameters if p.dim() == 1]}], lr=0.1)

    model = Tangled()
    optimizer, group_of = a_job(optimizer=two_groups).build_optimizer(model)
    assert isinstance(optimizer, torch.optim.SGD)
    for parameter in model.parameters():
        wanted = None if not parameter.requires_grad else 0 if parameter.dim() > 1 else 1
        assert group_of.get(id(parameter)) == wanted


# ---------------------------------------------------------------------- dtypes


def test_bf16_holds_all_but_batch_norms_in_bf16() -> None:
    dtypes = a_job(precision="bf16").dtypes(Convolutional())
    norms = {name for name in dtypes if re.fullmatch(r"layers\.\d\.1\.(weight|bias)", name)}
    assert len(norms) == 4
    assert {dtypes[name] for name in norms} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in norms} == {torch.bfloat16}


def test_fp32_holds_all_in_fp32_and_names_a_tied_weight_once() -> None:
    dtypes = a_job().dtypes(Tangled())
    assert set(dtypes.values()) == {torch.float32}
    assert "embed.weight" in dtypes
    assert "head.weight" not in dtypes


@pytest.mark.parametrize(
    ("precision", "dtype", "allowed"),
    [
        ("fp32", torch.float64, "torch.float32"),
        ("fp32", torch.bfloat16, "torch.float32"),
        ("bf16", torch.float64, "torch.float32 or torch.bfloat16"),
        ("bf16", torch.float16, "torch.float32 or torch.bfloat16"),
    ],
)
def test_a_parameter_that_cannot_be_held_exactly_is_named(precision: str, dtype: torch.dtype, allowed: str) -> None:
    model = Tangled()
    model.twice.bias.data = model.twice.bias.data.to(dtype)
    with pytest.raises(TypeError, match=f"parameter twice.bias is {dtype}, .*{precision}.* build the model in {allowed}$"):
        a_job(precision=precision).dtypes(model)


def test_integer_parameters_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    assert a_job(precision="bf16").dtypes(model)["table"] == torch.int64


# ---------------------------------------------------------------------- fingerprints


def test_a_fingerprint_is_the_same_for_the_same_model_built_again() -> None:
    job = a_job()
    assert job.fingerprint(job.build()) == job.fingerprint(job.build())


def untied(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def unfrozen(model: nn.Module) -> None:
    model.frozen.requires_grad_(True)


def wider(model: nn.Module) -> None:
    model.twice = nn.Linear(16, 32)


def renamed(model: nn.Module) -> None:
    model.thrice = model.twice
    del model.twice


@pytest.mark.parametrize("change", [untied, unfrozen, wider, renamed])
def test_a_fingerprint_tells_models_apart(change: Callable[[nn.Module], None]) -> None:
    job, model, changed = a_job(), Tangled(), Tangled()
    change(changed)
    assert job.fingerprint(model) != job.fingerprint(changed)


def test_a_fingerprint_tells_batch_sizes_and_precisions_apart() -> None:
    model = Tangled()
    jobs = [a_job(), a_job(batch_size=8), a_job(precision="bf16")]
    assert len({job.fingerprint(model) for job in jobs}) == 3


# ---------------------------------------------------------------------- batches


def test_the_users_split_cuts_the_batch_and_must_not_make_more_parts_than_asked() -> None:
    def by_columns(batch: Tensor, sizes: Any) -> list[Tensor]:
        return list(batch.split(list(sizes), dim=1))

    job = a_job(split=by_columns)
    batch = torch.arange(12).reshape(2, 6)
    assert [part.shape[1] for part in job.cut(batch, [4, 2])] == [4, 2]
    assert job.rows(batch) is None
    assert a_job().rows(batch) == 2
    assert len(a_job(split=lambda batch, sizes: [batch]).cut(batch, [4, 2])) == 1  # a batch of fewer samples
    for count in (0, 3):
        with pytest.raises(ValueError, match=re.escape(f"Job(split=) made {count} micro-batches where 2 were asked for")):
            a_job(split=lambda batch, sizes, count=count: [batch] * count).cut(batch, [4, 2])


def test_fp32_inputs_are_cast_to_bf16_and_nothing_else_is() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.long, torch.bool, torch.complex64]
    batch = {str(kind): torch.zeros(2, dtype=kind) for kind in kinds} | {"array": numpy.zeros(2, dtype=numpy.float32)}
    for precision, wanted in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        prepared = a_job(precision=precision).prepare(batch, torch.device("cpu"))
        assert prepared.pop("array") is batch["array"]
        assert [tensor.dtype for tensor in prepared.values()] == [wanted, *kinds[1:]]


def test_a_job_says_whether_its_batches_can_be_cut() -> None:
    sample = {"x": torch.zeros(4, 2), "names": list("abcd")}
    assert a_job(sample=sample).uncuttable() is None
    assert a_job(sample=sample, batch_size=16).uncuttable() is None
    assert "batch['w'] is a tensor of shape (9,)" in str(a_job(sample=sample | {"w": torch.zeros(9)}).uncuttable())
    assert "cannot be told" in str(a_job(sample={"scale": torch.tensor(1.0)}).uncuttable())
    pairs = [torch.zeros(4, 2), torch.zeros(4, 2)]
    assert a_job(sample=pairs).uncuttable() is None
    assert "2 fields or 2 samples" in str(a_job(sample=pairs).uncuttable(share=2))
    assert a_job(sample={"w": object()}, split=lambda batch, sizes: [batch]).uncuttable() is None


def test_a_sample_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("sample['x'][1] is a generator, which can be read only once")):
        a_job(sample={"x": [1, (each for each in range(3))]})


# ---------------------------------------------------------------------- the loss


def evaluate(loss: Callable[[nn.Module, Tensor], Any]) -> tuple[Tensor, Tensor | None]:
    return a_job(loss=loss).evaluate(nn.Linear(3, 3), torch.ones(2, 3))


def test_a_mean_and_a_sum_with_its_weight_are_both_losses() -> None:
    mean, no_weight = evaluate(lambda model, batch: model(batch).mean().reshape(1))
    assert mean.shape == ()
    assert no_weight is None
    for count in (2, 2.0, torch.tensor(2), torch.tensor([2.0])):
        total, weight = evaluate(lambda model, batch, count=count: (model(batch).sum(), count))
        assert total.shape == ()
        assert weight is not None
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((), torch.float32, False)
        assert float(weight) == 2


@pytest.mark.parametrize(
    ("loss", "kind", "says"),
    [
        (lambda model, batch: model(batch), ValueError, "got a torch.float32 tensor of shape (2, 3); take its .mean()"),
        (lambda model, batch: model(batch).argmax(), ValueError, "got a torch.int64 tensor of shape ()"),
        (
            lambda model, batch: float(model(batch).detach().sum()),
            ValueError,
            "without .item() or float()",
        ),
        (lambda model, batch: {"loss": model(batch).sum()}, ValueError, "got dict with 'loss'; return its ['loss']"),
        (lambda model, batch: Outputs(loss=model(batch).sum()), ValueError, "got Outputs with 'loss'; return its ['loss']"),
        (lambda model, batch: SimpleNamespace(loss=model(batch).sum()), ValueError, "got SimpleNamespace; return its .loss"),
        (lambda model, batch: [model(batch).sum(), 2], ValueError, "got list of 2; return the loss alone, or the sum of several"),
        (
            lambda model, batch: (model(batch).sum(), model(batch).mean()),
            ValueError,
            "second is a tensor of one number that needs gradients, and a weight has none: for two losses return their sum",
        ),
        (lambda model, batch: (model(batch).sum(), model(batch)), ValueError, "second is a tensor of shape (2, 3) that needs"),
        (lambda model, batch: None, ValueError, "or (sum, weight), got NoneType None"),
        (lambda model, batch: (model(batch).sum(),) * 3, ValueError, "or (sum, weight), got tuple of 3; return the loss alone"),
        (
            lambda model, batch: model(batch).sum().detach(),
            ValueError,
            "not connected to any trainable parameter: was it detached",
        ),
        (lambda model, batch: batch.sum(), ValueError, "not connected to any trainable parameter"),
        (lambda model, batch: (model(batch).sum(), torch.ones(2)), ValueError, "got shape (2,); take its .sum()"),
        (lambda model, batch: (model(batch).sum(), {"accuracy": 1}), TypeError, "a pair whose second is dict {'accuracy': 1}"),
        (lambda model, batch: (model(batch).sum(), "2"), TypeError, "(sum, weight) are two scalars"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        evaluate(loss)


def test_without_gradients_a_loss_need_not_be_connected() -> None:
    with torch.no_grad():
        mean, _ = evaluate(lambda model, batch: model(batch).mean())
    assert not mean.requires_grad


def test_an_error_of_the_users_loss_is_left_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate(lambda model, batch: 1 / 0)


def test_a_model_that_others_have_divided_is_refused() -> None:
    from torch import distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    def divided() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, init_device_mesh("cpu", (1,)), [Replicate()]))
        return model

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        job = Job(
            divided, lambda model, x: model(x).sum(), lambda model: torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4), 2
        )
        with pytest.raises(TypeError, match="parameter weight is a DTensor, sharded over devices by other code"):
            job.dtypes(divided())
    finally:
        dist.destroy_process_group()


def _with_a_table(x: Tensor, table: Tensor) -> Tensor:
    return x @ table


def _with_a_table_a_row(x: Tensor, table: Tensor) -> Tensor:
    return torch.bmm(x[None], table[None])


@pytest.mark.parametrize("mix", [_with_a_table, _with_a_table_a_row])
def test_where_two_dtypes_meet_in_bf16_the_error_says_what_to_do(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("table", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return mix(super().forward(x), self.table).mean()

    job = Job(
        model=Model,
        loss=lambda model, batch: model(batch),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.ones(4, 4),
        batch_size=4,
    )
    with pytest.raises(RuntimeError) as error, anyfit.start(job, machine=small_machine()) as run:
        run.step(job.sample)
    assert any("or use Job(precision='fp32')" in note for note in error.value.__notes__)
