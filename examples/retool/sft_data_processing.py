#!/usr/bin/env python3
"""Turn the ReTool cold-start data into a parquet file for vime's SFT rollout (`vime.rollout.sft_rollout`).

    row {"messages": [user, assistant]}  ->  Blocks of the assistant text  ->  {"messages", "tools"}

The published rows write code and its output inline, in one assistant text. In the default dialect `tool_call` each
row becomes the conversation that RL will have: the system text and tool of `retool.chat`, the bare question, one
assistant message per tool call in the form Qwen's chat template gives it, one tool message per output, and a last
assistant message that ends in `Answer: \\boxed{...}`. Tool output is then never trained on, and the token ids are
those that `generate_with_retool.generate` builds (with vime's loss mask type `qwen`). Dialect `code` keeps the
published text, in which the interpreter's words are trained on like the model's. Rows that have a message for each call
and output already are read as well.

What is code, an output or an answer is read by `retool.actions`, as the loop and the reward read it, and every message
that is written is read back: a row that RL would read otherwise is a bad row.

Invariant: what a row says is kept, to the character inside code; an output is worded as RL's sandbox words it
(retool/observations.py), which is the only change to it; only layout between the blocks changes, and words between a
code block and its output move after the output, because in RL nothing follows a call. A row for which that cannot be done is reported with its place and
reason. More than one bad row in a hundred: nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import tool_sandbox
from retool import actions, observations
from retool.blocks import scan
from retool.chat import CODE_TOOL, SYSTEM_PROMPT, neutralize, tool_call_text
from retool.data_io import (
    BadRows,
    DataError,
    RowError,
    atomic_output,
    default_output,
    find_data_files,
    openai_messages,
    read_rows,
    readable,
    run_script,
    text_content,
)
from retool.paths import why_not_found

DIALECTS = ("tool_call", "code")
DEFAULT_DATASET = "JoeYing/ReTool-SFT"
DEFAULT_TOKENIZER = f"{os.environ.get('RETOOL_DOWNLOADS') or '/root'}/Qwen/Qwen3-4B-Instruct-2507"
MAX_ROW_TOKENS = 9216  # --max-tokens-per-gpu of the launch scripts: vime puts a longer row into a batch alone
COLUMNS = ("messages", "conversations")
PERCENTILES = (50, 90, 99, 100)
# One field of plain text per message: parquet would give every message every field of a richer struct, as nulls.
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("tools", pa.string()),
    ]
)

QUESTION_MARKER = re.compile(r"\*user question:\*", re.IGNORECASE)
FORMAT_REQUEST = re.compile(
    r"\A\s*Answer the following math problem and put the answer in the format of \\boxed\{answer\}", re.IGNORECASE
)
FORMAT_REMINDER = re.compile(r"Remember to place the final answer in the last part using the format:.*\Z", re.DOTALL)

STRAY_TAG = re.compile(r"</?(?:code|interpreter)>|^[ \t]*```(?:python3?|py)[ \t\r]*$", re.MULTILINE | re.IGNORECASE)
ANSWER_BLOCK = re.compile(r"<answer>|</answer>")
FENCE_LINE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
QUOTED = re.compile(r"""(?s)(['"])(.+)\1""")  # the published format shows the answer in quotes: \\boxed{'42'}
THINK_TAG = re.compile(r"</?think>")
# Inside a message each of these would end a turn, open a call or hide text from the model.
CONTROL_TEXT = re.compile(r"<\|\w+\|>|</?(?:tool_call|tool_response|tools|think)>")


class Block(NamedTuple):
    """A piece of an assistant text; `code` and `result` keep their whitespace exactly."""

    kind: Literal["text", "code", "result", "answer"]
    content: str


def convert(row: dict[str, Any], dialect: str = "tool_call") -> dict[str, Any]:
    """Convert one row of ReTool-SFT; pure, and without network.

    Args:
        row: {"messages": [user, assistant]} with code and output inline, or with a message for each call (in OpenAI's
            `tool_calls`) and each output (role `tool`); a system message is left out, since RL has its own; ShareGPT's
            {"conversations": [{"from", "value"}]} is the same.
        dialect: "tool_call" or "code", see the module's docstring.

    Returns:
        {"messages": [{"role", "content"}, ...], "tools": JSON text of the list of tool specs}

    Raises:
        RowError: the row cannot be converted; the message is the reason.
    """
    user, *answers = _messages(row)
    blocks = [block for message in answers for block in _blocks_of(message)]
    conversation = _conversation(question_of(text_content(user)), blocks)
    if dialect == "code":
        if len(answers) > 1:
            raise RowError("dialect code keeps one assistant text, and this row has a message for each call")
        texts = [_message("user", text_content(user)), _message("assistant", text_content(answers[0]))]
        return {"messages": texts, "tools": "[]"}
    return {
        "messages": conversation,
        "tools": json.dumps(tool_sandbox.tool_registry.get_tool_specs(), ensure_ascii=False),
    }


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row without its system text: one of the user, then assistant, tool, ..., assistant."""
    given = next((row[name] for name in COLUMNS if row.get(name)), None)
    if not given:
        raise RowError("empty conversation")
    messages = openai_messages(given)
    roles = [message.get("role") for message in messages]
    for role in roles:
        if role not in ("system", "user", "assistant", "tool"):
            raise RowError(f"unknown role {role!r}")
    if roles[0] == "system":
        messages, roles = messages[1:], roles[1:]
    several = "several user turns: " if roles.count("user") > 1 else ""
    turns = roles[1:]
    if roles[:1] != ["user"] or turns != (["assistant", "tool"] * len(turns))[: len(turns)] or len(turns) % 2 == 0:
        raise RowError(f"{several}expected one user and one assistant message, found {', '.join(map(str, roles))}")
    return messages


def _blocks_of(message: dict[str, Any]) -> Iterator[Block]:
    """The blocks of an assistant's or a tool's message."""
    if message["role"] == "tool":
        content = message.get("content")
        yield Block("result", text_content(message) if content else "")  # a program may well print nothing
        return
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        yield from split_blocks(text_content(message))
    if len(calls) > 1:
        raise RowError(f"{len(calls)} calls in one message, and RL runs one at a time")
    if calls:
        yield Block("code", _code_of_call(calls[0]))


def _code_of_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RowError("a tool call has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise RowError(f"the arguments of a tool call are not JSON ({error})") from error
    if function.get("name") != CODE_TOOL or not isinstance(arguments, dict):
        raise RowError(f"a call of the tool {function.get('name')!r}, which RL does not have")
    code = arguments.get("code")
    if not isinstance(code, str) or not code.strip():
        raise RowError("a tool call without code")
    return code


def question_of(user: str) -> str:
    """The question alone: without the preamble and the reminders that ask for the published answer format."""
    marker = QUESTION_MARKER.search(user)
    question = user[marker.end() :] if marker else user
    question = FORMAT_REMINDER.sub("", FORMAT_REQUEST.sub("", question)).strip()
    if STRAY_TAG.search(question) or ANSWER_BLOCK.search(question):
        raise RowError("the question holds a block tag (is its preamble without '*user question:*'?)")
    if not question:
        raise RowError("the question is empty")
    return question


def split_blocks(text: str) -> Iterator[Block]:
    """Split an assistant text into its blocks, in order: code and outputs are where the loop would read them.

    Raises:
        RowError: a block is not closed, not opened or empty.
    """
    start = 0
    for found in scan(text, over=True).blocks:
        yield from _split_prose(text[start : found.start])
        body = text[found.body : found.body_end]
        opening = text[found.start : found.body].strip().lower()
        if found.kind == "tool_call" or opening == "<tool_response>":
            raise RowError(f"the assistant text holds {opening}, which controls the chat format")
        if found.kind == "hallucinated":
            yield Block("result", body.removeprefix("\n").removesuffix("\n"))  # a program may well print nothing
        else:
            yield Block("code", _code(body, fenced=found.kind == "fence"))
        start = found.end
    yield from _split_prose(text[start:])


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


def _conversation(question: str, blocks: list[Block]) -> list[dict[str, str]]:
    messages = [_message("system", SYSTEM_PROMPT), _message("user", question)]
    text, answer, code = "", None, ""
    for kind, content in blocks:
        if kind == "text":
            text += THINK_TAG.sub("", content)  # the model is not a thinking one, and templates cut this text out
        elif kind == "answer":
            if answer is not None:
                raise RowError("more than one answer block")
            answer = content
        elif answer is not None or isinstance(actions.read_action(text).action, actions.Answer):
            raise RowError("an answer stands before a code or interpreter block")  # RL would end there
        elif kind == "code":
            if code:
                raise RowError("a code block without an interpreter block")
            call = tool_call_text(CODE_TOOL, {"code": content})
            messages.append(_message("assistant", "\n".join(filter(None, [_trim(text), call]))))
            text, code = "", content
        else:
            if not code:
                raise RowError("an interpreter block without a code block")
            messages.append(_message("tool", neutralize(_as_rl_shows(content, actions.source(code)))))
            code = ""
    if code:
        raise RowError("a code block without an interpreter block")
    messages.append(_message("assistant", final_text(_trim(text), answer)))
    for message in messages[1:]:
        _refuse_control_text(message)
    _check_reading(messages)
    return messages


def _as_rl_shows(output: str, code: str) -> str:
    """A published output in the words of RL's sandbox."""
    if observations.is_worded(output, code):
        return output
    sandbox = tool_sandbox.tool_registry.python_sandbox
    parts = observations.read_published(output, code, sandbox.timeout, sandbox.memory_bytes)
    return observations.word(observations.fit(parts, tool_sandbox.TOOL_CONFIGS["max_output_chars"]), "tool_call")


def _check_reading(messages: list[dict[str, str]]) -> None:
    """What SFT teaches is what RL reads: each assistant message but the last calls the tool, and the last answers."""
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    for turn in turns[:-1]:
        action = actions.read_action(turn).action
        if not isinstance(action, actions.Code) or action.source != actions.source(_called_code(turn)):
            raise RowError("RL would not read a tool call in the words and the call of a turn")
    if not isinstance(actions.read_action(turns[-1], over=True).action, actions.Answer):
        raise RowError("RL would not read an answer in the last text")


def _called_code(turn: str) -> str:
    """The code of the call that a turn ends in."""
    call = json.loads(turn.rpartition("<tool_call>\n")[2].removesuffix("\n</tool_call>"))
    return str(call["arguments"]["code"])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _trim(text: str) -> str:
    """Take off the empty lines with which the layout sets a block apart."""
    return re.sub(r"\A(?:[ \t]*\n)+", "", text).rstrip()


def _refuse_control_text(message: dict[str, str]) -> None:
    content = message["content"]
    if message["role"] == "assistant":
        content = re.sub(r"(?:\A|\n)<tool_call>\n(.*)\n</tool_call>\Z", r"\1", content)
    if found := CONTROL_TEXT.search(content):
        raise RowError(f"the {message['role']} text holds {found[0]}, which controls the chat format")


def final_text(text: str, answer: str | None) -> str:
    """The last assistant message: the words, then the line `Answer: \\boxed{...}`.

    Args:
        text: the words after the last output.
        answer: what stands in the <answer> block, None if there is none.
    """
    source = text if answer is None else answer
    found = [box.content for box in actions.find_boxes(source)]
    if not found or not found[-1]:
        raise RowError("no final answer in a box")
    if answer is not None and len(set(found)) > 1:
        raise RowError("more than one box in the answer")
    quoted = QUOTED.fullmatch(found[-1])  # the reward would compare the quotes as well
    line = f"Answer: \\boxed{{{quoted[2].strip() if quoted else found[-1]}}}"
    explained = "" if answer is None or _is_box_alone(answer) else _trim(answer)
    body = "\n\n".join(filter(None, [text, explained]))
    if body.splitlines()[-1:] == [line]:
        return body
    return "\n\n".join(filter(None, [body, line]))


def _is_box_alone(answer: str) -> bool:
    only_a_box = re.fullmatch(r"\$*\\boxed\s*\{.*\}\$*\.?", answer.strip(), re.DOTALL)
    return only_a_box is not None and len(actions.find_boxes(answer)) == 1


def main() -> int:
    args = _parse_args()
    if args.dialect == "code":
        print(
            "warning: in dialect code the interpreter's output is part of the assistant text and is trained on",
            file=sys.stderr,
        )
    bad = BadRows()
    converted: list[dict[str, Any]] = []
    total = 0
    files = find_data_files(args.dataset, args.split, args.config)
    if any(os.path.realpath(file) == os.path.realpath(args.output) for file in files):
        raise DataError(f"{args.output}: is the file that is read; name another --output")
    for row in islice(read_rows(files, [COLUMNS], "converting"), args.limit):
        total += 1
        try:
            converted.append(convert(readable(row), args.dialect))
        except RowError as error:
            bad.add(row.place, str(error))
    if bad.too_many(total):
        raise DataError(f"{bad.count} of {total} rows cannot be converted; nothing was written")
    with atomic_output(args.output, "wb") as file:
        pq.write_table(pa.Table.from_pylist(converted, schema=SCHEMA), file)
    print(f"{args.output}: {len(converted)} of {total} rows, {bad.count} left out, dialect {args.dialect}")
    _print_calls(converted)
    _print_lengths(converted, args.tokenizer)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert ReTool-SFT for vime's SFT rollout.")
    parser.add_argument(
        "--dataset",
        default=DEFAULT_DATASET,
        help="OWNER/NAME of the hub, first looked for below RETOOL_DOWNLOADS (/root); a directory; or a file "
        f"(default: {DEFAULT_DATASET})",
    )
    parser.add_argument("--split", help="of a directory or hub name (default: train, or the only one)")
    parser.add_argument("--config", help="of a directory or hub name, where there are several")
    parser.add_argument(
        "--output",
        type=Path,
        default=default_output("ReTool-SFT.parquet"),
        help="default: where the launch script looks, data/retool/ReTool-SFT.parquet in vime",
    )
    parser.add_argument("--dialect", choices=DIALECTS, default="tool_call")
    parser.add_argument("--limit", type=int, help="read only so many rows")
    parser.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, metavar="DIR", help="to print token lengths")
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        parser.error("--limit must be at least 1")
    if args.output.suffix != ".parquet":
        parser.error("--output must end in .parquet: vime tells the format by the ending")
    return args


def _print_calls(rows: list[dict[str, Any]]) -> None:
    calls = Counter(sum(message["role"] == "tool" for message in row["messages"]) for row in rows)
    print("tool calls per conversation: " + ", ".join(f"{n}: {calls[n]} rows" for n in sorted(calls)))
    cap = tool_sandbox.TOOL_CONFIGS["max_tool_calls"]
    over = sum(rows for count, rows in calls.items() if count > cap)
    print(f"rows with more than the {cap} calls that RL allows: {over}")
    refused = sum(not _sandbox_allows(code) for code in _all_code(rows))
    print(f"calls that the sandbox would refuse: {refused} of {sum(n * calls[n] for n in calls)}")


def _all_code(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        messages = row["messages"]
        for message, after in zip(messages, messages[1:], strict=False):
            if after["role"] == "tool":
                yield _called_code(message["content"])


def _sandbox_allows(code: str) -> bool:
    return tool_sandbox.tool_registry.python_sandbox._check_code_safety(actions.source(code))[0]


def _print_lengths(rows: list[dict[str, Any]], tokenizer_directory: str) -> None:
    lengths, unit = _lengths(rows, tokenizer_directory)
    values = [f"p{p} {lengths[min(len(lengths) - 1, len(lengths) * p // 100)]}" for p in PERCENTILES]
    print(f"{unit} per conversation: {', '.join(values)}".replace("p100", "max"))
    if unit == "tokens":
        longer = sum(length > MAX_ROW_TOKENS for length in lengths)
        print(f"rows with more than the {MAX_ROW_TOKENS} tokens that a GPU is given: {longer}")


def _lengths(rows: list[dict[str, Any]], tokenizer_directory: str) -> tuple[list[int], str]:
    """Sorted lengths of the conversations, and in what they are counted."""
    tokenizer = _tokenizer(tokenizer_directory)
    if tokenizer is None:
        return sorted(sum(len(message["content"]) for message in row["messages"]) for row in rows), "characters"
    return sorted(_token_length(tokenizer, row) for row in rows), "tokens"


def _tokenizer(directory: str) -> Any:
    """The tokenizer in a directory, None, with a warning, where there is none: what was converted stands without it."""
    if os.path.isdir(directory):
        from transformers import AutoTokenizer  # seconds to import

        try:
            return AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # half a download raises errors of any type
            reason = f"the tokenizer in {directory} cannot be loaded ({type(error).__name__}: {error})".splitlines()[0]
    else:
        reason = f"no tokenizer in {directory} ({why_not_found(directory)})"
    print(f"warning: lengths are in characters: {reason}; --tokenizer DIR names one", file=sys.stderr)
    return None


def _token_length(tokenizer: Any, row: dict[str, Any]) -> int:
    ids = tokenizer.apply_chat_template(
        row["messages"], tools=json.loads(row["tools"]) or None, tokenize=True, return_dict=False
    )
    return len(ids)


if __name__ == "__main__":
    run_script(main)
