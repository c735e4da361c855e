"""Submit a training script to a Ray cluster that runs already, show its log, and return the job's own status.

Contract: a broken log stream, an unreachable dashboard or a closed terminal is not the end of the job: its status is
asked for, and its log followed again from where it broke off, until the status is an end. The exit code is 0 only for
a job that succeeded. The job belongs to the cluster: when the launch is interrupted, the job goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shlex
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from typing import Any

from launch.checkpoints import is_whole, note_start
from launch.settings import PLUGIN, Launch
from retool.processes import Stopped, raise_on_stop_signals
from retool.supervise import LaunchError, locked

ANSWER_SECONDS = 10.0
POLL_SECONDS = 5.0
MAX_SILENCE_SECONDS = 1800.0  # after which nothing more is to be learned of the job from here
FOLDER_KEY = "retool_save"  # of a job's metadata: the folder it writes its checkpoints to


def run(launch: Launch) -> int:
    """Make the checkpoint on the cluster if need be, run the job there; returns the job's exit code."""
    settings = launch.settings
    raise_on_stop_signals()
    try:
        with locked(launch.lock, f"only one launch may write to {launch.lock.parent}"):
            client = _connect(settings.ray_address)
            _refuse_second_writer(client, settings.saved_to)
            if launch.conversion:  # not here: the machine that submits may have no GPU
                convert = ["python3", str(PLUGIN / "launch" / "convert.py"), settings.ref_load]
                if code := _run(client, launch, [*convert, *launch.conversion], gpus=1):
                    return code
                if not is_whole(settings.ref_load):
                    raise LaunchError(
                        f"REF_LOAD: the cluster has made {settings.ref_load}, which is not to be seen here: paths must be "
                        "the same on all machines"
                    )
            note_start(settings.saved_to, settings.ref_load)
            return _run(client, launch, launch.job)
    except Stopped as stopped:
        return stopped.exit_code
    except (LaunchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def resources(address: str) -> dict[str, float]:
    """What Ray has been told to hand out on the cluster, by name ("CPU", "GPU"), in use or not.

    Raises:
        LaunchError: no cluster answers there within seconds.
    """
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it wants a token, which Ray's own client has
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _no_cluster(address, error) from error
    try:
        from ray.util.state import list_nodes

        nodes = list_nodes(address=address, timeout=int(ANSWER_SECONDS), filters=[("state", "=", "ALIVE")])
        found: dict[str, float] = {}
        for node in nodes:
            for name, count in node.resources_total.items():
                found[name] = found.get(name, 0) + count
        return found
    except Exception as error:  # connection, version and authentication errors of several libraries
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> LaunchError:
    return LaunchError(f"no Ray cluster answers at RAY_ADDRESS {address}: {_one_line(error)}")


def _connect(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient  # seconds to import

    try:
        return JobSubmissionClient(address)
    except Exception as error:  # as above
        raise _no_cluster(address, error) from error


def _refuse_second_writer(client: Any, folder: str) -> None:
    """A job goes on after its launch has ended, and the lock with it: ask the cluster as well."""
    try:
        jobs = client.list_jobs()
    except Exception as error:
        raise LaunchError(f"the cluster does not list its jobs: {_one_line(error)}") from error
    for job in jobs:
        if (job.metadata or {}).get(FOLDER_KEY) == folder and not job.status.is_terminal():
            raise LaunchError(f"only one launch may write to {folder}: job {job.submission_id} does that now")


def _run(client: Any, launch: Launch, command: Sequence[str], gpus: int = 0) -> int:
    """Submit a command, with so many GPUs for its own process, and follow it to its end."""
    job, address = f"retool-{uuid.uuid4().hex[:12]}", launch.settings.ray_address
    try:
        client.submit_job(
            entrypoint=shlex.join(command),
            submission_id=job,
            runtime_env={"env_vars": launch.environment},
            metadata={FOLDER_KEY: launch.settings.saved_to},
            entrypoint_num_gpus=gpus,
        )
    except Exception as error:
        raise LaunchError(f"the cluster did not take the job: {_one_line(error)}") from error
    print(f"# job {job}; to end it: ray job stop --address {address} {job}", flush=True)
    try:
        return follow(client, job)
    except Stopped:
        print(f"the job goes on; its log: ray job logs --address {address} -f {job}", file=sys.stderr)
        raise


def follow(client: Any, job_id: str) -> int:
    """Show the job's log until the job has ended.

    Args:
        client: a JobSubmissionClient, of which `tail_job_logs` and `get_job_info` are used.

    Returns:
        0 if the job succeeded; else the exit code of its program, or 1 where Ray does not know it.

    Raises:
        LaunchError: the cluster has not answered for MAX_SILENCE_SECONDS.
    """
    log = _Log()
    answered = time.monotonic()
    while True:
        reason = log.follow(client, job_id)
        try:
            info = client.get_job_info(job_id)
        except Exception as error:  # any of several libraries' errors means the same: ask again
            reason = f"the cluster does not answer: {_one_line(error)}"
            if time.monotonic() - answered > MAX_SILENCE_SECONDS:
                raise LaunchError(f"{reason}; job {job_id} may still be running") from error
        else:
            answered = time.monotonic()
            if info.status.is_terminal():
                return _exit_code(info, job_id)
        log.say_once(f"{reason or 'the log ended'}; job {job_id} has not ended, waiting for it")
        time.sleep(POLL_SECONDS)


def _exit_code(info: Any, job_id: str) -> int:
    message = " ".join((info.message or "").split())[:500]
    print(f"# job {job_id}: {info.status.value} {message}".rstrip(), file=sys.stderr)
    return 0 if info.status.value == "SUCCEEDED" else int(info.driver_exit_code or 1) or 1


class _Log:
    """What has been shown of a job's log. A stream always begins with the log's start, so that much is left out."""

    def __init__(self) -> None:
        self.shown = 0  # characters
        self._said = ""
        self._open = True

    def follow(self, client: Any, job_id: str) -> str:
        """Show the log from where it broke off until the stream ends; returns why it ended, "" if it just did."""
        try:
            asyncio.run(self._follow(client, job_id))
        except Exception as error:  # a stream breaks with the errors of several libraries
            return f"the log cannot be followed: {_one_line(error)}"
        return ""

    async def _follow(self, client: Any, job_id: str) -> None:
        position = 0
        async for text in client.tail_job_logs(job_id):
            new = text[max(0, self.shown - position) :]
            position += len(text)
            if new:
                self.shown = position
                self._show(new)

    def _show(self, text: str) -> None:
        if self._open:
            try:
                sys.stdout.buffer.write(text.encode("utf-8", "replace"))
                sys.stdout.buffer.flush()
            except OSError:  # a terminal or pipe that was closed
                self._open = False

    def say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            with contextlib.suppress(OSError):
                print(f"# {text}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
