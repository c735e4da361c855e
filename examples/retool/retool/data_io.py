"""Reading and writing the data sets: what both data scripts share.

    hub name | directory | file  ->  find_data_files  ->  read_rows  ->  (caller converts)  ->  atomic_output

Contract: rows come in file order, one at a time, each with the place it stands at ("train.parquet row 17"), so that a
message about a bad row can be checked by hand. Parquet is read in small batches and only in the columns asked for, so
memory does not grow with the file. A row that cannot be read at all is a `Row` with `error` set, not an exception: the
caller counts it like any other bad row. What makes the whole input unusable is a `DataError` with one clear line.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow.parquet as pq
from tqdm import tqdm

DATA_SUFFIXES = (".parquet", ".jsonl")
PARQUET_BATCH_ROWS = 2048
MAX_BAD_SHARE = 0.01
MAX_BAD_ROWS_SHOWN = 20


class DataError(Exception):
    """The input or output as a whole cannot be used; the message is one line that says what to do."""


class RowError(ValueError):
    """One row cannot be used; the message is the reason, without the row's place."""


class Row(NamedTuple):
    place: str  # "FILE row N", N counted from 1 within the file
    data: dict[str, Any] | None
    error: str = ""


def find_data_files(dataset: str) -> list[Path]:
    """The data files behind a hub name, a directory or a file, sorted by path.

    Raises:
        DataError: nothing is there, the directory mixes formats, or the hub cannot be reached.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            raise DataError(f"{path}: expected a file that ends in {' or '.join(DATA_SUFFIXES)}")
        return [path]
    if not path.is_dir():
        path = _download(dataset)
    return _files_in_directory(path)


def _files_in_directory(directory: Path) -> list[Path]:
    found = sorted(
        path
        for path in directory.rglob("*")
        # `hf download` keeps its bookkeeping in a hidden folder inside the directory.
        if path.suffix in DATA_SUFFIXES and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
    suffixes = {path.suffix for path in found}
    if not found:
        raise DataError(f"{directory}: no {' or '.join(DATA_SUFFIXES)} file in it")
    if len(suffixes) > 1:
        # The same rows in two formats would be read twice.
        raise DataError(f"{directory}: holds {' and '.join(sorted(suffixes))} files; name the one file to read")
    return found


def _download(name: str) -> Path:
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DataError(f"{name}: no such file or directory")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{s}" for s in DATA_SUFFIXES]))
    except Exception as error:  # the client raises a dozen unrelated types: offline, not found, no permission, disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{name}: neither a local path nor to be had from the hub ({reason}); download it with "
            f"`hf download --repo-type dataset {name} --local-dir DIR` and give DIR"
        ) from error


def read_rows(files: Sequence[Path], columns: Sequence[str], what: str) -> Iterator[Row]:
    """Yield the rows of all files in order, with a progress bar titled `what`.

    Args:
        columns: the top-level fields wanted; a parquet file is read in those of them that it has.
    """
    for path in files:
        reader = _read_parquet if path.suffix == ".parquet" else _read_jsonl
        yield from reader(path, columns, what)


def _read_parquet(path: Path, columns: Sequence[str], what: str) -> Iterator[Row]:
    try:
        # Without pre_buffer=False a whole row group is held in memory, and the published files have only one.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        wanted = [name for name in file.schema_arrow.names if name in columns]
        number = 0
        with tqdm(total=file.metadata.num_rows, desc=f"{what} {path.name}", unit=" rows", mininterval=0.5) as bar:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=wanted):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", data)
                bar.update(batch.num_rows)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from error


def _read_jsonl(path: Path, columns: Sequence[str], what: str) -> Iterator[Row]:
    try:
        with (
            open(path, "rb") as file,
            tqdm(
                total=path.stat().st_size, desc=f"{what} {path.name}", unit="B", unit_scale=True, mininterval=0.5
            ) as bar,
        ):
            for number, line in enumerate(file, start=1):
                bar.update(len(line))
                if line.strip():
                    yield _parse_line(f"{path.name} row {number}", line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _parse_line(place: str, line: bytes) -> Row:
    try:
        data = json.loads(line)
        if b"\\ud" in line.lower():
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but can be written nowhere
    except (ValueError, RecursionError) as error:  # Unicode errors are ValueErrors
        return Row(place, None, f"not JSON in UTF-8 ({error})")
    if not isinstance(data, dict):
        return Row(place, None, f"expected a JSON object, found {type(data).__name__}")
    return Row(place, data)


def readable(row: Row) -> dict[str, Any]:
    """The row's data; raises RowError where it could not be read."""
    if row.data is None:
        raise RowError(row.error)
    return row.data


@contextmanager
def atomic_output(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Open a file beside `path` that takes its place only if the block ends without an exception.

    A file at `path` is then always whole: an interrupted run leaves the old one, or none.

    Raises:
        DataError: the directory cannot be written to, or the disk is full.
    """
    handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = tempfile.NamedTemporaryFile(
            mode,
            dir=path.parent,
            prefix=f".{path.name}.",
            delete=False,
            encoding=None if "b" in mode else "utf-8",
        )
        with handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(handle.name, 0o666 & ~_umask())  # the temporary file is private, the result need not be
        os.replace(handle.name, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if handle is not None and os.path.exists(handle.name):
            os.unlink(handle.name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class BadRows:
    """Counts rows that could not be used and prints the first of them, each with its place and reason."""

    def __init__(self, echo: Callable[[str], None] = tqdm.write):
        self.count = 0
        self._echo = echo

    def add(self, place: str, reason: str) -> None:
        self.count += 1
        if self.count <= MAX_BAD_ROWS_SHOWN:
            self._echo(f"bad row: {place}: {reason}")
        elif self.count == MAX_BAD_ROWS_SHOWN + 1:
            self._echo("bad row: further ones are only counted")

    def too_many(self, total: int) -> bool:
        """Whether more than one row in a hundred was bad, or nothing was read at all."""
        return self.count > MAX_BAD_SHARE * total or total == 0


def run_script(main: Callable[[], int]) -> None:
    """Run a script's `main` and exit: with its code, or with one line for an unusable input or output."""
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
