"""The CPU run for real: vLLM, vllm-router and the packaged model, about a minute each; tests/retool/run.sh installs
them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cpu import model, options, report
from cpu_helpers import ENVIRONMENT, EXAMPLE, finish, start, the_error
from surroundings import worst
from watching import assert_ended, descendants, group_of, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash tests/retool/run.sh installs it"
    ),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One short run as a user starts it, with colors, and a second one against the engine that it kept.

    The first one from the worst surroundings: besides, no compiler is on the PATH, and TMPDIR is longer than a
    socket's path may be.
    """
    folder = tmp_path_factory.mktemp("real")
    tmpdir = folder / ("x" * 120)
    tmpdir.mkdir()
    machine = {"PATH": str(without_compilers(folder / "bin")), "TMPDIR": str(tmpdir)}
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "140"}
    options = ("--limit", 6, "--max-tokens", 320, "--output", folder / "out", "--keep-engine")
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", EXAMPLE / "rollout_on_cpu.sh", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **worst(folder, ENVIRONMENT["RETOOL_CACHE"], **machine, **terminal),
    )
    started: set[int] = set()
    wait_for(lambda: process.poll() is not None or started.update(descendants(process.pid)) or len(started) > 3, 600)
    first = finish(process)
    took = time.monotonic() - began
    kept = re.search(r"--engine (http://\S+)\s+\(to end it: kill (\d+)\)", first.out)
    assert kept, first.out + first.err
    url, pid = kept[1], int(kept[2])
    try:
        began = time.monotonic()
        options = ("--limit", 2, "--max-tokens", 64, "--output", folder / "again", "--engine", url)
        process = start(folder, *options, **machine)
        assert process.stdout
        while (line := process.stdout.readline()) and "problems from" not in line:
            pass
        waited = time.monotonic() - began
        second = finish(process)
        shared = {name for member in group_of(pid) for name in shared_memory_of(member)}
    finally:
        started |= group_of(pid)
        os.kill(pid, signal.SIGTERM)
    return SimpleNamespace(
        first=first,
        took=took,
        second=second,
        waited=waited,
        started=started,
        tmpdir=tmpdir,
        shared=shared,
        samples=samples_in(folder / "out"),
        again=samples_in(folder / "again"),
    )


def without_compilers(folder: Path) -> Path:
    folder.mkdir()
    for path in os.environ["PATH"].split(os.pathsep):
        for program in Path(path).glob("*"):
            link = folder / program.name
            if not re.search(r"(gcc|g\+\+|c\+\+|clang|(^|-)cc|cpp)(-[\d.]+)?$", program.name) and not os.path.lexists(
                link
            ):
                link.symlink_to(program)
    assert not shutil.which("c++", path=str(folder)) and not shutil.which("gcc", path=str(folder))
    return folder


def shared_memory_of(pid: int) -> set[str]:
    return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))


def samples_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_real_run_succeeds(real):
    assert real.first.code == 0, real.first.out + real.first.err
    assert len(real.samples) == 6 and {sample["index"] for sample in real.samples} == set(range(6))


def test_a_second_run_starts_at_once_on_the_engine_that_was_kept(real):
    """It hands its samples out within a tenth of what the first run took; an engine takes half of that to start."""
    assert real.second.code == 0, real.second.out + real.second.err
    assert real.waited < real.took / 3
    first, again = ({sample["index"]: sample["prompt"] for sample in run} for run in (real.samples, real.again))
    assert again == {index: first[index] for index in range(2)}
    assert len(first[0]) > 1, "the packaged model keeps its worked examples"


def test_a_real_run_leaves_nothing_in_tmpdir_and_shared_memory(real):
    assert not list(real.tmpdir.iterdir())
    assert real.shared, "vLLM shares memory between its processes"
    wait_for(lambda: not any(map(os.path.exists, real.shared)), 30)


def test_a_real_run_executes_a_tool_call_that_the_model_wrote(real):
    calls = [(sample, call) for sample in real.samples for call in sample["metadata"]["retool"]["calls"]]
    worked = [sample for sample, call in calls if call["outcome"] == "ok" and call["output_chars"] > 0]
    assert worked, calls
    assert any("<interpreter>\n" in sample["response"] for sample in worked)


def test_a_real_run_leaves_samples_that_can_be_trained_on(real):
    for sample in real.samples:
        length = sample["response_length"]
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == length <= 320
        assert sample["status"] in ("completed", "truncated") and set(sample["reward"]) >= {"score", "acc", "pred"}
        tool = [p for p, m in zip(sample["rollout_log_probs"], sample["loss_mask"], strict=True) if not m]
        assert not any(tool)
    assert any(0 in sample["loss_mask"] for sample in real.samples), "no observation was masked"


def test_a_real_run_shows_what_happened(real):
    for said in ("vLLM is up", "vllm-router is up", "6/6", "tool calls", "tokens/s", "mean of all samples"):
        assert said in real.first.out, said
    assert "to look at them, open" in real.first.out and "rollouts.html" in real.first.out
    assert "mean difference" in real.first.out and "temperature 0.6" in real.first.out
    assert (
        "\x1b[32m" in real.first.out and "\x1b[33m" in real.first.out
    ), "the transcripts tell the model from the tool by color"


def test_a_real_run_leaves_no_process(real):
    assert len(real.started) > 3
    assert_ended(real.started)


def test_log_probs_that_are_shifted_by_a_token_are_found(real):
    folder = str(model.packaged_model(Path(ENVIRONMENT["RETOOL_CACHE"])))
    shortest = SimpleNamespace(**min(real.samples, key=lambda sample: sample["response_length"]))
    assert report.compare_log_probs(folder, [shortest]).mean < 1e-4
    shortest.rollout_log_probs = [0.0, *shortest.rollout_log_probs[:-1]]
    assert report.compare_log_probs(folder, [shortest]).mean > options.parse_options([]).logprob_limit


def test_an_engine_whose_process_is_killed_is_reported_by_that(tmp_path):
    """As the kernel does it where memory runs out; the log ends with requests and the shutdown of the rest."""
    process = start(tmp_path, "--output", tmp_path / "out")
    log = tmp_path / "out" / "engine.log"
    wait_for(lambda: log.exists() and "/inference/v1/generate HTTP" in log.read_text(), 600)
    [core] = [
        pid for pid in descendants(process.pid) if b"VLLM::EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(core, signal.SIGKILL)
    error = the_error(finish(process, timeout=120))
    assert (
        "vLLM ended during the rollout" in error
        and "engine core exited unexpectedly" in error
        and "memory runs out" in error
    )


def test_a_run_that_is_stopped_while_it_starts_leaves_no_process(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    runs = {signum: start(tmp_path, "--output", tmp_path / signum.name) for signum in (signal.SIGINT, signal.SIGKILL)}
    left: set[int] = set()
    for process in runs.values():
        wait_for(
            lambda run=process: len(descendants(run.pid)) >= 4
        )  # the launcher, vLLM, and what it starts in its turn
        left |= descendants(process.pid)
    for signum, process in runs.items():
        process.send_signal(signum)
    for signum, process in runs.items():
        done = finish(process, timeout=60)
        assert done.code == (130 if signum == signal.SIGINT else -signal.SIGKILL), done.err
    assert_ended(left)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
