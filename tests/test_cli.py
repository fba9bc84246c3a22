"""The command line: quick help, JSON that is read back, and one clear line for what the user can mend."""

from __future__ import annotations

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import Tensor
from typer.main import get_command

from anyfit import Machine, Plan, cli
from anyfit.options import ELSEWHERE, NEEDLESS
from anyfit.planning import search
from anyfit.planning.fastest import TIE
from anyfit.running.run import Run
from anyfit.showing import timeline
from anyfit.values.answers import beside
from anyfit.values.check import Check
from anyfit.values.profile import Profile
from anyfit.values.units import parse_count, show_bytes, show_seconds
from tests.machines import figure, small_disk, small_machine
from tests.planning.profiles import small_profile

VERBS = sorted(command.callback.__name__ for command in cli.app.registered_commands if command.callback is not None)

JOBS = """
import anyfit, torch
from torch import nn

def job():
    return anyfit.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=torch.ones(4, 8),
        batch_size=4,
        precision="fp32",
    )

def whole():
    made = job()
    object.__setattr__(made, "sample", torch.ones(64, 8))
    object.__setattr__(made, "batch_size", 64)
    object.__setattr__(made, "micro_batch", 64)
    return made

def broken():
    return {}["a key of mine"]

def misled():
    raise ValueError("a mistake of mine")

def rejecting():
    made = job()
    object.__setattr__(made, "sample", torch.ones(4, 9))
    return made

class Curious(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()

def curious():
    made = job()
    object.__setattr__(made, "model", lambda: Curious(8, 8))
    return made

def mistyped():
    return anyfit.Job(nn.Linear, None, None, None, 4)

number = 7
"""


@dataclass(frozen=True)
class Outcome:
    status: int | str | None
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def anyfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process, in a folder with a file of jobs, a machine and a file that is no folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # the width of whoever runs the tests
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "file").write_text("no folder")
    small_machine().save(tmp_path / "small.json")
    search(small_profile()).save(tmp_path / "plan.json")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["anyfit", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Outcome(exit.value.code, *capsys.readouterr())

    return run


def test_the_verbs_are_those_of_the_design() -> None:
    assert VERBS == ["check", "export", "fit", "machines", "plan", "probe", "profile", "report", "why"]


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_imports_no_torch(verb: str | None, root: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "anyfit", *([verb] if verb else []), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "anyfit.cli" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "numpy", "transformers")}
    assert "Usage:" in done.stdout
    if verb is None:
        assert all(f"  {name} " in done.stdout for name in VERBS)


def test_the_version_is_the_packages(anyfit: Command) -> None:
    done = anyfit("--version")
    assert (done.status, done.out, done.err) == (0, f"anyfit {importlib.metadata.version('anyfit')}\n", "")


def test_no_arguments_show_the_help(anyfit: Command) -> None:
    shown = anyfit()
    assert "Usage:" in shown.out + shown.err


# ---------------------------------------------------------------------- what a program reads


SMALL = ("jobs.py:job", "--machine", "small.json")


def test_a_profile_is_read_back_from_its_json(anyfit: Command) -> None:
    done = anyfit("profile", *SMALL, "--json")
    assert (done.status, done.err) == (0, "")
    profile = Profile.from_json(json.loads(done.out))
    assert (profile.model, profile.machine, profile.parameters) == ("Sequential", "small", 8 * 8 + 8 + 8 + 1)


def test_a_plan_is_read_back_from_its_json_and_from_its_file(anyfit: Command, tmp_path: Path) -> None:
    done = anyfit("plan", *SMALL, "--json", "-o", "new/plan.json")
    assert (done.status, done.err) == (0, "")
    plan = Plan.from_json(json.loads(done.out))
    assert plan == Plan.load(tmp_path / "new" / "plan.json")
    assert plan.limit_bytes["device"] == small_machine().device_limit_bytes


def test_limits_on_the_command_line_are_in_the_plan(anyfit: Command) -> None:
    done = anyfit("plan", *SMALL, "--json", "--device-memory", "1GiB", "--host-memory", "512MiB")
    assert Plan.from_json(json.loads(done.out)).limit_bytes == {"device": 2**30, "host": 2**29, "disk": 0}


def test_the_reasons_are_read_back_from_their_json(anyfit: Command, tmp_path: Path) -> None:
    anyfit("plan", *SMALL, "-o", "plan.json")
    anyfit("plan", *SMALL, "-o", "other.json", "--device-memory", "1GiB")
    plan, other = Plan.load(tmp_path / "plan.json"), Plan.load(tmp_path / "other.json")
    assert json.loads(anyfit("why", "plan.json", "--json").out) == plan.explained(None)
    assert json.loads(anyfit("why", "plan.json", "micro-batch", "--json").out) == plan.explained("micro-batch")
    both = beside({"plan.json": plan, "other.json": other})
    assert json.loads(anyfit("why", "plan.json", "other.json", "--json").out) == both
    assert both["memory"] == [f"{show_bytes(plan.forecast.reserved_bytes)} of {size}" for size in ("8.00 GiB", "1.00 GiB")]
    assert "model" not in both
    same = json.loads(anyfit("why", "plan.json", "plan.json", "--json").out)
    assert list(same) == ["step", "tokens/s", "difference"]
    assert same["difference"] == ["", "the same step time, +0.0% tokens/s"]


def printed(done: Outcome) -> Plan:
    assert (done.status, done.err) == (0, "")
    return Plan.from_json(json.loads(done.out))


