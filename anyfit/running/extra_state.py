"""What a resumed run needs besides parameters, buffers and optimizer state: `get_extra_state`, and what else training changes.

It is looked for in the attributes of every module and of the optimizer (counters, averages, generators, a teacher hidden in a
list), in those of their classes, where these are the user's own, and in variables that the loss and these classes' functions
read from around them. A checkpoint holds what differs from the checksums of the start, and nothing else: a setting that the user
changes between two runs stays changed. What was changed in place is restored in place. What cannot be written as plain data
(plain.py) is named when it is saved, and such a checkpoint is not resumed.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.placing.ranks import Ranks

from .plain import OF_EVERY_MODULE, NotPlainError, Path, Weak, Writer, checksum, inline, is_iterator, is_owned_by_library, shown
from .randomness import names_in
from .stored import StoredTensor
from .unplain import Reader

# Set by whoever places the model, by schedulers, and by torch itself.
NOT_OF_MODULES = OF_EVERY_MODULE | {"forward", "flatten_parameters", "_flat_weights", "_flat_weight_refs"}
NOT_OF_OPTIMIZERS = frozenset(
    {"state", "param_groups", "defaults", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_step_count"}
    | {"_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"}
    | {"_optimizer_load_state_dict_post_hooks", "_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"}
)
INLINE_BYTES = 1024  # tensors up to this size are written into the JSON itself
_MODULE: Any = nn.Module


class ExtraState:
    """The extra state of one run; made before its first step, and before it is resumed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Callable[..., Any]) -> None:
        self._model, self._optimizer = model, optimizer
        roots = {type(module).__module__.partition(".")[0] for module in model.modules()}
        self._libraries = frozenset(roots - {"torch", "anyfit"} - sys.stdlib_module_names)
        self._holders = dict(_holders(model, optimizer, loss, self._libraries))
        self._start: dict[Path, Any] = {}  # what was there
        self._noted: dict[Path, str] = {}  # checksums, by attribute
        self._ticks = itertools.count()
        self._shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
        for path, written, met in self._compared():
            self._noted[path] = written
            self._start |= {where: Weak(each) if isinstance(each, Tensor) else each for where, each in met.items()}
        self._lost: dict[str, str] = {}  # what the last checkpoint does not hold
        self._said: set[str] = set()

    def unsaid(self) -> Iterator[str]:
        """Warnings about the last checkpoint, each given once."""
        for where, kind in self._lost.items():
            if where not in self._said:
                self._said.add(where)
                yield (
                    f"the checkpoint does not hold {where} ({kind}), which was made or replaced after the start and is no plain "
                    "data; it cannot be resumed: make it in __init__, or return what it holds from get_extra_state"
                )

    # ------------------------------------------------------------------ saving

    def save(self, keep: Callable[[Tensor], str], ranks: Ranks) -> dict[str, Any]:
        """What has changed since the start, as JSON; `keep` takes the tensors and names them. All ranks do it together."""

        def tensor(path: Path, value: Tensor) -> Any:
            return inline(path, value) if value.nbytes <= INLINE_BYTES else {"at": keep(value)}

        lost: dict[str, str] = {}

        def opaque(path: Path, value: Any) -> None:
            was = self._start.get(path)
            if is_iterator(value) or not (was is value or (isinstance(value, types.MethodType) and was == value)):
                lost[shown(path)] = type(value).__name__

        changed: list[list[Any]] = []
        writer = Writer(self._refs(), tensor, opaque, self._start, self._libraries)
        now = {path: written for path, written, _met in self._compared()}
        for path, value in self._attributes():
            if now.get(path) == self._noted.get(path):
                continue
            try:
                changed.append([list(path), writer.write(value, path)])
            except (NotPlainError, RecursionError):
                lost[shown(path)] = type(value).__name__
        self._lost = lost
        return {
            "changed": changed,
            "gone": [list(path) for path in self._noted if path not in now],
            "lost": lost,
            "modules": self._of_modules(tensor),
            "buffers": self._of_buffers(tensor, ranks),
        }

    def _of_buffers(self, tensor: Callable[[Path, Tensor], Any], ranks: Ranks) -> dict[str, Any]:
        """Which have another shape than at the start, and that one; what this rank has otherwise than rank 0, whose is saved."""
        buffers = dict(self._model.named_buffers())
        changed = {name: self._shapes.get(name) for name, each in buffers.items() if self._shapes.get(name) != tuple(each.shape)}
        found = {"changed": changed, "gone": [name for name in self._shapes if name not in buffers], "own": {}}
        if ranks.are_several and buffers:
            mine = {name: checksum((), each) for name, each in buffers.items()}
            first = ranks.objects(mine)[0]
            differ = [name for name, each in mine.items() if each != first.get(name)]
            found["own"] = {name: Writer(tensor=tensor).write(buffers[name], ("module", name)) for name in differ}
        return found

    def changed(self) -> Iterator[str]:
        """Where something is not as it was at the start."""
        for path, written, _met in self._compared():
            if self._noted.get(path) != written:
                yield shown(path)

    def _of_modules(self, tensor: Callable[[Path, Tensor], Any]) -> dict[str, Any]:
        found = {}
        for name, module in _with_extra_state(self._model):
            value = module.get_extra_state()
            try:
                found[name] = Writer(tensor=tensor).write(value, ("module", name, "get_extra_state()"))
            except NotPlainError as error:
                raise NotPlainError(
                    f"{error}. get_extra_state of {type(module).__name__} ({name or 'the model'}) has to return such data"
                ) from None
        return found

    def _compared(self) -> Iterator[tuple[Path, str, dict[Path, Any]]]:
        """Of every attribute a short form that changes when it does; and all in it that can change in place, by path."""

        def identity(_path: Path, value: Any) -> Any:
            return [type(value).__name__, f"at {next(self._ticks)}" if is_iterator(value) else id(value)]

        writer = Writer(self._refs(), checksum, identity, libraries=self._libraries, compares=True)
        for path, value in self._attributes():
            try:
                text = json.dumps(writer.write(value, path))
            except (NotPlainError, RecursionError):
                text = f"too large {id(value)}"
            yield path, text if len(text) < 100 else f"{len(text)} {hash(text)}", writer.met
            writer.met = {}

    def _attributes(self) -> Iterator[tuple[Path, Any]]:
        for owner, held in self._holders.items():
            for name, value in list(held.items()):
                yield (*owner, name), value

    def _named(self) -> dict[str, Callable[[], Iterable[tuple[str, Any]]]]:
        """What has its own place in a checkpoint, by kind."""
        model = self._model
        return {"module": model.named_modules, "parameter": model.named_parameters, "buffer": model.named_buffers}

    def _refs(self) -> dict[int, list[str]]:
        found = {id(each): [kind, name] for kind, named in self._named().items() for name, each in named()}
        return found | {id(self._optimizer): ["optimizer"]}

    # ------------------------------------------------------------------ resuming

    def check(self, document: Any, tensor: Callable[[str], Tensor]) -> None:
        """Refuses what `load` could not put back, before anything changes."""
        lost = document["lost"]
        if lost:
            where, kind = next(iter(lost.items()))
            others = f" (and {len(lost) - 1} others)" if len(lost) > 1 else ""
            raise ValueError(
                f"{where}{others} was a {kind} when it was saved, made or replaced after the start, which a checkpoint cannot "
                "hold, so a run that goes on without it is not the same; make it in __init__, where its fields are kept, or "
                "return what it holds from get_extra_state"
            )
        for name, written in document["buffers"]["own"].items():
            Reader(tensor).read_alone(written, ("module", name))
        reader = Reader(tensor, self._find, self._start, touches=False)
        for path, written in document["changed"]:
            *owner, name = path
            if tuple(owner) not in self._holders:
                raise ValueError(f"it holds {shown(tuple(path))}, which is not here")
            self._refuse_odd(tuple(owner), name)
            reader.read(written, tuple(path))
        for path in document["gone"]:
            if tuple(path[:-1]) not in self._holders:
                raise ValueError(f"it speaks of {shown(tuple(path))}, which is not here")
        mine, theirs = {name for name, _ in _with_extra_state(self._model)}, set(document["modules"])
        for name in sorted(mine ^ theirs):
            here, there = ("has", "holds none") if name in mine else ("has none", "holds some")
            raise ValueError(f"module {name or 'the model'} {here} extra state (get_extra_state), and it {there}")
        for name, written in document["modules"].items():
            Reader(tensor).read_alone(written, ("module", name, "get_extra_state()"))

    def _refuse_odd(self, owner: Path, name: str) -> None:
        """Refuses an attribute that would replace what a class does."""
        if name in self._holders[owner]:
            return
        kind: Any = None
        if owner[0] == "module":
            kind = type(dict(self._model.named_modules())[owner[1]])
        elif owner[0] == "optimizer":
            kind = type(self._optimizer)
        skipped = NOT_OF_MODULES | NOT_OF_OPTIMIZERS
        if kind is None or name in skipped or name.startswith("__") or callable(getattr(kind, name, None)):
            raise ValueError(f"it holds {shown((*owner, name))}, which is nothing that changes here")

    def make_buffers(self, document: Any, stored: Mapping[str, StoredTensor], device: torch.device) -> None:
        """Makes empty buffers of the saved shapes, where these have changed."""
        made = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype, device=device) for name in document["changed"]}
        for name, buffer in (dict.fromkeys(document["gone"]) | made).items():
            module, _, leaf = name.rpartition(".")
            self._model.get_submodule(module)._buffers[leaf] = buffer

    def load(self, document: Any, tensor: Callable[[str], Tensor], device: torch.device) -> None:
        buffers = dict(self._model.named_buffers())
        for name, written in document["buffers"]["own"].items():
            value = Reader(tensor).read_alone(written, ("module", name))
            if buffers[name].shape == value.shape:
                buffers[name].copy_(value)
        reader = Reader(tensor, self._find, self._start, device)
        for path in document["gone"]:
            self._holders[tuple(path[:-1])].pop(path[-1], None)
        for path, written in document["changed"]:
            *owner, name = path
            held = self._holders[tuple(owner)]
            value = reader.read(written, tuple(path))
            if name not in held or held[name] is not value:
                held[name] = value
        modules = dict(self._model.named_modules())
        for name, written in document["modules"].items():
            value = Reader(tensor).read_alone(written, ("module", name, "get_extra_state()"))
            modules[name].set_extra_state(value)

    def _find(self, ref: list[str]) -> Any:
        kind, *name = ref
        return self._optimizer if kind == "optimizer" else dict(self._named()[kind]())[name[0]]


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not _MODULE.get_extra_state:
            yield name, module


