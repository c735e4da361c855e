r"""What the model is told of a call of the code tool, word for word, in RL and in the SFT data alike.

    what came of a call --Parts--> word --"tool_call"--> "Output:\n42"    as the sandbox says it
    published output --read_published-^  --"code"-------> "42"            as the published ReTool rows have it

Contract: a call's observation is worded here and nowhere else. The loop words what the sandbox found in the dialect
that the model spoke; the data script reads what a published row shows of a call into the same parts and words them as
the sandbox would have. So SFT teaches the observations that RL shows.

The published rows hold what a script has printed, and Python's own traceback if it failed. A checkpoint that was
trained on them as they are speaks the dialect `code`, so there an observation is raw.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from retool.chat import shorten

NO_OUTPUT = "No output. Use print(...) to see a value."
AFRESH = "Every call starts afresh: define it in this call."  # as in sandbox/child.py, of a NameError
MAX_TRACEBACK_CALLS = 8  # as in sandbox/child.py, which runs in the jail; so are the next two
MAX_LINE_CHARS = 200
MAX_RECURSION = 1_000_000  # calls; no traceback says more, and a text that does is none
CAUSES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


class Parts(NamedTuple):
    """What there is to tell of a call; each part is shortened already."""

    output: str | None = None  # what it printed, None if nothing
    errors: str | None = None  # what it wrote to standard error
    exception: str = ""  # that ended it, in Python's words, after a traceback in the code's own line numbers
    notice: str = ""  # how it ended otherwise, in the sandbox's words


_SYNTAX_ERROR = re.compile(r"\A(line \d+)((?:\n    [^\n]*)*)\n(\w+: .*)\Z", re.S)


def word(parts: Parts, dialect: str | None) -> str:
    """The observation of a call in a dialect of `retool.actions`."""
    if dialect == "code":
        exception = re.sub(
            r"(?:^  |\A)line (?=\d+(?:, in |$))", '  File "<string>", line ', parts.exception, flags=re.M
        )
        notice = parts.notice if exception or not parts.notice else f"Error: {parts.notice}"
        return "\n".join(filter(None, [parts.output, parts.errors, exception, notice]))
    exception = _SYNTAX_ERROR.sub(r"\1: \3\2", parts.exception)  # the reason first: what follows may be long
    sections = [] if parts.output is None else [f"Output:\n{parts.output}"]
    if parts.errors is not None:
        sections.append(f"Errors:\n{parts.errors}")
    if problem := "\n".join(filter(None, [exception, parts.notice])):
        sections.append(f"Error: {problem}")
    return "\n\n".join(sections) or NO_OUTPUT


def fit(parts: Parts, most: int, output: Callable[[int], str] | None = None) -> Parts:
    """The parts as an observation of at most `most` characters shows them in either dialect: first what went wrong,
    then errors, and the rest for the output.

    Args:
        output: what was printed, given the characters that there is room for; by default the parts' own, shortened.
    """
    notice = shorten(parts.notice, most - len("Error: "))
    exception = shorten(parts.exception, most // 2 - len(notice))
    errors = None if parts.errors is None else shorten(parts.errors, most // 4)
    if output is None and parts.output is not None:
        text = parts.output

        def output(room: int) -> str:
            return shorten(text, room)

    parts = Parts(None, errors, exception, notice)
    taken = max(len(word(parts, dialect)) for dialect in ("tool_call", "code")) if any(parts) else 0
    return parts._replace(output=output(most - taken - len("Output:\n\n\n"))) if output else parts


def shown(output: str, dialect: str | None, most: int) -> str:
    """An observation in the dialect that the model spoke, of at most `most` characters: those of the sandbox are no
    longer, and a megabyte of a user's tool would keep the loop busy for seconds.

    Args:
        output: a `ToolOutput`, whose parts are worded, or the text of a user's tool, which stays as it is.
    """
    parts = getattr(output, "parts", None)
    return shorten(word(parts, dialect) if parts else output, most)


def timed_out(seconds: float) -> str:
    return f"timed out: used {seconds:g} s of processor time. Use a faster method or a smaller case."


def slept(seconds: float) -> str:
    return f"timed out: slept, or waited for input, for {seconds:g} s. A call has no input, and nothing to wait for."


def memory_hint(limit_bytes: int) -> str:
    return f"A call may use {limit_bytes // 1024**2} MB. Use less at a time."


# ---------------------------------------------------------------------------------------------------------------------
# Outputs of published rows
# ---------------------------------------------------------------------------------------------------------------------

_HEADING = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<name>.*))?')
_REPEATED = re.compile(r"  \[Previous line repeated (\d{1,9}) more times?\]")
_MARKS = re.compile(r"\s*[~^]+\s*")
# Where what Python writes to standard error begins: a traceback, a syntax error, which has none, or a warning.
_WRITTEN_BY_PYTHON = re.compile(
    rf'^(?:{re.escape(_HEADING)}\n  File "|  File "[^"\n]*", line \d+\n|[^\s:]+:\d+: \w*Warning: )', re.M
)
_ERROR_LINE = re.compile(r"(?:[a-z_]\w*\.)*(?P<type>[A-Z]\w*)(?::.*)?", re.S)
_OUT_OF_TIME = re.compile(
    r"\W*(?:error\W+)?(?:(?:the |code |process |program |execution |call |run )*)"
    r"(?:has |was )?(?:time(?:d)?[ _-]?out(?:error|expired)?|time ?limit ?exceeded)\b.{0,100}",
    re.I,
)


def is_worded(text: str, code: str) -> bool:
    """Whether the sandbox has said this already: the data script may be given its own output."""
    return text == NO_OUTPUT or (text.startswith(("Output:\n", "Errors:\n", "Error: ")) and text[:6] not in code)


def read_published(text: str, code: str, seconds: float, memory_bytes: int) -> Parts:
    """The parts of what a published row shows of a call, which is what a script has written, as one text.

    An exception's frames are told by the lines of `code`, whatever stood before it in the file that was run; frames of
    libraries are left out, as the sandbox does it. The line of an exception without a traceback is taken for one only
    if the code handles no exception, and so cannot have printed it; the like holds for a line that says "timed out".

    Args:
        text: as it stands between the tags.
        code: what ran, as RL would run it.
        seconds: that a call of RL may take.
        memory_bytes: that it may use.
    """
    if not text.strip():
        return Parts(text.removesuffix("\n") if text else None)
    begun = _WRITTEN_BY_PYTHON.search(text)
    output, written = (text[: begun.start()], text[begun.start() :].rstrip("\n")) if begun else (text, "")
    lines = output.rstrip("\n").split("\n")
    if not begun and (_OUT_OF_TIME.fullmatch(lines[-1]) and not re.search("time", code, re.I)):
        return Parts("\n".join(lines[:-1]) or None, notice=timed_out(seconds))
    if not begun and _is_error_line(lines[-1]) and "except" not in code:
        output, written = "\n".join(lines[:-1]), lines[-1]
    warnings, exception = _split_warnings(written)
    parts = Parts(output.removesuffix("\n") if output else None, warnings, _short_traceback(exception, code))
    last = exception.rpartition("\n")[2]
    if re.match(r"(?:\w+\.)*Timeout(?:Error|Exception|Expired)?\b", last) and "imeout" not in code:
        return parts._replace(exception="", notice=timed_out(seconds))
    if last.startswith("NameError: "):
        return parts._replace(notice=AFRESH)
    if last.startswith("MemoryError") or last.endswith("._ArrayMemoryError"):
        return parts._replace(notice=memory_hint(memory_bytes))
    return parts


def _is_error_line(line: str) -> bool:
    found = _ERROR_LINE.fullmatch(line)
    kind = getattr(builtins, found["type"], None) if found else None
    return isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)


def _split_warnings(written: str) -> tuple[str | None, str]:
    """(warnings, the exception after them)."""
    start = next((at.start() for at in _WRITTEN_BY_PYTHON.finditer(written) if "Warning: " not in at[0]), None)
    if start is None:
        return (written, "") if _WRITTEN_BY_PYTHON.match(written) else (None, written)
    return written[:start].removesuffix("\n") or None, written[start:]


def _short_traceback(exception: str, code: str) -> str:
    """An exception as the sandbox describes it; see `describe` of sandbox/child.py."""
    parts = []
    for chained in re.split(rf"\n\n({'|'.join(map(re.escape, CAUSES))})\n\n", exception):
        parts.append(chained if chained in CAUSES else _one_traceback(chained, code))
    return "\n\n".join(parts)


def _one_traceback(exception: str, code: str) -> str:
    lines = exception.split("\n")
    if lines[0] != _HEADING:
        # A script's indentation is reported without the mark that the sandbox puts below its line.
        exception = re.sub(r"(\n    [^ ].*)(?=\nIndentationError: unexpected indent\Z)", r"\1\n    ^", exception)
        return re.sub(r'\A  File "[^"\n]*", (?=line \d+\n)', "", exception)
    calls, message = _frames(lines[1:])
    shift = _shift(calls, code.split("\n"))
    shown = [_HEADING, *_shown(calls, shift, code.split("\n"))] if calls else []
    return "\n".join([*shown, *(re.sub(r'^  File "[^"]*", (?=line \d+$)', "  ", line) for line in message)])


class _Frame(NamedTuple):
    line: int
    name: str
    text: str  # of the line, as the traceback shows it


def _frames(lines: Sequence[str]) -> tuple[list[_Frame], list[str]]:
    """The frames of the script itself, whose file is that of the outermost one, and the lines after all frames."""
    calls: list[_Frame] = []
    script = None
    position = 0
    while position < len(lines):
        if (found := _FRAME.fullmatch(lines[position])) and found["name"] is not None:
            script = script or found["file"]
            position += 1
            shown = position
            while position < len(lines) and lines[position].startswith("    "):  # the source line, and marks below it
                position += 1
            source = [line.strip() for line in lines[shown:position] if not _MARKS.fullmatch(line)]
            own = found["file"] == script
            if own:
                calls.append(_Frame(int(found["line"]), found["name"], source[0] if source else ""))
        elif repeated := _REPEATED.fullmatch(lines[position]):
            calls += calls[-1:] * min(int(repeated[1]), MAX_RECURSION) if own else []
            position += 1
        else:
            break
    return calls, list(lines[position:])


def _shift(calls: Sequence[_Frame], code: Sequence[str]) -> int:
    """By how many lines the script was longer at its top than the code: nearest to none where that cannot be told."""
    known = [call for call in calls if call.text]

    def fits(shift: int) -> bool:
        return all(
            0 < call.line - shift <= len(code) and code[call.line - shift - 1].strip() == call.text for call in known
        )

    lines = [number for number, line in enumerate(code, 1) if known and line.strip() == known[0].text]
    shifts = sorted((known[0].line - number for number in lines), key=abs)
    return next(filter(fits, shifts), 0)


def _shown(calls: Sequence[_Frame], shift: int, code: Sequence[str]) -> Iterator[str]:
    """Two lines per call, deep recursion cut in the middle."""
    half = MAX_TRACEBACK_CALLS // 2
    deep = len(calls) > MAX_TRACEBACK_CALLS
    for call in islice(calls, half if deep else None):
        yield _call_text(call, shift, code)
    if deep:
        yield f"  ... {len(calls) - 2 * half} more calls ..."
        yield from (_call_text(call, shift, code) for call in calls[-half:])


def _call_text(call: _Frame, shift: int, code: Sequence[str]) -> str:
    number = call.line - shift
    text = call.text or (code[number - 1].strip() if 0 < number <= len(code) else "")
    if len(text) > MAX_LINE_CHARS:
        text = f"{text[: MAX_LINE_CHARS // 2]} ... {text[-MAX_LINE_CHARS // 2 :]}"
    return f"  line {number}, in {call.name}\n    {text}"
