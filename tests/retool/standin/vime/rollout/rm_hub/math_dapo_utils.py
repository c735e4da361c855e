"""DAPO's answer check, as far as the plugin asks it: the strict box."""

from __future__ import annotations


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start, len(text) if start >= 0 else start):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if text[end] == "}" and depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def compute_score(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None) -> dict:
    """Only the strict box is here: the plugin uses no other check."""
    if not strict_box_verify or pause_tokens_index is not None:
        raise NotImplementedError("the stand-in has DAPO's strict box alone")
    pred = _last_box(solution_str[-100:])
    correct = pred == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
