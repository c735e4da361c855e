#!/usr/bin/env python3
"""Run a training script on a Ray cluster of its own, on loopback, and end all of that cluster afterwards.

    python3 local_ray.py --num-gpus 8 --runtime-env-json '{"env_vars": {...}}' --lock SAVE/.lock -- python3 train.py ...

    this process --- worker --+-- gcs_server, raylet, dashboard --- Ray's workers, and whatever those start
                              +-- the training script, its output in a file that is copied to this process's output

Contract: exits with the script's own code; on SIGINT, SIGTERM or SIGHUP (unless `nohup` has it ignored) with 128 +
signal. Either way every process that came from here is ended, and no other: `ray stop` ends every Ray process of the
machine, other users' clusters included, and Ray's own shutdown leaves detached processes (an inference engine, say)
running. Logs are kept unless the script succeeded.

The script is a child of this process and not a job of Ray's job server: its end is seen here, its output cannot be cut
short by a stream that breaks, and it needs no dashboard. Nor does a closed terminal or pipe end it.

The wandb key, if WANDB_KEY is set, reaches all processes as WANDB_API_KEY in the environment they inherit. It must not
go into Ray's runtime env: that is on the command line of each worker while it starts, and in the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from launch.supervise import LaunchError, exit_code, locked, supervise
from retool.processes import LOOPBACK, free_ports, last_log_line

MAX_START_SECONDS = 300.0
# Ray's sockets lie some 60 characters below its directory, and a socket's path may have 107.
MAX_TEMP_DIRECTORY_CHARS = 25
# Ray hands out these ports to workers and refuses to use one of them for a service.
RAY_WORKER_PORTS = range(10002, 20000)
POLL_SECONDS = 0.2
COPY_BYTES = 1 << 16


def main() -> int:
    args = _parse_args()
    # Ray makes its folder writable for all users, so it gets one below a folder that only this user may enter.
    directory = Path(tempfile.mkdtemp(prefix="retool-", dir=_short_temp_directory()))
    code = supervise(lambda: _run(args, directory))
    if code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"logs and temporary files: {directory}", file=sys.stderr)
    return code


def _run(args: argparse.Namespace, directory: Path) -> int:
    """Start the cluster, run the script on it, return the script's exit code."""
    with locked(args.lock, f"only one launch may write to {args.lock.parent}"):
        environment = cluster_environment(os.environ, args.runtime_env_json, directory)
        gcs, dashboard, client_server = free_ports(3, avoid=RAY_WORKER_PORTS)
        _start_cluster(args.num_gpus, gcs, dashboard, client_server, directory, environment)
        environment["RAY_ADDRESS"] = f"{LOOPBACK}:{gcs}"
        environment["RAY_API_SERVER_ADDRESS"] = f"http://{LOOPBACK}:{dashboard}"
        access = _write_access_file(directory, environment)
        with contextlib.suppress(OSError):  # a pipe that is closed already
            print(f"# this Ray from another shell:  source {access}", flush=True)
        return _run_script(args.command, environment, directory / "job.log")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command on a Ray cluster of its own.")
    parser.add_argument("--num-gpus", type=int, required=True)
    parser.add_argument(
        "--runtime-env-json", type=lambda text: json.loads(text)["env_vars"], default={}, help='{"env_vars": {...}}'
    )
    parser.add_argument("--lock", type=Path, required=True, help="a lock file that is held while the command runs")
    parser.add_argument("command", nargs="+", help="run with RAY_ADDRESS set to the cluster's address")
    return parser.parse_args()


def _short_temp_directory() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) <= MAX_TEMP_DIRECTORY_CHARS else "/tmp"


def cluster_environment(base: Mapping[str, str], settings: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of the cluster and the script: loopback only, closed to other users, the wandb key as wandb reads it.

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
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, [environment.get(name), LOOPBACK, "localhost"]))
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
    num_gpus: int, gcs: int, dashboard: int, client_server: int, directory: Path, environment: dict[str, str]
) -> None:
    # Not --block: it takes the whole cluster down when the dashboard ends, which no training run needs.
    command = ["ray", "start", "--head", "--disable-usage-stats"]
    command += ["--node-ip-address", LOOPBACK, "--port", str(gcs), "--num-gpus", str(num_gpus)]
    command += ["--dashboard-host", LOOPBACK, "--dashboard-port", str(dashboard)]
    command += ["--ray-client-server-port", str(client_server), "--dashboard-agent-listen-port", "0"]
    command += ["--temp-dir", str(directory / "r")]
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


if __name__ == "__main__":
    sys.exit(main())
