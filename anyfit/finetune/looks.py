"""What is looked at on the way, every few steps: the loss of samples that are not learnt, the best checkpoint, and what the model
writes. All ranks look together, and a run that was stopped between a step and its look begins with that look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from anyfit.running import lines
from anyfit.running.launch import Launch
from anyfit.running.run import Run
from anyfit.values.precision import PRECISIONS

from .packing import Packed, Unpacked
from .tokens import Sample
from .work import Work

EVALUATION = "evaluation_loss"
WRITTEN_TOKENS = 64  # at most, of a sample
BEGUN_TOKENS = 32  # of a text, which has no prompt
TRIED_TOKENS = 16  # of each of two packed samples
ROUNDINGS = 8  # of the weights' dtype, that logits may differ by
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Tell = Callable[[int, str, str], None]  # step, name, text


class Looks:
    def __init__(self, run: Run, launch: Launch, work: Work, say: Callable[[str], None], tell: Tell) -> None:
        self._run, self._launch, self._work, self._say, self._tell = run, launch, work, say, tell
        self._end = ends_of(Path(work.options.model), work.tokenizer)
        self.written: list[dict[str, Any]] = []  # at the last look
        self.best = float("inf")
        before, looked = self._from_first(self._before)
        for step, loss in before:
            if loss < self.best and step:
                self.best, launch.best = loss, step
        if self.is_due and not looked:
            self.look()

    def _before(self) -> tuple[list[tuple[int, float]], bool]:
        """Of the run that is resumed: its evaluations, and whether it looked at the step that it goes on from."""
        folder, steps = self._launch.folder, self._run.steps
        found = [(each["step"], each[EVALUATION]) for each in lines.read(folder / "logged.jsonl") if EVALUATION in each]
        wrote = [each["step"] for each in lines.read(folder / "samples.jsonl")]
        looked = [step for step, _ in found] if self._work.evaluation is not None else wrote
        return [(step, loss) for step, loss in found if step <= steps], steps in looked

    def _from_first(self, make: Callable[[], Any]) -> Any:
        return make() if self._run.team is None else self._run.team.from_first(make, "what was looked at before")

    @property
    def is_due(self) -> bool:
        options, steps = self._work.options, self._run.steps
        assert options.eval_every is not None
        return steps % options.eval_every == 0 or steps == options.steps

    def look(self) -> None:
        run, work = self._run, self._work
        if work.evaluation is not None:
            loss = evaluated(run, work.evaluation)
            is_best = run.steps > 0 and loss < self.best
            if is_best:
                self.best, self._launch.best = loss, run.steps
                self._launch.save(run, wait=False)
            run.log(**{EVALUATION: loss})
            self._say(f"step {run.steps}: evaluation loss {loss:.4f}{', the best so far' * is_best}")
        if work.shown:
            self.written = [{"step": run.steps, **each} for each in written(run, work.shown, work.tokenizer, self._end)]
            for index, sample in enumerate(self.written if self._launch.is_first else ()):
                self._launch.append("samples.jsonl", sample, run.steps)
                self._tell(run.steps, f"sample {index + 1}", f"{sample['prompt']}\n\n---\n\n{sample['written']}")


def evaluated(run: Run, rows: Packed | Unpacked) -> float:
    """The mean loss of all tokens of answers, over all ranks, in passes as large as those of a step."""
    share = run.micro_batches[0]
    together, total, weight = share * run.ranks.replicas, 0.0, 0
    for start in range(0, len(rows), together):
        here = range(start, min(start + together, len(rows)))
        mine = here[run.ranks.replica * share : (run.ranks.replica + 1) * share]
        batch: list[Any] = [rows[index] for index in mine] or [rows.blank()]
        learnt = sum(rows.learnt(index) for index in here)
        total, weight = total + float(run.evaluate(rows.collate(batch))) * learnt, weight + learnt
    return total / weight


def written(run: Run, samples: Sequence[Sample], tokenizer: Any, end: list[int]) -> list[dict[str, str]]:
    """What the model writes now, and what the data has there. It takes the likeliest token: no random number is drawn."""
    from transformers import GenerationConfig

    how = GenerationConfig(max_new_tokens=WRITTEN_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end[0], use_cache=True)
    found = []
    with run.reading() as opened:
        model: Any = opened
        for sample in samples:
            asked = sample.asked if sample.asked > 1 else min(BEGUN_TOKENS, max(len(sample) // 2, 1))
            prompt = torch.from_numpy(sample.ids[None, :asked].astype(numpy.int64)).to(run.device)
            answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)[0, asked:]
            found.append(
                {
                    "prompt": tokenizer.decode(sample.ids[:asked]),
                    "written": tokenizer.decode(answer.tolist(), skip_special_tokens=True),
                    "data": tokenizer.decode(_answer(sample.ids[asked:].tolist(), end), skip_special_tokens=True),
                }
            )
    return found


def _answer(ids: list[int], end: list[int]) -> list[int]:
    """As much of what the data has as the model may write: to the first end, and no longer."""
    stop = next((index for index, each in enumerate(ids) if each in end), len(ids))
    return ids[: min(stop, WRITTEN_TOKENS)]


def ends_of(folder: Path, tokenizer: Any) -> list[int]:
    """The tokens after which a model stops writing, as its folder says."""
    from transformers import GenerationConfig

    ends = [tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        told = GenerationConfig.from_pretrained(str(folder)).eos_token_id
        ends += told if isinstance(told, list) else [] if told is None else [told]
    return list(dict.fromkeys(ends))


def refuse_leaks(run: Run, rows: Packed | Unpacked) -> None:
    """Raises where what the model makes of a packed sample depends on the one before it."""
    together = next((row for row in rows.rows if len(row) > 1), None) if isinstance(rows, Packed) else None
    if together is None:
        return
    first, second = (torch.from_numpy(rows.samples[index].ids[:TRIED_TOKENS].astype(numpy.int64)) for index in together[:2])
    other = torch.where(first > 0, first - 1, 1)  # no token as it was
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None].to(run.device)
    with run.reading() as opened:
        model: Any = opened
        made = [torch.cat([before, second])[None].to(run.device) for before in (first, other)]
        logits = [model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, len(first) :].float() for ids in made]
    changed = float((logits[0] - logits[1]).abs().max() / logits[0].std())
    # Masks leave nothing of another sample. But experts get other batches, and round in another way.
    is_routed = any(getattr(model.config, name, None) for name in EXPERTS)
    rounding = torch.finfo(getattr(torch, PRECISIONS[run.job.precision].weight)).eps
    if not changed <= (ROUNDINGS * rounding if is_routed else 0):
        raise ValueError(
            f"{type(model).__name__} lets a packed sample see the one before it (with another there its logits change, by up to "
            f"{changed:.1g} of their deviation): use --no-packing"
        )
