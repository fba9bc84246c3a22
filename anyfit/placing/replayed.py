"""Replayed blocks: the ops of a block are recorded once, as CUDA graphs, and one launch replays them.

A step of many small ops waits for the host that launches them. Recordings (recording.py) read weights, buffers and inputs in
fixed memory, to which a call copies its own. So recomputed blocks that are alike share both recordings, wherever their weights
are, and what a recording holds while it runs is the same memory for all of them. A kept block has recordings of its own, since
what its forward saves stays where it is until its backward; they read weights where they are, if those never move. A second call
before that backward runs op by op.

Replayed ops are eager's own, with eager's results. At its first call in training each block is run beside eager, from the same
inputs, state and random numbers, and replayed only where it gives the same. What no recording can do again, a block must not do:
change state, read tensors that are neither its own nor given to it, ask for a value on the device, draw from another generator
than the device's, take or return objects, call hooks. A call of another signature, and one whose module has changed since, runs
op by op.
"""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves

from .cells import alike, generator_of
from .chunks import quietly
from .compiled import distinct
from .compiled_trial import Trial, apart
from .fixed import Arena, fresh
from .forward_state import ForwardState
from .gradients import Gradients
from .recompute import Recomputed, may_be_recomputed, own_forward
from .recording import Call, Hooks, Ops, Pool, Recorder, Tape, Used, described, made_in, unfit_within
from .residency import Residency
from .severing import Severing
from .slots import is_saved_for_another
from .watched import Watched, is_plain_kind
from .why_not import WhyNot

MOST_RETRIALS = 4  # of a block, because something that it can reach has changed
MOST_MISSED = 32  # calls in training that recordings did not serve, of more than half
Facts = list[tuple[str, Any]]  # by name
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SAME = 1e-6  # relative: replayed ops are eager's own
MOST_TRIALS = 4  # of both, to see how far apart the results of either may be
NO_ROOM = "there was no room to record it"
AS_FAR = 2.0  # times as far from eager as either from itself, where kernels do not always add up in one order


class ReplayedBlocks(WhyNot):
    """The blocks that a plan replays."""

    def __init__(self, residency: Residency, device: torch.device, gradients: Gradients) -> None:
        super().__init__("op by op")
        self.residency, self.gradients = residency, gradients
        self.device = torch.empty(0, device=device).device  # with its number
        self.blocks: dict[str, Replayed] = {}
        self.tapes: list[tuple[Any, Tape]] = []  # of recomputed blocks, with what those that share it have in common
        self.recorded = 0  # distinct blocks, so far
        self.failed: list[tuple[Any, str]] = []  # what such blocks have in common, and why they cannot be recorded
        self.arena = Arena(self.device)
        self.severing = Severing(self.device)
        self._left: list[Pool] = []

    @functools.cached_property
    def pool(self) -> Pool:
        return Pool(self.device)

    def leave_pool(self) -> None:
        """After a recording that failed, and for which torch may hold the pool to be in use: the next have another."""
        if "pool" in vars(self):
            self._left.append(vars(self).pop("pool"))

    def add(self, name: str, module: nn.Module, recomputed: Recomputed | None = None) -> Replayed:
        """`recomputed`: its forward where it is recomputed; without, it is kept."""
        self.blocks[name] = made = Replayed(self, name, module, recomputed)
        return made

    def is_of(self, name: str) -> bool:
        return name in self.blocks

    def heed_untried(self) -> None:
        """After a forward in which all could have been recorded."""
        untried = [name for name, block in self.blocks.items() if not block.is_tried]
        self.stay_eager(dict.fromkeys(untried, "it was not called in training, or with hooks or modes that watch its ops"))

    @property
    def are_changed(self) -> bool:
        """Whether something that one can reach has changed since: the first loss of a model may set its configuration."""
        return any(block.is_changed for block in self.blocks.values())

    def close(self) -> None:
        """Their memory is free, whoever still holds this."""
        self.tapes.clear()
        self.blocks.clear()
        self.arena, self._left = Arena(self.device), []
        vars(self).pop("pool", None)


