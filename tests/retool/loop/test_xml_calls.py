"""Qwen3-Coder's calls through the whole loop: stopped inside, finished in the same turn, answered as a tool's
output."""

import pytest
import tool_sandbox
from scripted import Rollout, Turn, check_token_in_token_out, printed

CALL = "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint(6 * 7)\n</parameter>\n</function>"
ANSWER = Turn("Answer: \\boxed{42}<|im_end|>")


@pytest.fixture
def rollout(monkeypatch):
    async def execute_code(code):
        return printed(code)

    monkeypatch.setattr(tool_sandbox.tool_registry.python_sandbox, "execute_code", execute_code)
    started = Rollout(monkeypatch)
    yield started
    started.close()


def observation(code):
    return (
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\nOutput:\n{code}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_call_that_generation_stopped_in_goes_on_in_its_turn(rollout):
    sample = rollout.run([Turn(CALL), Turn("\n</tool_call>"), ANSWER])
    assert sample.response == CALL + "\n</tool_call>" + observation("print(6 * 7)") + ANSWER.text
    assert sample.metadata["retool"]["turns"] == 2 and sample.tool_call_count == 1
    assert sample.metadata["retool"]["end_reason"] == "answer"
    check_token_in_token_out(sample, rollout.requests)


def test_a_call_without_its_outer_tag(rollout):
    bare = CALL.removeprefix("<tool_call>\n")
    sample = rollout.run([Turn(bare), ANSWER])
    assert sample.response == bare + observation("print(6 * 7)") + ANSWER.text
    assert sample.metadata["retool"]["turns"] == 2 and sample.tool_call_count == 1


def test_a_stop_tag_in_a_string_of_the_code_is_no_end(rollout):
    start = "<tool_call>\n<function=code_interpreter>\n<parameter=code>\ns = '</function>"
    end = "'\nprint(s)\n</parameter>\n</function>"
    sample = rollout.run([Turn(start), Turn(end), Turn("\n</tool_call>"), ANSWER])
    said = start + end + "\n</tool_call>"
    assert sample.response.startswith(said + "<|im_end|>") and sample.metadata["retool"]["turns"] == 2
    assert sample.metadata["retool"]["calls"][0]["input_chars"] == len("s = '</function>'\nprint(s)")
