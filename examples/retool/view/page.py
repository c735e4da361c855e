"""One self-contained HTML page from rollouts: page.html, with page.css, the scripts and the data put into it.

    samples --> columns (one JSON object: the table, the charts)  +  a compressed chunk per sample and per prompt

The browser reads the columns at once and a chunk when its sample is looked at, so that a page of gigabytes of tokens
opens at once.

Contract. Text from a file is data all the way: it is in the page only as base64 or as JSON without "<", so that it
cannot end the element it is in, and the page's policy lets nothing run but our scripts, by their digest, and nothing be
fetched at all. They make text nodes of it and never markup.

A chunk is raw DEFLATE of: length of a JSON header (4 bytes, little endian), header, length of the text (4 bytes), text
in UTF-8, the tokens' lengths in UTF-16 units (one byte each; 255 says that more of it follows), the log-probs as
`_quantized` writes them (one byte each).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from view.load import Rollout
from view.samples import KINDS, Shown, advantages, read
from view.tokens import Vocabulary

PARTS = Path(__file__).resolve().parent
SCRIPTS = ("data.js", "table.js", "sample.js", "charts.js", "main.js")  # in this order
LOG_PROB_SCALE = (
    88  # (254 / 88) ** 3 = 24: finer than 4 % of itself at 1 nat, and what is below -24 nats is shown as such
)
_SURROGATES = re.compile("[\ud800-\udfff]")


class Page:
    """Takes rollouts one after the other, each of which may then be forgotten, and writes the page."""

    def __init__(self, vocabulary: Vocabulary | None = None):
        self._vocabulary = vocabulary
        self._files: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._prompts: dict[str, int] = {}
        self._previews: list[str] = []
        self._columns: dict[str, list[Any]] = {}
        self._chunks: list[str] = []
        self._prompt_chunks: list[str] = []

    @property
    def samples(self) -> int:
        return len(self._chunks)

    def add(self, rollout: Rollout) -> list[str]:
        """Take in a rollout; gives what of it cannot be shown, a line each."""
        gaps: Counter[str] = Counter()
        number = len(self._files)
        shown = []
        for raw in rollout.samples:
            sample = read(raw, self._vocabulary, gaps)
            self._chunks.append(_chunk(_header(sample), "".join(s.text for s in sample.segments), sample))
            shown.append(replace(sample, segments=[], pieces=None, mask=None, log_probs=None))
        for sample, advantage in zip(shown, advantages(shown), strict=True):
            self._add_row(self._row(sample, number, advantage))
        self._files.append(
            {
                "name": rollout.name,
                "number": rollout.number if rollout.number is not None else number,
                "evaluation": rollout.evaluation,
            }
        )
        notes = rollout.notes + [
            f"{rollout.name}: {count} of {len(shown)} samples have no usable {field}" for field, count in gaps.items()
        ]
        self._notes += notes
        return notes

    def note(self, line: str) -> None:
        """Say something in the page about what it does not show."""
        self._notes.append(line)

    def _row(self, sample: Shown, file: int, advantage: float | None) -> dict[str, Any]:
        return {
            "file": file,
            "index": sample.index,
            "group": sample.group,
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

    def _add_row(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            self._columns.setdefault(name, []).append(value)

    def _prompt(self, sample: Shown) -> int:
        """The number of the sample's prompt: a group shares one."""
        if sample.prompt not in self._prompts:
            self._prompts[sample.prompt] = len(self._prompts)
            self._previews.append(sample.preview)
            self._prompt_chunks.append(_chunk({}, sample.prompt, None))
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
            "previews": self._previews,
            "samples": self._columns,
            "kinds": KINDS,
            "scale": LOG_PROB_SCALE,
            "tokenized": self._vocabulary is not None,
        }
        page = (PARTS / "page.html").read_text(encoding="utf-8")
        head, tail = page.split("<!-- chunks -->")
        for mark, text in (
            ("<!-- policy -->", _policy(style, script)),
            ("<!-- title -->", html.escape(_text(title))),
            ("<!-- style -->", f"<style>{style}</style>"),
            ("<!-- index -->", f'<script type="application/json" id="index">{_json(index)}</script>'),
            ("<!-- script -->", f"<script>{script}</script>"),
        ):
            before, after = head.split(mark)
            head = before + text + after
        yield head
        for letter, chunks in (("p", self._prompt_chunks), ("s", self._chunks)):
            for number, chunk in enumerate(chunks):
                yield f'<script type="text/plain" id="{letter}{number}">{chunk}</script>\n'
        yield tail


def _script() -> str:
    """The scripts as one, so that one digest allows it, with their names kept to themselves."""
    own = "\n".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{own}}})();\n'


def _policy(style: str, script: str) -> str:
    rules = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    rules += "; require-trusted-types-for 'script'; trusted-types 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(sample: Shown) -> dict[str, Any]:
    return {
        "segments": [[KINDS.index(s.kind), _units(s.text), s.call] for s in sample.segments],
        "calls": [[call.kind, call.seconds, call.outcome] for call in sample.calls],
        "tokens": len(sample.pieces or []),
        "mask": _runs(sample.mask) if sample.mask is not None else None,
    }


def _chunk(header: dict[str, Any], text: str, sample: Shown | None) -> str:
    parts = []
    for part in (_json(header).encode(), _text(text).encode()):
        parts += [struct.pack("<I", len(part)), part]
    if sample and sample.pieces is not None:
        parts.append(_lengths(sample.pieces))
        parts.append(_quantized(sample.log_probs if sample.log_probs is not None else [None] * len(sample.pieces)))
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(packer.compress(b"".join(parts)) + packer.flush()).decode()


def _lengths(pieces: Sequence[str]) -> bytes:
    units = {piece: _units(piece) for piece in set(pieces)}
    lengths = [units[piece] for piece in pieces]
    if max(lengths, default=0) < 255:
        return bytes(lengths)
    return b"".join(bytes([255] * (length // 255) + [length % 255]) for length in lengths)


def _quantized(log_probs: Iterable[float | None]) -> bytes:
    """The cube root of each, scaled to 0..254; 255 where there is none. A positive one is rounding: it counts as 0."""
    found = []
    for value in log_probs:
        if value is None or value != value:
            found.append(255)
        elif value >= 0:
            found.append(0)
        else:
            found.append(min(254, int(LOG_PROB_SCALE * min(-value, 99.0) ** (1 / 3) + 0.5)))
    return bytes(found)


def _runs(mask: Sequence[int]) -> list[int]:
    """Lengths of the runs of a mask in turn, of ones first."""
    runs, value = [0], True
    for entry in mask:
        if bool(entry) != value:
            runs.append(0)
            value = not value
        runs[-1] += 1
    return runs


def _units(text: str) -> int:
    """The length that JavaScript sees."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _text(text: str) -> str:
    """Without lone surrogates, which are no text and have no UTF-8."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _json(value: Any) -> str:
    """ASCII, and without what could end a script element or start a comment in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
