"""Random lives of an engine with a small pool: requests over few prompts and images, steps, failures and aborts."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.engine.sequence import Sequence
from tests.engine.harness import Harness
from tests.engine.reference import Picture, solo_tokens

CAT, DOG, TOWN = Picture(1, 4), Picture(2, 6), Picture(3, 9)
SLOW, FAST = (Picture(1, 2, interval=interval, frames=2) for interval in (2.0, 1.0))      # one video at two speeds
PICTURES = [CAT, CAT, DOG, DOG, TOWN, SLOW, FAST]
HEADS = [[], [1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8, 9]]       # text before, between and behind the pictures
MIDDLES = [[], [10], [11, 12, 13, 14]]
TAILS = [[], [20], [21, 22, 23, 24], [20, 21, 22, 23, 24]]
RATIOS = [None, None, None, 0.0, 0.3, 1.0, (1.0, 0.5, 0.0), (0.4, 0.4, 0.0)]

pools = st.fixed_dictionaries(dict(
    num_blocks=st.integers(5, 20), encoder_blocks=st.sampled_from([0, 3, 8]), overlap=st.booleans(),
    max_num_batched_tokens=st.sampled_from([1, 5, 16, 64]), max_num_seqs=st.sampled_from([2, 4]),
    recompute_ratio=st.sampled_from([0.0, 0.3, 0.3, (1.0, 0.5, 0.0)]), reuse_any_ordinal=st.booleans(),
    image_kv_variants=st.sampled_from([1, 2]), enable_prefix_caching=st.sampled_from([True, True, False])))


@st.composite
def prompts(draw: Any) -> tuple[list[int | Picture], dict[str, Any]]:
    """A prompt, and the parameters of its request."""
    parts: list[int | Picture] = list(draw(st.sampled_from(HEADS)))
    for _ in range(draw(st.integers(0, 3))):
        picture = draw(st.sampled_from(PICTURES))
        if picture.interval is None and draw(st.integers(0, 3)) == 0:
            picture = replace(picture, is_named=True, has_pixels=draw(st.booleans()))
        parts += [picture, *draw(st.sampled_from(MIDDLES))]
    parts += draw(st.sampled_from(TAILS))
    return parts, dict(
        max_tokens=draw(st.integers(1, 9)), ignore_eos=draw(st.booleans()),
        recompute_ratio=draw(st.sampled_from(RATIOS)), reuse_any_ordinal=draw(st.sampled_from([None, None, True])),
        cache_salt=draw(st.sampled_from([None, None, None, "a"])))


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Harness()
        self.live: list[tuple[Sequence, list[int | Picture]]] = []

    @initialize(options=pools)
    def start(self, options: dict[str, Any]) -> None:
        self.engine = Harness(**options)

    @rule(request=prompts(), copies=st.sampled_from([1, 1, 1, 3]))
    def add(self, request: tuple[list[int | Picture], dict[str, Any]], copies: int) -> None:
        parts, params = request
        for _ in range(copies):
            try:
                self.live.append((self.engine.add(parts, **params), parts))
            except ValueError as error:
                message = str(error)
                assert not parts or "KV blocks" in message or "without pixel_values" in message
        self.engine.check()

    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.live:
                self.engine.step()
                self.check_finished()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq, _ = data.draw(st.sampled_from(self.live))
        assert self.engine.scheduler.abort(seq.seq_id) or seq.abort_requested
        self.engine.check()
        self.check_finished()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A step fails; perhaps a request is aborted before the failure is known."""
        seq, _ = data.draw(st.sampled_from(self.live))
        abort = data.draw(st.booleans())
        self.engine.fail_step(lambda: abort and self.engine.scheduler.abort(seq.seq_id))
        self.check_finished()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def not_finite(self, data: st.DataObject) -> None:
        """The logits of one sequence are not finite."""
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.fail(data.draw(st.sampled_from(running)), "NaN")
            self.engine.check()
            self.check_finished()

    @rule()
    def reset(self) -> None:
        self.engine.manager.reset()
        self.engine.encoder_cache.clear()
        self.engine.check()

    def check_finished(self) -> None:
        """A request that was never approximate has the tokens of a run of its own."""
        ended = {seq.seq_id for seq in self.engine.scheduler.take_finished()}
        for seq, parts in [pair for pair in self.live if pair[0].seq_id in ended]:
            assert seq.is_finished and not seq.block_table and not seq.held_blocks and not seq.held_rows
            if seq.finish_reason in ("stop", "length") and seq.sampling_params.recompute_ratio in (0.0, 1.0):
                expected = solo_tokens(parts, seq.sampling_params, seq.num_completion_tokens)
                assert seq.completion_token_ids == expected
        self.live = [pair for pair in self.live if pair[0].seq_id not in ended]

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.live:
                break
            self.engine.step()
            self.check_finished()
        while self.engine.launched:
            self.engine.step()
        self.engine.check_all_returned()
        assert not self.live


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
