"""vime's Sample, reduced to the fields and the one method that rollouts write through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np


@dataclass
class Sample:
    """One rollout: ``tokens`` is prompt + response ids; the per-token lists cover the response only."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def add(self, meta_info: dict) -> None:
            self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
            self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
            self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
            self.completion_token_num += meta_info.get("completion_tokens", 0)

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        def add(self, meta_info: dict) -> None:
            self.cached_tokens += meta_info.get("cached_tokens", 0)
            self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

        def to_dict(self) -> dict[str, int]:
            return dict(self.__dict__)

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        plain = {
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }
        return {**self.__dict__, **plain}

    def append_response_tokens(
        self,
        args=None,
        *,
        tokens=None,
        log_probs=None,
        trainable: bool = True,
        meta_info: dict | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend ids, mask and log-probs together. Raises ValueError rather than let them get out of step."""
        tokens = [int(token) for token in tokens or []]
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"{len(log_probs)} log_probs for {len(tokens)} tokens")
        if tokens and trainable and log_probs is None:
            raise ValueError("trainable tokens need log probabilities")
        if tokens and not trainable:
            if log_probs is not None:
                raise ValueError("tokens that are not trained carry no log probabilities")
            log_probs = [0.0] * len(tokens)

        self.response += text or ""
        before = self.response_length
        if tokens:
            self.tokens += tokens
            self.response_length += len(tokens)
            self.loss_mask = ([1] * before if self.loss_mask is None else self.loss_mask) + [int(trainable)] * len(
                tokens
            )
        if log_probs is not None:
            if self.rollout_log_probs is None:
                if trainable and before:
                    raise ValueError("earlier response tokens have no log probabilities")
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += [float(value) for value in log_probs]

        self._apply_top_p(meta_info or {}, len(tokens), trainable)
        self._apply_routed_experts(args, meta_info or {})
        if meta_info and update_terminal_info and "finish_reason" in meta_info:
            self._apply_terminal_info(args, meta_info)
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for {self.response_length} response tokens")

    def _apply_top_p(self, meta_info: dict, count: int, trainable: bool) -> None:
        ids, offsets = meta_info.get("top_p_token_ids"), meta_info.get("top_p_token_offsets")
        if (ids is None) != (offsets is None):
            raise ValueError("top-p replay needs both token ids and offsets")
        if count and ids is not None:
            if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
                raise ValueError("top-p offsets do not fit the tokens")
            fresh = self.rollout_top_p_token_ids is None
            base = [0] if fresh else [int(offset) for offset in self.rollout_top_p_token_offsets]
            before = [] if fresh else [int(i) for i in self.rollout_top_p_token_ids]
            self.rollout_top_p_token_ids = before + [int(i) for i in ids]
            self.rollout_top_p_token_offsets = base + [base[-1] + int(offset) for offset in offsets[1:]]
        elif count and not trainable and self.rollout_top_p_token_offsets is not None:
            last = self.rollout_top_p_token_offsets[-1]
            self.rollout_top_p_token_offsets = list(self.rollout_top_p_token_offsets) + [last] * count
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError("top-p offsets do not fit the response")

    def _apply_routed_experts(self, args, meta_info: dict) -> None:
        experts = meta_info.get("routed_experts")
        if experts is None:
            return
        rows = max(0, len(self.tokens) - 1)
        self.rollout_routed_experts = np.asarray(experts, dtype=np.int32).reshape(
            rows, args.num_layers, args.moe_router_topk
        )

    def _apply_terminal_info(self, args, meta_info: dict) -> None:
        if getattr(args, "vllm_speculative_config", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {
            "length": Sample.Status.TRUNCATED,
            "abort": Sample.Status.ABORTED,
            "stop": Sample.Status.COMPLETED,
        }
        self.status = ends.get(meta_info["finish_reason"]["type"], self.status)
