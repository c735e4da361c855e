"""The servers of a run, vLLM and vllm-router: started, watched and ended.

Contract: a server is started in a process group of its own and ended by that group, so that nothing else is ever
touched. Whatever ends the run, a SIGKILL included, ends its servers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from cpu.model import MAX_MODEL_LEN, model_length, packaged_model
from cpu.options import RunError
from cpu.report import progress_display
from cpu.storage import cache_folder
from retool.processes import free_ports, last_log_line, port_is_taken, stop_signals_held
from rich.progress import Progress, TimeElapsedColumn

START_TIMEOUT = 900  # seconds; a large model on a slow disk
STOP_TIMEOUT = 15  # seconds between asking a server to end and ending it


class Engine(NamedTuple):
    """What the rollout has to know of the engine that is up."""

    model: str  # its name there and its directory here: vime has one setting for both
    context: int  # tokens
    host: str  # of the router, or of the engine itself where there is none
    port: int


class Server(NamedTuple):
    name: str
    process: subprocess.Popen
    url: str
    log: Path

    def has_ended(self) -> bool:
        """Without reaping it: as long as it is not, the id of its process group belongs to nobody else."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextlib.contextmanager
def serving(options: argparse.Namespace, output: Path) -> Iterator[tuple[Engine, list[Server]]]:
    """(the engine, the servers that were started for it), which are ended on every way out."""
    servers: list[Server] = []
    try:
        if options.engine:
            yield ask_engine(options.engine, options.model), servers
            return
        model = (options.model or packaged_model(cache_folder())).resolve()
        with progress_display(TimeElapsedColumn()) as progress:
            servers.append(start_engine(model, options.seed, output))
            wait_until_healthy(servers[0], progress)
            servers.append(start_router(servers[0], output))
            wait_until_healthy(servers[1], progress)
        yield ask_engine(servers[0].url, model, front=servers[1].url), servers
    finally:
        with stop_signals_held():
            for server in reversed(servers):
                stop_server(server)


def ask_engine(url: str, model: Path | None, front: str | None = None) -> Engine:
    """What the engine at `url` serves. RunError where it is down or is not usable with `model`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise RunError(f"--engine {url}: vime talks to http://HOST:PORT, without a path")
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=30, trust_env=False)
        answer.raise_for_status()
        served = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"no vLLM engine answers at {url} ({error}); start one with --enable-scale-out, or leave --engine out"
        ) from error
    names = [entry["id"] for entry in served]
    name = str(model) if model else names[0]
    if name not in names or not Path(name).is_dir():
        raise RunError(
            f"the engine at {url} serves {', '.join(names)}, and vime uses one name for the served model and for its "
            "directory: start the engine with --served-model-name DIR and pass the same --model DIR here"
        )
    context = next(entry for entry in served if entry["id"] == name).get("max_model_len") or MAX_MODEL_LEN
    address = urlsplit(front) if front else parts
    return Engine(name, context, address.hostname or parts.hostname, address.port or 80)


def start_engine(model: Path, seed: int, output: Path) -> Server:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--seed", str(seed)]
    command += ["--dtype", "float32", "--max-model-len", str(model_length(model))]
    command += ["--enable-scale-out"]  # opens /inference/v1/generate
    command += ["--logprobs-mode", "processed_logprobs"]  # this and the next: as vime starts its engines
    command += ["--enable-prompt-tokens-details"]
    command += ["--enforce-eager"]  # compiling takes longer than such a run gains by it, and needs a C++ compiler
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # on two cores one in reserve would be half of the speed
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    return start_server("vLLM", command, port, output / "engine.log", environment)


def start_router(engine: Server, output: Path) -> Server:
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", engine.url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    return start_server("vllm-router", command, port, output / "router.log", {})


# Leads the process group of the server that argv[1:] starts. Its stdin is a pipe from this run: should the run be
# killed before it can end the server itself, the pipe ends, and the whole group with it. SIGTERM is for the server.
_LAUNCHER = """
import os, signal, subprocess, sys, threading

def end_with_the_run():
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)

signal.signal(signal.SIGTERM, lambda signum, frame: None)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=end_with_the_run, daemon=True).start()
os._exit(abs(server.wait()))
"""


def start_server(name: str, command: list[str], port: int, log: Path, environment: dict[str, str]) -> Server:
    if port_is_taken(port):
        raise RunError(f"port {port} on 127.0.0.1, meant for {name}, is in use by another program: run again")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal is for this run, which then ends its servers in order
            )
    except OSError as error:
        raise RunError(f"cannot start {name}: {error}") from error
    return Server(name, process, f"http://127.0.0.1:{port}", log)


def wait_until_healthy(server: Server, progress: Progress) -> None:
    task = progress.add_task(f"{server.name} starts", total=None, detail=f"log: {server.log}")
    deadline = time.monotonic() + START_TIMEOUT
    while not answers(f"{server.url}/health"):
        if server.has_ended():
            raise RunError(f"{server.name} ended while it started: {last_log_line(server.log)} (log: {server.log})")
        if time.monotonic() > deadline:
            raise RunError(f"{server.name} was not up after {START_TIMEOUT} seconds (log: {server.log})")
        time.sleep(0.25)
    progress.update(task, description=f"{server.name} is up", total=1, completed=1)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def stop_server(server: Server) -> None:
    """Ask its process group to end, then end it. The leader is reaped last: it holds the group's id."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while not server.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
