"""The CPU run without an engine: bad input ends it in one line, a signal leaves nothing running, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from cpu import options, problems, report, rollout, servers, storage
from cpu_helpers import ENVIRONMENT, EXAMPLE, fake_model, finish, problem_file, start, the_error
from retool import observations
from retool.processes import free_ports
from scripted import ScriptedEngine, Turn
from tool_sandbox import tool_registry
from watching import assert_ended, descendants, group_of, wait_for

# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "What is 2 + 2?", "label": "4"}
USER = {"role": "user", "content": "What is 2 + 2?"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Where this process's own servers keep their files; empty again after each test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RETOOL_CACHE", str(folder))
    yield folder
    assert not list(folder.iterdir()), "a server's files were left"


@pytest.mark.parametrize(
    "rows, said",
    [
        ([GOOD, {"label": "4"}], ":2: \"prompt\" must be a text or a list of messages (the row has 'label')"),
        ([{"prompt": "", "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": 7, "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": " \n", "label": "4"}], ':1: "prompt" is blank'),
        ([{"prompt": ["x"], "label": "4"}], ':1: message 1 of the prompt must be an object with a "role" out of'),
        ([{"prompt": [{"role": "human", "content": "x"}], "label": "4"}], ":1: message 1 of the prompt must be"),
        (
            [{"prompt": [USER, {"role": "system", "content": "x"}], "label": "4"}],
            "message 2 of the prompt is a system",
        ),
        ([{"prompt": [{"role": "user", "content": "\t"}], "label": "4"}], "a user message, has no text"),
        ([{"prompt": [{"role": "user", "content": None}], "label": "4"}], "a user message, has no text"),
        ([{"prompt": [{"role": "system", "content": "x"}], "label": "4"}], ":1: the prompt has no user message"),
        (
            [{"prompt": [USER, {"role": "assistant", "content": "x"}], "label": "4"}],
            ":1: the prompt must end with a user",
        ),
        ([{"prompt": [], "label": "4"}], ':1: "prompt" must be'),
        ([{"prompt": "x"}], ":1: \"label\" must be the answer, a text or a number (the row has 'prompt')"),
        ([{"prompt": "x", "label": None}], ':1: "label" must be'),
        ([{"prompt": "x", "label": " "}], ':1: "label" must be'),
        ([{"prompt": "x", "label": True}], ':1: "label" must be'),
        ([{"prompt": "x", "label": ["4"]}], ':1: "label" must be'),
        (['{"prompt": "x", "label": NaN}\n'], ':1: "label" is nan, which is no answer'),
        (['{"prompt": "x", "label": -Infinity}\n'], ':1: "label" is -inf'),
        ([{"prompt": "x", "label": "NaN"}], ':1: "label" is NaN'),
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
    read = problems.read_problems(path)
    assert [(problem.prompt, problem.label) for problem in read] == [(row["prompt"], row["label"]) for row in rows]
    assert len(problems.read_problems(path, limit=2)) == 2
    assert problems.read_problems(path)[1].question == "line\u2028separator"


def test_a_byte_order_mark_is_no_part_of_the_first_problem(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("\ufeff" + json.dumps(GOOD), encoding="utf-8")
    assert [problem.prompt for problem in problems.read_problems(path)] == [GOOD["prompt"]]


def test_the_packaged_problems_are_twelve_unless_more_are_asked_for():
    assert options.parse_options([]).limit == 12
    assert options.parse_options(["--limit", "42"]).limit == 42
    assert options.parse_options(["--problems", "mine.jsonl"]).limit is None


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


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lim", "3"], "unrecognized arguments: --lim"),
        (["--logprob-limit", "nan"], "--logprob-limit: nan is not a positive number"),
        (["--seed", "-1"], "--seed: -1 is not a whole number from 0"),
        (["--engine", "http://127.0.0.1:8000", "--keep-engine"], "not allowed with"),
    ],
)
def test_a_wrong_option_is_named(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        options.parse_options(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_an_output_that_exists_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    assert "every run has a folder of its own" in the_error(finish(start(tmp_path, "--output", tmp_path / "out")))


def test_runs_at_once_never_share_an_output_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: storage.new_output(None), range(16)))
        named = list(pool.map(lambda _: attempt(storage.new_output, tmp_path / "one"), range(8)))
    assert len(set(folders)) == 16 and all(folder.is_dir() for folder in folders)
    assert sum(isinstance(folder, Path) for folder in named) == 1
    assert all("exists already" in str(result) for result in named if not isinstance(result, Path))


def attempt(work, *arguments):
    try:
        return work(*arguments)
    except options.RunError as error:
        return error


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


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://", "http://HOST:b"]
)
def test_an_engine_that_vime_could_not_talk_to_is_refused(capsys, url):
    with pytest.raises(SystemExit):
        options.parse_options(["--engine", url])
    assert "vime talks to http://HOST:PORT" in capsys.readouterr().err


def test_a_model_folder_without_a_model_ends_the_run(tmp_path):
    assert "is no model directory" in the_error(finish(start(tmp_path, "--model", tmp_path)))


def test_a_port_in_use_ends_the_run(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(servers, "free_ports", lambda count: [port] * count)
        with pytest.raises(options.RunError, match=f"port {port} on 127.0.0.1, meant for vLLM, is in use"):
            servers.start_engine(fake_model(tmp_path), 1, tmp_path)
        engine = SimpleNamespace(url="http://127.0.0.1:1")
        with pytest.raises(options.RunError, match=f"port {port} on 127.0.0.1, meant for vllm-router, is in use"):
            servers.start_router(engine, tmp_path)


def test_the_engine_computes_with_a_thread_for_each_core_that_it_may_use(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(servers, "start_server", lambda *arguments: arguments[-1])
    ours = os.sched_getaffinity(0)
    assert 1 <= int(servers.start_engine(fake_model(tmp_path), 1, tmp_path)["OMP_NUM_THREADS"]) <= len(ours)
    os.sched_setaffinity(0, {min(ours)})
    try:
        assert servers.start_engine(fake_model(tmp_path), 1, tmp_path)["OMP_NUM_THREADS"] == "1"
    finally:
        os.sched_setaffinity(0, ours)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert servers.start_engine(fake_model(tmp_path), 1, tmp_path)["OMP_NUM_THREADS"] == "7"


def test_a_server_that_dies_while_it_starts_ends_the_run(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('SomeError: no memory')"]
    server = servers.start_server("vLLM", command, free_ports(1)[0], tmp_path / "engine.log", {})
    with pytest.raises(
        options.RunError, match=r"vLLM ended while it started: SomeError: no memory \(log: .*engine\.log\)"
    ):
        servers.wait_until_healthy(server, report.progress_display())
    servers.stop_server(server)


def test_a_server_that_is_killed_is_reported_by_its_signal(tmp_path):
    """The last line of its log tells of a request, as an access log does."""
    killed = "import os; print('INFO: GET /health 200 OK', flush=True); os.kill(os.getpid(), 9)"
    server = servers.start_server("vLLM", [sys.executable, "-c", killed], free_ports(1)[0], tmp_path / "log", {})
    with pytest.raises(options.RunError, match="vLLM ended while it started: it was ended by SIGKILL .*memory"):
        servers.wait_until_healthy(server, report.progress_display())
    servers.stop_server(server)


# Makes a file in TMPDIR and shared memory, as vLLM does, and says the memory's name. Ends only when it is killed.
LITTERER = """
import os, signal, tempfile, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=100)
open(os.path.join(os.environ["TMPDIR"], "socket"), "w").close()
print("made", memory.name, flush=True)
time.sleep(600)
"""


def litter_of(log: Path) -> Path:
    wait_for(lambda: log.exists() and "made" in log.read_text())
    return Path("/dev/shm", log.read_text().split()[1])


def test_servers_leave_no_temporary_file_and_no_shared_memory(tmp_path, cache):
    """One that is stopped, one that is killed, one whose run is killed; side by side, since each waits out its
    grace."""
    logs = {end: tmp_path / f"{end}.log" for end in ("stopped", "killed", "run killed")}
    ports = dict(zip(logs, free_ports(3), strict=True))
    run = f"""if True:
        import sys, time
        sys.path.insert(0, {str(EXAMPLE)!r})
        from cpu import servers
        from pathlib import Path
        log = Path({str(logs["run killed"])!r})
        servers.start_server("server", [sys.executable, "-c", {LITTERER!r}], {ports["run killed"]}, log, {{}})
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", run], cwd=tmp_path)
    stopped, killed = (
        servers.start_server("server", [sys.executable, "-c", LITTERER], ports[end], logs[end], {})
        for end in ("stopped", "killed")
    )
    memories = [litter_of(log) for log in logs.values()]
    assert all(memory.exists() for memory in memories) and len(list(cache.glob("*/socket"))) == 3
    process.kill()
    process.wait()
    [pid] = [pid for pid in group_of(killed.process.pid) - {killed.process.pid} if b"SharedMemory" in cmdline(pid)]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: killed.exit_code() == 137)
    servers.stop_server(killed)
    servers.stop_server(stopped)
    wait_for(lambda: not any(memory.exists() for memory in memories) and not list(cache.iterdir()), seconds=60)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_server_that_is_kept_outlives_the_run_and_ends_when_asked_to(tmp_path, cache):
    kept = f"""if True:
        import sys
        sys.path.insert(0, {str(EXAMPLE)!r})
        from cpu import servers
        from pathlib import Path
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        server = servers.start_server("server", command, {free_ports(1)[0]}, Path("server.log"), {{}})
        servers.keep_server(server)
        print(server.process.pid)
    """
    output = subprocess.check_output([sys.executable, "-c", kept], cwd=tmp_path, text=True, timeout=60)
    pid = int(output.splitlines()[-1])
    assert f"kill {pid}" in output and "--engine http://127.0.0.1:" in " ".join(output.split())
    wait_for(lambda: "up" in (tmp_path / "server.log").read_text())
    left = group_of(pid)
    assert len(left) == 2  # the launcher and the server
    os.kill(pid, signal.SIGTERM)
    assert_ended(left)
    wait_for(lambda: not list(cache.iterdir()))


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
    process = subprocess.Popen([sys.executable, "-c", killed], cwd=tmp_path, stdin=subprocess.DEVNULL)
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
    """A limit on the size of files stands in for it: the samples have to pass it, the settings around them do not."""
    process = over(scripted(right_answer), tmp_path)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    error = the_error(finish(process))
    assert "samples.jsonl: File too large" in error and "--output" in error


