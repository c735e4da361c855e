"""The CPU run without an engine: bad input ends it in one line, a signal leaves nothing running, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cpu import options, problems, report, servers, storage
from cpu_helpers import (
    EXAMPLE,
    assert_ended,
    descendants,
    fake_model,
    finish,
    group_of,
    problem_file,
    start,
    the_error,
    wait_for,
)
from retool.processes import free_ports
from scripted import ScriptedEngine, Turn
from tool_sandbox import tool_registry

# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "What is 2 + 2?", "label": "4"}


@pytest.mark.parametrize(
    "rows, said",
    [
        ([GOOD, {"label": "4"}], ":2: \"prompt\" must be a text or a list of messages (the row has 'label')"),
        ([{"prompt": "", "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": 7, "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": ["x"], "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": [], "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": "x"}], ":1: \"label\" must be the answer, a text or a number (the row has 'prompt')"),
        ([{"prompt": "x", "label": None}], ':1: "label" must be'),
        ([{"prompt": "x", "label": " "}], ':1: "label" must be'),
        ([{"prompt": "x", "label": True}], ':1: "label" must be'),
        ([{"prompt": "x", "label": ["4"]}], ':1: "label" must be'),
        (["[1, 2]\n"], ":1: a row must be a JSON object"),
        ([GOOD, "{'prompt': 1}\n"], ":2: this line is not JSON"),
        (["[" * 100_000], ":1: this line is not JSON"),
        ([], "is empty"),
        ([" \n\n"], "is empty"),
    ],
)
def test_a_bad_problem_file_is_named_with_its_line(tmp_path, rows, said):
    path = problem_file(tmp_path, *rows)
    with pytest.raises(options.RunError) as caught:
        problems.read_problems(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_problem_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "label": "1"}\n')
    with pytest.raises(options.RunError, match="is not UTF-8 text"):
        problems.read_problems(path)


def test_problems_are_read_as_vime_reads_them(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "line\u2028separator"}]
    rows = [GOOD, {"prompt": turns, "label": 25, "more": 1}, {"prompt": "x", "label": 0.5}]
    path = problem_file(tmp_path, *rows)
    assert problems.read_problems(path) == [problems.Problem(row["prompt"], row["label"]) for row in rows]
    assert len(problems.read_problems(path, limit=2)) == 2
    assert problems.read_problems(path)[1].question == "line\u2028separator"


def test_a_missing_problem_file_ends_the_run(tmp_path):
    error = the_error(finish(start(tmp_path, "--problems", tmp_path / "none.jsonl")))
    assert "none.jsonl: No such file or directory" in error
    assert not list(tmp_path.iterdir()), "nothing was started, so nothing is left"


def test_a_bad_row_ends_the_run(tmp_path):
    error = the_error(finish(start(tmp_path, "--problems", problem_file(tmp_path, GOOD, {"prompt": "x"}))))
    assert "problems.jsonl:2" in error and "label" in error


def test_a_vime_root_without_vime_ends_the_run(tmp_path):
    error = the_error(finish(start(tmp_path, VIME_ROOT=str(tmp_path))))
    assert f"VIME_ROOT={tmp_path} is no vime checkout" in error


@pytest.mark.parametrize("option", ["--limit", "--samples", "--max-tokens"])
@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_a_count_must_be_a_positive_number(tmp_path, option, value):
    done = finish(start(tmp_path, option, value))
    assert done.code == 2 and option in done.err and "Traceback" not in done.err


def test_an_output_that_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    error = the_error(finish(start(tmp_path, "--output", tmp_path / "file" / "x")))
    assert "cannot make the folder" in error and "--output" in error


def test_a_disk_without_room_ends_the_run(tmp_path):
    with pytest.raises(options.RunError, match=r"MB free and \d+ MB are needed; name another with --output"):
        storage.make_folder(tmp_path, 1 << 40, "--output")


def test_an_engine_that_is_down_ends_the_run(tmp_path):
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    error = the_error(finish(start(tmp_path, "--engine", url)))
    assert f"no vLLM engine answers at {url}" in error and "--enable-scale-out" in error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://"])
def test_an_engine_that_vime_could_not_talk_to_ends_the_run(url):
    with pytest.raises(options.RunError, match="vime talks to http://HOST:PORT"):
        servers.ask_engine(url, None)


def test_a_model_folder_without_a_model_ends_the_run(tmp_path):
    assert "is no model directory" in the_error(finish(start(tmp_path, "--model", tmp_path)))


def test_a_port_in_use_ends_the_run(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("RETOOL_CACHE", str(tmp_path))
        monkeypatch.setattr(servers, "free_ports", lambda count: [port] * count)
        with pytest.raises(options.RunError, match=f"port {port} on 127.0.0.1, meant for vLLM, is in use"):
            servers.start_engine(fake_model(tmp_path), 1, tmp_path)
        engine = SimpleNamespace(url="http://127.0.0.1:1")
        with pytest.raises(options.RunError, match=f"port {port} on 127.0.0.1, meant for vllm-router, is in use"):
            servers.start_router(engine, tmp_path)


def test_a_server_that_dies_while_it_starts_ends_the_run(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('SomeError: no memory')"]
    server = servers.start_server("vLLM", command, free_ports(1)[0], tmp_path / "engine.log", {})
    with pytest.raises(
        options.RunError, match=r"vLLM ended while it started: SomeError: no memory \(log: .*engine\.log\)"
    ):
        servers.wait_until_healthy(server, report.progress_display())
    servers.stop_server(server)


def test_stopping_a_server_ends_its_whole_group_and_nothing_else(tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(600)"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    log = tmp_path / "server.log"
    server = servers.start_server("server", [sys.executable, "-c", parent], free_ports(1)[0], log, {})
    wait_for(lambda: "up" in log.read_text())
    assert len(group_of(server.process.pid)) == 3  # the launcher, the server and its stubborn child
    servers.stop_server(server)
    assert_ended(group_of(server.process.pid))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_run_that_is_killed_takes_its_servers_along(tmp_path):
    """The server's own process ends at once, as vLLM's does early in its start, and leaves a child that ignores it."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    killed = f"""if True:
        import sys, time
        sys.path.insert(0, {str(EXAMPLE)!r})
        from cpu import servers
        from pathlib import Path
        from retool.processes import free_ports
        servers.start_server("server", [sys.executable, "-c", {parent!r}], free_ports(1)[0], Path("server.log"), {{}})
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", killed], cwd=tmp_path)
    log = tmp_path / "server.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    left = descendants(process.pid)
    assert len(left) == 3
    process.kill()
    process.wait()
    assert_ended(left)


