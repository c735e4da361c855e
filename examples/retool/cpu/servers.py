"""The servers of a run, vLLM and vllm-router: started, watched and ended.

Contract: a server runs in a process group of its own below launcher.py, which ends all that came from it, and nothing
else. Whatever ends the run, a SIGKILL included, ends its servers, and nothing of them is left in TMPDIR or /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from cpu.check import MAX_MODEL_LEN, model_length
from cpu.launcher import KEEP
from cpu.model import packaged_model
from cpu.options import CPU, RunError
from cpu.report import console, progress_display, say
from cpu.storage import cache_folder
from retool.paths import closed_folder
from retool.processes import LOOPBACK, free_ports, loopback_directly, port_is_taken, stop_signals_held, why_it_ended
from rich.progress import Progress, TimeElapsedColumn

START_TIMEOUT = 900  # seconds; a large model on a slow disk
STOP_TIMEOUT = 35  # seconds that the launcher may take to end its group; it kills what is left long before


class Engine(NamedTuple):
    """What the rollout has to know of the engine that is up."""

    model: str  # its name there and its directory here: vime has one setting for both
    context: int  # tokens
    host: str  # of the router, or of the engine itself where there is none
    port: int


class Server(NamedTuple):
    name: str
    process: subprocess.Popen  # its launcher, the leader of its process group
    url: str
    log: Path
    folder: Path  # its temporary files

    def exit_code(self) -> int | None:
        """128 + signal where a signal ended it; None while it runs.

        It is not reaped: as long as it is not, the id of its process group belongs to nobody else.
        """
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


@contextlib.contextmanager
def serving(
    options: argparse.Namespace, output: Path, meanwhile: Callable[[], object]
) -> Iterator[tuple[Engine, list[Server]]]:
    """An engine that is up: the one that --engine names, or one of this run's own behind a router.

    Args:
        options: engine, keep_engine, model and seed are read.
        output: where the servers' logs go.
        meanwhile: called in a thread while the servers start; what it raises is not looked at.

    Yields:
        (the engine, the servers that were started for it). They are ended on every way out, except that with
        --keep-engine the engine stays up if the block raises nothing.

    Raises:
        RunError: a server does not come up, or the one that is named is not usable.
    """
    servers: list[Server] = []
    keep = False
    try:
        if options.engine:
            yield ask_engine(options.engine, options.model), servers
            return
        model = (options.model or packaged_model(cache_folder())).resolve()
        with progress_display(TimeElapsedColumn()) as progress:
            servers.append(start_engine(model, options.seed, output))
            threading.Thread(target=_quietly, args=(meanwhile,), daemon=True).start()
            wait_until_healthy(servers[0], progress)
            servers.append(start_router(servers[0], output))
            wait_until_healthy(servers[1], progress)
        yield ask_engine(servers[0].url, model, front=servers[1].url), servers
        keep = options.keep_engine
    finally:
        with stop_signals_held():
            if keep:
                keep_server(servers.pop(0))
            for server in reversed(servers):
                stop_server(server)


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the same comes up again where its result is needed
        work()


def ask_engine(url: str, model: Path | None, front: str | None = None) -> Engine:
    """What the engine at `url` serves.

    Args:
        url: of the engine itself.
        model: the directory that it has to serve; None for whatever it serves.
        front: the router's URL, where requests go instead.

    Raises:
        RunError: it is down, or is not usable with `model`.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False)
        answer.raise_for_status()
        served = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"no vLLM engine answers at {url} ({error}); start one with --enable-scale-out, or leave --engine out"
        ) from error
    names = [entry["id"] for entry in served]
    name = str(model) if model else names[0]
    if name in names and (closed := closed_folder(name)):
        raise RunError(f"the engine at {url} serves {name}, and there is no permission to look into {closed} here")
    if name not in names or not os.path.isdir(name):
        raise RunError(
            f"the engine at {url} serves {', '.join(names)}, and vime uses one name for the served model and for its "
            "directory: start the engine with --served-model-name DIR and pass the same --model DIR here"
        )
    context = next(entry for entry in served if entry["id"] == name).get("max_model_len") or MAX_MODEL_LEN
    address = urlsplit(front or url)
    return Engine(name, context, address.hostname or LOOPBACK, address.port or 80)


