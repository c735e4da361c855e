"""Reading and writing the data sets: what both data scripts share.

    hub name | directory | file  ->  find_data_files  ->  read_rows  ->  (caller converts)  ->  atomic_output

Contract: rows come in file order, one at a time, each with the place it stands at ("train.parquet row 17"), so that a
message about a bad row can be checked by hand. Parquet and arrow files are read in small batches and only in the
columns asked for, so memory does not grow with the file. A row that cannot be read at all is a `Row` with `error` set,
not an exception: the caller counts it like any other bad row. What makes the whole input unusable is a `DataError`
with one clear line.

Invariant: of a directory one split of one configuration is read, in whole. A merged test split would be trained on,
and nobody would see it. (The `datasets` library merges the folders of two configurations, reads what is there of a
series of shards, turns labels of text into numbers where some are numbers, and ends at one bad line.)
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from retool.paths import LFS_POINTER, closed_folder, why_not_found
from tqdm import tqdm

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".arrow")
# Bookkeeping that lies beside data, in the formats of data.
NOT_DATA = re.compile(r"(?:dataset_infos?|dataset_dict|state|config|metadata|tokenizer.*)\.json")
BATCH_ROWS = 2048
MAX_BAD_SHARE = 0.01
MAX_BAD_ROWS_SHOWN = 20
MAX_NAMES_SHOWN = 8
DEFAULT_DOWNLOADS = "/root"  # closed to whoever is not root
PICTURE_FIELDS = ("images", "image", "videos", "video", "audios", "audio")  # neither script can use what is in them

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF_WORD = {word: split for split, words in SPLITS.items() for word in words}
SHARD = re.compile(r"(?P<name>.*?)[-_](?P<number>\d{5})-of-(?P<total>\d{5})(?:-[0-9a-f]{16})?")
NUMBERED = re.compile(r"(?P<name>(?:.*?[^0-9])?)(?P<number>\d+)")
BOM = b"\xef\xbb\xbf"


class DataError(Exception):
    """The input or output as a whole cannot be used; the message is one line that says what to do."""


class RowError(ValueError):
    """One row cannot be used; the message is the reason, without the row's place."""


class Row(NamedTuple):
    place: str  # "FILE row N", N counted from 1 within the file
    data: dict[str, Any] | None
    error: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# Where data lies
# ---------------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser, dataset: str, suffix: str) -> None:
    """The options that both scripts have."""
    parser.add_argument(
        "--dataset",
        default=dataset,
        help="OWNER/NAME of the hub, first looked for below RETOOL_DOWNLOADS (/root); a directory; or a file "
        f"(default: {dataset})",
    )
    parser.add_argument("--split", help="of a directory or hub name (default: train, or the only one)")
    parser.add_argument("--config", help="of a directory or hub name, where there are several")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"default: NAME{suffix} of the data set in vime's data/retool, where the launch scripts look",
    )
    parser.add_argument("--force", action="store_true", help="replace the output if it is there already")


def parse(parser: argparse.ArgumentParser, suffix: str) -> argparse.Namespace:
    args = parser.parse_args()
    if args.output is not None and args.output.suffix != suffix:
        parser.error(f"--output must end in {suffix}: vime tells the format by the ending")
    return args


def find_input_and_output(
    args: argparse.Namespace, suffix: str, marks: Iterable[str] = (), lower: bool = False
) -> tuple[list[Path], Path]:
    """The files to read, and the file to write: named after the data set, and after what is read of it.

    Args:
        marks: of an output that is not the whole data set in the usual form.
        lower: whether its name is in small letters.

    Raises:
        DataError: of `find_data_files`, or the output is there already and --force is not given.
    """
    files = find_data_files(args.dataset, args.split, args.config)
    folders = Path(os.path.abspath(os.path.expanduser(args.dataset))).parts
    name = next((part.split("--")[-1] for part in folders if part.startswith("datasets--")), folders[-1])
    name = name[: -len(ending)] if (ending := _suffix(Path(name))) else name
    split = "" if args.split == "train" else args.split
    name = "-".join(filter(None, [name.lower() if lower else name, args.config, split, *marks]))
    output = args.output or default_output(f"{name}{suffix}")
    if any(os.path.realpath(file) == os.path.realpath(output) for file in files):
        raise DataError(f"{output}: is the file that is read; name another --output")
    if os.path.isfile(output) and not args.force:
        raise DataError(f"{output}: is there already; --force replaces it, --output names another file")
    return files, output


