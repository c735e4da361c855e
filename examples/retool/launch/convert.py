#!/usr/bin/env python3
"""Make a Megatron checkpoint with vime's converter: whole or not at all, and only once at a time.

    python3 convert.py --target FOLDER -- python3 convert_hf_to_torch_dist.py ...     (given --save FOLDER.partial)

Contract: FOLDER appears only when the checkpoint is whole, so an interrupted conversion is never taken for one. On a
stop signal, and when the program that started this one ends, the converter and all it started is ended. Two launches
that need the same checkpoint do not write into one another: the second one is refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started by its path

from launch.checks import megatron_checkpoint_is_whole
from launch.supervise import LaunchError, end_with_parent, exit_code, locked, supervise


def main() -> int:
    args = _parse_args()
    end_with_parent(os.getppid())  # a shell that is ended by SIGTERM does not hand it on
    return supervise(lambda: _convert(args.target, args.command))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a checkpoint converter whose result appears only when whole.")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="the converter; --save is added to it")
    return parser.parse_args()


def _convert(target: Path, command: list[str]) -> int:
    partial = target.with_name(f"{target.name}.partial")
    with locked(target.with_name(f"{target.name}.lock"), f"only one launch may make {target}"):
        if megatron_checkpoint_is_whole(target):
            return 0  # another launch has made it since the checks
        if os.path.exists(partial):
            shutil.rmtree(partial)
        code = exit_code(subprocess.run([*command, "--save", str(partial)], stdin=subprocess.DEVNULL).returncode)
        if code != 0:
            return code
        if not megatron_checkpoint_is_whole(partial):
            raise LaunchError(f"the conversion ended without a whole checkpoint in {partial}; see its output above")
        if os.path.isdir(target):
            target.rmdir()  # it is empty, or the checks would have stopped the launch
        partial.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