def start_engine(
    model: Path,
    seed: int,
    output: Path,
    python: str | Path = sys.executable,
    flags: Sequence[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    """vLLM with the model in this directory, in float32, as vime starts its engines otherwise.

    Args:
        seed: of the sampling.
        output: where its log goes.
        python: the interpreter that it runs in.
        flags: of vLLM, besides.
        settings: of its environment, besides.
    """
    [port] = free_ports(1)
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    command += ["--host", LOOPBACK, "--port", str(port), "--seed", str(seed)]
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
        "VLLM_RPC_BASE_PATH": ".",  # its sockets: their paths may have 107 characters, so relative to its directory
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles one function in spite of --enforce-eager
        # The model in the engine's own process instead of one more: up in 38 seconds instead of 57, half a GiB less,
        # as many tokens a second. vLLM sets the number of threads only for the other process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(physical_cores())),
        # Else a thread that waits for one without a processor keeps its own busy: 0.7 instead of 4.5 tokens a second
        # on two cores of which another program uses one.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    return start_server("vLLM", command, port, output / "engine.log", {**environment, **settings})


def physical_cores() -> int:
    """Those that this process may use: two threads of one core multiply matrices no faster than one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not told here
            cores.add(str(cpu))
    return len(cores)


def start_router(engine: Server, output: Path) -> Server:
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "vllm_router.launch_router", "--worker-urls", engine.url]
    command += ["--host", LOOPBACK, "--port", str(port)]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port)]
    return start_server("vllm-router", command, port, output / "router.log", {})


def start_server(name: str, command: list[str], port: int, log: Path, environment: dict[str, str]) -> Server:
    """Start a server below launcher.py; its output goes to `log`, `environment` is added to this process's own.

    Raises:
        RunError: the port is taken, or the server cannot be started.
    """
    if port_is_taken(port):
        raise RunError(f"port {port} on {LOOPBACK}, meant for {name}, is in use by another program: run again")
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="server.", dir=cache_folder()))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", str(CPU / "launcher.py"), str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | loopback_directly(os.environ) | environment,
                start_new_session=True,  # Ctrl-C in the terminal is for this run, which then ends its servers in order
            )
    except OSError as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"cannot start {name}: {error}") from error
    return Server(name, process, f"http://{LOOPBACK}:{port}", log, folder)


def wait_until_healthy(server: Server, progress: Progress) -> None:
    """Until the server answers.

    Raises:
        RunError: it ended, or was not up in time.
    """
    if not console.is_terminal:
        say(f"{server.name} starts (log: {server.log})")
    task = progress.add_task(f"{server.name} starts", total=None, detail=f"log: {server.log}")
    started = time.monotonic()
    while not _answers(f"{server.url}/health"):
        check_alive(server, "while it started")
        if time.monotonic() > started + START_TIMEOUT:
            raise RunError(f"{server.name} was not up after {START_TIMEOUT} seconds (log: {server.log})")
        time.sleep(0.25)
    progress.update(task, description=f"{server.name} is up", total=1, completed=1)
    if not console.is_terminal:
        say(f"{server.name} is up after {time.monotonic() - started:.0f} s")


def check_alive(server: Server, when: str) -> None:
    """RunError with the cause if the server has ended."""
    if (code := server.exit_code()) is not None:
        raise RunError(f"{server.name} ended {when}: {why_it_ended(server.log, code)} (log: {server.log})")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def keep_server(server: Server) -> None:
    """Let the server live on without this run, and say how it is used and ended."""
    assert server.process.stdin
    server.process.stdin.write(KEEP)
    server.process.stdin.close()
    say(f"the engine stays up, for the next run: --engine {server.url}    (to end it: kill {server.process.pid})")


def stop_server(server: Server) -> None:
    """Have the launcher end its group, or end both. The launcher is reaped last: it holds the group's id."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.process.pid, signal.SIGTERM)  # Popen's own would reap it
        deadline = time.monotonic() + STOP_TIMEOUT
        while server.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    shutil.rmtree(server.folder, ignore_errors=True)
