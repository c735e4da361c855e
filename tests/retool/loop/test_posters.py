"""A cancelled request behind vime's Ray posters (--use-distributed-post): why `generate` then offers no
cancellation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(
    not os.environ.get("VIME_ROOT"), reason="VIME_ROOT names no vime checkout to post with"
)

DRIVER = '''
import asyncio, json, os, select, socket, sys, threading, time
import ray
from types import SimpleNamespace
from scripted import PairTokenizer, make_args, make_params
from vime.utils import http_utils

server = socket.create_server(("127.0.0.1", 0))
accepted = []

def serve():
    while True:
        connection, _ = server.accept()
        while b"sampling_params" not in connection.recv(1 << 20):
            pass
        accepted.append(connection)  # and never an answer

threading.Thread(target=serve, daemon=True).start()

def goes_on(connection):
    """Whether the other side still waits for an answer."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        if select.select([connection], [], [], 0.1)[0] and connection.recv(1 << 20) == b"":
            return False
    return True

def cancelled(distributed):
    args = make_args(
        vllm_router_port=server.getsockname()[1], use_distributed_post=distributed, num_gpus_per_node=1,
        vllm_server_concurrency=2,
    )
    http_utils._http_client = None
    http_utils.init_http_client(args)
    for name in [name for name in sys.modules if name == "generate_with_retool"]:
        del sys.modules[name]
    import generate_with_retool as plugin  # vime loads it after its client is set up
    plugin.GenerateState = lambda args: SimpleNamespace(tokenizer=PairTokenizer(), aborted=False)
    sample = plugin.Sample(prompt="Q")
    before, read = len(accepted), []

    async def main():
        call = plugin.generate(args, sample, make_params())
        read.append(plugin.generate.abort_mode)  # as vime does: after the call, before its first step
        task = asyncio.create_task(call)
        while len(accepted) == before:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await asyncio.to_thread(goes_on, accepted[-1])

    on = asyncio.run(main())
    return {"goes_on": on, "abort_mode": read[0]}

ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False,
    runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
print(json.dumps({"local": cancelled(False), "posters": cancelled(True)}), flush=True)
os._exit(0)
'''


@pytest.mark.ray
def test_a_cancelled_request_goes_on_behind_a_poster_and_so_none_is_cancelled(tmp_path, ray_cluster):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    folders = [os.environ["VIME_ROOT"], str(HERE.parent), str(HERE.parents[2] / "examples" / "retool")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "RAY_ADDRESS": ray_cluster}
    done = subprocess.run([sys.executable, str(driver)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["local"] == {"goes_on": False, "abort_mode": "request"}
    assert result["posters"] == {"goes_on": True, "abort_mode": None}
