"""One request on its way through the engine: its tokens, its images, and how far its KV has come."""
from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.image.items import ImageItem
from nanovllm.metrics import Usage
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.image_reuse import ReusePlan
    from nanovllm.engine.intake import Guess
    from nanovllm.engine.prefix_tree import PrefixNode

Range = tuple[int, int]        # [start, stop) of token indices in one sequence


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt, what has been generated for it, and where its KV lies.

    Tokens are counted by three marks, `num_computed <= num_planned <= num_tokens`: KV that the host has seen written,
    KV that steps handed to the device will have written, and all tokens, those included whose ids such steps are yet to
    bring (`num_pending`, at most one). Blocks cover at least `num_planned`.
    """

    _ids = count()

    def __init__(self, token_ids: SequenceOf[int] | NDArray[np.int64], sampling_params: SamplingParams,
                 mm_inputs: Any = None, image_hashes: SequenceOf[Hashable] | None = None, *,
                 images: list[ImageItem] | None = None, positions: NDArray[np.int64] | None = None,
                 position_delta: int = 0) -> None:
        self.seq_id = next(Sequence._ids)
        self.status = SequenceStatus.WAITING
        self.prompt_ids = np.asarray(token_ids, np.int32)
        self.token_ids: list[int] = self.prompt_ids.tolist()
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling_params = sampling_params
        self.token_limit = 0                              # prompt and generated tokens at most; set when it is queued
        self.seed = 0                                     # of its random numbers; the scheduler draws one if not given
        self.stop_ids: frozenset[int] = frozenset()       # ids that end it; the scheduler knows the model's own
        self.usage: Usage | None = None                   # set at the first admission
        self.finish_reason: str | None = None
        self.error: str | None = None

        self.mm_inputs = mm_inputs
        self.images = images or []
        self.image_hashes = list(image_hashes or [image.key for image in self.images])
        self.guesses: list[Guess] = []                    # keys of its images that are still to be confirmed
        self.positions = positions                        # [3, prompt tokens], None: 0, 1, 2, ...
        self.position_delta = position_delta              # rotary position minus token index, behind the prompt

        self.row = -1                                     # batch row, held while running
        self.resets_row = True                            # the sampler has yet to be told what this one holds
        self.block_table: list[int] = []
        self.num_planned = 0
        self.num_computed = 0
        self.num_pending = 0
        self.abort_requested = False                      # to be ended when its pending id has come
        self.num_cached_tokens = 0                        # taken from the prefix cache at the last admission
        self.num_published = 0                            # blocks whose keys are in the prefix cache
        self.prefix_node: PrefixNode | None = None        # where the published blocks end in the prefix tree
        self.approximate: Range | None = None             # rows from blocks of a ratio's namespace, none of them clean
        self.reuse: ReusePlan | None = None               # image rows taken from the image-KV table
        self.stored_images: set[int] = set()              # indices of images offered to the image-KV table
        self.held_blocks: list[int] = []                  # pinned while it waits, if it came without pixels
        self.held_rows: list[Hashable] = []               # encoder cache keys, pinned until its prompt is computed
        self.block_bytes: list[bytes] = []                # ids of each full block, the content that prefix keys hold

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def is_in_flight(self) -> bool:
        """Whether a step that has not been taken in computes some of its tokens."""
        return self.num_planned > self.num_computed or self.num_pending > 0

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens:]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def id_bytes(self, start: int, stop: int) -> bytes:
        """Ids of tokens [start, stop), int32 each."""
        if stop <= self.num_prompt_tokens:
            return self.prompt_ids[start:stop].tobytes()
        return np.array(self.token_ids[start:stop], np.int32).tobytes()

    # ------------------------------------------------------------ images

    @property
    def images_known(self) -> bool:
        """Whether every image's place in the prompt is known; without it no block may be keyed."""
        return len(self.images) == len(self.image_hashes)

    def find_image_token_range(self, image_token_id: int) -> None:
        """Finds each image's run of placeholders; raises ValueError if there is not one run per image hash."""
        if self.images_known:
            return
        is_pad = self.prompt_ids == image_token_id
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_pad, [False]))))
        runs = edges.reshape(-1, 2).tolist()
        if len(runs) != len(self.image_hashes):
            raise ValueError(f"{len(self.image_hashes)} image hashes for {len(runs)} runs of placeholder "
                             f"{image_token_id}: give one hash for each image of the prompt")
        self.images = [ImageItem(key=key, kv_key=key, start=start, stop=stop, grid=(1, 2, 2 * (stop - start)),
                                 is_video=False, pixels=None)
                       for key, (start, stop) in zip(self.image_hashes, runs)]

    @property
    def image_token_range(self) -> Range | None:
        """[start, stop) of the first image; None while unknown."""
        return (self.images[0].start, self.images[0].stop) if self.images else None

    @property
    def num_recompute_tokens(self) -> int:
        """Leading rows of reused images that are computed afresh."""
        return self.reuse.num_recomputed if self.reuse else 0

    @property
    def num_reused_tokens(self) -> int:
        return self.reuse.num_reused if self.reuse else 0

    def position_of(self, index: int) -> int:
        """Rotary position of token `index` on the time axis."""
        if index >= self.num_prompt_tokens:
            return index + self.position_delta
        return index if self.positions is None else int(self.positions[0, index])

    @property
    def approximate_from(self) -> int | None:
        """The first row that is not what full prefill gives; None: all rows are exact."""
        hit = [self.approximate[0]] if self.approximate else []
        reused = [self.reuse.first_row] if self.reuse else []
        return min(hit + reused, default=None)

    def is_computed_in_full(self, index: int) -> bool:
        """Whether no row of image `index` is reused KV, its own or that of an approximate prefix hit."""
        image, hit = self.images[index], self.approximate
        reused = self.reuse is not None and index in self.reuse.images
        return not reused and (hit is None or hit[1] <= image.start or image.stop <= hit[0])

    # ------------------------------------------------------------ KV

    def forget_kv(self) -> None:
        """Back to a sequence without KV; its tokens, positions and image ranges stay."""
        self.block_table = []
        self.num_planned = self.num_computed = self.num_published = 0
        self.prefix_node = self.approximate = self.reuse = None
        self.stored_images = set()


def decodes_and_prefills(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Sequences with one token to compute, and those with more; none whose last token is on its way."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for seq in running:
        if seq.num_tokens < seq.token_limit and not seq.abort_requested:
            (decodes if seq.num_tokens - seq.num_planned == 1 else prefills).append(seq)
    return decodes, prefills
