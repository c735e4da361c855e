#!/usr/bin/env python3
"""Run one command against a Ray cluster of its own, on loopback, and end all of that cluster afterwards.

    python3 local_ray.py --num-gpus 8 -- ray job submit -- python3 train.py ...

    this process (subreaper) --+-- ray start --head --block --+-- gcs_server, raylet, dashboard
                               |                              +-- workers, job, and whatever those start
                               +-- the command, with RAY_ADDRESS set to the cluster

Contract: exits with the command's code; on SIGINT, SIGTERM or SIGHUP with 128 + signal. Either way every process that
came from here is ended, and no other. `ray stop` ends every Ray process of the machine, other users' clusters
included; Ray's own shutdown leaves detached processes (an inference engine, say) alive. A subreaper inherits all
orphans below it, so that its descendants are exactly what it started, however they daemonized.

The wandb key, if WANDB_KEY is set, reaches the workers as WANDB_API_KEY in the environment they inherit. It must not
go into Ray's runtime env: that is on the command line of each worker while it starts, and in the dashboard.
"""

import argparse
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import rmtree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from retool.processes import LOOPBACK, Stopped, free_ports, ignore_stop_signals, last_log_line, raise_on_stop_signals

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_START_SECONDS = 300.0
MAX_STOP_SECONDS = 15.0
# Ray's sockets lie some 60 characters below its directory, and a socket's path may have 107.
MAX_TEMP_DIRECTORY_CHARS = 25
# Ray hands out these ports to workers and refuses to use one of them for a service.
RAY_WORKER_PORTS = range(10002, 20000)


class ClusterError(Exception):
    """The cluster did not come up; the message is one line that says where to look."""


def main() -> int:
    args = _parse_args()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    directory = Path(tempfile.mkdtemp(prefix="retool-ray-", dir=_short_temp_directory()))
    code = 1
    try:
        raise_on_stop_signals()
        code = _run(args.command, args.num_gpus, directory)
    except Stopped as stopped:
        code = stopped.exit_code
    except (ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        ignore_stop_signals()
        _end_descendants()
    if code == 0 or code > 128:
        rmtree(directory, ignore_errors=True)
    else:
        print(f"Ray's logs and temporary files: {directory}", file=sys.stderr)
    return code


def _run(command: list[str], num_gpus: int, directory: Path) -> int:
    """Start the cluster, run the command against it, return the command's code."""
    environment = cluster_environment(os.environ, directory)
    dashboard, client_server = free_ports(2, avoid=RAY_WORKER_PORTS)
    cluster = _start_cluster(num_gpus, dashboard, client_server, directory, environment)
    _wait_until_up(cluster, dashboard, directory)
    client = {**environment, "RAY_ADDRESS": f"http://{LOOPBACK}:{dashboard}"}
    client.pop("WANDB_API_KEY", None)  # the cluster has it, the client needs none
    code = subprocess.Popen(command, env=client, start_new_session=True).wait()
    ignore_stop_signals()
    return code if code >= 0 else 128 - code


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a command against a Ray cluster of its own.")
    parser.add_argument("--num-gpus", type=int, required=True)
    parser.add_argument("command", nargs="+", help="with RAY_ADDRESS set to the cluster's address")
    return parser.parse_args()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _short_temp_directory() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) <= MAX_TEMP_DIRECTORY_CHARS else "/tmp"


def cluster_environment(base: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The environment of the cluster: loopback only, closed to other users, the wandb key under the name wandb reads.

    Args:
        directory: where the token of the cluster is written, and its temporary files, since processes that are killed
            do not remove theirs.
    """
    environment = dict(base)
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
    num_gpus: int, dashboard: int, client_server: int, directory: Path, environment: dict[str, str]
) -> subprocess.Popen:
    command = ["ray", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", LOOPBACK, "--port", "0", "--num-gpus", str(num_gpus)]
    command += ["--dashboard-host", LOOPBACK, "--dashboard-port", str(dashboard)]
    command += ["--ray-client-server-port", str(client_server), "--dashboard-agent-listen-port", "0"]
    command += ["--temp-dir", str(directory)]
    with open(directory / "ray_start.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone, which ends the rest in order
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # if this process is killed outright
        )


def _wait_until_up(cluster: subprocess.Popen, port: int, directory: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    log = directory / "ray_start.log"
    deadline = time.monotonic() + MAX_START_SECONDS
    while time.monotonic() < deadline:
        if cluster.poll() is not None:
            raise ClusterError(f"Ray ended while starting: {last_log_line(log) or f'no output in {log}'}")
        try:
            with opener.open(f"http://{LOOPBACK}:{port}/api/version", timeout=2):
                return
        except urllib.error.HTTPError:
            return  # it asks for the token, so it is up
        except OSError:
            time.sleep(0.5)
    raise ClusterError(f"Ray did not answer within {MAX_START_SECONDS:.0f} s, see {log}")


def _end_descendants() -> None:
    """End every process below this one: first the cluster's own shutdown, then what is left, then by force."""
    for number, seconds in ((signal.SIGTERM, MAX_STOP_SECONDS), (signal.SIGKILL, MAX_STOP_SECONDS)):
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while pids := set(_descendants()):
            for pid in pids - signalled:
                _signal(pid, number)
            # A process that is killed can have started another since the list was made: look until none is left.
            signalled = set() if number == signal.SIGKILL else signalled | pids
            _reap()
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants() -> Iterator[int]:
    """The processes below this one, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            # The name of a process stands in parentheses and may hold any character, so count from the last one.
            state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        children.setdefault(int(parent), []).append(int(entry.name) if state != "Z" else -int(entry.name))
    pending = [os.getpid()]
    while pending:
        for pid in children.get(pending.pop(), []):
            pending.append(abs(pid))
            if pid > 0:
                yield pid


if __name__ == "__main__":
    sys.exit(main())
