#!/usr/bin/env python3
"""Turn DAPO-Math-17k, and the AIME files for evaluation, into prompts for vime: one {"prompt", "label"} per line.

    row  ->  Problem(text, label)  ->  first pass: candidates on disk, labels by key  ->  second pass: output

The published training files wrap each of some 17 thousand problems in two sentences that ask for a line that begins with
"Answer:", and the original one repeats them over 1.79 million rows. Here every problem is kept once, in the order of first appearance, without
those sentences (the system text of RL asks for the answer), with its label as a string. A problem that comes with two
different labels cannot be scored, so all of it is left out, and so is a problem of an evaluation file given by
--exclude. Whatever is left out is counted and printed.

A label is what the answer is compared with: of a worked solution it is what stands after "####" or in its last box, and
a row whose label cannot be told is a bad row, never a guess.

Invariant: memory holds one key and one label per different problem, never the texts, so it does not grow with the
rows; that a problem is contradicted is known only at the end, hence the second pass over the candidates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from retool import actions
from retool.data_io import (
    MAX_BAD_ROWS_SHOWN,
    BadRows,
    DataError,
    Row,
    RowError,
    atomic_output,
    default_output,
    find_data_files,
    openai_messages,
    read_rows,
    readable,
    run_script,
    text_content,
)

DATASET_HELP = "OWNER/NAME of the hub, first looked for below RETOOL_DOWNLOADS (/root); a directory; or a file"
DEFAULT_DATASET = "zhuzilin/dapo-math-17k"
PROMPT_FIELDS = ("prompt", "problem", "question", "input")
CONVERSATION_FIELDS = ("conversations", "messages")  # whose last message is a worked solution
LABEL_FIELDS = ("label", "answer", "output")
PROMPT_COLUMNS = (*PROMPT_FIELDS, *CONVERSATION_FIELDS)
LABEL_COLUMNS = (*LABEL_FIELDS, "reward_model", "solution", *CONVERSATION_FIELDS)
MAX_LABEL_CHARS = 200  # what is longer is no answer to be compared with a box, but a solution

# The file's own wording and that of its published derivatives, which differ in the form they ask for.
INSTRUCTION_BEFORE = re.compile(
    r"\A\s*Solve the following math problem step by step\.\s*The last line of your response should be of the form\s+"
    r"Answer:[^\n]{1,60}?where \$?(?i:answer) is the answer to the problem\."
)
# It starts with a literal: this pattern is searched for in 1.79 million texts.
INSTRUCTION_AFTER = re.compile(
    r"Remember to put your answer on its own line after [\"“']Answer:[\"”']"
    r"(?:, and you do not need to use a \\boxed command)?\.?\s*\Z"
)
INTEGER = re.compile(r"[+-]?\d+")
# For --exclude: a problem is the same however its formulas are set; signs and operators still tell problems apart.
LAYOUT_COMMAND = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text|mathrm)(?![a-z])|\\[dt](?=frac)")
NOT_CONTENT = re.compile(r"[^\w+\-*/=<>^!%.]|_|\.(?!\d)")


class Problem(NamedTuple):
    text: str  # without the instruction sentences
    prompt: str  # what is written: the text, or with --keep-instruction the row's own prompt
    label: str
    has_instruction: bool  # both sentences were found
    has_system: bool  # a system message came with it, and is not written: RL has its own


class Seen(NamedTuple):
    """What the first pass knows of the different problems, by `problem_key`."""

    labels: dict[bytes, str]
    contradictions: dict[bytes, str]  # place and labels of the first row that disagrees
    excluded: set[bytes]


class Tally(NamedTuple):
    rows: int
    duplicates: int
    without_instruction: int
    with_system: int


def parse_row(data: dict[str, Any], keep_instruction: bool = False) -> Problem:
    """The problem and label of a row, whichever of the published layouts it has.

    Args:
        data: {"prompt": str or messages, "label"} with the names of PROMPT_FIELDS and LABEL_FIELDS,
            {"prompt", "reward_model": {"ground_truth"}}, {"problem", "solution"} or {"conversations"}.
        keep_instruction: whether the prompt stays as it is.

    Raises:
        RowError: the row has no usable problem or label.
    """
    messages = prompt_messages(data)
    prompt = _user_text(messages).strip()
    text, has_instruction = strip_instruction(prompt)
    if not text:
        raise RowError("the problem is empty")
    has_system = any(message.get("role") == "system" for message in messages)
    return Problem(text, prompt if keep_instruction else text, label_text(data), has_instruction, has_system)


def strip_instruction(prompt: str) -> tuple[str, bool]:
    """The problem without DAPO's sentences before and after it, and whether both were there."""
    text, before = INSTRUCTION_BEFORE.subn("", prompt)
    text, after = INSTRUCTION_AFTER.subn("", text)
    return text.strip(), bool(before and after)


def prompt_text(data: dict[str, Any]) -> str:
    """The user's text of a row.

    Raises:
        RowError: there is none, or more than one.
    """
    return _user_text(prompt_messages(data))


