r"""Blocks: which stretches of a turn are calls, code, thoughts and hallucinated tool output, and which are prose.

    text of a turn ----scan----> blocks, and the text with all that is no prose blanked out

Contract: reading is pure and linear in the text, never raises, never evaluates. A block is found where its opening tag
stands outside of every other block; whether it is closed is decided by the strings of its language, since a tag in a
string is text.

Invariant: no stretch of text is read more than a few times. Tests double the text and watch the time.

This module imports nothing of the project but what ends a turn.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from retool.chat import without_turn_end


class Block(NamedTuple):
    """A stretch of a turn that is not prose; positions are indices into the text."""

    kind: Literal["tool_call", "code", "fence", "hallucinated"]
    start: int
    body: int
    body_end: int
    end: int
    in_thought: bool = False


class Scan(NamedTuple):
    blocks: list[Block]
    words: str  # the text with its blocks and thoughts blanked out, as long as the text
    incomplete: bool
    in_thought: bool  # whether the text ends inside a thought
    ends_thought: bool  # whether it ends one that was opened before it


_FENCE = re.compile(r"^[ \t]*```(?:python3?|py)[ \t\r]*$", re.M | re.I)
_OPENERS = re.compile(
    r"<tool_call>|<function=|<code>|<interpreter>|<tool_response>|</?think>|" + _FENCE.pattern, re.M | re.I
)
_CALL_TAGS = re.compile(r"</?tool_call>")
_CALL_LOOKS_CLOSED = re.compile(r"\}\s*</tool_call>")
_JSON_PIECES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}]|</?tool_call>', re.S)
_CALL_BODY = re.compile(r"\s*(?:(?:```(?:json)?[ \t\r]*\n\s*)?(?:\[\s*)?(?=\{))?")  # in a fence, or in a list
_JSON_OBJECT = re.compile(r"\s*(?=\{)")
# Qwen3-Coder's calls.
_FUNCTION = re.compile(r"<function=([^<>\s]*)>")
_FUNCTION_TAGS = re.compile(r"<function=|</function>|</tool_call>")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]*)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
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
_PYTHON_PIECES = re.compile(_PYTHON_STRINGS + r"|#[^\n<]*(?:<(?!/?code>)[^\n<]*)*|</?code>", re.S)
# Between fences a tag in a comment is part of it; without them the block may well end after a comment.
_FENCED_PIECES = re.compile(_PYTHON_STRINGS + r"|#[^\n`]*(?:`(?!``)[^\n`]*)*|</?code>", re.S)
_PARAMETER_PIECES = re.compile(_PYTHON_STRINGS + r"|" + _PARAMETER_END.pattern, re.S)
_FENCE_END = re.compile(r"^[ \t]*```(?!\w)|```[ \t\r]*$", re.M)
_FENCE_PIECES = re.compile(rf"{_PYTHON_STRINGS}|#[^\n`]*(?:`(?!``)[^\n`]*)*|{_FENCE_END.pattern}", re.S | re.M)
_LOOSE_FENCE_END = re.compile(r"^[ \t]*```(?!(?:python3?|py)[ \t\r]*$)", re.M | re.I)
# What stands between two tags that a sentence speaks of, or in the form that the system text shows.
_MENTIONED = re.compile(r"""[A-Za-z\s,.;:!?'"’`…{}-]*|[^<]*<function-name>.*""", re.S)
_QUOTES = {"`": "`", "'": "'", '"': '"', "“": "”", "‘": "’"}
FENCE_IN_CODE = re.compile(r"\s*```(?:python3?|py)?[ \t\r]*\n", re.I)
BLANK = "\0"
MAX_MENTION_CHARS = 200
MAX_REREADINGS = 2  # of stretches that a reader gave up on; more of them only in texts made for it


class _Turn(NamedTuple):
    """What the readers look at."""

    text: str
    over: bool
    said: int  # the end of what is not white space or the chat token that ends the turn


class _Found(NamedTuple):
    """What stands after an opening tag: a block, or, where it is not closed, the data in it."""

    block: Block | None = None
    data: tuple[tuple[int, int], ...] = ()  # strings and comments
    incomplete: bool = False
    unclosed: bool = False  # no tag of its kind that comes later is closed either
    read_to: int = 0  # where the same tag came again, so that this one is only a mention


def scan(text: str, over: bool, in_thought: bool = False) -> Scan:
    """One pass. A reader moves the scan past its block, or hides the data in what it found unclosed, in which no tag
    is looked at again: so no stretch of text is read more than a few times.

    Args:
        text: what the model has said in a turn, or in a part of it.
        over: whether no text follows in this turn.
        in_thought: whether a thought was opened before the text.
    """
    turn = _Turn(text, over, len(without_turn_end(text)))
    blocks: list[Block] = []
    hidden = bytearray(len(text))
    unclosed: set[str] = set()
    read_to: dict[str, int] = {}
    rereadings = 0
    incomplete = ends_thought = False
    # A thought that nobody told of may have been opened before: then its closing tag shows it.
    thought_from: int | None = 0
    thoughts: list[tuple[int, int]] = []
    from_before = True
    position = 0
    while opener := _OPENERS.search(text, position):
        position = opener.end()
        tag = opener.group().strip().lower()
        tag = tag if tag.startswith("<") else "```"
        if hidden[opener.start()] or tag in unclosed or _is_quoted(text, opener):
            continue
        if tag == "<think>":
            if not in_thought:
                thought_from, in_thought, from_before = opener.start(), True, False
        elif tag == "</think>":
            if thought_from is not None:
                thoughts.append((thought_from, opener.end()))
                ends_thought = ends_thought or from_before
            thought_from, in_thought, from_before = None, False, False
        else:
            if opener.start() < read_to.get(tag, 0):
                rereadings += 1
                if rereadings > MAX_REREADINGS:
                    continue
            reading = _READERS[tag](turn, opener)
            if reading.block:
                blocks.append(reading.block)
                position = reading.block.end
                _hide(hidden, reading.block.start, reading.block.end)
            for span in reading.data:
                _hide(hidden, *span)
            incomplete = incomplete or reading.incomplete
            read_to[tag] = max(reading.read_to, read_to.get(tag, 0))
            if reading.unclosed:
                unclosed.add(tag)
    if in_thought and thought_from is not None:
        thoughts.append((thought_from, len(text)))
    for span in thoughts:
        _hide(hidden, *span)
    starts = [start for start, _ in thoughts]
    blocks = [block._replace(in_thought=_lies_in(block, thoughts, starts)) for block in blocks]
    words = "".join(
        text[run.start() : run.end()] if run.group()[0] == 0 else BLANK * len(run.group())
        for run in re.finditer(rb"\x00+|\x01+", hidden)
    )
    return Scan(blocks, words, incomplete, in_thought, ends_thought)


def _is_quoted(text: str, tag: re.Match[str]) -> bool:
    """Whether the tag stands in quotation marks of its own: the sentence speaks of it."""
    quote = _QUOTES.get(text[tag.start() - 1 : tag.start()])
    return quote is not None and text.startswith(quote, tag.end())


def _lies_in(block: Block, thoughts: list[tuple[int, int]], starts: list[int]) -> bool:
    index = bisect.bisect_right(starts, block.start) - 1
    return index >= 0 and block.start < thoughts[index][1]


def _hide(hidden: bytearray, start: int, end: int) -> None:
    hidden[start:end] = b"\x01" * (end - start)


def xml_parameters(body: str) -> tuple[str, dict[str, str]] | None:
    """The name and the parameters, as text, of a call in Qwen3-Coder's form; None where it is not well-formed.

    Args:
        body: from its <function=...> to its </function>.
    """
    tag = _FUNCTION.match(body)
    if tag is None:
        return None
    position = tag.end()
    parameters: dict[str, str] = {}
    while parameter := _PARAMETER.match(body, position):
        close = _parameter_end(body, parameter.end())
        if close is None:
            return None
        value = body[parameter.end() : close.start()].removeprefix("\n").removesuffix("\n")
        parameters[parameter.group(1)] = value
        position = close.end()
    return (tag.group(1), parameters) if _FUNCTION_END.match(body, position) else None


def _read_call(turn: _Turn, opener: re.Match[str]) -> _Found:
    """A <tool_call>: its object may hold the closing tag in a string, and raw newlines."""
    text, start = turn.text, opener.start()
    body = _end(_CALL_BODY.match(text, opener.end()))
    if not text.startswith("{", body):
        if _FUNCTION.match(text, body):
            return _read_function_call(turn, start, body)
        tag = _CALL_TAGS.search(text, body)
        if tag is None or tag.group() == "<tool_call>" or _is_mention(text, start, body, tag.start()):
            return _Found()
        return _Found(Block("tool_call", start, body, tag.start(), tag.end()))

    strings: list[tuple[int, int]] = []
    depth, whole = 0, False
    for piece in _JSON_PIECES.finditer(text, body):
        token = piece.group()
        if token == "<tool_call>":  # the model began again
            return _Found(read_to=piece.start())
        if token == "</tool_call>":
            if _is_mention(text, start, body, piece.start()):
                return _Found()
            return _Found(Block("tool_call", start, body, piece.start(), piece.end()))
        if token == '"':
            return _read_call_in_string(turn, (start, body), piece.start(), tuple(strings))
        if token[0] == '"':
            strings.append(piece.span())
            continue
        depth += 1 if token == "{" else -1
        if depth == 0 and not whole:
            whole = True
            if turn.over and piece.end() >= turn.said:  # whole, and nothing more will come
                return _Found(Block("tool_call", start, body, piece.end(), piece.end()))
    return _Found(data=tuple(strings), unclosed=True)


def _end(found: re.Match[str] | None) -> int:
    assert found is not None
    return found.end()


def _read_call_in_string(
    turn: _Turn, opening: tuple[int, int], quote: int, strings: tuple[tuple[int, int], ...]
) -> _Found:
    """A closing tag after the last, unpaired quote: part of a string that goes on, or the end of broken JSON."""
    text = turn.text
    close = _CALL_LOOKS_CLOSED.search(text, quote)
    if close is None and turn.over:
        close = re.compile("</tool_call>").search(text, quote)
    if close:
        close_at = close.end() - len("</tool_call>")
        return _Found(Block("tool_call", opening[0], opening[1], close_at, close.end()))
    incomplete = text.find("</tool_call>", quote) >= 0
    return _Found(data=(*strings, (quote, len(text))), incomplete=incomplete, unclosed=True)


def _read_function(turn: _Turn, opener: re.Match[str]) -> _Found:
    """A <function=...> without a <tool_call> around it: prose may speak of the tag, so it counts with what follows
    it."""
    tag = _FUNCTION.match(turn.text, opener.start())
    if tag is None or not any(form.match(turn.text, tag.end()) for form in (_PARAMETER, _FUNCTION_END, _JSON_OBJECT)):
        return _Found()
    return _read_function_call(turn, opener.start(), opener.start())


def _read_function_call(turn: _Turn, start: int, body: int) -> _Found:
    """Qwen3-Coder's form of a call; `body` is where its <function=...> stands."""
    text, wrapped = turn.text, body > start

    def unfinished(data_from: int) -> _Found:
        return _Found(data=((data_from, len(text)),), incomplete=not turn.over, unclosed=True)

    position = _end(_FUNCTION.match(text, body))
    if arguments := _JSON_OBJECT.match(text, position):
        object_end = _json_end(text, arguments.end())
        if object_end is None:
            return unfinished(arguments.end())
        position = object_end
    while parameter := _PARAMETER.match(text, position):
        value_end = _parameter_end(text, parameter.end())
        if value_end is None:  # a stop tag is part of the value, or the value is cut, or never closed
            close = text.rfind("</function>", parameter.end(), turn.said) if turn.over else -1
            if close < 0:
                return unfinished(parameter.end())
            position = close
            break
        position = value_end.end()
    close_tag = _FUNCTION_TAGS.search(text, position)
    if close_tag is None:
        return unfinished(position)
    if close_tag.group() == "<function=":  # the model began again
        return _Found(read_to=close_tag.start())
    if close_tag.group() == "</tool_call>":
        return _Found(Block("tool_call", start, body, close_tag.start(), close_tag.end()))
    end = close_tag.end()
    if wrapped:
        if outer := _CALL_END.match(text, end):
            end = outer.end()
        elif not turn.over and end >= turn.said:  # generation stopped within the call, whose closing tag is to come
            return unfinished(body)
    return _Found(Block("tool_call", start, body, close_tag.end(), end))


def _json_end(text: str, start: int) -> int | None:
    """Where the JSON object that begins there ends, None if it does not."""
    depth = 0
    for piece in _JSON_PIECES.finditer(text, start):
        if piece.group() == '"':
            return None
        depth += (piece.group() == "{") - (piece.group() == "}")
        if depth == 0:
            return piece.end()
    return None


def _parameter_end(text: str, start: int) -> re.Match[str] | None:
    """The closing tag of a value: the first that is in no Python string, else the first."""
    first = _PARAMETER_END.search(text, start)
    if first is None:
        return None
    for piece in _PARAMETER_PIECES.finditer(text, start):
        if piece.group() == "</parameter>":
            return piece
        if len(piece.group()) == 3 and piece.group()[0] in "\"'":  # such a string has no end: it is none
            return first
    return first


def _read_code(turn: _Turn, opener: re.Match[str]) -> _Found:
    """A <code> block, closed by the first </code> that is not part of a Python string."""
    text = turn.text

    def block(tag_start: int) -> _Found:
        return _Found(Block("code", opener.start(), opener.end(), tag_start, tag_start + len("</code>")))

    data: list[tuple[int, int]] = []
    in_comment = -1  # the first closing tag that is part of a comment
    end = opener.end()
    fenced = FENCE_IN_CODE.match(text, opener.end())
    pieces = _FENCED_PIECES if fenced else _PYTHON_PIECES
    for piece in pieces.finditer(text, opener.end()):
        token, end = piece.group(), piece.end()
        if token == "</code>":
            if _is_mention(text, opener.start(), opener.end(), piece.start()):
                return _Found()
            return block(piece.start())
        if token == "<code>":  # a mention of the tag before, or the model began again
            return _Found(read_to=piece.start())
        if token[0] == "#" and in_comment < 0 and "</code>" in token:
            in_comment = piece.start() + token.index("</code>")
        if token in ('"' * 3, "'" * 3):
            unfinished = True
        elif token in ('"', "'"):  # such a string ends with its line: it is broken, and none, if the line is over
            unfinished = text.find("\n", piece.end()) < 0
        else:
            if token[0] != "\\":
                data.append(piece.span())
            continue
        if not unfinished:
            continue
        close = text.find("</code>", piece.end())
        if turn.over and close >= 0:
            return block(close)
        return _Found(data=(*data, (piece.start(), len(text))), incomplete=close >= 0, unclosed=True)
    if turn.over and in_comment >= 0:
        return block(in_comment)
    if _stands_in_prose(text, opener):  # then what looks like a comment on a line of its own is a heading
        data = [span for span in data if text[span[0]] != "#" or text[span[0] - 1] != "\n"]
    incomplete = text.endswith("</code>") and in_comment >= 0 and end == len(text)
    return _Found(data=tuple(data), incomplete=incomplete, unclosed=True)


def _is_mention(text: str, start: int, body: int, body_end: int) -> bool:
    """Whether a sentence speaks of both tags of a block: `<code> and </code>`, or the form of a call in the system
    text."""
    if body_end - body > MAX_MENTION_CHARS or not _MENTIONED.fullmatch(text, body, body_end):
        return False
    return "<" in text[body:body_end] or bool(_before_on_line(text, start))


def _stands_in_prose(text: str, opener: re.Match[str]) -> bool:
    """Whether prose stands on both sides of a tag."""
    line_to = text.find("\n", opener.end())
    rest = text[opener.end() : line_to if line_to >= 0 else len(text)]
    return bool(_before_on_line(text, opener.start())) and bool(rest.strip()) and not rest.startswith("```")


def _before_on_line(text: str, position: int) -> str:
    return text[text.rfind("\n", 0, position) + 1 : position].strip()


def _read_fence(turn: _Turn, opener: re.Match[str]) -> _Found:
    text = turn.text
    close, read_to = _fence_end(text, opener.end())
    if close:
        return _Found(Block("fence", opener.start(), opener.end(), close.start(), close.end()), read_to=read_to)
    close = _LOOSE_FENCE_END.search(text, opener.end())
    if close:  # a line that only begins with a fence
        after = _FENCE.search(text, close.end())  # is not closed, as none is after this one
        data = _python_data(text, after.end()) if after else []
        block = Block("fence", opener.start(), opener.end(), close.start(), close.end())
        return _Found(block, tuple(data), unclosed=True)
    return _Found(data=tuple(_python_data(text, opener.end())), unclosed=True)


def _fence_end(text: str, start: int) -> tuple[re.Match[str] | None, int]:
    """The first closing fence that is in no string, else the first, and how far was read for it: a docstring may hold
    a fence of its own."""
    first = _FENCE_END.search(text, start)
    if first is None:
        return None, 0
    for piece in _FENCE_PIECES.finditer(text, start):
        if piece.group().lstrip(" \t").startswith("```"):
            return _FENCE_END.match(text, piece.start()), 0
        if piece.group() in ('"' * 3, "'" * 3):  # such a string has no end: it is none
            return first, 0
    return first, len(text)


def _python_data(text: str, start: int) -> list[tuple[int, int]]:
    """The strings and comments in code that goes on to the end of the text."""
    data: list[tuple[int, int]] = []
    for piece in _PYTHON_PIECES.finditer(text, start):
        token = piece.group()
        if token in ('"' * 3, "'" * 3):
            return [*data, (piece.start(), len(text))]
        if token[0] == "#" or (token[0] in "\"'" and len(token) > 1):
            data.append(piece.span())
    return data


def _read_hallucinated(turn: _Turn, opener: re.Match[str]) -> _Found:
    tag = opener.group().lower().replace("<", "</")
    close = turn.text.find(tag, opener.end())
    if close < 0:
        return _Found(unclosed=True)
    return _Found(Block("hallucinated", opener.start(), opener.end(), close, close + len(tag)))


_READERS: dict[str, Callable[[_Turn, re.Match[str]], _Found]] = {
    "<tool_call>": _read_call,
    "<function=": _read_function,
    "<code>": _read_code,
    "```": _read_fence,
    "<interpreter>": _read_hallucinated,
    "<tool_response>": _read_hallucinated,
}
