"""One self-contained HTML page from rollouts: page.html, with page.css, page.js and the data put into it.

    samples --> columns (one JSON object: the table, the charts)  +  a compressed chunk per sample and per prompt

The browser reads the columns at once and a chunk when its sample is looked at, so that a page of gigabytes of tokens
opens at once. A chunk is JSON, as raw DEFLATE in base64; lengths in it are counted in code points.

Contract. Text from a file is data all the way: it is in the page only as base64 or as JSON without "<", so that it
cannot end the element it is in, and the page's policy lets nothing run but our scripts, by their digest, and nothing
be fetched at all. They make text nodes of it and never markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.metadata
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from view.load import Rollout
from view.samples import KINDS, Rule, Shown, advantages, messages, read
from view.tokens import Vocabulary

PARTS = Path(__file__).resolve().parent
# KaTeX draws the mathematics. This package is the smallest on PyPI that carries its script: a pure wheel of 98 KB,
# which pip has wherever the page is made, as npm is not. Of its two kinds of output, MathML needs no style sheet and
# no fonts: browsers draw it themselves, so the page grows by the script alone. Without the package formulas stay as
# written.
KATEX = "sphinxcontrib-katex==0.9.11"


def katex() -> str:
    """The script of KaTeX, "" where its package is not installed."""
    try:
        package = importlib.metadata.distribution(KATEX.split("==")[0])
        return Path(str(package.locate_file("sphinxcontrib/katex.min.js"))).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return ""


class Page:
    """Takes rollouts one after the other, each of which may then be forgotten, and writes the page."""

    def __init__(self, vocabulary: Vocabulary | None = None, rule: Rule = Rule(), math: str = ""):  # noqa: B008
        self._vocabulary, self._rule, self._math = vocabulary, rule, math
        self._files: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._prompts: dict[str, int] = {}
        self._problems: list[str] = []
        self._columns: dict[str, list[Any]] = {}
        self._chunks: list[str] = []
        self._prompt_chunks: list[str] = []

    @property
    def samples(self) -> int:
        return len(self._chunks)

    def add(self, rollout: Rollout, datasets: Iterable[str] = ()) -> list[str]:
        """Take in a rollout; gives what of it cannot be shown, a line each. `datasets` names those of an
        evaluation."""
        gaps: Counter[str] = Counter()
        shown = []
        for raw in rollout.samples:
            sample = read(raw, self._vocabulary, gaps)
            self._chunks.append(_chunk(_contents(sample)))
            shown.append(replace(sample, segments=[], pieces=None, log_probs=None))
        weights = advantages(shown, self._rule)
        if rollout.evaluation:
            shown, weights = _grouped(shown, list(datasets)), [None] * len(shown)
        for sample, advantage in zip(shown, weights, strict=True):
            for name, value in self._row(sample, advantage).items():
                self._columns.setdefault(name, []).append(value)
        number = len(self._files) if rollout.number is None else rollout.number
        self._files.append({"name": rollout.name, "number": number, "evaluation": rollout.evaluation})
        notes = rollout.notes + [
            f"{rollout.name}: {count} of {len(shown)} samples have no usable {field}" for field, count in gaps.items()
        ]
        self._notes += notes
        return notes

    def note(self, line: str) -> None:
        """Say something in the page about what it does not show."""
        self._notes.append(line)

    def _row(self, sample: Shown, advantage: float | None) -> dict[str, Any]:
        return {
            "file": len(self._files),
            "index": sample.index,
            "group": sample.group,
            "dataset": sample.dataset[:40],
            "prompt": self._prompt(sample),
            "label": sample.label[:200],
            "prediction": sample.prediction[:200],
            "score": _rounded(sample.score),
            "right": sample.right,
            "lost": sample.lost,
            "advantage": _rounded(advantage),
            "turns": sample.turns,
            "outcomes": sample.outcomes,
            "seconds": _rounded(sum(call.seconds or 0.0 for call in sample.calls)),
            "calls": len(sample.calls),
            "end": sample.end_reason[:40],
            "tokens": sample.tokens,
            "observed": sample.observed,
            "hallucinated": sample.hallucinated,
        }

    def _prompt(self, sample: Shown) -> int:
        """The number of the sample's prompt, which its group shares, and the same problem in other rollouts."""
        if sample.prompt not in self._prompts:
            self._prompts[sample.prompt] = len(self._prompts)
            self._problems.append(sample.problem)
            self._prompt_chunks.append(_chunk({"text": sample.prompt, "messages": messages(sample.prompt)}))
        return self._prompts[sample.prompt]

    def write(self, path: Path, title: str) -> None:
        """Write the page; OSError if that fails."""
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(self._html(title))

    def _html(self, title: str) -> Iterator[str]:
        style, script = (PARTS / "page.css").read_text(encoding="utf-8"), _script()
        index = {
            "files": self._files,
            "notes": self._notes,
            "problems": self._problems,
            "samples": self._columns,
            "kinds": KINDS,
            "tokenized": self._vocabulary is not None,
            "rule": ", ".join(f"{name} {value}" for name, value in self._rule._asdict().items()),
        }
        scripts = [self._math, script] if self._math else [script]
        page = (PARTS / "page.html").read_text(encoding="utf-8")
        head, tail = page.split("<!-- chunks -->")
        for mark, text in (
            ("<!-- policy -->", _policy(style, *scripts)),
            ("<!-- title -->", html.escape(title.encode("utf-8", "replace").decode())),
            ("<!-- style -->", f"<style>{style}</style>"),
            ("<!-- index -->", f'<script type="application/json" id="index">{_json(index)}</script>'),
            ("<!-- script -->", "".join(f"<script>{one}</script>" for one in scripts)),
        ):
            before, after = head.split(mark)
            head = before + text + after
        yield head
        for letter, chunks in (("p", self._prompt_chunks), ("s", self._chunks)):
            for number, chunk in enumerate(chunks):
                yield f'<script type="text/plain" id="{letter}{number}">{chunk}</script>\n'
        yield tail


