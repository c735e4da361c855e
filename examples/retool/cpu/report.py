"""What a run shows: progress, transcripts, the table, the totals, and the log-prob check that decides its exit
code."""

from __future__ import annotations

import collections
import itertools
from typing import Any, NamedTuple

from cpu.options import TEMPERATURE, RunError
from cpu.problems import Problem
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

console = Console(highlight=False)


def progress_display(*columns: Any) -> Progress:
    """Progress bars with these columns beside them; nothing where the output is no terminal."""
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns,
        TextColumn("[dim]{task.fields[detail]}"),
        console=console,
        disable=not console.is_terminal,
    )


def say(line: str) -> None:
    """One line as it is, however long: a path that was wrapped, or read as markup, could not be copied."""
    console.print(line, soft_wrap=True, markup=False)


class Counts(NamedTuple):
    """How far a rollout is."""

    done: int
    calls: int
    errors: int
    tokens: int  # that the model wrote

    def __str__(self) -> str:
        return f"{self.calls} tool calls, {self.errors} errors"


def is_finished(sample: Any) -> bool:
    return sample.reward is not None  # vime's last step, on a lost sample the plugin's


def call_records(sample: Any) -> list[dict[str, Any]]:
    return sample.metadata.get("retool", {}).get("calls", [])


def tool_errors(sample: Any) -> int:
    return sum(call["outcome"] != "ok" for call in call_records(sample))


def count(samples: list[Any]) -> Counts:
    """Over vime's samples, which the rollout fills in place meanwhile."""
    return Counts(
        done=sum(map(is_finished, samples)),
        calls=sum(getattr(sample, "tool_call_count", 0) for sample in samples),
        errors=sum(map(tool_errors, samples)),
        tokens=sum(sum(sample.loss_mask or []) for sample in samples),
    )


_COLORS = {"prompt": "dim", "model": "green", "tool": "yellow"}


