r"""Real rollouts without a GPU: problems go through the plugin and vime's rollout to a vLLM engine on the CPU.

`rollout_on_cpu.sh` makes the environment and starts this module; `--help` lists the options.

    problems --> vime's generate_rollout --> generate_with_retool --HTTP--> vllm-router --> vLLM
                        |                            |
                   Sample objects               tool_sandbox
                        |
       progress, samples.jsonl as they finish, table, transcripts, log-prob check

vime is the checkout that VIME_ROOT names, else the stand-in in tests/retool/standin; the code here is the same for both.

Contract. Exit code 0 only if every sample was rolled out and the engine's log-probs agree with transformers'; else one
line on stderr says what failed, and the samples that were finished are in samples.jsonl. Whatever ends the run, a
signal included, the processes it started are ended, by their ids, and no others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
import sys
import time
from pathlib import Path

from cpu.options import RunError, parse_options
from cpu.problems import read_problems
from cpu.report import check, console, show_table, show_totals, show_transcripts
from cpu.rollout import make_samples, put_vime_on_path, start_rollout, vime_arguments, watch
from cpu.servers import serving
from cpu.storage import RUN_MB, SampleFile, make_folder
from retool.processes import Stopped, raise_on_stop_signals
from view.load import FileError
from view_rollouts import make_page

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    logging.getLogger().addHandler(logging.NullHandler())  # until the run has a folder, its one line on stderr is all
    raise_on_stop_signals()
    try:
        run(options)
        return 0
    except RunError as error:
        logger.error("%s", error, exc_info=error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped by {stopped}", file=sys.stderr)
        return stopped.exit_code


def run(options: argparse.Namespace) -> None:
    problems = read_problems(options.problems, options.limit)
    vime = put_vime_on_path()
    output = make_folder(options.output or _default_output(), RUN_MB, "--output")
    log_to(output / "run.log")
    with contextlib.closing(SampleFile(output / "samples.jsonl")) as file:
        console.print(f"going through {vime}")
        with serving(options, output) as (engine, servers):
            how = "each after worked examples of a tool call, " if options.examples else ""
            console.print(f"{len(problems)} problems, {how}{options.samples} sample(s) each, from {options.problems}")
            groups = make_samples(problems, options.samples, options.examples)
            samples = [sample for group in groups for sample in group]
            started = time.monotonic()
            watch(start_rollout(vime_arguments(engine, options, len(groups)), groups), samples, servers, file)
            seconds = time.monotonic() - started

        from transformers import AutoTokenizer

        show_transcripts(samples, AutoTokenizer.from_pretrained(engine.model))
        show_table(problems, groups)
        show_totals(samples, seconds)
        console.print(f"samples and logs: {output}")
        write_page(output, engine.model)
        check(samples, engine.model, options.logprob_limit)


def write_page(output: Path, model_dir: str) -> None:
    """The samples to look at in a browser; without a page the run is as good."""
    page = output / "rollouts.html"
    try:
        make_page([output / "samples.jsonl"], page, Path(model_dir))
        console.print(f"to look at them, open {page}", soft_wrap=True)
    except FileError as error:
        console.print(f"no page of the samples: {error}", soft_wrap=True)


def _default_output() -> Path:
    return Path("outputs", "retool_on_cpu", f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}")


def log_to(path: Path) -> None:
    """All logging and warnings to the file: vime and transformers would write across the progress display."""
    try:
        style = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(filename=path, level=logging.INFO, format=style, force=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another place with --output") from error
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported once, by the samples
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
