"""What the CPU run and the local Ray cluster share: why a server ended, ports, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from cpu_helpers import EXAMPLE
from retool.processes import MAX_LINE_CHARS, first_error, free_ports, last_log_line, port_is_taken, why_it_ended

PREFIX = "(EngineCore pid=7) ERROR 11-30 10:53:07 [core.py:1512] "
CHAINED = f"""\
(APIServer pid=5) WARNING 11-30 10:43:45 [vllm.py:17] Enforce eager set, an error would be shown
INFO:     127.0.0.1:53852 - "GET /v1/error HTTP/1.1" 200 OK
{PREFIX}EngineCore encountered a fatal error.
{PREFIX}Traceback (most recent call last):
{PREFIX}  File "core.py", line 7, in run
{PREFIX}    raise RuntimeError("in the source, not raised here")
{PREFIX}torch.OutOfMemoryError: not enough memory: 5 GB
Traceback (most recent call last):
  File "api.py", line 1, in main
vllm.EngineDeadError: EngineCore encountered an issue.
INFO:     127.0.0.1:53852 - "POST /inference/v1/generate HTTP/1.1" 500 Internal Server Error
"""
CORE = PREFIX.replace("ERROR", "WARNING") + "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup\n"
WORKER = PREFIX + "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.\n"


@pytest.mark.parametrize(
    "text, said",
    [
        (CHAINED, "torch.OutOfMemoryError: not enough memory: 5 GB"),
        (CORE + CHAINED, "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"),
        (WORKER + CHAINED, "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."),
        ("starting\nusage: x [-h]\nx: error: unrecognized arguments: --y\n", "x: error: unrecognized arguments: --y"),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\nbye\n", "KeyboardInterrupt"),
        ("one\ntwo\n\n", "two"),
        ("", ""),
    ],
)
def test_the_first_error_is_the_cause(tmp_path, text, said):
    (tmp_path / "log").write_text(text)
    assert first_error(tmp_path / "log") == said


def test_the_end_is_told_by_signal_before_the_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(CHAINED)
    assert why_it_ended(log, 128 + signal.SIGKILL).startswith(
        "it was ended by SIGKILL (the kernel does that where memory"
    )
    assert why_it_ended(log, 128 + signal.SIGSEGV) == "it was ended by SIGSEGV"
    assert why_it_ended(log, 1) == "torch.OutOfMemoryError: not enough memory: 5 GB"
    for text in (WORKER, CORE):
        log.write_text(text)
        assert "memory runs out" in why_it_ended(log, 0)


def test_a_log_that_is_missing_or_no_text_is_no_error_of_its_own(tmp_path):
    assert first_error(tmp_path / "none") == last_log_line(tmp_path / "none") == ""
    (tmp_path / "log").write_bytes(b"\xff\xfe error " + b"x" * 1000)
    assert len(last_log_line(tmp_path / "log")) == MAX_LINE_CHARS


def test_ports_are_free_and_different():
    ports = free_ports(20)
    assert len(set(ports)) == 20 and not any(map(port_is_taken, ports))
    assert not set(free_ports(5, avoid=ports)) & set(ports)


LISTENER = f"""if True:
    import sys, time
    sys.path.insert(0, {str(EXAMPLE)!r})
    from retool.processes import Stopped, raise_on_stop_signals, stop_signals_held
    raise_on_stop_signals()
    try:
        with stop_signals_held():
            print("held", flush=True)
            time.sleep(float(sys.argv[1]))
            print("let go", flush=True)
        time.sleep(600)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
"""


def listen(seconds: float, before: str = "") -> subprocess.Popen:
    command = ["bash", "-c", f'{before} exec "$0" -c "$1" "$2"', sys.executable, LISTENER, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_held_takes_effect_afterwards(signum):
    process = listen(0.5)
    process.send_signal(signum)
    assert process.communicate(timeout=30)[0] == "let go\n" and process.returncode == 128 + signum


def test_a_hangup_that_nohup_ignores_stays_ignored():
    process = listen(0, before="trap '' HUP;")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_it_needs_the_standard_library_alone():
    """The Ray cluster's script runs where nothing else of the example's is installed."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import retool.processes, cpu.check, cpu.launcher"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, EXAMPLE], check=True, env={"PATH": os.environ["PATH"]})
