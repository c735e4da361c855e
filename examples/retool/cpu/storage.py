"""Where a run keeps things: its folder, samples.jsonl, and the cache that lives longer than the run."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu.options import OUTPUTS, RunError

MODEL_MB, RUN_MB = 700, 50  # disk that the prepared model and a run's logs and samples take


def new_output(named: Path | None) -> Path:
    """A folder that no other run has, made.

    Args:
        named: by --output; None for one that is named after the time.

    Raises:
        RunError: it exists already, or cannot be made.
    """
    parent = named.parent if named else OUTPUTS
    make_folder(parent, RUN_MB, "--output")
    names = [named.name] if named else _names_by_time()
    for name in names:
        with _explained(parent / name):
            try:
                (parent / name).mkdir()  # of two runs at once, one gets it
                return parent / name
            except FileExistsError:
                continue
    raise RunError(f"--output {named} exists already; every run has a folder of its own")


def _names_by_time() -> Iterator[str]:
    now = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    yield now
    yield from (f"{now}_{number}" for number in itertools.count(2))


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """TMPDIR is a folder of the run's own inside, so that nothing is left in the user's, however the run ends."""
    folder = tempfile.mkdtemp(prefix="run.", dir=make_folder(cache_folder(), RUN_MB, "the variable RETOOL_CACHE"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_folder(path: Path, needed_mb: int, option: str) -> None:
    """Whether a folder could be made and filled, by what is there of it; nothing is made.

    Args:
        needed_mb: that have to be free in it.
        option: what names another one, for the message.

    Raises:
        RunError: it could not, or the disk is too full.
    """
    there = path
    while not os.path.lexists(there):
        there = there.parent
    if not os.path.isdir(there):
        raise RunError(f"cannot make the folder {path}: {there} is none; name another with {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"cannot write to the folder {there.resolve()}; name another with {option}")
    free_mb = shutil.disk_usage(there).free >> 20
    if free_mb < needed_mb:
        raise RunError(f"{there} has {free_mb} MB free and {needed_mb} MB are needed; name another with {option}")


def make_folder(path: Path, needed_mb: int, option: str) -> Path:
    """The folder, made if it is not there. Arguments and errors are those of `check_folder`."""
    check_folder(path, needed_mb, option)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror}; name another with {option}") from error
    return path


def cache_folder() -> Path:
    """Where models outlive the run. The scripts set RETOOL_CACHE; cache.sh holds the rule."""
    if not (folder := os.environ.get("RETOOL_CACHE")):
        raise RunError("RETOOL_CACHE is not set: start the run with rollout_on_cpu.sh, or name a folder for the model")
    return Path(folder)


class SampleFile:
    """samples.jsonl: every sample is on disk as soon as it is finished, so what is done survives whatever comes."""

    def __init__(self, path: Path):
        self.path = path
        with _explained(path):
            self._file = path.open("w", encoding="utf-8")

    def write(self, sample: Any) -> None:
        with _explained(self.path):
            self._file.write(json.dumps(sample_record(sample), ensure_ascii=False, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every line was flushed, or its error reported, when it was written
            self._file.close()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another place with --output") from error


def sample_record(sample: Any) -> dict[str, Any]:
    """What a line of samples.jsonl holds of one of vime's samples."""
    fields = ["index", "group_index", "prompt", "label", "response", "reward", "response_length", "loss_mask"]
    fields += ["rollout_log_probs", "tokens", "remove_sample", "non_generation_time", "metadata"]
    record = {name: getattr(sample, name) for name in fields}
    return record | {"status": sample.status.value, "tool_call_count": getattr(sample, "tool_call_count", 0)}
