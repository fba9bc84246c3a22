"""Weights from a folder of safetensors straight into chunks: a model is never whole in memory, on any rank.

The model is built with parameters that have shapes and no bytes, and with its own buffers. Its names are compared with those in
the folder before a value is read. Then each chunk reads, piece by piece, what this rank holds of each parameter. A parameter that
transformers fuses from several tensors is put together whole, one at a time. PEFT's adapters are initialised by PEFT, on a base
without bytes, or have a folder of their own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from anyfit.values.cuts import Parted
from anyfit.values.huggingface_adapters import MADE_OF_WEIGHTS, SAVED, is_adapted, refuse_dependent, saved_names
from anyfit.values.huggingface_names import ignored_names, recipes_from_folder
from anyfit.values.job import Job
from anyfit.values.tensor_files import ELEMENT_BYTES, Entry, TensorFolder, read_header
from anyfit.values.weights import Match, Weights

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
HELD_EXACTLY = (torch.float32, torch.bfloat16, torch.float16)  # by an fp32 number
SHORT_RUN = 2**14  # elements: shorter ones are not worth a read each
SHOWN = 5  # of many errors of a kind

Elements = Callable[[int, int], Tensor]  # of a parameter, laid flat: from one to another


@dataclass(frozen=True, eq=False)
class Held:
    """Elements of a tensor in memory."""

    flat: Tensor

    def __call__(self, start: int, end: int) -> Tensor:
        return self.flat[start:end]


@dataclass(frozen=True)
class Stored:
    """Elements of a tensor in a file."""

    entry: Entry

    def __call__(self, start: int, end: int) -> Tensor:
        return read(self.entry, start, end)


@dataclass(frozen=True)
class InPart:
    """Elements of a rank's part of a tensor."""

    of: Elements
    parted: Parted

    def __call__(self, start: int, end: int) -> Tensor:
        if end > self.parted.elements:  # what fills up the last rank's part
            first = min(start, self.parted.elements - 1)
            mine = self(first, self.parted.elements)[start - first :]
            return torch.cat([mine, mine.new_zeros(end - start - len(mine))])
        n, rank, run = self.parted.n, self.parted.rank, self.parted.run
        first, last = start // run, -(-end // run)  # runs
        if run < SHORT_RUN and self.parted.is_even:  # with those of other ranks in between
            whole = self.of(first * n * run, last * n * run).view(last - first, n, run)
            return whole[:, rank].reshape(-1)[start - first * run : end - first * run]
        found = []
        for each in range(first, last):
            there = (each * n + rank) * run - each * run
            found.append(self.of(there + max(start, each * run), there + min(end, (each + 1) * run)))
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class InPartAtAnyTime(InPart):
    pass


def of_part(elements: Elements, parted: Parted | None) -> Elements:
    """Of a parameter that is cut; as they are, of one that is not."""
    if parted is None:
        return elements
    return (InPartAtAnyTime if isinstance(elements, AT_ANY_TIME) else InPart)(elements, parted)


AT_ANY_TIME = Held, Stored, InPartAtAnyTime  # may be asked for on any thread, before it is their turn


def of_tensor(tensor: Tensor) -> Elements:
    return Held(tensor.detach().reshape(-1))


def in_turn(tensor: Tensor) -> Elements:
    """The same, when all before it is written."""
    held = of_tensor(tensor)
    return lambda start, end: held(start, end)


@dataclass(frozen=True)
class Opened:
    """A model to be placed."""

    model: nn.Module
    elements: Mapping[str, Elements]  # by parameter, where it does not come from the model itself
    match: Match | None = None  # with the folder, where there is one