def test_a_change_is_planned_as_if_it_had_been_asked_for(anyfit: Command) -> None:
    asked = ("plan", "demo", "--machine", "small.json", "--dtype", "fp32", "--batch", "8", "--device-memory", "10MiB")
    changes = {"device-memory=14MiB": ("--device-memory", "14MiB"), "batch=2": ("--batch", "2"), "seq=32": ("--seq", "32")}
    done = anyfit(*asked, "--json", *(word for change in changes for word in ("--what-if", change)), "-o", "kept.json")
    assert (done.status, done.err) == (0, "")
    document = json.loads(done.out)
    plan = Plan.from_json(document["plan"])
    assert plan == Plan.load("kept.json")
    assert plan.chunks  # not all fits on the device
    assert list(document["what_if"]) == list(changes)
    for change, options in changes.items():
        found, direct = Plan.from_json(document["what_if"][change]), printed(anyfit(*asked, *options, "--json"))
        assert found.forecast.step_seconds == pytest.approx(direct.forecast.step_seconds, rel=0.01)
        assert (found.limit_bytes, found.batch_size) == (direct.limit_bytes, direct.batch_size)
    larger = Plan.from_json(document["what_if"]["device-memory=14MiB"])
    assert larger.forecast.step_seconds <= plan.forecast.step_seconds

    shown = anyfit(*asked, "--what-if", "device-memory=14MiB").out
    saved = plan.forecast.step_seconds - larger.forecast.step_seconds
    assert f"{show_seconds(saved)} less a step" in shown
    for text in (show_seconds(plan.forecast.step_seconds), show_seconds(larger.forecast.step_seconds)):
        assert f"│ {text} ± " in shown


def test_a_change_that_does_not_fit_or_makes_it_fit_says_so(anyfit: Command) -> None:
    tight = anyfit("plan", *SMALL, "--what-if", "device-memory=1kB")
    assert (tight.status, tight.err) == (0, "")
    assert re.search(r"│ does not fit, \S+ KiB too little +│", tight.out)
    freed = anyfit("plan", *SMALL, "--device-memory", "1kB", "--what-if", "device-memory=64kB")
    assert freed.status == 3
    assert re.search(r"does not fit, \S+ KiB too little +│ \S+ \S+ ± 25%", freed.out) or "± 45%" in freed.out


def test_machines_are_ranked_by_time_and_cost_and_those_too_small_come_last(anyfit: Command, tmp_path: Path) -> None:
    machines = {
        "slow.json": small_machine(flops_per_second=2e10),
        "tiny.json": small_machine(device_bytes=3 * 2**20),
        "tinier.json": small_machine(device_bytes=2**20),
        "fast.json": small_machine(flops_per_second=5e11),
        "small.json": small_machine(),
    }
    for name, machine in machines.items():
        machine.save(tmp_path / name)
    job = ("plan", "demo", "--batch", "4", "--seq", "64", "--dtype", "fp32")
    asked = (*job, "--compare", ",".join(machines), "--tokens", "2.5M", "--price", "slow.json=1,fast.json=40")
    document = json.loads(anyfit(*asked, "--json").out)
    assert document["tokens"] == parse_count("2.5M")
    rows = document["machines"]
    assert [row["machine"] for row in rows] == ["fast.json", "small.json", "slow.json", "tiny.json", "tinier.json"]
    for row in rows[:3]:
        plan = Plan.from_json(row["plan"])
        alone = printed(anyfit(*job, "--machine", row["machine"], "--json"))
        assert plan == alone
        assert row["seconds"] == pytest.approx(2.5e6 / (4 * 65) * plan.forecast.step_seconds)  # a byte more a sample, to predict
        price = {"slow.json": 1, "fast.json": 40}.get(row["machine"])
        assert row["cost"] == (None if price is None else pytest.approx(price * row["seconds"] / 3600))
    assert rows[3]["shortfall_bytes"] < rows[4]["shortfall_bytes"]
    for row in rows[3:]:
        verdict = anyfit(*job, "--machine", row["machine"])
        assert verdict.status == 3
        assert f"{show_bytes(row['shortfall_bytes'])} too little" in verdict.err
    shown = anyfit(*asked).out
    assert shown.index("fast.json") < shown.index("small.json") < shown.index("slow.json") < shown.index("tiny.json")
    cheapest = min(row["cost"] for row in rows if row["cost"] is not None)
    assert f"${cheapest:,.2f}, the least" in shown
    assert f"does not fit: {show_bytes(rows[3]['shortfall_bytes'])} of " in " ".join(shown.split())


@pytest.mark.parametrize(
    ("dtype", "limits", "names"),
    [
        ("fp32", ("--device-memory", "4MiB"), ["--device-memory", "--seq"]),
        (
            "bf16",  # micro-batches add their gradients up in fp32, on the host: a smaller batch needs less of it
            ("--device-memory", "4MiB", "--host-memory", "12MiB"),
            ["--host-memory", "--device-memory", "--batch", "--seq", "--optimizer", "--optimizer"],
        ),
    ],
)
def test_each_change_that_is_offered_where_nothing_fits_does_what_it_says(
    anyfit: Command, dtype: str, limits: tuple[str, ...], names: list[str]
) -> None:
    length = "256" if dtype == "fp32" else "128"
    asked = ("plan", "demo", "--machine", "small.json", "--dtype", dtype, "--batch", "8", "--seq", length, *limits)
    done = anyfit(*asked)
    assert done.status == 3
    assert [name for name, *_ in type_each(anyfit, asked, done.err)] == names


def test_a_smaller_batch_is_offered_to_a_function_as_it_would_be_written(anyfit: Command, tmp_path: Path) -> None:
    file, made = tmp_path / "own.py", "from anyfit import demo\ndef job():\n    return demo.job(batch_size={}, length=128)\n"
    asked = ("plan", "own.py:job", "--machine", "small.json", "--device-memory", "4MiB", "--host-memory", "12MiB")
    file.write_text(made.format("8, precision='bf16'"))
    done = anyfit(*asked)
    ((size, said),) = re.findall(r"^  Job\(batch_size=(\d+)\): (\S+ \S+) a step$", done.err, re.MULTILINE)
    file.write_text(made.format(f"{size}, precision='bf16'"))
    sys.modules.pop("own")
    assert printed(anyfit(*asked, "--json")).forecast.step_seconds <= 1.01 * seconds_of(said)


