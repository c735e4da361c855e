"""Samples as vime's files hold them, with a tokenizer small enough to be made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from retool import chat

TOOL = chat.frame("tool_call", turn_ended=False)
INLINE = chat.frame("code", turn_ended=False)
BARE = chat.frame(None, turn_ended=True)
QUESTION = "What is 6 * 7?"


def call_record(outcome: str = "ok", seconds: float = 0.25) -> dict[str, Any]:
    return {"kind": "code_interpreter", "seconds": seconds, "outcome": outcome, "input_chars": 9, "output_chars": 9}


def raw(parts=None, *, calls=None, score=1.0, end="answer", question=QUESTION, **changes: Any) -> dict[str, Any]:
    """A sample of a file. `parts` are (text, mask); a token is a byte, since that needs no tokenizer to make."""
    if parts is None:
        parts = [
            ("<code>print(6 * 7)</code>", 1),
            (INLINE.before + "42" + INLINE.after, 0),
            ("\\boxed{42}", 1),
        ]
        calls = [call_record()] if calls is None else calls
    response = "".join(text for text, _ in parts)
    prompt = f"{chat.IM_START}user\n{question}{chat.IM_END}\n{chat.OPEN_TURN}"
    mask = [kind for text, kind in parts for _ in text.encode("utf-8", "replace")]
    sample = {
        "index": 0,
        "group_index": 0,
        "prompt": question,
        "tokens": list(prompt.encode("utf-8", "replace") + response.encode("utf-8", "replace")),
        "response": response,
        "response_length": len(mask),
        "label": "42",
        "reward": {"score": score, "acc": score > 0, "pred": "42"},
        "loss_mask": mask,
        "rollout_log_probs": [-0.5 if kind else 0.0 for kind in mask],
        "remove_sample": False,
        "status": "completed",
        "metadata": {
            "retool": {"end_reason": end, "turns": 2, "calls": calls or [], "hallucinated_outputs": 0},
        },
    }
    return sample | changes


def save(path: Path, samples: list[Any], rollout_id: int = 0) -> Path:
    """As vime saves them; as JSON lines where the name says so."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    else:
        torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer.json in which token n is byte n."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from view.tokens import _BYTE_OF

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE(vocab=dict(_BYTE_OF), merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
