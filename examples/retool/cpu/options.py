"""The options of the CPU run, and the error that ends it. Standard library only: read before anything is installed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

CPU = Path(__file__).resolve().parent
EXAMPLE = CPU.parent
PROBLEMS = CPU / "problems.jsonl"
OUTPUTS = Path("outputs", "retool_on_cpu")
DEFAULT_LIMIT = 12  # of these; the run says beforehand how long they may take
# At 1.0 the packaged model seldom closes its code block. The engine scores at this temperature, as vime has it score.
TEMPERATURE = 0.6


class RunError(Exception):
    """The run cannot go on. The message is one line that names the thing and the way out."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, each checked as far as that needs no file.

    Args:
        arguments: the command line without the program; None for this process's own.

    Returns:
        problems, limit (None: all), samples, engine, keep_engine, model, max_tokens, output, seed, examples (None:
        only for the packaged model) and logprob_limit.

    Raises:
        SystemExit: after --help with code 0, after a wrong option with code 2 and one line that says what was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="rollout_on_cpu.sh",
        description="Real rollouts with tool calls on the CPU. VIME_ROOT names a vime checkout to go through.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--problems",
        metavar="FILE",
        type=Path,
        help="jsonl: prompt, label (default: 42 problems of growing difficulty)",
    )
    add(
        "--limit",
        metavar="N",
        type=_positive,
        help=f"only the first N problems (default: {DEFAULT_LIMIT} of the 42, all of a FILE)",
    )
    add("--samples", metavar="N", type=_positive, default=1, help="samples per problem (default: %(default)s)")
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument(
        "--engine",
        metavar="URL",
        type=_url,
        help="a vLLM that is already up, on a GPU or not (default: one is started)",
    )
    engine.add_argument(
        "--keep-engine", action="store_true", help="leave the engine up after the run, for --engine of the next one"
    )
    add("--model", metavar="DIR", type=Path, help="a model's directory (default: SmolLM2-135M, which pip brings)")
    add("--max-tokens", metavar="N", type=_positive, default=512, help="response budget (default: %(default)s)")
    add(
        "--output",
        metavar="DIR",
        type=Path,
        help=f"a new folder for samples.jsonl and logs (default: {OUTPUTS}/DATE)",
    )
    add("--seed", metavar="N", type=_seed, default=42, help="of the sampling (default: %(default)s)")
    add(
        "--examples",
        action=argparse.BooleanOptionalAction,
        help="put worked examples before each problem (default: only for the packaged model, which is too small to "
        "call a tool unless it is shown how)",
    )
    add(
        "--logprob-limit",
        metavar="X",
        type=_limit,
        default=0.001,
        help="largest mean difference to transformers' log-probs (default: %(default)s, for an engine in float32; one "
        "in bfloat16 needs about 0.05)",
    )
    options = parser.parse_args(arguments)
    if options.problems is None:
        options.problems = PROBLEMS
        options.limit = options.limit or DEFAULT_LIMIT
    return options


def _positive(text: str) -> int:
    return int(_number(text, int, "a whole number, at least 1", lambda number: number >= 1))


def _seed(text: str) -> int:
    return int(_number(text, int, "a whole number from 0 to 4294967295", lambda number: 0 <= number < 2**32))


def _limit(text: str) -> float:
    return _number(text, float, "a positive number", lambda number: 0 < number < math.inf)


def _number(text: str, kind: type, what: str, fits: Callable[[float], bool]) -> float:
    try:
        if fits(number := kind(text)):
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not {what}")


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        usable = parts.scheme == "http" and parts.hostname and not parts.path.strip("/") and (parts.port or 80)
    except ValueError:
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text}: vime talks to http://HOST:PORT, without a path")
    return text.rstrip("/")