# ---------------------------------------------------------------------------------------------------------------------
# A scripted engine for --engine: what it does wrong is reported, and what was finished is kept
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(qwen3_tokenizer):
    """Makes an engine that plays a script and says that it serves the Qwen3 tokenizer's folder."""
    made = []

    def make(script) -> ScriptedEngine:
        engine = ScriptedEngine(script, lambda text: qwen3_tokenizer(text, add_special_tokens=False)["input_ids"])

        def do_GET(handler):
            served = {"id": os.environ["RETOOL_QWEN3_TOKENIZER"], "max_model_len": 4096}
            body = json.dumps({"data": [served]}).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)

        engine.server.RequestHandlerClass.do_GET = do_GET
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def over(engine: ScriptedEngine, folder: Path, *arguments) -> subprocess.Popen:
    rows = [{"prompt": f"What is {n} + 2?", "label": n + 2} for n in range(3)]
    fixed = ("--engine", f"http://127.0.0.1:{engine.port}", "--output", folder / "out")
    return start(folder, "--problems", problem_file(folder, *rows), *fixed, *arguments)


def right_answer(payload, index) -> Turn:
    return Turn("Answer: \\boxed{2}<|im_end|>")


def test_a_disk_that_is_full_ends_the_run(tmp_path, scripted):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "samples.jsonl").symlink_to("/dev/full")
    error = the_error(finish(over(scripted(right_answer), tmp_path)))
    assert "samples.jsonl: No space left on device" in error and "--output" in error


