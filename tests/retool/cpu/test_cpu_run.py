"""The CPU run: bad input ends it in one line, a signal leaves nothing behind, one short run is real from end to end.

The real ones start vLLM, vllm-router and the packaged model, and take about a minute each; tests/retool/run.sh installs them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import run
from scripted import ScriptedEngine, Turn
from tool_sandbox import tool_registry

SCRIPT = Path(run.__file__)
needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: bash tests/retool/run.sh installs it"
)


def start(folder: Path, *options, **environment) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, options)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 600) -> SimpleNamespace:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return SimpleNamespace(code=process.returncode, out=out, err=err)


def the_error(done: SimpleNamespace) -> str:
    """The one line on stderr of a run that failed."""
    assert done.code == 1, (done.out, done.err)
    lines = done.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    return lines[0]


def problem_file(folder: Path, *rows) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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
    with pytest.raises(run.RunError) as caught:
        run.read_problems(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_problem_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "label": "1"}\n')
    with pytest.raises(run.RunError, match="is not UTF-8 text"):
        run.read_problems(path)


def test_problems_are_read_as_vime_reads_them(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "line\u2028separator"}]
    rows = [GOOD, {"prompt": turns, "label": 25, "more": 1}, {"prompt": "x", "label": 0.5}]
    path = problem_file(tmp_path, *rows)
    assert run.read_problems(path) == [run.Problem(row["prompt"], row["label"]) for row in rows]
    assert len(run.read_problems(path, limit=2)) == 2
    assert run.read_problems(path)[1].question == "line\u2028separator"


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
    with pytest.raises(run.RunError, match=r"MB free and \d+ MB are needed; name another with --output"):
        run.make_folder(tmp_path, 1 << 40, "--output")


def test_an_engine_that_is_down_ends_the_run(tmp_path):
    url = f"http://127.0.0.1:{run.free_port()}"
    error = the_error(finish(start(tmp_path, "--engine", url)))
    assert f"no vLLM engine answers at {url}" in error and "--enable-scale-out" in error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://"])
def test_an_engine_that_vime_could_not_talk_to_ends_the_run(url):
    with pytest.raises(run.RunError, match="vime talks to http://HOST:PORT"):
        run.ask_engine(url, None)


def test_a_model_folder_without_a_model_ends_the_run(tmp_path):
    assert "is no model directory" in the_error(finish(start(tmp_path, "--model", tmp_path)))


def test_a_port_in_use_ends_the_run(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(run, "free_port", lambda: port)
        with pytest.raises(run.RunError, match=f"port {port} on 127.0.0.1, meant for vLLM, is in use"):
            run.start_engine(fake_model(tmp_path), 1, tmp_path)
        engine = SimpleNamespace(url="http://127.0.0.1:1")
        with pytest.raises(run.RunError, match=f"port {port} on 127.0.0.1, meant for vllm-router, is in use"):
            run.start_router(engine, tmp_path)


def fake_model(folder: Path) -> Path:
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder


def test_a_server_that_dies_while_it_starts_ends_the_run(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('SomeError: no memory')"]
    server = run.start_server("vLLM", command, run.free_port(), tmp_path / "engine.log", {})
    with pytest.raises(
        run.RunError, match=r"vLLM ended while it started: SomeError: no memory \(log: .*engine\.log\)"
    ):
        run.wait_until_healthy(server, run.progress_display())
    run.stop_server(server)


def test_stopping_a_server_ends_its_whole_group_and_nothing_else(tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(600)"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    log = tmp_path / "server.log"
    server = run.start_server("server", [sys.executable, "-c", parent], run.free_port(), log, {})
    wait_for(lambda: "up" in log.read_text())
    assert len(group_of(server.process.pid)) == 3  # the launcher, the server and its stubborn child
    run.stop_server(server)
    assert_gone(group_of(server.process.pid))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_run_that_is_killed_takes_its_servers_along(tmp_path):
    """The server's own process ends at once, as vLLM's does early in its start, and leaves a child that ignores it."""
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    killed = f"""if True:
        import sys, time
        sys.path.insert(0, {str(SCRIPT.parent)!r})
        import run
        from pathlib import Path
        run.start_server("server", [sys.executable, "-c", {parent!r}], run.free_port(), Path("server.log"), {{}})
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", killed], cwd=tmp_path)
    log = tmp_path / "server.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    left = descendants(process.pid)
    assert len(left) == 3
    process.kill()
    process.wait()
    assert_gone(left)


# ---------------------------------------------------------------------------------------------------------------------
# An engine of our own making behind --engine: what it does wrong is reported, and what was finished is kept
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


def over(engine: ScriptedEngine, folder: Path, *options) -> subprocess.Popen:
    rows = [{"prompt": f"What is {n} + 2?", "label": n + 2} for n in range(3)]
    fixed = ("--engine", f"http://127.0.0.1:{engine.port}", "--output", folder / "out")
    return start(folder, "--problems", problem_file(folder, *rows), *fixed, *options)


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
        calls = (tool_registry.execute_tool("code_interpreter", {"code": e.code}) for e in run.WORKED_EXAMPLES)
        return await asyncio.gather(*calls)

    assert asyncio.run(outputs()) == [example.output for example in run.WORKED_EXAMPLES]
    assert all(example.output == f"Output:\n{example.answer}" for example in run.WORKED_EXAMPLES)