# ---------------------------------------------------------------------- where it is looked for


@dataclass(frozen=True, eq=False)
class _Holder(MutableMapping[str, Any]):
    """Names and values of something: iterates over those that are wanted, and reads and sets any. `_now` has them all."""

    _now: Callable[[], Mapping[str, Any]]
    _wants: Callable[[str, Any], bool]
    _put: Callable[[str, Any], object]
    _drop: Callable[[str], object]

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._drop(name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in self._now().items() if self._wants(name, value)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_dict(held: dict[str, Any], wants: Callable[[str, Any], bool]) -> _Holder:
    return _Holder(lambda: held, wants, held.__setitem__, held.__delitem__)


def _of_class(kind: type) -> _Holder:
    put, drop = functools.partial(setattr, kind), functools.partial(delattr, kind)
    return _Holder(lambda: vars(kind), lambda name, value: not name.startswith("__") and _is_data(value), put, drop)


def _of_cells(cells: Mapping[str, types.CellType]) -> _Holder:
    """Variables around a function that it reads."""

    def now() -> dict[str, Any]:
        return {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()}  # those that are set

    def put(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    return _Holder(now, lambda _name, value: _is_data(value), put, lambda name: delattr(cells[name], "cell_contents"))


def _is_data(value: Any) -> bool:
    """Neither code nor a descriptor."""
    return not (isinstance(value, type | types.ModuleType | types.BuiltinFunctionType) or hasattr(type(value), "__get__"))


def _holders(
    model: nn.Module, optimizer: Optimizer, loss: Callable[..., Any], libraries: frozenset[str]
) -> Iterator[tuple[Path, MutableMapping[str, Any]]]:
    for name, module in model.named_modules():
        yield ("module", name), _of_dict(vars(module), lambda name, _value: name not in NOT_OF_MODULES)
    yield ("optimizer",), _of_dict(vars(optimizer), lambda name, _value: name not in NOT_OF_OPTIMIZERS)
    kinds = dict.fromkeys(each for thing in (*model.modules(), optimizer) for each in type(thing).__mro__)
    functions: list[Any] = [loss]
    for kind in kinds:
        if not is_owned_by_library(kind, frozenset()):
            yield ("class", f"{kind.__module__}.{kind.__qualname__}"), _of_class(kind)
            functions += vars(kind).values()
    yield from _around(functions)


def _around(functions: list[Any]) -> Iterator[tuple[Path, MutableMapping[str, Any]]]:
    """Variables that these functions, and those of the user's that they call, read from around them."""
    globals_of: dict[str, tuple[dict[str, Any], set[str]]] = {}
    seen: set[int] = set()
    numbers = itertools.count()  # functions of one name there may be many of
    while functions:
        thing = functions.pop()
        kind = thing if isinstance(thing, types.FunctionType | type) else type(thing)
        if id(thing) in seen or is_owned_by_library(kind, frozenset()):
            if isinstance(thing, functools.partial):
                functions += [thing.func, *thing.args, *thing.keywords.values()]
                yield ("loss", f"partial {next(numbers)}"), {"arguments": thing.args, "keywords": thing.keywords}
            elif isinstance(thing, types.MethodType):
                functions.append(thing.__func__)
                yield ("loss", f"{thing.__qualname__} {next(numbers)}"), {"self": thing.__self__}
            elif isinstance(thing, property | staticmethod | classmethod):
                functions.append(getattr(thing, "fget", None) or getattr(thing, "__func__", None))
            continue
        seen.add(id(thing))
        if isinstance(thing, types.FunctionType):
            where = f"{thing.__module__}.{thing.__qualname__} {next(numbers)}"
            yield ("function", where), vars(thing)
            cells = dict(zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True))
            held = _of_cells(cells)
            if cells:
                yield ("variables of", where), held
            functions += [held[name] for name in cells if name in held]
            for name in names_in(thing.__code__):
                if name in thing.__globals__:
                    functions.append(thing.__globals__[name])
                    globals_of.setdefault(thing.__module__, (thing.__globals__, set()))[1].add(name)
        elif callable(thing) and hasattr(thing, "__dict__") and not isinstance(thing, type | nn.Module):
            yield ("loss", f"{type(thing).__qualname__} {next(numbers)}"), {"self": thing}
            functions.append(type(thing).__call__)
    for module, (variables, names) in globals_of.items():
        yield ("global", module), _of_dict(variables, lambda name, value, read=names: name in read and _is_data(value))  # type: ignore[misc]
