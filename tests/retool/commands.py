"""Commands as people read them: those of the recipes in the guide, and those that a launch prints."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from project import EXAMPLE


class Recipe(NamedTuple):
    settings: dict[str, str]  # that stand before the script's name
    flags: list[str]


def recipes() -> dict[str, list[Recipe]]:
    """The commands of each section of docs/recipes.md, by its heading."""
    found = {}
    for section in (EXAMPLE / "docs" / "recipes.md").read_text().split("\n## ")[1:]:
        heading, text = section.split("\n", 1)
        found[heading] = []
        for command in re.findall(r"```bash\n(.*?)```", text, re.S):
            before, flags = command.replace("\\\n", " ").split("bash examples/retool/retool_qwen3_4b_rl.sh")
            settings = dict(word.split("=", 1) for word in shlex.split(before))
            found[heading].append(Recipe(settings, shlex.split(flags)))
    return found


def job_words(output: str) -> list[str]:
    """The words of the training script's command line, read back by a shell's rules."""
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    return words[max(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def job_environment(output: str) -> dict[str, str]:
    """The environment that the last command of the output is printed with."""
    words = shlex.split(output.replace("\\\n", " "), comments=True)
    start = max(i for i, word in enumerate(words) if word == "env") + 1
    return dict(word.split("=", 1) for word in words[start : words.index("python3", start)])
