"""What the tests of the loop share: an engine that is a real HTTP server on loopback and plays a script, and a
tokenizer.

The engine tokenizes its script character by character, while `PairTokenizer` encodes pairs of letters as one id: text
that is decoded and encoded again never gives back the ids that were sampled. So a loop that does that cannot pass.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import generate_with_retool as plugin
from retool import engine, failures
from retool.observations import Parts
from tool_sandbox import ToolOutput

from vime.utils import http_utils
from vime.utils.types import Sample

CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CHAT_TOKENS += ["<tool_response>", "</tool_response>"]
# Whoever makes an HTTP client reads the machine's certificates, which takes longer than an episode; none is used here.
tls = functools.cache(ssl.create_default_context)
FIRST_CHAT_ID = 0x110000
FIRST_PAIR_ID = 0x120000


class PairTokenizer:
    """Ids are code points, chat tokens and pairs of lower-case letters; `broken_id` decodes to no character."""

    broken_id = 0x130000

    def __call__(self, text, add_special_tokens=True):
        assert add_special_tokens is False
        text.encode("utf-8")  # real tokenizers refuse lone surrogates
        ids, position = [], 0
        while position < len(text):
            token = next((t for t in CHAT_TOKENS if text.startswith(t, position)), None)
            pair = text[position : position + 2]
            if token:
                ids.append(FIRST_CHAT_ID + CHAT_TOKENS.index(token))
                position += len(token)
            elif len(pair) == 2 and pair.isascii() and pair.isalpha() and pair.islower():
                ids.append(FIRST_PAIR_ID + (ord(pair[0]) - 97) * 26 + ord(pair[1]) - 97)
                position += 2
            else:
                ids.append(ord(text[position]))
                position += 1
        return {"input_ids": ids}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self._piece(token, skip_special_tokens) for token in ids)

    def _piece(self, token, skip_special_tokens):
        if token == self.broken_id:
            return "\ufffd"
        if token >= FIRST_PAIR_ID:
            first, second = divmod(token - FIRST_PAIR_ID, 26)
            return chr(97 + first) + chr(97 + second)
        if token >= FIRST_CHAT_ID:
            return "" if skip_special_tokens else CHAT_TOKENS[token - FIRST_CHAT_ID]
        return chr(token)

    def sampled(self, text):
        """The ids as an engine might sample them: no pairs."""
        ids, position = [], 0
        while position < len(text):
            token = next((t for t in CHAT_TOKENS if text.startswith(t, position)), None)
            ids.append(FIRST_CHAT_ID + CHAT_TOKENS.index(token) if token else ord(text[position]))
            position += len(token or "x")
        return ids


@dataclass
class Turn:
    """One scripted answer: a text, or the ids themselves. The log-prob of its token i is -(i + 1) / 1000."""

    text: str = ""
    ids: list[int] | None = None
    finish: str | None = "stop"
    log_probs: object = "given"
    extra: dict = field(default_factory=dict)  # goes into the choice
    answer: dict = field(default_factory=dict)  # goes beside the choices
    status: int = 200
    body: str | None = None  # instead of the JSON
    delay: float = 0.0
    before: object = None  # called with the payload before answering


class ScriptedEngine:
    """Answers POST /inference/v1/generate with the script's turns in order; a callable script picks by payload."""

    def __init__(self, script, sampled):
        self.script, self.sampled = script, sampled
        self.requests: list[SimpleNamespace] = []
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the body waits 40 ms for the headers' acknowledgement

            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with engine._lock:
                    index = len(engine.requests)
                    request = SimpleNamespace(path=self.path, headers=dict(self.headers), payload=payload)
                    engine.requests.append(request)
                turn = engine.script(payload, index) if callable(engine.script) else engine.script[index]
                if turn.before:
                    turn.before(payload)
                time.sleep(turn.delay)
                raw = (turn.body or json.dumps(engine.answer(turn, payload))).encode()
                self.send_response(turn.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request, client_address):
                pass  # a cancelled request closes its connection

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, turn: Turn, payload: dict) -> dict:
        ids = self.sampled(turn.text) if turn.ids is None else turn.ids
        limit = payload["sampling_params"]["max_tokens"]
        finish = turn.finish
        if len(ids) > limit:
            ids, finish = ids[:limit], "length"
        logprobs = {"content": [{"token_id": t, "logprob": -(i + 1) / 1000} for i, t in enumerate(ids)]}
        if turn.log_probs != "given":
            logprobs = turn.log_probs(ids) if callable(turn.log_probs) else turn.log_probs
        usage = {
            "prompt_tokens": len(payload["token_ids"]),
            "completion_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": len(payload["token_ids"]) // 2},
        }
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, **turn.extra}
        return {"choices": [choice], "usage": usage, **turn.answer}

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def make_args(**changes):
    values = dict(
        hf_checkpoint="scripted-model",
        vllm_router_ip="127.0.0.1",
        vllm_router_port=1,
        vllm_server_concurrency=64,
        rollout_num_engines=1,
        use_distributed_post=False,
        router_policy=None,
        partial_rollout=False,
        rollout_max_context_len=None,
        eval_max_context_len=None,
        context_parallel_size=1,
        max_tokens_per_gpu=100_000,
        vllm_speculative_config=None,
        group_rm=False,
        reward_key="score",
        num_layers=2,
        moe_router_topk=2,
    )
    return SimpleNamespace(**{**values, **changes})