def test_a_sample_that_cannot_be_written_is_an_error_of_its_own(tmp_path):
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    file = storage.SampleFile(tmp_path / "samples.jsonl")
    with pytest.raises(options.RunError, match="samples.jsonl: No space left on device; name another place"):
        file.write(json_sample())
    file.close()


def json_sample():
    names = ("index", "group_index", "prompt", "label", "response", "reward", "response_length", "loss_mask")
    names += ("rollout_log_probs", "tokens", "remove_sample", "non_generation_time", "metadata")
    return SimpleNamespace(**dict.fromkeys(names), status=SimpleNamespace(value="completed"))


def test_a_prompt_that_leaves_no_room_is_named_with_its_line(tmp_path, scripted):
    long = {"prompt": "one " * 5000, "label": "1"}
    engine = scripted(right_answer)
    path = problem_file(tmp_path, GOOD, long)
    error = the_error(finish(start(tmp_path, "--problems", path, "--engine", f"http://127.0.0.1:{engine.port}")))
    assert f"{path}:2: the prompt has 5" in error and "context of 4096 tokens has no room" in error


def test_an_engine_without_the_endpoint_ends_the_run(tmp_path, scripted):
    error = the_error(finish(over(scripted(lambda payload, index: Turn(status=403)), tmp_path)))
    assert "the rollout failed" in error and "--enable-scale-out" in error


