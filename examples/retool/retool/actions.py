r"""Actions: what the model wrote in a turn, read in one pass.

    text of a turn ----scan----> blocks (calls, code, hallucinated output) + what is left of the text
                   ----read_action----> Code | ToolCall | Answer | Invalid | Incomplete

Contract: reading is pure and linear in the text, never raises, never evaluates. What it says is what the loop does, what
the reward scores and what the SFT data is made of: nobody else reads these forms. The golden cases of each form are in
tests/retool/cases/actions.jsonl.

Invariants. An answer inside code, inside a closed thought or inside hallucinated tool output is none. No stretch of text
is read more than a few times.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from retool.chat import CODE_TOOL, TURN_ENDS, shorten

# ---------------------------------------------------------------------------------------------------------------------
# What a turn can be
# ---------------------------------------------------------------------------------------------------------------------

Dialect = Literal["tool_call", "code"]


class Code(NamedTuple):
    """A program to run."""

    source: str
    dialect: Dialect  # the one the model spoke, and is answered in


class ToolCall(NamedTuple):
    """A call of a tool other than the code interpreter."""

    name: str
    arguments: dict[str, Any]
    dialect: Dialect = "tool_call"


class Answer(NamedTuple):
    """The final answer: what the box holds."""

    content: str


class Invalid(NamedTuple):
    """Nothing that can be acted on; `problem` says what was wrong, in words for the model."""

    problem: str
    dialect: Dialect | None = None


class Incomplete(NamedTuple):
    """The closing tag stands in a string that is not finished yet: more text decides."""


Action = Code | ToolCall | Answer | Invalid | Incomplete


class Reading(NamedTuple):
    action: Action
    hallucinated: int = 0  # tool outputs that the model wrote itself


class Block(NamedTuple):
    """A stretch of a turn that is not prose; positions are indices into the text."""

    kind: Literal["tool_call", "code", "fence", "hallucinated"]
    start: int
    body: int
    body_end: int
    end: int


class Scan(NamedTuple):
    blocks: list[Block]
    words: str  # the text with its blocks and closed thoughts blanked out, as long as the text
    incomplete: bool


class Box(NamedTuple):
    content: str
    end: int
    labeled: bool  # after "Answer:" or inside <answer>


# ---------------------------------------------------------------------------------------------------------------------
# Reading a turn
# ---------------------------------------------------------------------------------------------------------------------


def read_action(text: str, over: bool | None = None, tools: Collection[str] = (CODE_TOOL,)) -> Reading:
    """The last answer of a turn, else its first tool call or <code> block, else its first Python fence.

    Args:
        text: what the model has said in this turn.
        over: whether no text follows in this turn; by default it is over if it ends with a chat token.
        tools: the names of the tools that may be called.
    """
    over = is_over(text) if over is None else over
    found = scan(text, over)
    hallucinated = sum(block.kind == "hallucinated" for block in found.blocks)
    return Reading(_action(text, found, over, tools), hallucinated)


def _action(text: str, found: Scan, over: bool, tools: Collection[str]) -> Action:
    if answer := last_answer(found.words, over):
        return Answer(answer.content)
    calls = [block for block in found.blocks if block.kind in ("tool_call", "code")]
    if found.incomplete and not calls:
        return Incomplete()
    calls += [block for block in found.blocks if block.kind == "fence"]
    if not calls:
        return Invalid(_no_action(text))
    first = calls[0]
    body = text[first.body : first.body_end]
    if first.kind == "tool_call":
        return _read_call_body(body, tools)
    program = source(body)
    return Code(program, "code") if program else Invalid("the code block is empty", "code")


def complete_actions_end(text: str) -> int:
    """The index after the last complete action of a turn, an answer's box included; the text's length without one."""
    over = is_over(text)
    found = scan(text, over)
    answer = last_answer(found.words, over)
    ends = [block.end for block in found.blocks if block.kind != "hallucinated"] + ([answer.end] if answer else [])
    return max(ends, default=len(text))


def last_box(text: str) -> str:
    """What the last complete box in the assistant's prose holds, "" without one; a turn's text without observations."""
    boxes = find_boxes(scan(text, over=True).words)
    return boxes[-1].content if boxes else ""


def is_over(text: str) -> bool:
    return text.rstrip().endswith(TURN_ENDS)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------------------------

_OPENERS = re.compile(
    r"<tool_call>|<code>|<interpreter>|<tool_response>|</?think>|^[ \t]*```(?:python3?|py)[ \t\r]*$", re.M | re.I
)
_CALL_TAGS = re.compile(r"</?tool_call>")
_CALL_LOOKS_CLOSED = re.compile(r"\}\s*</tool_call>")
_JSON_PIECES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}]|</?tool_call>', re.S)
# A quote after a word opens no string ("don't") unless the word is a string prefix.
_QUOTE_OPENS = r"(?:(?<!\w)|(?<=\b[rRbBfFuU])|(?<=\b[rRbBfF]{2}))"
_PYTHON_STRINGS = (
    rf'{_QUOTE_OPENS}(?:"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r"""|"{3}|'{3}"""
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r"""|["'])|\\."""
)
_PYTHON_PIECES = re.compile(_PYTHON_STRINGS + r"|#(?:(?!</?code>)[^\n])*|</?code>", re.S)
# Between fences a tag in a comment is part of it; without them the block may well end after a comment.
_FENCED_PIECES = re.compile(_PYTHON_STRINGS + r"|#(?:(?!```)[^\n])*|</?code>", re.S)
_FENCE_END = re.compile(r"^[ \t]*```(?!\w)|```[ \t\r]*$", re.M)
_FENCE_IN_CODE = re.compile(r"\s*```(?:python3?|py)?[ \t\r]*\n", re.I)
_FENCED = re.compile(r"\s*```(?:python3?|py)?[ \t\r]*\n(.*?)\n?[ \t]*```\s*", re.S | re.I)
_ANSWER_MARKS = re.compile(
    r"(?P<label>\banswer\b[*_ \t]*[:：])|(?P<tag><answer>)|(?P<tag_end></answer>)|(?P<box>\\boxed\s*\{)|(?P<line>\n)",
    re.I,
)
_BRACES = re.compile(r"\\.|[{}]", re.S)
_DECORATION = " \t\r*_$\\[](){}`#>"  # what may stand between "Answer:" and a box on a later line
_CLOSERS = " \t\r\n.,;:!*_$)]}\\\"'`"  # what may follow a box on the last line
_JSON_ESCAPES = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BLANK = "\0"


