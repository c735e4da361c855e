"""What vime of October 2026 does with a sample's captures, as far as the plugin meets it: how they are appended, and
what the conversion of a batch for the trainer asks of them.

Written from reading vime at 2b83ea20 (vime/utils/types.py, vime/data/batch_builder.py, vime/utils/score_centering.py,
vime/utils/routed_experts.py), which the tests cannot install. It refuses what that vime refuses;
`rollout_routed_experts` are kept as one array, where vime also keeps lists and references to files.
"""

from __future__ import annotations

import math

import numpy

from vime.utils.types import Sample

CENTERING = {"score_centering_topk", "score_centering_top_p"}


class NewestSample(Sample):
    rollout_topk_token_ids = rollout_topk_log_probs = rollout_top_p_log_probs = None

    def append_response_tokens(self, args=None, *, tokens=None, trainable=True, meta_info=None, **more):
        meta, count = dict(meta_info or {}), len(tokens or [])
        if count and getattr(args, "use_score_centering", False):
            if args.rollout_top_p == 1:
                self._append_topk(args.score_centering_top_k, count, meta if trainable else None)
            else:
                self._append_top_p(count, meta if trainable else None)
        rows, start = meta.pop("routed_experts", None), meta.pop("routed_experts_start_len", 0)
        known = {key: value for key, value in meta.items() if key not in CENTERING}
        super().append_response_tokens(
            args, tokens=tokens, trainable=trainable, meta_info=known if meta_info is not None else None, **more
        )
        if rows is not None:
            self._append_rows(args, numpy.asarray(rows, numpy.int32), start)
        for name in ("rollout_topk_token_ids", "rollout_topk_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                raise ValueError(f"{name} out of step")

    def _append_topk(self, k, count, meta):
        if meta is not None:
            ids, values = meta["score_centering_topk"]
        else:
            ids, values = numpy.tile(numpy.arange(k), (count, 1)), numpy.full((count, k), -math.log(k))
        check_topk(ids, values, count, k)
        if self.response_length:
            if self.rollout_topk_token_ids is None:
                raise ValueError("the response so far has no heads")
            ids = numpy.concatenate([self.rollout_topk_token_ids, ids])
            values = numpy.concatenate([self.rollout_topk_log_probs, values])
        self.rollout_topk_token_ids, self.rollout_topk_log_probs = ids, values

    def _append_top_p(self, count, meta):
        if self.rollout_top_p_token_ids is None:
            if any(self.loss_mask or []):
                raise ValueError("the response so far has no sets")
            self.rollout_top_p_token_ids = numpy.zeros(0, numpy.int32)
            self.rollout_top_p_token_offsets = numpy.zeros(self.response_length + 1, numpy.int32)
            self.rollout_top_p_log_probs = numpy.zeros(0, numpy.float32)
        if meta is not None:
            ids, offsets, values = meta["score_centering_top_p"]
            if len(offsets) != count + 1 or len(ids) != len(values):
                raise ValueError("sets out of step")
            self.rollout_top_p_log_probs = numpy.concatenate([self.rollout_top_p_log_probs, values])
            if "top_p_token_ids" not in meta:
                meta |= {"top_p_token_ids": ids.tolist(), "top_p_token_offsets": offsets.tolist()}

    def _append_rows(self, args, rows, start):
        expected = max(0, len(self.tokens) - 1 - start)
        if rows.size != expected * args.num_layers * args.moe_router_topk:
            raise ValueError(f"{rows.shape} for {expected} tokens")
        if start:
            have = self.get_rollout_routed_experts_length()
            if not have or have < start:
                raise ValueError(f"{have} rows, and the next begin at {start}")
            rows = numpy.concatenate([numpy.asarray(self.rollout_routed_experts)[:start], rows])
        self.rollout_routed_experts = rows

    def get_rollout_routed_experts_length(self):
        return 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)