def type_each(anyfit: Command, asked: tuple[str, ...], verdict: str) -> list[list[str]]:
    """Each change that a verdict offers, typed behind what was asked: a plan is made, whose step is as long as was said, or
    shorter, as far as forecasts are told apart."""
    offered = re.findall(r"^  (.+?): (.+?) a step(?:, (?:on|with) .*)?$", verdict, re.MULTILINE)
    assert len(offered) == len(verdict.splitlines()) - verdict.startswith("anyfit: ") - verdict.count(" as you asked")
    for what, said in offered:
        done = anyfit(*asked, *what.split(), "--json")
        assert done.status == 0, f"{what}: {done.err}"
        seconds = Plan.from_json(json.loads(done.out)).forecast.step_seconds
        assert show_seconds(seconds) == said or seconds <= 1.01 * (1 + TIE) * seconds_of(said), what
    return [what.split() for what, _ in offered]


def card(device_bytes: int, host_bytes: int) -> Machine:
    """A GPU like an L4, with less memory."""
    like = Machine.load("l4")
    host = replace(like.host, memory_bytes=figure(host_bytes))
    return replace(like, host=host, device=replace(like.device, name="a small card", memory_bytes=figure(device_bytes)))


def test_each_remedy_of_a_card_that_is_too_small_can_be_typed_and_works(anyfit: Command) -> None:
    """More memory than the card is described with, other optimizers, adapters, other cards."""
    card(3 * 2**29, 3 * 2**30).save("card.json")
    asked = ("plan", "gpt2-small", "--batch", "2", "--seq", "32", "--machine", "card.json")
    done = anyfit(*asked)
    assert (done.status, done.out) == (3, "")
    first, _, _ = done.err.partition("\n")
    assert first.startswith("anyfit: gpt2-small (124 M parameters, AdamW, batch 2 x 32) does not fit: it needs ")
    assert ", the preset assumes 3.00 GiB (--host-memory changes it): " in first
    assert re.search(r"^  --host-memory (\S+)GiB: .* a step, with \1 GiB of RAM \(the preset assumes 3.00 GiB\)$", done.err, re.M)
    assert re.search(r"^  --device-memory (\S+)GiB: .*, on a larger GPU, of \1 GiB \(l4 has 1.50 GiB\)$", done.err, re.M)
    typed = type_each(anyfit, asked, done.err)
    names = [" ".join(words[::2]) for words in typed]
    assert set(names) >= {"--host-memory", "--device-memory", "--optimizer", "--lora", "--machine"}
    assert [words[1] for words in typed if words[0] == "--optimizer"] == ["adafactor", "sgd"]
    assert [words[1] for words in typed if words[0] == "--machine"] == ["l4", "a10g"]  # the smallest that are enough
    (size,) = (words[1] for words in typed if words[0] == "--host-memory" and len(words) == 2)
    said = anyfit(*asked, "--host-memory", size).err
    assert said == f"l4 is described with 3.00 GiB of host memory; planning for {size.replace('GiB', ' GiB')} as you asked\n"


def test_the_disk_is_offered_can_be_typed_and_is_in_the_plan(anyfit: Command) -> None:
    replace(small_machine(), disk=small_disk()).save("disk.json")
    limits = ("--device-memory", "4MiB", "--host-memory", "8MiB")
    asked = ("plan", "demo", "--machine", "disk.json", "--dtype", "bf16", "--batch", "2", "--seq", "64", *limits)
    done = anyfit(*asked)
    assert done.status == 3
    typed = type_each(anyfit, asked, done.err)
    (size,) = (words[1] for words in typed if words[0] == "--disk")
    assert re.search(rf"^  --disk {size}: .* a step, with \S+ .iB written a step, \S+ .B a day$", done.err, re.M)
    shown = " ".join(anyfit(*asked, "--disk", size).out.split())
    assert "part of the optimizer state on the disk" in shown
    assert re.search(r"disk optimizer state of .* parameters, read and written once a step: nothing there would need ", shown)
    assert re.search(r"wear .* written a step, .* a day: a drive that is rated for 600 TB takes that for ", shown)
    what_if = json.loads(anyfit(*asked, "--what-if", f"disk={size}", "--json").out)["what_if"][f"disk={size}"]
    assert Plan.from_json(what_if).forecast.peak_bytes["disk"] > 0
    several = anyfit("plan", "demo", "--machine", "h100-node", "--disk", "1GiB")
    assert several.status == 2
    assert "this version has state on the disk for one rank: leave --disk" in several.err


