r"""Actions: what the model wrote in a turn, read in one pass.

    text of a turn --blocks.scan--> blocks + prose --read_action--> Code | ToolCall | Answer | Invalid | Incomplete

Contract: reading is pure and linear in the text, never raises, never evaluates. What it says is what the loop does,
what the reward scores and what the SFT data is made of: nobody else reads these forms. The golden cases of each form
are in tests/retool/cases/actions.jsonl.

Invariants. An answer inside code, a thought or hallucinated tool output is none, finished or not, and neither is an
echo of the instruction to write one; a call inside a thought is a draft, unless it is a <code> block. No stretch of
text is read more than a few times.
"""

from __future__ import annotations

import bisect
import json
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from retool.blocks import BLANK, FENCE_IN_CODE, Block, Scan, scan, xml_parameters
from retool.chat import CODE_TOOL, TURN_ENDS, shorten, without_turn_end

# ---------------------------------------------------------------------------------------------------------------------
# What a turn can be
# ---------------------------------------------------------------------------------------------------------------------

Dialect = Literal["tool_call", "code"]

STOP_TAGS = ("</tool_call>", "</code>", "</function>")  # where generation stops: nothing after an action is trained on


class Code(NamedTuple):
    """A program to run."""

    source: str
    dialect: Dialect  # the one the model spoke, and is answered in

    @property
    def name(self) -> str:
        """Of the tool that runs it, as of any other call."""
        return CODE_TOOL

    @property
    def arguments(self) -> dict[str, Any]:
        return {"code": self.source}


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


class Box(NamedTuple):
    content: str  # "" where the box is broken: empty, or never closed
    end: int
    labeled: bool  # after "Answer:" or inside <answer>


# ---------------------------------------------------------------------------------------------------------------------
# Reading a turn
# ---------------------------------------------------------------------------------------------------------------------


def read_action(
    text: str, over: bool | None = None, tools: Collection[str] = (CODE_TOOL,), in_thought: bool = False
) -> Reading:
    """The answer of a turn, else its first tool call or <code> block, else its first Python fence.

    Args:
        text: what the model has said in this turn.
        over: whether no text follows in this turn; by default it is over if it ends with a chat token.
        tools: the names of the tools that may be called; a mapping to their specs gives the types of XML arguments.
        in_thought: whether a thought was opened before the text, by the prompt or earlier in the turn.
    """
    over = is_over(text) if over is None else over
    found = scan(text, over, in_thought)
    hallucinated = sum(block.kind == "hallucinated" for block in found.blocks)
    return Reading(_action(text, found, over, tools), hallucinated)


def _action(text: str, found: Scan, over: bool, tools: Collection[str]) -> Action:
    answer = read_answer(found, over)
    if answer and answer.content:
        return Answer(answer.content)
    calls = [block for block in _calls(found) if block.kind != "fence"]
    if found.incomplete and not calls:
        return Incomplete()
    calls = calls or _calls(found)
    if not calls:  # generation stops at a stop tag, which here closes nothing: it stands in a string, or in prose
        return Incomplete() if text.endswith(STOP_TAGS) and not over else Invalid(_no_action(text, found))
    first = calls[0]
    body = text[first.body : first.body_end]
    if first.kind == "tool_call":
        return _read_call_body(body, tools)
    program = source(body)
    return Code(program, "code") if program else Invalid("the code block is empty", "code")


def _calls(found: Scan) -> list[Block]:
    """What may be run. In a thought that is <code> alone: models that think in the other forms draft calls there."""
    return [
        block
        for block in found.blocks
        if block.kind == "code" or (block.kind != "hallucinated" and not block.in_thought)
    ]


def read_whole_turn(text: str, tools: Collection[str] = (CODE_TOOL,)) -> Reading:
    """A turn after which nothing more comes, whatever stands unfinished in it."""
    reading = read_action(text, tools=tools)
    return read_action(text, over=True, tools=tools) if isinstance(reading.action, Incomplete) else reading


def complete_actions_end(text: str) -> int:
    """The index after the last complete action of a turn, an answer's box included; the text's length without one."""
    over = is_over(text)
    found = scan(text, over)
    answer = read_answer(found, over)
    ends = [block.end for block in _calls(found)] + ([answer.end] if answer and answer.content else [])
    return max(ends, default=len(text))


def is_over(text: str) -> bool:
    return text.rstrip().endswith(TURN_ENDS)


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------