class Replayed:
    """Stands in for a block's forward."""

    def __init__(self, of: ReplayedBlocks, name: str, module: nn.Module, recomputed: Recomputed | None) -> None:
        self.name, self.module, self.device = name, module, of.device
        self.eager_forward = own_forward(module)
        self.run = module.forward  # eager, or compiled code
        self._of, self._is_kept = of, recomputed is None
        self._op_by_op: Callable[..., Any] = recomputed or self.run
        self._state = ForwardState(module, name, of.device, self.eager_forward) if recomputed is None else recomputed.state
        self.parameters, self._buffers = list(module.parameters()), list(module.buffers())
        self._names = [of.gradients.name_of(each) for each in self.parameters]
        self._chunks = {each.anyfit[2] for each in self.parameters if isinstance(each, Watched)}
        self._hooks = [getattr(each, hooks) for each in module.modules() if each is not module for hooks in HOOKS]
        self._generator = generator_of(of.device)
        self._draws = False
        self.is_tried = False
        self._tape: Tape | None = None
        self._known: list[Facts] = []  # of all that it can reach, as it was recorded or gave the same
        self._facts: list[Any] = []  # as it was last, without names
        self._learning: list[bool] = []  # by parameter, likewise
        self._code: Any = None  # the form of what it returns, what of that is no tensor, and the ops that it runs
        self._reads_there = self._is_kept and not self._chunks  # its weights, which never move
        self._addresses: list[int] = []
        self._open: weakref.WeakSet[Used] = weakref.WeakSet()  # calls whose backward is to come
        self._served = self._missed = self._retrials = 0  # calls in training, and trials of changed state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._of.severing.of(self._called(args, kwargs))

    def _called(self, args: Any, kwargs: Any) -> Any:
        if not self.is_tried and self._may_be_replayed():
            self.is_tried = True
            self._try(args, kwargs)
        if self._tape is None or self.name in self._of.reasons or not self._may_be_replayed():
            return self._op_by_op(*args, **kwargs)
        call = Call(args, kwargs, self.device)
        is_alike = call.signature == self._tape.signature and self._learning == self._learns()
        if is_alike and not self._tape.is_busy and self._addresses == self._read_at() and self._is_as_recorded(args, kwargs):
            self._served += 1
            return self._replay(self._tape, call)
        self._heed_missed()
        for other in self._open:
            other.is_one_of_several = True
        return self._op_by_op(*args, **kwargs)

    def _is_as_recorded(self, args: Any, kwargs: Any) -> bool:
        """Whether all that the block can reach is as it was. A container may be another one with the same in it, and what has
        changed may be nothing that the block reads."""
        if self._state.is_as(self._facts):
            return True
        named = self._state.walked_again()
        if not any(alike(known, named) for known in self._known):
            if not self._gives_the_same(args, kwargs):
                return False
            self._known.append(named)
        self._facts = [fact for _, fact in named]
        return True

    def _gives_the_same(self, args: Any, kwargs: Any) -> bool:
        """Runs it beside eager once more, a few times in all."""
        assert self._tape is not None
        if self._retrials == MOST_RETRIALS or self._tape.is_busy:
            return False
        self._retrials += 1
        known = self._code, self._draws
        try:
            with self.ready():
                trial = Trial(self, args, kwargs)
                runs_the_same = self._changes(trial) is None and (self._code, self._draws) == known
                return runs_the_same and self._off(trial, trial.outcome(self.run)) == 0.0
        except Exception:  # what is wrong with the call itself, the call says
            return False
        finally:
            self._code, self._draws = known

    @property
    def is_changed(self) -> bool:
        """Whether something that it can reach is not as it was when it was recorded."""
        return self._tape is not None and not self._state.is_as(self._facts)

    def _heed_missed(self) -> None:
        """A call in training that the recordings did not serve: where most are such, their memory is given back."""
        self._missed += 1
        if self._missed >= MOST_MISSED and self._missed > self._served:
            self._tape = None
            reason = f"{self._missed} of its calls in training had other shapes, or other facts, than it was recorded with"
            self._of.stay_eager({self.name: reason})

    def _read_at(self) -> list[int]:
        """Addresses of weights that are read where they are."""
        return [each.data_ptr() for each in self.parameters] if self._reads_there else []

    def _may_be_replayed(self) -> bool:
        is_seen = torch._C._len_torch_dispatch_stack() or _get_current_function_mode_stack() or _has_any_global_hook()
        return (
            self.module.training and may_be_recomputed() and not is_seen and not any(self._hooks) and not is_saved_for_another()
        )

    # ------------------------------------------------------------------ before the first step

    def _try(self, args: Any, kwargs: Any) -> None:
        """Records the block where none like it was, and runs it beside eager."""
        try:
            with self.ready():
                reason = self._reason_against(args, kwargs)
        except torch.OutOfMemoryError:
            reason = NO_ROOM
        except Exception as error:
            reason = _cannot(error)
        if reason is not None:
            self._tape = None
            self._of.stay_eager({self.name: reason})

    def _reason_against(self, args: Any, kwargs: Any) -> str | None:
        call, trial = Call(args, kwargs, self.device), Trial(self, args, kwargs)
        reason = call.unfit or self._changes(trial) or self._unfit()
        if reason is not None:
            return reason
        named = self._state.walked_again()
        self._known, self._facts = [named], [fact for _, fact in named]
        self._learning = self._learns()
        buffers = tuple((each.shape, each.dtype) for each in self._buffers)
        kind = distinct(self.module, self.eager_forward), buffers, self._code
        eager = trial.outcome(self.run)
        for known, tape in [] if self._is_kept else self._of.tapes:
            if known == kind and tape.signature == call.signature:
                self._tape = tape
                if self._off(trial, eager) == 0.0:
                    return None  # one that looks alike and computes something else is recorded by itself
        for known, reason in self._of.failed:
            if known == (kind, call.signature):
                return reason
        try:
            with trial.inside():  # its random numbers are nobody's
                recorder = Recorder(self.module, self.run, self.device, self._of.pool.handle, self._of.arena)
                self._tape = made = recorder.record(call, is_kept=self._is_kept, stays=self._reads_there)
                self._addresses = self._read_at()
        except Exception as error:
            self._of.failed.append(((kind, call.signature), _cannot(error)))
            self._of.leave_pool()
            raise
        off = self._off(trial, eager)
        if off > 0.0:
            return f"replayed, its results differ from eager's by {off:.1g} of their size"
        if not self._is_kept:
            self._of.tapes.append((kind, made))
        self._of.recorded += 1
        return None

    def _off(self, trial: Trial, eager: Any) -> float:
        """How far replayed results are from eager's, but for what either's are from themselves."""
        replayed = trial.outcome(self._replayed)
        off, own = apart(eager, replayed), 0.0
        for _ in range(MOST_TRIALS):
            if off <= SAME or off <= AS_FAR * own:
                return 0.0
            own = max(own, apart(eager, trial.outcome(self.run)), apart(replayed, trial.outcome(self._replayed)))
        return off

    def _learns(self) -> list[bool]:
        with quietly():
            return [each.requires_grad for each in self.parameters]

    def _replayed(self, *args: Any, **kwargs: Any) -> Any:
        assert self._tape is not None
        return self._replay(self._tape, Call(args, kwargs, self.device))

    def _changes(self, trial: Trial) -> str | None:
        """What its forward and backward do besides to compute."""
        with trial.inside(), contextlib.redirect_stdout(io.StringIO()) as said, Hooks() as hooks:
            before, then = self._state.note(), self._generator.get_state()
            leaves, (args, kwargs) = trial.given()
            given = tree_flatten((args, kwargs))
            with Ops() as ops:
                returned = self.eager_forward(*args, **kwargs)
            is_given = _are_same(given, tree_flatten((args, kwargs)))
            self._code = described(returned, Call(args, kwargs, self.device).inputs), ops.seen
            self._draws = not torch.equal(then, self._generator.get_state())
            learning = [each for each in tree_leaves(returned) if isinstance(each, Tensor) and each.requires_grad]
            wanted = trial.wanted(leaves)
            if learning and wanted:
                torch.autograd.grad(learning, wanted, trial.slopes(learning), allow_unused=True)
            changed = [before.edited(), *before.differences(before.now(), but=self._state.drawn_from)]
        found = next((each for each in changed if each is not None), None)
        if trial.is_written:
            return "it writes into its input in place"
        if not is_given:
            return "it changes a container that it is given"
        if ops.asks:
            return "it asks for a value on the device, on which its next ops may depend"
        if hooks.are_added:
            return "it adds hooks to tensors"
        if said.getvalue():
            return "it prints"
        if found is None:
            return None
        own = found.removeprefix(f"{self.name}.")  # the same words for all that do the same
        return f"it changes {found if own == found else f'its {own}'}"

    def _unfit(self) -> str | None:
        own = {id(each) for each in self.state}
        others = [name for each, name in self._state.reached if id(each) not in own]
        if others:
            return f"it reads {others[0]}, which is neither its own nor given to it"
        if self._state.iterators:
            return f"it holds an iterator ({self._state.iterators[0]})"
        if (reason := unfit_within(self.module)) is not None:
            return reason
        if any(self._of.residency.is_gathered(index) for index in self._chunks):
            return "its weights are sharded over ranks"
        odd = next((each for each in self.parameters if not is_plain_kind(type(each))), None)
        return None if odd is None else f"a weight of it is a {type(odd).__name__}"

    # ------------------------------------------------------------------ in a step

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, all its weights are on the device."""
        if not self._chunks:
            yield
            return
        with self._of.residency.pinning(self._chunks):
            yield

    def begin(self, tape: Tape) -> Used:
        """A call."""
        used = Used(is_one_of_several=bool(self._open))
        for other in self._open:
            other.is_one_of_several = True
        self._open.add(used)
        if tape.is_kept:
            tape.use(used)
        return used

    def end(self, used: Used) -> None:
        """Its backward."""
        used.is_done = True
        self._open.discard(used)

    def _replay(self, tape: Tape, call: Call) -> Any:
        then = self._position() if self._draws else None
        with quietly():
            learning = [each for each in self.parameters if each.requires_grad]
            outputs = _Replay.apply(self, tape, then, *call.inputs, *learning)  # type: ignore[no-untyped-call]
        return tape.returned(outputs, call.inputs)

    @property
    def state(self) -> list[Tensor]:
        return [*self.parameters, *self._buffers]

    @property
    def copied(self) -> list[Tensor]:
        """Of its state, what a recording reads as a copy."""
        return self._buffers if self._reads_there else self.state

    def _position(self) -> Any:
        """Of the generator: what comes next."""
        return self._generator.get_offset() if self.device.type == "cuda" else self._generator.get_state()

    @contextmanager
    def drawing_from(self, then: Any) -> Iterator[None]:
        """Inside, random numbers are those that came then."""
        if then is None:
            yield
            return
        put: Callable[[Any], Any] = self._generator.set_offset if self.device.type == "cuda" else self._generator.set_state
        now = self._position()
        put(then)
        try:
            yield
        finally:
            put(now)

    def returned_gradients(self, found: Sequence[Tensor | None], tape: Tape, used: Used) -> list[Tensor | None]:
        """What autograd is to have of gradients in shared memory. Those of parameters go straight where they belong, all at
        once, where nobody else waits for them."""
        inputs, may_take = sum(facts[-1] for facts in tape.signature.inputs), self._of.gradients.may_take
        with quietly():
            learning = [name for name, each in zip(self._names, self.parameters, strict=True) if each.requires_grad]
            pairs = list(zip(learning, found[inputs:], strict=True))
            given = {} if used.is_one_of_several else {name: each for name, each in pairs if each is not None}
            taken = {name: each for name, each in given.items() if may_take(name)}
        if taken:
            self._of.gradients.take(taken)
        left = [*found[:inputs], *(None if name in taken else each for name, each in pairs)]
        made = iter(fresh([each for each in left if each is not None]))
        return [None if each is None else next(made) for each in left]

    def recomputed_gradients(self, tape: Tape, inputs: Sequence[Tensor], slopes: Sequence[Tensor | None], *, again: bool) -> Any:
        """Op by op, where not all outputs have a gradient: what has none leaves none. `again`: they have gradients themselves."""
        given = inputs if again else tape.signature.leaves(inputs)
        args, kwargs = tape.signature.arguments(given)
        residency = self._of.residency
        with torch.enable_grad(), saved_tensors_hooks(residency.pack, residency.unpack):
            outputs = made_in(self.run(*args, **kwargs), given)
            pairs = [(each, slope) for each, slope in zip(outputs, slopes, strict=True) if slope is not None]
            wanted = [each for each in (*given, *self.parameters) if each.requires_grad]
            ends, starts = [each for each, _ in pairs], [slope for _, slope in pairs]
            return torch.autograd.grad(ends, wanted, starts, allow_unused=True, create_graph=again)


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    """Of containers and what is in them."""
    return one[1] == other[1] and all(map(operator.is_, one[0], other[0]))


def _cannot(error: Exception) -> str:
    return f"it cannot be recorded ({' '.join(str(error).split()):.200})"


class _Replay(torch.autograd.Function):
    """A block's call: one node, whose gradients come from the second recording."""

    @staticmethod
    def forward(ctx: Any, block: Replayed, tape: Tape, then: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(tape.signature.inputs)]
        with block.ready(), quietly():
            outputs = tape.outputs_for(inputs, block.copied)
        ctx.block, ctx.tape, ctx.then, ctx.used = block, tape, then, block.begin(tape)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each, learns in zip(outputs, tape.learns, strict=True) if not learns))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        block, tape, inputs, again = ctx.block, ctx.tape, ctx.saved_tensors, torch.is_grad_enabled()
        learning = [slope for slope, learns in zip(slopes, tape.learns, strict=True) if learns]
        is_replayed = not again and all(each is not None for each in learning)
        if is_replayed and tape.is_kept and not tape.is_last(ctx.used):
            raise RuntimeError(f"what the replayed block {block.name!r} saved is gone: it was called again before its backward")
        with block.ready(), quietly(), block.drawing_from(ctx.then):
            if is_replayed:
                given = tape.gradients_for(inputs, block.copied, learning)
                found = iter(block.returned_gradients(given, tape, ctx.used))
            else:
                found = iter(block.recomputed_gradients(tape, inputs, slopes, again=again))
        if not again:
            block.end(ctx.used)
        return (None, None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[3:]))