def show_table(problems: list[Problem], groups: list[list[Any]]) -> None:
    """A line for each problem, with the means over its samples, and one for all."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    room = max(24, min(48, console.width - 54))  # beside the other columns
    table.add_column("problem", no_wrap=True, overflow="ellipsis", width=room)
    for name in ("turns", "calls", "errors"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("ended by", min_width=8)
    for name in ("reward", "tokens"):
        table.add_column(name, justify="right", min_width=len(name))
    for problem, group in zip(problems, groups, strict=True):
        table.add_row(Text(" ".join(problem.question.split())), *_cells(group))
    table.add_section()
    table.add_row("mean of all samples", *_cells([sample for group in groups for sample in group]))
    console.print(table)


def _cells(samples: list[Any]) -> list[str]:
    ends = collections.Counter(sample.metadata.get("retool", {}).get("end_reason", "?") for sample in samples)
    return [
        _mean(sample.metadata.get("retool", {}).get("turns", 0) for sample in samples),
        _mean(getattr(sample, "tool_call_count", 0) for sample in samples),
        _mean(map(tool_errors, samples)),
        ", ".join(reason if len(samples) == 1 else f"{times} {reason}" for reason, times in ends.most_common()),
        _mean(sample.reward["score"] for sample in samples),
        _mean(sample.response_length for sample in samples),
    ]


def _mean(values) -> str:
    values = list(values)
    return f"{round(sum(values) / len(values), 2):g}"


def show_totals(samples: list[Any], seconds: float) -> None:
    """One sentence on the whole rollout, which took so many seconds."""
    counts = count(samples)
    right = sum(bool(sample.reward.get("acc")) for sample in samples)
    say(
        f"{counts.done} samples in {seconds:.0f} s: {right} right, {counts}, {counts.tokens} tokens by the model "
        f"({counts.tokens / seconds:.0f} a second), {sum(s.response_length for s in samples)} with the tool's output"
    )


def show_transcripts(samples: list[Any], tokenizer) -> None:
    """Three that show something: a right answer by way of the tool, the most calls, the most that went wrong."""

    def right_by_tool(sample) -> tuple:
        return bool(sample.reward.get("acc")), any(call["outcome"] == "ok" for call in call_records(sample))

    wanted = (right_by_tool, lambda sample: len(call_records(sample)), tool_errors)
    shown = {(best := max(samples, key=interest)).index: best for interest in wanted}
    legend = Text("transcripts, colored by the loss mask: ")
    console.print(legend + Text("  ").join(Text(name, style=color) for name, color in _COLORS.items()))
    for sample in shown.values():
        score = sample.reward["score"]
        console.rule(f"sample {sample.index}: label {sample.label}, reward {score:g}", style="dim")
        console.print(transcript(sample, tokenizer))


def transcript(sample, tokenizer) -> Text:
    """The last user turn of the prompt, then the response, colored by whether it is trained on."""
    start = len(sample.tokens) - sample.response_length
    prompt = tokenizer.decode(sample.tokens[:start], skip_special_tokens=False)
    turn = prompt.rfind("<|im_start|>user")
    left_out = f"[{turn} characters of earlier turns]\n" if turn > 0 else ""
    text = Text()  # a style of its own would be that of every part
    text.append(left_out + prompt[max(turn, 0) :], style=_COLORS["prompt"])
    for trained, run in itertools.groupby(
        zip(sample.loss_mask, sample.tokens[start:], strict=True), lambda pair: pair[0]
    ):
        piece = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        text.append(piece, style=_COLORS["model" if trained else "tool"])
    return text


def check(samples: list[Any], model_dir: str, limit: float) -> None:
    """Show the agreement of the log-probs.

    Args:
        samples: vime's, after the rollout.
        model_dir: what the engine served.
        limit: the largest mean difference, in nats.

    Raises:
        RunError: a sample was lost, none has anything to train on, or the log-probs differ.
    """
    trained = [sample for sample in samples if any(sample.loss_mask)]
    if not trained:
        raise RunError("no sample has a token to train on; run.log says what became of them")
    agreement = compare_log_probs(model_dir, trained)
    say(str(agreement))
    lost = [sample for sample in samples if sample.remove_sample]
    if lost:
        raise RunError(
            f"{len(lost)} of {len(samples)} samples were lost to infrastructure errors of the engine or the sandbox: run.log"
        )
    if not agreement.mean <= limit:  # a NaN agrees with nothing
        raise RunError(
            f"the mean difference of the log-probs, {agreement.mean:.1e}, is over {limit:g}: tokens, masks or "
            "log-probs are wrong, or the engine computes in less than float32 (then --logprob-limit 0.05)"
        )


class Agreement(NamedTuple):
    """Differences between the engine's log-probs of the trainable tokens and transformers', in nats."""

    mean: float
    largest: float
    tokens: int
    temperature: float  # at which the engine scores

    def __str__(self) -> str:
        of_what = f"log-probs of {self.tokens} trainable tokens at temperature {self.temperature:g}"
        return f"{of_what}, engine against transformers: mean difference {self.mean:.1e}, largest {self.largest:.1e}"


def compare_log_probs(model_dir: str, samples: list[Any]) -> Agreement:
    """Each trainable token's log-prob again, by transformers in float32 on `sample.tokens`, a sample at a time.

    vime has its engines score at the sampling temperature; one that was started otherwise may score without it.

    Args:
        model_dir: loads in transformers.
        samples: each with a trainable token; tokens, loss_mask, rollout_log_probs and response_length are read.

    Returns:
        The agreement at the temperature at which it is better.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    differences: dict[float, list[Any]] = {TEMPERATURE: [], 1.0: []}
    with progress_display(MofNCompleteColumn()) as progress, torch.inference_mode():
        task = progress.add_task("log-prob check", total=len(samples), detail="")
        for sample in samples:
            trainable = torch.tensor(sample.loss_mask, dtype=torch.bool)
            reported = torch.tensor(sample.rollout_log_probs)[trainable]
            kept = sample.response_length + 1  # the logits at a position are of the token after it
            logits = model(torch.tensor([sample.tokens]), logits_to_keep=kept).logits[0, :-1][trainable]
            taken = torch.tensor(sample.tokens[-sample.response_length :])[trainable].unsqueeze(1)
            for temperature, found in differences.items():
                found.append((_log_probs(logits, taken, temperature) - reported).abs())
            progress.advance(task)
    agreements = [
        Agreement(found.mean().item(), found.max().item(), found.numel(), temperature)
        for temperature, found in ((temperature, torch.cat(found)) for temperature, found in differences.items())
    ]
    return min(agreements)


def _log_probs(logits, taken, temperature: float):
    """Of the tokens taken, in chunks: a whole response times a whole vocabulary is gigabytes."""
    import torch

    chunks = zip(logits.split(256), taken.split(256), strict=True)
    return torch.cat([(rows / temperature).log_softmax(-1).gather(1, ids).squeeze(1) for rows, ids in chunks])
