"""DAPO's answer check: the strict box, and the Minerva normalization (Lewkowycz et al. 2022, appendix D.1)."""

from __future__ import annotations

import re

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}"
).split() + ["\\text{\ns}"]
_UNITS += ["\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}"]
_UNITS += ["\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"]
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def normalize_final_answer(final_answer: str) -> str:
    answer = str(final_answer).split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for unit in _UNITS:
        answer = answer.replace(unit, "")
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


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
