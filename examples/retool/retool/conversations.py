r"""Rows of tool conversations, in the forms in which people have them, as one question and the blocks after it.

    row --messages--> [user, assistant, tool, ...] --read--> question, [words | code | output | answer, ...]

Read are: the published ReTool text with code and output inline; fenced code with an ```output fence after it
(NuminaMath-TIR, ToRA); messages with OpenAI's `tool_calls` or `function_call`; ShareGPT's `from` and `value`, with
LLaMA-Factory's `function_call` and `observation`; calls as <tool_call> text with <tool_response> after them (Hermes,
Qwen, and what the data script itself writes); each as `messages` or `conversations`, as Alpaca's instruction, input
and output, or as prompt and response.

Contract: what is code, an output or an answer is read by `retool.actions` and `retool.blocks`, as the loop reads it. A
row that cannot be read is a RowError with its reason; nothing of it is guessed or dropped but the fields that
`fields_left_out` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from retool import actions, chat
from retool.blocks import scan
from retool.data_io import PICTURE_FIELDS, RowError

CONVERSATION_FIELDS = ("messages", "conversations")
COLUMNS = (*CONVERSATION_FIELDS, "instruction", "prompt")  # of which a row needs one
MORE_COLUMNS = ("input", "output", "history", "response", "completion")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
READ_FIELDS = (
    *("role", "content", "tool_calls", "function_call", "from", "value"),
    *(*REASONING_FIELDS, "tool_call_id", "name", "id"),
)
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT
SAME_ROLES = {"function": "tool", "developer": "system"}  # of OpenAI

STRAY_TAG = re.compile(r"</?(?:code|interpreter)>|^[ \t]*```(?:python3?|py|output)[ \t\r]*$", re.M | re.I)
ANSWER_BLOCK = re.compile(r"<answer>|</answer>")
FENCE_LINE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
OUTPUT_FENCE = re.compile(r"\s*^[ \t]*```output[ \t]*\n(?P<output>.*?)\n?[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
RESPONSE = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


class Block(NamedTuple):
    """A piece of what comes after the question; `code` and `result` keep their whitespace exactly."""

    kind: Literal["text", "code", "result", "answer"]
    content: str


class Conversation(NamedTuple):
    question: str  # the user's whole text
    blocks: list[Block]
    inline: str  # the assistant's text, where one text is all that it says; else ""


def read(row: dict[str, Any], tools: Collection[str]) -> Conversation:
    """The conversation of a row, without its system text: RL has its own.

    Args:
        tools: the names under which the row may call the code tool.

    Raises:
        RowError: it cannot be read; the message is the reason.
    """
    user, *answers = _alternating(messages_of(row))
    blocks = [block for message in answers for block in _blocks_of(message, tools, inline=len(answers) == 1)]
    inline = text_content(answers[0]) if len(answers) == 1 and not _calls(answers[0]) else ""
    return Conversation(text_content(user), blocks, inline)


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """All messages of a row, in OpenAI's form.

    Raises:
        RowError: it has none, or they are no list of messages.
    """
    given = next((row[name] for name in CONVERSATION_FIELDS if row.get(name)), None)
    if given:
        return openai_messages(given)
    if row.get("history"):
        raise RowError("several user turns: history holds earlier ones")
    if question := row.get("instruction"):
        given_input = [row["input"]] if row.get("input") else []
        prompt: Any = "\n\n".join(map(str, [question, *given_input]))
        response = row.get("output")
    else:
        prompt, response = row.get("prompt"), row.get("response") or row.get("completion")
    if not prompt or not response:
        raise RowError("empty conversation")
    asked = openai_messages(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = openai_messages(response) if isinstance(response, list) else [{"role": "assistant", "content": response}]
    return asked + said


def openai_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation as a list of {"role", "content", ...}, from that form or from ShareGPT's {"from", "value"}.

    Raises:
        RowError: it is no list of messages.
    """
    if isinstance(messages, str):
        messages = _json(messages, "messages is not a list of objects, nor JSON of one")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RowError("messages is not a list of objects")
    return [_openai_message(message) if isinstance(message.get("from"), str) else message for message in messages]


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    role, text = message["from"], message.get("value")
    more = {name: value for name, value in message.items() if name not in ("from", "value")}
    if role != "function_call":
        return {"role": ROLES.get(role, role), "content": text, **more}
    calls = _json(text, "a function_call is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls], **more}


def text_content(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of text parts, after its reasoning as a thought.

    Raises:
        RowError: it has no text, or something else than text.
    """
    role = message.get("role")
    try:
        content = chat.text_of(message)
    except ValueError as error:
        raise RowError(f"the {role} message has no text alone: {error}") from error
    fields = REASONING_FIELDS if role == "assistant" else ()
    reasoning = next((message[name] for name in fields if message.get(name)), "")
    if not isinstance(reasoning, str):
        raise RowError(f"the reasoning of the {role} message is no text")
    content = f"<think>\n{reasoning.strip()}\n</think>\n\n{content}" if reasoning.strip() else content
    if not content.strip():
        raise RowError(f"the {role} message has no text")
    return content


def fields_left_out(row: dict[str, Any]) -> set[str]:
    """The fields of messages that hold something and are not read."""
    messages = [
        message for name in CONVERSATION_FIELDS for message in row.get(name) or [] if isinstance(message, dict)
    ]
    return {name for message in messages for name, value in message.items() if value and name not in READ_FIELDS}


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One message of the user, then assistant, tool, ..., assistant; a system text before them is left out."""
    messages = [{**message, "role": _role(message)} for message in messages]
    roles = [message["role"] for message in messages]
    if roles[:1] == ["system"]:
        messages, roles = messages[1:], roles[1:]
    several = "several user turns: " if roles.count("user") > 1 else ""
    turns = roles[1:]
    if roles[:1] != ["user"] or turns != (["assistant", "tool"] * len(turns))[: len(turns)] or len(turns) % 2 == 0:
        raise RowError(f"{several}expected one user and one assistant message, found {', '.join(map(str, roles))}")
    for message in messages:
        if picture := next((name for name in PICTURE_FIELDS if message.get(name)), None):
            raise RowError(f"the {message['role']} message comes with {picture}, and RL has text alone")
    return messages


def _role(message: dict[str, Any]) -> str:
    role, content = message.get("role"), message.get("content")
    if role == "user" and isinstance(content, str) and RESPONSE.fullmatch(content):
        return "tool"  # as Qwen's template renders it
    role = SAME_ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant", "tool"):
        raise RowError(f"unknown role {role!r}")
    return str(role)


def _calls(message: dict[str, Any]) -> list[Any]:
    function = message.get("function_call")
    return message.get("tool_calls") or ([{"function": function}] if function else [])


def _blocks_of(message: dict[str, Any], tools: Collection[str], inline: bool) -> Iterator[Block]:
    """The blocks of an assistant's or a tool's message.

    Args:
        inline: whether outputs stand in the text, so that there may be several calls in it.
    """
    if message["role"] == "tool":
        content = text_content(message) if message.get("content") else ""  # a program may well print nothing
        yield Block("result", _response(content))
        return
    calls = _calls(message)
    blocks = list(split_blocks(text_content(message), tools)) if _says_something(message) or not calls else []
    count = len(calls) + (0 if inline else sum(block.kind == "code" for block in blocks))
    if count > 1:
        raise RowError(f"{count} calls in one message, and RL runs one at a time")
    if not inline:
        yield Block("text", "\n\n")  # words that stood after the call before do not run into these
    yield from blocks
    yield from (Block("code", code_of_call(call, tools)) for call in calls)


def _says_something(message: dict[str, Any]) -> bool:
    return any(message.get(name) for name in ("content", *REASONING_FIELDS))


def _response(text: str) -> str:
    """What a tool's message says, without Hermes' and Qwen's tags and Hermes' {"name", "content"} around it."""
    found = RESPONSE.fullmatch(text)
    if not found:
        return text
    try:
        said = json.loads(found[1])
    except (ValueError, RecursionError):
        return found[1]
    is_wrapped = isinstance(said, dict) and set(said) <= {"name", "content", "tool_call_id"}
    return said["content"] if is_wrapped and isinstance(said.get("content"), str) else found[1]


def code_of_call(call: Any, tools: Collection[str]) -> str:
    """The program of a call {"function": {"name", "arguments"}}; arguments may be JSON text.

    Raises:
        RowError: it is a call of something else, or holds no program.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RowError("a tool call has no function")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if name not in tools:
        raise RowError(
            f"a call of the tool {name!r}, which RL does not have; --tool-name NAME is for code tools alone"
        )
    if isinstance(arguments, str):
        arguments = _json(arguments, "the arguments of a tool call are not JSON")
    if isinstance(arguments, dict):
        arguments = {key: value for key, value in arguments.items() if value is not None}  # parquet fills in nulls
    if isinstance(arguments, dict) and "code" not in arguments and len(arguments) == 1:
        arguments = dict.fromkeys(["code"], *arguments.values())
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str) or not code.strip():
        raise RowError("a tool call without code")
    return code


def _json(text: Any, problem: str) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{problem} ({error})") from error


# ---------------------------------------------------------------------------------------------------------------------
# The text of a message
# ---------------------------------------------------------------------------------------------------------------------


def split_blocks(text: str, tools: Collection[str] = (chat.CODE_TOOL,)) -> Iterator[Block]:
    """Split an assistant text into its blocks, in order: code and outputs are where the loop would read them.

    Raises:
        RowError: a block is not closed, not opened or empty.
    """
    start = 0
    for found in scan(text, over=True).blocks:
        if found.start < start:
            raise RowError("unclosed ```output block")
        yield from _split_prose(text[start : found.start])
        body = text[found.body : found.body_end]
        start = found.end
        if found.kind == "hallucinated":
            opening = text[found.start : found.body].strip().lower()
            if opening == "<tool_response>":
                yield Block("result", _response(text[found.start : found.end]))
            else:
                yield Block("result", body.removeprefix("\n").removesuffix("\n"))  # a program may well print nothing
        elif found.kind == "tool_call":
            yield Block("code", _code_of_text(text[found.start : found.end], body, found.in_thought, tools))
        else:
            yield Block("code", _code(body, fenced=found.kind == "fence"))
            if output := OUTPUT_FENCE.match(text, start):
                yield Block("result", output["output"])
                start = output.end()
    yield from _split_prose(text[start:])


def _code_of_text(call: str, body: str, in_thought: bool, tools: Collection[str]) -> str:
    """The program of a <tool_call> in a text, to the character where its JSON is plain."""
    if in_thought:
        raise RowError("a <tool_call> inside a thought, where RL runs none")
    try:
        read_call = json.loads(body)
    except (ValueError, RecursionError):
        action = actions.read_action(call, over=True, tools=tools).action
        if isinstance(action, actions.Invalid):
            raise RowError(f"a <tool_call> that RL could not read: {action.problem}") from None
        read_call = {"name": getattr(action, "name", None), "arguments": getattr(action, "arguments", None)}
    try:
        return code_of_call({"function": read_call}, tools)
    except RowError as error:
        raise RowError(f"a <tool_call>: {error}") from error


def _code(body: str, fenced: bool) -> str:
    if fenced:  # the lines of the fence are not part of the body
        code = body.removeprefix("\n").removesuffix("\n")
    else:
        code = actions.without_fence(body)
        if code == body:
            code = body.removeprefix("\n").removesuffix("\n")
            if FENCE_LINE.match(code.lstrip("\n")):
                raise RowError("unclosed <code> block: its fence has no end")
            if FENCE_LINE.search(code):
                raise RowError("a code block with text beside its fence")
    if not code.strip():
        raise RowError("empty code block")
    return code


def _split_prose(text: str) -> Iterator[Block]:
    """The words between code and output, and the answers among them."""
    if stray := STRAY_TAG.search(text):
        name = stray[0].strip()
        raise RowError(f"{name} closes no block" if name.startswith("</") else f"unclosed {name} block")
    start = 0
    while tag := ANSWER_BLOCK.search(text, start):
        end = text.find("</answer>", tag.end())
        if tag[0] == "</answer>":
            raise RowError("</answer> closes no block")
        if end < 0 and not actions.last_box(text[start:]):
            break  # the words name the tag; RL sees no answer in that either
        if end < 0:
            raise RowError("unclosed <answer> block")
        answer = text[tag.end() : end].removeprefix("\n").removesuffix("\n")
        if not answer.strip():
            raise RowError("empty answer block")
        if text[start : tag.start()]:
            yield Block("text", text[start : tag.start()])
        yield Block("answer", answer)
        start = end + len("</answer>")
    if text[start:]:
        yield Block("text", text[start:])
