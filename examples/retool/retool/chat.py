r"""What the model is told and how: system text, tool, Qwen3's chat format, and the frames of observations.

    prompt + tools ----render----> text that the first turn continues
    observation ------frame------> text between two assistant turns ----split_observations----> what it said

Contract: `render_prompt` gives, byte for byte, what Qwen3's own chat template renders for the same conversation with
tools, without needing a tokenizer that carries one. SFT and RL both take their words from here, so they cannot differ.

Invariant: text from tools is data. `neutralize` breaks up every chat token and tag in it, so no observation can hold a
frame, and `split_observations` finds exactly the frames that `frame` has made.

This module imports nothing of the project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

Message = dict[str, Any]

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
# Also those of checkpoints whose own chat format is another one.
TURN_ENDS = (IM_END, "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|end_of_text|>", "</s>")
OPEN_TURN = f"{IM_START}assistant\n"

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves math problems step by step. Whenever a calculation, a search"
    " over cases or a check would help, call the code_interpreter tool with a short Python program: you "
    "are shown what it prints, and every call starts afresh. When you are sure, end with your final "
    "answer on its own line as `Answer: \\boxed{...}`."  # the reward reads the box
)
CODE_TOOL = "code_interpreter"
CODE_INTERPRETER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": CODE_TOOL,
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}


def code_interpreter_spec(allowed_modules: Iterable[str] = ()) -> dict[str, Any]:
    """The code tool as the model is told of it.

    Args:
        allowed_modules: what its code may import beside the standard library's mathematics. Without any it is
            CODE_INTERPRETER, byte for byte.
    """
    modules = sorted(set(allowed_modules))
    if not modules:
        return CODE_INTERPRETER
    listed = " and ".join([", ".join(modules[:-1]), modules[-1]] if modules[1:] else modules)
    function = {**CODE_INTERPRETER["function"], "description": f"A tool for executing code. It may import {listed}."}
    return {**CODE_INTERPRETER, "function": function}


# ---------------------------------------------------------------------------------------------------------------------
# The prompt
# ---------------------------------------------------------------------------------------------------------------------

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def read_template_prefix(tokenizer: Any, template_kwargs: dict[str, Any]) -> str:
    r"""What the checkpoint's own template writes into an assistant turn that it opens, after OPEN_TURN.

    Nothing for most models; `<think>\n` for those that always think; an empty think block for those that may, where
    `template_kwargs` has enable_thinking false.

    Args:
        tokenizer: the checkpoint's; without a chat template of its own it writes nothing.
        template_kwargs: of vime's --apply-chat-template-kwargs.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ""
    question = [{"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **template_kwargs)
    _, found, prefix = str(text).rpartition(OPEN_TURN)
    return prefix if found else ""


def split_prompt(prompt: str | list[Message]) -> tuple[str | None, str | list[Message]]:
    """The system text of a prompt, and the rest of it.

    Args:
        prompt: a question, or a list of messages.

    Returns:
        (system text or None, the rest): the rest is a string where it is one user message, else the messages left.
    """
    if isinstance(prompt, str):
        return None, prompt
    messages = list(prompt)
    system = text_of(messages.pop(0)) if messages and messages[0].get("role") == "system" else None
    if not messages:
        return system, ""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return system, text_of(messages[0])
    return system, messages


def format_conversation_with_tools(
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    system_prompt: str | None = None,
    messages: list[Message] | None = None,
) -> str:
    """The conversation as Qwen3's template renders it, up to and with the open assistant turn.

    Args:
        prompt: a user turn, none if it is empty.
        tools: specs, in the order in which the model is shown them.
        system_prompt: SYSTEM_PROMPT if None.
        messages: turns after `prompt`.

    Raises:
        ValueError: a role or a content cannot be rendered; the message names it.
    """
    system = SYSTEM_PROMPT if system_prompt is None else system_prompt
    if tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = f"{system}\n\n{_TOOLS_HEAD}{lines}{_TOOLS_TAIL}"
    turns = [{"role": "user", "content": prompt}] if prompt else []
    return f"{IM_START}system\n{system}{IM_END}\n" + _render_turns(turns + list(messages or [])) + OPEN_TURN


def render_prompt(prompt: str | list[Message], tools: list[dict[str, Any]], template_prefix: str = "") -> str:
    """The text that the first turn continues; a prompt that was put through a chat template already is that text.

    Args:
        prompt: a question, a list of messages, or the rendered text.
        tools: specs, in the order in which the model is shown them.
        template_prefix: what stands in the assistant turn before the model's own text, see `read_template_prefix`.

    Raises:
        ValueError: the prompt is empty or of another type, a rendered one lacks one of the tools, or
            `format_conversation_with_tools` refuses it.
    """
    _check_prompt(prompt)
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
        return format_conversation_with_tools(rest, tools, system) + template_prefix
    return format_conversation_with_tools("", tools, system, messages=rest) + template_prefix


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, str | list):
        raise ValueError(f"a prompt is a text or a list of messages, not {type(prompt).__name__}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return
    for message in prompt:
        if not isinstance(message, dict):
            raise ValueError(
                f"a message of the prompt is an object with role and content, not {type(message).__name__}"
            )
    if not any(message.get("role") != "system" and message.get("content") for message in prompt):
        raise ValueError("the prompt holds no question: it has no message beside the system's, or only empty ones")


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a list of text parts; "" for none. ValueError: it is no text."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError("retool handles text only, and a message of the prompt holds something else than text")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a message must be text, not {type(content).__name__}")
    return content or ""


def _render_turns(messages: list[Message]) -> str:
    last_query = _last_query(messages)
    parts = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in ("user", "system"):
            parts.append(f"{IM_START}{role}\n{text_of(message)}{IM_END}\n")
        elif role == "assistant":
            text = _assistant_text(message, after_query=index > last_query)
            parts.append(f"{OPEN_TURN}{text}{IM_END}\n")
        elif role == "tool":  # tool messages in a row share one user turn
            first = index == 0 or messages[index - 1].get("role") != "tool"
            last = index + 1 == len(messages) or messages[index + 1].get("role") != "tool"
            response = f"\n<tool_response>\n{text_of(message)}\n</tool_response>"
            parts.append((f"{IM_START}user" if first else "") + response + (f"{IM_END}\n" if last else ""))
        else:
            raise ValueError(f"a message of the prompt has the role {role!r}; known are system, user, assistant, tool")
    return "".join(parts)


def _last_query(messages: list[Message]) -> int:
    """Index of the last user turn that is not a tool's answer: the template drops reasoning before it."""
    for index in range(len(messages) - 1, -1, -1):
        content = text_of(messages[index])
        is_response = content.startswith("<tool_response>") and content.endswith("</tool_response>")
        if messages[index].get("role") == "user" and not is_response:
            return index
    return len(messages) - 1


def _assistant_text(message: Message, after_query: bool) -> str:
    content, reasoning = text_of(message), message.get("reasoning_content")
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


def tool_call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as Qwen's chat template writes an entry of `tool_calls`."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def without_turn_end(text: str) -> str:
    """A turn without the tokens that end it, and without white space at its end."""
    text = text.rstrip()
    for token in TURN_ENDS:
        text = text.removesuffix(token).rstrip()
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Observations
# ---------------------------------------------------------------------------------------------------------------------

_USER_TURN = f"\n{IM_START}user\n"
_BACK = f"{IM_END}\n{OPEN_TURN}"
# In a turn that goes on: what stands around the output in the published ReTool data.
_INLINE_OPEN, _INLINE_CLOSE = "\n\n<interpreter>\n", "\n</interpreter>\n\n"
_TAGS = {"tool_call": "tool_response", "code": "interpreter"}


class Frame(NamedTuple):
    """What stands before and after an observation."""

    before: str
    after: str


def frame(dialect: str | None, turn_ended: bool, template_prefix: str = "") -> Frame:
    """The frame of an observation, in the dialect that the model spoke.

    Args:
        dialect: "tool_call", "code", or None for a turn without a readable action.
        turn_ended: whether the turn ended with <|im_end|>: what follows must then be a turn of its own, so that the
            transcript stays well-formed ChatML.
        template_prefix: what the assistant turn that follows begins with, see `read_template_prefix`.
    """
    if dialect == "code" and not turn_ended:
        return Frame(_INLINE_OPEN, _INLINE_CLOSE)
    after = _BACK + template_prefix
    user = _USER_TURN if turn_ended else IM_END + _USER_TURN
    tag = _TAGS.get(dialect or "")
    if tag is None:
        return Frame(user, after)
    return Frame(f"{user}<{tag}>\n", f"\n</{tag}>{after}")


_OBSERVATION_OPENS = re.compile(
    rf"(?P<turn>(?:{re.escape(IM_END)})?{re.escape(_USER_TURN)})|(?P<inline>{re.escape(_INLINE_OPEN)})"
)
_OBSERVATION_CLOSES = {"turn": _BACK, "inline": _INLINE_CLOSE}


class Observation(NamedTuple):
    """Where an observation stands in a response, its frame included, and what stands in the frame."""

    start: int
    end: int
    tag: str  # "" in the frame of a turn without a readable action, which has none
    body: str
    inline: bool  # whether the assistant's turn goes on after it


def find_observations(response: str) -> list[Observation]:
    """The observations of a response, in order. Linear in its length."""
    found: list[Observation] = []
    position = 0
    unclosed: set[str] = set()  # kinds of frame that no later text closes: not searched again
    while opener := _OBSERVATION_OPENS.search(response, position):
        kind = opener.lastgroup or ""
        close = -1 if kind in unclosed else response.find(_OBSERVATION_CLOSES[kind], opener.end())
        if close < 0:
            unclosed.add(kind)
            position = opener.end()
            continue
        position = close + len(_OBSERVATION_CLOSES[kind])
        body = response[opener.end() : close]
        tag, body = (_TAGS["code"], body) if kind == "inline" else _untagged(body)
        found.append(Observation(opener.start(), position, tag, body, kind == "inline"))
    return found


def _untagged(text: str) -> tuple[str, str]:
    """(tag, what it holds), ("", text) without one."""
    for tag in _TAGS.values():
        before, after = f"<{tag}>\n", f"\n</{tag}>"
        if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
            return tag, text[len(before) : -len(after)]
    return "", text


class Stretch(NamedTuple):
    """What the assistant said between two observations."""

    text: str
    goes_on: bool  # whether its turn began before it


def split_observations(response: str) -> list[Stretch]:
    """What the assistant said in a response: what stands between its observations, in order. Linear in its length."""
    stretches: list[Stretch] = []
    start, goes_on = 0, False
    for observation in find_observations(response):
        stretches.append(Stretch(response[start : observation.start], goes_on))
        start, goes_on = observation.end, observation.inline
    stretches.append(Stretch(response[start:], goes_on))
    return stretches


# Chat tokens, and the tags of both dialects, opening and closing.
_FORGEABLE = re.compile(
    r"<(?=\||｜|/?(?:tool_call|tool_response|tools|think|interpreter|code|answer|s|bos|eos|pad|unk)>)", re.I
)


def neutralize(text: str) -> str:
    """The text with every chat token and tag broken up, so that none of them is one: neither as text nor as an id."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates are no text, and tokenizers refuse them
    return _FORGEABLE.sub("< ", text)


_OMISSION = "\n... {} characters left out ...\n"


def shorten(text: str, most: int, also_dropped: int = 0) -> str:
    """At most `most` characters: the text itself, else its head and its tail with a note between them.

    `also_dropped` counts characters in its middle that were lost before.
    """
    if len(text) <= most and not also_dropped:
        return text
    half = max(0, most - len(_OMISSION) - 12) // 2
    note = _OMISSION.format(len(text) - 2 * half + also_dropped)
    return f"{text[:half]}{note}{text[len(text) - half :]}"
