#!/usr/bin/env python3
"""Make a Megatron checkpoint with vime's converter: whole or not at all, and only once at a time.

    python3 convert.py FOLDER python3 convert_hf_to_torch_dist.py ...     (given --save FOLDER.partial)

The launch does this in its own process; as a program it is a job on the Ray cluster that RAY_ADDRESS names.

Contract: FOLDER appears only when the checkpoint is whole, so an interrupted conversion is never taken for one. Two
launches that need the same checkpoint do not write into one another: the second one is refused.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from launch.checkpoints import is_whole
from retool.supervise import LaunchError, exit_code, locked, supervise


def convert(folder: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Make the checkpoint unless it is there.

    Returns:
        The converter's exit code, 0 where there was nothing to do.

    Raises:
        LaunchError: another launch makes it now, or the converter ended well without a whole checkpoint.
    """
    target = Path(folder)
    partial = target.with_name(f"{target.name}.partial")
    with locked(target.with_name(f"{target.name}.lock"), f"only one launch may make {target}"):
        if is_whole(folder):
            return 0  # another launch has made it since the checks
        if os.path.exists(partial):
            shutil.rmtree(partial)
        done = subprocess.run([*command, "--save", str(partial)], env=dict(environ), stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            return exit_code(done.returncode)
        if not is_whole(str(partial)):
            raise LaunchError(f"the conversion ended without a whole checkpoint in {partial}; see its output above")
        if os.path.isdir(target):
            target.rmdir()  # it is empty, or the checks would have stopped the launch
        partial.rename(target)
    return 0


if __name__ == "__main__":
    target, *command = sys.argv[1:]
    sys.exit(supervise(lambda: convert(target, command, os.environ)))
