"""Paths that this user may not look at: taken as not there, and told of where they were named.

Contract: standard library only. `Path.is_file`, `is_dir` and `exists` raise PermissionError below a folder that is
closed to the user (/root, with the published commands), so the example asks os.path, whose functions answer False. For
a path that the user named "no such file" would then be the wrong answer: `why_not_found` gives the right one.
"""

from __future__ import annotations

import os
from pathlib import Path

LFS_POINTER = b"version https://git-lfs"  # how a file begins that Git LFS has not fetched


def closed_folder(path: str | Path) -> Path | None:
    """The folder on the way to the path that this user may not look into, None where there is none."""
    target = Path(os.path.realpath(path))
    for step in (*reversed(target.parents), target):
        try:
            os.stat(step)
        except PermissionError:
            return step.parent
        except (OSError, ValueError):
            return None
    return None


def why_not_found(path: str | Path) -> str:
    """Why a path that was named is neither a file nor a folder, in words that follow the path and a colon."""
    if closed := closed_folder(path):
        return f"no permission to look into {closed}"
    try:
        os.stat(path)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError as error:  # a null character
        return str(error)
    return "neither a file nor a folder"
