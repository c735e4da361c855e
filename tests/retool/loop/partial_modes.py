"""Partial rollouts through vime's own rollout functions: an engine that is told to abort gives back what it has
sampled.

    python partial_modes.py WORKDIR

Writes, for each mode, the samples by their prompt, and the programs that were run to their end; once without an abort
(whole), once with (broken). Needs VIME_ROOT, as the test that calls it does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import generate_with_retool as plugin
import tool_sandbox
from rollout_modes import arguments, sampled, write_prompts
from scripted import call, printed

from vime.rollout import fully_async_rollout, vllm_rollout
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.utils import http_utils
from vime.utils.types import Sample

SLICE, SLICE_SECONDS = 8, 0.03
FIRST = [f"What is {number} + 1?" for number in range(8)]  # the prompts that are waited for; others may overtake them


class Engine:
    """Samples the script of a prompt, a slice at a time. An odd prompt's second turn is long, so that it is
    aborted."""

    def __init__(self, whole: bool, aborts_by_itself: bool):
        self.whole, self.aborts_by_itself, self.asked = whole, aborts_by_itself, 0
        self.started: list[str] = []  # the number of each prompt that came without a word of the model's
        self.aborts = self.cut = 0  # how often it was told to abort, and requests that it ended for that
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer({"workers": [{"url": f"http://127.0.0.1:{engine.port}"}]})

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_requests":
                    engine.aborts += 1
                    self.answer({})
                else:
                    self.answer(engine.generate(payload))

            def answer(self, body):
                raw = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def generate(self, payload) -> dict:
        tokenizer = plugin.GenerateState(None).tokenizer
        ids = payload["token_ids"]
        text = tokenizer.decode(ids)
        number = int(text.split("What is ")[1].split()[0])
        spoken = text.split("<|im_start|>assistant\n")[1:]
        if spoken == [""]:
            self.started.append(str(number))
        turns = [
            f"First.\n{call(f'print({number}, 1)')}",
            "Hm. " * (60 if number % 2 else 1) + call(f"print({number}, 2)"),
            f"Answer: \\boxed{{{number + 1}}}<|im_end|>",
        ]
        rest = sampled(turns[len(spoken) - 1])[len(sampled(spoken[-1])) if spoken[-1] else 0 :]
        aborts, given, finish = self.aborts, [], "stop"
        self.asked += 1
        asked = self.asked
        while rest:
            time.sleep(SLICE_SECONDS)
            by_itself = self.aborts_by_itself and asked % 7 == 0 and given
            if not self.whole and (self.aborts != aborts or by_itself):
                finish = "abort"
                self.cut += 1
                break
            given, rest = given + rest[:SLICE], rest[SLICE:]
        content = [{"token_id": t, "logprob": -(len(ids) + i + 1) / 1e5} for i, t in enumerate(given)]
        choice = {"token_ids": given, "logprobs": {"content": content}, "finish_reason": finish}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(given)}}


def run(workdir: Path, mode: str, whole: bool) -> dict:
    engine = Engine(whole, aborts_by_itself=mode == "fully_async")  # there, when it gets new weights
    finished = []

    async def execute_code(code):
        finished.append(code)
        return printed(code)

    tool_sandbox.tool_registry.python_sandbox.execute_code = execute_code
    args = arguments(
        workdir,
        engine.port,
        partial_rollout=True,
        rollout_batch_size=4,
        over_sampling_batch_size=8,
        n_samples_per_prompt=1,
    )
    plugin.GenerateState(args).args = args
    http_utils.init_http_client(args)
    data_source = RolloutDataSourceWithBuffer(args)
    samples: dict[str, Sample] = {}
    for rollout_id in range(20):
        if mode == "sync":
            groups = vllm_rollout.generate_rollout(args, rollout_id, data_source).samples
        else:
            groups = fully_async_rollout.generate_rollout_fully_async(args, rollout_id, data_source)
        for sample in (sample for group in groups for sample in group):
            samples.setdefault(str(sample.prompt), sample)
        if samples.keys() >= set(FIRST):
            break
    told = {
        prompt: {
            "tokens": sample.tokens,
            "loss_mask": sample.loss_mask,
            "rollout_log_probs": sample.rollout_log_probs,
            "score": sample.reward["score"],
            "turns": sample.metadata["retool"]["turns"],
            "end_reason": sample.metadata["retool"]["end_reason"],
        }
        for prompt, sample in ((prompt, samples[prompt]) for prompt in FIRST)
    }
    return {"samples": told, "finished": finished, "cut": engine.cut, "started": engine.started}


def main() -> None:
    """Each run is a fork, since what it imports takes longer than the run; its result is in a file named after it."""
    workdir = Path(sys.argv[1])
    write_prompts(workdir)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    plugin.GenerateState(arguments(workdir, 1))
    for mode in ("sync", "fully_async"):
        for how in ("whole", "broken"):
            if os.fork() == 0:
                try:
                    (workdir / f"{mode}-{how}.json").write_text(json.dumps(run(workdir, mode, how == "whole")))
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
    sys.exit(any([os.wait()[1] for _ in range(4)]))  # they wait for their engines, most of the time


if __name__ == "__main__":
    main()