def opened(job: Job, *, resumes: bool = False) -> Opened:
    """The job's model, and where its weights come from. One that `resumes` gets them all from a checkpoint, once it is placed."""
    if job.weights is None:
        return Opened(job.build(), {})
    built = _built(job)
    if resumes:
        absent = ((name, each) for name, each in built.model.named_parameters() if name in built.absent)
        return Opened(built.model, {name: of_tensor(each.new_zeros(()).expand(each.shape)) for name, each in absent})
    weights = Weights.of(job.weights)
    folder = TensorFolder.open(weights.path)
    match, sources = _matched(built.model, folder, weights)
    if (match.missing or match.unexpected) and not weights.is_partial:
        raise ValueError(
            f"{match}\nWeights(folder, rename={{...}}) takes names over; with only= or ignore= what is missing is initialised"
        )
    if not match.matched:
        raise ValueError(f"{match}\nnothing of the folder is taken")
    initialised = built.absent - set(sources)
    if initialised:
        built = _initialised(job, built, initialised)
        match, sources = _matched(built.model, folder, weights)
    with torch.no_grad():
        for name, buffer in built.model.named_buffers():
            if name in sources:
                buffer.copy_(sources[name].elements(0, buffer.numel()).view(buffer.shape))
    parameters = [name for name, _ in built.model.named_parameters() if name in sources]
    return Opened(built.model, {name: sources[name].elements for name in parameters}, match)


@dataclass(frozen=True)
class _Built:
    model: nn.Module
    order: dict[int, int]  # by identity of a parameter, the how-manieth it was that a module took
    absent: set[str]  # parameters without bytes


def _built(job: Job, kept: Collection[int] = ()) -> _Built:
    """The model, its parameters without bytes but for those `kept`. One that the user built is as it is."""
    with _without_bytes(kept) as made:
        model = job.build()
    absent = set()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            absent.add(name)
            _become_nothing(parameter)
    return _Built(model, {id(parameter): index for index, parameter in enumerate(made)}, absent)


def _initialised(job: Job, built: _Built, names: set[str]) -> _Built:
    """The model anew, these parameters as it makes them, and no others."""
    if isinstance(job.model, nn.Module):
        raise ValueError(f"{min(names)} is on the meta device and not in the folder; give Job a function that makes the model")
    if is_adapted(built.model):
        refuse_dependent(built.model)
    order = (built.order.get(id(each)) for name, each in built.model.named_parameters() if name in names)
    torch.manual_seed(job.seed)
    again = _built(job, {index for index in order if index is not None})
    if is_adapted(again.model):
        _refuse_made_of_nothing(again, names)
    if not again.absent & names:
        return again
    torch.manual_seed(job.seed)
    return _Built(job.build(), {}, set())  # what is made of other parameters cannot be made without them


def _refuse_made_of_nothing(built: _Built, names: set[str]) -> None:
    """Raises where PEFT made a parameter of an adapter from what its base does not have yet."""
    for name, parameter in built.model.named_parameters():
        if name in names and (name in built.absent or bool(parameter.isnan().any())):
            raise ValueError(f"{name} {MADE_OF_WEIGHTS}")


@contextmanager
def _without_bytes(kept: Collection[int]) -> Iterator[list[nn.Parameter]]:
    """Inside, what modules take as parameters gives its memory up, but for the `kept`; in the order in which they came. Where
    some are kept, PEFT makes its adapters whole."""
    module_class: Any = nn.Module
    register = module_class.register_parameter
    made: list[nn.Parameter] = []
    known: set[int] = set()

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and id(param) not in known and not isinstance(param, UninitializedParameter):
            if len(made) not in kept and not param.is_meta:
                _become(param, torch.empty_like(param, device="meta"))
            known.add(id(param))
            made.append(param)
        register(module, name, param)

    module_class.register_parameter = register_parameter
    peft: Any = sys.modules.get("peft") if kept else None
    adapt: Any = None if peft is None else peft.PeftModel.__init__

    def with_adapters(adapted: nn.Module, model: nn.Module, *args: Any, **options: Any) -> None:
        for parameter in model.parameters():
            if parameter.is_meta:
                _become_nothing(parameter)  # an adapter is put where its base is: on the meta device it would be lost
        module_class.register_parameter = register
        adapt(adapted, model, *args, **options)
        module_class.register_parameter = register_parameter

    try:
        if peft is not None:
            peft.PeftModel.__init__ = with_adapters
        yield made
    finally:
        module_class.register_parameter = register
        if peft is not None:
            peft.PeftModel.__init__ = adapt


