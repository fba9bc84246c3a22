"""A memento of the user's own objects: their code may run to plan or to rehearse, and afterwards nothing has happened.

    with leaving_no_trace(job):
        ...  # build, loss, backward, optimizer: as often as planning likes

What the job's functions and its model can reach is written down before and put back in place afterwards, so that whoever holds
an object still holds it: closure cells, defaults, attributes, lists, dicts, sets, deques, arrays, tensors, train and eval flags,
hooks, `requires_grad`, `.grad`, random generators (Python's, numpy's, torch's, and own ones), the globals that these functions
name, the attributes of their classes, torch's settings. Functions with a cache forget what they cached meanwhile. An iterator is
not put back, it is kept from moving: one that can be copied is copied, of any other what it gave is given again. Nothing is
printed, and files that are written lie aside and go (`values/aside.py`).

What it cannot put back: state inside extension modules, other processes and connections (a logger's server, a database);
iterators that only a tuple, a running frame or an extension holds; random numbers that such an iterator drew to make what it
gives again. A tensor that is too large to be copied and was changed all the same is an error that names it.
"""

from __future__ import annotations

import array
import contextlib
import copy
import enum
import functools
import io
import itertools
import random
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from . import holders, nests
from .aside import Aside, writing_aside
from .holders import LONGEST, MISSING, process_settings
from .units import show_bytes

if TYPE_CHECKING:
    from torch import nn

    from .job import Job

MOST_OBJECTS = 200_000  # that are looked at, the nearest first
MOST_BYTES = 256 * 2**20  # of tensors and arrays that are copied, all together
# Whose classes and globals are not the user's. What their objects hold is.
LIBRARIES = {
    *sys.stdlib_module_names, "accelerate", "anyfit", "datasets", "hypothesis", "numpy", "pandas", "peft", "pytest", "_pytest",
    "rich", "safetensors", "scipy", "tokenizers", "torch", "torchvision", "tqdm", "transformers", "triton", "trl", "typer",
}  # fmt: skip
# Whose objects other threads and processes may be at work on: these are left alone.
SHARED = {"asyncio", "concurrent", "logging", "multiprocessing", "os", "queue", "threading", "_thread", "weakref", "anyfit"}
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._C", "torch.jit")  # what they learn they may keep
PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis), range, slice, types.CodeType)
COPIES: MutableMapping[tuple[int, ...], Any] = weakref.WeakValueDictionary()  # of weights that are noted
COPIED_ITERATORS: tuple[type, ...] = (itertools.count, itertools.repeat, type(iter([])), type(iter(())), type(iter(range(0))))
CONTAINERS: tuple[tuple[Any, Callable[[Any], holders.Holder]], ...] = (
    (dict, holders.Dict),
    (list | bytearray | array.array, holders.List),
    (set | deque, holders.Refilled),
)
Path: TypeAlias = tuple[Any, str]  # where something was found: the path before it, and a step


@contextmanager
def leaving_no_trace(job: Job, model: nn.Module | None = None) -> Iterator[Memento]:
    """Around whatever runs the user's code before training. `model`: one that was built from the job's factory, where it is to be
    as before too; its weights are put back where they are few, and refused to be edited elsewhere."""
    memento = Memento(job, model)
    weights = [] if model is None else _weights(model)
    with writing_aside() as memento.files, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        try:
            yield memento
        finally:
            memento.put_back()
            for put_back in weights:
                put_back()
    memento.refuse_what_stayed()


def _weights(model: nn.Module) -> list[Callable[[], None]]:
    """What puts weights back that a forward edits, in place or by another tensor as its data."""
    import torch

    strided = ((name, each) for name, each in model.named_parameters() if each.layout == torch.strided)
    plain = [(name, each) for name, each in strided if not hasattr(each, "local")]  # what lies in parts is not written at all
    are_few = sum(each.nbytes for _, each in plain) <= MOST_BYTES

    def noted(name: str, parameter: nn.Parameter) -> Callable[[], None]:
        version = parameter._version
        home = parameter.data if type(parameter) is torch.nn.Parameter else None  # of others the weights come and go
        key = id(parameter), version, 0 if home is None else home.data_ptr()
        copy = COPIES.get(key)  # made around this one, of the same weights
        if copy is None and are_few:
            copy = COPIES[key] = parameter.data.to("cpu", copy=True)

        def put_back() -> None:
            if home is not None and parameter.data_ptr() != home.data_ptr():
                parameter.data = home
            elif parameter._version == version:
                return
            if copy is None:
                raise ValueError(
                    f"{name} is edited in forward, which was run once before training, and the model is too large to be copied "
                    "and put back; edit it between steps, inside `with run.weights():`, or use a plan that neither cuts the "
                    "batch nor recomputes blocks"
                )
            with torch.no_grad():
                parameter.copy_(copy)

        return put_back

    return [noted(*each) for each in plain]


