"""Decides what each step computes: which spans of which sequences, within the token budget and the blocks there are."""
from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf

from nanovllm.config import Config
from nanovllm.engine.admission import check_fits, waits_for_image
from nanovllm.engine.batch_rows import BatchRows
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.encoder_cache_table import EncoderCacheTable
from nanovllm.engine.image_holds import ImageHolds
from nanovllm.engine.image_planner import ImagePlanner
from nanovllm.engine.scheduled import ScheduledSeq, ScheduledStep, take_rows
from nanovllm.engine.sequence import Sequence, SequenceStatus, decodes_and_prefills
from nanovllm.metrics import EngineStats


class Scheduler:
    """Continuous batching over spans.

    Running sequences come first, oldest first and decodes before prompts, then waiting ones in order of arrival. A
    sequence that finds no block for its next token preempts the youngest; the oldest therefore always advances.
    What a step computed counts only once `postprocess` has seen it. One more step may be scheduled before that: it
    computes tokens whose ids are not known yet, and whatever becomes of a sequence that ended meanwhile is dropped.
    """

    def __init__(self, config: Config, num_blocks: int | None = None,
                 encoder_cache: EncoderCacheTable | None = None, block_size: int | None = None) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.image_token_id = config.model_config.image_token_id
        self.eos_token_ids = frozenset(config.model_config.eos_token_ids)
        block_size = block_size or config.kvcache_block_size
        longest = -(-self.max_model_len // block_size)
        if num_blocks is None:        # a scheduler on its own, with no device to ask: as if memory were no limit
            num_blocks = longest * self.max_num_seqs if config.num_kvcache_blocks < 0 else config.num_kvcache_blocks
        self.block_manager = BlockManager(
            num_blocks, block_size, config.recompute_ratio, enable_prefix_caching=config.enable_prefix_caching,
            image_kv_variants=config.image_kv_variants, reuse_any_ordinal=config.reuse_any_ordinal)
        self.encoder_cache = encoder_cache if encoder_cache is not None else EncoderCacheTable(0, block_size)
        self.images = ImagePlanner(self.encoder_cache)
        self.holds = ImageHolds(self.block_manager, self.encoder_cache)
        self.rows = BatchRows(self.max_num_seqs, longest + 1, config.seed)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []                # oldest first
        self.finished: list[Sequence] = []               # since `take_finished` was last called
        self.in_flight: deque[ScheduledStep] = deque()
        self.stats = EngineStats()

    # ------------------------------------------------------------ requests

    def check(self, seq: Sequence) -> None:
        """Raises ValueError for a request that could never run, naming what it needs and what there is."""
        check_fits(seq, self.block_manager, self.max_model_len)

    def check_images(self, seq: Sequence) -> None:
        """Raises ValueError naming the first image that came without pixels while what it needs is not cached."""
        if (missing := self.holds.missing(seq)) is not None:
            raise ValueError(missing)

    def add(self, seq: Sequence) -> None:
        """Queues a request; raises ValueError if it could never run."""
        self.check(seq)
        self.check_images(seq)
        room = self.max_model_len - seq.num_prompt_tokens
        params = seq.sampling_params
        seq.token_limit = seq.num_prompt_tokens + (room if params.max_tokens is None else min(params.max_tokens, room))
        seq.seed = self.rows.draw_seed() if params.seed is None else params.seed
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        seq.stop_ids = ends.union(params.stop_token_ids or ())
        self.holds.take(seq)
        self.waiting.append(seq)

    def abort(self, seq_id: int) -> bool:
        """Ends a request with reason "abort", once its pending id is here; False if there is none of that seq_id."""
        seq = next((s for s in (*self.running, *self.waiting) if s.seq_id == seq_id and not s.abort_requested), None)
        if seq is not None and seq.num_pending:
            seq.abort_requested = True
        elif seq is not None:
            self.finish(seq, "abort")
        return seq is not None

    def finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """Takes a waiting or running sequence out, with all that it holds."""
        if seq.status is SequenceStatus.RUNNING:
            self._stop_running(seq)
        else:
            self.waiting.remove(seq)
        self.holds.give(seq)
        seq.status, seq.finish_reason, seq.error = SequenceStatus.FINISHED, reason, error
        self.finished.append(seq)

    def fail(self, seq: Sequence, error: str) -> None:
        """Ends a sequence whose numbers went wrong; nothing it computed is kept for others."""
        self.block_manager.forget(seq.block_table)
        self.finish(seq, "error", error)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished = self.finished, []
        return finished

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    # ------------------------------------------------------------ one step

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The sequences with a span in the next step, and whether any of the spans computes prompt tokens.

        The list is empty if nothing can run before a step in flight is done; with none in flight, if nothing waits.
        """
        step = ScheduledStep()
        if self._schedule_running(step):
            self._schedule_waiting(step)
        if step.entries:
            self.in_flight.append(step)
        return step.seqs, step.is_prefill

    def _schedule_running(self, step: ScheduledStep) -> bool:
        """Spans of running sequences; False if there were too few blocks for them.

        A sequence gives its blocks up only when all its ids are here. One that must, while a step of it is in flight,
        is left out of this step so that it can before the next, and the others do not wait for it."""
        decodes, prefills = decodes_and_prefills(self.running)
        leaving: list[Sequence] = []        # the youngest
        num_coming, enough = 0, True        # blocks of theirs that nobody waits for yet
        for seq in decodes + prefills:
            if step.num_tokens == self.max_num_batched_tokens:
                break
            waits = seq in leaving
            while not waits and seq.status is SequenceStatus.RUNNING and self._lacks_blocks(seq):
                enough = False
                if self._drop_youngest_hold():
                    continue
                if num_coming == 0:
                    youngest = self.running[-1 - len(leaving)]      # the sequence itself, if all others leave
                    if not youngest.is_in_flight:
                        self.requeue(youngest)
                        self.stats.preemptions += 1
                        continue
                    leaving.append(youngest)
                    num_coming = len(youngest.block_table)
                num_coming, waits = num_coming - 1, True
            if not waits and seq.status is SequenceStatus.RUNNING:
                self._add_spans(step, seq)
        return enough

    def _lacks_blocks(self, seq: Sequence) -> bool:
        """Whether a running sequence has not, and cannot get, blocks for all its tokens."""
        lacks = seq.num_tokens > len(seq.block_table) * self.block_manager.block_size
        if lacks and self.block_manager.can_append(seq, seq.num_tokens):
            self.block_manager.append(seq, seq.num_tokens)
            self.rows.sync_blocks(seq)
            return False
        return lacks

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        held: list[Sequence] = []
        while self.waiting and step.num_tokens < self.max_num_batched_tokens and self.rows.free:
            seq = self.waiting[0]
            if waits_for_image(seq, self.running, self.block_manager):
                held.append(self.waiting.popleft())
                continue
            if (missing := self.holds.missing(seq)) is not None:
                self.finish(seq, "error", missing)
                continue
            if not self.holds.can_allocate(seq):
                if self.running or not self._drop_youngest_hold(seq):
                    break
                continue
            self.waiting.popleft()
            self._admit(seq)
            self._add_spans(step, seq)
        self.waiting.extendleft(reversed(held))

    def _admit(self, seq: Sequence) -> None:
        self.block_manager.allocate(seq)
        if self.image_token_id is not None:
            self.block_manager.try_partial_recompute(seq, self.image_token_id)
        self.holds.keep_rows(seq)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda s: s.seq_id)
        self.rows.take(seq)
        if seq.usage is None:
            seq.usage = self.block_manager.usage_of(seq)
            self.stats.count_admission(seq.usage)

    def _add_spans(self, step: ScheduledStep, seq: Sequence) -> None:
        """Plans the next spans of a sequence: as many uncomputed rows as the step has room for."""
        start, num_prompt = seq.num_planned, seq.num_prompt_tokens
        token_index = len(seq.token_ids) + seq.num_pending - num_prompt
        if token_index > 0 and start + 1 == num_prompt + token_index:      # a decode: one row, no image
            step.entries.append(ScheduledSeq(seq, [(start, start + 1)], start + 1, True, token_index, seq.resets_row))
            step.num_tokens += 1
            seq.num_planned, seq.resets_row = start + 1, False
            seq.num_pending += 1
            return
        spans, end = take_rows(start, seq.num_tokens, seq.reuse.skips(0) if seq.reuse else [],
                               self.max_num_batched_tokens - step.num_tokens)
        if seq.reuse and not seq.reuse.copies_planned:
            step.copies += seq.reuse.copies
            seq.reuse.copies_planned = True
        self.images.plan(step, seq, spans)
        samples = end == seq.num_tokens
        step.entries.append(ScheduledSeq(seq, spans, end, samples, token_index, seq.resets_row))
        seq.resets_row &= not samples
        step.num_tokens += sum(b - a for a, b in spans)
        step.is_prefill |= spans[0][0] < num_prompt
        seq.num_planned = end
        seq.num_pending += samples

    def requeue(self, seq: Sequence) -> None:
        """Back to its place in the queue without KV; it will be recomputed, prompt and generated tokens alike."""
        self._stop_running(seq)
        self.holds.keep_rows(seq)
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=lambda s: s.seq_id)

    def _drop_youngest_hold(self, head: Sequence | None = None) -> bool:
        """Ends the youngest waiting sequence that pins blocks, or would have to as `head`, so that others can have
        them; False if there is none."""
        seq = next((seq for seq in reversed(self.waiting) if seq.held_blocks or seq is head), None)
        if seq is not None:
            names = [image.caller_hash for image in seq.images if image.pixels is None]
            self.finish(seq, "error", f"the KV of images {names}, which came without pixel_values, had to make room: "
                                      f"pass their pixel_values, or give the pool more memory")
        return seq is not None

    def _stop_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.rows.give(seq)
        self.block_manager.deallocate(seq)

    # ------------------------------------------------------------ results

    def postprocess(self, seqs: list[Sequence], token_ids: SequenceOf[int]) -> None:
        """Takes in the oldest step's result: one id per sequence, ignored where its last token was not computed."""
        step = self.in_flight.popleft()
        assert step.seqs == seqs
        self.images.commit(step)
        self.stats.computed_tokens += step.num_tokens
        block_size = self.block_manager.block_size
        for entry, token_id in zip(step.entries, token_ids):
            seq = entry.seq
            if seq.status is not SequenceStatus.RUNNING:
                continue
            seq.num_computed = entry.end
            if entry.end >= (seq.num_published + 1) * block_size:
                self.block_manager.publish(seq)
            if seq.images:
                self._take_in_images(seq, entry)
            if entry.samples:
                seq.num_pending -= 1
                seq.append_token(int(token_id))
                if token_id in seq.stop_ids or len(seq.token_ids) == seq.token_limit or seq.abort_requested:
                    self._finish_if_done(seq)

    def abandon_steps(self) -> None:
        """Undoes the planning of all steps in flight; their sequences can run again, or end where that was asked."""
        while self.in_flight:
            step = self.in_flight.pop()         # the newest first: it may read what an older one was to write
            self.images.abandon(step)
            for seq in step.seqs:
                seq.num_planned, seq.num_pending, seq.resets_row = seq.num_computed, 0, True
                if seq.reuse is not None and seq.reuse.pinned:
                    seq.reuse.copies_planned = False
                if seq.abort_requested and not seq.is_finished:
                    self.finish(seq, "abort")

    def _take_in_images(self, seq: Sequence, entry: ScheduledSeq) -> None:
        """Offers every image whose rows are now all there, and all computed in full, to the image-KV table, and lets go
        what was held for the step."""
        self.block_manager.release_sources(seq)
        if entry.samples:
            self.holds.give(seq)
        if len(seq.stored_images) == len(seq.images):
            return
        for index, image in enumerate(seq.images):
            if index in seq.stored_images or image.stop > seq.num_computed:
                continue
            if seq.is_computed_in_full(index):
                self.block_manager.store_image_kv(seq, [index])
            seq.stored_images.add(index)

    def _finish_if_done(self, seq: Sequence) -> None:
        if seq.token_ids[-1] in seq.stop_ids and seq.num_completion_tokens > seq.sampling_params.min_tokens:
            self.finish(seq, "stop")
        elif len(seq.token_ids) == seq.token_limit:
            self.finish(seq, "length")
        elif seq.abort_requested:
            self.finish(seq, "abort")

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks and sequences disagree; holds between any two steps."""
        self.block_manager.check_integrity([*self.running, *self.waiting])
        assert all(seq.num_computed <= seq.num_planned <= seq.num_tokens for seq in self.running)
        assert len(self.rows.free) + len(self.running) == self.max_num_seqs
