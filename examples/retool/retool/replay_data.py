"""What vime keeps of a sample beside its ids, to replay it in the trainer: the sets that top-p left (--rollout-top-p),
the sampler's distribution (--use-score-centering), the experts of each token (--use-rollout-routing-replay).

Contract: these have rows for the tokens of a response, or of the whole sample. vime checks them for the whole batch at
once, so a sample that does not fit takes the others with it: July's vime drops the field for all samples or fails,
newer vimes refuse the batch.
"""

from __future__ import annotations

import math
from typing import Any


def fill_in(args: Any, sample: Any, top_p_sets: bool) -> None:
    """Give a sample that is not trained on replay data of the right shapes; those of its response stay where they have
    it.

    Args:
        args: vime's.
        sample: vime's, its ids and mask being in step.
        top_p_sets: whether the engine sends top-p sets. One that does not is taken to send none for any sample.
    """
    import numpy  # only runs that lose a sample need it

    length, rows = sample.response_length, max(0, len(sample.tokens) - 1)
    centering = getattr(args, "use_score_centering", False)
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        if top_p_sets and _length(sample.rollout_top_p_token_offsets) != length + 1:
            # Empty sets, as observations have them.
            sample.rollout_top_p_token_ids = numpy.zeros(0, numpy.int32)
            sample.rollout_top_p_token_offsets = numpy.zeros(length + 1, numpy.int32)
            sample.rollout_top_p_log_probs = numpy.zeros(0, numpy.float32) if centering else None
    elif centering and _length(sample.rollout_topk_token_ids) != length:
        count = args.score_centering_top_k
        sample.rollout_topk_token_ids = numpy.tile(numpy.arange(count, dtype=numpy.int32), (length, 1))
        sample.rollout_topk_log_probs = numpy.full((length, count), -math.log(count), numpy.float32)
    if not has_expert_rows(args, sample):
        # All experts in turn. One expert for all tokens would carry the whole sample alone, and newer vimes take rows
        # of zeros for a capture that failed.
        shape = (rows, args.num_layers, args.moe_router_topk)
        experts = getattr(args, "num_experts", None) or args.moe_router_topk
        sample.rollout_routed_experts = numpy.arange(math.prod(shape), dtype=numpy.int32).reshape(shape) % experts


def has_expert_rows(args: Any, sample: Any) -> bool:
    """Whether each token but the last has its row, where they are replayed."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return True
    return _length(sample.rollout_routed_experts) == max(0, len(sample.tokens) - 1)


def _length(values: Any) -> int | None:
    return None if values is None else len(values)


def of_the_first(meta: dict[str, Any], total: int, kept: int) -> dict[str, Any]:
    """What an engine's answer of `total` tokens says of its first `kept`, under the keys that vime's Sample reads."""
    cut = dict(meta)
    if "top_p_token_offsets" in meta:
        offsets = meta["top_p_token_offsets"][: kept + 1]
        cut |= {"top_p_token_offsets": offsets, "top_p_token_ids": meta["top_p_token_ids"][: offsets[-1]]}
    if "score_centering_topk" in meta:
        cut["score_centering_topk"] = tuple(rows[:kept] for rows in meta["score_centering_topk"])
    if "score_centering_top_p" in meta:
        ids, offsets, log_probs = meta["score_centering_top_p"]
        offsets = offsets[: kept + 1]
        cut["score_centering_top_p"] = (ids[: offsets[-1]], offsets, log_probs[: offsets[-1]])
    if "routed_experts" in meta:  # one row for each token but the last, the prompt's included
        cut["routed_experts"] = meta["routed_experts"][: len(meta["routed_experts"]) - (total - kept)]
    return cut
