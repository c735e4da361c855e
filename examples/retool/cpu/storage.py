"""Where a run keeps things: its folder, samples.jsonl, and the cache that lives longer than the run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu.options import RunError

MODEL_MB, RUN_MB = 700, 50  # disk that the prepared model and a run's logs and samples take


def make_folder(path: Path, needed_mb: int, option: str) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(path).free >> 20
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror}; name another with {option}") from error
    if free_mb < needed_mb:
        raise RunError(f"{path} has {free_mb} MB free and {needed_mb} MB are needed; name another with {option}")
    if not os.access(path, os.W_OK):
        raise RunError(f"cannot write to the folder {path}; name another with {option}")
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
        with self._explained():
            self._file = path.open("w", encoding="utf-8")

    def write(self, sample: Any) -> None:
        with self._explained():
            self._file.write(json.dumps(sample_record(sample), ensure_ascii=False, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every line was flushed, or its error reported, when it was written
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}; name another place with --output") from error


def sample_record(sample: Any) -> dict[str, Any]:
    fields = ["index", "group_index", "prompt", "label", "response", "reward", "response_length", "loss_mask"]
    fields += ["rollout_log_probs", "tokens", "remove_sample", "non_generation_time", "metadata"]
    record = {name: getattr(sample, name) for name in fields}
    return record | {"status": sample.status.value, "tool_call_count": getattr(sample, "tool_call_count", 0)}
