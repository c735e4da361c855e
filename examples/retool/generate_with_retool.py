r"""Multi-turn rollouts with a Python tool for vime: the turn loop and the reward.

    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func --reward-key score

Data flows one way; each arrow is one function:

    sample.prompt --render--> ids --engine--> turn --read_action--> action --tool--> observation --+
                               ^                                                                 |
                               +------------------- _record, the one writer of tokens <----------+

Contract (vime's rollout, DAPO's reward): `generate` is awaited once per sample under vime's own semaphore, fills the
sample and returns it; `reward_func` scores it by the last box in the model's own words.

Invariants, on every way out, a cancellation at any await included:
- Token in, token out. The ids of a request begin with the ids of the request before it and its output; what the model
  sampled is never tokenized again, only observations are encoded.
- len(loss_mask) == len(rollout_log_probs) == response_length and tokens == prompt ids + response ids. The mask is 1 on
  sampled tokens, 0 on observations.
- A mistake of the model becomes an observation. A failure of the machinery (EngineError, SandboxError) makes the sample
  ABORTED and is never trained on; many of them stop the run.

The sections below: vime, the prompt, actions, the wire, observations, the episode, the reward.
"""

from __future__ import annotations

import base64
import collections
import io
import itertools
import json
import logging
import math
import re
import textwrap
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tool_sandbox import CODE_TOOL, SYSTEM_PROMPT, TOOL_CONFIGS, SandboxError, neutralize, shorten, tool_registry

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# vime: the only place that knows it. Everything imported here is looked up as a module attribute when it is called.
# ---------------------------------------------------------------------------------------------------------------------

try:
    from vime.rollout import vllm_rollout
    from vime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer
    from vime.rollout.vllm_rollout import GenerateState
    from vime.utils.http_utils import post
    from vime.utils.types import Sample
except ImportError as error:
    raise ImportError(
        f"the retool plugin runs inside vime, and importing vime failed ({error}). Put a vime checkout on the path: "
        'export PYTHONPATH="$VIME_ROOT:$VIME_ROOT/examples/retool:$PYTHONPATH" with VIME_ROOT naming the checkout. '
        "Without vime, examples/retool/rollout_on_cpu.sh shows real rollouts."
    ) from error

try:
    from vime.observability.trace_utils import trace_span  # vime from September 2026 on
except ImportError:
    try:
        from vime.utils.trace_utils import trace_span
    except ImportError:

        def trace_span(sample, name, attrs=None):
            return nullcontext()


