r"""Real rollouts without a GPU: problems go through the plugin and vime's rollout to a vLLM engine on the CPU.

`rollout_on_cpu.sh` makes the environment and starts this module; `--help` lists the options.

    problems --> vime's generate_rollout --> generate_with_retool --HTTP--> vllm-router --> vLLM
                        |                            |
                   Sample objects               tool_sandbox
                        |
       progress, samples.jsonl as they finish, table, transcripts, log-prob check

vime is the checkout that VIME_ROOT names, else the stand-in in tests/retool/standin; the code here is the same for
both.

Contract. Exit code 0 only if every sample was rolled out and the engine's log-probs agree with transformers'; else one
line on stderr says what failed, and the samples that were finished are in samples.jsonl. Whatever ends the run, a
signal included, the processes it started are ended, by their ids, and no others.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from cpu.check import check_input
from cpu.model import packaged_folder
from cpu.options import RunError, parse_options
from cpu.report import check, say, show_table, show_totals, show_transcripts
from cpu.rollout import check_lengths, estimate, make_samples, start_rollout, vime_arguments, watch
from cpu.servers import serving
from cpu.storage import SampleFile, cache_folder, new_output, temporary_files
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
    given = check_input(options)
    output = new_output(options.output)
    log_to(output / "run.log")
    with temporary_files(), contextlib.closing(SampleFile(output / "samples.jsonl")) as file:
        sys.path.insert(0, str(given.vime))
        whose = "vime's own code in" if os.environ.get("VIME_ROOT") else "the stand-in for vime in"
        say(f"going through {whose} {given.vime}; samples and logs: {output}")
        with serving(options, output, meanwhile=import_libraries) as (engine, servers):
            packaged = engine.model == str(packaged_folder(cache_folder()))
            examples = packaged if options.examples is None else options.examples
            groups = make_samples(given.problems, options.samples, examples)
            samples = [sample for group in groups for sample in group]
            import_libraries()
            check_lengths(groups, given.problems, engine)
            parts = [f"{len(groups)} problems from {options.problems}", f"{options.samples} sample(s) each"]
            parts += ["after worked examples of a tool call"] * examples
            parts += [estimate(len(samples), options.max_tokens)] * (packaged and bool(servers))
            say(", ".join(parts))
            started = time.monotonic()
            watch(start_rollout(vime_arguments(engine, options, len(groups)), groups), samples, servers, file)
            seconds = time.monotonic() - started

        from transformers import AutoTokenizer

        show_transcripts(samples, AutoTokenizer.from_pretrained(engine.model))
        show_table(given.problems, groups)
        show_totals(samples, seconds)
        say(f"samples and logs: {output}")
        write_page(output, engine.model)
        check(samples, engine.model, options.logprob_limit)


def write_page(output: Path, model_dir: str) -> None:
    """The samples to look at in a browser; without a page the run is as good."""
    page = output / "rollouts.html"
    try:
        make_page([output / "samples.jsonl"], page, Path(model_dir))
        say(f"to look at them, open {page}")
    except FileError as error:
        say(f"no page of the samples: {error}")


def log_to(path: Path) -> None:
    """All logging and warnings to the file: vime and transformers would write across the progress display.

    Raises:
        RunError: it cannot be written.
    """
    try:
        style = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(filename=path, level=logging.INFO, format=style, force=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another place with --output") from error
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is reported once, by the samples
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}


def import_libraries() -> None:
    """What takes seconds to import, so that it can be done while the engine starts."""
    import generate_with_retool  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import vime.rollout.vllm_rollout  # noqa: F401

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.disable_progress_bar()


def end_process(code: int) -> NoReturn:
    """Without the interpreter's own end: the rollout's threads may still be at work, and it waits for locks that they
    hold, and ends them wherever they are."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(end="", flush=True)
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
