#!/usr/bin/env python3
"""The checks of the launch scripts that need more than a shell: checkpoints, model sizes, flags.

    python3 checks.py rope-theta CONFIG                   -> the checkpoint's rope theta as a whole number
    python3 checks.py checkpoint FOLDER                   -> what the Hugging Face checkpoint lacks
    python3 checks.py megatron FOLDER                     -> whether it is a whole Megatron checkpoint, as exit code
    python3 checks.py model CONFIG NAME -- FLAGS...       -> sizes in which the model script NAME and the config differ
    python3 checks.py flags VIME MEGATRON -- FLAGS...     -> flags that neither vime nor Megatron know

Contract: one line for each thing that is wrong, nothing if nothing is; standard library only; nothing is written.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json")
# What vime compares when the job has started, minutes later. Names in config.json, and the flags of a model script.
SIZES = (
    ("num_hidden_layers", "--num-layers"),
    ("hidden_size", "--hidden-size"),
    ("num_attention_heads", "--num-attention-heads"),
    ("intermediate_size", "--ffn-hidden-size"),
    ("num_key_value_heads", "--num-query-groups"),
)
MOE_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# Where flags are defined: as a text "--name", or as a field of a dataclass that a parser is made from.
FLAG_TEXT = re.compile(r"""["'](--[a-zA-Z][\w-]*)["']""")
FIELD = re.compile(r"^    (\w+)\s*:", re.MULTILINE)
# Other programs' flags under a prefix: the package, and its folders that define flags.
PREFIXED = {"vllm": ("vllm", ("engine", "config", "entrypoints")), "router": ("vllm_router", (".",))}
MAX_SHORT_ALIAS_CHARS = 3  # vLLM's short names of flags (--vllm-dp) are written in no form that can be found


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks of the launch scripts; see the head of this file.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rope-theta").add_argument("config", type=Path)
    commands.add_parser("checkpoint").add_argument("folder", type=Path)
    commands.add_parser("megatron").add_argument("folder", type=Path)
    model = commands.add_parser("model")
    model.add_argument("config", type=Path)
    model.add_argument("name")
    flags = commands.add_parser("flags")
    flags.add_argument("vime", type=Path)
    flags.add_argument("megatron", type=Path)
    own, rest = _split_at_dashes(sys.argv[1:])
    args = parser.parse_args(own)

    if args.command == "megatron":
        return 0 if megatron_checkpoint_is_whole(args.folder) else 1
    if args.command == "rope-theta":
        theta = rope_theta(read_config(args.config))
        if theta is None:
            sys.exit(f"error: {args.config}: no rope theta in it; download the checkpoint again")
        print(theta)
    elif args.command == "checkpoint":
        _print_all(checkpoint_problems(args.folder))
    elif args.command == "model":
        _print_all(model_problems(read_config(args.config), args.name, rest))
    else:
        _print_all(flag_problems(args.vime, args.megatron, rest))
    return 0


def _split_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def read_config(path: Path) -> dict[str, Any]:
    """The model's part of a config.json; exits with one line where it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path}: no rope theta in it ({error}); download the checkpoint again")
    if not isinstance(config, dict):
        sys.exit(f"error: {path}: no rope theta in it (it is no object); download the checkpoint again")
    text = config.get("text_config")  # of a model with more than text
    return text if isinstance(text, dict) else config


def rope_theta(config: dict[str, Any]) -> int | None:
    """Rope theta of a config, None where there is none. Newer transformers keep it in rope_parameters."""
    parameters = config.get("rope_parameters")
    theta = (parameters.get("rope_theta") if isinstance(parameters, dict) else None) or config.get("rope_theta")
    try:
        return int(float(theta or "none"))
    except (TypeError, ValueError, OverflowError):
        return None


def megatron_checkpoint_is_whole(folder: Path) -> bool:
    """Whether the folder holds a whole Megatron checkpoint: the tracker file is written last and names its folder."""
    try:
        iteration = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return False
    if iteration.isascii() and iteration.isdigit():
        iteration = f"iter_{int(iteration):07d}"
    return bool(iteration) and os.path.isdir(folder / iteration)


def checkpoint_problems(folder: Path) -> Iterator[str]:
    """What a Hugging Face checkpoint lacks: weight files, all shards that its index names, a tokenizer."""
    for name in INDEXES:
        if os.path.isfile(folder / name):
            yield from _missing_shards(folder, folder / name)
            break
    else:
        if not any(_has_content(folder / name) for name in WEIGHTS):
            yield f"no weights in it ({', '.join(WEIGHTS + INDEXES)})"
    if not any(_has_content(folder / name) for name in TOKENIZER_FILES):
        yield f"no tokenizer in it ({', '.join(TOKENIZER_FILES)})"


def _missing_shards(folder: Path, index: Path) -> Iterator[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{index.name} cannot be read ({error})"
        return
    missing = [shard for shard in shards if not _has_content(folder / str(shard))]
    if missing:
        yield f"{len(missing)} of {len(shards)} files that {index.name} names are missing: {', '.join(missing[:4])}"


def _has_content(path: Path) -> bool:
    try:
        return os.path.isfile(path) and os.path.getsize(path) > 0
    except OSError:
        return False


def model_problems(config: dict[str, Any], name: str, flags: Sequence[str]) -> Iterator[str]:
    """The sizes in which a model script and a checkpoint's config differ.

    Args:
        config: see `read_config`.
        name: of the model script, for the message.
        flags: the model script's flags, then the user's.
    """
    for key, flag in SIZES:
        if key == "intermediate_size" and any(config.get(moe) for moe in MOE_KEYS):
            continue  # of the dense layers, of which there may be none
        wanted, given = config.get(key), last_value(flag, flags)
        if isinstance(wanted, int) and given is not None and given != str(wanted):
            yield f"{key} is {wanted} in the checkpoint's config.json, but {flag} is {given} in {name}"
    tied = config.get("tie_word_embeddings")
    if isinstance(tied, bool) and flags and tied == ("--untie-embeddings-and-output-weights" in flags):
        yield (
            f"tie_word_embeddings is {str(tied).lower()} in the checkpoint's config.json, but {name} "
            f"{'has' if tied else 'lacks'} --untie-embeddings-and-output-weights"
        )


def last_value(flag: str, flags: Sequence[str]) -> str | None:
    """The value of a flag as argparse takes it: the last one; None where it is not given."""
    value = None
    for number, word in enumerate(flags):
        if word == flag:
            value = flags[number + 1] if number + 1 < len(flags) else None
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def flag_problems(vime: Path, megatron: Path, flags: Iterable[str]) -> Iterator[str]:
    """Flags that are defined nowhere in the sources of vime and Megatron, whose parsers ignore what they do not know.

    The parsers themselves cannot be asked: they import Megatron, vLLM and CUDA, which takes long or fails here.
    """
    known = flags_in(vime / "vime") | flags_in(megatron / "megatron")
    for word in flags:
        flag = word.partition("=")[0].replace("_", "-")
        if re.match(r"--[a-zA-Z]", flag) and not _is_known(flag, known):
            close = difflib.get_close_matches(flag, sorted(known), n=1, cutoff=0.8)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{word.partition('=')[0]} is a flag of neither vime nor Megatron, which would ignore it{hint}"


def _is_known(flag: str, known: set[str]) -> bool:
    negated = re.sub(r"\A--(?:no|disable)-", "--", flag)
    if flag in known or negated in known:
        return True
    prefix, _, name = negated.removeprefix("--").partition("-")
    if prefix not in PREFIXED:
        return False
    package, folders = PREFIXED[prefix]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations or len(name) <= MAX_SHORT_ALIAS_CHARS:
        return True  # launched from where that program is not installed
    root = Path(spec.submodule_search_locations[0])
    theirs = set[str]().union(*(flags_in(root / folder) for folder in folders))
    return f"--{name}" in theirs or f"--{re.sub('^(?:no|disable)-', '', name)}" in theirs


def flags_in(folder: Path) -> set[str]:
    """All flags that the Python files below a folder define, written with dashes."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        try:
            source = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found.update(flag.replace("_", "-") for flag in FLAG_TEXT.findall(source))
        if "dataclass" in source or "@config" in source:
            found.update("--" + field.replace("_", "-") for field in FIELD.findall(source))
    return found


if __name__ == "__main__":
    sys.exit(main())
