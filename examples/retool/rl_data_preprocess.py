#!/usr/bin/env python3
"""Turn DAPO-Math-17k, and the AIME files for evaluation, into prompts for vime: one {"prompt", "label"} per line.

    row  ->  Problem(text, label)  ->  first pass: candidates on disk, labels by key  ->  second pass: output

The published training files wrap each of some 17 thousand problems in two sentences that ask for a line that begins
with "Answer:", and the original one repeats them over 1.79 million rows. Here every problem is kept once, in the order
of first appearance, without those sentences (the system text of RL asks for the answer), with its label as a string. A
problem that comes with two different labels cannot be scored, so all of it is left out, and so is a problem of an
evaluation file given by --exclude. Whatever is left out is counted and printed.

A label is what the answer is compared with: of a worked solution it is what stands after "####" or in its last box,
and a row whose label cannot be told is a bad row, never a guess.

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
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from retool import actions, answers
from retool.chat import CODE_INTERPRETER, IM_START, render_prompt
from retool.conversations import openai_messages, text_content
from retool.data_io import (
    MAX_BAD_ROWS_SHOWN,
    PICTURE_FIELDS,
    BadRows,
    DataError,
    Row,
    RowError,
    add_arguments,
    atomic_output,
    find_data_files,
    find_input_and_output,
    parse,
    read_rows,
    readable,
    run_script,
)

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
# What data sets write where there is no answer, and the columns in which NuminaMath-1.5 says so.
NO_ANSWERS = ("proof", "notfound", "not found", "n/a", "na", "none", "null", "nil", "nan", "unknown", "no answer")
MARKS = {
    "question_type": lambda kind: kind != "proof",
    "problem_is_valid": lambda valid: valid in ("yes", "true", "1"),
    "solution_is_valid": lambda valid: valid in ("yes", "true", "1"),
}
ONE_IN_LIST = re.compile(r"""\[\s*(?:(['"])(?P<text>(?:(?!\1)[^\\])*)\1|(?P<number>-?\d+(?:\.\d+)?))\s*\]""")
ANSWER_IS = re.compile(
    r"\W*(?:(?:so|hence|thus|therefore)\W+)?(?:the )?(?:final |correct )?answer\W*(?:\bis\b|[:=])[\s*:]*(?P<answer>.+?)\.?",
    re.I,
)
DECIMAL = re.compile(r"[+-]?(?:\d+\.\d{12,}|\d+(?:\.\d+)?e[+-]?\d{1,3})", re.I)
# For --exclude: a problem is the same however its formulas are set; signs and operators still tell problems apart.
LAYOUT_COMMAND = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|text|mathrm)(?![a-z])|\\[dt](?=frac)")
NOT_CONTENT = re.compile(r"[^\w+\-*/=<>^!%.]|_|\.(?!\d)")


class NoAnswer(RowError):
    """The data set itself says that the problem has no answer: left out, and no sign of a misread file."""


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
    without_answer: int
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
    if picture := next((name for name in PICTURE_FIELDS if data.get(name)), None):
        raise RowError(f"the problem comes with {picture}, and the model is shown text alone")
    messages = prompt_messages(data)
    prompt = _user_text(messages).strip()
    _refuse_foreign_template(prompt)
    text, has_instruction = strip_instruction(prompt)
    if not text:
        raise RowError("the problem is empty")
    if "<image>" in text:
        raise RowError("the problem speaks of a picture, <image>, and the model is shown text alone")
    has_system = any(message.get("role") in ("system", "developer") for message in messages)
    return Problem(text, prompt if keep_instruction else text, row_label(data), has_instruction, has_system)


def _refuse_foreign_template(prompt: str) -> None:
    """A prompt that was put through a chat template already is refused here for what RL would refuse it for."""
    if prompt.startswith(IM_START):
        try:
            render_prompt(prompt, [CODE_INTERPRETER])
        except ValueError as error:
            raise RowError(str(error)) from error


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
    others = {str(message.get("role")) for message in messages} - {"user", "system", "developer"}
    if others:
        raise RowError(f"the prompt holds messages of {', '.join(sorted(others))}, and not one question alone")
    if len(users) != 1:
        raise RowError(f"the prompt is a list with {len(users)} user messages, not of one user message")
    content = users[0].get("content")
    return content if isinstance(content, str) else text_content(users[0])


def row_label(data: dict[str, Any]) -> str:
    """The label of a row as text: 34, 34.0, " 34 ", ["34"] and "... so #### 34" are all "34".

    Raises:
        NoAnswer: the data set itself says that the problem has none.
        RowError: there is none, it is no text that an answer could say, or two fields have different ones.
    """
    for name, usable in MARKS.items():
        if (mark := data.get(name)) is not None and not usable(str(mark).strip().lower()):
            raise NoAnswer(f"{name} is {mark!r}")
    found = {name: label for name in LABEL_FIELDS if (label := _as_label(data.get(name), name)) is not None}
    model = data.get("reward_model")
    truth = _as_label(model.get("ground_truth"), "ground_truth") if isinstance(model, dict) else None
    if truth is not None:
        found["reward_model.ground_truth"] = truth
    if isinstance(solution := data.get("solution"), str) and (solved := _solved(solution, required=not found)):
        found["solution"] = solved
    if not found and (conversation := _first_present(data, CONVERSATION_FIELDS)) is not None:
        last = openai_messages(conversation)[-1:]
        if last and last[0].get("role") == "assistant":
            found["assistant"] = _solved(text_content(last[0]))
    if not found:
        known = f"{', '.join(LABEL_FIELDS)}, reward_model.ground_truth, solution"
        raise RowError(f"no label (looked for {known}; the row has {', '.join(data) or 'nothing'})")
    (first, label), *others = found.items()
    for name, other in others:
        if not answers.same_answer(label, other):
            raise RowError(f"{first} is {label!r}, but {name} is {other!r}")
    return label


def _as_label(value: Any, name: str) -> str | None:
    """The label that a field holds, None where it holds none."""
    text = _label_of_text(value, name)
    if text is not None and text.strip(" .?!-_").lower() in ("", *NO_ANSWERS):
        raise NoAnswer(f"{name} is {text!r}")
    return text


def _label_of_text(value: Any, name: str) -> str | None:
    if isinstance(value, str) and (listed := ONE_IN_LIST.fullmatch(value.strip())):
        value = listed["text"] or listed["number"]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    text = str(value).strip() if isinstance(value, float) else answers.label_text(value)
    if not text or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if (solved := _final_answer(text)) is not None:
        return solved
    if actions.find_boxes(text) or len(text) > MAX_LABEL_CHARS or ("\n" in text and "\\begin" not in text):
        raise RowError(f"{name} is a worked solution without '#### ...' or a box in it, and no label")
    if re.match(r"""\[\s*['"]""", text):
        raise RowError(f"{name} is a list of answers, {text}")
    if named := ANSWER_IS.fullmatch(text):
        text = named["answer"]
    return _plain_decimal(text, name) if DECIMAL.fullmatch(text) else text


def _plain_decimal(text: str, name: str) -> str:
    """1e-07 as an answer would write it, and 0.30000000000000004 without what its calculation has added."""
    rounded = f"{float(text):.15g}"
    digits = len(re.sub(r"e.*|[^0-9]", "", text, flags=re.I).strip("0"))
    if digits > 15 and len(re.sub(r"e.*|[^0-9]", "", rounded).strip("0")) > 12:
        raise RowError(f"{name} is {text}, which is cut off or rounded: no answer says so")
    return answers.label_text(Decimal(rounded if digits > 15 else text))


def _solved(solution: str, required: bool = True) -> str:
    answer = _final_answer(solution)
    if answer is None and required:
        raise RowError("no label: the worked solution has no '#### ...' and no box")
    return answer or ""


def _final_answer(text: str) -> str | None:
    """What a worked solution ends in: after GSM8K's ####, its thousands without commas, or in the last box."""
    _, mark, after = text.rpartition("####")
    if mark and len(after.strip().splitlines()) == 1:  # of more lines it is a heading
        return re.sub(r"(?<=\d),(?=\d{3})", "", after.strip().lstrip("$"))
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
    total = duplicates = without_answer = without_instruction = with_system = 0
    for row in rows:
        total += 1
        try:
            problem = parse_row(readable(row), keep_instruction)
        except NoAnswer:
            without_answer += 1
            continue
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
            if not answers.same_answer(label, problem.label):
                seen.contradictions.setdefault(key, f"{row.place}: label {problem.label!r}, earlier {label!r}")
    return seen, Tally(total, duplicates, without_answer, without_instruction, with_system)


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
    bad = BadRows()
    files, path = find_input_and_output(args, ".jsonl", lower=True)
    evaluation = excluded_keys(args.exclude)
    rows = read_rows(files, [PROMPT_COLUMNS, LABEL_COLUMNS], "reading", also=list(MARKS))
    with (
        atomic_output(path, "w") as output,
        # Beside the output: it is as large, and TMPDIR may not hold it.
        tempfile.TemporaryFile("w+", encoding="utf-8", dir=os.path.dirname(output.name)) as candidates,
    ):
        seen, tally = collect(rows, candidates, bad, evaluation, args.keep_instruction)
        if bad.too_many(tally.rows):
            raise DataError(f"{bad.count} of {tally.rows} rows cannot be used; nothing was written")
        candidates.seek(0)
        written = copy_uncontradicted(candidates, output, seen.contradictions)
        if not written:
            raise DataError(f"no problem of {tally.rows} rows is left ({_left_out(seen, tally)}); nothing was written")
    _report(path, seen, tally, bad.count, written)
    return 0


def _left_out(seen: Seen, tally: Tally) -> str:
    reasons = f"{len(seen.contradictions)} with two labels, {len(seen.excluded)} of an evaluation file"
    without = (
        f", {tally.without_answer} without an answer, as the data set says itself" if tally.without_answer else ""
    )
    return reasons + without


def _report(path: Path, seen: Seen, tally: Tally, bad: int, written: int) -> None:
    for where in list(seen.contradictions.values())[:MAX_BAD_ROWS_SHOWN]:
        print(f"two labels for one problem: {where}")
    print(f"{path}: {written} of {tally.rows} rows")
    print(f"  different problems: {len(seen.labels)}, duplicates removed: {tally.duplicates}, bad rows: {bad}")
    print(f"  left out: {_left_out(seen, tally)}")
    if tally.without_instruction:
        print(f"  without DAPO's instruction sentences, taken as they are: {tally.without_instruction}")
    if tally.with_system:
        print(f"  system messages left out, since RL has its own: {tally.with_system}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepare DAPO-Math-17k or an AIME file for vime.")
    add_arguments(parser, DEFAULT_DATASET, ".jsonl")
    parser.add_argument("--keep-instruction", action="store_true", help="leave DAPO's two sentences in the prompt")
    parser.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="leave out the problems of these files",
    )
    return parse(parser, ".jsonl")


if __name__ == "__main__":
    run_script(main)