class Memento:
    """All that was found, and how it was."""

    files: Aside  # those that are written meanwhile

    def __init__(self, job: Job, model: nn.Module | None = None) -> None:
        import torch
        from torch import nn

        self._torch, self._numpy = torch, sys.modules.get("numpy")
        self._undo: list[Callable[[], object]] = []
        self._settings = [functools.partial(put_back, state) for state, put_back in process_settings(torch, self._numpy)]
        self._holders: list[holders.Holder] = []
        self._seen: dict[int, Any] = {}  # kept alive, so that no identity comes twice
        self._waiting: deque[tuple[Any, Path]] = deque()
        self._stands_for: dict[int, Any] = {}  # by identity of an iterator, what moves in its place
        self._bytes_left = MOST_BYTES
        self._stayed: list[str] = []
        self.tensors: list[Any] = []  # all that were found
        models = [each for each in (job.model, model) if isinstance(each, nn.Module)]
        self._weights = {id(parameter) for each in models for parameter in each.parameters()}
        self._buffers = {id(buffer) for each in models for buffer in each.buffers()}
        with torch._C.DisableTorchFunctionSubclass():
            for root in (*models, *(job.loss, job.optimizer, job.scheduler, job.split, job.model, job.sample, job.max_sample)):
                self._wait(root, ((), _name_of(root)))
            while self._waiting and len(self._seen) < MOST_OBJECTS:
                self._look(*self._waiting.popleft())
        for holder in self._holders:
            holder.hold(self._moving)

    def put(self, replacements: Mapping[int, Any]) -> None:
        """By identity, other objects in place of some of those found, wherever they are held, until all is put back."""

        def replaced(value: Any) -> Any:
            if id(value) in replacements:
                return replacements[id(value)]
            if type(value) is tuple and any(id(each) in replacements or type(each) is tuple for each in value):
                return tuple(map(replaced, value))
            return self._moving(value)

        for holder in self._holders:
            holder.hold(replaced)

    def put_back(self) -> None:
        """May be called again, after more has happened."""
        with self._torch._C.DisableTorchFunctionSubclass(), self._torch.no_grad():
            for holder in self._holders:
                holder.put_back(self._still)
            for undo in reversed(self._undo):
                undo()
        for setting in self._settings:
            setting()

    def refuse_what_stayed(self) -> None:
        if self._stayed:
            raise ValueError(
                f"the job's code was run to plan it, and changed {self._stayed[0]}, which is too large to be copied before and "
                "put back; make it a buffer of the model, or build it in Job(model=)"
            )

    def _wait(self, item: Any, path: Path) -> None:
        if not isinstance(item, PLAIN) and id(item) not in self._seen:
            self._seen[id(item)] = item
            self._waiting.append((item, path))

    def _look(self, item: Any, path: Path) -> None:
        torch = self._torch
        kind = type(item)
        if isinstance(item, torch.Tensor):
            self._tensor(item, path)
        elif isinstance(item, types.FunctionType):
            self._function(item, path)
        elif isinstance(item, types.MethodType):
            self._wait(item.__self__, path)
            self._wait(item.__func__, path)
        elif isinstance(item, functools.partial):
            self._holders.append(holders.Partial(item))
            self._wait_all(enumerate((item.func, *item.args)), path)
            self._wait_all(item.keywords.items(), path)
        elif isinstance(item, types.CellType):
            self._holders.append(cell := holders.cell(item))
            if (contents := cell.before["cell_contents"]) is not MISSING:
                self._wait(contents, path)
        elif isinstance(item, type):
            if _is_the_users(item.__module__):
                self._class(item, path)
        elif isinstance(item, types.ModuleType):
            pass  # by the names that functions use of it
        elif isinstance(item, types.BuiltinMethodType):
            self._wait(item.__self__, path)  # such as a list's append
        elif isinstance(item, staticmethod | classmethod):
            self._wait(item.__func__, path)
        elif isinstance(item, property):
            self._wait_all(enumerate((item.fget, item.fset)), path)
        elif isinstance(item, tuple | frozenset):
            if len(item) <= LONGEST:
                self._wait_all(enumerate(item), path)
        elif isinstance(item, random.Random):
            self._keep(item.getstate(), item.setstate)
        elif isinstance(item, torch.Generator):
            self._keep(item.get_state(), item.set_state)
        elif self._numpy is not None and kind.__module__.partition(".")[0] == "numpy":
            self._of_numpy(item, path)
        elif isinstance(item, io.IOBase):
            self._file(item)
        elif _root_of(kind.__module__) in SHARED or kind.__module__.startswith(COMPILERS) or isinstance(item, enum.Enum):
            if isinstance(item, torch.nn.Module):  # a compiled one holds the user's
                self._wait(item._modules, path)
        elif isinstance(item, functools._lru_cache_wrapper):
            before = item.cache_info()  # what was cached meanwhile may be a tensor without bytes: it is computed again
            self._undo.append(lambda: None if item.cache_info() == before else item.cache_clear())
            self._wait(getattr(item, "__wrapped__", None), path)
        elif _is_an_iterator(item):
            self._stands_for[id(item)] = copy.copy(item) if isinstance(item, COPIED_ITERATORS) else holders.Peeked(item)
        else:
            self._object(item, path)

    def _wait_all(self, items: Iterable[tuple[Any, Any]], path: Path) -> None:
        for key, value in items:
            if not isinstance(value, PLAIN):
                self._wait(value, (path, f".{key}" if isinstance(key, str) else f"[{key!r:.40}]"))

    def _object(self, item: Any, path: Path) -> None:
        """A container, an instance of any class, or both."""
        for kinds, holder in CONTAINERS:
            if isinstance(item, kinds):
                self._holders.append(holder(item))
                if len(item) <= LONGEST:
                    self._wait_all(dict.items(item) if isinstance(item, dict) else enumerate(item), path)
        attributes = getattr(item, "__dict__", None)
        if type(attributes) is dict:
            self._holders.append(holders.Dict(attributes))
            self._wait_all(attributes.items(), path)
        slots = [name for name in nests.slots_of(type(item)) if not name.startswith("__")]
        if slots and _root_of(type(item).__module__) not in LIBRARIES:
            self._holders.append(holders.slots(item, slots))
            self._wait_all(((name, getattr(item, name, None)) for name in slots), path)
        if _is_the_users(type(item).__module__):
            self._wait(type(item), path)

    def _class(self, item: type, path: Path) -> None:
        own = {name for name in vars(item) if not name.startswith("__") or name == "__call__"}
        self._holders.append(holders.Attributes(item))
        self._wait_all(((name, vars(item)[name]) for name in own), path)
        for base in item.__bases__:
            self._wait(base, path)

    def _function(self, item: types.FunctionType, path: Path) -> None:
        if (item.__module__ or "").startswith(COMPILERS):
            self._wait(item.__dict__.get("_torchdynamo_orig_callable"), path)
            return
        if item.__dict__:
            self._wait(item.__dict__, path)
        else:
            self._undo.append(lambda: item.__dict__.clear())
        self._wait_all(enumerate(item.__closure__ or ()), path)
        self._wait_all(enumerate(item.__defaults__ or ()), path)
        self._wait_all((item.__kwdefaults__ or {}).items(), path)
        defaults, by_name = item.__defaults__, item.__kwdefaults__
        self._undo.append(lambda: _set_defaults(item, defaults, by_name))
        if not _is_the_users(item.__module__):
            return
        names = _names_in(item.__code__)
        self._names(item.__globals__, names, path)
        for name in names:
            named = item.__globals__.get(name)
            if isinstance(named, types.ModuleType) and _is_the_users(named.__name__):
                self._names(vars(named), names, path)

    def _names(self, names_of: dict[str, Any], names: Iterable[str], path: Path) -> None:
        """The globals of these names, also those that do not exist yet."""
        self._holders.append(holders.names(names_of, names))
        self._wait_all(((name, names_of.get(name)) for name in names), path)

    def _tensor(self, item: Any, path: Path) -> None:
        torch = self._torch
        self.tensors.append(item)
        if item.is_leaf:
            needs, gradient = item.requires_grad, item.grad
            self._undo.append(lambda: _set_gradient(item, needs, gradient))
            self._wait(gradient, (path, ".grad"))
        if getattr(item, "__dict__", None):
            self._holders.append(holders.Dict(item.__dict__))
        is_plain = item.layout == torch.strided and not item.is_nested and not item.is_meta
        if id(item) in self._weights or not is_plain or type(item).__name__ == "FakeTensor":
            return
        if self._takes(item.nbytes) or id(item) in self._buffers:
            self._keep(item.detach().clone(), lambda before: _fill(torch, item, before))
        else:
            version, shown = item._version, f"a tensor of {show_bytes(item.nbytes)} at {_shown(path)}"
            self._undo.append(lambda: None if item._version == version else self._stayed.append(shown))

    def _of_numpy(self, item: Any, path: Path) -> None:
        numpy: Any = self._numpy
        if isinstance(item, numpy.random.Generator):
            self._wait(item.bit_generator, path)
        elif isinstance(item, numpy.random.BitGenerator):
            self._keep(copy.deepcopy(item.state), lambda state: setattr(item, "state", state))
        elif isinstance(item, numpy.random.RandomState):
            self._keep(item.get_state(), item.set_state)
        elif isinstance(item, numpy.ndarray) and item.flags.writeable and self._takes(item.nbytes):
            self._keep(item.copy(), functools.partial(numpy.copyto, item))

    def _takes(self, size: int) -> bool:
        if size > self._bytes_left:
            return False
        self._bytes_left -= size
        return True

    def _file(self, item: Any) -> None:
        """Of one that is open, what was written meanwhile is cut off."""
        with contextlib.suppress(Exception):
            if item.closed or item in (sys.stdin, sys.stderr) or not item.seekable():
                return
            if item.writable():
                item.flush()
            self._keep(item.tell(), functools.partial(_cut_off, item))

    def _keep(self, state: Any, put_back: Callable[[Any], object]) -> None:
        self._undo.append(functools.partial(put_back, state))

    def _moving(self, value: Any) -> Any:
        return self._stands_for.get(id(value), value) if self._stands_for else value

    def _still(self, value: Any) -> Any:
        stand_in = self._stands_for.get(id(value)) if self._stands_for else None
        return stand_in.still() if isinstance(stand_in, holders.Peeked) else value