def _engine_sampling_params(params: dict[str, Any]) -> dict[str, Any]:
    """vime's sampling parameters as the engine's.

    vime's own mapping is used where this vime has it under its private name: it knows what this vime's engine can do.
    """
    vime_mapping = getattr(vllm_rollout, "_build_inference_sampling_params", None)
    if vime_mapping is not None:
        body = dict(vime_mapping(params))
    else:
        renamed = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        passed = ("temperature", "top_p", "top_k", "stop_token_ids", "seed", "repetition_penalty", *renamed)
        body = {renamed.get(name, name): params[name] for name in passed if params.get(name) is not None}
        if body.get("top_k") == 0:  # vime's "no limit" is -1 or 0, the engine's only -1
            del body["top_k"]
    # Stop strings match the text that the engine decodes: with special tokens skipped a tag that a tokenizer marks as
    # special would never be seen. The log-probs are the rollout's; without them nothing can be trained on.
    return body | {
        "stop": params["stop"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 1,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The prompt: byte for byte what Qwen3's chat template renders, without needing a tokenizer that carries one.
# ---------------------------------------------------------------------------------------------------------------------

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
_OPEN_TURN = f"{IM_START}assistant\n"
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def split_prompt(prompt: str | list[dict[str, Any]]) -> tuple[str | None, str | list[dict[str, Any]]]:
    """(system text or None, the rest): a string where the rest is one user message, else the remaining messages."""
    if isinstance(prompt, str):
        return None, prompt
    messages = list(prompt)
    system = _content(messages.pop(0)) if messages and messages[0].get("role") == "system" else None
    if not messages:
        return system, ""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return system, _content(messages[0])
    return system, messages


def format_conversation_with_tools(
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    system_prompt: str | None = None,
    messages: list[dict[str, Any]] | None = None,
) -> str:
    """The conversation as Qwen3's template renders it, up to and with the open assistant turn.

    The system text (SYSTEM_PROMPT if None), the tools if any, `prompt` as a user turn if it is not empty, then
    `messages` as later turns. ValueError names a role or a content that cannot be rendered.
    """
    system = SYSTEM_PROMPT if system_prompt is None else system_prompt
    if tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = f"{system}\n\n{_TOOLS_HEAD}{lines}{_TOOLS_TAIL}"
    turns = [{"role": "user", "content": prompt}] if prompt else []
    return f"{IM_START}system\n{system}{IM_END}\n" + _render_turns(turns + list(messages or [])) + _OPEN_TURN


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("retool handles text only, and a message of the prompt holds something else than text")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a message must be text, not {type(content).__name__}")
    return content or ""


def _render_turns(messages: list[dict[str, Any]]) -> str:
    last_query = _last_query(messages)
    parts = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ("user", "system"):
            parts.append(f"{IM_START}{role}\n{_content(message)}{IM_END}\n")
        elif role == "assistant":
            text = _assistant_text(message, after_query=index > last_query)
            parts.append(f"{IM_START}assistant\n{text}{IM_END}\n")
        elif role == "tool":  # tool messages in a row share one user turn
            first = index == 0 or messages[index - 1].get("role") != "tool"
            last = index + 1 == len(messages) or messages[index + 1].get("role") != "tool"
            response = f"\n<tool_response>\n{_content(message)}\n</tool_response>"
            parts.append((f"{IM_START}user" if first else "") + response + (f"{IM_END}\n" if last else ""))
        else:
            raise ValueError(f"a message of the prompt has the role {role!r}; known are system, user, assistant, tool")
    return "".join(parts)


def _last_query(messages: list[dict[str, Any]]) -> int:
    """Index of the last user turn that is not a tool's answer: the template drops reasoning before it."""
    for index in range(len(messages) - 1, -1, -1):
        content = _content(messages[index])
        is_response = content.startswith("<tool_response>") and content.endswith("</tool_response>")
        if messages[index].get("role") == "user" and not is_response:
            return index
    return len(messages) - 1


def _assistant_text(message: dict[str, Any], after_query: bool) -> str:
    content, reasoning = _content(message), message.get("reasoning_content")
    if reasoning is None and "</think>" in content:
        reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    if after_query and reasoning:
        reasoning = reasoning.strip("\n")
        text = f"<think>\n{reasoning}\n</think>\n\n" + content.lstrip("\n")
    else:
        text = content
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or call
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        text += "\n" if content or index else ""
        text += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


def _prompt_text(prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The text that the first turn continues. ValueError for a templated prompt that lacks a tool."""
    if isinstance(prompt, str) and prompt.lstrip().startswith(IM_START):
        listed = "".join(re.findall(r"<tools>\n(.*?)\n</tools>", prompt, re.S))
        for name in (tool["function"]["name"] for tool in tools):
            if not re.search(rf'"name"\s*:\s*{re.escape(json.dumps(name))}', listed):
                raise ValueError(
                    f"the prompt was put through a chat template that does not list the tool {name!r}, so the model "
                    "cannot know of it. Start vime without --apply-chat-template: retool renders the conversation "
                    "with its tools itself."
                )
        return prompt
    system, rest = split_prompt(prompt)
    if isinstance(rest, str):
        return format_conversation_with_tools(rest, tools, system)
    return format_conversation_with_tools("", tools, system, messages=rest)


# ---------------------------------------------------------------------------------------------------------------------
# Actions: what the model wrote, read in one pass. Linear in the text, never raising, never evaluating.
# ---------------------------------------------------------------------------------------------------------------------

_ENDS = (IM_END, "<|endoftext|>")


class Action(NamedTuple):
    """One reading of a turn: "code", "tool", "answer", or None where `problem` says what was wrong."""

    kind: str | None
    content: Any = ""  # the source, {"name", "arguments"}, or what the box holds
    dialect: str | None = None  # "tool_call" or "code": the one the model spoke, and is answered in
    problem: str = ""
    waits: bool = False  # its closing tag stands in a string that is not finished yet: more text decides
    made_up: int = 0  # interpreter outputs that the model wrote itself


class _Block(NamedTuple):
    kind: str  # "tool_call", "code", "fence" or "made_up"
    start: int
    body: int
    body_end: int
    end: int


class _Reading(NamedTuple):
    """What stands behind an opening tag: a block, or, where it is not closed, the strings in it."""

    block: _Block | None = None
    strings: tuple[tuple[int, int], ...] = ()
    waits: bool = False
    unclosed: bool = False  # no tag of its kind that comes later is closed either


class _Scan(NamedTuple):
    blocks: list[_Block]
    words: str  # the text with calls, code, made-up outputs and closed thoughts blanked out, as long as the text
    waits: bool


class _Box(NamedTuple):
    content: str
    end: int
    labelled: bool  # behind "Answer:" or inside <answer>


_OPENERS = re.compile(
    r"<tool_call>|<code>|<interpreter>|<tool_response>|</?think>|^[ \t]*```(?:python3?|py)[ \t\r]*$", re.M | re.I
)
_CALL_TAGS = re.compile(r"</?tool_call>")
_CALL_LOOKS_CLOSED = re.compile(r"\}\s*</tool_call>")
_JSON_PIECES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}]|</?tool_call>', re.S)
# A quote behind a word opens no string ("don't") unless the word is a string prefix.
_QUOTE_OPENS = r"(?:(?<!\w)|(?<=\b[rRbBfFuU])|(?<=\b[rRbBfF]{2}))"
_PYTHON_PIECES = re.compile(
    rf'{_QUOTE_OPENS}(?:"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r"""|"{3}|'{3}"""
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r"""|["'])|\\.|#(?:(?!</?code>)[^\n])*|</?code>""",
    re.S,
)
_FENCE_END = re.compile(r"^[ \t]*```(?!\w)|```[ \t\r]*$", re.M)
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


def read_action(text: str, over: bool | None = None) -> Action:
    """The last answer of a turn, else its first tool call or <code> block, else its first Python fence.

    `over` says that no text follows in this turn; by default it is over if it ends with a chat token.
    """
    over = text.rstrip().endswith(_ENDS) if over is None else over
    scan = _scan(text, over)
    made_up = sum(block.kind == "made_up" for block in scan.blocks)
    answer = _last_answer(scan.words, over)
    if answer:
        return Action("answer", answer.content, made_up=made_up)
    tagged = [block for block in scan.blocks if block.kind in ("tool_call", "code")]
    if scan.waits and not tagged:
        return Action(None, waits=True, made_up=made_up)
    calls = tagged + [block for block in scan.blocks if block.kind == "fence"]
    if not calls:
        return Action(None, problem=_no_action(text), made_up=made_up)
    return _read_block(text, calls[0])._replace(made_up=made_up)


# The next three are the names under which other code, written for earlier versions of this example, reads a turn.


def postprocess_predictions(text: str) -> tuple[str | None, Any]:
    """("code", source), ("answer", what the box holds), ("tool", {"name", "arguments"}), or (None, "")."""
    action = read_action(text)
    return action.kind, action.content


def postprocess_responses(text: str) -> str:
    """The text up to the end of its last complete action; the whole text if it has none."""
    over = text.rstrip().endswith(_ENDS)
    scan = _scan(text, over)
    answer = _last_answer(scan.words, over)
    ends = [block.end for block in scan.blocks if block.kind != "made_up"] + ([answer.end] if answer else [])
    return text[: max(ends)] if ends else text


async def execute_predictions(text: str) -> tuple[str, bool]:
    """(observation in its frame, done) for a whole turn; ("", True) for an answer. SandboxError as execute_tool."""
    action = read_action(text)
    if action.waits:
        action = read_action(text, over=True)
    if action.kind == "answer":
        return "", True
    before, after = _frame(action.dialect, text)
    return before + neutralize(await _observe(action)) + after, False


def _scan(text: str, over: bool) -> _Scan:
    """One pass. A reader moves the scan behind its block, or hides the strings of what it found unclosed, in which no
    tag is looked at again: so no stretch of text is read more than a few times."""
    blocks: list[_Block] = []
    hidden = bytearray(len(text))
    unclosed: set[str] = set()
    waits = False
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
            waits = waits or reading.waits
            if reading.unclosed:
                unclosed.add(tag)
    words = "".join(
        text[run.start() : run.end()] if run.group()[0] == 0 else _BLANK * len(run.group())
        for run in re.finditer(rb"\x00+|\x01+", hidden)
    )
    return _Scan(blocks, words, waits)


def _hide(hidden: bytearray, start: int, end: int) -> None:
    hidden[start:end] = b"\x01" * (end - start)


def _read_call(text: str, opener: re.Match, over: bool) -> _Reading:
    """A <tool_call>: its object may hold the closing tag in a string, and raw newlines."""
    start, body = opener.start(), opener.end()
    while body < len(text) and text[body].isspace():
        body += 1
    if not text.startswith("{", body):
        tag = _CALL_TAGS.search(text, body)
        if tag is None or tag.group() == "<tool_call>":  # a mention of the tag
            return _Reading()
        return _Reading(_Block("tool_call", start, body, tag.start(), tag.end()))

    strings: list[tuple[int, int]] = []
    depth, whole = 0, False
    for piece in _JSON_PIECES.finditer(text, body):
        token = piece.group()
        if token == "<tool_call>":  # the model began again
            return _Reading()
        if token == "</tool_call>":
            return _Reading(_Block("tool_call", start, body, piece.start(), piece.end()))
        if token == '"':
            return _read_call_in_string(text, (start, body), piece.start(), tuple(strings), over)
        if token[0] == '"':
            strings.append(piece.span())
            continue
        depth += 1 if token == "{" else -1
        if depth == 0 and not whole:
            whole = True
            if over and text[piece.end() :].strip() in ("", *_ENDS):  # whole, and nothing more will come
                return _Reading(_Block("tool_call", start, body, piece.end(), piece.end()))
    return _Reading(strings=tuple(strings), unclosed=True)


def _read_call_in_string(text, opening, quote, strings, over) -> _Reading:
    """A closing tag behind the last, unpaired quote: part of a string that goes on, or the end of broken JSON."""
    close = _CALL_LOOKS_CLOSED.search(text, quote)
    if close is None and over:
        close = re.compile("</tool_call>").search(text, quote)
    if close:
        close_at = close.end() - len("</tool_call>")
        return _Reading(_Block("tool_call", *opening, close_at, close.end()))
    waits = "</tool_call>" in text[quote:]
    return _Reading(strings=(*strings, (quote, len(text))), waits=waits, unclosed=True)


def _read_code(text: str, opener: re.Match, over: bool) -> _Reading:
    """A <code> block, closed by the first </code> that is not part of a Python string."""

    def block(tag_start: int) -> _Reading:
        return _Reading(_Block("code", opener.start(), opener.end(), tag_start, tag_start + len("</code>")))

    strings: list[tuple[int, int]] = []
    for piece in _PYTHON_PIECES.finditer(text, opener.end()):
        token = piece.group()
        if token == "</code>":
            return block(piece.start())
        if token == "<code>":  # a mention of the tag before, or the model began again
            return _Reading()
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
        return _Reading(strings=(*strings, (piece.start(), len(text))), waits=close >= 0, unclosed=True)
    return _Reading(strings=tuple(strings), unclosed=True)


def _read_fence(text: str, opener: re.Match, over: bool) -> _Reading:
    close = _FENCE_END.search(text, opener.end())
    if close:
        return _Reading(_Block("fence", opener.start(), opener.end(), close.start(), close.end()))
    pieces = _PYTHON_PIECES.finditer(text, opener.end())
    strings = tuple(piece.span() for piece in pieces if piece.group()[0] in "\"'" and len(piece.group()) > 1)
    return _Reading(strings=strings, unclosed=True)


def _read_made_up(text: str, opener: re.Match, over: bool) -> _Reading:
    tag = opener.group().lower().replace("<", "</")
    close = text.find(tag, opener.end())
    if close < 0:
        return _Reading(unclosed=True)
    return _Reading(_Block("made_up", opener.start(), opener.end(), close, close + len(tag)))


_READERS = {
    "<tool_call>": _read_call,
    "<code>": _read_code,
    "```": _read_fence,
    "<interpreter>": _read_made_up,
    "<tool_response>": _read_made_up,
}


def _last_answer(words: str, over: bool) -> _Box | None:
    """The last labelled box, or one that nothing but punctuation follows in a turn that ended."""
    boxes = _boxes(words)
    if over and boxes:
        tail = words[boxes[-1].end :].rstrip()
        for chat_token in _ENDS:
            tail = tail.removesuffix(chat_token).rstrip()
        if not tail.strip(_CLOSERS):
            return boxes[-1]
    return next((box for box in reversed(boxes) if box.labelled), None)


def _boxes(words: str) -> list[_Box]:
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

    boxes: list[_Box] = []
    label: str | None = None  # "label": until the end of its line; "tag": until </answer>
    line_from = behind = 0
    for mark in _ANSWER_MARKS.finditer(words):
        if mark.start() < behind:  # inside the box before
            continue
        if mark.lastgroup == "box":
            close = closing.get(mark.end() - 1)
            content = words[mark.end() : close].strip() if close else ""
            if content and _BLANK not in content:
                boxes.append(_Box(content, close + 1, labelled=label is not None))
                behind = close + 1
        elif mark.lastgroup == "line":
            said_nothing = not words[line_from : mark.start()].strip(_DECORATION)
            if label == "label" and not said_nothing:
                label = None
            line_from = mark.end()
        elif mark.lastgroup == "tag_end":
            if label == "tag" and boxes and boxes[-1].labelled:
                boxes[-1] = boxes[-1]._replace(end=mark.end())
            label = None
        else:
            label, line_from = mark.lastgroup, mark.end()
    return boxes


def _read_block(text: str, block: _Block) -> Action:
    body = text[block.body : block.body_end]
    if block.kind == "tool_call":
        return _read_call_body(body)
    source = _source(body)
    if not source:
        return Action(None, dialect="code", problem="the code block is empty")
    return Action("code", source, dialect="code")


def _read_call_body(body: str) -> Action:
    def invalid(problem: str) -> Action:
        return Action(None, dialect="tool_call", problem=problem)

    try:
        call = _load_json(body)
    except (ValueError, RecursionError) as error:
        return invalid(f"the tool call is not valid JSON ({error})")
    if not isinstance(call, dict):
        return invalid('the tool call is not a JSON object {"name": ..., "arguments": {...}}')
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or name not in tool_registry.tools:
        known = ", ".join(tool_registry.tools)
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
        return Action("tool", {"name": name, "arguments": arguments}, dialect="tool_call")
    code = arguments.get("code")
    if not isinstance(code, str):
        return invalid('the tool call has no "code": its arguments must be {"code": "..."} with Python as a string')
    source = _source(code)
    return Action("code", source, dialect="tool_call") if source else invalid('the "code" of the tool call is empty')


def _source(code: str) -> str:
    """The program in a block: without a fence around it, without blank lines at its ends, at its own indentation."""
    fenced = _FENCED.fullmatch(code)
    code = (fenced.group(1) if fenced else code).strip("\r\n").rstrip()
    return textwrap.dedent(code) if code[:1] in (" ", "\t") else code


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


# ---------------------------------------------------------------------------------------------------------------------
# The wire: vLLM's POST /inference/v1/generate.
# ---------------------------------------------------------------------------------------------------------------------


class EngineError(RuntimeError):
    """The engine failed or answered nonsense: the episode is lost, the run goes on."""


class EngineRefused(RuntimeError):
    """The engine refuses requests of this form: the set-up is wrong and the run must stop."""


class TooManyFailures(RuntimeError):
    """So many episodes were lost to failures of the machinery that going on would waste the run."""


class _Completion(NamedTuple):
    token_ids: list[int]
    log_probs: list[float]
    meta: dict[str, Any]  # what Sample.append_response_tokens takes as meta_info


_REFUSALS = {
    400: "The prompt may be longer than the engine takes: start it with --max-model-len (vime: --vllm-max-model-len) "
    "of at least the rollout's context limit, {limit} tokens here.",
    403: "vLLM from 0.3x on serves this endpoint only if it is started with --enable-scale-out (vime: "
    "--vllm-enable-scale-out).",
    404: "Either the engine serves another model than {model!r} (start it with this --served-model-name), or it is "
    "too old for /inference/v1/generate.",
}
_engine_answered = threading.Event()


async def _request(args, payload: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
    """One request. vime's `post` repeats every error for a minute, a refusal too: so the first try is a single one.

    EngineRefused for a refusal before the engine ever answered this process, EngineError for any other failure.
    """
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    try:
        try:
            output = await post(url, payload, max_retries=1, headers=headers)
        except Exception as error:
            if _http_status(error) in _REFUSALS:
                raise
            output = await post(url, payload, headers=headers)
    except Exception as error:
        message = f"{url} failed: {error}"
        refusal = _REFUSALS.get(_http_status(error))
        if refusal:
            limit = len(payload["token_ids"]) + payload["sampling_params"]["max_tokens"]
            said = getattr(getattr(error, "response", None), "text", "")
            message += f" {said} " + refusal.format(model=payload["model"], limit=limit)
            if not _engine_answered.is_set():
                raise EngineRefused(message) from error
        raise EngineError(message) from error
    _engine_answered.set()
    return output


def _http_status(error: BaseException | None) -> int | None:
    """The status behind an error, also where Ray wrapped it."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status
        error = error.__cause__
    return None


async def _complete(args, sample: Sample, params: dict[str, Any]) -> _Completion:
    """Continue the sample's ids. EngineError where the answer cannot be used, an abort is an ordinary answer."""
    headers = None
    session_id = getattr(sample, "session_id", None)
    if session_id and getattr(args, "router_policy", None) == "consistent_hash":
        headers = {"x-session-id": session_id}  # all turns meet their KV cache on one engine
    payload = {
        "model": args.hf_checkpoint,
        "token_ids": list(sample.tokens),
        "sampling_params": _engine_sampling_params(params),
    }
    output = await _request(args, payload, headers)
    try:
        token_ids, log_probs, meta = _parse_vllm_choice(output["choices"][0])
        meta |= _usage(output)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engine's answer cannot be read: {error!r}") from error
    if meta["finish_reason"]["type"] != "abort" and len(log_probs) != len(token_ids):
        raise EngineError("the engine's answer has no usable log-prob for every token")
    return _Completion(token_ids, log_probs, meta)


def _parse_vllm_choice(choice: dict[str, Any]) -> tuple[list[int], list[float], dict[str, Any]]:
    """(token ids, log-probs, meta). log_probs is [] where one is missing, null, NaN or infinite: zeros invented here
    would bend the importance ratio. meta holds finish_reason {"type": "stop" | "length" | "abort"} and what else the
    choice itself carries, under the keys that vime's Sample reads."""
    token_ids = [int(token) for token in choice.get("token_ids") or []]
    content = (choice.get("logprobs") or {}).get("content") or []
    log_probs = [item.get("logprob") if isinstance(item, dict) else None for item in content]
    if len(log_probs) != len(token_ids) or not all(_is_finite(value) for value in log_probs):
        log_probs = []

    finish = choice.get("finish_reason")
    finish = finish.get("type") if isinstance(finish, dict) else finish
    if finish in ("abort", "cancelled", "error"):
        finish = "abort"
    meta: dict[str, Any] = {"finish_reason": {"type": finish if finish in ("length", "abort") else "stop"}}
    if choice.get("weight_versions"):
        meta["weight_version"] = str(choice["weight_versions"][-1]["version"])
    if choice.get("routed_experts") is not None:
        import numpy

        raw = base64.b64decode(choice["routed_experts"], validate=True)
        meta["routed_experts"] = numpy.load(io.BytesIO(raw), allow_pickle=False)
    if choice.get("sampling_mask") is not None:
        kept = choice["sampling_mask"]
        meta["top_p_token_ids"] = list(itertools.chain.from_iterable(kept))
        meta["top_p_token_offsets"] = list(itertools.accumulate(map(len, kept), initial=0))
    return token_ids, [float(value) for value in log_probs], meta


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _usage(output: dict[str, Any]) -> dict[str, Any]:
    """What the answer says beside its choice, under the keys that vime's Sample reads; only what it says."""
    usage = output.get("usage") or {}
    speculation = (output.get("metrics") or {}).get("speculative_decoding") or {}
    found = {
        "weight_version": output.get("weight_version"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "spec_accept_token_num": speculation.get("num_accepted_draft_tokens"),
        "spec_draft_token_num": speculation.get("num_draft_tokens"),
        "spec_verify_ct": speculation.get("num_spec_steps"),
    }
    return {name: value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------------------
# Observations: text from tools is data.
# ---------------------------------------------------------------------------------------------------------------------


def _frame(dialect: str | None, turn: str) -> tuple[str, str]:
    """What stands before and behind an observation that follows `turn`, in the turn's dialect."""
    ended = turn.endswith(IM_END)
    user = f"{'' if ended else IM_END}\n{IM_START}user\n"
    back = f"{IM_END}\n{_OPEN_TURN}"
    if dialect == "tool_call":
        return f"{user}<tool_response>\n", f"\n</tool_response>{back}"
    if dialect == "code":
        return (f"{user}<interpreter>\n", f"\n</interpreter>{back}") if ended else _INLINE
    return user, back


_INLINE = ("\n\n<interpreter>\n", "\n</interpreter>\n\n")


async def _observe(action: Action) -> str:
    """What the tool, or the loop itself, answers to an action. SandboxError where the machinery failed."""
    if action.kind == "code":
        return await tool_registry.execute_tool(CODE_TOOL, {"code": action.content})
    if action.kind == "tool":
        return await tool_registry.execute_tool(action.content["name"], action.content["arguments"])
    return (
        f"Your previous action is invalid: {action.problem}. To run Python, call {CODE_TOOL} with the code; "
        "to answer, write `Answer: \\boxed{...}`."
    )


def _encode_observation(tokenizer, frame: tuple[str, str], body: str, room: int) -> tuple[str, list[int]]:
    """The framed observation in at most `room` ids, its body cut to fit. The bare frame must fit."""
    before, after = frame
    kept = len(body)
    while True:
        text = before + (shorten(body, kept) if kept else "") + after
        ids = _encode(tokenizer, text)
        if len(ids) <= room or kept == 0:
            return text, ids
        kept = kept * room // (len(ids) + 1) if kept > _SHORTEST else 0


def _encode(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# ---------------------------------------------------------------------------------------------------------------------
# The episode.
# ---------------------------------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """In tokens. `context` bounds prompt + response (None: no bound), `response` everything behind the prompt."""

    context: int | None
    response: int

    def room(self, sample: Sample) -> int:
        return min(self._in_context(sample), self.response - sample.response_length)

    def binding(self, sample: Sample) -> str:
        """The limit that is met first, as an end reason."""
        return "context" if self._in_context(sample) < self.response - sample.response_length else "length"

    def _in_context(self, sample: Sample) -> float:
        return math.inf if self.context is None else self.context - len(sample.tokens)


class CallRecord(NamedTuple):
    """One call of a tool, for `sample.metadata["retool"]["calls"]`. Sizes in characters."""

    kind: str
    seconds: float
    outcome: str  # tool_sandbox.ToolOutput's outcome, "ok" where a tool of the user's says none
    input_chars: int
    output_chars: int


class Turn(NamedTuple):
    """What the model said until it was the loop's turn, or, with `cut_by`, the reason why it is to say no more."""

    text: str
    action: Action
    cut_by: str | None = None


@dataclass
class Episode:
    """What the stages share while one sample is rolled out."""

    args: Any
    sample: Sample
    state: Any
    params: dict[str, Any]
    limits: Limits
    turns: int = 0
    made_up: int = 0
    calls: list[CallRecord] = field(default_factory=list)

    @property
    def aborting(self) -> bool:
        return bool(getattr(self.state, "aborted", False))


CODE_STOPS = ("</tool_call>", "</code>")
_SHORTEST = 64  # characters of an observation's body: cut further, nothing but the note of what is left out remains
_MAX_REQUESTS_A_TURN = 8  # a model that repeats a closing tag inside a string would otherwise ask for thousands
_ANSWER_ROOM = 64  # tokens that a long observation leaves to the turn behind it: an answer fits


async def generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Roll out one sample: turns of the model and observations, until an answer or a limit ends it.

    `sampling_params` are vime's and stay untouched; `max_new_tokens` bounds the whole response. `sample.metadata`
    gains "retool": why the episode ended, its turns, and a record per tool call.
    Raises EngineRefused for a wrong set-up, TooManyFailures where the machinery keeps failing, ValueError for a prompt
    that cannot be used. A failure of the machinery in one episode makes its sample ABORTED.
    """
    episode = _open_episode(args, sample, sampling_params, evaluation)
    end, fault = "cancelled", None  # what holds if the task is cancelled at an await below
    try:
        while True:
            turn = await _sample_turn(episode)
            frame = _frame(turn.action.dialect, turn.text)
            if reason := _end_reason(episode, turn, frame):
                end = reason
                break
            body = await _act(episode, turn.action)
            if episode.aborting:
                end = "abort"
                break
            _append_observation(episode, frame, body)
    except (EngineError, SandboxError) as error:
        end, fault = ("abort" if episode.aborting else "fault"), error
    finally:
        _close_episode(episode, end)
    if end != "abort":
        _count_failures(fault)
    return sample


generate.abort_mode = "request"  # newer vime ends a sample by cancelling its task instead of waiting for it


def _open_episode(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Episode:
    assert not getattr(
        args, "partial_rollout", False
    ), "retool cannot continue partial rollouts: start vime without --partial-rollout"
    if not hasattr(sample, "append_response_tokens"):
        raise RuntimeError("this vime is too old for retool: Sample.append_response_tokens (July 2026) is missing")
    if any(value is not None for value in (getattr(sample, "multimodal_inputs", None) or {}).values()):
        raise ValueError("retool handles text only, and the sample has multimodal inputs")
    state = GenerateState(args)
    tools = tool_registry.get_tool_specs()
    prompt = _prompt_text(sample.prompt, tools)
    _reset(sample)
    sample.tokens = _encode(state.tokenizer, prompt)
    sample.payload_text = prompt
    sample.payload_has_system = f"{IM_START}system" in prompt
    sample.payload_has_tools = "<tools>" in prompt

    params = dict(sampling_params)
    stop = params.get("stop") or []
    stop = [stop] if isinstance(stop, str) else list(stop)
    params["stop"] = stop + [tag for tag in CODE_STOPS if tag not in stop]
    return Episode(args, sample, state, params, _limits(args, params, evaluation))


def _limits(args, params: dict[str, Any], evaluation: bool) -> Limits:
    if evaluation:  # nothing is trained on the sample, so what fits on a training GPU is no limit
        return Limits(getattr(args, "eval_max_context_len", None), params["max_new_tokens"])
    context = getattr(args, "rollout_max_context_len", None)
    if context is None and getattr(args, "max_tokens_per_gpu", None):
        context = (getattr(args, "context_parallel_size", None) or 1) * args.max_tokens_per_gpu
    return Limits(context, params["max_new_tokens"])


def _reset(sample: Sample) -> None:
    """Forget an earlier attempt: a sample that comes back after an abort brings all of it along."""
    fresh = {
        "response": "",
        "response_length": 0,
        "loss_mask": [],
        "rollout_log_probs": [],
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": None,
        "teacher_log_probs": None,
        "weight_versions": [],
        "reward": None,
        "remove_sample": False,
        "non_generation_time": 0.0,
        "status": Sample.Status.PENDING,
        "tool_call_count": 0,
    }
    for name, value in fresh.items():
        setattr(sample, name, value)
    for name in ("prefix_cache_info", "spec_info"):
        if hasattr(sample, name):
            setattr(sample, name, type(getattr(sample, name))())
    sample.metadata = {key: value for key, value in (sample.metadata or {}).items() if key != "retool"}


async def _sample_turn(episode: Episode) -> Turn:
    """One request, and more only while the stop tag that ended it stands inside an unfinished string."""
    sample, limits, tokenizer = episode.sample, episode.limits, episode.state.tokenizer
    ids: list[int] = []
    turn = Turn("", Action(None))
    for attempt in range(_MAX_REQUESTS_A_TURN):
        room, binding = limits.room(sample), limits.binding(sample)
        if room <= 0:
            return turn._replace(cut_by=binding)
        if episode.aborting:
            return turn._replace(cut_by="abort")
        with trace_span(sample, "retool_turn", attrs={"turn": episode.turns, "max_new_tokens": room}):
            completion = await _complete(episode.args, sample, _params_for(episode, room))
        finish = completion.meta["finish_reason"]["type"]
        if finish == "abort":
            return turn._replace(cut_by="abort")
        said = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        _record(episode, completion.token_ids, said, completion.log_probs, completion.meta)
        episode.turns += attempt == 0
        if finish == "length":
            return turn._replace(cut_by=binding)
        ids += completion.token_ids
        text = tokenizer.decode(ids, skip_special_tokens=False) if attempt else said
        turn = Turn(text, read_action(text))
        if not turn.action.waits or not completion.token_ids:
            break
    if turn.action.waits:
        turn = turn._replace(action=read_action(turn.text, over=True))
    episode.made_up += turn.action.made_up
    return turn


def _params_for(episode: Episode, room: int) -> dict[str, Any]:
    params = {**episode.params, "max_new_tokens": room}
    if params.get("min_new_tokens"):  # a bound of the whole response, as max_new_tokens is
        params["min_new_tokens"] = min(room, max(0, params["min_new_tokens"] - episode.sample.response_length))
    return params


def _record(episode: Episode, ids: list[int], text: str, log_probs: list[float] | None, meta: dict | None) -> None:
    """The one writer of tokens: ids, mask, log-probs and text move together. EngineError for meta that does not fit."""
    try:
        episode.sample.append_response_tokens(
            episode.args, tokens=ids, log_probs=log_probs, trainable=log_probs is not None, meta_info=meta, text=text
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise EngineError(f"the engine's answer does not fit the sample: {error}") from error


def _end_reason(episode: Episode, turn: Turn, frame: tuple[str, str]) -> str | None:
    """Why this turn is the last, None if one follows. Without a turn behind it an action is not executed: nobody would
    see its output."""
    if turn.cut_by:
        return turn.cut_by
    if turn.action.kind == "answer":
        return "answer"
    if turn.action.kind and episode.sample.tool_call_count >= TOOL_CONFIGS["max_tool_calls"]:
        return "call_cap"
    if episode.turns >= TOOL_CONFIGS["max_turns"]:
        return "turn_cap"
    if episode.limits.room(episode.sample) <= len(_encode(episode.state.tokenizer, "".join(frame))):
        return episode.limits.binding(episode.sample)
    return None


async def _act(episode: Episode, action: Action) -> str:
    """The observation's body, and a record of the call if the action is one."""
    if not action.kind:
        return await _observe(action)
    sample = episode.sample
    sample.tool_call_count += 1
    name = CODE_TOOL if action.kind == "code" else action.content["name"]
    started = time.monotonic()
    with trace_span(sample, "retool_tool_call", attrs={"tool": name}):
        output = await _observe(action)
    seconds = time.monotonic() - started
    sample.non_generation_time += seconds
    outcome = getattr(output, "outcome", "ok")
    episode.calls.append(CallRecord(name, round(seconds, 6), outcome, len(str(action.content)), len(output)))
    return output


def _append_observation(episode: Episode, frame: tuple[str, str], body: str) -> None:
    tokenizer, room = episode.state.tokenizer, episode.limits.room(episode.sample)
    bare = len(_encode(tokenizer, "".join(frame)))
    text, ids = _encode_observation(tokenizer, frame, neutralize(body), max(bare, room - _ANSWER_ROOM))
    _record(episode, ids, text, None, None)


def _close_episode(episode: Episode, end: str) -> None:
    sample = episode.sample
    status = {"answer": Sample.Status.COMPLETED}
    for reason in ("abort", "cancelled", "fault"):
        status[reason] = Sample.Status.ABORTED
    sample.status = status.get(end, Sample.Status.TRUNCATED)
    if end == "fault" or (end == "abort" and not episode.aborting):
        # Not vime's own abort, so vime may put the sample into the batch as it is: it must neither train nor crash.
        sample.remove_sample = True
        sample.reward = {"score": 0.0, "acc": False, "pred": ""}
    sample.payload_text += sample.response
    sample.metadata["retool"] = {
        "end_reason": "abort" if end == "cancelled" else end,
        "turns": episode.turns,
        "calls": [call._asdict() for call in episode.calls],
        "made_up_outputs": episode.made_up,
    }


_FAILURE_WINDOW = 64  # episodes
_recent_faults: collections.deque[bool] = collections.deque(maxlen=_FAILURE_WINDOW)
_recent_lock = threading.Lock()


def _count_failures(fault: Exception | None) -> None:
    """Raises TooManyFailures once more than `max_failure_rate` of the last episodes of this process were lost."""
    with _recent_lock:
        _recent_faults.append(fault is not None)
        lost = sum(_recent_faults)
        if fault is None:
            return
        if lost > TOOL_CONFIGS["max_failure_rate"] * _FAILURE_WINDOW:
            _recent_faults.clear()
            raise TooManyFailures(
                f"{lost} of the last {_FAILURE_WINDOW} rollouts were lost to failures of the engine or the sandbox, "
                f"the last to: {fault}"
            ) from fault
    logger.warning("a rollout is lost and will not be trained on: %s", fault)


# ---------------------------------------------------------------------------------------------------------------------
# The reward: DAPO's strict box on the model's own words (Yu et al. 2025), with a nudge towards calling the tool.
# ---------------------------------------------------------------------------------------------------------------------

# The loop's own observations, exactly as it frames them. Tool output cannot hold a frame: it is neutralized.
_OBSERVATIONS = re.compile(
    r"(?:<\|im_end\|>)?\n?<\|im_start\|>(?:user|system|tool)\n.*?<\|im_end\|>\n(?:<\|im_start\|>assistant\n)?"
    r"|\n\n<interpreter>\n.*?\n</interpreter>\n\n",
    re.S,
)
_SCORER_SEES = 100  # characters at the end of what the scorer is given
_WORST_CASE = -0.6  # a wrong answer scores at most this, however many calls it made


async def reward_func(args, sample: Sample | list[Sample], **kwargs) -> dict[str, Any] | list[dict[str, Any]]:
    """{"score", "acc", "pred"}: DAPO's +1 or -1 for the last box, more for a wrong answer that called the tool.

    A list of samples (--group-rm) gives a list as long. An ABORTED sample scores 0: it is not trained on.
    """
    if isinstance(sample, list):
        return [_score(one) for one in sample]
    return _score(sample)


def _score(sample: Sample) -> dict[str, Any]:
    if sample.status == Sample.Status.ABORTED:
        return {"score": 0.0, "acc": False, "pred": ""}
    pred = _last_box(sample.response)
    if _is_correct(pred, sample.label):
        return {"score": 1.0, "acc": True, "pred": pred}
    calls = getattr(sample, "tool_call_count", 0)
    return {"score": min(_WORST_CASE, -1.0 + (calls - 2) / 2 * 0.1), "acc": False, "pred": pred}


def _last_box(response: str) -> str:
    """What the last complete box in the model's own words holds, "" without one."""
    for turn in reversed(_OBSERVATIONS.split(response or "")):
        boxes = _boxes(_scan(turn, over=True).words)
        if boxes:
            return boxes[-1].content
    return ""


def _is_correct(pred: str, label: Any) -> bool:
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    label = "" if label is None else str(label).strip()
    if not pred or not label:  # the scorer calls a missing box right where the label is missing too
        return False
    boxed = f"\\boxed{{{pred}}}"
    if len(boxed) <= _SCORER_SEES and compute_score(boxed, label, strict_box_verify=True)["acc"]:
        return True
    return _normal_form(pred) == _normal_form(label)


def _normal_form(answer: str) -> str:
    answer = normalize_final_answer(answer.replace("{,}", ""))
    return (answer.lstrip("0") or "0") if answer.isascii() and answer.isdigit() else answer