class _Found(NamedTuple):
    """What stands after an opening tag: a block, or, where it is not closed, the strings in it."""

    block: Block | None = None
    strings: tuple[tuple[int, int], ...] = ()
    incomplete: bool = False
    unclosed: bool = False  # no tag of its kind that comes later is closed either


def scan(text: str, over: bool) -> Scan:
    """One pass. A reader moves the scan past its block, or hides the strings of what it found unclosed, in which no
    tag is looked at again: so no stretch of text is read more than a few times."""
    blocks: list[Block] = []
    hidden = bytearray(len(text))
    unclosed: set[str] = set()
    incomplete = False
    thought_from: int | None = 0  # a turn may continue a thought that the prompt or an earlier turn opened
    position = 0
    while opener := _OPENERS.search(text, position):
        position = opener.end()
        tag = opener.group().strip().lower()
        tag = tag if tag.startswith("<") else "```"
        if hidden[opener.start()] or tag in unclosed:
            continue
        if tag == "<think>":
            thought_from = opener.start()
        elif tag == "</think>":
            if thought_from is not None:
                _hide(hidden, thought_from, opener.end())
            thought_from = None
        else:
            reading = _READERS[tag](text, opener, over)
            if reading.block:
                blocks.append(reading.block)
                position = reading.block.end
                _hide(hidden, reading.block.start, reading.block.end)
            for span in reading.strings:
                _hide(hidden, *span)
            incomplete = incomplete or reading.incomplete
            if reading.unclosed:
                unclosed.add(tag)
    words = "".join(
        text[run.start() : run.end()] if run.group()[0] == 0 else _BLANK * len(run.group())
        for run in re.finditer(rb"\x00+|\x01+", hidden)
    )
    return Scan(blocks, words, incomplete)


def _hide(hidden: bytearray, start: int, end: int) -> None:
    hidden[start:end] = b"\x01" * (end - start)