def default_output(name: str) -> Path:
    """Where the launch scripts look for a file: data/retool in the vime checkout, VIME_ROOT or the one we lie in."""
    root = os.environ.get("VIME_ROOT") or Path(__file__).resolve().parents[3]
    return Path(root) / "data" / "retool" / name


class DataFile(NamedTuple):
    path: Path
    suffix: str
    config: str  # "" where the folders name none
    split: str  # "" where nothing names one
    series: str  # the name without the number of a shard
    number: int | None
    total: int | None


def find_data_files(dataset: str, split: str | None = None, config: str | None = None) -> list[Path]:
    """The files of one split of one configuration of a data set, sorted by path; prints which.

    Args:
        dataset: a file, a directory, or a name on the hub (OWNER/NAME), which is first looked for in the folder of
            downloads (RETOOL_DOWNLOADS, by default /root), as OWNER/NAME and as NAME.
        split: by default train, or the only one there is.
        config: needed only where there are several.

    Raises:
        DataError: nothing is there, what is there is not one data set, or the hub cannot be reached.
    """
    path = Path(os.path.expanduser(dataset))
    if os.path.isfile(path):
        if _suffix(path) is None:
            raise DataError(f"{path}: expected a file that ends in {_or(DATA_SUFFIXES)}")
        return [path]
    folder = path if os.path.isdir(path) else _downloaded(dataset) or _download(dataset)
    try:
        files = _choose(folder, _files_in_directory(_revision(folder)), split, config)
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    print(f"reading {', '.join(map(str, files[:MAX_NAMES_SHOWN]))}{' ...' * (len(files) > MAX_NAMES_SHOWN)}")
    return files


def _downloaded(name: str) -> Path | None:
    if not _is_hub_name(name):
        return None
    named = os.environ.get("RETOOL_DOWNLOADS")
    downloads = Path(named or DEFAULT_DOWNLOADS)
    if named and (closed := closed_folder(downloads / name)):
        raise DataError(f"RETOOL_DOWNLOADS is {named}: no permission to look into {closed}")
    return next((f for f in (downloads / name, downloads / name.split("/")[1]) if os.path.isdir(f)), None)


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _download(name: str) -> Path:
    if not _is_hub_name(name):
        raise DataError(f"{name}: {why_not_found(os.path.expanduser(name))}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{s}" for s in DATA_SUFFIXES]))
    except Exception as error:  # the client raises a dozen unrelated types: offline, not found, no permission, disk
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{name}: neither a local path nor to be had from the hub ({reason}); download it with "
            f"`hf download --repo-type dataset {name} --local-dir DIR` and give DIR"
        ) from error


def _revision(folder: Path) -> Path:
    """A folder of the hub's cache holds every revision that was ever downloaded: the one that `main` is now."""
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not os.path.isdir(snapshots):
        return folder
    revisions = sorted(os.listdir(snapshots))
    only = revisions[0] if len(revisions) == 1 else ""
    current = main.read_text(encoding="utf-8").strip() if os.path.isfile(main) else only
    if current not in revisions:
        raise DataError(f"{folder}: holds the revisions {', '.join(revisions)}; give the folder of one in {snapshots}")
    return snapshots / current


