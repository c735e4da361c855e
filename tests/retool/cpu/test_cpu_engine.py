"""The CPU run for real: vLLM, vllm-router and the packaged model, about a minute each; tests/retool/run.sh installs them."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cpu import model, options, report
from cpu_helpers import ENVIRONMENT, assert_ended, descendants, finish, start, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash tests/retool/run.sh installs it"
    ),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One short run as a user starts it, on a terminal with colours."""
    folder = tmp_path_factory.mktemp("real")
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "120"}
    process = start(folder, "--limit", 6, "--max-tokens", 320, "--output", folder / "out", **terminal)
    started: set[int] = set()
    wait_for(lambda: process.poll() is not None or started.update(descendants(process.pid)) or len(started) > 3, 600)
    done = finish(process)
    lines = (folder / "out" / "samples.jsonl").read_text().splitlines()
    return SimpleNamespace(**vars(done), started=started, samples=[json.loads(line) for line in lines])


def test_a_real_run_succeeds(real):
    assert real.code == 0, real.out + real.err
    assert len(real.samples) == 6 and {sample["index"] for sample in real.samples} == set(range(6))


def test_a_real_run_executes_a_tool_call_that_the_model_wrote(real):
    calls = [(sample, call) for sample in real.samples for call in sample["metadata"]["retool"]["calls"]]
    worked = [sample for sample, call in calls if call["outcome"] == "ok" and call["output_chars"] > 0]
    assert worked, calls
    assert any("<interpreter>\nOutput:\n" in sample["response"] for sample in worked)


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
        assert said in real.out, said
    assert "to look at them, open" in real.out and "rollouts.html" in real.out
    assert "mean difference" in real.out and "temperature 0.6" in real.out
    assert "\x1b[32m" in real.out and "\x1b[33m" in real.out, "the transcripts tell the model from the tool by colour"


def test_a_real_run_leaves_no_process(real):
    assert len(real.started) > 3
    assert_ended(real.started)


def test_log_probs_that_are_shifted_by_a_token_are_found(real):
    folder = str(model.packaged_model(Path(ENVIRONMENT["RETOOL_CACHE"])))
    samples = [SimpleNamespace(**sample) for sample in real.samples]
    assert report.compare_log_probs(folder, samples).mean < 1e-4
    for shifted in samples:
        shifted.rollout_log_probs = [0.0, *shifted.rollout_log_probs[:-1]]
    assert report.compare_log_probs(folder, samples).mean > options.parse_options([]).logprob_limit


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_while_it_starts_leaves_no_process(tmp_path, signum):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = start(tmp_path, "--output", tmp_path / "out")
    wait_for(lambda: len(descendants(process.pid)) >= 4)  # the launcher, vLLM, and what it starts in its turn
    left = descendants(process.pid)
    process.send_signal(signum)
    done = finish(process, timeout=60)
    assert done.code == (130 if signum == signal.SIGINT else -signal.SIGKILL), done.err
    assert_ended(left)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
