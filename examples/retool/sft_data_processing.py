#!/usr/bin/env python3
"""Turn the ReTool cold-start data, and other tool conversations, into a parquet file for vime's SFT rollout
(`vime.rollout.sft_rollout`).

    row --conversations.read--> question, blocks --convert--> {"messages", "tools"}

The published rows write code and its output inline, in one assistant text. In the default dialect `tool_call` each
row becomes the conversation that RL will have: the system text and tool of `retool.chat`, the bare question, one
assistant message per tool call in the form Qwen's chat template gives it, one tool message per output, in the words of
RL's sandbox (retool/observations.py), and a last assistant message that ends in `Answer: \\boxed{...}`. Tool output is
then never trained on, and the token ids are those that `generate_with_retool.generate` builds (with vime's loss mask
type `qwen`). Dialect `code` keeps the published text, in which the interpreter's words are trained on like the
model's. Other forms of rows are read as well, see retool/conversations.py.

Every message that is written is read back: a row that RL would read otherwise is a bad row.

Invariant: what a row says is kept, to the character inside code; beside the words of an output only layout between the
blocks changes, words between a code block and its output move after the output, because in RL nothing follows a call,
and a model's reasoning becomes words like others, since the model to be trained is not a thinking one. A row for which
that cannot be done is reported with its place and reason. More than one bad row in a hundred: nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tool_sandbox
from retool import actions, conversations, observations
from retool.chat import CODE_TOOL, SYSTEM_PROMPT, neutralize, tool_call_text
from retool.conversations import COLUMNS, MORE_COLUMNS
from retool.data_io import (
    BadRows,
    DataError,
    RowError,
    add_arguments,
    atomic_output,
    find_input_and_output,
    parse,
    read_rows,
    readable,
    run_script,
)
from retool.paths import why_not_found

DIALECTS = ("tool_call", "code")
DEFAULT_DATASET = "JoeYing/ReTool-SFT"
DEFAULT_TOKENIZER = f"{os.environ.get('RETOOL_DOWNLOADS') or '/root'}/Qwen/Qwen3-4B-Instruct-2507"
MAX_ROW_TOKENS = 9216  # --max-tokens-per-gpu of the launch scripts: vime puts a longer row into a batch alone
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
QUOTED = re.compile(r"""(?s)(['"])(.+)\1""")  # the published format shows the answer in quotes: \\boxed{'42'}
THINK_TAG = re.compile(r"</?think>")
# Inside a message each of these would end a turn, open a call or hide text from the model.
CONTROL_TEXT = re.compile(r"<\|\w+\|>|</?(?:tool_call|tool_response|tools|think)>")


def convert(row: dict[str, Any], dialect: str = "tool_call", tool_name: str = CODE_TOOL) -> dict[str, Any]:
    """Convert one row of a tool conversation; pure, and without network.

    Args:
        row: in one of the forms of `retool.conversations`; a system message is left out, since RL has its own.
        dialect: "tool_call" or "code", see the module's docstring.
        tool_name: under which the row calls the code tool, beside RL's own name for it.

    Returns:
        {"messages": [{"role", "content"}, ...], "tools": JSON text of the list of tool specs}

    Raises:
        RowError: the row cannot be converted; the message is the reason.
    """
    given = conversations.read(row, {CODE_TOOL, tool_name})
    messages = _conversation(question_of(given.question), given.blocks)
    if dialect == "code":
        if not given.inline:
            raise RowError("dialect code keeps one assistant text, and this row has a message for each call")
        if conversations.OUTPUT_FENCE.search(given.inline) or "<tool_call>" in given.inline:
            raise RowError("dialect code keeps the text as it is, and RL does not show outputs as this text does")
        texts = [_message("user", given.question), _message("assistant", given.inline)]
        return {"messages": texts, "tools": "[]"}
    return {
        "messages": messages,
        "tools": json.dumps(tool_sandbox.tool_registry.get_tool_specs(), ensure_ascii=False),
    }


def question_of(user: str) -> str:
    """The question alone: without the preamble and the reminders that ask for the published answer format."""
    marker = QUESTION_MARKER.search(user)
    question = user[marker.end() :] if marker else user
    question = FORMAT_REMINDER.sub("", FORMAT_REQUEST.sub("", question)).strip()
    if conversations.STRAY_TAG.search(question) or conversations.ANSWER_BLOCK.search(question):
        raise RowError("the question holds a block tag (is its preamble without '*user question:*'?)")
    if not question:
        raise RowError("the question is empty")
    return question


def _conversation(question: str, blocks: list[conversations.Block]) -> list[dict[str, str]]:
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
    fields: Counter[str] = Counter()
    total = 0
    marks = [args.dialect] * (args.dialect == "code") + [f"first{args.limit}"] * bool(args.limit)
    files, output = find_input_and_output(args, ".parquet", marks)
    for row in islice(read_rows(files, [COLUMNS], "converting", also=MORE_COLUMNS), args.limit):
        total += 1
        try:
            data = readable(row)
            converted.append(convert(data, args.dialect, args.tool_name))
            fields.update(conversations.fields_left_out(data))
        except RowError as error:
            bad.add(row.place, str(error))
    if bad.too_many(total):
        raise DataError(f"{bad.count} of {total} rows cannot be converted; nothing was written")
    with atomic_output(output, "wb") as file:
        pq.write_table(pa.Table.from_pylist(converted, schema=SCHEMA), file)
    print(f"{output}: {len(converted)} of {total} rows, {bad.count} left out, dialect {args.dialect}")
    if fields:
        found = ", ".join(f"{name} ({count} rows)" for name, count in sorted(fields.items()))
        print(f"fields of messages that are not read: {found}")
    _print_calls(converted)
    _print_lengths(converted, args.tokenizer)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Convert ReTool-SFT, or other tool conversations, for vime's SFT.")
    add_arguments(parser, DEFAULT_DATASET, ".parquet")
    parser.add_argument("--dialect", choices=DIALECTS, default="tool_call")
    parser.add_argument("--tool-name", default=CODE_TOOL, metavar="NAME", help="of the code tool in these rows")
    parser.add_argument("--limit", type=int, help="read only so many rows")
    parser.add_argument("--tokenizer", default=DEFAULT_TOKENIZER, metavar="DIR", help="to print token lengths")
    args = parse(parser, ".parquet")
    if args.limit is not None and args.limit < 1:
        parser.error("--limit must be at least 1")
    return args


def _print_calls(rows: list[dict[str, Any]]) -> None:
    calls = Counter(sum(message["role"] == "tool" for message in row["messages"]) for row in rows)
    print("tool calls per conversation: " + ", ".join(f"{n}: {calls[n]} rows" for n in sorted(calls)))
    cap = tool_sandbox.TOOL_CONFIGS["max_tool_calls"]
    over = sum(rows for count, rows in calls.items() if count > cap)
    print(f"rows with more than the {cap} calls that RL allows: {over}")
    sandbox = tool_sandbox.tool_registry.python_sandbox
    refused = sum(not sandbox._check_code_safety(actions.source(code))[0] for code in _all_code(rows))
    print(f"calls that the sandbox would refuse: {refused} of {sum(n * calls[n] for n in calls)}")


def _all_code(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for message, after in pairwise(row["messages"]):
            if after["role"] == "tool":
                yield _called_code(message["content"])


def _print_lengths(rows: list[dict[str, Any]], tokenizer_directory: str) -> None:
    tokenizer = _tokenizer(tokenizer_directory)
    unit = "tokens" if tokenizer else "characters"
    lengths = sorted(_length(row, tokenizer) for row in rows)
    values = [f"p{p} {lengths[min(len(lengths) - 1, len(lengths) * p // 100)]}" for p in PERCENTILES]
    print(f"{unit} per conversation: {', '.join(values)}".replace("p100", "max"))
    if tokenizer:
        longer = sum(length > MAX_ROW_TOKENS for length in lengths)
        print(f"rows with more than the {MAX_ROW_TOKENS} tokens that a GPU is given: {longer}")


def _length(row: dict[str, Any], tokenizer: Any) -> int:
    """In tokens, without a tokenizer in characters."""
    messages, tools = row["messages"], json.loads(row["tools"]) or None
    if tokenizer is None:
        return sum(len(message["content"]) for message in messages)
    return len(tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False))


def _tokenizer(directory: str) -> Any:
    """The tokenizer in a directory, None, with a warning, where there is none: what was converted stands without
    it."""
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


if __name__ == "__main__":
    run_script(main)
