"""What ranks agree on at the end of a step, in one exchange: the norm of the gradients, the loss, and what all must know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anyfit.values.job import Batch

from . import alike
from .engine import Engine, Progress
from .host_memory import HostMemory
from .loader import Data
from .peers import Peers
from .saves import Saves


@dataclass(frozen=True)
class Agreed:
    norm: Tensor
    scale: float  # what gradients still are to be scaled by
    loss: Tensor  # of the batch, over all ranks


class Agreement:
    def __init__(self, engine: Engine, progress: Progress, peers: Peers, saves: Saves, host: HostMemory, data: Data) -> None:
        self._engine, self._progress, self._peers = engine, progress, peers
        self._saves, self._host, self._data = saves, host, data
        self.signal = 0  # that some rank was sent, as all know after the step

    def reach(self, loss: Tensor | None, weight: Tensor | None, rows: int) -> Agreed:
        """`loss` and `weight` are this rank's sums, of so many samples. Tells ranks that went different ways."""
        engine, ranks, is_mute = self._engine, self._engine.ranks, self._peers.is_mute
        gradients = engine.placed.gradients
        nothing = torch.zeros((), device=engine.device)
        is_weighted = weight is not None
        if is_mute:
            gradients.count_out()
            loss = weight = None
        missing = gradients.missing()
        data = alike.data_of(self._data.loader, is_weighted)
        known = [
            float(ranks.asked()),
            len(missing),
            0 if is_mute else rows,
            0 if self._progress.launch is None else self._progress.launch.asked,
            self._host.lacking_bytes(),
            self._saves.has_failed,
            alike.number_of_settings(engine.optimizer),
            alike.NOWHERE if is_mute else alike.number_of(data),
        ]
        squares = gradients.finish().squares(engine.device)
        figures = [squares, *(nothing if each is None else each for each in (weight, loss))]
        figures = [each.detach().to(engine.device, torch.float64).reshape(1) for each in figures]
        lanes = engine.placed.lanes
        rows_of = lanes.reading(ranks.of_all(torch.cat([*figures, lanes.send(torch.tensor(known, dtype=torch.float64))])))()
        squares, weights, losses, asked, missed, samples, signals, lacks, unsaved, settings, places = rows_of.unbind(1)
        self.signal = int(signals.max())
        self._host.lacking, self._saves.failed_on_some = lacks.tolist(), bool(unsaved.any())
        self._refuse_other_weights(asked)
        if len(settings.unique()) > 1:
            self._refuse_different(alike.settings_of(engine.optimizer), list(range(ranks.count)))
        if len(places[places != alike.NOWHERE].unique()) > 1:
            self._refuse_different(data, [rank for rank, place in enumerate(places.tolist()) if place != alike.NOWHERE])
        if bool(missed.any()):
            wanted = set().union(*({*engine.placed.state.parameters} - set(each) for each in ranks.objects(missing)))
            gradients.count_in(sorted(wanted))
        scale = self._scale(weights if is_weighted else None, samples)
        return Agreed((squares.sum().sqrt() * scale).to(torch.float32), scale, (losses.sum() * scale).to(torch.float32))

    def mean_loss(self, batch: Batch) -> Tensor:
        """Of a batch of any size in evaluation mode; over several ranks, of all of their batches together."""
        engine = self._engine
        modes = [(module, module.training) for module in engine.model.modules()]
        engine.model.eval()
        try:
            with self._peers.telling():
                total, weight = engine.evaluate(batch)
        finally:
            for module, training in modes:
                module.training = training
        if not engine.ranks.are_several:
            return total if weight is None else total / weight
        if weight is None:
            rows = engine.job.rows(batch) or 1  # where only the user's `split` knows, batches count alike
            total, weight = total * rows, torch.as_tensor(float(rows))
        mine = torch.stack([total.double(), weight.to(total.device).double()])
        sums = engine.ranks.of_all(mine if not self._peers.is_mute else torch.zeros_like(mine)).sum(0)
        return (sums[0] / sums[1]).to(total.dtype)

    def _scale(self, weights: Tensor | None, samples: Tensor) -> float:
        """Sums to means. A batch without weight is left out, as on a rank alone."""
        if weights is not None:
            whole = float(weights.sum())
            return 1.0 / whole if whole else math.nan
        return self._engine.job.batch_size / float(samples.sum())

    def _refuse_other_weights(self, asked: Tensor) -> None:
        if len(asked.unique()) > 1:
            different = [index for index, number in enumerate(asked.tolist()) if number != asked[0]]
            raise RuntimeError(
                f"rank {different[0]} used other weights in this step than rank 0, or in another order: with weights that are "
                "divided over ranks every rank has to call the same modules; use a plan with weight_shards 1"
            )

    def _refuse_different(self, facts: Mapping[str, str], who: list[int]) -> None:
        """All ranks know that some of these may differ: a list and a tuple of the same do not."""
        everybody = self._engine.ranks.objects(facts)
        if all(everybody[rank] == everybody[who[0]] for rank in who):
            return
        raise ValueError(
            f"{alike.difference([everybody[rank] for rank in who], who)}, in step {self._progress.steps + 1}: their weights "
            "would part. Do the same to the optimizer, the schedule and the loader on every rank"
        )
