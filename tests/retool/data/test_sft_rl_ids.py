"""SFT teaches what RL does: the ids of a converted conversation in vime's SFT rollout are those of the RL loop.

Left side: `MultiTurnLossMaskGenerator` of type `qwen`, vime's own where VIME_ROOT is set, else a rendering by its
rules. Right side: `sample.tokens` after `generate` has replayed the conversation over a scripted engine. Both with
Qwen3's own tokenizer and template. The masks may differ in nothing but turn closers, `<|im_end|>` and the newline
after it.
"""

import json

import pytest
import tool_sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Rollout, Turn
from sft_data_processing import convert

from vime.utils.types import Sample

END = "<|im_end|>"


def sft_ids(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """Ids and loss mask as vime's SFT rollout makes them from a row of the parquet file."""
    messages, tools = row["messages"], json.loads(row["tools"])
    try:
        from vime.utils.mask_utils import MultiTurnLossMaskGenerator
    except ImportError:
        return rendered_by_vimes_rules(tokenizer, messages, tools)
    return MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen").get_loss_mask(messages, tools=tools)


def rendered_by_vimes_rules(tokenizer, messages, tools) -> tuple[list[int], list[int]]:
    """Message by message, the tools with the first; an assistant's words and their closer are trained on."""
    ids, mask = [], []
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for index, message in enumerate(messages):
        part = tokenizer.apply_chat_template(
            [message], tools=None if index else tools, tokenize=True, return_dict=False
        )
        ids += part
        untrained = len(header) if message["role"] == "assistant" else len(part)
        mask += [0] * untrained + [1] * (len(part) - untrained)
    return ids, mask


def replay(rollout: Rollout, row: dict) -> Sample:
    """Let `generate` run the conversation: the engine says the assistant's texts, the tool answers its outputs."""
    messages = row["messages"]
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    outputs = iter([message["content"] for message in messages if message["role"] == "tool"])
    codes = []

    async def execute_code(code):
        codes.append(code)
        return next(outputs)

    rollout.monkeypatch.setattr(tool_sandbox.tool_registry.python_sandbox, "execute_code", execute_code)
    # A call's turn stops at its stop string; the last one ends by itself.
    script = [Turn(text) for text in texts[:-1]] + [Turn(texts[-1] + END)]
    sample = rollout.run(script, Sample(prompt=messages[1]["content"], label="42"))
    assert sample.metadata["retool"]["end_reason"] == "answer"
    assert len(codes) == len(texts) - 1 and next(outputs, None) is None
    return sample


def check_same(rollout: Rollout, row: dict) -> None:
    tokenizer = rollout.tokenizer
    ids, mask = sft_ids(tokenizer, row)
    sample = replay(rollout, row)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert ids == sample.tokens + newline, (tokenizer.decode(ids), tokenizer.decode(sample.tokens))

    rl_mask = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    (end,) = tokenizer(END, add_special_tokens=False)["input_ids"]
    for position, (sft, rl) in enumerate(zip(mask, rl_mask, strict=False)):
        closer = ids[position] == end or (ids[position : position + 1] == newline and ids[position - 1] == end)
        assert sft == rl or closer, tokenizer.decode(ids[: position + 1])
    trained = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    words = "".join(f"{m['content']}{END}\n" for m in row["messages"] if m["role"] == "assistant")
    assert trained == words


@pytest.fixture
def rollout(monkeypatch, qwen3_tokenizer):
    made = Rollout(monkeypatch, qwen3_tokenizer)
    yield made
    made.close()


def published(turns: list[tuple[str, str, str]], last: str, question: str = "What is 6 times 7?") -> dict:
    """A row as ReTool-SFT has it: words, code and output inline, and the answer in its tags."""
    text = "".join(
        f"{words}\n<code>\n```python\n{code}\n```\n</code>\n<interpreter>\n{output}\n</interpreter>\n"
        for words, code, output in turns
    )
    return {
        "messages": [
            {"role": "user", "content": f"Use Python.\n\n*user question:*\n{question}"},
            {"role": "assistant", "content": f"{text}\n{last}\n<answer>\n\\boxed{{42}}\n</answer>"},
        ]
    }


ROWS = {
    "one call": published([("I compute it.", "print(6 * 7)", "42")], "So it is 42."),
    "no call": published([], "Six sevens are 42."),
    "no words": published([("", "print(6 * 7)", "42")], ""),
    "three calls": published(
        [("First.\n\nThen:", "a = 1\nprint(a)", "1"), ("", "print(2)", "2"), ("Last.", "print(3)", "3")], "Done."
    ),
    "nothing printed": published([("Go.", "x = 1", "")], "Nothing."),
    "odd white space": published(
        [("  A \n\n\n B", "\n\n    if 1:\n\tprint(1)\n\n", "\n\n  1 \n\n"), ("  C", "  x", " ")], "  D "
    ),
    "unicode": published(
        [("Soit é ∑ 𝔸 数", 'print("é", "∑\\n", \'𝔸\')', "é ∑\n𝔸 数")], "Fin é.", "Où est $\\frac{1}{2}$ ?"
    ),
    "traceback": published(
        [("Try.", "1/0", 'Traceback (most recent call last):\n  File "<string>", line 1\nZeroDivisionError: x')], "Hm."
    ),
    "box on the way": published([("Perhaps \\boxed{41}, I check.", "print(r'Answer: \\boxed{1}')", "42")], "Yes."),
    "tags in output": published([("Go.", "print(1)", "<|im_end|></tool_response> a <| b <code>")], "Ok."),
    "words that look like an answer line in output": published([("Go.", "print(1)", "Answer: \\boxed{7}")], "Ok."),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_the_ids_of_sft_are_those_of_rl(rollout, row):
    check_same(rollout, convert(row))


def test_vimes_rules_are_vimes(qwen3_tokenizer):
    try:
        from vime.utils.mask_utils import MultiTurnLossMaskGenerator
    except ImportError:
        pytest.skip("VIME_ROOT names no vime checkout with vime.utils.mask_utils")
    generator = MultiTurnLossMaskGenerator(qwen3_tokenizer, tokenizer_type="qwen")
    for row in map(convert, ROWS.values()):
        messages, tools = row["messages"], json.loads(row["tools"])
        assert rendered_by_vimes_rules(qwen3_tokenizer, messages, tools) == generator.get_loss_mask(messages, tools)


TEXT = st.text("ab \n\t.,é∑\"'\\{}()[]=+#1", max_size=25)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXT, TEXT.filter(str.strip), TEXT), max_size=3), TEXT)
def test_the_ids_of_any_conversation_are_the_same(rollout, turns, last):
    check_same(rollout, convert(published(turns, last)))
