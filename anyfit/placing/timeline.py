"""A timeline: what each lane did when, over a few steps of a run, as a trace file that Perfetto and Chrome open.

On a GPU, times are those of events on each stream, against one reference event; host lanes have the host's clock, read when
the reference was recorded. On the CPU device there is only the host's clock. Recording begins a step before the window, since
its start waits for the device, and a job that reaches over an edge of the window is cut there.

The computation is cut where it waits for a lane: spans of one lane never overlap. A GPU that has run dry because the host was
late to launch counts as busy inside a forward or backward, and as still between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .lanes import Ended, Label, Lanes, Mark, Task

COMPUTE = "compute"
FIRST, LAST = 4, 6  # steps: earlier ones warm up
LEAST_WAIT_SECONDS = 10e-6  # a shorter one found its ticket done

_cuda: Any = torch.cuda
Moment = Any  # seconds of the host's clock, or an event of the GPU


@dataclass(frozen=True)
class Span:
    label: Label
    start: Moment
    end: Moment

    @property
    def seconds(self) -> float:
        return float(self.end - self.start)


class Timeline:
    """Recorded by a run from its step `first` to its step `last`, counted from where the run started or resumed."""

    def __init__(self, lanes: Lanes, first: int = FIRST, last: int = LAST) -> None:
        self._lanes, self.first, self.last = lanes, first, last
        self._on_gpu = lanes.device.type == "cuda"
        self._done = 0  # steps
        self._began: Moment = None
        self._steps: list[Span] = []
        self._spans: dict[str, list[Span]] = {COMPUTE: [], **{track.name: [] for track in lanes.tracks}}
        self._inside: list[Label] = []  # what the computation is in, outermost first
        self._since: Moment = None  # the innermost of them, or again
        self._reference: tuple[Any, float] | None = None  # the same moment on both clocks

    def begin_step(self) -> None:
        step = self._done + 1
        if self.first - 1 <= step <= self.last and self._reference is None:
            self._attach()
        if self.first <= step <= self.last:
            self._began = self._moment(self._on_gpu)

    def end_step(self) -> None:
        self._done += 1
        if self.first <= self._done <= self.last:
            self._steps.append(Span(Label(Task.STEP, name=str(self._done)), self._began, self._moment(self._on_gpu)))
        if self._done == self.last:
            self._detach()

    def follow(self, lanes: Lanes) -> None:
        """The run was placed anew: its lanes are others."""
        self._lanes = lanes
        if self._reference is not None and not self.is_done:
            self._mark()

    @property
    def is_done(self) -> bool:
        return self._done >= self.last

    @property
    def has_steps(self) -> bool:
        return bool(self._steps)

    def _attach(self) -> None:
        event = None
        if self._on_gpu:
            _cuda.synchronize(self._lanes.device)
        before = time.perf_counter()
        if self._on_gpu:
            event = self._moment(True)
            event.synchronize()
        self._reference = event, (before + time.perf_counter()) / 2
        self._mark()

    def _mark(self) -> None:
        self._lanes.mark = self._mark_computation
        for track in self._lanes.tracks:
            track.mark = self._lane_mark(self._spans[track.name], track.stream is not None)

    def _detach(self) -> None:
        self._lanes.mark = None
        for track in self._lanes.tracks:
            track.mark = None

    def _moment(self, on_gpu: bool) -> Moment:
        if not on_gpu:
            return time.perf_counter()
        event = _cuda.Event(enable_timing=True)
        event.record()  # on the current stream: the computation's, or, inside a lane's job, the lane's
        return event

    def _lane_mark(self, spans: list[Span], on_gpu: bool) -> Mark:
        def mark(label: Label) -> Ended:
            start = self._moment(on_gpu)

            def ended(times: tuple[float, float] | None) -> None:
                spans.append(Span(label, *(times or (start, self._moment(on_gpu)))))

            return ended

        return mark

    def _mark_computation(self, label: Label) -> Ended:
        self._cut()
        self._inside.append(label)
        return self._leave

    def _leave(self, _times: tuple[float, float] | None) -> None:
        self._cut()
        self._inside.pop()

    def _cut(self) -> None:
        """What the computation was in until now is a span; what it is in from here on is another."""
        now = self._moment(self._on_gpu)
        if self._inside:
            self._spans[COMPUTE].append(Span(self._inside[-1], self._since, now))
        self._since = now

    def document(self, title: str) -> dict[str, Any]:
        """The recorded steps as a Chrome trace. Waits for all that is under way."""
        self._detach()
        for lane in self._lanes.all:
            lane.drain()
        if self._on_gpu:
            _cuda.synchronize(self._lanes.device)
        steps = self._in_seconds(self._steps)
        start, end = steps[0].start, steps[-1].end
        rows = {"steps": steps} | {name: self._in_seconds(spans) for name, spans in self._spans.items()}
        rows[COMPUTE] = _joined(rows[COMPUTE])
        rows = {name: found for name, spans in rows.items() if (found := _inside_window(spans, start, end))}
        whole = end - start
        seconds = {name: sum(span.seconds for span in spans if not span.label.is_wait) for name, spans in rows.items()}
        busy = {name: min(each / whole, 1.0) for name, each in seconds.items() if name != "steps"}
        waits = [span for span in rows.get(COMPUTE, []) if span.label.is_wait]
        kinds = sorted({span.label.kind for span in waits})
        return {
            "traceEvents": list(_events(title, rows, start)),
            "displayTimeUnit": "ms",
            "metadata": {
                "anyfit": "timeline",
                "title": title,
                "steps": [self.first, self.first + len(steps) - 1],
                "step_seconds": whole / len(steps),
                "busy": busy,
                "still": 1 - busy.get(COMPUTE, 0.0),
                "waits": {kind: sum(span.seconds for span in waits if span.label.kind == kind) / whole for kind in kinds},
            },
        }

    def _in_seconds(self, spans: Sequence[Span]) -> list[Span]:
        assert self._reference is not None
        event, clock = self._reference

        def seconds(moment: Moment) -> float:
            return moment - clock if isinstance(moment, float) else event.elapsed_time(moment) / 1e3

        found = [replace(span, start=seconds(span.start), end=seconds(span.end)) for span in spans]
        return sorted(found, key=lambda span: span.start)  # updates of the host are told of by whoever waits for them


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Without waits for what was done already, and without the cuts that they made."""
    found: list[Span] = []
    for span in spans:
        if span.label.is_wait and span.seconds < LEAST_WAIT_SECONDS:
            continue
        if found and found[-1].label == span.label and span.start - found[-1].end < LEAST_WAIT_SECONDS:
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return found


def _inside_window(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Cut at the edges; and at the end of the span before, by which clocks that round may be off."""
    found: list[Span] = []
    for span in spans:
        first, last = max(span.start, found[-1].end if found else start), min(span.end, end)
        if last > first:
            found.append(replace(span, start=first, end=last))
    return found


def _events(title: str, rows: dict[str, list[Span]], start: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for row, (name, spans) in enumerate(rows.items()):
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}
        for span in spans:
            kind = "wait" if span.label.is_wait else span.label.kind
            begun, ended = (round((moment - start) * 1e6, 3) for moment in (span.start, span.end))
            times = {"ts": begun, "dur": round(ended - begun, 3)}
            yield {"ph": "X", "pid": 0, "tid": row, "name": str(span.label), "cat": kind, **times}
