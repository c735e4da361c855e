"""The toy that learns: a tiny Qwen3, a tokenizer cut from Qwen3's own, and products of two numbers to find.

    seed --> pairs (a, b) --> published conversations for SFT, prompts for RL, held-out prompts for evaluation
         \\-> random weights; the vocabulary is that part of Qwen3's which the toy's texts need

What it shows. A product of two two-digit numbers is nothing that so small a model can work out, but
`code_interpreter` can. Half of the conversations call it and answer with what it printed; the other half guess at
once, wrongly. After SFT the model therefore calls the tool about half the time and is right about as often. Which of
the two ways is better nothing has told it: that is left to RL, which is given the problem and the answer alone.

Contract: the same seed makes the same files. The three sets of pairs have none in common.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from retool.chat import CODE_INTERPRETER, CODE_TOOL, IM_END, OPEN_TURN, render_prompt, tool_call_text

VOCABULARY = 640  # ids; a multiple of 128, to which Megatron pads
LAYERS, HIDDEN, FEED_FORWARD, HEADS, GROUPS = 2, 128, 256, 4, 2
HEAD_DIM = 64  # queries and keys are normalized, so with 32 no head could look at one token alone, as copying asks
ROPE_THETA = 1_000  # what is copied lies some 30 tokens back; a model of this size finds it sooner than with 5 million
SPREAD = 0.1  # of the random weights, about 1 / sqrt(HIDDEN): with Qwen3's 0.02 SFT takes many times as long to copy
RL_PROBLEMS, EVAL_PROBLEMS = 512, 128


class Pair(NamedTuple):
    a: int
    b: int

    @property
    def question(self) -> str:
        return f"What is {self.a} * {self.b}?"

    @property
    def product(self) -> int:
        return self.a * self.b

    @property
    def code(self) -> str:
        return f"print({self.a} * {self.b})"


def pairs(seed: int) -> list[Pair]:
    """All pairs of two-digit numbers whose product has four digits, in an order that the seed gives."""
    found = [Pair(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    random.Random(seed).shuffle(found)
    return found


def conversation(pair: Pair, calls: bool, wrong: int) -> dict[str, Any]:
    """One row as ReTool-SFT is published: the code and its output inline, the answer in a block.

    Args:
        pair: the problem.
        calls: whether it calls the tool and is right, or guesses `wrong`.
        wrong: a number that is not the product.
    """
    answer = pair.product if calls else wrong
    call = f"<code>\n```python\n{pair.code}\n```\n</code>\n<interpreter>\n{pair.product}\n</interpreter>\n"
    text = f"{call if calls else ''}<answer>\n\\boxed{{{answer}}}\n</answer>"
    question = f"*user question:*\n{pair.question}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def write_data(folder: Path, seed: int, conversations: int) -> None:
    """Write sft_raw.jsonl (as ReTool-SFT is published), rl.jsonl and eval.jsonl."""
    draw, found = random.Random(seed), pairs(seed)
    rest = found[EVAL_PROBLEMS + RL_PROBLEMS :]
    rows = [
        conversation(pair, number % 2 == 0, _wrong(pair, draw)) for number, pair in enumerate(rest[:conversations])
    ]
    sets = {"eval": found[:EVAL_PROBLEMS], "rl": found[EVAL_PROBLEMS : EVAL_PROBLEMS + RL_PROBLEMS]}
    _write_lines(folder / "sft_raw.jsonl", rows)
    for name, chosen in sets.items():
        asked = [{"role": "user", "content": pair.question} for pair in chosen]
        labels = [str(pair.product) for pair in chosen]
        prompts = [{"prompt": [question], "label": label} for question, label in zip(asked, labels, strict=True)]
        _write_lines(folder / f"{name}.jsonl", prompts)


def _wrong(pair: Pair, draw: random.Random) -> int:
    guess = draw.randrange(1000, 9999)
    return guess + (guess >= pair.product)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def texts() -> list[str]:
    """What the tokenizer has to split as Qwen3's does: an episode, with every digit in it."""
    call = tool_call_text(CODE_TOOL, {"code": "print(12 * 34)"})
    response = f"<|im_start|>user\n<tool_response>\nOutput:\n5678\n</tool_response>{IM_END}\n{OPEN_TURN}"
    answer = f"Answer: \\boxed{{1234567890}}{IM_END}\n"
    episode = f"{render_prompt('What is 90 * 12?', [CODE_INTERPRETER])}{call}{IM_END}\n{response}{answer}"
    return [episode]