_ANSWER_MARKS = re.compile(
    r"(?P<label>\banswer\b[*_ \t]*[:：])|(?P<tag><answer>)|(?P<tag_end></answer>)|(?P<line>\n)"
    r"|(?P<box>\\(?:boxed|fbox)(?![A-Za-z]))",
    re.I,
)
_BOX_OPENS = re.compile(r"\s*\{")
_BARE_BOX = re.compile(r"[ \t]*([+-]?[0-9]+(?:\.[0-9]+)?|[A-Z](?![A-Za-z]))")  # \boxed 2
_BRACES = re.compile(r"\\.|[{}]", re.S)
_DECORATION = " \t\r*_$\\[](){}`#>"  # what may stand between "Answer:" and a box on a later line
_CLOSERS = " \t\r\n.,;:!*_$)]}\\\"'`。．，、；：！）」』】”’"  # what may follow a box on the last line
_PLACEHOLDER = re.compile(
    r"(?:\\(?:text|mathrm)\{)?[\s$<\[{(]*(?:\.\.|…|\\[lc]?dots|\\square|[?\s]"
    r"|(?:(?:the|your|final|my|numeric(?:al)?|correct) )*(?:answer|value|result|number|integer|solution)(?: here)?)"
    r"[\s$>\]}).…?]*",
    re.I,
)
# What an answer is made of, as against the name that an instruction has for it.
_VALUE = re.compile(r"(?<![0-9_])(?<!_\{)[0-9]|\\(?:pi|infty|emptyset|varnothing)(?![A-Za-z])|[π∞∅]")
_WORD_OF_ANSWER = re.compile(r"(?:\\text\{)?\(?(?:[A-E]|yes|no|true|false|none|even|odd|no solutions?)\)?\}?", re.I)
_MAX_PLACEHOLDER_CHARS = 60
_UNDERSCORES = re.compile(r"\\?_")
_BLANKS = re.compile(f"{BLANK}+")


def read_answer(found: Scan, over: bool) -> Box | None:
    """What became of the last box of a turn: the answer, or, with no content, none. None where there is no box.

    A box that is labeled is an answer in any turn; another one in a turn that ended by itself, without a call, or with
    nothing but punctuation behind the box. The box before a broken one, or before one that is no answer yet, is what
    the model has turned away from. Before a call, a label may introduce the form of the answer: there the box must
    hold what could be one.
    """
    boxes = find_boxes(found.words)
    if not boxes:
        return None
    last, calls = boxes[-1], _calls(found)
    if last.labeled:
        goes_on = found.incomplete or (not over and found.words.endswith(STOP_TAGS))
        goes_on = goes_on or any(call.start >= last.end for call in calls)
        is_answer = not goes_on or could_be_answer(last.content)
    else:
        is_answer = over and (not calls or not without_turn_end(found.words[last.end :]).strip(_CLOSERS))
    return last if is_answer else last._replace(content="")


def _content_of(words: str, command_end: int, closing: dict[int, int]) -> tuple[str | None, int]:
    """What the box of a command holds, and where it ends: "" where it is broken, None where it is a mention."""
    if opener := _BOX_OPENS.match(words, command_end):
        close = closing.get(opener.end() - 1)
        return ("", command_end) if close is None else (words[opener.end() : close].strip(), close + 1)
    if bare := _BARE_BOX.match(words, command_end):
        return bare[1], bare.end()
    return (None if words[command_end:].strip() else ""), command_end


def _is_placeholder(content: str) -> bool:
    short = len(content) <= _MAX_PLACEHOLDER_CHARS
    return short and _PLACEHOLDER.fullmatch(_UNDERSCORES.sub(" ", content)) is not None


def could_be_answer(content: str) -> bool:
    """Whether a box holds a value, and not "value", "n" or "m+n"."""
    return bool(_VALUE.search(content) or _WORD_OF_ANSWER.fullmatch(content))


def last_box(words: str) -> str:
    """What the last box of a text holds; "" without one, or where it is broken."""
    return next((box.content for box in reversed(find_boxes(words))), "")


