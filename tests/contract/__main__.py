"""Tries cases and says what becomes of each: python -m tests.contract [--columns ample,host] [--verbose] [words of names…]"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from tests.dist.pool import close_all

from .case import COLUMNS, catalogue
from .columns import RUNS, Outcome, outcome_of
from .known_open import ENDS_THE_PROCESS, KNOWN_OPEN

SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--odd", action="store_true", help="only what is not as expected")
    parser.add_argument("--open", action="store_true", help="only what is known not to hold yet")
    parser.add_argument("--cells", type=Path, help="a file of lines such as: lora/host")
    parser.add_argument("--part", default="1/1", help="such as 2/3: the second of three parts of the cells")
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("ANYFIT_CACHE", tempfile.mkdtemp())
    wanted = given.columns.split(",")
    count: Counter[str] = Counter()
    named = None if given.cells is None else set(given.cells.read_text().splitlines())
    part, parts = map(int, given.part.split("/"))
    met = 0
    for case in catalogue().values():
        if given.words and not any(word in case.name or word == case.kind for word in given.words):
            continue
        for column in case.columns:
            if column not in wanted or column not in RUNS:
                continue
            if (case.name, column) in ENDS_THE_PROCESS or (given.open and (case.name, column) not in KNOWN_OPEN):
                continue
            if named is not None and f"{case.name}/{column}" not in named:
                continue
            met += 1
            if met % parts != part - 1:
                continue
            began = time.perf_counter()
            outcome = limited(case, column)
            seconds = time.perf_counter() - began
            as_expected = (
                outcome.kind == "equal"
                if not case.is_refused(column)
                else outcome.kind == "refused" and re.search(case.expected[column].message, outcome.said) is not None
            )
            count[outcome.kind] += 1
            if given.odd and as_expected:
                continue
            said = outcome.said if given.verbose else last_line(outcome)
            print(
                f"{outcome.kind:8}{'' if as_expected else '!':2}{column:12}{case.kind} / {case.name}  {seconds:.2f}s  {said}",
                flush=True,
            )
    close_all()
    print(dict(count))


def last_line(outcome: Outcome) -> str:
    lines = [line for line in outcome.said.strip().splitlines() if line.strip()]
    return (lines[-1] if outcome.kind == "dead" else lines[0])[:260] if lines else ""


def limited(case: object, column: str) -> Outcome:
    def ring(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"no end in {SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        return outcome_of(case, column)  # type: ignore[arg-type]
    except Exception as error:
        return Outcome("dead", f"harness: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main())