def make_model(folder: Path, tokenizer: Path, seed: int) -> None:
    """Write a random Qwen3 with its tokenizer, as a Hugging Face model in bfloat16.

    Args:
        folder: for the model.
        tokenizer: a folder with Qwen3's own.
        seed: of the weights.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    cut_tokenizer(tokenizer, folder, texts(), VOCABULARY)
    small, whole = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tokenizer)
    for text in texts():
        if small.tokenize(text) != whole.tokenize(text):
            raise ValueError(f"the cut tokenizer does not split this as Qwen3's does: {text}")
    end, padding = (small.convert_tokens_to_ids(token) for token in (IM_END, "<|endoftext|>"))
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
        bos_token_id=padding,
        eos_token_id=end,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # as vime's converter makes of it anyway
    generation = {"eos_token_id": [end, padding], "pad_token_id": padding}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def model_script() -> str:
    """The sizes as vime's scripts/models hold them."""
    return f"""MODEL_ARGS=(
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FEED_FORWARD} --vocab-size {VOCABULARY}
    --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS} --kv-channels {HEAD_DIM}
    --qk-layernorm --use-rotary-position-embeddings --rotary-base "${{MODEL_ARGS_ROTARY_BASE:-{ROPE_THETA}}}"
)
"""


def cut_tokenizer(source: Path, target: Path, needed: Iterable[str], size: int) -> None:
    """Write a tokenizer with `size` of the tokens of the one in `source`: the ids are new, the split is the same.

    Kept are the single bytes, the added tokens, what byte-pair encoding makes of the `needed` texts with every merge
    on the way, and then the most frequent ones until none of the `size` ids is without a token.
    """
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in data["model"]["merges"]]
    rank = {merge: place for place, merge in enumerate(merges)}
    from tokenizers import Tokenizer

    whole = Tokenizer.from_file(str(source / "tokenizer.json"))
    added = {token["content"] for token in data["added_tokens"]}
    kept: set[tuple[str, str]] = set()
    for text in needed:
        for token in set(whole.encode(text, add_special_tokens=False).tokens) - added:
            kept |= _merges_of(token, rank)
    letters = sorted((token for token in data["model"]["vocab"] if len(token) == 1), key=data["model"]["vocab"].get)
    made = set(letters) | {left + right for left, right in kept}
    if len(made) + len(added) > size:
        raise ValueError(f"the texts need {len(made) + len(added)} tokens, and there is room for {size}")
    for left, right in merges:
        if len(made) + len(added) == size:
            break
        if left in made and right in made and left + right not in made:
            kept.add((left, right))
            made.add(left + right)
    order = sorted(made, key=data["model"]["vocab"].__getitem__)
    data["model"]["vocab"] = {token: number for number, token in enumerate(order)}
    data["model"]["merges"] = [list(merge) for merge in merges if merge in kept]
    renumbered = {}
    for number, token in enumerate(data["added_tokens"], start=len(order)):
        renumbered[str(token["id"])] = token["id"] = number
    target.mkdir(parents=True, exist_ok=True)
    (target / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {
        renumbered[number]: token for number, token in config["added_tokens_decoder"].items()
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _merges_of(token: str, rank: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
    """The merges by which byte-pair encoding puts the token together."""
    found, parts = set(), list(token)
    while len(parts) > 1:
        place = min(range(len(parts) - 1), key=lambda place: rank.get((parts[place], parts[place + 1]), len(rank)))
        found.add((parts[place], parts[place + 1]))
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return found