def _read_call(text: str, opener: re.Match[str], over: bool) -> _Found:
    """A <tool_call>: its object may hold the closing tag in a string, and raw newlines."""
    start, body = opener.start(), opener.end()
    while body < len(text) and text[body].isspace():
        body += 1
    if not text.startswith("{", body):
        tag = _CALL_TAGS.search(text, body)
        if tag is None or tag.group() == "<tool_call>":  # a mention of the tag
            return _Found()
        return _Found(Block("tool_call", start, body, tag.start(), tag.end()))

    strings: list[tuple[int, int]] = []
    depth, whole = 0, False
    for piece in _JSON_PIECES.finditer(text, body):
        token = piece.group()
        if token == "<tool_call>":  # the model began again
            return _Found()
        if token == "</tool_call>":
            return _Found(Block("tool_call", start, body, piece.start(), piece.end()))
        if token == '"':
            return _read_call_in_string(text, (start, body), piece.start(), tuple(strings), over)
        if token[0] == '"':
            strings.append(piece.span())
            continue
        depth += 1 if token == "{" else -1
        if depth == 0 and not whole:
            whole = True
            if over and text[piece.end() :].strip() in ("", *TURN_ENDS):  # whole, and nothing more will come
                return _Found(Block("tool_call", start, body, piece.end(), piece.end()))
    return _Found(strings=tuple(strings), unclosed=True)


def _read_call_in_string(
    text: str, opening: tuple[int, int], quote: int, strings: tuple[tuple[int, int], ...], over: bool
) -> _Found:
    """A closing tag after the last, unpaired quote: part of a string that goes on, or the end of broken JSON."""
    close = _CALL_LOOKS_CLOSED.search(text, quote)
    if close is None and over:
        close = re.compile("</tool_call>").search(text, quote)
    if close:
        close_at = close.end() - len("</tool_call>")
        return _Found(Block("tool_call", opening[0], opening[1], close_at, close.end()))
    incomplete = "</tool_call>" in text[quote:]
    return _Found(strings=(*strings, (quote, len(text))), incomplete=incomplete, unclosed=True)


def _read_code(text: str, opener: re.Match[str], over: bool) -> _Found:
    """A <code> block, closed by the first </code> that is not part of a Python string."""

    def block(tag_start: int) -> _Found:
        return _Found(Block("code", opener.start(), opener.end(), tag_start, tag_start + len("</code>")))

    strings: list[tuple[int, int]] = []
    in_comment = -1  # the first closing tag that is part of a comment
    end = opener.end()
    pieces = _FENCED_PIECES if _FENCE_IN_CODE.match(text, opener.end()) else _PYTHON_PIECES
    for piece in pieces.finditer(text, opener.end()):
        token, end = piece.group(), piece.end()
        if token == "</code>":
            return block(piece.start())
        if token == "<code>":  # a mention of the tag before, or the model began again
            return _Found()
        if token[0] == "#" and in_comment < 0 and "</code>" in token:
            in_comment = piece.start() + token.index("</code>")
        if token in ('"' * 3, "'" * 3):
            unfinished = True
        elif token in ('"', "'"):  # such a string ends with its line: it is broken, and none, if the line is over
            unfinished = text.find("\n", piece.end()) < 0
        else:
            if token[0] in "\"'":
                strings.append(piece.span())
            continue
        if not unfinished:
            continue
        close = text.find("</code>", piece.end())
        if over and close >= 0:
            return block(close)
        return _Found(strings=(*strings, (piece.start(), len(text))), incomplete=close >= 0, unclosed=True)
    if over and in_comment >= 0:
        return block(in_comment)
    incomplete = text.endswith("</code>") and in_comment >= 0 and end == len(text)
    return _Found(strings=tuple(strings), incomplete=incomplete, unclosed=True)


def _read_fence(text: str, opener: re.Match[str], over: bool) -> _Found:
    close = _FENCE_END.search(text, opener.end())
    if close:
        return _Found(Block("fence", opener.start(), opener.end(), close.start(), close.end()))
    pieces = _PYTHON_PIECES.finditer(text, opener.end())
    strings = tuple(piece.span() for piece in pieces if piece.group()[0] in "\"'" and len(piece.group()) > 1)
    return _Found(strings=strings, unclosed=True)


