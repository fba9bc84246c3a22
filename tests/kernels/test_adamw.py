"""The update kernel and its twin against torch.optim: bit for bit."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels import adamw as module
from anyfit.kernels.adamw import Settings, State, adamw, adamw_in_torch, can_be_parted, is_native
from anyfit.kernels.split import merge, split

Update = Callable[..., None]
BOTH = pytest.mark.parametrize("update", [adamw, adamw_in_torch])
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]

sizes = st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 4099]))
rates = st.floats(1e-6, 0.3)
settings_of_any_kind = st.builds(
    Settings,
    lr=rates,
    beta1=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.95, 0.99, 0.999]),
    eps=st.sampled_from([1e-8, 1e-6, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
)


def numbers(elements: int, generator: torch.Generator) -> Tensor:
    """Of all magnitudes that squares can have, and a few plain ones."""
    exponents = torch.randint(-25, 10, (elements,), generator=generator)
    return torch.randn(elements, generator=generator) * 10.0**exponents


def state_of(masters: Tensor, *, is_split: bool) -> State:
    m, v = torch.zeros_like(masters), torch.zeros_like(masters)
    if not is_split:
        return State(masters.clone(), None, m, v)
    high, low = torch.empty(masters.shape, dtype=torch.bfloat16), torch.empty(masters.shape, dtype=torch.int16)
    split(masters.clone(), high, low)
    return State(high, low, m, v)


def masters_of(state: State) -> Tensor:
    if state.low is None:
        return state.weights
    exact = torch.empty_like(state.m)
    merge(state.weights, state.low, exact)
    return exact


def copy_of(state: State) -> State:
    return State(state.weights.clone(), None if state.low is None else state.low.clone(), state.m.clone(), state.v.clone())


def empty_like(state: State) -> State:
    """Elsewhere, full of what no result is."""
    other = copy_of(state)
    for tensor in other.tensors:
        tensor.fill_(77)
    return other


class Plain:
    """torch's own optimizer on fp32 masters, a parameter for each range."""

    def __init__(self, masters: Tensor, settings: Settings, ranges: Sequence[tuple[int, int]]) -> None:
        self.masters, self.m, self.v = masters.clone(), torch.zeros_like(masters), torch.zeros_like(masters)
        self.ranges = ranges
        self.parameters = [torch.nn.Parameter(self.masters[start:end]) for start, end in ranges]
        kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
        self.optimizer = kind(
            self.parameters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            maximize=settings.maximize,
            foreach=False,
        )

    def step(self, gradient: Tensor, scale: float | None = None) -> None:
        exact = gradient.float()
        if scale is not None:
            exact = exact * scale
        for (start, end), parameter in zip(self.ranges, self.parameters, strict=True):
            parameter.grad = exact[start:end].clone()
        self.optimizer.step()
        for (start, end), parameter in zip(self.ranges, self.parameters, strict=True):
            self.m[start:end] = self.optimizer.state[parameter]["exp_avg"]
            self.v[start:end] = self.optimizer.state[parameter]["exp_avg_sq"]


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits; of numbers that are none, only that they are none."""
    assert torch.equal(found.isnan(), expected.isnan())
    integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    there = ~expected.isnan()
    assert torch.equal(found[there].view(integers), expected[there].view(integers))


def assert_same_state(found: State, expected: State) -> None:
    assert_bits(masters_of(found), masters_of(expected))
    assert_bits(found.m, expected.m)
    assert_bits(found.v, expected.v)


def assert_is(state: State, plain: Plain) -> None:
    assert_bits(state.m, plain.m)
    assert_bits(state.v, plain.v)
    assert_bits(masters_of(state), plain.masters)


def test_the_kernel_is_built_here() -> None:
    assert is_native(), "no C++ compiler: nothing below tests the kernel"


# ---------------------------------------------------------------------- the arithmetic


@BOTH
@given(
    elements=sizes,
    settings=settings_of_any_kind.filter(can_be_parted),
    is_split=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale=st.sampled_from([None, 0.37]),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masters_and_then_moments_come_to_the_same_as_both_at_once(
    update: Update,
    elements: int,
    settings: Settings,
    is_split: bool,
    dtype: torch.dtype,
    scale: float | None,
    in_place: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = state_of(numbers(elements, generator), is_split=is_split)
    parted = copy_of(whole)
    for step in range(1, 4):
        gradient = numbers(elements, generator).to(dtype)
        update(whole, gradient, settings, step, scale=scale)
        before, out = copy_of(parted), parted if in_place else empty_like(parted)
        moments = copy_of(out)
        update(parted, gradient, settings, step, scale=scale, out=out, part="masters", threads=2)
        assert_bits(masters_of(out), masters_of(whole))
        assert_same_state(replace(out, weights=moments.weights, low=moments.low), moments)  # the moments are as they were
        update(replace(before, weights=out.weights, low=out.low), gradient, settings, step, scale=scale, out=out, part="moments")
        assert_same_state(out, whole)
        parted = out


@BOTH
def test_what_needs_masters_and_moments_at_once_is_not_parted(update: Update) -> None:
    settings = Settings(lr=0.1, weight_decay=0.1, decoupled=False)
    with pytest.raises(ValueError, match="needs masters and moments at once"):
        update(state_of(torch.ones(4), is_split=False), torch.ones(4), settings, 1, part="masters")


@BOTH
@given(
    elements=sizes,
    settings=settings_of_any_kind,
    is_split=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale=st.sampled_from([None, 1.0, 0.37]),
    seed=st.integers(0, 2**32),
)
def test_several_steps_give_torchs_bits(
    update: Update, elements: int, settings: Settings, is_split: bool, dtype: torch.dtype, scale: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    masters = numbers(elements, generator)
    plain = Plain(masters, settings, [(0, elements)])
    state = state_of(masters, is_split=is_split)
    for step in range(1, 5):
        gradient = numbers(elements, generator).to(dtype)
        plain.step(gradient, scale)
        update(state, gradient, settings, step, scale=scale)
        assert_is(state, plain)


@BOTH
@pytest.mark.parametrize("decoupled", [True, False])
def test_late_steps_and_real_magnitudes_give_torchs_bits(update: Update, decoupled: bool) -> None:
    settings = Settings(lr=3e-4, weight_decay=0.1, decoupled=decoupled)
    masters = torch.randn(3000) * 0.02
    plain, state = Plain(masters, settings, [(0, 3000)]), state_of(masters, is_split=True)
    for step in range(1, 41):
        gradient = (torch.randn(3000) * 1e-3).bfloat16()
        plain.step(gradient)
        update(state, gradient, settings, step)
    assert_is(state, plain)


@BOTH
@pytest.mark.parametrize("decoupled", [True, False])
def test_infinities_nans_and_denormals_are_as_in_torch(update: Update, decoupled: bool) -> None:
    settings = Settings(lr=0.1, weight_decay=0.01, decoupled=decoupled)
    pairs = torch.tensor(list(itertools.product(SPECIAL, [*SPECIAL, 1.0, -2.5])))
    masters, gradient = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    plain, state = Plain(masters, settings, [(0, len(pairs))]), state_of(masters, is_split=False)
    for step in (1, 2, 3):
        plain.step(gradient)
        update(state, gradient, settings, step)
        assert_is(state, plain)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_kernel_and_twin_stay_the_same_over_a_thousand_steps(weight_decay: float) -> None:
    """From masters that are special, lie half-way between two weights, or are plain; with gradients that are special at times."""
    settings = Settings(lr=1e-3, beta2=0.95, weight_decay=weight_decay)
    middles = ((torch.arange(0x3F00, 0x3F80) << 16) + 0x8000).to(torch.int32).view(torch.float32)
    masters = torch.cat([torch.tensor(SPECIAL), middles, -middles, torch.randn(500) * 0.02, torch.randn(61) * 1e-39])
    one, other = (state_of(masters, is_split=True) for _ in range(2))
    for step in range(1, 1001):
        gradient = torch.randn(len(masters)) * 10.0 ** torch.randint(-30, 1, (len(masters),))
        gradient[11:139] = 0  # half-way they stay, but for weight decay
        if step % 100 == 0:
            gradient[-len(SPECIAL) :] = torch.tensor(SPECIAL)
        for update, state in ((adamw, one), (adamw_in_torch, other)):
            update(state, gradient.bfloat16(), settings, step)
        if step % 100 == 0:
            assert_same_state(one, other)


def test_a_gradient_that_is_not_finite_spoils_only_its_own_element() -> None:
    state = state_of(torch.ones(100), is_split=True)
    gradient = torch.ones(100).bfloat16()
    gradient[50] = float("nan")
    adamw(state, gradient, Settings(lr=0.1), 1)
    assert masters_of(state).isnan().nonzero().flatten().tolist() == [50]


@given(st.integers(0, 0x7F800000 - 2**14), st.sampled_from([1, 2, 4097]))
def test_square_roots_of_all_magnitudes_are_torchs(first: int, stride: int) -> None:
    """Second moments by bit pattern, in updates that show each root."""
    squares = (first + stride * torch.arange(2**13)).clamp(max=0x7F800000).to(torch.int32).view(torch.float32)
    settings, gradient = Settings(lr=1.0, beta2=0.5, eps=0.0), torch.zeros_like(squares)
    one, other = (State(torch.zeros_like(squares), None, torch.ones_like(squares), squares.clone()) for _ in range(2))
    adamw(one, gradient, settings, 1)
    adamw_in_torch(other, gradient, settings, 1)
    assert_same_state(one, other)


@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("roots", [module.NEAREST, module.NEWTONS, module.TORCHS])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_variant_of_the_kernel_is_within_a_few_ulps_of_torch(
    vectors: int, roots: int, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_native()
    kernel = module._kernels[0]
    if roots not in kernel.kinds_of_roots:
        pytest.skip("torch has no MKL here")
    monkeypatch.setattr(kernel, "vectors", vectors)
    monkeypatch.setattr(kernel, "roots", roots)
    settings = Settings(lr=1e-2, weight_decay=0.1, decoupled=decoupled)
    masters = torch.randn(1000)
    plain, state = Plain(masters, settings, [(0, 1000)]), state_of(masters, is_split=True)
    for step in (1, 2, 3):
        gradient = torch.randn(1000).bfloat16()
        plain.step(gradient)
        adamw(state, gradient, settings, step)
    torch.testing.assert_close(masters_of(state), plain.masters, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.m, plain.m, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state.v, plain.v, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- what is updated, and where to


@st.composite
def chunks_with_ranges(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    elements = draw(sizes)
    cuts = sorted(draw(st.sets(st.integers(0, elements), max_size=8)))
    return elements, list(zip(cuts[::2], cuts[1::2], strict=False))


@BOTH
@given(
    chunk=chunks_with_ranges(),
    is_split=st.booleans(),
    in_place=st.booleans(),
    offset=st.sampled_from([0, 1, 3, 8]),
    decoupled=st.booleans(),
)
def test_only_the_ranges_change_and_the_rest_is_carried_over(
    update: Update, chunk: tuple[int, list[tuple[int, int]]], is_split: bool, in_place: bool, offset: int, decoupled: bool
) -> None:
    elements, ranges = chunk
    settings = Settings(lr=0.05, weight_decay=0.1, decoupled=decoupled)
    masters = torch.randn(elements)
    plain = Plain(masters, settings, ranges) if ranges else None
    state = _at_offset(state_of(masters, is_split=is_split), offset)
    for step in (1, 2):
        gradient = torch.randn(elements).bfloat16()
        before, out = copy_of(state), None if in_place else _at_offset(empty_like(state), offset)
        update(state, gradient, settings, step, out=out, ranges=ranges)
        if out is not None:
            assert_same_state(state, before)  # the old generation is whole
            state = out
        if plain is None:
            assert_same_state(state, before)
        else:
            plain.step(gradient)
            assert_is(state, plain)


def _at_offset(state: State, offset: int) -> State:
    """The same numbers, so many elements behind where an allocation begins."""

    def moved(tensor: Tensor) -> Tensor:
        longer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        longer[offset:] = tensor
        return longer[offset:]

    return State(moved(state.weights), None if state.low is None else moved(state.low), moved(state.m), moved(state.v))


@BOTH
def test_some_tensors_may_stay_in_place_while_others_move(update: Update) -> None:
    state, gradient = state_of(torch.randn(300), is_split=True), torch.randn(300)
    expected = copy_of(state)
    update(expected, gradient, Settings(lr=0.1), 1, ranges=[(10, 200)])
    out = replace(empty_like(state), m=state.m, low=state.low)
    update(state, gradient, Settings(lr=0.1), 1, out=out, ranges=[(10, 200)])
    assert_same_state(out, expected)


@BOTH
def test_parameters_with_counts_of_their_own_take_a_call_each(update: Update) -> None:
    settings, masters = Settings(lr=0.1, weight_decay=0.1), torch.randn(300)
    first, second = Plain(masters, settings, [(0, 100)]), Plain(masters, settings, [(100, 300)])
    state = state_of(masters, is_split=True)
    early, late = torch.randn(300).bfloat16(), torch.randn(300).bfloat16()
    update(state, early, settings, 1, ranges=[(0, 100)])
    out = empty_like(state)
    update(state, late, settings, 2, out=out, ranges=[(0, 100)])
    update(out, late, settings, 1, ranges=[(100, 300)])
    first.step(early)
    first.step(late)
    second.step(late)
    assert_bits(masters_of(out), torch.cat([first.masters[:100], second.masters[100:]]))


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize("elements", [65_536, 100_003])
@pytest.mark.parametrize("in_place", [True, False])
def test_any_number_of_threads_gives_the_same_bits(elements: int, in_place: bool) -> None:
    settings = Settings(lr=0.1, weight_decay=0.1)
    ranges = [(5, 40_000), (40_001, elements - 3)]
    start, gradient = state_of(torch.randn(elements), is_split=True), torch.randn(elements).bfloat16()
    expected = copy_of(start)
    adamw_in_torch(expected, gradient, settings, 1, ranges=ranges)
    for threads in (1, 2, 3, 6, 64):
        state = copy_of(start)
        out = None if in_place else empty_like(start)
        adamw(state, gradient, settings, 1, out=out, ranges=ranges, threads=threads)
        assert_same_state(out or state, expected)


def test_several_callers_at_once_do_not_disturb_each_other() -> None:
    elements, settings = 100_003, Settings(lr=0.1)
    starts = [state_of(torch.randn(elements), is_split=True) for _ in range(4)]
    gradients = [torch.randn(elements).bfloat16() for _ in starts]
    expected = [copy_of(each) for each in starts]
    for each, gradient in zip(expected, gradients, strict=True):
        for step in range(1, 6):
            adamw_in_torch(each, gradient, settings, step)

    def steps(state: State, gradient: Tensor) -> None:
        for step in range(1, 6):
            adamw(state, gradient, settings, step, threads=3)

    callers = [threading.Thread(target=steps, args=pair) for pair in zip(starts, gradients, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    for state, twin in zip(starts, expected, strict=True):
        assert_same_state(state, twin)


def test_updates_that_are_begun_go_on_behind_each_other_with_the_same_bits() -> None:
    settings, elements, count = Settings(lr=0.1, weight_decay=0.01), 300_000, 12
    generator = torch.Generator().manual_seed(7)
    states = [state_of(numbers(elements, generator), is_split=True) for _ in range(count)]
    twins, gradients = [copy_of(each) for each in states], [numbers(elements, generator) for _ in range(count)]
    told: list[tuple[float, float]] = []
    for step in (1, 2):
        began = time.perf_counter()
        begun = [adamw(each, of, settings, step, threads=3, waits=False) for each, of in zip(states, gradients, strict=True)]
        for each in begun:
            assert (each is not None) == is_native()
            if each is not None:
                each.then(told.append)
                each.synchronize()
                assert each.query()
                each.synchronize()
        assert len(told) == (step * count if is_native() else 0)
        assert all(began <= start <= end <= time.perf_counter() for start, end in told[(step - 1) * count :])
        for twin, of in zip(twins, gradients, strict=True):
            adamw(twin, of, settings, step, threads=1)
    for each, twin in zip(states, twins, strict=True):
        pairs = zip(each.tensors, twin.tensors, strict=True)
        assert all(torch.equal(mine.view(torch.uint8), its.view(torch.uint8)) for mine, its in pairs)


def test_an_update_that_nobody_waits_for_keeps_its_memory() -> None:
    for _ in range(30):
        masters = torch.randn(200_000)
        adamw(state_of(masters, is_split=True), masters, Settings(lr=0.1), 1, threads=3, waits=False)


def test_threads_treat_denormals_as_their_caller_does() -> None:
    elements = 65_536
    gradient, settings = torch.full((elements,), 1e-20), Settings(lr=0.1)
    one, other = state_of(torch.zeros(elements), is_split=False), state_of(torch.zeros(elements), is_split=False)
    adamw(copy_of(one), gradient, settings, 1, threads=3)  # the threads exist before their caller changes its ways
    assert torch.set_flush_denormal(True)
    try:
        adamw(one, gradient, settings, 1, threads=1)
        adamw(other, gradient, settings, 1, threads=3)
    finally:
        torch.set_flush_denormal(False)
    assert_same_state(one, other)
    assert not one.v.any()


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_what_its_parent_has_begun(root: Path) -> None:
    code = """