def _files_in_directory(directory: Path) -> list[DataFile]:
    """What a directory holds of data. Hidden files are left out: `hf download` keeps its bookkeeping in a hidden
    folder.

    Raises:
        OSError: a folder cannot be read. What lies in it, a shard of what is read, would be missed unseen.
        DataError: there is nothing.
    """

    def stop(error: OSError) -> None:
        raise error

    found: list[DataFile] = []
    for folder, folders, names in os.walk(directory, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if (suffix := _suffix(path)) and not NOT_DATA.fullmatch(path.name):
                if not os.path.isfile(path):
                    raise DataError(f"{path}: {why_not_found(path)}")
                found.append(_describe(path, path.relative_to(directory), suffix))
    if not found:
        raise DataError(f"{directory}: no {_or(DATA_SUFFIXES)} file in it")
    return sorted(found)


def _suffix(path: Path) -> str | None:
    return next((s for s in sorted(DATA_SUFFIXES, key=len, reverse=True) if path.name.lower().endswith(s)), None)


def _describe(path: Path, relative: Path, suffix: str) -> DataFile:
    stem, number, total = path.name[: -len(suffix)], None, None
    if shard := SHARD.fullmatch(stem):
        stem, number, total = shard["name"], int(shard["number"]), int(shard["total"])
    elif numbered := NUMBERED.fullmatch(stem):
        stem, number = numbered["name"], int(numbered["number"])
    folders = relative.parts[:-1]
    # The innermost name that says a split; the hub names shards by theirs.
    split = next(filter(None, map(_split_in, (stem, *reversed(folders)))), stem if total is not None else "")
    config = "/".join(folder for folder in folders if folder != "data" and not _split_in(folder))
    return DataFile(path, suffix, config, split, stem, number, total)


def _split_in(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLIT_OF_WORD[word] for word in reversed(words) if word in SPLIT_OF_WORD), "")


def _choose(folder: Path, files: list[DataFile], split: str | None, config: str | None) -> list[Path]:
    configs = sorted({file.config for file in files})
    if config is not None:
        files = [file for file in files if config == file.config or config in file.config.split("/")]
        if not files:
            raise DataError(f"{folder}: no configuration {config}; there are {_names(configs)}")
        configs = sorted({file.config for file in files})
    elif "default" in configs:
        files, configs = [file for file in files if file.config == "default"], ["default"]
    if len(configs) > 1:
        raise DataError(f"{folder}: holds the configurations {_names(configs)}; choose one with --config")

    splits = sorted({file.split for file in files})
    wanted = SPLIT_OF_WORD.get(split.lower(), split) if split else "train" if "train" in splits else splits[0]
    if split is None and wanted != "train" and len(splits) > 1:
        raise DataError(f"{folder}: holds the splits {_names(splits)}; choose one with --split")
    files = [file for file in files if file.split == wanted]
    if not files:
        raise DataError(f"{folder}: no split {split}; there are {_names(splits)}")
    _refuse_mixture(folder, files)
    if len(splits) > 1:
        print(f"the split {wanted} of {folder}; not read: {_names([s for s in splits if s != wanted])}")
    return [file.path for file in files]


def _refuse_mixture(folder: Path, files: list[DataFile]) -> None:
    """Several files are one data set only if they are all the parts of one series."""
    if len(files) == 1 and files[0].total in (None, 1):
        return
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) > 1:
        # The same rows in two formats would be read twice.
        raise DataError(f"{folder}: holds {' and '.join(suffixes)} files; name the one file to read")
    names = _names([str(file.path.relative_to(folder)) for file in files if file.path.is_relative_to(folder)])
    if len({(file.series, file.total) for file in files}) > 1 or any(file.number is None for file in files):
        raise DataError(f"{folder}: holds several files ({names}); name the one file to read")
    numbers = sorted(file.number or 0 for file in files)
    if len(set(numbers)) < len(numbers):
        raise DataError(f"{folder}: holds the same part twice, of two revisions perhaps ({names}); name one file")
    expected = files[0].total or len(files)
    if numbers in (list(range(expected)), list(range(1, expected + 1))):
        return
    if files[0].total is None:
        raise DataError(f"{folder}: holds several files ({names}); name the one file to read")
    raise DataError(f"{folder}: {len(files)} of {expected} parts are there ({names}); download the rest")


