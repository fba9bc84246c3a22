"""Random values of any record, made from its field types, as strict JSON reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from anyfit.values.check import Check
from anyfit.values.corrections import ClippedSteps, Correction, Corrections, Pace
from anyfit.values.cuts import Cut
from anyfit.values.graph import Graph
from anyfit.values.machine import DTYPES, OPERATIONS, Curve, Device, Machine
from anyfit.values.mesh import AXES
from anyfit.values.plan import Clipping, Forecast, Placement, Plan, Stage
from anyfit.values.profile import Profile

RECORDS = (Check, Corrections, Graph, Machine, Plan, Profile)
BY_DTYPE = ("matmul", "matmul_unaligned", "attention", "attention_backward", "convolution")
# Objects whose keys are data (a dtype, an op, a call, a package), of which some may be missing.
OPEN = {
    "activations", "choices", "replays", "split_seconds", "versions", "operations", "measured", "kept", "labels", "cut",
    "parameters", *BY_DTYPE,
}  # fmt: skip

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-9, max_value=1e15)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any legal value of a type that travels as JSON."""
    if kind in RULES:
        return RULES[kind]
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **fields_of(kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if get_origin(arguments[0]) is Literal:
            return st.fixed_dictionaries({key: values_of(arguments[1]) for key in get_args(arguments[0])})
        return st.dictionaries(st.text(max_size=8), values_of(arguments[1]), max_size=2)
    if type(None) in arguments:
        (other,) = set(arguments) - {type(None)}
        return st.none() | values_of(other)
    return {int: st.integers(), float: finite, str: st.text(max_size=8), bool: st.booleans()}[kind]


def fields_of(kind: Any) -> dict[str, st.SearchStrategy[Any]]:
    hints = get_type_hints(kind)
    return {field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)}


def curves(rates: st.SearchStrategy[float] = positive) -> st.SearchStrategy[Curve]:
    sizes = st.lists(positive, min_size=1, max_size=5, unique=True).map(sorted)
    return sizes.flatmap(
        lambda sizes: st.builds(
            Curve,
            points=st.tuples(*(st.tuples(st.just(size), rates) for size in sizes)),
            measurement_error=finite,
            source=st.text(max_size=8),
        )
    )


def _devices() -> st.SearchStrategy[Device]:
    def keyed(names: tuple[str, ...], least: int) -> st.SearchStrategy[dict[str, Curve]]:
        return st.dictionaries(st.sampled_from(names), curves(), min_size=least, max_size=2)

    ruled = {name: keyed(DTYPES, 1 if name == "matmul" else 0) for name in BY_DTYPE}
    return st.builds(Device, **fields_of(Device) | ruled | {"operations": keyed(OPERATIONS, 0)})


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    batch_size = draw(st.integers(1, 64))
    micro_batch = draw(st.integers(1, batch_size))
    parameters, tensor = draw(st.integers(min_value=0)), draw(st.integers(1, 2))
    ruled = {
        "parameters": st.just(parameters),
        "trainable": st.none() | st.integers(0, parameters),
        "batch_size": st.just(batch_size),
        "micro_batch": st.just(micro_batch),
        "accumulation": st.just(-(-batch_size // micro_batch)),
        "mesh": st.just(dict.fromkeys(AXES, 1) | {"tensor": tensor}),
        "stages": values_of(tuple[Stage, ...]).map(lambda stages: stages if tensor > 1 else tuple(map(_uncut, stages))),
        "chunk_bytes": st.integers(min_value=1),
        "slots": st.integers(min_value=1),
        "prefetch": st.integers(min_value=0),
    }
    return draw(st.builds(Plan, **fields_of(Plan) | ruled))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any placement that an engine can honour."""
    update = draw(st.sampled_from(["device", "host"]))
    optimizer = draw(st.sampled_from(["host", "disk"] if update == "host" else ["device", "host", "disk"]))
    return Placement(
        weights="device" if optimizer == "device" else draw(st.sampled_from(["device", "host"])),
        gradients="host" if update == "host" else draw(st.sampled_from(["device", "host"])),
        optimizer=optimizer,
        update=update,
        speculates=optimizer != "device" and draw(st.booleans()),
    )


@st.composite
def _corrections(draw: st.DrawFn) -> Correction:
    expected = draw(st.integers(1, 2**50))
    ruled = {"expected_bytes": st.just(expected), "needed_bytes": st.integers(expected + 1, 2**51), "error": positive}
    return draw(st.builds(Correction, **fields_of(Correction) | ruled))


@st.composite
def _stages(draw: st.DrawFn) -> Stage:
    """What is recomputed in part is not compiled, only what is recomputed is replayed, and what is cut is neither."""
    activations = draw(fields_of(Stage)["activations"])
    compiled = draw(fields_of(Stage)["compiled"])
    fit = tuple(each for each in compiled if activations.get(each) != "selective")
    recomputed = tuple(each for each, choice in activations.items() if choice == "recompute")
    replayed = recomputed[: draw(st.integers(0, 3))]
    cut = {path: each for path, each in draw(fields_of(Stage)["cut"]).items() if path not in (*fit, *replayed)}
    chosen = {"activations": activations, "compiled": fit, "replayed": replayed, "cut": cut}
    return draw(st.builds(Stage, **fields_of(Stage) | {name: st.just(value) for name, value in chosen.items()}))


def _uncut(stage: Stage) -> Stage:
    return dataclasses.replace(stage, cut={}, tables=())


@st.composite
def _clipped_steps(draw: st.DrawFn) -> ClippedSteps:
    steps = draw(st.integers(0, 10**6))
    ruled = {"steps": st.just(steps), "clipped": st.integers(0, steps)}
    return draw(st.builds(ClippedSteps, **fields_of(ClippedSteps) | ruled))


# What a type alone does not say.
RULES: dict[Any, st.SearchStrategy[Any]] = {
    ClippedSteps: st.deferred(_clipped_steps),
    Clipping: st.builds(Clipping, step_seconds=positive, redone_seconds=positive, share=st.floats(0, 1)),
    Correction: st.deferred(_corrections),
    Curve: st.deferred(curves),
    Cut: st.builds(Cut, st.integers(), st.integers()),
    Device: st.deferred(_devices),
    Pace: st.deferred(lambda: st.builds(Pace, **fields_of(Pace) | {"measured_seconds": positive, "forecast_seconds": positive})),
    Forecast: st.deferred(lambda: st.builds(Forecast, **fields_of(Forecast) | {"step_seconds": positive})),
    Placement: placements(),
    Stage: st.deferred(_stages),
    Plan: st.deferred(_plans),
}
records = st.one_of(*map(values_of, RECORDS))


def places(document: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Every (container, key or index, path of what lies there) in a JSON document, itself `path`."""
    if isinstance(document, dict):
        inside = [(key, f"{path}.{key}") for key in document]
    elif isinstance(document, list):
        inside = [(index, f"{path}[{index}]") for index in range(len(document))]
    else:
        return
    for key, where in inside:
        yield document, key, where
        yield from places(document[key], where)
