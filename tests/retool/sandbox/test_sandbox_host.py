"""What is around a call: limits, cancellation, deaths, forks, two loops, and that nothing is left behind."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import jail
import pytest
import tool_sandbox
import watching
from retool.sandbox import pool
from retool.sandbox.pool import POOL
from retool.sandbox.semaphore import ProcessSemaphore
from tool_sandbox import PythonSandbox, SandboxError, ToolRegistry
from watching import assert_ended, descendants, wait_for

EXAMPLE = Path(tool_sandbox.__file__).parent
BUSY = "while True:\n    pass"


def unchecked(timeout=20.0, memory="1GB") -> PythonSandbox:
    """A sandbox without its first layer."""
    sandbox = PythonSandbox(timeout, memory)
    sandbox._check_code_safety = lambda code: (True, "")
    return sandbox


def processes(root: int | None = None) -> int:
    return len(descendants(root or os.getpid(), zombies=True))


def settled(measure, expected, seconds: float = 5.0):
    """The value of `measure` once it is `expected`, or its last one."""
    deadline = time.monotonic() + seconds
    while (value := measure()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def worker_process() -> int:
    """The process that forks: the only child of the one that waits outside its namespace, or that one itself."""
    outer = POOL.workers()[0].process.pid
    inner = [pid for pid, process in watching.processes().items() if process.parent == outer]
    if len(inner) == 1:
        return inner[0]
    return outer


@pytest.fixture(autouse=True)
def fresh_workers():
    """Each test starts and ends without workers, and leaves no process and no descriptor."""
    tool_sandbox.shutdown()
    before = descriptors(), processes()
    yield
    tool_sandbox.shutdown()
    assert settled(processes, before[1]) == before[1]
    assert settled(descriptors, before[0]) <= before[0]


def run_host(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLE)!r})\n{textwrap.dedent(code)}"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


# ---------------------------------------------------------------------------------------------------------------------
# The limit on concurrent calls


def test_semaphore_bounds_all_loops_together_and_forgets_none():
    semaphore = ProcessSemaphore(3)
    inside, most, lock, done = 0, 0, threading.Lock(), []

    async def use():
        nonlocal inside, most
        async with semaphore:
            with lock:
                inside += 1
                most = max(most, inside)
            await asyncio.sleep(0.002)
            with lock:
                inside -= 1

    async def many():
        await asyncio.gather(*[use() for _ in range(60)])
        done.append(True)

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(done) == 3 and most == 3 and semaphore.free == 3 and not semaphore.waiting


@pytest.mark.parametrize("steps", range(6))
def test_semaphore_survives_cancellation_at_every_step(steps):
    semaphore = ProcessSemaphore(1)

    async def use():
        async with semaphore:
            await asyncio.sleep(0)

    async def scenario():
        async with semaphore:
            waiting = [asyncio.create_task(use()) for _ in range(3)]
            await asyncio.sleep(0)
            if steps % 2:
                waiting[0].cancel()
        for _ in range(steps // 2):
            await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(use(), 5)

    asyncio.run(scenario())
    assert semaphore.free == 1 and not semaphore.waiting


def test_semaphore_passes_over_a_loop_that_was_closed_with_a_task_waiting():
    semaphore = ProcessSemaphore(1)

    async def use():
        async with semaphore:
            return "in"

    abandoned = asyncio.new_event_loop()

    async def scenario():
        async with semaphore:
            task = abandoned.create_task(use())
            thread = threading.Thread(
                target=lambda: (abandoned.call_later(0.05, abandoned.stop), abandoned.run_forever())
            )
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.01)
            abandoned.close()
            waiter = asyncio.create_task(use())
            await asyncio.sleep(0)
        assert await asyncio.wait_for(waiter, 5) == "in"
        task._log_destroy_pending = False

    asyncio.run(scenario())


def test_execute_tool_runs_no_more_calls_at_once_than_configured(monkeypatch):
    registry, running, most = ToolRegistry(), 0, 0

    async def slow(code):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "done"

    monkeypatch.setattr(registry.python_sandbox, "execute_code", slow)

    async def scenario():
        return await asyncio.gather(*[registry.execute_tool("code_interpreter", {"code": "x"}) for _ in range(100)])

    assert asyncio.run(scenario()) == ["done"] * 100
    assert most == tool_sandbox.TOOL_CONFIGS["tool_concurrency"]


# ---------------------------------------------------------------------------------------------------------------------
# Many calls


def test_import_starts_nothing():
    code = """
        import os, threading, tool_sandbox
        assert threading.active_count() == 1, threading.enumerate()
        assert not open(f"/proc/self/task/{os.getpid()}/children").read()
        print(sorted(os.listdir("/proc/self/fd")))
    """
    result = run_host(code)
    assert result.returncode == 0, result.stderr
    assert len(eval(result.stdout)) <= 4  # the standard streams, and the listing's own


def test_many_calls_at_once_each_get_their_own_answer():
    sandbox = PythonSandbox(20, "1GB")

    async def scenario():
        return await asyncio.gather(*[sandbox.execute_code(f"print({i} ** 2)") for i in range(120)])

    assert asyncio.run(scenario()) == [f"Output:\n{i**2}" for i in range(120)]


def test_two_loops_in_two_threads_share_the_workers():
    registry, answers = ToolRegistry(), {}

    def loop(name):
        async def calls():
            codes = [f"print({name!r}, {i})" for i in range(60)]
            jobs = [registry.execute_tool("code_interpreter", {"code": code}) for code in codes]
            answers[name] = await asyncio.gather(*jobs)

        asyncio.run(calls())

    threads = [threading.Thread(target=loop, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in ("a", "b"):
        assert answers[name] == [f"Output:\n{name} {i}" for i in range(60)]
    assert len(POOL.workers()) == 1


def test_workers_outlive_the_loop_that_started_them():
    sandbox = PythonSandbox(20, "1GB")
    assert asyncio.run(sandbox.execute_code("print(1)")) == "Output:\n1"
    (first,) = POOL.workers()
    assert asyncio.run(sandbox.execute_code("print(2)")) == "Output:\n2"
    (second,) = POOL.workers()
    assert first is second


def test_the_loop_stays_free_while_calls_are_busy():
    async def scenario() -> float:
        sandbox = PythonSandbox(3, "1GB")
        await sandbox.execute_code("print(1)")
        async with jail.loop_holds(0.005) as holds:
            await asyncio.gather(*[sandbox.execute_code("x = sum(i * i for i in range(200000))") for _ in range(24)])
        return max(holds)

    assert asyncio.run(scenario()) < 0.25  # benchmark.py measures it; here only that nothing waits for a call


def test_a_burst_beyond_what_the_worker_can_queue_is_served():
    sandbox = PythonSandbox(60, "1GB")

    async def scenario():
        return await asyncio.gather(*[sandbox.execute_code(f"print({i})") for i in range(700)])

    assert asyncio.run(scenario()) == [f"Output:\n{i}" for i in range(700)]


def test_nothing_grows_over_many_calls_of_every_kind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others write to the shared one
    sandbox = unchecked(0.3)
    codes = [
        "print(1)",
        "1 / 0",
        BUSY,
        "import os\nos._exit(3)",
        "x = [0] * 10**9",
        "print('x' * 10**6)",
        "(",
        "import os\nos.abort()",
    ]

    async def batch():
        tasks = [asyncio.create_task(sandbox.execute_code(code)) for code in codes * 4]
        await asyncio.sleep(0.05)
        for task in tasks[::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state():
        jail.prefork_all()
        wait_for(lambda: processes() == jail.resting_processes(), 60)
        return descriptors(), processes(), len(list(tmp_path.iterdir())), threading.active_count()

    def not_more() -> bool:
        return all(now <= then for now, then in zip(state(), before, strict=True))

    asyncio.run(batch())
    before = state()
    for _ in range(3):
        asyncio.run(batch())
    assert settled(not_more, True), (before, state())


# ---------------------------------------------------------------------------------------------------------------------
# Cancellation


def test_cancelling_kills_the_child_at_once():
    sandbox = PythonSandbox(60, "1GB")

    async def scenario():
        await sandbox.execute_code("print(1)")
        task = asyncio.create_task(sandbox.execute_code(BUSY))
        await asyncio.sleep(0.3)
        resting = jail.resting_processes()
        assert await asyncio.to_thread(settled, processes, resting + 1) == resting + 1
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 0.2
        assert await asyncio.to_thread(settled, processes, resting, 2) == resting
        assert await sandbox.execute_code("print(2)") == "Output:\n2"

    asyncio.run(scenario())


@pytest.mark.parametrize("code", ["print(1)", BUSY, "# " + "x" * 2000 + "\nprint(1)"], ids=["short", "busy", "long"])
def test_cancellation_at_every_await_leaves_nothing(code):
    registry = ToolRegistry()
    call = {"code": code}

    async def scenario():
        await registry.execute_tool("code_interpreter", {"code": "print(0)"})
        for steps in range(12):
            task = asyncio.create_task(registry.execute_tool("code_interpreter", call))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() or task.result() == "Output:\n1"
        for delay in (0.001, 0.003, 0.01, 0.03):
            task = asyncio.create_task(registry.execute_tool("code_interpreter", call))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert tool_sandbox.SEMAPHORE.free == tool_sandbox.TOOL_CONFIGS["tool_concurrency"]
        assert POOL.calls == 0
        assert await registry.execute_tool("code_interpreter", {"code": "print(3)"}) == "Output:\n3"

    asyncio.run(scenario())


def test_cancellation_while_the_worker_starts_does_not_spoil_the_start():
    sandbox = PythonSandbox(20, "1GB")

    async def scenario():
        first, second = [asyncio.create_task(sandbox.execute_code("print(1)")) for _ in range(2)]
        await asyncio.sleep(0.001)
        first.cancel()
        assert await second == "Output:\n1"
        assert first.cancelled()

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------------------
# Deaths


MISHAPS = {
    "exit": "import os\nos._exit(9)",
    "closed": "import os\nos.closerange(0, 99)\nprint(1)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "deaf": "import _signal\nfor s in range(1, 32):\n    try: _signal.signal(s, 1)\n    except OSError: pass\n" + BUSY,
    "memory": "x = []\nwhile True: x.append(bytearray(10**6))",
    "flood": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "garbage": "import os\nfor i in range(99):\n    try: os.write(i, b'?\\0')\n    except OSError: pass\nos._exit(1)",
    "deep": "import json\njson.loads('[' * 10**6)",
}


@pytest.mark.parametrize("code", MISHAPS.values(), ids=MISHAPS)
def test_a_call_that_goes_wrong_harms_no_other(code):
    sandbox = unchecked(20, "200MB")

    async def scenario():
        beside = [
            asyncio.create_task(sandbox.execute_code("import time\ntime.sleep(0.3)\nprint(1)")) for _ in range(3)
        ]
        result = await unchecked(0.5, "200MB").execute_code(code)
        assert result.outcome != "ok" and "Error" in result
        assert await asyncio.gather(*beside) == ["Output:\n1"] * 3
        assert await sandbox.execute_code("print(2)") == "Output:\n2"

    asyncio.run(scenario())


def test_a_call_whose_worker_dies_is_an_infrastructure_error_and_the_next_one_works():
    sandbox = PythonSandbox(20, "1GB")

    async def scenario():
        await sandbox.execute_code("print(1)")
        task = asyncio.create_task(sandbox.execute_code("print('started')\n" + BUSY))
        await asyncio.sleep(0.3)
        os.kill(worker_process(), signal.SIGKILL)
        with pytest.raises(SandboxError, match="died during the call"):
            await asyncio.wait_for(task, 5)
        assert await sandbox.execute_code("print(2)") == "Output:\n2"

    asyncio.run(scenario())


def test_a_worker_that_died_between_calls_is_replaced_unnoticed():
    sandbox = PythonSandbox(20, "1GB")
    for number in range(3):
        assert asyncio.run(sandbox.execute_code(f"print({number})")) == f"Output:\n{number}"
        os.kill(worker_process(), signal.SIGKILL)
        assert settled(lambda: processes() <= 1, True)  # the waiting parent may stay, as a zombie


def test_waiting_children_that_died_cost_no_call():
    """As when the kernel runs out of memory and ends what it can."""
    sandbox = PythonSandbox(20, "1GB")
    asyncio.run(sandbox.execute_code("print(1)"))
    worker = worker_process()

    def left_alive() -> int:
        for process in descendants(worker, zombies=True):  # more while the worker still forks
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return processes(worker)

    for _ in range(3):
        jail.prefork_all()
        assert settled(left_alive, 0) == 0
        assert asyncio.run(sandbox.execute_code("print(2)")) == "Output:\n2"
    assert worker_process() == worker


def test_a_worker_that_does_not_respond_is_replaced_and_the_call_sent_again(monkeypatch):
    monkeypatch.setattr(pool, "MAX_START_SECONDS", 1.0)
    sandbox = PythonSandbox(0.5, "1GB")

    async def scenario():
        await sandbox.execute_code("print(1)")
        (worker,) = POOL.workers()
        outer = worker.process.pid

        def stopped() -> bool:
            for process in descendants(outer) | {outer}:  # more while the worker still forks
                with contextlib.suppress(ProcessLookupError):  # the first call's child, on its way out
                    os.kill(process, signal.SIGSTOP)
            table = watching.processes()
            return all(table[process].state == "T" for process in descendants(outer) | {outer} if process in table)

        assert settled(stopped, True)  # else a waiting child may still take the call
        assert await asyncio.wait_for(sandbox.execute_code("print(2)"), 15) == "Output:\n2"

    asyncio.run(scenario())


def test_a_worker_that_cannot_start_is_an_error_each_time_and_recovers(monkeypatch, tmp_path):
    sandbox = PythonSandbox(20, "1GB")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "WORKER_START", "raise SystemExit(1)")
        for _ in range(2):
            with pytest.raises(SandboxError, match="failed to start"):
                asyncio.run(sandbox.execute_code("print(1)"))
        patch.setattr(sys, "executable", str(tmp_path / "no-python"))
        with pytest.raises(SandboxError, match="no-python"):
            asyncio.run(sandbox.execute_code("print(1)"))
    assert asyncio.run(sandbox.execute_code("print(1)")) == "Output:\n1"


def test_everything_ends_with_a_killed_host():
    code = """
        import asyncio, os, tool_sandbox
        async def main():
            sandbox = tool_sandbox.PythonSandbox(60, "1GB")
            await sandbox.execute_code("# " + "x" * 2000 + "\\nprint(1)")
            asyncio.create_task(sandbox.execute_code("while True: pass"))
            await asyncio.sleep(0.3)
            print("ready", flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLE)!r})\n{textwrap.dedent(code)}"]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "ready\n"
    started = descendants(host.pid)
    assert len(started) >= 3
    host.kill()
    host.communicate()
    assert_ended(started)


