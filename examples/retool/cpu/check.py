"""What is wrong with a run's input, said before anything is installed or started. Standard library only.

    python -P -m cpu.check OPTIONS        exit code 0: go on; ANSWERED: --help was; else an error was printed
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from cpu.options import EXAMPLE, OUTPUTS, RunError, parse_options
from cpu.problems import Problem, read_problems
from cpu.storage import RUN_MB, check_folder
from retool.paths import closed_folder

ANSWERED = 10
STANDIN = EXAMPLE.parents[1] / "tests" / "retool" / "standin"
MAX_MODEL_LEN = 8192  # tokens; what the packaged model can, and a bound on the KV cache of a larger one


class Input(NamedTuple):
    """What the options name, found and checked."""

    problems: list[Problem]
    vime: Path
    model: Path | None  # None: the packaged one


def check_input(options: argparse.Namespace) -> Input:
    """What the options name.

    Raises:
        RunError: a file or folder is not what it has to be.
    """
    if options.output and os.path.lexists(options.output):
        raise RunError(f"--output {options.output} exists already; every run has a folder of its own")
    check_folder(options.output.parent if options.output else OUTPUTS, RUN_MB, "--output")
    if options.model:
        model_length(options.model)
    return Input(read_problems(options.problems, options.limit), _find_vime(), options.model)


def model_length(model: Path) -> int:
    """Tokens of context to serve the model in this directory with.

    Raises:
        RunError: it holds no model.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--model {model} is no model directory: its config.json cannot be read ({error})") from error
    return min(config.get("max_position_embeddings") or MAX_MODEL_LEN, MAX_MODEL_LEN)


def _find_vime() -> Path:
    root = os.environ.get("VIME_ROOT")
    folder = Path(root) if root else STANDIN
    if not os.path.isfile(folder / "vime" / "rollout" / "vllm_rollout.py"):
        if root and (closed := closed_folder(folder / "vime" / "rollout" / "vllm_rollout.py")):
            raise RunError(f"VIME_ROOT={root}: no permission to look into {closed}")
        if root:
            raise RunError(f"VIME_ROOT={root} is no vime checkout: it has no vime/rollout/vllm_rollout.py")
        raise RunError(f"the stand-in for vime is not at {folder}: name a vime checkout in VIME_ROOT")
    return folder


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse_options(arguments)
    except SystemExit as answered:
        return ANSWERED if answered.code == 0 else 2
    try:
        check_input(options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
