"""vime's HTTP client: one pooled client for the process, every error retried once a second."""

from __future__ import annotations

import asyncio
import logging

import httpx

logger = logging.getLogger(__name__)
_http_client: httpx.AsyncClient | None = None


def get_rollout_num_engines(args) -> int:
    return int(getattr(args, "rollout_num_engines", None) or 1)


def init_http_client(args) -> None:
    global _http_client
    if _http_client is None:
        connections = args.vllm_server_concurrency * get_rollout_num_engines(args)
        _http_client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=connections), timeout=None, trust_env=False
        )


async def post(url, payload, max_retries=60, headers=None):
    """The parsed JSON answer. Raises the last error after ``max_retries`` attempts."""
    for attempt in range(1, max_retries + 1):
        try:
            response = await _http_client.post(url, json=payload or {}, headers=headers)
            response.raise_for_status()
            return response.json()
        except Exception as error:
            logger.info("request to %s failed (%d of %d): %s", url, attempt, max_retries, error)
            if attempt == max_retries:
                raise
        await asyncio.sleep(1)
