"""Runs the policy rooms on the simulated device and compares every KV slot with the reference after every step."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

from nanovllm.engine.encoder_cache_table import EncoderCacheTable
from nanovllm.engine.image_kv_table import ImageKVEntry
from nanovllm.engine.planner import Planner
from nanovllm.engine.scheduled import ScheduledSeq, ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.metrics import Usage
from nanovllm.sampling_params import SamplingParams
from tests.engine.reference import EOS, NUM_LAYERS, Contents, Picture, Reference, greedy, make_sequence, solo_tokens
from tests.engine.simulated_device import IMAGE_PAD, Device, Row


class Harness:
    """An engine without a model; `overlap` has one step more in flight, as on a GPU."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, encoder_blocks: int = 64, overlap: bool = False,
                 **options: Any) -> None:
        config: Any = SimpleNamespace(**dict(
            max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128, kvcache_block_size=256,
            num_kvcache_blocks=-1, recompute_ratio=0.0, reuse_any_ordinal=False, image_kv_variants=4,
            enable_prefix_caching=True, seed=0,
            model_config=SimpleNamespace(image_token_id=IMAGE_PAD, eos_token_ids=frozenset({EOS}))) | options)
        self.encoder_cache = EncoderCacheTable(encoder_blocks, block_size)
        self.scheduler = Scheduler(config, num_blocks, self.encoder_cache, block_size)
        self.manager = self.scheduler.block_manager
        self.planner = Planner(self.scheduler.rows, block_size, num_axes=3)
        self.device = Device(num_blocks, block_size, NUM_LAYERS, block_size)
        self.overlap = overlap
        self.launched: deque[tuple[ScheduledStep, list[int]]] = deque()
        self.references: dict[int, Reference] = {}           # of the sequences that run, since they were admitted
        self.entries: list[tuple[ImageKVEntry, Contents]] = []     # every image entry there ever was, with its rows
        self.num_steps = 0

    def add(self, parts: SequenceOf[int | Picture], params: SamplingParams | None = None, **options: Any) -> Sequence:
        seq = make_sequence(parts, params or greedy(**options))
        self.scheduler.add(seq)
        return seq

    def generate(self, parts: SequenceOf[int | Picture], **options: Any) -> Sequence:
        """Adds a request and runs until it and all others are done."""
        seq = self.add(parts, **options)
        self.run()
        return seq

    def usage(self, parts: SequenceOf[int | Picture], **options: Any) -> Usage:
        """Where a request's KV came from; one that may reuse nothing has the tokens of a run of its own."""
        seq = self.generate(parts, **options)
        assert seq.usage is not None
        if self._is_exact(seq):
            assert seq.completion_token_ids == solo_tokens(parts, seq.sampling_params, seq.num_completion_tokens)
        return seq.usage

    def shorten_prefixes(self, num_blocks: int) -> None:
        """Forgets the keys of blocks that stand behind so many others; image entries stay."""
        depths = {self.manager.prefixes.root: 0}
        for node in list(self.manager.prefixes):
            depths[node] = depths[node.parent] + 1
            if node.block is not None and depths[node] > num_blocks:
                self.manager.prefixes.forget_block(node.block)

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if self.scheduler.is_finished() and not self.launched:
                break
            self.step()
        self.check_all_returned()

    # ------------------------------------------------------------ a step

    def step(self) -> list[Sequence]:
        """One step as the engine does it; returns the scheduled sequences."""
        waiting = bool(self.scheduler.waiting)
        seqs, is_prefill = self.scheduler.schedule()
        if seqs:
            self._launch(is_prefill)
        elif not self.launched:
            assert self.scheduler.is_finished() or (waiting and self.scheduler.finished), "an empty step"
        if self.launched and not (seqs and self.overlap and len(self.launched) == 1):
            self._take_in()
        self.check()
        return seqs

    def fail_step(self, while_running: Callable[[], None] = lambda: None) -> None:
        """A step whose execution raises, after `while_running`."""
        seqs, _ = self.scheduler.schedule()
        if seqs:
            self.device.spoil(self.planner.plan(self.scheduler.in_flight[-1]))
        while_running()
        self.launched.clear()
        self.scheduler.abandon_steps()
        self.check()

    def _launch(self, is_prefill: bool) -> None:
        step = self.scheduler.in_flight[-1]
        plan = self.planner.plan(step)
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        starts = [entry.spans[0][0] < entry.seq.num_prompt_tokens for entry in step.entries]
        assert is_prefill == any(starts)
        drawn = iter(self.device.execute(plan))
        for entry in step.entries:
            if entry.resets_row:
                self.references[entry.seq.seq_id] = Reference(entry.seq, self._given(entry.seq))
            self._compare(entry)
        ids = [next(drawn) if entry.samples else -1 for entry in step.entries]
        for entry, token_id in zip(step.entries, ids):
            assert not entry.samples or token_id == self.references[entry.seq.seq_id].next_id
        self.launched.append((step, ids))
        self.num_steps += 1

    def _take_in(self) -> None:
        step, ids = self.launched.popleft()
        self.scheduler.postprocess(step.seqs, ids)
        self._record_entries(step)

    def _rows(self, seq: Sequence, layer: int, start: int, stop: int) -> list[Row]:
        return [self.device.kv[layer][self.device.slot(seq.block_table, i)] for i in range(start, stop)]

    def _compare(self, entry: ScheduledSeq) -> None:
        """Every row up to the end of the step's spans is what it must be."""
        reference = self.references[entry.seq.seq_id]
        reference.extend(entry.end)
        for layer in range(NUM_LAYERS):
            for index, row in enumerate(self._rows(entry.seq, layer, 0, entry.end)):
                assert row.content == reference.contents[layer][index], f"layer {layer}, row {index}: wrong KV"
                assert row.position == reference.position(index), f"layer {layer}, row {index}: wrong rotation"
                assert row.token == reference.embeddings[index], f"layer {layer}, row {index}: KV of another token"

    # ------------------------------------------------------------ reuse

    def _given(self, seq: Sequence) -> list[dict[int, int]]:
        """Contents of the rows that a sequence just admitted took from approximate blocks and from images."""
        given: list[dict[int, int]] = [{} for _ in range(NUM_LAYERS)]
        if self._is_exact(seq):
            assert seq.approximate is None and seq.reuse is None, "a request that reuses nothing"
        if seq.approximate:
            for layer in range(NUM_LAYERS):
                rows = self._rows(seq, layer, *seq.approximate)
                given[layer].update(enumerate((row.content for row in rows), seq.approximate[0]))
        for index, rows_of_image in (seq.reuse.images if seq.reuse else {}).items():
            taken = [rows_of_image.skipped(seq.reuse.tier_at(layer)) for layer in range(NUM_LAYERS)]
            image = seq.images[index]
            contents = self._entry_contents(seq, index, taken)
            for layer, (start, stop) in enumerate(taken):
                given[layer].update({i: contents[layer][i - image.start] for i in range(start, stop)})
        return given

    def _is_exact(self, seq: Sequence) -> bool:
        ratio = seq.sampling_params.recompute_ratio
        return (self.manager.recompute_ratio if ratio is None else ratio) in (0.0, 1.0)

    def _entry_contents(self, seq: Sequence, index: int, taken: list[tuple[int, int]]) -> Contents:
        """The rows of the entry that an image was filled from: of the same image, from an ordinal that is allowed."""
        image, own = seq.images[index], seq.sampling_params.reuse_any_ordinal
        any_ordinal = self.manager.reuse_any_ordinal if own is None else own
        for entry, contents in self.entries:
            if entry.key == image.kv_key and (any_ordinal or entry.ordinal == index) and all(
                    [row.content for row in self._rows(seq, layer, a, b)]
                    == contents[layer][a - image.start:b - image.start]
                    for layer, (a, b) in enumerate(taken) if a < b):
                return contents
        raise AssertionError(f"image {index}: its rows are those of no entry it may be reused from")

    def live_entries(self) -> list[ImageKVEntry]:
        return [entry for variants in self.manager.image_kv_cache.values() for entry in variants.values()]

    def _read_entry(self, entry: ImageKVEntry) -> list[list[Row]]:
        return [[rows[self.device.slot(entry.block_table, i)] for i in range(entry.img_start, entry.img_end)]
                for rows in self.device.kv]

    def _record_entries(self, step: ScheduledStep) -> None:
        known = {id(entry) for entry, _ in self.entries}
        for entry in self.live_entries():
            if id(entry) not in known:
                rows = self._read_entry(entry)
                assert not any(row.is_copy for layer in rows for row in layer), "not the clean copy"
                self._check_origin(entry, step)
                self.entries.append((entry, [[row.content for row in layer] for layer in rows]))

    def _check_origin(self, entry: ImageKVEntry, step: ScheduledStep) -> None:
        """An entry is of an image that one of the step's sequences computed in full, and says what stood before."""
        origins = [seq for seq in step.seqs if entry.ordinal < len(seq.images)
                   and (image := seq.images[entry.ordinal]).kv_key == entry.key and image.start == entry.img_start]
        for reference in (self.references[seq.seq_id] for seq in origins):
            rows = range(entry.img_start, entry.img_end)
            if not any(i in given for given in reference.given for i in rows):
                is_exact = not any(i < entry.img_start for given in reference.given for i in given)
                if entry.exact == is_exact and entry.position == reference.position(entry.img_start)[0]:
                    return
        raise AssertionError("an entry that nobody computed in full, or a false claim of exactness")

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Holds between any two steps."""
        self.scheduler.check_integrity()
        self.encoder_cache.check_integrity()
        for seqs in (self.scheduler.running, self.scheduler.waiting):
            assert list(seqs) == sorted(seqs, key=lambda seq: seq.seq_id), "not oldest first"
        recorded = {id(entry): contents for entry, contents in self.entries}
        for entry in self.live_entries():
            contents = [[row.content for row in layer] for layer in self._read_entry(entry)]
            assert contents == recorded[id(entry)], "an entry's rows were overwritten"

    def check_all_returned(self) -> None:
        """Holds when no request is left."""
        assert self.scheduler.is_finished() and not self.launched, "the bound on steps was not kept"
        assert all(block.readers == 0 for block in self.manager.pool.blocks)
        assert all(entry.pins == 0 for entry in self.encoder_cache.entries.values())
        assert self.manager.pool.num_available == self.manager.num_blocks
