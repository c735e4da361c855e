"""The first rows of a data file, read as vime reads them: is there what the training will ask each row for?

Contract: nothing is written, and a file of any size is read only as far as its first rows.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

SLICE = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")  # vime reads PATH@[FROM:TO] as those rows of the file
MAX_SHOWN_CHARS = 80


class Keys(NamedTuple):
    """The fields that vime reads of a row (--input-key, --label-key, --tool-key); None where it reads none."""

    input: str | None
    label: str | None
    tools: str | None


class BadFile(Exception):
    """The file cannot be read as vime reads it; the message says where and why."""


def rows_of(path: str) -> tuple[str, slice]:
    """The file that a path names, and which of its rows."""
    match = SLICE.fullmatch(path)
    if not match:
        return path, slice(None)
    start, stop = (int(number) if number else None for number in match.groups()[1:])
    return match[1], slice(start, stop)


def not_a_data_file(file: str) -> str:
    if os.path.isdir(file):
        return f"{file} is a folder; name the .jsonl or .parquet file in it"
    if os.path.exists(file) and not file.endswith((".jsonl", ".parquet")):
        return f"vime tells the format of a file by its ending, which must be .jsonl or .parquet: {file}"
    return ""


def look_into(path: str, keys: Keys, limit: int) -> int:
    """Look into the first rows.

    Args:
        path: as vime is given it.
        keys: what each row must have.
        limit: how many rows are looked at.

    Returns:
        How many there are, at most `limit`.

    Raises:
        BadFile: a row lacks something, or there is none.
        ImportError: pyarrow, which vime reads parquet with, is not installed here.
    """
    file, part = rows_of(path)
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        raise BadFile("vime cannot count rows from the end; begin at 0")
    rows = itertools.islice(
        _read_jsonl(file) if file.endswith(".jsonl") else _read_parquet(file), part.start, part.stop
    )
    count = 0
    for place, row in itertools.islice(rows, limit):
        if why := _what_a_row_lacks(row, keys):
            raise BadFile(f"{place} {why}")
        count += 1
    if not count:
        raise BadFile("there is no row in it")
    return count


def _read_jsonl(file: str) -> Iterator[tuple[str, Any]]:
    with open(file, encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", json.loads(line)
        except UnicodeDecodeError:
            raise BadFile("it is not UTF-8 text") from None
        except ValueError:  # vime leaves such a line out and says so in a log, which may be all of the file
            raise BadFile(f"line {number} is no JSON: {line.strip()[:MAX_SHOWN_CHARS]}") from None


def _read_parquet(file: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = itertools.count(1)
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64):
            for row in batch.to_pylist():
                yield f"row {next(number)}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise BadFile(f"it cannot be read as parquet ({' '.join(str(error).split())[:MAX_SHOWN_CHARS]})") from None


def _what_a_row_lacks(row: Any, keys: Keys) -> str:
    if not isinstance(row, dict):
        return "is no JSON object"
    for flag, key in (("--input-key", keys.input), ("--label-key", keys.label), ("--tool-key", keys.tools)):
        if key and (row.get(key) is None or (row[key] in ("", []) and key != keys.tools)):
            return f"has no {key} ({flag}), only {', '.join(map(str, row)) or 'nothing'}"
    prompt = row.get(keys.input or "")
    if keys.tools is None and isinstance(prompt, str):
        return ""
    if not isinstance(prompt, list) or not all(isinstance(turn, dict) and "role" in turn for turn in prompt):
        return f"has no list of messages in {keys.input}, but {str(prompt)[:MAX_SHOWN_CHARS]}"
    return ""