def test_each_remedy_for_several_ranks_can_be_typed_and_works(anyfit: Command, tmp_path: Path) -> None:
    """The same as for one, and more of them."""
    card(int(0.9 * 2**30), int(2.1 * 2**30)).save("card.json")
    shape = {"model_type": "gpt2", "n_layer": 4, "n_embd": 768, "n_head": 4, "vocab_size": 8192, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    asked = ("plan", "config.json", "--batch", "4", "--seq", "32", "--machine", "card.json", "--nodes", "2")
    done = anyfit(*asked)
    assert done.status == 3
    assert " over 2 ranks does not fit: it needs " in done.err
    typed = type_each(anyfit, asked, done.err)
    names = ["--host-memory", "--device-memory", "--optimizer", "--optimizer", "--lora", "--nodes", "--machine", "--machine"]
    assert [words[0] for words in typed] == names


def test_the_memory_that_a_run_lacks_can_be_typed_and_is_enough(anyfit: Command) -> None:
    asked = ("fit", "--batch", "1", "--seq", "16", "--dtype", "fp32", "--steps", "1")
    done = anyfit(*asked, "--device-memory", "1MiB", "--folder", "little")
    assert done.status == 3
    (size,) = re.findall(r"^  --device-memory (\S+): ", done.err, re.MULTILINE)
    assert anyfit(*asked, "--device-memory", size, "--folder", "enough").status == 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_remedy_of_llama_8b_on_an_rtx_4090_can_be_typed_and_works(anyfit: Command) -> None:
    asked = ("plan", "llama-8b", "--machine", "rtx-4090")
    done = anyfit(*asked)
    assert done.status == 3
    assert done.err.startswith("anyfit: llama-8b (8.03 B parameters, AdamW, batch 8 x 1024) does not fit: it needs ")
    assert " of host memory, the preset assumes 62.1 GiB (--host-memory changes it): " in done.err
    typed = type_each(anyfit, asked, done.err)
    assert {words[0] for words in typed} == {"--host-memory", "--device-memory", "--optimizer", "--lora", "--machine"}


@pytest.mark.full
def test_more_gpus_are_offered_where_they_hold_together_what_one_does_not(anyfit: Command) -> None:
    limits = ("--device-memory", "14GiB", "--host-memory", "3GiB")
    asked = ("plan", "llama-1b", "--machine", "l4", *limits, "--seq", "256")
    done = anyfit(*asked)
    assert done.status == 3
    assert ["--gpus", "4"] in type_each(anyfit, asked, done.err)


def test_of_the_machine_that_is_here_more_memory_is_a_question_and_no_limit(
    anyfit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(small_machine(device_bytes=2**20), host=small_machine().host)
    monkeypatch.setattr("anyfit.probe", lambda: here)
    asked = ("plan", "demo", "--dtype", "fp32", "--batch", "1", "--seq", "32")
    done = anyfit(*asked)
    assert done.status == 3
    (size,) = re.findall(r"^  --what-if device-memory=(\S+): ", done.err, re.MULTILINE)
    answer = anyfit(*asked, "--what-if", f"device-memory={size}", "--json")
    assert answer.status == 3  # as it is, it does not fit
    assert Plan.from_json(json.loads(answer.out)["what_if"][f"device-memory={size}"]).fits
    refused = anyfit(*asked, "--device-memory", size)
    assert refused.status == 2
    assert refused.err.startswith("anyfit: a limit of ")
    assert refused.err.endswith(f"--what-if device-memory={size}\n")


def test_a_smaller_micro_batch_is_offered_where_the_job_asks_for_one_that_is_too_large(anyfit: Command, tmp_path: Path) -> None:
    done = anyfit("plan", "jobs.py:whole", "--machine", "small.json", "--device-memory", "8kB")
    assert done.status == 3
    ((size, said),) = re.findall(r"^  Job\(micro_batch=(\d+)\): (\S+ \S+) a step$", done.err, re.MULTILINE)
    (tmp_path / "jobs.py").write_text(JOBS.replace('"micro_batch", 64', f'"micro_batch", {size}'))
    sys.modules.pop("jobs")
    plan = printed(anyfit("plan", "jobs.py:whole", "--machine", "small.json", "--device-memory", "8kB", "--json"))
    assert plan.micro_batch == int(size)
    assert plan.forecast.step_seconds <= 1.01 * seconds_of(said)


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_the_machine_measured_is_read_back_from_its_json_and_from_its_file(anyfit: Command, tmp_path: Path) -> None:
    done = anyfit("probe", "--json", "-o", "machine.json")
    assert (done.status, done.err) == (0, "")
    assert Machine.from_json(json.loads(done.out)) == Machine.load(tmp_path / "machine.json")


def test_a_check_is_read_back_from_its_json(anyfit: Command) -> None:
    done = anyfit("check", "jobs.py:job", "--steps", "3", "--json")
    assert (done.status, done.err) == (0, "")
    found = Check.from_json(json.loads(done.out))
    assert found.parity is not None
    assert found.parity.agrees
    assert found.step_seconds > 0
    assert found.pace is not None


def test_a_size_is_profiled_module_by_module(anyfit: Command) -> None:
    asked = ("profile", "gpt2-small", "--machine", "h200", "--batch", "2", "--seq", "64", "--depth", "3")
    done = anyfit(*asked)
    assert (done.status, done.err) == (0, "")  # transformers has nothing to say either
    for word in ("0 … 11", "GPT2Block", "of peak compute", "counted whole", "allocated", "reserved"):
        assert word in done.out
    document = json.loads(anyfit(*asked, "--json").out)
    modules = {module["name"]: module for module in document["modules"]}
    (each,) = Profile.from_json(document["profile"]).passes
    whole = modules[""]
    assert whole["flops_forward"] + whole["flops_backward"] == each.flops
    assert whole["kept_bytes"] == sum(block.kept_bytes for block in each.blocks)
    assert whole["parameters"] == document["profile"]["parameters"]
    assert whole["seconds_forward"] + whole["seconds_backward"] == pytest.approx(each.seconds)
    assert max(name.count(".") for name in modules) == 2


def test_gpus_nodes_and_limits_adjust_the_machine(anyfit: Command) -> None:
    asked = ("plan", "demo", "--machine", "h100-node", "--json")
    adjusted = ("--gpus", "4", "--nodes", "2", "--device-memory", "24GiB", "--host-memory", "64GiB")
    plain, other = (Plan.from_json(json.loads(anyfit(*asked, *more).out)) for more in ((), adjusted))
    assert (other.limit_bytes["device"], other.limit_bytes["host"]) == (24 * 2**30, 64 * 2**30)
    assert other.fingerprint.machine == Machine.load("h100-node").with_devices(4, 2).fingerprint != plain.fingerprint.machine


@pytest.mark.parametrize(("verb", "word"), [("profile", "of peak compute"), ("plan", "micro-batch")])
def test_without_json_a_person_can_read_it(anyfit: Command, verb: str, word: str) -> None:
    done = anyfit(verb, *SMALL)
    assert done.status == 0
    assert word in done.out
    assert "\x1b" not in done.out


def test_fit_saves_beside_the_steps_and_keeps_what_it_was_told_to(anyfit: Command, tmp_path: Path) -> None:
    small = ("--batch", "2", "--seq", "16", "--dtype", "bf16", "--log-every", "1")
    done = anyfit("fit", *small, "--steps", "7", "--save-every", "1", "--keep", "2", "--keep-every", "3", "--folder", "run")
    assert done.status == 0, done.err
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [3, 6, 7]
    assert "00000001: " in done.out
    assert done.out.count("beside the steps") == 7
    done = anyfit("fit", *small, "--steps", "4", "--save-every", "1", "--host-memory", "1MiB", "--folder", "little")
    assert done.status == 0, done.err
    assert sorted(int(path.name) for path in (tmp_path / "little" / "checkpoints").iterdir()) == [3, 4]
    assert done.out.count("while training waited") == 4
    assert done.out.count("has no room for a copy of the state (--host-memory)") == 1


def test_a_timeline_is_written_drawn_and_summed_up(anyfit: Command, tmp_path: Path) -> None:
    small = ("--batch", "1", "--seq", "32", "--dtype", "fp32")
    done = anyfit("fit", *small, "--steps", "7", "--device-memory", "6MiB", "--folder", "run", "--timeline", "run.json")
    assert (done.status, done.err) == (0, "")
    recorded = timeline.read(tmp_path / "run.json")
    assert {"compute", "downloads", "host updates"} < set(recorded.busy)
    assert ElementTree.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")
    assert "compute stood still" in done.out
    done = anyfit("fit", *small, "--steps", "2", "--folder", "short", "--timeline", "short.json")
    assert "no timeline: it is of step 4 and later, and the run made 2" in done.out
    assert not (tmp_path / "short.json").exists()


def test_a_job_can_be_named_by_its_module(anyfit: Command) -> None:
    assert anyfit("plan", "jobs:job", "--machine", "small.json").status == 0


# ---------------------------------------------------------------------- what the user can mend


MENDABLE = [
    (("plan", "nothing"), "'nothing' is no folder here, and no size or model type that is known; give a Hugging Face folder ("),
    (("plan", "no_such_module:job"), "No module named 'no_such_module'"),
    (("plan", "no_such_file.py:job"), "no file no_such_file.py"),
    (("plan", "jobs.py:jib"), "jobs.py has no 'jib'"),
    (("plan", "jobs.py:number"), "jobs.py:number gave int, not an anyfit.Job"),
    (("plan", "jobs.py:mistyped"), "Job(loss=) must be callable, got NoneType None; pass a function"),
    (("plan", *SMALL, "--batch", "8"), "--batch is not for functions; jobs.py:job decides it in the Job it returns"),
    (("plan", *SMALL, "--optimizer", "sgd"), "--optimizer is not for functions; jobs.py:job decides it in the Job it returns"),
    (("plan", "jobs.py"), "jobs.py is a file; name the function in it that returns a Job: jobs.py:job"),
    (("plan", "gpt2-smal"), "'gpt2-smal' is no folder here, and no size or model type that is known; did you mean 'gpt2-small'"),
    (
        ("plan", "qwen3-0.6b"),
        "'qwen3-0.6b' is no folder here, and no size or model type that is known; fetch it (hf download ORGANISATION/MODEL "
        "--local-dir qwen3-0.6b), or did you mean 'qwen3'?",
    ),
    (("plan", "folder/config.json"), "no file folder/config.json"),
    (
        ("plan", "demo", "--machine", "a100"),
        "no machine file or preset 'a100'; did you mean 'a100-40' or 'a100-80' or 'a100-node'?",
    ),
    (("plan", "."), ". has no config.json; a Hugging Face folder holds config.json, weights as safetensors and a tokenizer: hf "),
    (("plan", "demo", "--optimizer", "adamv"), "--optimizer adamv: torch.optim has none of that name; did you mean 'adam"),
    (("plan", "bert", "--seq", "513"), "--seq 513 is more than the 512 positions of BertConfig; --seq 512 fits"),
    (("plan", "vit", "--seq", "16"), "--seq is for models of text, and ViTConfig reads images"),
    (("plan", *SMALL, "--gpus", "2"), "--gpus 2: 'small' has no GPU; name a machine that has"),
    (("plan", "--machine", "h20"), "no machine file or preset 'h20'; did you mean 'h200'?"),
    (("plan", "--machine", "file"), "file: not JSON"),
    (("plan", "--machine", "."), "cannot read the machine file .: Is a directory"),
    (("plan", "jobs.py:job", "--host-memory", "900TiB"), "a limit of 900 TiB where "),
    (("plan", *SMALL, "--host-memory", "lots"), "--host-memory lots: 'lots' is not a size; write it like 24GiB"),
    (("plan", *SMALL, "--device-memory", "-1GiB"), "--device-memory -1GiB: '-1GiB' is not a size; write it like 24GiB"),
    (("fit", "--host-memory", "0"), "--host-memory 0: give more than nothing, such as 24GiB"),
    (("fit", "--hang-seconds", "inf"), "--hang-seconds inf: give a number of seconds, such as 600"),
    (("export", ".", "out", "--shard-size", "-5GB"), "--shard-size -5GB: '-5GB' is not a size"),
    (("plan", *SMALL, "-o", "file/plan.json"), "cannot write file/plan.json: its folder is a file"),
    (
        ("plan", "no-such-model", "--machine", "small.json", "--dtype", "fp16"),  # before the model is looked for
        "--dtype fp16: bf16 or fp32 today",
    ),
    (("fit", "--dtype", "fp16"), "--dtype fp16: bf16 or fp32 today"),
    (("plan", *SMALL, "--lora", "4"), "--lora is not for functions; jobs.py:job decides it in the Job it returns"),
    (("plan", "demo", "--machine", "small.json", "--lora", "4"), "--lora is for Hugging Face models, and the demo is none"),
    (("plan", "demo", "--machine", "small.json", "--what-if", "dtype=fp16"), "--what-if dtype=fp16: bf16 or fp32 today"),
    (("plan", "demo", "--machine", "small.json", "--what-if", "optimizer=sdg"), "--optimizer sdg: torch.optim has none of that"),
    (("plan", "no-such-model", "-o", "."), "cannot write .: it is a folder"),
    (("probe", "--forget", "-o", "machine.json"), "--forget measures no machine that could be written; leave --output out"),
    (("check", "jobs.py:job", "--plan", "nothing.json"), "no plan file at nothing.json"),
    (("why", "nothing.json"), "no plan file at nothing.json"),
    (("why", "plan.json", "updates"), "the plan has no decision 'updates'; it has: model state, micro-batch"),
    (("why", "plan.json", "nothing.json"), "no plan file at nothing.json"),
    (("plan", *SMALL, "--what-if", "device-memry=1GiB"), "--what-if device-memry=1GiB: unknown key 'device-memry'; did you mean"),
    (("plan", *SMALL, "--what-if", "device-memory"), "--what-if device-memory: write it like device-memory=40GiB"),
    (("plan", *SMALL, "--what-if", "host-memory=much"), "--what-if host-memory=much: 'much' is not a size"),
    (("plan", *SMALL, "--what-if", "batch=0"), "--what-if batch=0: give a whole number from 1 up"),
    (("plan", *SMALL, "--what-if", "seq=1.5"), "--what-if seq=1.5: give a whole number from 1 up"),
    (("plan", *SMALL, "--what-if", "batch=2", "--what-if", "batch=2"), "--what-if batch=2 is given twice"),
    (("plan", *SMALL, "--what-if", "batch=2"), "--what-if batch=2: --batch is not for functions"),
    (("plan", *SMALL, "--what-if", "machine=h20"), "no machine file or preset 'h20'; did you mean 'h200'?"),
    (("plan", *SMALL, "--compare", "l4", "--tokens", "1B"), "--compare plans for each machine it names; leave --machine out"),
    (("plan", "jobs.py:job", "--compare", "l4,h200"), "--compare ranks machines by the time to train on so many tokens; say how"),
    (("plan", "jobs.py:job", "--compare", "l4,,h200", "--tokens", "1B"), "--compare 'l4,,h200': write machines with commas"),
    (("plan", "jobs.py:job", "--compare", "l4,l4", "--tokens", "1B"), "--compare l4,l4: l4 is given twice"),
    (("plan", "jobs.py:job", "--compare", "l4,h20", "--tokens", "1B"), "no machine file or preset 'h20'; did you mean 'h200'?"),
    (("plan", "jobs.py:job", "--compare", "l4", "--tokens", "many"), "--tokens many: 'many' is not a count; write it like 500M"),
    (("plan", "jobs.py:job", "--compare", "l4", "--tokens", "0"), "--tokens 0: give at least one"),
    (("plan", "jobs.py:job", "--tokens", "1B"), "--tokens is for --compare; name the machines"),
    (("plan", "jobs.py:job", "--price", "l4=1"), "--price is for --compare; name the machines"),
    (("plan", "jobs.py:job", "--compare", "l4", "--tokens", "1B", "--price", "l4"), "--price l4: write it like l4=2.5"),
    (
        ("plan", "jobs.py:job", "--compare", "l4", "--tokens", "1B", "--price", "l5=1"),
        "--price l5=1: 'l5' is not compared; known: l4",
    ),
    (("plan", "jobs.py:job", "--compare", "l4", "--tokens", "1B", "--price", "l4=0"), "--price l4=0: '0' is no price"),
    (("plan", "jobs.py:job", "--compare", "l4", "--tokens", "1B", "--price", "l4=-1"), "--price l4=-1: '-1' is no price"),
    (
        ("plan", "jobs.py:job", "--compare", "l4", "--tokens", "1B", "--price", "l4=1,l4=2"),
        "--price l4=1,l4=2: l4 is given twice",
    ),
    (("why", "small.json"), "small.json: not an anyfit plan (its 'anyfit' key says 'machine')"),
    (
        ("fit", "--steps", "5", "jobs.py"),
        "--steps is an option of the demo; give your script its own arguments after its name",
    ),
    (("fit", "--mesh", "tensors=2"), "--mesh tensors=2: unknown axis 'tensors'; did you mean 'tensor'?"),
    (("fit", "--mesh", "tensor=2"), "mesh tensor=2: it does not divide the 1 ranks; the nearest that fits is data=1,tensor=1"),
    (
        ("fit", "--mesh", "tensor=2", "--plan", "a.json"),
        "--plan has its mesh and layout; leave --mesh and --layout out",
    ),
    (
        ("plan", "demo", "--mesh", "pipeline=2", "--what-if", "batch=16"),
        "--mesh pipeline=2: plans with a pipeline are made one at a time; leave --what-if out",
    ),
    (
        ("plan", "demo", "--micro-batch", "2", "--compare", "l4", "--tokens", "1B"),
        "micro-batch 2: forced plans are made one at a time; leave --compare out",
    ),
    (("plan", "demo", "--schedule", "gpipe"), "schedule 'gpipe' is not known; known: 1f1b, interleaved"),
    (
        ("plan", "demo", "--schedule", "1f1b"),
        "schedule 1f1b: stages are along a pipeline axis; ask for one, --mesh pipeline=2",
    ),
    (("plan", "demo", "--shard", "all=x"), "--shard all=x: write over how many ranks as in --shard all=8"),
    (("fit", ".", "--mesh", "pipeline=2"), "--mesh pipeline=2: a folder's samples are written by the whole model"),
    (("fit", "no_such_script.py"), "no script no_such_script.py"),
    (("fit", "--resume", "nothing"), "no run folder nothing to resume"),
    (("fit", "--device-memory", "24"), "--device-memory 24: that is 24 bytes; did you mean 24GiB?"),
    (("fit", "--resume", "."), "no run to resume in .: it has no run.json"),
    (("fit", "--resume", ".", "--folder", "new"), "--resume goes on in its own folder; leave --folder out"),
    (("fit", "--resume", ".", "--steps", "9"), "a resumed run keeps its options; leave --steps out"),
    (("fit", "--resume", ".", "--deterministic"), "a resumed run keeps its options; leave --deterministic out"),
    (("fit", "--timeline", "run.svg"), "--timeline run.svg: name a .json file; its picture is written beside it, as .svg"),
    (("fit", "--timeline", "no/run.json"), "--timeline no/run.json: no is no folder that can be written to"),
    (("fit", "--folder", "file"), "cannot write to the run folder file: File exists; choose another --folder"),
    (("fit", "--folder", "file/new"), "cannot write to the run folder file/new: Not a directory"),
    (("export", "nothing", "out"), "no checkpoint at nothing"),
    (("export", ".", "out"), ". is not an anyfit checkpoint: it has no manifest.json"),
    (("export", ".", "out.safetensors"), "out.safetensors is to be a folder, with the safetensors in it; try out"),
    (("export", ".", "out", "--dtype", "fp16"), "--dtype fp16: bf16 or fp32 today"),
]


@pytest.mark.parametrize(("arguments", "says"), MENDABLE, ids=[" ".join(arguments) for arguments, _ in MENDABLE])
def test_what_the_user_can_mend_is_one_line_and_status_2(anyfit: Command, arguments: tuple[str, ...], says: str) -> None:
    done = anyfit(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith(f"anyfit: {says}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "--batch", "-1"), "'--batch': give 1 or more"),
        (("profile", "--seq", "0"), "'--seq': give 1 or more"),
        (("plan", "--gpus", "0"), "'--gpus': give 1 or more"),
        (("fit", "--steps", "-5"), "'--steps': give 1 or more"),
        (("fit", "--ranks", "0"), "'--ranks': give 1 or more"),
        (("fit", "--lora", "0"), "'--lora': give 1 or more"),
        (("fit", "--epochs", "-1"), "'--epochs': give 1 or more"),
        (("fit", "--epochs", "0.5"), "'--epochs': give a whole number"),
        (("fit", "--lr", "much"), "'--lr': give a number"),
        (("check", "--steps", "x"), "'--steps': give a whole number"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_the_name_of_its_option(
    anyfit: Command, arguments: tuple[str, ...], says: str
) -> None:
    done = anyfit(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.endswith(f"Invalid value for {says}\n")


@pytest.mark.parametrize(
    ("arguments", "kind", "status"),
    [
        (("plan", "nothing"), "ValueError", 2),
        (("plan", "--batch", "-1"), "BadParameter", 2),
        (("plan", "--no-such-option"), "NoSuchOption", 2),
        (("plan", *SMALL, "--device-memory", "1kB"), "NoPlan", 3),
        (("profile", "jobs.py:mistyped"), "TypeError", 2),
        (("why", "nothing.json"), "FileNotFoundError", 2),
        (("why", "small.json"), "ValueError", 2),
        (("probe", "-o", "file/machine.json"), "OSError", 2),
        (("check", "jobs.py:jib"), "ValueError", 2),
    ],
)
def test_an_error_is_a_json_object_where_json_is_asked_for(
    anyfit: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], kind: str, status: int
) -> None:
    monkeypatch.setattr("anyfit.probing.cache.remeasured", lambda *_: small_machine())
    done = anyfit(*arguments, "--json")
    said = json.loads(done.out)
    assert done.status == status
    assert said["error"] == kind
    assert said["message"] in done.err
    if kind == "NoPlan":
        assert said["shortfall_bytes"] > 0
        assert said["tier"] == "device"
        assert said["changes"]
        assert all(change["what"] in done.err and change["step_seconds"] > 0 for change in said["changes"])


def test_an_answer_that_nothing_fits_is_the_only_json(anyfit: Command) -> None:
    done = anyfit("plan", *SMALL, "--device-memory", "1kB", "--what-if", "device-memory=64kB", "--json")
    assert done.status == 3
    assert json.loads(done.out)["plan"]["shortfall_bytes"] > 0


def test_an_error_in_a_users_own_code_is_a_json_object_too(anyfit: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError):
        anyfit("plan", "jobs.py:broken", "--json")
    assert json.loads(capsys.readouterr().out) == {"error": "KeyError", "message": "'a key of mine'"}


def test_a_model_that_cannot_be_traced_is_one_line_that_names_its_own(anyfit: Command, tmp_path: Path) -> None:
    done = anyfit("plan", "jobs.py:curious", "--machine", "small.json", "--no-real-run")
    line = JOBS[: JOBS.index("return super().forward(x) * x.sum().item()")].count("\n") + 1
    assert done.status == 2
    assert done.err.startswith(
        f"anyfit: {tmp_path}/jobs.py:{line}, in forward: `return super().forward(x) * x.sum().item()` needs the value"
    )
    assert done.err.count("\n") == 1
    assert done.err.endswith("or let it be run for real on the CPU, with Job(real_run=True) or --real-run\n")


@pytest.mark.parametrize("option", ["--real-run", None])
def test_a_small_model_that_needs_values_is_traced_by_a_real_run(anyfit: Command, option: str | None) -> None:
    asked = ("jobs.py:curious", "--machine", "small.json", *([] if option is None else [option]))
    plan = Plan.from_json(json.loads(anyfit("plan", *asked, "--json").out))
    assert plan.decision("trace").choice == "a real run"
    assert "a real run: on the CPU, with the values of Job(sample=)" in anyfit("profile", *asked).out
    assert "a real run: on the CPU" in anyfit("plan", *asked).out


def test_a_kind_of_model_that_may_be_meant_as_a_folder_is_said_to_be_a_default(anyfit: Command, tmp_path: Path) -> None:
    (tmp_path / "my-gpt2").mkdir()
    (tmp_path / "my-gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}')
    asked = ("--machine", "h200", "--batch", "1", "--seq", "8", "--json")
    assert anyfit("plan", "gpt2", *asked).err == (
        "gpt2 is no folder here: this is about the default GPT2Config of transformers; for another model, name its folder or "
        "config.json, such as my-gpt2\n"
    )
    assert anyfit("plan", "my-gpt2", *asked).err == ""
    assert anyfit("profile", "gpt2-small", *asked).err == ""


MISTYPED = [
    (("fit", "--machine", "a100"), "--machine; leave it out: a run is on this machine, and anyfit plan is for any"),
    (("plan", "--devise-memory", "1GiB"), "No such option: --devise-memory"),
    (("plan", "--batch-size", "4"), "No such option: --batch-size; it is --batch here (samples a step, of all GPUs together"),
    (("fit", "--learning-rate", "4"), "No such option: --learning-rate; it is --lr here"),
    (("fit", "--save_every", "4"), "No such option: --save_every; it is --save-every here"),
    (("fit", "--num-train-epochs=4"), "No such option: --num-train-epochs; it is --epochs here"),
    (("fit", "--gradient-accumulation-steps", "4"), "leave it out: the plan decides that"),
    (("fit", "--lora_alpha", "4"), "leave it out: --lora adapts every linear layer, with an alpha of twice its rank"),
    (("paln",), "No such command 'paln'"),
    (("plan", "demo", "--batch", "many"), "Invalid value for '--batch'"),
    (("plan", "demo", "--batch", "0"), "Invalid value for '--batch'"),
    (("plan", "demo", "--seq", "-1"), "Invalid value for '--seq'"),
    (("fit", "--steps", "0"), "Invalid value for '--steps'"),
    (("check", "demo", "--steps", "2"), "Invalid value for '--steps'"),
    (("why",), "Missing argument"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTYPED, ids=[" ".join(arguments) for arguments, _ in MISTYPED])
def test_what_was_typed_wrong_is_said_with_where_to_find_help(anyfit: Command, arguments: tuple[str, ...], says: str) -> None:
    done = anyfit(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert says in done.err
    assert "--help" in done.err
    assert "Traceback" not in done.err


def test_what_other_tools_call_an_option_leads_to_one_that_fit_has() -> None:
    ours = {name for each in get_command(cli.app).commands["fit"].params for name in each.opts}  # type: ignore[attr-defined]
    theirs = [name for names in (*ELSEWHERE.values(), *NEEDLESS.values()) for name in names]
    assert set(ELSEWHERE) <= ours
    assert len(set(theirs)) == len(theirs)
    assert not ours & {f"--{name}" for name in theirs}


@pytest.mark.parametrize("content", ["{", '{"steps": 3}'])
def test_a_damaged_run_folder_is_one_line_that_names_the_file(anyfit: Command, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    done = anyfit("fit", "--resume", ".")
    assert done.status == 2
    assert done.err.startswith("anyfit: ")
    assert done.err.count("\n") == 1
    assert "run.json" in done.err


def test_a_command_that_fails_leaves_no_run_folder_behind(anyfit: Command, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for arguments in (("--steps", "5", "jobs.py"), ("no_such_script.py",), ("--resume", "nothing")):
        assert anyfit("fit", *arguments).status == 2
    assert sorted(tmp_path.iterdir()) == before


def test_when_nothing_fits_the_verdict_says_what_would_and_status_is_3(anyfit: Command) -> None:
    done = anyfit("plan", *SMALL, "--device-memory", "1kB")
    assert (done.status, done.out) == (3, "")
    first, *changes = done.err.splitlines()
    assert first.startswith("anyfit: Sequential (81 parameters, AdamW, batch 4) does not fit: it needs ")
    assert " of memory in micro-batches of 1 (" in first
    assert ", the limit is 1000 B: " in first
    (typed,) = re.findall(r"^  --device-memory (\S+): ", "\n".join(changes), re.MULTILINE)
    assert anyfit("plan", *SMALL, "--device-memory", typed).status == 0


@pytest.mark.parametrize("change", [(), ("--what-if", "device-memory=64kB")])
def test_a_plan_that_is_not_made_is_not_written_and_that_is_said(
    anyfit: Command, tmp_path: Path, change: tuple[str, ...]
) -> None:
    done = anyfit("plan", *SMALL, "--device-memory", "1kB", "-o", "new.json", *change)
    assert done.status == 3
    assert done.err.startswith("nothing is written to new.json: there is no plan\nanyfit: Sequential ")
    assert not (tmp_path / "new.json").exists()


def test_steps_that_are_not_plain_pytorchs_are_shown_and_the_status_says_so(
    anyfit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubtful(Run):
        def step(self, batch: Any) -> Tensor:
            return 2 * super().step(batch)

    monkeypatch.setattr("anyfit.running.parity.Run", Doubtful)
    done = anyfit("check", "jobs.py:job", "--steps", "3")
    assert done.status == 2
    assert "2 steps of the whole model" in done.out
    assert done.err == "anyfit: the steps differ from plain PyTorch's by more than rounding explains\n"


# ---------------------------------------------------------------------- when memory ends

GREEDY = """
import anyfit, torch
from torch import nn

class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        hungry = x.repeat(HUNGER, 1)
        return self.inner(hungry)[: len(x)]

HUNGER = 1
job = anyfit.Job(
    model=Greedy, loss=lambda model, batch: model(batch).square().mean(), precision="fp32",
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), sample=torch.ones(4, 8), batch_size=4,
)
run = anyfit.start(job, PLAN)
HUNGER = 2**20
run.step(torch.ones(4, 8))
"""


@pytest.mark.parametrize("plan", ["None", "anyfit.plan(job, anyfit.probe().with_limits('1MiB'))"])
def test_a_run_that_has_no_memory_left_says_so_without_a_traceback(anyfit: Command, tmp_path: Path, plan: str) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY.replace("PLAN", plan))
    done = anyfit("fit", "--device-memory", "1MiB", "greedy.py")
    assert done.status == 2
    assert done.err.startswith("anyfit: ")
    assert re.search(r"of memory are needed .* and 1.00 MiB are allowed", done.err)
    assert "Traceback" not in done.err


def test_memory_that_the_users_own_code_lacks_keeps_its_traceback(anyfit: Command, tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("raise MemoryError('mine')")
    with pytest.raises(MemoryError, match="mine"):
        anyfit("fit", "large.py")


# ---------------------------------------------------------------------- what is the user's own


def test_an_error_in_the_users_function_keeps_its_traceback(tmp_path: Path, root: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    for function, error in (("broken", "KeyError: 'a key of mine'"), ("misled", "ValueError: a mistake of mine")):
        done = subprocess.run(
            [sys.executable, "-m", "anyfit", "plan", f"{tmp_path}/jobs.py:{function}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=root,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("Traceback")
        assert f'jobs.py", line {JOBS[: JOBS.index(f"def {function}")].count(chr(10)) + 2}, in {function}' in done.stderr
        assert error in done.stderr


def test_an_error_of_the_users_model_says_what_anyfit_was_doing(anyfit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["anyfit", "plan", "jobs.py:rejecting", "--machine", "small.json"])
    with pytest.raises(RuntimeError, match="9") as error:
        cli.main()
    assert any("anyfit was running the model on a fake batch" in note for note in error.value.__notes__)


def test_a_missing_import_of_the_users_keeps_its_traceback(
    anyfit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text("import no_such_module")
    monkeypatch.setattr(sys, "argv", ["anyfit", "plan", "careless.py:job"])
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main()


def test_a_run_that_is_stopped_before_its_first_step_says_that_there_is_nothing_to_save(
    anyfit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyfit.demo.job", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    ended = anyfit("fit", "--steps", "2")
    assert ended.status == 130
    assert "anyfit: stopped before the first step: nothing to save; the same command begins anew" in ended.err
