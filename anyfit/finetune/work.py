"""All that a fine-tuning needs, from its options: the data as rows of tokens, and the job. Whatever is wrong with the model, the
tokenizer or the data is found here, before anything is measured, planned or written."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyfit.values.huggingface import config_of, factory, longest_sample
from anyfit.values.huggingface_adapters import lora_config
from anyfit.values.job import Job
from anyfit.values.tensor_files import TensorFolder
from anyfit.values.units import number_of, show_count

from .examples import KINDS, Chat, Examples, read
from .options import CLIP_NORM, Options
from .packing import Packed, Unpacked, digest
from .schedule import Schedule, part_of
from .tokens import Counted, Sample, samples_of, shortened, tokenizer_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

MOST_LENGTH = 2048  # tokens a row, and …
MOST_ROWS = 8  # … rows a step, where none are asked for
LEAST_STEPS = 10  # an epoch, for which smaller batches are taken
LOOKS = 10  # in a run, and …
LEAST_BETWEEN = 5  # … so many steps between two of them, at least


@dataclass(frozen=True)
class Work:
    options: Options  # with all that was left open decided
    tokenizer: Any
    training: Packed | Unpacked
    evaluation: Packed | Unpacked | None
    summary: tuple[str, ...]  # of the data, for whoever watches

    @classmethod
    def of(cls, options: Options, ranks: int = 1) -> Work:
        """Reads the data; of a run that is resumed it must be the same as before."""
        folder = Path(options.model)
        config, packing = _checked(folder, options)
        tokenizer = tokenizer_of(folder)
        parts = _parts(options)
        encoded = [samples_of(examples, indices, tokenizer) for examples, indices in parts]
        length = _length(options, config, [sample for samples, _ in encoded for sample in samples])
        kept = [
            shortened(samples, length, counted, is_text=examples.kind == "text")
            for (samples, counted), (examples, _) in zip(encoded, parts, strict=True)
        ]
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        made = [(Packed.of if packing else Unpacked)(samples, length, padding) for samples in kept]
        for samples, (examples, _), (whole, _) in zip(kept, parts, encoded, strict=True):
            if not samples:
                raise ValueError(f"{examples.file} has no answer to learn: {_why_none(examples, whole, length)}")
        training, evaluation = made[0], made[1] if len(made) > 1 else None
        found = replace(options, length=length, packing=packing, digest=digest([each for samples in kept for each in samples]))
        found = _decided(found, len(training), ranks)
        if options.digest not in (None, found.digest):
            raise ValueError(
                f"{options.data} is not the data that the run began with, or its tokenizer is another: give both back as they "
                "were, or start anew without --resume"
            )
        summary = _summary(found, [examples for examples, _ in parts], [counted for _, counted in encoded], made)
        return cls(found, tokenizer, training, evaluation, summary)

    def job(self, optimizer: Callable[[nn.Module], Optimizer]) -> Job:
        options, rows = self.options, self.training
        assert options.batch_size is not None
        assert options.steps is not None
        sample = rows.largest(options.batch_size)
        return Job.from_huggingface(
            options.model,
            batch_size=options.batch_size,
            sample=sample,
            max_sample=sample if isinstance(rows, Unpacked) else None,
            optimizer=optimizer,
            scheduler=Schedule(options.schedule, options.steps, _warmup(options)),
            clip_norm=CLIP_NORM,
            precision=options.precision,
            seed=options.seed,
            adapter=None if options.lora is None else lora_config(options.lora),
        )

    @property
    def shown(self) -> Sequence[Sample]:
        """The samples that the model is asked to answer on the way: of the evaluation, where there is one."""
        return (self.evaluation or self.training).samples[: self.options.samples]


def _checked(folder: Path, options: Options) -> tuple[Any, bool]:
    """The configuration, of a causal language model with weights; and whether samples are packed."""
    config = config_of(folder)
    TensorFolder.open(folder)
    made_by = factory(config).made_by
    if not made_by.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"{folder} is a {made_by.__name__}, and fine-tuning is for causal language models (…ForCausalLM)")
    reads_positions = "position_ids" in inspect.signature(made_by.forward).parameters
    if options.packing and not reads_positions:
        raise ValueError(f"{made_by.__name__} takes no position_ids, and cannot keep packed samples apart: use --no-packing")
    return config, reads_positions if options.packing is None else options.packing


def _parts(options: Options) -> list[tuple[Examples, Sequence[int]]]:
    """The examples that train; and those that evaluate, where some do."""
    examples, file = read(Path(options.data)), options.evaluation_file
    every = list(range(len(examples)))
    if options.evaluation is None:
        return [(examples, every)]
    if file is not None:
        others = read(file)
        return [(examples, every), (others, range(len(others)))]
    count = max(part_of(len(examples), options.evaluation, "--eval"), 1)
    if count >= len(examples):
        raise ValueError(
            f"--eval {options.evaluation} leaves none of the {len(examples)} examples of {examples.file} to learn from"
        )
    apart = set(random.Random(options.seed).sample(every, count))
    return [(examples, [each for each in every if each not in apart]), (examples, sorted(apart))]


def _why_none(examples: Examples, samples: Sequence[Sample], length: int) -> str:
    """Why nothing of what was read is left to learn."""
    if samples:
        return f"they all begin after {length} tokens, the first after {min(each.asked for each in samples)}; use a larger --seq"
    if examples.kind == "text":
        return "it is all empty"
    first = examples[0]
    if not isinstance(first, Chat):
        return "all of them are empty"
    roles = dict.fromkeys(each["role"] for each in first.messages)
    if "assistant" in roles:
        return "the messages of the assistant are all empty"
    return f"no message in it has the role assistant, the first chat has {', '.join(roles)}"


def _length(options: Options, config: Any, samples: Sequence[Sample]) -> int:
    """Tokens a row: as asked for, or a power of two that the longest sample fits in, up to a limit."""
    longest, positions = max((len(each) for each in samples), default=1), longest_sample(config)
    if options.length is not None:
        if positions is not None and options.length > positions:
            raise ValueError(f"--seq {options.length} is more than the {positions} positions of the model")
        return options.length
    return min(1 << max(longest - 1, 1).bit_length(), MOST_LENGTH, positions or MOST_LENGTH)


def _decided(options: Options, rows: int, ranks: int) -> Options:
    batch = options.batch_size
    if batch is None:
        batch = -(-max(min(MOST_ROWS, rows // LEAST_STEPS), 1) // ranks) * ranks
    steps = options.epochs * rows // batch
    if steps == 0:
        raise ValueError(
            f"{number_of(rows, 'row')} of {options.length} tokens, {number_of(options.epochs, 'epoch')}: that makes no batch of "
            f"{batch}; use --batch "
            f"{options.epochs * rows // ranks * ranks or ranks}, more --epochs or a shorter --seq"
        )
    looks = options.eval_every or max(steps // LOOKS, LEAST_BETWEEN)
    save_every = looks if options.save_every is None else options.save_every
    return replace(options, batch_size=batch, steps=steps, eval_every=looks, save_every=save_every)


def _warmup(options: Options) -> int:
    """Its steps."""
    steps = options.steps or 0
    warmup = part_of(steps, options.warmup, "--warmup")
    if warmup > steps:
        raise ValueError(
            f"--warmup {options.warmup} is more than the {number_of(steps, 'step')} of this run; give a share such as 3%"
        )
    return warmup


def _summary(
    options: Options, read: Sequence[Examples], counted: Sequence[Counted], made: Sequence[Packed | Unpacked]
) -> tuple[str, ...]:
    samples = [sample for part in made for sample in part.samples]
    tokens, learnt = sum(map(len, samples)), sum(each.learnt for each in samples)
    every, count = sum(map(len, made)), sum(each.examples for each in counted)
    rows = number_of(every, "row")
    if len(made) > 1:
        rows = f"{number_of(len(made[0]), 'row')} to train on and {len(made[1])} to evaluate,"
    how = f"{rows} of {options.length} tokens, {tokens / (every * (options.length or 1)):.0%} full"
    kinds = dict.fromkeys(" and ".join(KINDS[each.kind]) for each in read)
    how = f"packed into {how}" if options.packing else f"a row each, of at most {options.length} tokens"
    lines = [
        f"data           {number_of(count, 'example')} of {', or '.join(kinds)}: {number_of(len(samples), 'sample')}, "
        f"{show_count(tokens)} tokens, {show_count(learnt)} of them learnt; {how}"
    ]
    if len(made) > 1:
        apart, trained = counted[1].examples, counted[0].examples
        lines.append(
            f"evaluation     {number_of(apart, 'example')}, every {number_of(options.eval_every or 0, 'step')}; "
            f"{number_of(trained, 'example')} to train on"
        )
    lines.append(
        f"training       {number_of(options.steps or 0, 'step')} of {number_of(options.batch_size or 0, 'row')}, "
        f"{number_of(options.epochs, 'epoch')}; {options.optimizer}, learning rate {options.learning_rate:g}, {options.schedule}"
    )
    total = {name: sum(getattr(each, name) for each in counted) for name in ("split", "unanswered", "shortened", "cut_off")}
    unread = dict.fromkeys(column for each in read for column in each.unread)
    notes = [f"columns that are not read: {', '.join(unread)}"] if unread else []
    if total["split"]:
        chats = number_of(total["split"], "chat")
        notes.append(f"{chats} became several samples: the template shows earlier answers in another way")
    if total["unanswered"]:
        notes.append(f"left out: {number_of(total['unanswered'], 'example')} without an answer to learn")
    if total["shortened"]:
        ends = number_of(total["shortened"], "sample")
        notes.append(f"cut after {options.length} tokens: {ends}; a larger --seq keeps more")
    if total["cut_off"]:
        ends = number_of(total["cut_off"], "sample")
        notes.append(f"left out: {ends} whose answer begins after {options.length} tokens (--seq)")
    return (*lines, *(f"note           {note}" for note in notes))