def test_a_forked_host_starts_workers_of_its_own():
    sandbox = PythonSandbox(20, "1GB")
    assert asyncio.run(sandbox.execute_code("print(1)")) == "Output:\n1"
    parent = worker_process()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = asyncio.run(sandbox.execute_code("print(2)"))
            mine = worker_process()
            tool_sandbox.shutdown()
            os.write(writer, f"{answer!r} {mine != parent}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"'Output:\\n2' True"
    os.close(reader)
    assert asyncio.run(sandbox.execute_code("print(3)")) == "Output:\n3"
    assert worker_process() == parent


# ---------------------------------------------------------------------------------------------------------------------
# Hosts that start under limits and settings of their own

SIXTEEN_CALLS = """
    import asyncio
    from tool_sandbox import PythonSandbox
    async def main():
        sandbox = PythonSandbox(20, "1GB")
        print(*await asyncio.gather(*[sandbox.execute_code(f"print({n})") for n in range(16)]))
    asyncio.run(main())
"""
SIXTEEN_OUTPUTS = " ".join(f"Output:\n{n}" for n in range(16)).split()


@pytest.mark.parametrize(
    "host",
    [
        "os.nice(6)",
        "os.nice(15)",  # Ray's workers
        "os.nice(19)",
        # Whoever lacks CAP_SYS_RESOURCE, as root in most containers does, cannot raise a hard limit.
        "import ctypes; ctypes.CDLL(None).prctl(24, 24, 0, 0, 0); resource.setrlimit(resource.RLIMIT_AS, (800_000 * 1024,) * 2)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))",
        "for name in ('CORE', 'FSIZE', 'MEMLOCK', 'MSGQUEUE'): resource.setrlimit(getattr(resource, f'RLIMIT_{name}'), (0, 0))",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM})",
        "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGPIPE)]",
        "os.umask(0o777)",
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    ],
)
def test_calls_work_whatever_limits_the_host_was_started_under(host):
    done = run_host(f"import os, resource, signal\n{host}\n{textwrap.dedent(SIXTEEN_CALLS)}")
    assert done.stdout.split() == SIXTEEN_OUTPUTS, done.stderr


