"""Run a training script on a Ray cluster of its own, on loopback, and end all of that cluster afterwards.

    this process --- worker --+-- gcs_server, raylet, dashboard --- Ray's workers, and whatever those start
                              +-- the training script, its output in a file that is copied to this process's output

Contract: `run` returns the script's own code; on SIGINT, SIGTERM or SIGHUP (unless `nohup` has it ignored) 128 +
signal. Either way every process that came from here is ended, and no other: `ray stop` ends every Ray process of the
machine, other users' clusters included, and Ray's own shutdown leaves detached processes (an inference engine, say)
running. Logs are kept unless the script succeeded.

The script is a child of this process and not a job of Ray's job server: its end is seen here, its output cannot be cut
short by a stream that breaks, and it needs no dashboard. Nor does a closed terminal or pipe end it.

The wandb key reaches all processes as WANDB_API_KEY in the environment they inherit. It must not go into Ray's runtime
env: that is on the command line of each worker while it starts, and in the dashboard.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from launch.checkpoints import note_start
from launch.checks import resources
from launch.convert import convert
from launch.settings import Launch
from retool.processes import LOOPBACK, free_ports, last_log_line, loopback_directly
from retool.supervise import LaunchError, exit_code, locked, supervise

MAX_START_SECONDS = 300.0
# Ray's sockets lie some 60 characters below its directory, and a socket's path may have 107.
MAX_TEMP_DIRECTORY_CHARS = 25
# Ray hands out these ports to workers and refuses to use one of them for a service.
RAY_WORKER_PORTS = range(10002, 20000)
POLL_SECONDS = 0.2
COPY_BYTES = 1 << 16


def run(launch: Launch) -> int:
    """Make the checkpoint if need be, start the cluster, run the job on it, end all of it; returns the job's exit
    code."""
    # Ray makes its folder writable for all users, so it gets one below a folder that only this user may enter.
    directory = Path(tempfile.mkdtemp(prefix="retool-", dir=_short_temp_directory()))
    code = supervise(lambda: _run(launch, directory))
    if code == 0 or not any(directory.iterdir()):
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"logs and temporary files: {directory}", file=sys.stderr)
    return code


def _run(launch: Launch, directory: Path) -> int:
    settings = launch.settings
    with locked(launch.lock, f"only one launch may write to {launch.lock.parent}"):
        if launch.conversion:
            environ = {**settings.environ, **launch.environment}
            if code := convert(settings.ref_load, launch.conversion, environ):
                return code
        note_start(settings.saved_to, settings.ref_load)
        environment = cluster_environment(settings.environ, launch.environment, directory)
        gcs, dashboard, client_server = free_ports(3, avoid=RAY_WORKER_PORTS)
        _start_cluster(
            settings.gpus, resources(launch.job).cpus, gcs, dashboard, client_server, directory, environment
        )
        environment["RAY_ADDRESS"] = f"{LOOPBACK}:{gcs}"
        environment["RAY_API_SERVER_ADDRESS"] = f"http://{LOOPBACK}:{dashboard}"
        access = _write_access_file(directory, environment)
        with contextlib.suppress(OSError):  # a pipe that is closed already
            print(f"# this Ray from another shell:  source {access}", flush=True)
        return _run_script(launch.job, environment, directory / "job.log")


def _short_temp_directory() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) <= MAX_TEMP_DIRECTORY_CHARS else "/tmp"


def cluster_environment(base: Mapping[str, str], settings: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of the cluster and the script: loopback only, closed to other users, the wandb key as wandb
    reads it.

    Args:
        base: the environment of this process.
        settings: what the script and Ray's workers are to have besides.
        directory: where the token of the cluster is written, and its temporary files, since processes that are killed
            do not remove theirs.
    """
    environment = {**base, **settings}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    if key := environment.pop("WANDB_KEY", ""):
        environment["WANDB_API_KEY"] = key
    environment |= loopback_directly(environment)
    temporary = directory / "tmp"
    temporary.mkdir()
    environment |= {
        "TMPDIR": str(temporary),
        # Without it Ray replaces 127.0.0.1 by the machine's address and listens for everyone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # At the end there is nothing to wait for, and Ray would wait for half a minute.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    environment.setdefault("VIME_HOST_IP", LOOPBACK)  # where vime's engines and router listen
    if environment.setdefault("RAY_AUTH_MODE", "token") == "token":
        # Loopback is open to every user of the machine, and a job runs as this one, with the wandb key.
        token = directory / "auth_token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        environment.pop("RAY_AUTH_TOKEN", None)
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)
    return environment


def _start_cluster(
    gpus: str, cpus: int, gcs: int, dashboard: int, client_server: int, directory: Path, environment: dict[str, str]
) -> None:
    # Not --block: it takes the whole cluster down when the dashboard ends, which no training run needs.
    command = ["ray", "start", "--head", "--disable-usage-stats"]
    command += ["--node-ip-address", LOOPBACK, "--port", str(gcs), "--num-gpus", gpus]
    command += ["--dashboard-host", LOOPBACK, "--dashboard-port", str(dashboard)]
    command += ["--ray-client-server-port", str(client_server), "--dashboard-agent-listen-port", "0"]
    command += ["--temp-dir", str(directory / "r")]
    if (there := machine_cpus()) < cpus:
        # vime would wait for ever, without a word, for CPUs that it reserves and hardly uses.
        print(f"warning: this machine has {there} CPUs, and vime asks Ray for {cpus}: told so many", file=sys.stderr)
        command += ["--num-cpus", str(cpus)]
    log = directory / "ray_start.log"
    with open(log, "wb") as output:
        try:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=True,
                timeout=MAX_START_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"Ray did not start within {MAX_START_SECONDS:.0f} s, see {log}") from None
        except subprocess.CalledProcessError:
            raise LaunchError(f"Ray did not start: {last_log_line(log) or f'no output in {log}'}") from None


def machine_cpus() -> int:
    """The CPUs that Ray counts here: those this process may use, and no more than its container's share."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return count


def _write_access_file(directory: Path, environment: Mapping[str, str]) -> Path:
    """Write what another shell of this user needs in order to use `ray status`, `ray list` or `ray stack`."""
    names = ["RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "no_proxy", "NO_PROXY"]
    names += ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
    file = directory / "env.sh"
    lines = [f"export {name}={shlex.quote(environment[name])}\n" for name in names if name in environment]
    file.write_text("".join(lines))
    return file


def _run_script(command: list[str], environment: dict[str, str], log: Path) -> int:
    with open(log, "wb") as output, open(log, "rb") as written:
        script = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        listener: BinaryIO | None = sys.stdout.buffer
        while script.poll() is None:
            listener = _copy(written, listener)
            time.sleep(POLL_SECONDS)
        _copy(written, listener)
    return exit_code(script.returncode)


def _copy(source: BinaryIO, listener: BinaryIO | None) -> BinaryIO | None:
    """Copy what is new to the listener; returns it, or None once it does not take any more."""
    while listener is not None and (data := source.read(COPY_BYTES)):
        try:
            listener.write(data)
            listener.flush()
        except OSError:  # a terminal or pipe that was closed; the file has everything
            return None
    return listener
