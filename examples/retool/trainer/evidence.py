"""What a finished run shows, read from its logs and from what vime dumped of every step; and whether that is enough.

    sft.log  rl.log  dump/rollout_N.pt  dump/train_N_0.pt  dump/rollout_eval_N.pt --> Evidence --> faults(Evidence)

The reading of which tokens the model sampled is this module's own: by turns, from the ids alone, never from a mask.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LEAST_ACCURACY = 0.9
MOST_DIFFERENCE = 1e-5  # nats, mean over the trained tokens of a step, both sides in float32
START_ACCURACY = (0.3, 0.7)  # "about a half"
CONTROL_ACCURACY = 0.05  # that a control may move from the first third of its steps to the last
METRICS = re.compile(r" - (step|eval) (\d+): (\{.*\})")


class Step(NamedTuple):
    """One rollout and, unless it was an evaluation, what was trained of it."""

    number: int
    episodes: int
    accuracy: float
    calls: float  # share of the episodes that called the tool
    sampled: int  # tokens, by this module's reading
    trained: int  # tokens, by the masks that reached the trainer (evaluation: by the samples' own)
    misread: int  # positions at which the two differ
    cut: int  # turns that the loop ended, since the model wrote another token of the chat format
    difference: float  # mean |engine - Megatron| of the log-probs of the trained tokens, as vime logs it; NaN for none


class Evidence(NamedTuple):
    sft_loss: list[float]
    steps: list[Step]
    evaluations: dict[int, Step]  # by the number of RL steps that were taken before
    generated: int | None  # tokens of all these rollouts, by the engine's own counter, where it is known
    exported: float  # mean |engine - transformers on the export| over the last evaluation
    control: bool


def faults(found: Evidence) -> list[str]:
    """What is missing of a proof that the model has learned and everything agreed, a line each."""
    lines = []
    before, after = (found.evaluations[number].accuracy for number in (min(found.evaluations), max(found.evaluations)))
    if not START_ACCURACY[0] <= before <= START_ACCURACY[1]:
        lines.append(f"accuracy after SFT is {before:.2f}, not about a half")
    early, late = thirds(found.steps)
    if found.control and abs(late - early) > CONTROL_ACCURACY:
        lines.append(f"with shuffled rewards accuracy went from {early:.2f} to {late:.2f}, and should have stayed")
    if not found.control and after < LEAST_ACCURACY:
        lines.append(f"accuracy after RL is {after:.2f}, under {LEAST_ACCURACY}")
    for step in found.steps:
        if not step.difference < MOST_DIFFERENCE:  # a NaN is no agreement
            lines.append(f"step {step.number}: engine and Megatron differ by {step.difference:.1e}: old weights?")
    rollouts = [*found.steps, *found.evaluations.values()]
    for step in rollouts:
        if step.misread:
            lines.append(
                f"step {step.number}: {step.misread} tokens are trained on that were not sampled, or not trained on"
            )
    sampled = sum(step.sampled for step in rollouts)
    # What a model wrote behind the end of its turn was generated too, and is in no sample.
    beyond = 0 if found.generated is None else found.generated - sampled
    if beyond < 0 or (beyond and not any(step.cut for step in rollouts)):
        lines.append(f"the engine generated {found.generated} tokens, the samples hold {sampled}")
    if not found.exported < MOST_DIFFERENCE:
        lines.append(f"transformers on the export and the engine differ by {found.exported:.1e}")
    return lines


def thirds(steps: Sequence[Step]) -> tuple[float, float]:
    """Mean accuracy over the first and over the last third of the steps: ten times the episodes of an evaluation, of
    which one alone is off by 0.04 by chance."""
    size = max(1, len(steps) // 3)
    early, late = (sum(step.accuracy for step in part) / size for part in (steps[:size], steps[-size:]))
    return early, late


def logged(log: Path) -> dict[str, dict[int, dict[str, float]]]:
    """vime's metrics by kind ("step", "eval") and number; of a number that is there twice, what came last."""
    found: dict[str, dict[int, dict[str, float]]] = {"step": {}, "eval": {}}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := METRICS.search(line):
            kind, number, metrics = match.groups()
            found[kind].setdefault(int(number), {}).update(ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", metrics)))
    return found


class Frames(NamedTuple):
    """The ids that turns are told by."""

    opener: list[int]  # `<|im_start|>assistant` and the newline
    end: int  # `<|im_end|>`
    call: int  # `<tool_call>`
    called: int  # `</tool_call>`, at which the engine stops


def sampled_mask(ids: Sequence[int], response: int, frames: Frames) -> list[bool]:
    """Which tokens of a response the model sampled: those of its turns, up to the end of the turn or of a call in it.
    What stands behind them was written by the loop.

    Args:
        ids: of the whole conversation, whose last `response` ones are the response; it begins in an open turn.
    """
    size = len(frames.opener)
    inside, calling, found = True, False, []
    for place in range(len(ids) - response, len(ids)):
        if not inside and list(ids[place - size : place]) == frames.opener:
            inside, calling = True, False
        found.append(inside)
        calling = calling or ids[place] == frames.call
        inside = inside and ids[place] != frames.end and not (calling and ids[place] == frames.called)
    return found


def read_step(number: int, rollout: Path, train: Path | None, frames: Frames, difference: float = math.nan) -> Step:
    """Read the dumps of one rollout, and of what the trainer was given of it."""
    import torch

    samples = torch.load(rollout, weights_only=False)["samples"]
    masks = {sample["index"]: list(map(bool, sample["loss_mask"])) for sample in samples}
    if train:
        data = torch.load(train, weights_only=False)["rollout_data"]
        pairs = zip(data["sample_indices"], data["loss_masks"], strict=True)
        masks = {index: mask.bool().tolist() for index, mask in pairs}
    sampled = misread = cut = 0
    for sample in samples:
        length, mask = sample["response_length"], masks[sample["index"]]
        said = sampled_mask(sample["tokens"], length, frames)
        for token, own, trained in zip(sample["tokens"][len(sample["tokens"]) - length :], said, mask, strict=True):
            if token == frames.end:  # the ids do not tell who ended a turn: the engine's own count does
                sampled, cut = sampled + trained, cut + (own and not trained)
            else:
                sampled, misread = sampled + own, misread + (own != trained)
        answered = sample["metadata"]["retool"]["end_reason"] == "answer"
        cut += answered and sample["tokens"][-1] not in (frames.end, frames.called)
    return Step(
        number=number,
        episodes=len(samples),
        accuracy=sum(bool(sample["reward"]["acc"]) for sample in samples) / len(samples),
        calls=sum(bool(sample["metadata"]["retool"]["calls"]) for sample in samples) / len(samples),
        sampled=sampled,
        trained=sum(map(sum, masks.values())),
        misread=misread,
        cut=cut,
        difference=difference,
    )


def compare_export(model: Path, rollout: Path) -> float:
    """Mean |engine - transformers| of the log-probs of the sampled tokens of a dumped rollout, the model in
    float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # for matrices of this size more only wait for one another on a busy machine
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    differences = []
    with torch.inference_mode():
        for sample in torch.load(rollout, weights_only=False)["samples"]:
            count, mask = sample["response_length"], torch.tensor(sample["loss_mask"]).bool()
            logits = loaded(torch.tensor([sample["tokens"]]), logits_to_keep=count + 1).logits[0, :-1]
            taken = torch.tensor(sample["tokens"][-count:])
            own = torch.log_softmax(logits.float(), -1).gather(1, taken[:, None])[:, 0]
            differences.append((own - torch.tensor(sample["rollout_log_probs"]))[mask].abs())
    return torch.cat(differences).mean().item()