def make_params(**changes):
    values = dict(
        max_new_tokens=50_000,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop=None,
        stop_token_ids=None,
        skip_special_tokens=False,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )
    return {**values, **changes}


class Rollout:
    """Runs `generate` over a scripted engine; what it saw stays readable afterwards."""

    def __init__(self, monkeypatch, tokenizer=None):
        self.monkeypatch = monkeypatch
        self.tokenizer = tokenizer or PairTokenizer()
        self.state = SimpleNamespace(tokenizer=self.tokenizer, aborted=False)
        monkeypatch.setattr(plugin, "GenerateState", lambda args: self.state)
        monkeypatch.setattr(ssl, "create_default_context", tls)
        engine.forget_engine()
        failures.forget()
        self.engines: list[ScriptedEngine] = []

    def engine(self, script) -> ScriptedEngine:
        sampled = getattr(
            self.tokenizer, "sampled", lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        engine = ScriptedEngine(script, sampled)
        self.engines.append(engine)
        return engine

    def args_for(self, engine, **changes):
        args = make_args(vllm_router_port=engine.port, **changes)
        self.monkeypatch.setattr(http_utils, "_http_client", None)  # its connections belong to an earlier loop
        http_utils.init_http_client(args)
        return args

    def run(self, script, sample=None, params=None, evaluation=False, **args):
        engine = self.engine(script)
        self.requests = engine.requests
        sample = sample if sample is not None else Sample(prompt="What is 6 * 7?", label="42")
        call_args = self.args_for(engine, **args)
        asyncio.run(self._run(call_args, sample, make_params(**(params or {})), evaluation))
        check_sample(sample, self.tokenizer)
        return sample

    async def _run(self, args, sample, params, evaluation):
        before = json.dumps(params, default=str)
        try:
            await plugin.generate(args, sample, params, evaluation=evaluation)
        finally:
            assert json.dumps(params, default=str) == before, "sampling_params was changed"

    def close(self):
        for started in self.engines:
            started.close()


def check_sample(sample, tokenizer):
    """The invariants of every way out."""
    assert isinstance(sample.loss_mask, list) and isinstance(sample.rollout_log_probs, list)
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    prompt_length = len(sample.tokens) - sample.response_length
    prompt = sample.payload_text.removesuffix(sample.response) if sample.response else sample.payload_text
    assert sample.tokens[:prompt_length] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(sample.tokens[prompt_length:]) == sample.response
    assert all(p == 0.0 for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m == 0)


def check_token_in_token_out(sample, requests):
    """Each request begins with the one before it and its output."""
    for earlier, later in zip(requests, requests[1:], strict=False):
        assert later.payload["token_ids"][: len(earlier.payload["token_ids"])] == earlier.payload["token_ids"]
    for request in requests:
        assert sample.tokens[: len(request.payload["token_ids"])] == request.payload["token_ids"]


def printed(text: str) -> ToolOutput:
    """What the sandbox says of code that prints this."""
    return ToolOutput.of(Parts(text or None), "ok")


def call(code: str, end: str = "") -> str:
    arguments = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{arguments}\n</tool_call>{end}"
