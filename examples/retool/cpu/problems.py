"""The problems of a run and the worked examples that go before them. Standard library only.

Contract: a problem is checked line by line before anything starts; RunError names the file and the line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cpu.options import RunError


class Problem(NamedTuple):
    prompt: str | list[dict[str, Any]]
    label: str | int | float

    @property
    def question(self) -> str:
        """The text of the last user turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [m.get("content") for m in self.prompt if isinstance(m, dict) and m.get("role") == "user"]
        return str(texts[-1]) if texts else ""


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The file's problems, each line checked. RunError names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RunError(f"cannot read the problem file {path}: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RunError(f"the problem file {path} is empty; it needs one JSON object with prompt and label per line")
    return [_read_problem(line, f"{path}:{number}") for number, line in lines][:limit]


def _read_problem(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: this line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RunError(f"{where}: a row must be a JSON object with prompt and label")
    prompt, label = row.get("prompt"), row.get("label")
    is_messages = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not prompt or not (isinstance(prompt, str) or is_messages):
        raise RunError(f'{where}: "prompt" must be a text or a list of messages ({_keys(row)})')
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise RunError(f'{where}: "label" must be the answer, a text or a number ({_keys(row)})')
    return Problem(prompt, label)


def _keys(row: dict[str, Any]) -> str:
    return "the row has " + (", ".join(map(repr, row)) or "no keys")


class WorkedExample(NamedTuple):
    question: str
    code: str
    output: str  # what the sandbox answers to the code: a test runs it
    answer: str


WORKED_EXAMPLES = (
    WorkedExample("What is 12 * 34?", "print(12 * 34)", "Output:\n408", "408"),
    WorkedExample(
        "What is the sum of the squares of the numbers from 1 to 10?",
        "print(sum(n * n for n in range(1, 11)))",
        "Output:\n385",
        "385",
    ),
    WorkedExample(
        "How many positive divisors does 360 have?",
        "print(sum(360 % d == 0 for d in range(1, 361)))",
        "Output:\n24",
        "24",
    ),
    WorkedExample(
        "What is the least common multiple of 12 and 18?",
        "import math\nprint(math.lcm(12, 18))",
        "Output:\n36",
        "36",
    ),
)


def with_examples(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt with the worked examples as earlier turns, after its system message if it has one.

    They speak the dialect of <code> blocks: the packaged model does not manage a call in JSON.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    system = [messages.pop(0)] if messages[0]["role"] == "system" else []
    shown = []
    for example in WORKED_EXAMPLES:
        call = f"<code>\n```python\n{example.code}\n```\n</code>"
        observation = f"<interpreter>\n{example.output}\n</interpreter>"
        # Three newlines: the loop encodes an observation by itself, where the packaged model's tokenizer makes one
        # token of its last two newlines. In a text that goes on it splits them, and shown that, the model goes on with
        # a newline and loses its way instead of answering.
        answer = f"\n\n\nAnswer: \\boxed{{{example.answer}}}"
        shown.append({"role": "user", "content": example.question})
        shown.append({"role": "assistant", "content": f"{call}\n\n{observation}{answer}"})
    return system + shown + messages
