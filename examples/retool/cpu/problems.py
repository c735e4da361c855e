"""The problems of a run and the worked examples that go before them. Standard library only.

Contract: a problem is checked line by line before anything starts; RunError names the file and the line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from cpu.options import RunError
from retool import chat

ROLES = ("system", "user", "assistant", "tool")


class Problem(NamedTuple):
    prompt: str | list[dict[str, Any]]
    label: str | int | float
    where: str  # FILE:LINE, for messages

    @property
    def question(self) -> str:
        """The text of the last user turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        return [_text(message) for message in self.prompt if message["role"] == "user"][-1]


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The problems of a file, one JSON object with prompt and label a line.

    Args:
        path: UTF-8 text, with or without a byte order mark.
        limit: only the first so many; the lines after them are checked too.

    Raises:
        RunError: the file cannot be read, or a line is no problem; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
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
    if not prompt or not isinstance(prompt, str | list):
        raise RunError(f'{where}: "prompt" must be a text or a list of messages ({_keys(row)})')
    if isinstance(prompt, str) and not prompt.strip():
        raise RunError(f'{where}: "prompt" is blank')
    if isinstance(prompt, list):
        _check_messages(prompt, where)
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise RunError(f'{where}: "label" must be the answer, a text or a number ({_keys(row)})')
    if isinstance(label, float) and not math.isfinite(label) or str(label).strip().lower() == "nan":
        raise RunError(f'{where}: "label" is {label}, which is no answer')
    return Problem(prompt, label, where)


def _check_messages(messages: list[Any], where: str) -> None:
    for number, message in enumerate(messages, 1):
        which = f"{where}: message {number} of the prompt"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RunError(f'{which} must be an object with a "role" out of {", ".join(ROLES)}')
        if message["role"] == "system" and number > 1:
            raise RunError(f"{which} is a system message, which can only be the first")
        if message["role"] in ("user", "tool") and not _text(message).strip():
            raise RunError(f"{which}, a {message['role']} message, has no text")
    if not any(message["role"] == "user" for message in messages):
        raise RunError(f"{where}: the prompt has no user message")
    if messages[-1]["role"] not in ("user", "tool"):
        raise RunError(f"{where}: the prompt must end with a user or tool message, for the model to answer")


def _text(message: dict[str, Any]) -> str:
    try:
        return chat.text_of(message)
    except ValueError:  # it holds something else than text
        return ""


def _keys(row: dict[str, Any]) -> str:
    return "the row has " + (", ".join(map(repr, row)) or "no keys")


class WorkedExample(NamedTuple):
    question: str
    code: str
    answer: str  # which is what the code prints: a test runs it


WORKED_EXAMPLES = (
    WorkedExample("What is 12 * 34?", "print(12 * 34)", "408"),
    WorkedExample(
        "What is the sum of the squares of the numbers from 1 to 10?",
        "print(sum(n * n for n in range(1, 11)))",
        "385",
    ),
    WorkedExample(
        "How many positive divisors does 360 have?",
        "print(sum(360 % d == 0 for d in range(1, 361)))",
        "24",
    ),
    WorkedExample(
        "What is the least common multiple of 12 and 18?",
        "import math\nprint(math.lcm(12, 18))",
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
        observation = f"<interpreter>\n{example.answer}\n</interpreter>"
        # Three newlines: the loop encodes an observation by itself, where the packaged model's tokenizer makes one
        # token of its last two newlines. In a text that goes on it splits them, and shown that, the model goes on with
        # a newline and loses its way instead of answering.
        answer = f"\n\n\nAnswer: \\boxed{{{example.answer}}}"
        shown.append({"role": "user", "content": example.question})
        shown.append({"role": "assistant", "content": f"{call}\n\n{observation}{answer}"})
    return system + shown + messages