def _become(parameter: nn.Parameter, data: Tensor) -> None:
    """Gives a parameter other data, on another device too: whoever holds it has it still."""
    other = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


def _become_nothing(parameter: nn.Parameter) -> None:
    """On the CPU, where all that is done to parameters works; whoever reads one by mistake gets no number."""
    nothing = torch.full((1,), float("nan") if parameter.dtype.is_floating_point else 0, dtype=parameter.dtype)
    _become(parameter, nothing.expand(parameter.shape))


@dataclass(frozen=True)
class Source:
    """Where a tensor of the model comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: Elements


def _matched(model: nn.Module, folder: TensorFolder, weights: Weights) -> tuple[Match, dict[str, Source]]:
    """The model's names beside the folder's; and by name of a parameter or buffer, its source."""
    found, unexpected = _found(model, folder, weights)
    own: dict[int, list[str]] = {}  # names of the same tensor, the one it goes by here first
    tensors: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *model.state_dict(keep_vars=True).items()):
        if isinstance(tensor, Tensor) and name not in own.setdefault(id(tensor), []):
            own[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
    saved = set(model.state_dict(keep_vars=True))
    not_saved = {name for names in own.values() for name in names} - saved
    may_miss = ignored_names(model, "missing")
    sources: dict[str, Source] = {}
    matched, missing, left_out, odd = [], [], [], []
    for identity, names in own.items():
        if not saved & set(names):
            continue  # made by the model, and not saved by anyone
        there = [name for name in names if name in found]
        if not any(weights.takes(name) for name in names):
            left_out.append(names[0])
        elif not there:
            if not may_miss(names[0]):
                missing.append(names[0])
        else:
            matched.append(names[0])
            sources[names[0]] = source = _tied([found[name] for name in there], there, folder)
            if reason := _unfit(source, tensors[identity]):
                odd.append(f"{names[0]} {reason}")
    if odd:
        more = f", and {len(odd) - SHOWN} others" if len(odd) > SHOWN else ""
        raise ValueError(f"{folder.folder}: {'; '.join(odd[:SHOWN])}{more}")
    left_over = ignored_names(model, "unexpected")
    known = saved | not_saved
    unexpected += [name for name in found if name not in known]
    unexpected = [name for name in unexpected if not left_over(name) and not weights.ignores(name)]
    weights.refuse_idle_patterns({*known, *found, *folder.entries})
    match = Match(
        folder=str(folder.folder),
        matched=tuple(matched),
        missing=tuple(missing),
        left_out=tuple(left_out),
        unexpected=tuple(sorted(unexpected)),
        digest=folder.digest,
        is_partial=weights.is_partial,
    )
    return match, sources


def _found(model: nn.Module, folder: TensorFolder, weights: Weights) -> tuple[dict[str, Source], list[str]]:
    """By the model's name, or what would be one, what the folder has; and names whose tensors make nothing together."""
    entries: dict[str, Entry] = {}
    for name, entry in folder.entries.items():
        new = weights.renamed(name)
        if new in entries:
            raise ValueError(f"Weights(rename=) makes two of {folder.folder} one: {new!r}, from {name!r} and another")
        entries[new] = entry
    found: dict[str, Source] = {}
    last = Last()
    strange: list[str] = []
    known = set(model.state_dict(keep_vars=True))
    for recipe in recipes_from_folder(model, entries):
        if recipe.make is None:
            entry = entries[recipe.parts[0]]
            found[recipe.name] = Source(entry.shape, DTYPES[entry.dtype], Stored(entry))
            continue
        if recipe.name not in known:
            strange += recipe.parts
            continue
        try:
            made = recipe.make(lambda name: torch.empty(entries[name].shape, dtype=DTYPES[entries[name].dtype], device="meta"))
        except Exception as error:
            raise ValueError(f"{folder.folder}: {recipe.name} cannot be made of {recipe.parts[0]} and such: {error}") from error
        make = functools.partial(recipe.make, lambda key: read(entries[key], 0, entries[key].elements).view(entries[key].shape))
        for name, tensor in made.items():
            found[name] = Source(tuple(tensor.shape), tensor.dtype, functools.partial(last.elements, make, name))
    if weights.adapter is not None:
        found |= _of_adapter(model, Path(weights.adapter))
    return found, strange