def _read_hallucinated(text: str, opener: re.Match[str], over: bool) -> _Found:
    tag = opener.group().lower().replace("<", "</")
    close = text.find(tag, opener.end())
    if close < 0:
        return _Found(unclosed=True)
    return _Found(Block("hallucinated", opener.start(), opener.end(), close, close + len(tag)))


_READERS = {
    "<tool_call>": _read_call,
    "<code>": _read_code,
    "```": _read_fence,
    "<interpreter>": _read_hallucinated,
    "<tool_response>": _read_hallucinated,
}


def last_answer(words: str, over: bool) -> Box | None:
    """The last labeled box, or one that nothing but punctuation follows in a turn that ended."""
    boxes = find_boxes(words)
    if over and boxes:
        tail = words[boxes[-1].end :].rstrip()
        for chat_token in TURN_ENDS:
            tail = tail.removesuffix(chat_token).rstrip()
        if not tail.strip(_CLOSERS):
            return boxes[-1]
    return next((box for box in reversed(boxes) if box.labeled), None)


def find_boxes(words: str) -> list[Box]:
    """Every complete box that holds something, in order."""
    if "\\boxed" not in words:  # most turns call a tool
        return []
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(words):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()

    boxes: list[Box] = []
    label: str | None = None  # "label": until the end of its line; "tag": until </answer>
    line_from = box_end = 0
    for mark in _ANSWER_MARKS.finditer(words):
        if mark.start() < box_end:  # inside the box before
            continue
        if mark.lastgroup == "box":
            close = closing.get(mark.end() - 1, mark.end())
            content = words[mark.end() : close].strip()
            if content and _BLANK not in content:
                box_end = close + 1
                boxes.append(Box(content, box_end, labeled=label is not None))
        elif mark.lastgroup == "line":
            said_nothing = not words[line_from : mark.start()].strip(_DECORATION)
            if label == "label" and not said_nothing:
                label = None
            line_from = mark.end()
        elif mark.lastgroup == "tag_end":
            if label == "tag" and boxes and boxes[-1].labeled:
                boxes[-1] = boxes[-1]._replace(end=mark.end())
            label = None
        else:
            label, line_from = mark.lastgroup, mark.end()
    return boxes


def _read_call_body(body: str, tools: Collection[str]) -> Action:
    def invalid(problem: str) -> Invalid:
        return Invalid(problem, "tool_call")

    try:
        call = _load_json(body)
    except (ValueError, RecursionError) as error:
        return invalid(f"the tool call is not valid JSON ({error})")
    if not isinstance(call, dict):
        return invalid('the tool call is not a JSON object {"name": ..., "arguments": {...}}')
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or name not in tools:
        known = ", ".join(tools)
        return invalid(f"there is no tool {shorten(str(name), 100)!r}; the tools are: {known}")
    if isinstance(arguments, str):
        try:
            arguments = _load_json(arguments)
        except (ValueError, RecursionError) as error:
            return invalid(f"the arguments of the tool call are not valid JSON ({error})")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return invalid("the arguments of the tool call are not a JSON object")
    if name != CODE_TOOL:
        return ToolCall(name, arguments)
    code = arguments.get("code")
    if not isinstance(code, str):
        return invalid('the tool call has no "code": its arguments must be {"code": "..."} with Python as a string')
    program = source(code)
    return Code(program, "tool_call") if program else invalid('the "code" of the tool call is empty')


def source(body: str) -> str:
    """The program in a block: without a fence around it, without blank lines at its ends, at its own indentation."""
    code = without_fence(body).strip("\r\n").rstrip()
    return textwrap.dedent(code) if code[:1] in (" ", "\t") else code


def without_fence(body: str) -> str:
    """What a block holds between the lines of its fence; the body itself where it has none."""
    fenced = _FENCED.fullmatch(body)
    return fenced.group(1) if fenced else body


def _load_json(text: str) -> Any:
    """JSON whose strings may hold raw control characters, and escapes that JSON does not know, kept as written."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        known = _JSON_ESCAPES.sub(lambda found: found.group() if len(found.group()) > 1 else r"\\", text)
        return json.loads(known, strict=False)


def _no_action(text: str) -> str:
    if "<tool_call>" in text:
        return "the tool call is not complete: its JSON object or its </tool_call> is missing"
    if "<code>" in text:
        return "the code block is not closed with </code>"
    return "it holds neither a tool call nor a final answer"
