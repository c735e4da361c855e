#!/usr/bin/env python3
"""Submit a training script to a Ray cluster that runs already, show its log, and exit with the job's own status.

    python3 ray_job.py --address http://HOST:8265 --runtime-env-json '{...}' --lock SAVE/.lock -- python3 train.py ...

Contract: a broken log stream, an unreachable dashboard or a closed terminal is not the end of the job: its status is
asked for, and its log followed again from where it broke off, until the status is an end. The exit code is 0 only for
a job that succeeded. The job belongs to the cluster: when this program is interrupted, the job goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from launch.supervise import LaunchError, locked
from retool.processes import Stopped, raise_on_stop_signals

POLL_SECONDS = 5.0
MAX_SILENCE_SECONDS = 1800.0  # after which nothing more is to be learned of the job from here
FOLDER_KEY = "retool_save"  # of a job's metadata: the folder it writes its checkpoints to


def main() -> int:
    args = _parse_args()
    raise_on_stop_signals()
    job_id = f"retool-{uuid.uuid4().hex[:12]}"
    submitted = False
    try:
        with locked(args.lock, f"only one launch may write to {args.lock.parent}"):
            client = _connect(args.address)
            _refuse_second_writer(client, str(args.lock.parent))
            _submit(client, job_id, args)
            submitted = True
            print(f"# job {job_id}; to end it: ray job stop --address {args.address} {job_id}", flush=True)
            return follow(client, job_id)
    except Stopped as stopped:
        if submitted:
            print(f"the job goes on; its log: ray job logs --address {args.address} -f {job_id}", file=sys.stderr)
        return stopped.exit_code
    except (LaunchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Submit a command to a running Ray cluster and follow it to its end.")
    parser.add_argument("--address", required=True, help="of the cluster's dashboard, http://HOST:8265")
    parser.add_argument("--runtime-env-json", type=json.loads, default={}, help='{"env_vars": {...}}')
    parser.add_argument("--lock", type=Path, required=True, help="a lock file that is held while the job is followed")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _connect(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient  # seconds to import

    try:
        return JobSubmissionClient(address)
    except Exception as error:  # connection, version and authentication errors of several libraries
        raise LaunchError(f"no Ray cluster answers at RAY_ADDRESS {address}: {_one_line(error)}") from error


def _refuse_second_writer(client: Any, folder: str) -> None:
    """A job goes on after its launch has ended, and the lock with it: ask the cluster as well."""
    try:
        jobs = client.list_jobs()
    except Exception as error:
        raise LaunchError(f"the cluster does not list its jobs: {_one_line(error)}") from error
    for job in jobs:
        if (job.metadata or {}).get(FOLDER_KEY) == folder and not job.status.is_terminal():
            raise LaunchError(f"only one launch may write to {folder}: job {job.submission_id} does that now")


def _submit(client: Any, job_id: str, args: argparse.Namespace) -> None:
    try:
        client.submit_job(
            entrypoint=shlex.join(args.command),
            submission_id=job_id,
            runtime_env=args.runtime_env_json,
            metadata={FOLDER_KEY: str(args.lock.parent)},
        )
    except Exception as error:
        raise LaunchError(f"the cluster did not take the job: {_one_line(error)}") from error


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


if __name__ == "__main__":
    sys.exit(main())