def _names(names: Iterable[str]) -> str:
    listed = [name or "(without a name)" for name in names]
    more = f" and {len(listed) - MAX_NAMES_SHOWN} more" if len(listed) > MAX_NAMES_SHOWN else ""
    return ", ".join(listed[:MAX_NAMES_SHOWN]) + more


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def read_rows(
    files: Sequence[Path], needed: Sequence[Sequence[str]], what: str, also: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield the rows of all files in order, with a progress bar titled `what`.

    Args:
        needed: groups of names of top-level fields, in any case, of each of which a row needs one; a file of columns
            is read in those alone.
        also: fields that are read where they are there.

    Raises:
        DataError: a file cannot be read, is empty, has no column of a group, or one of pictures or sound.
    """
    for path in files:
        _refuse_empty(path)
        suffix = _suffix(path)
        if suffix in (".parquet", ".arrow"):
            try:
                yield from _read_columns(path, needed, also, what)
            except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
                reason = str(error).splitlines()[0]
                raise DataError(f"{path}: cannot be read as {suffix[1:]} ({reason})") from error
        else:
            yield from _read_json(path, what)


def _refuse_empty(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start == LFS_POINTER:
        raise DataError(f"{path}: is a pointer of Git LFS and not the file; download it with `hf download`")


def _read_columns(path: Path, needed: Sequence[Sequence[str]], also: Sequence[str], what: str) -> Iterator[Row]:
    """A file of columns, a batch at a time."""
    total, batches = None, None
    with pa.memory_map(str(path)) as source:
        if _suffix(path) == ".parquet":
            # Without pre_buffer=False a whole row group is held in memory, and the published files have only one.
            file: Any = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            schema, total = file.schema_arrow, file.metadata.num_rows
            wanted = _wanted_columns(path, schema.names, needed, also)
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted)
        else:
            try:
                file = pa.ipc.open_stream(source)
                whole: Iterable[Any] = file
            except pa.ArrowInvalid:
                file = pa.ipc.open_file(source)
                whole = map(file.get_batch, range(file.num_record_batches))
            wanted = _wanted_columns(path, file.schema.names, needed, also)
            batches = (
                batch.select(wanted).slice(start, BATCH_ROWS)
                for batch in whole
                for start in range(0, batch.num_rows, BATCH_ROWS)
            )
        number = 0
        with tqdm(total=total, desc=f"{what} {path.name}", unit=" rows", mininterval=0.5) as bar:
            for batch in batches:
                for data in batch.to_pylist():
                    number += 1
                    yield Row(f"{path.name} row {number}", data)
                bar.update(batch.num_rows)


def _wanted_columns(
    path: Path, names: Sequence[str], needed: Sequence[Sequence[str]], also: Sequence[str]
) -> list[str]:
    for group in needed:
        if not any(name.lower() in group for name in names):
            raise DataError(f"{path}: has no column {_or(group) if len(group) > 1 else group[0]} but {_names(names)}")
    if pictures := [name for name in names if name.lower() in PICTURE_FIELDS]:
        raise DataError(
            f"{path}: has a column {pictures[0]}, and models are shown text alone; leave it out if it can be"
        )
    every = {*also, *(name for group in needed for name in group)}
    return [name for name in names if name.lower() in every]


def _read_json(path: Path, what: str) -> Iterator[Row]:
    """JSON lines; a .json file may also hold one array of rows."""
    packed = path.name.lower().endswith(".gz")
    try:
        with (
            open(path, "rb") as raw,
            tqdm(
                total=path.stat().st_size, desc=f"{what} {path.name}", unit="B", unit_scale=True, mininterval=0.5
            ) as bar,
            gzip.open(raw) if packed else raw as file,
        ):
            if ".json" in path.suffixes and (rows := _json_array(file)) is not None:
                for number, data in enumerate(rows, start=1):
                    yield _checked(f"{path.name} row {number}", data)
                return
            _refuse_pretty_printed(path, file)
            for number, line in enumerate(file, start=1):
                bar.update(raw.tell() - bar.n if packed else len(line))
                line = line.removeprefix(BOM) if number == 1 else line
                if line.strip():
                    yield _parse_line(f"{path.name} row {number}", line)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be unpacked ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _json_array(file: Any) -> list[Any] | None:
    """The rows of a file that holds one JSON array; None, and the file at its start, where it does not begin with
    one."""
    start = file.read(64).removeprefix(BOM).lstrip()
    file.seek(0)
    if not start.startswith(b"["):
        return None
    try:
        rows = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name}: not JSON in UTF-8 ({error})") from error
    return rows if isinstance(rows, list) else None


def _refuse_pretty_printed(path: Path, file: Any) -> None:
    """One clear error for a row over many lines, each of which would be a bad row."""
    first, second = file.readline().removeprefix(BOM), file.readline()
    file.seek(0)
    if first.lstrip().startswith(b"{") and second.strip():
        if _parse_line("", first).error and _parse_line("", second).error:
            raise DataError(
                f"{path}: its first row goes on over several lines; write each row on a line of its own (`jq -c . FILE` "
                "does), or all of them as one array"
            )


def _parse_line(place: str, line: bytes) -> Row:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:  # Unicode errors are ValueErrors
        return Row(place, None, f"not JSON in UTF-8 ({error})")
    return _checked(place, data, surrogates=b"\\ud" in line.lower())


def _checked(place: str, data: Any, surrogates: bool = True) -> Row:
    if not isinstance(data, dict):
        return Row(place, None, f"expected a JSON object, found {type(data).__name__}")
    if surrogates:
        try:
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but can be written nowhere
        except ValueError as error:
            return Row(place, None, f"not JSON in UTF-8 ({error})")
    return Row(place, data)


def readable(row: Row) -> dict[str, Any]:
    """The row's data, names of fields in small letters and line ends as one character.

    Raises:
        RowError: the row could not be read, or two of its fields differ in case alone.
    """
    if row.data is None:
        raise RowError(row.error)
    data: dict[str, Any] = {}
    for name, value in row.data.items():
        if value is None:
            continue
        if name.lower() in data:
            raise RowError(f"two fields are called {name.lower()!r}")
        data[name.lower()] = unix_newlines(value)
    return data


def unix_newlines(value: Any) -> Any:
    """The value with the line ends of Windows (CRLF) in its texts replaced: no model is to learn to write them."""
    if isinstance(value, str):
        return value.replace("\r\n", "\n")
    if isinstance(value, list):
        return [unix_newlines(item) for item in value]
    if isinstance(value, dict):
        return {name: unix_newlines(item) for name, item in value.items()}
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Output, and the run of a script
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_output(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Open a file beside `path` that takes its place only if the block ends without an exception.

    A file at `path` is then always whole: an interrupted run leaves the old one, or none. The file beside it has one
    name, so that what a run killed on the spot has left there is overwritten by the next.

    Raises:
        DataError: the directory cannot be written to, the disk is full, another run writes the same file, or something
            that is no file is in the way.
    """
    path = Path(os.path.realpath(path))  # what a link points to is written, and the link stays
    if os.path.lexists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: is no ordinary file, and would be replaced by one")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ignored = path.parent / ".gitignore"
        if path.parent == Path(os.path.realpath(default_output(""))) and not os.path.lexists(ignored):
            ignored.write_text("*\n")  # the folder lies in a checkout of vime, whose git is not to see the data
        with open(partial, mode.replace("w", "a"), encoding=None if "b" in mode else "utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(f"{path}: is being written by another run") from error
            try:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                os.unlink(partial)
                raise
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


class BadRows:
    """Counts rows that could not be used and prints the first of them, each with its place and reason."""

    def __init__(self, echo: Callable[[str], None] = tqdm.write) -> None:
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
    for number in (signal.SIGTERM, signal.SIGHUP):  # by default they end a process without its `finally`
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except DataError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
