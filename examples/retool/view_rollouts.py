"""Look at rollouts: one self-contained HTML page from vime's debug files or the CPU run's samples.

    python examples/retool/view_rollouts.py rollout_0.pt rollout_1.pt ... [-o page.html] [--tokenizer DIR]

FILE is what vime writes with `--save-debug-rollout-data 'DIR/rollout_{rollout_id}.pt'`, or the CPU run's
samples.jsonl; several files are several rollouts. With a tokenizer (the model's folder) the page also shows tokens and
log-probs. Nothing in a file is executed, neither here nor in the page, and the page needs no network.

Exit code 0 if anything could be shown; what could not be is said in a line each on stderr and in the page. 1 if
nothing could be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from retool.advantages import SPREADS
from view.load import FileError, load
from view.page import KATEX, Page, katex
from view.samples import Rule
from view.tokens import Vocabulary


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    rule = Rule(**{name: getattr(options, name) for name in Rule._fields})
    try:
        notes = make_page(options.files, options.output, options.tokenizer, rule, options.datasets.split(","))
    except FileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(options.output)
    return 0


def make_page(
    files: Sequence[Path],
    output: Path,
    tokenizer: Path | None = None,
    rule: Rule = Rule(),  # noqa: B008, which is frozen
    datasets: Sequence[str] = (),
) -> list[str]:
    """Write the page.

    Args:
        files: a rollout each.
        output: the page.
        tokenizer: the model's folder, None for a page without tokens.
        rule: by which rewards became advantages.
        datasets: names of an evaluation's, in the order of vime's --eval-prompt-data.

    Returns:
        What could not be shown, a line each.

    Raises:
        FileError: nothing could be shown, or the page could not be written.
    """
    page = Page(Vocabulary(tokenizer) if tokenizer else None, rule, katex())
    notes: list[str] = []
    for path in files:
        try:
            notes += page.add(load(path), datasets)
        except FileError as error:
            if len(files) == 1:
                raise
            page.note(str(error))
            notes.append(str(error))
    if not page.samples:
        raise FileError("none of the files has a sample that can be shown: " + "; ".join(notes))
    names = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
    try:
        page.write(output, names)
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}; name another place with -o") from error
    return notes


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    install = f"pip install --no-deps {KATEX}"
    parser = argparse.ArgumentParser(
        prog="view_rollouts.py",
        description=(__doc__ or "").split("\n")[0],
        epilog=f"Formulas are drawn after {install}",
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a rollout: .pt of vime, or samples.jsonl")
    parser.add_argument("-o", "--output", metavar="PAGE", type=Path, help="default: beside the first file, as .html")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="the model's folder, for tokens and log-probs")
    parser.add_argument("--datasets", metavar="A,B", default="", help="names of an evaluation's datasets, in order")
    run = parser.add_argument_group("as the run had them: a dump does not say by which rule its advantages were made")
    run.add_argument("--advantage-estimator", default="grpo")
    run.add_argument("--disable-grpo-std-normalization", dest="grpo_std_normalization", action="store_false")
    run.add_argument("--disable-rewards-normalization", dest="rewards_normalization", action="store_false")
    run.add_argument("--advantage-spread", choices=SPREADS, default="accuracy", help="of TOOL_CONFIGS")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = options.files[0].with_suffix(".html")
    if options.output in options.files:
        parser.error(f"{options.output} is one of the files to show")
    return options


if __name__ == "__main__":
    sys.exit(main())
