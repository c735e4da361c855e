"""Rollout files as plain data: vime's --save-debug-rollout-data files, and the samples.jsonl of the CPU run.

Contract. Nothing in a file is executed and nothing of it is imported: a pickle can name any function to be called, so
every name in it is answered with a class that does nothing. torch is not needed. What of a file cannot be read is said
in one line of its `notes`, and the rest is given; FileError where nothing is left.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

Raw = dict[str, Any]  # a sample as the file has it

_ZIP, _LOCAL_HEADER = b"PK\x03\x04", struct.Struct("<26xHH")
_CLOSE_LIST_AND_DICT = pickle.APPENDS + pickle.SETITEMS + pickle.STOP


class FileError(Exception):
    """Nothing of the file can be shown. The message is one line that names it and says why."""


class Rollout(NamedTuple):
    name: str
    number: int | None  # vime's id of the rollout, None where the file has none
    evaluation: bool
    samples: list[Raw]
    notes: list[str]


def load(path: Path) -> Rollout:
    """What the file holds.

    Raises:
        FileError: it is no rollout, or no sample in it is whole.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if not start:
                raise FileError(f"{path} is empty")
            notes: list[str] = []
            content = _read_torch(file, path, notes) if start == _ZIP else _read_lines(file, path, notes)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    samples = [sample for sample in content["samples"] if is_sample(sample)]
    if not samples:
        raise FileError(f"{path} is no rollout: it holds no samples" + "".join(f" ({note})" for note in notes))
    if odd := len(content["samples"]) - len(samples):
        notes.append(f"{path.name}: {odd} of {len(content['samples'])} entries are no samples and are left out")
    number = content.get("rollout_id")
    return Rollout(
        name=path.name,
        number=number if type(number) is int else None,
        evaluation=re.search(r"(?:^|[^a-z])eval_", path.name) is not None,  # as vime names the file
        samples=samples,
        notes=notes,
    )


def is_sample(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("response"), str)


def _read_lines(file: BinaryIO, path: Path, notes: list[str]) -> Raw:
    samples, bad = [], []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            samples.append(json.loads(line.decode("utf-8-sig")))
        except (ValueError, RecursionError):
            bad.append(number)
            if not samples:  # a first line that is not JSON: reading on through gigabytes would find no more
                raise FileError(f"{path} is no rollout: neither a file of torch.save nor JSON lines") from None
    if bad:
        which = f"line {bad[0]} is" if len(bad) == 1 else f"{len(bad)} lines, the first of them {bad[0]}, are"
        notes.append(f"{path.name}: {which} not JSON or cut off, and left out")
    return {"samples": samples}


class _Ignored:
    """Stands for whatever a pickle names or stores outside itself: a tensor, an array, an object of some class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _pass(self, *values: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _pass


class _Unpickler(pickle.Unpickler):
    """No name in the data leads to code."""

    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Ignored

    def persistent_load(self, key: Any) -> Any:
        return _Ignored()


def _read_torch(file: BinaryIO, path: Path, notes: list[str]) -> Raw:
    try:
        with zipfile.ZipFile(file) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("data.pkl")]
            content = _Unpickler(io.BytesIO(archive.read(name))).load()
    except (zipfile.BadZipFile, EOFError, ValueError, pickle.UnpicklingError) as error:
        content = _recover(file, path, notes, error)
    except Exception as error:  # a damaged pickle fails in any way there is
        raise FileError(f"{path} cannot be read: {_one_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise FileError(f"{path} is no rollout: it was written by torch.save, but holds no list of samples")
    return content


def _recover(file: BinaryIO, path: Path, notes: list[str], error: Exception) -> Raw:
    """What is whole in a file that was cut off: its directory was at its end, its pickle is at its start."""
    file.seek(0)
    data = file.read()
    if b"data.pkl" not in data[:256]:
        raise FileError(f"{path} is no rollout: a zip archive, but not one of torch.save ({_one_line(error)})")
    name_length, extra_length = _LOCAL_HEADER.unpack_from(data)
    pickled = data[_LOCAL_HEADER.size + name_length + extra_length :]
    with contextlib.suppress(Exception):
        content: Raw = _Unpickler(io.BytesIO(pickled)).load()
        notes.append(f"{path.name} is cut off after its samples, which are all here")
        return content
    with contextlib.suppress(Exception):
        content = _Unpickler(io.BytesIO(pickled[: _whole_samples_end(pickled)] + _CLOSE_LIST_AND_DICT)).load()
        notes.append(f"{path.name} is cut off: only its first {len(content['samples'])} samples can be shown")
        return content
    raise FileError(f"{path} is cut off, and no sample in it is whole") from error


def _whole_samples_end(pickled: bytes) -> int:
    """The index after the last sample that is complete: a dict in the list in the dict that vime saves."""
    open_marks = end = 0
    with contextlib.suppress(Exception):  # raised where the data ends
        for operation, _, position in pickletools.genops(pickled):
            if operation.name == "MARK":
                open_marks += 1
            elif pickletools.markobject in operation.stack_before:
                open_marks -= 1
                if open_marks == 2 and operation.name == "SETITEMS":
                    end = (position or 0) + 1
    return end


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