def test_an_interpreter_that_needs_a_variable_to_find_its_libraries_is_started_with_it(tmp_path):
    """A cluster's module system sets it. A script stands in for the interpreter; calls see nothing of the variable."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\ntest -n "$LD_LIBRARY_PATH" && exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    done = run_host(
        f"""
        import asyncio, os, sys
        from tool_sandbox import PythonSandbox
        sys.executable, os.environ["LD_LIBRARY_PATH"] = {str(program)!r}, "/opt/libraries"
        sandbox = PythonSandbox(20, "1GB")
        print(asyncio.run(sandbox.execute_code('print(1)')))
        sandbox._check_code_safety = lambda code: (True, "")
        print(asyncio.run(sandbox.execute_code("import os\\nprint(sorted(os.environ))")))
        """
    )
    assert done.stdout.startswith("Output:\n1\nOutput:\n"), done.stderr
    assert "LD_" not in done.stdout.replace("LD_BIND_NOW", "")


def test_a_call_is_told_of_its_time_and_its_end_in_a_host_that_ignores_and_blocks_signals():
    done = run_host(
        """
        import asyncio, signal
        from tool_sandbox import PythonSandbox
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
        sandbox = PythonSandbox(1, "256MB")
        sandbox._check_code_safety = lambda code: (True, "")
        for code in ("print('early', end='')\\nwhile True: pass", "import os\\nos._exit(3)"):
            result = asyncio.run(sandbox.execute_code(code))
            print(result.outcome, "early" in result, "exit status 3" in result)
        """
    )
    assert done.stdout.splitlines() == ["timeout True False", "crashed False True"], done.stderr


@pytest.mark.parametrize("when", ["the source is there", "the child waits"])
def test_a_child_that_cannot_confine_itself_names_the_step_and_the_error(monkeypatch, tmp_path, when):
    """No library limits calls like this one: the worker is changed so that one step fails."""
    fails = "worker.os.setpgid = lambda *_: 1 / 0 if 0 else worker.os.kill(1 << 22, 0)"
    monkeypatch.setattr(pool, "WORKER_START", pool.WORKER_START.replace("worker.main()", f"{fails}; worker.main()"))
    if when == "the child waits":
        take = pool.Worker.take

        def late(worker):
            connection = take(worker)
            time.sleep(0.3)  # its child has ended by now
            return connection

        monkeypatch.setattr(pool.Worker, "take", late)
    with pytest.raises(SandboxError, match=r"could not start the call: setpgid: .*No such process"):
        asyncio.run(PythonSandbox(20, "1GB").execute_code("print(1)"))


# ---------------------------------------------------------------------------------------------------------------------
# Limits and layers


def test_memory_counts_per_call():
    sandbox = PythonSandbox(30, "300MB")

    async def scenario():
        code = "x = bytearray(200 * 1024**2)\nprint(len(x))"
        return await asyncio.gather(*[sandbox.execute_code(code) for _ in range(6)])

    assert asyncio.run(scenario()) == [f"Output:\n{200 * 1024**2}"] * 6


def test_the_hosts_own_memory_decides_nothing():
    ballast = bytearray(300 * 1024**2)
    assert asyncio.run(PythonSandbox(20, "100MB").execute_code("print(1)")) == "Output:\n1"
    del ballast


def test_least_used_workers_go_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(pool, "MAX_WORKERS", 2)
    for size in range(100, 600, 100):
        assert asyncio.run(PythonSandbox(20, f"{size}MB").execute_code("print(1)")) == "Output:\n1"
    assert settled(lambda: len(POOL.workers()), 2) == 2


@pytest.mark.parametrize("layers", [*[[name] for name in tool_sandbox.LAYERS], tool_sandbox.LAYERS], ids=",".join)
def test_calls_work_with_layers_missing(layers):
    sandbox = PythonSandbox(20, "1GB", layers_off=layers)
    assert asyncio.run(sandbox.execute_code("import random\nprint(random.random() < 1)")) == "Output:\nTrue"
    assert asyncio.run(sandbox.execute_code("print(1)\nraise ValueError")).outcome == "error"
    assert asyncio.run(PythonSandbox(0.3, "1GB", layers_off=layers).execute_code(BUSY)).outcome == "timeout"


@pytest.mark.parametrize("layer", tool_sandbox.LAYERS)
def test_strict_makes_a_missing_layer_an_error_that_names_it(monkeypatch, layer):
    monkeypatch.setenv("RETOOL_SANDBOX_STRICT", "1")
    with pytest.raises(SandboxError, match=rf"lacks.*{layer} \(switched off\)"):
        asyncio.run(PythonSandbox(20, "1GB", layers_off=[layer]).execute_code("print(1)"))


def test_layers_are_logged_in_one_line_that_names_what_is_missing():
    code = """
        import asyncio, logging, tool_sandbox
        logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
        for _ in range(2):
            asyncio.run(tool_sandbox.PythonSandbox(20, "1GB", layers_off=["landlock"]).execute_code("print(1)"))
            tool_sandbox.shutdown()
    """
    lines = run_host(code).stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("retool.sandbox.pool WARNING sandbox layers: ")
    assert "landlock (switched off)" in lines[0] and "limits" in lines[0].partition("missing")[0]


def test_the_environment_of_the_host_stays_outside(monkeypatch):
    monkeypatch.setenv("SECRET_KEY_OF_THE_HOST", "sesame")
    result = asyncio.run(unchecked().execute_code("import os\nprint(dict(os.environ), os.environb)"))
    assert result.outcome == "ok" and "sesame" not in result and "SECRET" not in result


def test_a_widened_library_is_readable_and_the_project_around_it_is_not(monkeypatch, tmp_path):
    package = tmp_path / "project" / "mathlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def late():\n    from . import part\n    return part.VALUE\n")
    (package / "part.py").write_text("VALUE = 42\n")
    (tmp_path / "project" / "secret.txt").write_text("sesame")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    sandbox = unchecked()
    sandbox.allowed_modules.add("mathlib")
    assert asyncio.run(sandbox.execute_code("import mathlib\nprint(mathlib.late())")) == "Output:\n42"
    secret = tmp_path / "project" / "secret.txt"
    for path in (secret, "/etc/passwd", "/proc/self/environ"):
        result = asyncio.run(sandbox.execute_code(f"import mathlib\nprint(open({str(path)!r}).read())"))
        assert result.outcome == "error" and "sesame" not in result and "PermissionError" in result
    result = asyncio.run(sandbox.execute_code(f"import mathlib\nopen({str(package / 'new')!r}, 'w')"))
    assert "PermissionError" in result and not (package / "new").exists()