def _grouped(samples: list[Shown], datasets: list[str]) -> list[Shown]:
    """Samples of an evaluation, each with its dataset and the number of its problem in it. vime writes one dataset
    after the other, each by its own index from 0 on, and numbers no groups."""
    found: list[Shown] = []
    number, last, problems = -1, None, {}  # type: ignore[var-annotated]
    for sample in samples:
        if last is None or (sample.index is not None and sample.index <= last):
            number, problems = number + 1, {}
        last = sample.index if sample.index is not None else last
        name = sample.dataset or (datasets[number] if number < len(datasets) else f"dataset {number + 1}")
        group = problems.setdefault((name, sample.prompt), len(problems))
        found.append(replace(sample, dataset=name, group=group))
    return found


def _script() -> str:
    """Ours, with its names kept to itself."""
    return f'"use strict";\n(() => {{\n{(PARTS / "page.js").read_text(encoding="utf-8")}}})();\n'


def _policy(style: str, *scripts: str) -> str:
    rules = f"default-src 'none'; style-src {_digest(style)}; script-src {' '.join(map(_digest, scripts))}"
    rules += "; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _contents(sample: Shown) -> dict[str, Any]:
    contents: dict[str, Any] = {
        "text": "".join(segment.text for segment in sample.segments),
        "segments": [[KINDS.index(s.kind), len(s.text), s.call, s.parts] for s in sample.segments],
        "calls": sample.calls,
    }
    if sample.pieces is not None:
        contents["lengths"] = [len(piece) for piece in sample.pieces]
        contents["logProbs"] = _hundredths(sample.log_probs or [])
    return contents


def _hundredths(log_probs: Iterable[float | None]) -> list[int | None]:
    """Of a nat; a positive one is rounding and counts as 0. None where there is none."""
    return [
        -int(0.5 - 100 * max(value, -99.0)) if value < 0 else 0 if value == value else None
        for value in (math.nan if value is None else value for value in log_probs)
    ]


def _chunk(contents: dict[str, Any]) -> str:
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    written = json.dumps(contents, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return base64.b64encode(packer.compress(written) + packer.flush()).decode()


def _json(value: Any) -> str:
    """ASCII, and without what could end a script element or start a comment in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