def find_boxes(words: str) -> list[Box]:
    """Every box, in order, broken ones too; not the dots of the instruction, and not a mention of the command."""
    if "\\boxed" not in words and "\\fbox" not in words:  # most turns call a tool
        return []
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(words):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()

    blanks = [run.start() for run in _BLANKS.finditer(words)]
    boxes: list[Box] = []
    label: str | None = None  # "label": until the end of its line; "tag": until </answer>
    line_from = box_end = 0
    for mark in _ANSWER_MARKS.finditer(words):
        if mark.start() < box_end:  # inside the box before
            continue
        if mark.lastgroup == "box":
            content, end = _content_of(words, mark.end(), closing)
            blank = bisect.bisect_left(blanks, mark.end())
            if blank < len(blanks) and blanks[blank] < end:
                content, end = "", mark.end()
            box_end = end if content else mark.end()
            if content is not None and not _is_placeholder(content):
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


# ---------------------------------------------------------------------------------------------------------------------
# Calls and code
# ---------------------------------------------------------------------------------------------------------------------

_JSON = json.JSONDecoder(strict=False)
_JSON_ESCAPES = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def _read_call_body(body: str, tools: Collection[str]) -> Action:
    def invalid(problem: str) -> Invalid:
        return Invalid(problem, "tool_call")

    if body.startswith("<function="):
        call: Any = _xml_call(body, tools)
        if call is None:
            return invalid("the tool call is not complete: a </parameter> or its </function> is missing")
    elif body.startswith("```"):
        call = {"name": CODE_TOOL, "arguments": {"code": body}}
    else:
        try:
            call = _load_json(body)
        except (ValueError, RecursionError) as error:
            return invalid(f"the tool call is not valid JSON ({error})")
    if not isinstance(call, dict):
        return invalid('the tool call is not a JSON object {"name": ..., "arguments": {...}}')
    call = call["function"] if isinstance(call.get("function"), dict) else call  # as OpenAI's API has it
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or name not in tools:
        known = ", ".join(tools)
        shown = "of no name" if isinstance(name, dict | list) else repr(shorten(str(name), 100))
        return invalid(f"there is no tool {shown}; the tools are: {known}")
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
    opening = FENCE_IN_CODE.match(body)
    inside = body[opening.end() :].rstrip() if opening else ""
    if not inside.endswith("```"):
        return body
    return inside.removesuffix("```").rstrip(" \t").removesuffix("\n")


def _xml_call(body: str, tools: Collection[str]) -> dict[str, Any] | None:
    """{"name", "arguments"} of a call in Qwen3-Coder's form, or with a JSON object for its parameters; None where it
    is not well-formed."""
    opening, tag, rest = body.removesuffix("</function>").partition(">")
    if tag and rest.lstrip().startswith("{"):
        return {"name": opening.removeprefix("<function="), "arguments": rest}
    found = xml_parameters(body)
    if found is None:
        return None
    name, parameters = found
    types = _parameter_types(tools, name)
    arguments = {
        key: value if types.get(key, "string") == "string" else _json_or_text(value)
        for key, value in parameters.items()
    }
    return {"name": name, "arguments": arguments}


def _parameter_types(tools: Collection[str], name: str) -> dict[str, Any]:
    """The declared types of a tool's parameters, {} where its spec does not say them."""
    spec: Any = tools.get(name) if isinstance(tools, Mapping) else None
    for key in ("function", "parameters", "properties"):
        spec = spec.get(key) if isinstance(spec, dict) else None
    return {key: one.get("type") for key, one in (spec or {}).items() if isinstance(one, dict)}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _load_json(text: str) -> Any:
    """JSON, perhaps before the end of a fence or a list; its strings may hold raw control characters, and escapes that
    JSON does not know, kept as written. One closing brace may be missing at the end, or be too many."""
    text = text.strip().removesuffix("```")
    known = _JSON_ESCAPES.sub(lambda found: found.group() if len(found.group()) > 1 else r"\\", text)
    try:
        value, end = _JSON.raw_decode(known)
    except json.JSONDecodeError as error:
        if error.pos < len(known.rstrip()):
            raise
        known += "}"
        value, end = _JSON.raw_decode(known)
    if known[end:].strip(" \t\r\n]") not in ("", "}"):
        raise json.JSONDecodeError("Extra data", known, end)
    return value


def _no_action(text: str, found: Scan) -> str:
    if any(block.in_thought for block in found.blocks):
        return "the call stands inside a thought, where none is run: write </think> before it"
    if "<tool_call>" in text:
        return "the tool call is not complete: its JSON object or its </tool_call> is missing"
    if "<function=" in text:
        return "the tool call is not complete: a </parameter> or its </function> is missing"
    if "<code>" in text:
        return "the code block is not closed with </code>"
    return "it holds neither a tool call nor a final answer"
