"""The pairs of cases/answer_families.txt; `python answer_pairs.py` prints how they are judged by `retool.answers`, by
vime's DAPO scorer and by math-verify, as far as they can be imported."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FAMILIES = Path(__file__).parents[1] / "cases" / "answer_families.txt"


class Pair(NamedTuple):
    family: str
    label: str
    pred: str
    equal: bool


def pairs() -> list[Pair]:
    """Each once, in the order of the file."""
    text = re.sub(r"^#.*\n", "", FAMILIES.read_text(), flags=re.M)
    return [*dict.fromkeys(pair for family in text.strip().split("\n\n") for pair in _pairs_of(family.strip()))]


def _pairs_of(family: str) -> Iterator[Pair]:
    (name, *variables), *lines = (line if index else line.split() for index, line in enumerate(family.split("\n")))
    if name == "near":
        for line in "\n".join(lines).replace("\n| ", " | ").split("\n"):
            label, *wrong = line.split(" | ")
            yield from (Pair(name, label, pred, False) for pred in wrong)
        return
    rows = [re.split(r"(?<!\\) ", row) for row in lines[0].split("; ")]
    names = variables[len(variables) - len(rows[0]) :]
    values = [_spellings(" ".join(lines[1:]), dict(zip(names, row, strict=True))) for row in rows]
    for index, (label, *others) in enumerate(values):
        wrong = values[(index + 1) % len(values)]
        yield from (Pair(family.split("\n")[0], label, pred, True) for pred in others if pred != label)
        yield from (Pair(family.split("\n")[0], label, pred, False) for pred in [*wrong[:2], wrong[-1]])


def _spellings(line: str, values: dict[str, str]) -> list[str]:
    return [re.sub("<(.)>", lambda found: values[found[1]].replace("\\ ", " "), one) for one in line.split(" | ")]


def _judges() -> Iterator[tuple[str, Callable[[str, str], bool]]]:
    from retool.answers import same_answer

    yield "retool.answers", same_answer
    with contextlib.suppress(ImportError):
        dapo = importlib.import_module("vime.rollout.rm_hub.math_dapo_utils")
        yield "DAPO", lambda pred, label: dapo.compute_score(f"\\boxed{{{pred}}}", label, strict_box_verify=True)[
            "acc"
        ]
    with contextlib.suppress(ImportError):
        other = importlib.import_module("math_verify")
        yield "math-verify", lambda pred, label: other.verify(
            other.parse(f"${label}$"), other.parse(f"$\\boxed{{{pred}}}$")
        )


if __name__ == "__main__":
    sys.path.append(str(FAMILIES.parents[3] / "examples" / "retool"))
    for name, judge in _judges():
        wrong = [pair for pair in pairs() if bool(judge(pair.pred, pair.label)) is not pair.equal]
        false_rights = sum(not pair.equal for pair in wrong)
        print(f"{name}: {len(pairs())} pairs, {false_rights} false rights, {len(wrong) - false_rights} false wrongs")
        for pair in wrong if "-v" in sys.argv else ():
            print(*pair)
