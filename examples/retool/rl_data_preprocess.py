#!/usr/bin/env python3
"""Turn DAPO-Math-17k, and the AIME files for evaluation, into prompts for vime: one {"prompt", "label"} per line.

    row  ->  Problem(text, label)  ->  first pass: candidates on disk, labels by key  ->  second pass: output

The published training file repeats some 17 thousand problems over 1.79 million rows, and wraps each in two sentences
that ask for the line "Answer: $Answer". Here every problem is kept once, in the order of first appearance, without
those sentences (the system text of RL asks for the answer), with its label as a string. A problem that comes with two
different labels cannot be scored, so all of it is left out, and so is a problem of an evaluation file given by
--exclude. Whatever is left out is counted and printed.

Invariant: memory holds one key and one label per different problem, never the texts, so it does not grow with the
rows; that a problem is contradicted is known only at the end, hence the second pass over the candidates.
"""

import argparse
import json
import re
import sys
import tempfile
import unicodedata
from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple

from retool.data_io import (
    MAX_BAD_ROWS_SHOWN,
    BadRows,
    DataError,
    Row,
    RowError,
    atomic_output,
    find_data_files,
    read_rows,
    readable,
    run_script,
)

PROMPT_FIELDS = ("prompt", "problem", "question", "input")
LABEL_FIELDS = ("label", "answer", "output")
COLUMNS = (*PROMPT_FIELDS, *LABEL_FIELDS, "reward_model")

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


class Seen(NamedTuple):
    """What the first pass knows of the different problems, by `problem_key`."""

    labels: dict[bytes, str]
    contradictions: dict[bytes, str]  # place and labels of the first row that disagrees
    excluded: set[bytes]


class Tally(NamedTuple):
    rows: int
    duplicates: int
    without_instruction: int


def parse_row(data: dict, keep_instruction: bool = False) -> Problem:
    """The problem and label of a row, whichever of the published layouts it has.

    Args:
        data: {"prompt": str or [one user message], "label"} with the names of PROMPT_FIELDS and LABEL_FIELDS, or
            {"prompt", "reward_model": {"ground_truth"}}.

    Raises:
        RowError: the row has no usable problem or label.
    """
    prompt = prompt_text(data).strip()
    text, has_instruction = strip_instruction(prompt)
    if not text:
        raise RowError("the problem is empty")
    return Problem(text, prompt if keep_instruction else text, label_text(data), has_instruction)


def strip_instruction(prompt: str) -> tuple[str, bool]:
    """The problem without DAPO's sentences before and after it, and whether both were there."""
    text, before = INSTRUCTION_BEFORE.subn("", prompt)
    text, after = INSTRUCTION_AFTER.subn("", text)
    return text.strip(), bool(before and after)


def prompt_text(data: dict) -> str:
    """The user's text of a row; raises RowError where there is none, or more than one."""
    prompt = _first_present(data, PROMPT_FIELDS)
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
            raise RowError("the prompt is a list, but not of one user message")
        prompt = prompt[0].get("content")
    if not isinstance(prompt, str):
        raise RowError(f"no prompt (looked for {', '.join(PROMPT_FIELDS)})")
    return prompt


def label_text(data: dict) -> str:
    """The label of a row as text: 34, 34.0 and " 34 " are all "34"; raises RowError where there is none."""
    label = _first_present(data, LABEL_FIELDS)
    if label is None and isinstance(data.get("reward_model"), dict):
        label = data["reward_model"].get("ground_truth")
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise RowError(f"no label (looked for {', '.join(LABEL_FIELDS)}, reward_model.ground_truth)")
    return str(label).strip()


def _first_present(data: dict, names: Iterable[str]):
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
        for row in read_rows(find_data_files(name), PROMPT_FIELDS, "excluding"):
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
    total = duplicates = without_instruction = 0
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
            if evaluation_key(problem.text) in evaluation:
                seen.excluded.add(key)
            else:
                _write(candidates, {"prompt": problem.prompt, "label": problem.label})
        else:
            duplicates += 1
            if not _same_label(label, problem.label):
                seen.contradictions.setdefault(key, f"{row.place}: label {problem.label!r}, earlier {label!r}")
    return seen, Tally(total, duplicates, without_instruction)


def copy_uncontradicted(candidates: IO[str], output: IO[str], contradicted: Collection[bytes]) -> int:
    """Second pass: copy the candidates whose problem has one label; returns how many lines were written."""
    written = 0
    for line in candidates:
        text, _ = strip_instruction(json.loads(line)["prompt"])
        if problem_key(text) not in contradicted:
            output.write(line)
            written += 1
    return written


def _write(file: IO[str], record: dict) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> int:
    args = _parse_args()
    evaluation = excluded_keys(args.exclude)
    bad = BadRows()
    rows = read_rows(find_data_files(args.dataset), COLUMNS, "reading")
    with atomic_output(args.output, "w") as output, tempfile.TemporaryFile("w+", encoding="utf-8") as candidates:
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


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepare DAPO-Math-17k or an AIME file for vime.")
    parser.add_argument(
        "--dataset", default="BytedTsinghua-SIA/DAPO-Math-17k", help="hub name, directory, .parquet or .jsonl file"
    )
    parser.add_argument("--output", type=Path, default=Path("data/retool/dapo-math-17k.jsonl"))
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
    if args.output.suffix != ".jsonl":
        parser.error("--output must end in .jsonl: vime tells the format by the ending")
    return args


if __name__ == "__main__":
    run_script(main)
