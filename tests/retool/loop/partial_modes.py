"""Partial rollouts through vime's own rollout functions: an engine that is told to abort gives back what it has sampled.

    python partial_modes.py WORKDIR sync|fully_async [whole]

Prints one JSON object: the samples by their prompt, and the programs that were run to their end. With `whole` nothing
is aborted. Needs VIME_ROOT, as the test that calls it does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
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


class Engine:
    """Samples the script of a prompt, a slice at a time. An odd prompt's second turn is long, so that it is aborted."""

    def __init__(self, whole: bool, aborts_by_itself: bool):
        self.whole, self.aborts_by_itself, self.asked = whole, aborts_by_itself, 0
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


def main() -> None:
    workdir, mode, whole = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["whole"]
    write_prompts(workdir)
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
    plugin.GenerateState(args)
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
        if len(samples) == 8:
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
        for prompt, sample in samples.items()
    }
    print(json.dumps({"samples": told, "finished": finished, "cut": engine.cut}), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