def prompt_messages(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row as messages: a text is one of the user, a text that is JSON the messages it holds.

    Raises:
        RowError: there is no prompt.
    """
    prompt = _first_present(data, PROMPT_FIELDS)
    if prompt is None and (conversation := _first_present(data, CONVERSATION_FIELDS)) is not None:
        messages = openai_messages(conversation)
        return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
    if isinstance(prompt, str) and prompt.lstrip().startswith(("[", "{")):
        prompt = _messages_in_json(prompt) or prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise RowError(
            f"no prompt (looked for {', '.join(PROMPT_COLUMNS)}; the row has {', '.join(data) or 'nothing'})"
        )
    if not prompt or not all(isinstance(message, dict) for message in prompt):
        raise RowError("the prompt is a list, but not of one user message")
    return openai_messages(prompt)


def _messages_in_json(text: str) -> list[dict[str, Any]] | None:
    """The messages that a text holds as JSON, None where it holds none: problems may begin with a bracket too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    messages = value if isinstance(value, list) else [value]
    are_messages = messages and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in messages)
    return messages if are_messages else None


def _user_text(messages: list[dict[str, Any]]) -> str:
    users = [message for message in messages if message.get("role") == "user"]
    others = {str(message.get("role")) for message in messages} - {"user", "system"}
    if others:
        raise RowError(f"the prompt holds messages of {', '.join(sorted(others))}, and not one question alone")
    if len(users) != 1:
        raise RowError(f"the prompt is a list with {len(users)} user messages, not of one user message")
    content = users[0].get("content")
    return content if isinstance(content, str) else text_content(users[0])


def label_text(data: dict[str, Any]) -> str:
    """The label of a row as text: 34, 34.0 and " 34 " are all "34", and so is "... so #### 34".

    Raises:
        RowError: there is none, or two fields have different ones.
    """
    found = {name: label for name in LABEL_FIELDS if (label := _as_label(data.get(name), name)) is not None}
    model = data.get("reward_model")
    truth = _as_label(model.get("ground_truth"), "ground_truth") if isinstance(model, dict) else None
    if truth is not None:
        found["reward_model.ground_truth"] = truth
    if not found and isinstance(solution := data.get("solution"), str):
        found["solution"] = _solved(solution)
    if not found and (conversation := _first_present(data, CONVERSATION_FIELDS)) is not None:
        last = openai_messages(conversation)[-1:]
        if last and last[0].get("role") == "assistant":
            found["assistant"] = _solved(text_content(last[0]))
    if not found:
        known = f"{', '.join(LABEL_FIELDS)}, reward_model.ground_truth, solution"
        raise RowError(f"no label (looked for {known}; the row has {', '.join(data) or 'nothing'})")
    (first, label), *others = found.items()
    for name, other in others:
        if not _same_label(label, other):
            raise RowError(f"{first} is {label!r}, but {name} is {other!r}")
    return label


def _as_label(value: Any, name: str) -> str | None:
    """The label that a field holds, None where it holds none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    text = str(value).strip()
    if (solved := _final_answer(text)) is not None:
        return solved
    if actions.find_boxes(text) or len(text) > MAX_LABEL_CHARS or ("\n" in text and "\\begin" not in text):
        raise RowError(f"{name} is a worked solution without '#### ...' or a box in it, and no label")
    return text


def _solved(solution: str) -> str:
    answer = _final_answer(solution)
    if answer is None:
        raise RowError("no label: the worked solution has no '#### ...' and no box")
    return answer


def _final_answer(text: str) -> str | None:
    """What a worked solution ends in: after GSM8K's ####, its thousands without commas, or in the last box."""
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        return re.sub(r"(?<=\d),(?=\d{3})", "", after.strip().splitlines()[0].strip().lstrip("$"))
    return actions.last_box(text) or None


def _first_present(data: dict[str, Any], names: Iterable[str]) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), None)


def problem_key(text: str) -> bytes:
    """Equal for texts that differ in white space alone."""
    return _digest(" ".join(text.split()))


def evaluation_key(text: str) -> bytes:
    """Equal for problems that differ in typesetting alone: white space, case, dollars, brackets, punctuation."""
    plain = LAYOUT_COMMAND.sub("", unicodedata.normalize("NFKC", text)).casefold()
    return _digest(NOT_CONTENT.sub("", plain))


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _same_label(one: str, other: str) -> bool:
    if INTEGER.fullmatch(one) and INTEGER.fullmatch(other):
        return _canonical_integer(one) == _canonical_integer(other)
    return one == other


def _canonical_integer(text: str) -> str:
    """ "+025" -> "25"; on the text, since int() refuses more than 4300 digits."""
    sign, digits = ("-", text[1:]) if text[0] == "-" else ("", text.lstrip("+"))
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits


def excluded_keys(files: Iterable[str]) -> set[bytes]:
    """The evaluation keys of all problems in the files.

    Raises:
        DataError: a file is missing, or a row of it has no problem: its problem would stay in the training data.
    """
    keys = set()
    for name in files:
        for row in read_rows(find_data_files(name), [PROMPT_COLUMNS], "excluding"):
            try:
                text, _ = strip_instruction(prompt_text(readable(row)))
            except RowError as error:
                raise DataError(f"--exclude {name}: {row.place}: {error}") from error
            keys.add(evaluation_key(text))
    return keys


def collect(
    rows: Iterable[Row],
    candidates: IO[str],
    bad: BadRows,
    evaluation: set[bytes],
    keep_instruction: bool = False,
) -> tuple[Seen, Tally]:
    """First pass: write the rows that may be kept to `candidates`, and note which problems may not.

    Args:
        evaluation: evaluation keys of the problems to leave out.
    """
    seen = Seen({}, {}, set())
    total = duplicates = without_instruction = with_system = 0
    for row in rows:
        total += 1
        try:
            problem = parse_row(readable(row), keep_instruction)
        except RowError as error:
            bad.add(row.place, str(error))
            continue
        key = problem_key(problem.text)
        label = seen.labels.get(key)
        if label is None:
            seen.labels[key] = sys.intern(problem.label)  # few labels are different: one string each saves memory
            without_instruction += not problem.has_instruction
            with_system += problem.has_system
            if evaluation_key(problem.text) in evaluation:
                seen.excluded.add(key)
            else:
                _write(candidates, {"prompt": problem.prompt, "label": problem.label})
        else:
            duplicates += 1
            if not _same_label(label, problem.label):
                seen.contradictions.setdefault(key, f"{row.place}: label {problem.label!r}, earlier {label!r}")
    return seen, Tally(total, duplicates, without_instruction, with_system)


def copy_uncontradicted(candidates: IO[str], output: IO[str], contradicted: Collection[bytes]) -> int:
    """Second pass: copy the candidates whose problem has one label; returns how many lines were written."""
    written = 0
    for line in candidates:
        text, _ = strip_instruction(json.loads(line)["prompt"])
        if problem_key(text) not in contradicted:
            output.write(line)
            written += 1
    return written


def _write(file: IO[str], record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> int:
    args = _parse_args()
    evaluation = excluded_keys(args.exclude)
    bad = BadRows()
    files = find_data_files(args.dataset, args.split, args.config)
    if any(os.path.realpath(file) == os.path.realpath(args.output) for file in files):
        raise DataError(f"{args.output}: is the file that is read; name another --output")
    rows = read_rows(files, [PROMPT_COLUMNS, LABEL_COLUMNS], "reading")
    with (
        atomic_output(args.output, "w") as output,
        # Beside the output: it is as large, and TMPDIR may not hold it.
        tempfile.TemporaryFile("w+", encoding="utf-8", dir=os.path.dirname(output.name)) as candidates,
    ):
        seen, tally = collect(rows, candidates, bad, evaluation, args.keep_instruction)
        if bad.too_many(tally.rows):
            raise DataError(f"{bad.count} of {tally.rows} rows cannot be used; nothing was written")
        candidates.seek(0)
        written = copy_uncontradicted(candidates, output, seen.contradictions)
        if not written:
            raise DataError(f"no problem of {tally.rows} rows is left; nothing was written")
    _report(args, seen, tally, bad.count, written)
    return 0


def _report(args: argparse.Namespace, seen: Seen, tally: Tally, bad: int, written: int) -> None:
    for where in list(seen.contradictions.values())[:MAX_BAD_ROWS_SHOWN]:
        print(f"two labels for one problem: {where}")
    print(f"{args.output}: {written} of {tally.rows} rows")
    print(f"  different problems: {len(seen.labels)}, duplicates removed: {tally.duplicates}, bad rows: {bad}")
    print(f"  left out: {len(seen.contradictions)} with two labels, {len(seen.excluded)} of an evaluation file")
    if tally.without_instruction:
        print(f"  without DAPO's instruction sentences, taken as they are: {tally.without_instruction}")
    if tally.with_system:
        print(f"  system messages left out, since RL has its own: {tally.with_system}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepare DAPO-Math-17k or an AIME file for vime.")
    parser.add_argument("--dataset", default=DEFAULT_DATASET, help=f"{DATASET_HELP} (default: {DEFAULT_DATASET})")
    parser.add_argument("--split", help="of a directory or hub name (default: train, or the only one)")
    parser.add_argument("--config", help="of a directory or hub name, where there are several")
    parser.add_argument(
        "--output", type=Path, help="default: where the launch scripts look, data/retool/NAME.jsonl in vime"
    )
    parser.add_argument("--keep-instruction", action="store_true", help="leave DAPO's two sentences in the prompt")
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="leave out the problems of these files",
    )
    args = parser.parse_args()
    if args.output is None:
        name = Path(args.dataset).name.lower()
        args.output = default_output(f"{name.partition('.')[0]}.jsonl")
    if args.output.suffix != ".jsonl":
        parser.error("--output must end in .jsonl: vime tells the format by the ending")
    return args


if __name__ == "__main__":
    run_script(main)