def _of_adapter(model: nn.Module, folder: Path) -> dict[str, Source]:
    """What PEFT saved of an adapter, by the model's names: all of it, and nothing else."""
    if not is_adapted(model):
        raise ValueError(f"Weights(adapter={str(folder)!r}) is for a PeftModel, and the job's model is {type(model).__name__}")
    if not (folder / SAVED).is_file():
        pickled = " but adapter_model.bin, a pickle, which runs what is in it" * (folder / "adapter_model.bin").is_file()
        raise FileNotFoundError(f"{folder} holds no {SAVED}{pickled}; PEFT's model.save_pretrained(folder) writes one")
    entries, names = read_header(folder / SAVED), saved_names(model)
    odd = sorted(entries.keys() ^ names.keys())
    if odd:
        lacking = "does not have" if odd[0] in names else "has besides"
        raise ValueError(
            f"{folder / SAVED} {lacking} {odd[0]!r} (one of {len(odd)}), where the model's adapter is of {len(names)} tensors; "
            "adapt the model by the folder's own adapter_config.json: Job.from_huggingface(base, adapter=folder)"
        )
    return {
        names[saved]: Source(entry.shape, DTYPES[entry.dtype], functools.partial(read, entry)) for saved, entry in entries.items()
    }


class Last:
    """Holds what was last made of several tensors at once, as long as it is being read, and nothing that was made before."""

    def __init__(self) -> None:
        self._made_by: Callable[[], dict[str, Tensor]] | None = None
        self._made: dict[str, Tensor] = {}

    def one_of(self, make: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
        if make is not self._made_by:
            self._made = {}
            self._made, self._made_by = make(), make
        return self._made[name]

    def elements(self, make: Callable[[], dict[str, Tensor]], name: str, start: int, end: int) -> Tensor:
        return self.one_of(make, name).reshape(-1)[start:end]


def _tied(sources: list[Source], names: list[str], folder: TensorFolder) -> Source:
    """One source for a tensor that the folder has under several names: they must be the same."""
    first, *others = sources
    if not others:
        return first

    def elements(start: int, end: int) -> Tensor:
        values = first.elements(start, end)
        for name, other in zip(names[1:], others, strict=True):
            if other.shape != first.shape or not torch.equal(values, other.elements(start, end).to(values.dtype)):
                raise ValueError(
                    f"{folder.folder}: {names[0]} and {name} are one in this model, and differ in the folder; build the model "
                    "without tying them (tie_word_embeddings=False), or leave one out: Weights(folder, ignore=...)"
                )
        return values

    return Source(first.shape, first.dtype, elements)


def _unfit(source: Source, tensor: Tensor) -> str | None:
    """Why it cannot be the tensor's."""
    if source.shape != tuple(tensor.shape):
        return f"is {list(source.shape)} in the folder and {list(tensor.shape)} in the model"
    if source.dtype != tensor.dtype and not (tensor.dtype.is_floating_point and source.dtype in HELD_EXACTLY):
        return f"is {source.dtype} in the folder, which {tensor.dtype} does not hold exactly"
    return None


def read(entry: Entry, start: int, end: int) -> Tensor:
    """Elements of a tensor in a file, laid flat. Only they are read."""
    size = ELEMENT_BYTES[entry.dtype]
    data = torch.empty((end - start) * size, dtype=torch.uint8)
    numbers: Any = data.numpy()
    left = memoryview(numbers)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start + start * size)
        while left:
            count = file.readinto(left)
            if not count:
                raise OSError(f"{entry.file} has become shorter while it was read")
            left = left[count:]
    return data.view(DTYPES[entry.dtype])