def test_an_engine_without_the_endpoint_ends_the_run(tmp_path, scripted):
    error = the_error(finish(over(scripted(lambda payload, index: Turn(status=403)), tmp_path)))
    assert "the rollout failed" in error and "--enable-scale-out" in error


def test_samples_lost_to_the_engine_end_the_run(tmp_path, scripted):
    error = the_error(finish(over(scripted(lambda payload, index: Turn(finish="abort")), tmp_path)))
    assert "no sample has a token to train on" in error
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [sample["status"] for sample in samples] == ["aborted"] * 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_was_finished(tmp_path, scripted, signum):
    def slow_but_for_the_first(payload, index):
        return right_answer(payload, index) if index == 0 else Turn(delay=60)

    process = over(scripted(slow_but_for_the_first), tmp_path)
    samples = tmp_path / "out" / "samples.jsonl"
    wait_for(lambda: samples.exists() and samples.read_text().endswith("\n"))
    process.send_signal(signum)
    done = finish(process, timeout=30)
    assert done.code == 128 + signum and done.err == f"stopped by {signum.name}\n"
    [sample] = [json.loads(line) for line in samples.read_text().splitlines()]
    assert sample["metadata"]["retool"]["end_reason"] == "answer"


def test_an_engine_that_serves_another_model_is_refused(tmp_path, scripted):
    error = the_error(finish(over(scripted(right_answer), tmp_path, "--model", fake_model(tmp_path))))
    assert "--served-model-name" in error


# ---------------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------------


def test_the_worked_examples_are_what_the_sandbox_says():
    async def outputs():
        calls = (tool_registry.execute_tool("code_interpreter", {"code": e.code}) for e in problems.WORKED_EXAMPLES)
        return await asyncio.gather(*calls)

    assert asyncio.run(outputs()) == [example.output for example in problems.WORKED_EXAMPLES]
    assert all(example.output == f"Output:\n{example.answer}" for example in problems.WORKED_EXAMPLES)


def test_no_worked_example_gives_a_problem_away():
    questions = {example.question for example in problems.WORKED_EXAMPLES}
    assert not questions & {problem.question for problem in problems.read_problems(options.parse_options([]).problems)}


def test_worked_examples_stand_between_the_system_message_and_the_problem():
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
    shown = problems.with_examples("q")[:-1]
    assert [message["role"] for message in shown] == ["user", "assistant"] * len(problems.WORKED_EXAMPLES)
    assert problems.with_examples([question]) == [*shown, question]
    assert problems.with_examples([system, question]) == [system, *shown, question]


def sample(**changes):
    values = dict(tokens=[5, 6, 7, 8], response_length=3, loss_mask=[1, 0, 1], rollout_log_probs=[-1.0, 0.0, -2.0])
    return SimpleNamespace(**{"remove_sample": False, **values, **changes})


@pytest.mark.parametrize(
    "agreement, samples, said",
    [
        (
            report.Agreement(0.01, 0.02, 5, 0.6),
            [sample()],
            "the mean difference of the log-probs, 1.0e-02, is over 0.001",
        ),
        (report.Agreement(float("nan"), 0.02, 5, 0.6), [sample()], "is over 0.001"),
        (report.Agreement(1e-6, 1e-5, 5, 0.6), [sample(), sample(remove_sample=True)], "1 of 2 samples were lost"),
        (None, [sample(loss_mask=[0, 0, 0])], "no sample has a token to train on"),
        (report.Agreement(1e-6, 1e-5, 5, 0.6), [sample()], None),
    ],
)
def test_the_check_fails_on_any_doubt(monkeypatch, agreement, samples, said):
    monkeypatch.setattr(report, "compare_log_probs", lambda folder, samples: agreement)
    if said is None:
        report.check(samples, "model", 0.001)
        return
    with pytest.raises(options.RunError, match=said):
        report.check(samples, "model", 0.001)