def check_topk(ids, values, length, k):
    ids, values = numpy.asarray(ids), numpy.asarray(values, numpy.float64)
    assert ids.shape == values.shape == (length, k) and numpy.issubdtype(ids.dtype, numpy.integer)
    assert not (ids < 0).any() and not (numpy.diff(numpy.sort(ids, axis=-1)) == 0).any()
    assert numpy.isfinite(values).all() and not (values > 0).any()


def check_top_p(sample):
    """The complete distribution on the sets, with the sampled token in each that is there."""
    ids, offsets = numpy.asarray(sample.rollout_top_p_token_ids), numpy.asarray(sample.rollout_top_p_token_offsets)
    values, length = numpy.asarray(sample.rollout_top_p_log_probs), sample.response_length
    assert ids.ndim == 1 and values.shape == ids.shape and offsets.shape == (length + 1,)
    assert all(numpy.issubdtype(array.dtype, numpy.integer) for array in (ids, offsets))
    assert offsets[0] == 0 and offsets[-1] == len(ids) and not (numpy.diff(offsets) < 0).any()
    for row, token in enumerate(sample.tokens[len(sample.tokens) - length :]):
        kept = ids[offsets[row] : offsets[row + 1]].tolist()
        assert kept or not sample.loss_mask[row], "a trained token without its set"
        if kept:
            value = values[offsets[row] + kept.index(token)]
            assert numpy.isclose(value, sample.rollout_log_probs[row], rtol=1e-4, atol=1e-5)


def check_rows(args, sample):
    rows = numpy.asarray(sample.rollout_routed_experts)
    expected = max(0, len(sample.tokens) - 1)
    assert rows.shape == (expected, args.num_layers, args.moe_router_topk) and expected
    assert rows.min() >= 0 and rows.max() < args.num_experts
    if args.moe_router_topk > 1:
        there = (rows != 0).any(axis=-1)
        assert there.any(axis=0).all(), "a layer of zeros"
        holes = ~there.any(axis=1)
        assert there[~holes].all() and holes.sum() <= max(64, len(rows) // 100), "rows of zeros"


def check_replay_data(args, sample):
    """What is asked of one sample's captures, with its mask as it is."""
    if args.use_score_centering and args.rollout_top_p < 1:
        check_top_p(sample)
    if args.use_rollout_routing_replay and (any(sample.loss_mask) or sample.rollout_routed_experts is not None):
        check_rows(args, sample)


def convert(args, samples):
    """The fields of a training batch that hold captures. AssertionError where vime raises."""
    data = {}
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length
        if sample.remove_sample:
            sample.loss_mask = [0] * sample.response_length
    if args.use_score_centering:
        for sample in samples:
            assert len(sample.rollout_log_probs) == sample.response_length
            if args.rollout_top_p < 1:
                if sample.response_length == 0 and sample.rollout_top_p_token_ids is None:
                    sample.rollout_top_p_token_ids = numpy.zeros(0, numpy.int32)
                    sample.rollout_top_p_token_offsets = numpy.zeros(1, numpy.int32)
                    sample.rollout_top_p_log_probs = numpy.zeros(0, numpy.float32)
                check_top_p(sample)
            elif sample.response_length or sample.rollout_topk_token_ids is not None:
                check_topk(
                    sample.rollout_topk_token_ids,
                    sample.rollout_topk_log_probs,
                    sample.response_length,
                    args.score_centering_top_k,
                )
        names = ["rollout_top_p_log_probs"] if args.rollout_top_p < 1 else ["rollout_topk_token_ids"]
        data |= {name: [getattr(sample, name) for sample in samples] for name in names}
    if args.rollout_top_p != 1:
        for sample in samples:
            ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
            assert ids is not None and offsets is not None
            assert len(offsets) == sample.response_length + 1 and int(offsets[-1]) == len(ids)
        data["rollout_top_p_token_ids"] = [sample.rollout_top_p_token_ids for sample in samples]
    there = [sample.rollout_routed_experts is not None for sample in samples]
    if args.use_rollout_routing_replay or any(there):
        for sample, present in zip(samples, there, strict=True):
            assert present or not any(sample.loss_mask), "a trained sample without expert rows"
            if present:
                check_rows(args, sample)
        data["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    return data