def test_no_worked_example_gives_a_problem_away():
    questions = {example.question for example in run.WORKED_EXAMPLES}
    assert not questions & {problem.question for problem in run.read_problems(SCRIPT.with_name("problems.jsonl"))}


def test_worked_examples_stand_between_the_system_message_and_the_problem():
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
    shown = run.with_examples("q")[:-1]
    assert [message["role"] for message in shown] == ["user", "assistant"] * len(run.WORKED_EXAMPLES)
    assert run.with_examples([question]) == [*shown, question]
    assert run.with_examples([system, question]) == [system, *shown, question]


def sample(**changes):
    values = dict(tokens=[5, 6, 7, 8], response_length=3, loss_mask=[1, 0, 1], rollout_log_probs=[-1.0, 0.0, -2.0])
    return SimpleNamespace(**{"remove_sample": False, **values, **changes})


@pytest.mark.parametrize(
    "agreement, samples, said",
    [
        (
            run.Agreement(0.01, 0.02, 5, 0.6),
            [sample()],
            "the mean difference of the log-probs, 1.0e-02, is over 0.001",
        ),
        (run.Agreement(float("nan"), 0.02, 5, 0.6), [sample()], "is over 0.001"),
        (run.Agreement(1e-6, 1e-5, 5, 0.6), [sample(), sample(remove_sample=True)], "1 of 2 samples were lost"),
        (None, [sample(loss_mask=[0, 0, 0])], "no sample has a token to train on"),
        (run.Agreement(1e-6, 1e-5, 5, 0.6), [sample()], None),
    ],
)
def test_the_check_fails_on_any_doubt(monkeypatch, agreement, samples, said):
    monkeypatch.setattr(run, "compare_log_probs", lambda model, samples: agreement)
    engine = run.Engine("model", 4096, "127.0.0.1", 1)
    if said is None:
        run.check(samples, engine, 0.001)
        return
    with pytest.raises(run.RunError, match=said):
        run.check(samples, engine, 0.001)


# ---------------------------------------------------------------------------------------------------------------------
# The real thing
# ---------------------------------------------------------------------------------------------------------------------


def wait_for(condition, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.1)


def processes() -> dict[int, tuple[int, int]]:
    """(parent, group) of every process that is not a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if state != "Z":
                found[int(entry.name)] = (int(parent), int(group))
    return found


def group_of(group: int) -> set[int]:
    return {pid for pid, (_, its_group) in processes().items() if its_group == group}


def descendants(root: int) -> set[int]:
    table, found = processes(), {root}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found - {root}


def assert_gone(pids: set[int]) -> None:
    wait_for(lambda: not pids & processes().keys(), timeout=30)


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


@pytest.mark.engine
@needs_engine
def test_a_real_run_succeeds(real):
    assert real.code == 0, real.out + real.err
    assert len(real.samples) == 6 and {sample["index"] for sample in real.samples} == set(range(6))


@pytest.mark.engine
@needs_engine
def test_a_real_run_executes_a_tool_call_that_the_model_wrote(real):
    calls = [(sample, call) for sample in real.samples for call in sample["metadata"]["retool"]["calls"]]
    worked = [sample for sample, call in calls if call["outcome"] == "ok" and call["output_chars"] > 0]
    assert worked, calls
    assert any("<interpreter>\nOutput:\n" in sample["response"] for sample in worked)


@pytest.mark.engine
@needs_engine
def test_a_real_run_leaves_samples_that_can_be_trained_on(real):
    for sample in real.samples:
        length = sample["response_length"]
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == length <= 320
        assert sample["status"] in ("completed", "truncated") and set(sample["reward"]) >= {"score", "acc", "pred"}
        tool = [p for p, m in zip(sample["rollout_log_probs"], sample["loss_mask"], strict=True) if not m]
        assert not any(tool)
    assert any(0 in sample["loss_mask"] for sample in real.samples), "no observation was masked"


@pytest.mark.engine
@needs_engine
def test_a_real_run_shows_what_happened(real):
    for said in ("vLLM is up", "vllm-router is up", "6/6", "tool calls", "tokens/s", "mean of all samples"):
        assert said in real.out, said
    assert "mean difference" in real.out and "temperature 0.6" in real.out
    assert "\x1b[32m" in real.out and "\x1b[33m" in real.out, "the transcripts tell the model from the tool by colour"


@pytest.mark.engine
@needs_engine
def test_a_real_run_leaves_no_process(real):
    assert len(real.started) > 3
    assert_gone(real.started)


@pytest.mark.engine
@needs_engine
def test_log_probs_that_are_shifted_by_a_token_are_found(real):
    model = str(run.packaged_model(run.cache_folder()))
    samples = [SimpleNamespace(**sample) for sample in real.samples]
    assert run.compare_log_probs(model, samples).mean < 1e-4
    for shifted in samples:
        shifted.rollout_log_probs = [0.0, *shifted.rollout_log_probs[:-1]]
    assert run.compare_log_probs(model, samples).mean > run.parse_options([]).logprob_limit


@pytest.mark.engine
@needs_engine
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_while_it_starts_leaves_no_process(tmp_path, signum):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = start(tmp_path, "--output", tmp_path / "out")
    wait_for(lambda: len(descendants(process.pid)) >= 4)  # the launcher, vLLM, and what it starts in its turn
    left = descendants(process.pid)
    process.send_signal(signum)
    done = finish(process, timeout=60)
    assert done.code == (130 if signum == signal.SIGINT else -signal.SIGKILL), done.err
    assert_gone(left)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
