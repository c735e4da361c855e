"""Ask vime's own parser about the arguments of a job: what it would refuse, and what it would ignore without a word.

    PYTHONPATH=PLUGIN:VIME:MEGATRON python3 ask_vime.py {all,flags} ARGUMENTS ...

The last line of its output is JSON: {"problems": [lines], "unavailable": why the parser does not start here, or ""}.
"flags" leaves out what is checked against files (the checkpoint is not there yet). vime hands the same arguments to a
parser of Megatron's and one of vLLM's, each of which ignores what it does not know; so a word is known if one of them
knows it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

OTHER_PARSERS = ("--vllm-", "--router-")  # not asked in a run without engines, whose script may pass their flags
NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class Refused(Exception):
    """A parser refuses an argument."""


def main() -> None:
    depth, *words = sys.argv[1:]
    sys.argv = ["train.py", *words]
    actions: dict[str, argparse.Action] = {}
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def note(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        actions.update(parser._option_string_actions)  # argparse has no public list of them; vime reads it as well
        return parse_known_args(parser, *args, **options)

    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        raise Refused(message)

    problems, unavailable = [], ""
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", note),
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            from vime.utils.arguments import parse_args

            stand_in_for_a_gpu()
            parse_args()
        except ImportError as error:
            unavailable = str(error)
        except Refused as error:
            problems.append(f"vime refuses the command: {error}")
        except (Exception, SystemExit) as error:
            if depth == "all":
                problems.append(f"vime refuses the command: {' '.join(str(error).split()) or repr(error)}")
    if not unavailable and "--hf-checkpoint" in actions:  # Megatron's parser, which is asked last, has been asked
        problems += stray(words, actions)
    print(json.dumps({"problems": problems, "unavailable": unavailable}), flush=True)
    os._exit(0)  # what the libraries have registered for the end has nothing to do here


def stand_in_for_a_gpu() -> None:
    """Where there is no GPU, give its generation, which Megatron asks for, and triton, which it and vime import."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=9, minor=0)
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        sys.modules["triton"] = mock.MagicMock(__version__="3.4.0")
        sys.modules["triton.language"] = mock.MagicMock()


def stray(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> Iterator[str]:
    """The words that no parser takes, neither as a flag nor as the value of one."""
    asked = {prefix for prefix in OTHER_PARSERS if any(flag.startswith(prefix) for flag in actions)}
    room = 0.0  # how many values the flag before may still take
    for word in words:
        flag = word.partition("=")[0]
        if not word.startswith("-") or NEGATIVE_NUMBER.fullmatch(word) or " " in flag:
            if room < 1:
                yield f"{word} is neither a flag nor the value of one{hint(word, actions)}"
            room -= 1
        elif flag in actions:
            room = 0 if "=" in word else takes(actions[flag])
        else:
            room = float("inf")  # its values are not reported once more
            if not any(flag.startswith(prefix) for prefix in OTHER_PARSERS if prefix not in asked):
                yield f"{flag} is a flag of neither vime nor Megatron, which would ignore it{hint(flag, actions)}"


def hint(word: str, actions: Mapping[str, argparse.Action]) -> str:
    if re.match(r"[A-Z][A-Z_]+=", word):
        return f"; a setting goes before the script's name: {word} bash ..."
    flag = "--" + word.lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(flag, sorted(actions), n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def takes(action: argparse.Action) -> float:
    if isinstance(action.nargs, int):
        return action.nargs
    return {None: 1, "?": 1}.get(action.nargs, float("inf"))


if __name__ == "__main__":
    main()
