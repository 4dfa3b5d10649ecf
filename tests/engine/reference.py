"""What the tokens and the KV of a request must be, computed without blocks, chunks, caches or plans."""
from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.image.items import ImageItem
from nanovllm.image.positions import mrope_positions
from nanovllm.sampling_params import SamplingParams
from tests.engine.simulated_device import (
    IMAGE_PAD,
    VIDEO_PAD,
    Position,
    draw,
    embed_image_row,
    embed_text,
    kv_content,
    next_hidden,
    see,
)

NUM_LAYERS = 3
EOS = 7
Contents = list[list[int]]      # [layers][rows]


@dataclass(frozen=True)
class Picture:
    """An image, or a video if `interval` (positions from grid to grid) is given, of `rows` merged rows a grid."""

    pixels: int
    rows: int
    interval: float | None = None
    frames: int = 1
    is_named: bool = False      # its identity is the caller's
    has_pixels: bool = True

    @property
    def num_tokens(self) -> int:
        return self.rows * self.frames


def make_sequence(parts: SequenceOf[int | Picture], params: SamplingParams) -> Sequence:
    """A prompt of token ids and pictures."""
    token_ids: list[int] = []
    images: list[ImageItem] = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        is_video, grid = part.interval is not None, (part.frames, 2, 2 * part.rows)
        key: Hashable = ("caller" if part.is_named else "content", params.cache_salt, part.pixels, grid)
        images.append(ImageItem(
            key=key, kv_key=(key, part.interval) if is_video else key, start=len(token_ids),
            stop=len(token_ids) + part.num_tokens, grid=grid, is_video=is_video,
            pixels=part.pixels if part.has_pixels else None, time_interval=part.interval or 0.0,
            caller_hash=part.pixels if part.is_named else None))
        token_ids += [VIDEO_PAD if is_video else IMAGE_PAD] * part.num_tokens
    if not images:
        return Sequence(token_ids, params)
    positions, delta = mrope_positions(len(token_ids), images, merge_size=2)
    return Sequence(token_ids, params, images=images, positions=positions, position_delta=delta)


def greedy(max_tokens: int = 4, ignore_eos: bool = True, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, top_k=1, **options)


class Reference:
    """The KV that a sequence must have, from its tokens and the rows it was given; without blocks, chunks or plans."""

    def __init__(self, seq: Sequence, given: SequenceOf[dict[int, int]] = ({},) * NUM_LAYERS) -> None:
        self.seq = seq
        self.given = given                            # per layer: content of rows that are not computed there
        self.contents: Contents = [[] for _ in range(NUM_LAYERS)]
        self.seen = [0] * NUM_LAYERS
        self.next_id = -1                             # what is drawn after the rows so far
        self.embeddings = [embed_text(token_id) for token_id in seq.token_ids]
        for image in seq.images:
            rows = [embed_image_row(image.key[2], row) for row in range(image.num_tokens)]
            self.embeddings[image.start:image.stop] = rows

    def __len__(self) -> int:
        return len(self.contents[0])

    @property
    def is_exact(self) -> bool:
        return not any(self.given)

    def position(self, index: int) -> Position:
        seq = self.seq
        if seq.positions is not None and index < seq.num_prompt_tokens:
            return tuple(seq.positions[:, index].tolist())
        return (index + seq.position_delta,) * 3

    def extend(self, stop: int) -> None:
        """Computes rows up to `stop`, at most one of which is behind the known tokens."""
        while len(self) < stop:
            index = len(self)
            if index == len(self.embeddings):
                known = self.seq.token_ids
                self.embeddings.append(embed_text(known[index] if index < len(known) else self.next_id))
            hidden, position = self.embeddings[index], self.position(index)
            for layer in range(NUM_LAYERS):
                content = self.given[layer].get(index)
                content = kv_content(layer, hidden) if content is None else content
                self.contents[layer].append(content)
                self.seen[layer] = see(self.seen[layer], content, position)
                hidden = next_hidden(hidden, self.seen[layer])
            banned = self.seq.stop_ids if index + 1 - self.seq.num_prompt_tokens < self.seq.sampling_params.min_tokens \
                else ()
            self.next_id = draw(hidden, banned)


def solo_tokens(parts: SequenceOf[int | Picture], params: SamplingParams, max_tokens: int) -> list[int]:
    """What full prefill and one decode after the other give."""
    seq = make_sequence(parts, params)
    stop_ids = set() if params.ignore_eos else {EOS}
    reference = Reference(seq)
    while True:
        reference.extend(len(seq))
        seq.append_token(reference.next_id)
        if seq.num_completion_tokens == max_tokens or reference.next_id in stop_ids:
            return seq.completion_token_ids


def prompt(length: int, first: int = 0) -> list[int]:
    """Ids that differ from prompt to prompt from the first on."""
    return [(first + 7 * i + i // 40) % 40 for i in range(length)]


def is_solo(seq: Sequence, parts: list[int]) -> bool:
    """Whether a sequence made the ids that it makes alone."""
    return seq.completion_token_ids == solo_tokens(parts, seq.sampling_params, len(seq.completion_token_ids))