import os, torch
from anyfit.kernels.adamw import Settings, State, adamw
n = 20_000_000
state = State(torch.ones(n), None, torch.zeros(n), torch.zeros(n))
begun = adamw(state, torch.ones(n), Settings(lr=0.1), 1, threads=2, waits=False)
child = os.fork()
if child == 0:
    del begun
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
begun is None or begun.synchronize()
assert float(state.weights[-1]) < 1
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_has_threads_of_its_own(root: Path) -> None:
    code = """
import os, torch
from anyfit.kernels.adamw import Settings, State, adamw
n = 100_000
def go():
    state = State(torch.ones(n), None, torch.zeros(n), torch.zeros(n))
    adamw(state, torch.ones(n), Settings(lr=0.5), 1, threads=3)
    assert torch.allclose(state.weights, torch.tensor(0.5)), state.weights
go()
child = os.fork()
if child == 0:
    go()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=root, timeout=120)


# ---------------------------------------------------------------------- what is refused


def _wrong(change: str) -> dict[str, object]:
    state, gradient = state_of(torch.zeros(64), is_split=True), torch.zeros(64)
    long = torch.zeros(128)
    cases: dict[str, dict[str, object]] = {
        "weights must": {"state": replace(state, weights=torch.zeros(64))},
        "low must": {"state": replace(state, low=torch.zeros(63, dtype=torch.int16))},
        "m must": {"state": replace(state, m=torch.zeros(128)[::2])},
        "v must": {"state": replace(state, v=torch.zeros(8, 8))},
        "gradient must": {"gradient": torch.zeros(64, dtype=torch.float16)},
        "gradient must be a flat": {"gradient": torch.zeros(65)},
        "weights must be a flat": {"out": replace(copy_of(state), weights=torch.zeros(63).bfloat16())},
        "on meta": {"gradient": torch.zeros(64, device="meta")},
        "both be split": {"out": state_of(torch.zeros(64), is_split=False)},
        "share memory": {"state": replace(state, m=long[:64], v=long[63:127])},
        "two of the chunk's": {"out": replace(copy_of(state), m=state.v)},
        "ranges must": {"ranges": [(0, 65)]},
        "within 0 to 64": {"ranges": [(-1, 5)]},
        "disjoint": {"ranges": [(0, 10), (9, 20)]},
        "ascending": {"ranges": [(30, 20)]},
        "counts from 1": {"step": 0},
        "at least 1": {"threads": 0},
    }
    return {"state": state, "gradient": gradient, "settings": Settings(lr=0.1), "step": 1} | cases[change]


@pytest.mark.parametrize(
    "change",
    [
        "weights must",
        "low must",
        "m must",
        "v must",
        "gradient must",
        "gradient must be a flat",
        "weights must be a flat",
        "on meta",
        "both be split",
        "share memory",
        "two of the chunk's",
        "ranges must",
        "within 0 to 64",
        "disjoint",
        "ascending",
        "counts from 1",
        "at least 1",
    ],
)
@BOTH
def test_what_could_write_elsewhere_is_refused(update: Update, change: str) -> None:
    with pytest.raises(ValueError, match=change):
        update(**_wrong(change))


@BOTH
def test_nothing_to_do_is_fine(update: Update) -> None:
    update(state_of(torch.zeros(0), is_split=True), torch.zeros(0), Settings(lr=0.1), 1, threads=3)
    state = state_of(torch.ones(10), is_split=True)
    out = empty_like(state)
    update(state, torch.ones(10), Settings(lr=0.1), 1, out=out, ranges=[])
    assert_same_state(out, state)
