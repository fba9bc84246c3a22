"""Lightning Fabric with AnyfitStrategy: the numbers of plain Fabric, or a refusal that says what to type."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("lightning_fabric")
from lightning_fabric import Fabric

from anyfit.integrations.lightning import AnyfitStrategy
from anyfit.planning import search
from anyfit.values.mesh import AXES
from tests.integrations.fabric_loop import CLIP, ROWS, strategy_of, trained
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, assert_close
from tests.planning.profiles import small_profile

pytestmark = pytest.mark.filterwarnings("ignore")  # Fabric's own


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Fabric leaves in the process is taken back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("accumulate", "clips"), [(1, True), (2, True), (4, False)])
def test_a_loop_of_fabric_has_the_numbers_of_plain_fabric(accumulate: int, clips: bool) -> None:
    strategy = strategy_of(accumulate=accumulate, clip_norm=CLIP if clips else None)
    *mine, weights = trained(strategy, accumulate=accumulate, clips=clips)
    strategy.run.close()
    *plain, plain_weights = trained("auto", accumulate=accumulate, clips=clips)
    assert mine == plain
    assert_bit_equal(weights, plain_weights)


@pytest.mark.full
def test_a_loop_of_fabric_has_them_in_little_memory_too() -> None:
    ample = strategy_of()
    whole = trained(ample)
    needed = ample.run.plan.forecast.needed_bytes
    ample.run.close()
    machine = ample._machine
    assert machine is not None
    tight = strategy_of(machine=machine.with_limits(device_memory=int(0.6 * needed)))
    found = trained(tight)
    plan = tight.run.plan
    tight.run.close()
    assert any(each.optimizer == "host" for each in plan.chunks) or plan.activations
    assert found[0] == pytest.approx(whole[0], rel=1e-5)
    assert_close(found[3], whole[3], 1e-3)


@pytest.mark.full
def test_two_ranks_have_the_numbers_of_fabrics_ddp(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.integrations.fabric_loop", str(tmp_path / "found")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        found: Any = torch.load(tmp_path / f"found.{rank}", weights_only=False)
        (losses, norms, rates, weights), (plain_losses, plain_norms, plain_rates, plain_weights) = found["mine"], found["plain"]
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert norms == pytest.approx(plain_norms, rel=1e-5)
        assert rates == plain_rates
        assert_close(weights, plain_weights, 1e-3)


class WithStep(nn.Module):
    """A model that makes its own loss, as those of Lightning do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_gpt()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(ids)
        return found

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return next_byte_loss(self, batch)


def fabric_with(strategy: AnyfitStrategy, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, **options)
    fabric.launch()
    return fabric


def test_a_training_step_of_the_models_own_is_a_forward() -> None:
    strategy = strategy_of(clip_norm=None)
    fabric = fabric_with(strategy)
    module = WithStep()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model.mark_forward_method("training_step")
    before = strategy.run.state_dict()
    fabric.backward(model.training_step(byte_batches(1, ROWS)[0]))
    optimizer.step()
    after = strategy.run.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():
        model.eval()
        assert model(byte_batches(1, 2)[0][:, :-1]).shape[0] == 2
    strategy.run.close()


def test_weights_are_saved_and_loaded_by_fabric_and_the_rest_by_the_run(tmp_path: Path) -> None:
    strategy = strategy_of(clip_norm=None)
    fabric = fabric_with(strategy)
    module = tiny_gpt()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    first = strategy.run.state_dict()
    fabric.save(tmp_path / "first.ckpt", {"model": model})
    fabric.backward(next_byte_loss(model, byte_batches(1, ROWS)[0]))
    optimizer.step()
    fabric.load(tmp_path / "first.ckpt", {"model": model})
    assert_bit_equal(strategy.run.state_dict(), first)
    with pytest.raises(ValueError, match=r"strategy\.run\.save\(folder\) saves all of a run"):
        fabric.save(tmp_path / "all.ckpt", {"model": model, "optimizer": optimizer})
    strategy.run.save(tmp_path / "run")
    strategy.run.resume(tmp_path / "run")
    strategy.run.close()


def test_what_a_run_does_not_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"calls of fabric\.backward a step, at least 1"):
        strategy_of(backwards=0)
    strategy = strategy_of()
    with pytest.raises(RuntimeError, match=r"no run before fabric\.setup"):
        strategy.run  # noqa: B018
    fabric = fabric_with(strategy)
    module = tiny_gpt()
    with pytest.raises(RuntimeError, match=r"model, optimizer = fabric\.setup\(model, optimizer\)"):
        fabric.setup(module)
    stepped = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="steps one optimizer, got 2"):
        fabric.setup(module, stepped, torch.optim.SGD(module.parameters(), lr=0.1))
    model, optimizer = fabric.setup(module, stepped)
    loss = next_byte_loss(model, byte_batches(1, ROWS)[0])
    with pytest.raises(ValueError, match="the loss alone"):
        fabric.backward(loss, retain_graph=True)
    fabric.backward(loss)
    with pytest.raises(ValueError, match=r"AnyfitStrategy\(clip_norm=2\.0\)"):
        fabric.clip_gradients(model, optimizer, max_norm=2.0)
    with pytest.raises(ValueError, match="by their norm"):
        fabric.clip_gradients(model, optimizer, clip_val=2.0)
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: loss)
    strategy.run.close()


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_plan_whose_ranks_see_the_same_samples_is_refused(axis: str) -> None:
    plan = search(small_profile())
    plan = replace(plan, mesh=dict.fromkeys(AXES, 1) | {axis: 2}, stages=plan.stages * (2 if axis == "pipeline" else 1))
    with pytest.raises(ValueError, match=rf"a {axis} axis of 2, whose ranks see the same samples; .* --mesh {axis}=1"):
        AnyfitStrategy(loss=next_byte_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, plan=plan)


def test_another_precision_of_fabric_is_refused() -> None:
    strategy = strategy_of()
    fabric = fabric_with(strategy, precision="bf16-mixed")
    module = tiny_gpt()
    with pytest.raises(ValueError, match=r"precision='bf16-mixed'\) is not for AnyfitStrategy.*precision='bf16'"):
        fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