def _root_of(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_the_users(module: str | None) -> bool:
    return bool(module) and _root_of(module) not in LIBRARIES


def _is_an_iterator(item: Any) -> bool:
    """One without attributes that could be put back, or whose work is done in other processes."""
    is_iterator = hasattr(type(item), "__next__") and hasattr(type(item), "__iter__")
    return is_iterator and (not hasattr(item, "__dict__") or type(item).__name__ == "_MultiProcessingDataLoaderIter")


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Globals and attributes that it names, and the functions inside it too."""
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _set_defaults(function: types.FunctionType, defaults: Any, by_name: Any) -> None:
    if function.__defaults__ is not defaults:
        function.__defaults__ = defaults
    if function.__kwdefaults__ is not by_name:
        function.__kwdefaults__ = by_name


def _set_gradient(tensor: Any, needs: bool, gradient: Any) -> None:
    if not tensor.is_leaf:
        return
    if tensor.grad is not gradient:
        tensor.grad = gradient
    if tensor.requires_grad != needs:
        tensor.requires_grad_(needs)


def _fill(torch: Any, tensor: Any, before: Any) -> None:
    if tensor.shape == before.shape and not torch.equal(tensor.detach(), before):
        tensor.data.copy_(before)


def _cut_off(file: Any, position: int) -> None:
    with contextlib.suppress(Exception):
        if file.writable():
            file.flush()
        file.seek(position)
        if file.writable():
            file.truncate()


def _name_of(item: Any) -> str:
    return getattr(item, "__qualname__", None) or type(item).__name__


def _shown(path: Path) -> str:
    steps: list[str] = []
    at: Any = path
    while at:
        at, step = at
        steps.append(step)
    return "".join(reversed(steps))
