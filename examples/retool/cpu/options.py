"""The options of the CPU run, and the error that ends it. Standard library only: read before anything is installed."""

from __future__ import annotations

import argparse
from pathlib import Path

CPU = Path(__file__).resolve().parent
EXAMPLE = CPU.parent


# At 1.0 the packaged model seldom closes its code block. The engine scores at this temperature, as vime has it score.
TEMPERATURE = 0.6


class RunError(Exception):
    """The run cannot go on. The message is one line that names the thing and the way out."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rollout_on_cpu.sh",
        description="Real rollouts with tool calls on the CPU. VIME_ROOT names a vime checkout to go through.",
    )
    add = parser.add_argument
    add("--problems", metavar="FILE", type=Path, default=CPU / "problems.jsonl", help="jsonl: prompt, label")
    add("--limit", metavar="N", type=positive, help="only the first N problems")
    add("--samples", metavar="N", type=positive, default=1, help="samples per problem (default: %(default)s)")
    add("--engine", metavar="URL", help="a vLLM that is already up, on a GPU or not (default: one is started)")
    add("--model", metavar="DIR", type=Path, help="a model's directory (default: SmolLM2-135M, which pip brings)")
    add("--max-tokens", metavar="N", type=positive, default=512, help="response budget (default: %(default)s)")
    add("--output", metavar="DIR", type=Path, help="for samples.jsonl and logs (default: outputs/retool_on_cpu/DATE)")
    add("--seed", metavar="N", type=int, default=42, help="of the sampling (default: %(default)s)")
    add(
        "--examples",
        action=argparse.BooleanOptionalAction,
        help="put worked examples before each problem (default: only for the packaged model, which is too small to "
        "call a tool unless it is shown how)",
    )
    add(
        "--logprob-limit",
        metavar="X",
        type=float,
        default=0.001,
        help="largest mean difference to transformers' log-probs (default: %(default)s, for an engine in float32; one "
        "in bfloat16 needs about 0.05)",
    )
    options = parser.parse_args(arguments)
    if options.examples is None:
        options.examples = options.model is None and options.engine is None
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
