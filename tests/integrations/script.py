"""A language model trained by a script as transformers' documentation has them; torchrun starts it.

script.py NAME FOLDER [--device-memory 1MiB] [--resume CHECKPOINT]     NAME: plain, or anyfit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

import anyfit
from anyfit.integrations.huggingface import AnyfitTrainer

from .trainers import numbers, trained


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device-memory")
    parser.add_argument("--resume")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    plans: list[Any] = []

    class Planned(AnyfitTrainer):
        def _step(self, window: Any) -> torch.Tensor:
            plans.append(self.run.plan)
            return super()._step(window)

    machine = {"machine": anyfit.probe().with_limits(device_memory=asked.device_memory)} if asked.device_memory else {}
    kind = Trainer if asked.name == "plain" else Planned
    trainer = trained(kind, asked.folder / asked.name, asked.resume, options=machine, ddp_backend="gloo")
    logged = numbers(trainer.state.log_history)
    evaluated = trainer.evaluate()["eval_loss"]
    state = trainer.model.state_dict()
    found = {
        "logged": logged,
        "evaluated": evaluated,
        "weights": {name: float(each.double().norm()) for name, each in state.items()},
        "micro_batch": plans[0].micro_batch if plans else None,
        "weight_shards": max((each.weight_shards for each in plans[0].chunks), default=1) if plans else None,
    }
    (asked.folder / f"{asked.name}-{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
