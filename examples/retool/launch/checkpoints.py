"""What can be told of checkpoints without loading them: Hugging Face ones, and Megatron's.

Contract: standard library only. A file that may not be read is taken as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.settings import has_content
from retool.paths import LFS_POINTER

MADE_FROM = ".retool_ref_load"  # beside a run's checkpoints: the weights that the run was started from
TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json")


def read_config(folder: str) -> dict[str, Any] | None:
    """The model's part of a checkpoint's config.json; {} where it cannot be understood, None where there is none."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        return None
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")  # of a model with more than text
    return text if isinstance(text, dict) else config


def rope_theta(config: dict[str, Any]) -> str | None:
    """Rope theta of a config as a whole number, None where there is none. Newer ones keep it in rope_parameters."""
    parameters = config.get("rope_parameters")
    theta = (parameters.get("rope_theta") if isinstance(parameters, dict) else None) or config.get("rope_theta")
    try:
        return str(int(float(theta or "none")))
    except (TypeError, ValueError, OverflowError):
        return None


def last_iteration(folder: str) -> str | None:
    """The folder of the newest checkpoint of a Megatron run, as its tracker file names it; None without that file."""
    try:
        iteration = Path(folder, TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return f"iter_{int(iteration):07d}" if iteration.isascii() and iteration.isdigit() else iteration


def is_whole(folder: str) -> bool:
    """Whether the folder holds a whole Megatron checkpoint: the tracker file is written last and names its folder."""
    iteration = last_iteration(folder)
    return bool(iteration) and os.path.isdir(os.path.join(folder, iteration or ""))


def started_from(folder: str) -> str:
    """The REF_LOAD that the run in a folder was started from, "" where it is not known."""
    try:
        return Path(folder, MADE_FROM).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def note_start(folder: str, ref_load: str) -> None:
    """Keep beside the checkpoints what a run starts from, unless it goes on with one that is there."""
    if not is_whole(folder):
        Path(folder, MADE_FROM).write_text(f"{ref_load}\n", encoding="utf-8")


def missing_files(folder: str) -> Iterator[str]:
    """What a Hugging Face checkpoint lacks: weight files, all shards that its index names, a tokenizer."""
    files = weight_files(folder)
    if isinstance(files, str):
        yield files
    else:
        missing = [name for name in files if not has_content(os.path.join(folder, name))]
        pointers = [name for name in files if name not in missing and _is_pointer(os.path.join(folder, name))]
        for names, what in ((missing, "missing"), (pointers, "Git LFS pointers, not weights")):
            if names:
                yield f"{len(names)} of {len(files)} weight files are {what}: {', '.join(names[:4])}"
    if not any(has_content(os.path.join(folder, name)) for name in TOKENIZER_FILES):
        yield f"no tokenizer in it ({', '.join(TOKENIZER_FILES)})"


def weight_files(folder: str) -> list[str] | str:
    """The names of the weight files, those that an index names included, or why they cannot be told."""
    for name in INDEXES:
        if os.path.isfile(os.path.join(folder, name)):
            try:
                shards = json.loads(Path(folder, name).read_text(encoding="utf-8"))["weight_map"].values()
                return sorted({str(shard) for shard in shards})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                return f"{name} cannot be read ({error})"
    found = [name for name in WEIGHTS if has_content(os.path.join(folder, name))]
    return found[:1] or f"no weights in it ({', '.join(WEIGHTS + INDEXES)})"


def _is_pointer(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def weight_bytes(folder: str) -> tuple[int, int]:
    """The size of a checkpoint's weights, and of one parameter in it; (0, 2) where the files cannot be told."""
    files = weight_files(folder)
    sizes = [os.path.getsize(path) for path in (os.path.join(folder, name) for name in files) if os.path.isfile(path)]
    config = read_config(folder) or {}
    kind = config.get("dtype") or config.get("torch_dtype")
    return (0 if isinstance(files, str) else sum(sizes)), (4 if kind == "float32" else 2)
