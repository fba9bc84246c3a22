"""What anyfit's trainers rely on in transformers, accelerate and TRL, much of it private. A version without it fails here."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate import Accelerator
from transformers import Trainer

RELIED_ON = {  # methods of Trainer that are replaced or called, and their arguments
    "create_accelerator_and_postprocess": ["self"],
    "_move_model_to_device": ["self", "model", "device"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "create_optimizer": ["self", "model"],
    "create_scheduler": ["self", "num_training_steps", "optimizer"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "compute_loss_context_manager": ["self"],
    "_prepare_inputs": ["self", "inputs"],
    "_get_num_items_in_batch": ["self", "batch_samples", "device"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_finalize_training": ["self", "trial", "num_train_samples", "start_time"],
}
READ_BY = {  # attributes, and the method of Trainer that sets or reads them as anyfit counts on
    "__init__": ["model_accepts_loss_kwargs", "compute_loss_func", "_train_batch_size", "_created_lr_scheduler", "model_init"],
    "_run_epoch": ["current_gradient_accumulation_steps", "_set_sync_gradients", "optimizer_step_was_skipped", "training_step"],
    "evaluation_loop": ["len(self.accelerator._models) == 0"],
    "_save_checkpoint": ["save_model", "_save_optimizer_and_scheduler"],
}


@pytest.mark.parametrize("name", RELIED_ON)
def test_trainer_still_has_the_method(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == RELIED_ON[name]


@pytest.mark.parametrize("method", READ_BY)
def test_trainer_still_does_it_this_way(method: str) -> None:
    code = inspect.getsource(getattr(Trainer, method))
    assert [name for name in READ_BY[method] if name not in code] == []


def test_accelerate_still_asks_optimizers_whether_a_step_was_skipped() -> None:
    assert "for optimizer in self._optimizers" in inspect.getsource(Accelerator.optimizer_step_was_skipped.fget)


@pytest.mark.parametrize("package", ["transformers", "accelerate", "trl"])
def test_the_versions_that_the_documentation_names_are_those_of_the_tests(package: str, root: Path) -> None:
    said = re.search(rf"{package} (\d+\.\d+\.\d+)", (root / "docs/trainer.md").read_text())
    assert said is not None
    assert said[1] == version(package)


def test_sft_trainer_still_logs_what_is_put_together_again_and_adds_only_offloading_to_a_step() -> None:
    spec = find_spec("trl")  # without importing it, which takes seconds
    assert spec is not None
    code = Path(str(spec.origin)).with_name("trainer").joinpath("sft_trainer.py").read_text()
    for name in ("entropy", "mean_token_accuracy"):
        assert code.count(f'self._metrics[mode]["{name}"].append') == 1
    step = code.partition("    def training_step(")[2].partition("    def ")[0].split("\n", 1)[1].strip()
    assert step == "with self.maybe_activation_offload_context:\n            return super().training_step(*args, **kwargs)"