IN_THE_LOG = """
import logging, sys, threading, time
from cpu import run

run.log_to(sys.argv[1])
writing = threading.Event()

class Stalled:
    def write(self, text):
        writing.set()
        time.sleep(1000)

logging.root.handlers[0].stream = Stalled()
threading.Thread(target=logging.error, args=["lost"], daemon=True).start()
writing.wait()
print("over")
run.end_process(3)
"""


def test_the_end_of_a_run_waits_for_no_thread_of_the_rollout(tmp_path):
    command = [sys.executable, "-P", "-c", IN_THE_LOG, str(tmp_path / "run.log")]
    process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    done = finish(process, timeout=60)
    assert (done.code, done.out) == (3, "over\n")


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

    shown = [observations.word(output.parts, "code") for output in asyncio.run(outputs())]
    assert shown == [example.answer for example in problems.WORKED_EXAMPLES]


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


def test_a_line_with_a_path_is_neither_wrapped_nor_read_as_markup(capsys):
    line = f"samples and logs: /srv/[bold]{'x' * 200}/out"
    report.say(line)
    assert capsys.readouterr().out == line + "\n"


def test_only_the_prompt_of_a_transcript_is_dim():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))
    text = report.transcript(SimpleNamespace(tokens=[*b"pmmt"], response_length=3, loss_mask=[1, 1, 0]), tokenizer)
    assert text.plain == "pmmt" and not text.style
    assert [(span.start, span.end, span.style) for span in text.spans] == [
        (0, 1, "dim"),
        (1, 3, "green"),
        (3, 4, "yellow"),
    ]


def test_the_guide_says_how_long_a_sample_takes_as_the_estimate_does():
    guide = (EXAMPLE / "README.md").read_text()
    assert f"about {rollout.CORE_SECONDS} seconds of one core: the default {options.DEFAULT_LIMIT} problems" in guide
