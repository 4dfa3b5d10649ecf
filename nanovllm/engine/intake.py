"""Turns what a caller passes (prompt, images, parameters) into a checked `Sequence`."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.image.hashing import PendingHash, fingerprint, hash_threads
from nanovllm.image.inputs import (
    check_token_ids,
    content_key,
    expand_placeholders,
    identify,
    parse_mm_inputs,
    set_key,
)
from nanovllm.image.items import ImageItem
from nanovllm.image.positions import mrope_positions
from nanovllm.model_config import ModelConfig
from nanovllm.sampling_params import SamplingParams

MIN_GUESS_BYTES = 16 << 20      # of pixels: smaller ones are hashed in less time than it takes to start threads


def build_sequence(prompt: Any, params: SamplingParams, mm_inputs: Mapping[str, Any] | None,
                   model_config: ModelConfig, tokenize: Callable[[str], list[int]]) -> Sequence:
    """A sequence whose images are placed but not yet identified.

    Raises ValueError, naming the value and the remedy, for whatever of the prompt or its images is wrong.
    """
    if isinstance(prompt, str):
        prompt.encode()     # half a surrogate pair, which no tokenizer takes, is a UnicodeEncodeError, a ValueError
        prompt = expand_placeholders(tokenize(prompt), mm_inputs, model_config)
    token_ids = check_token_ids(prompt, model_config.text.vocab_size)
    images = parse_mm_inputs(token_ids, mm_inputs, model_config)
    if not images:
        return Sequence(token_ids, params)
    assert model_config.vision is not None
    positions, delta = mrope_positions(len(token_ids), images, model_config.vision.spatial_merge_size)
    return Sequence(token_ids, params, images=images, positions=positions, position_delta=delta)


@dataclass(frozen=True)
class Guess:
    """An image that is taken for one seen before, of the same fingerprint, while its pixels are hashed."""

    image: ImageItem
    seen: Hashable          # cache salt and fingerprint
    digest: PendingHash


class ImageNames:
    """Which pixels each image name of a caller stands for, and which key large pixels of a fingerprint had last.

    A name's first pixels, or other ones that come with it later, become part of its key: the same name beside other
    pixels is another image, and a name without pixels means the ones last seen. A key that was guessed by a fingerprint
    is good for work on the device, but nothing of that may be published or returned before `confirm`.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity
        self.threads = hash_threads()
        self.fingerprints: OrderedDict[Hashable, int] = OrderedDict()
        self.contents: OrderedDict[Hashable, Hashable] = OrderedDict()      # (salt, fingerprint): key; None: several

    def identify(self, seq: Sequence, may_guess: bool = False) -> float:
        """Sets the keys of the sequence's images, hashing those without a name; returns the seconds that took.

        may_guess: the pixels stay as they are until `confirm`, so those of large images may be hashed meanwhile; not
        beside an image without pixels, since whether what that one needs is cached hangs on the keys before it.
        """
        if not seq.images:
            return 0.0
        start, salt = perf_counter(), seq.sampling_params.cache_salt
        may_guess = may_guess and all(image.pixels is not None for image in seq.images)
        for image in seq.images:
            if may_guess and image.caller_hash is None and num_bytes(image) >= MIN_GUESS_BYTES:
                self._guess(seq, image, (salt, fingerprint(image.pixels, image.grid)))
            else:
                identify(image, salt, self.threads)
            if image.caller_hash is not None:
                image.key = image.kv_key = (image.key, self._fingerprint(image))
        seq.image_hashes = [image.key for image in seq.images]
        return perf_counter() - start

    def confirm(self, seq: Sequence) -> bool:
        """Waits for the hashes of guessed images; False if one is another image: its key is right from now on."""
        guessed = seq.image_hashes
        for guess in seq.guesses:
            key = content_key(guess.image, seq.sampling_params.cache_salt, guess.digest.wait())
            if key != guess.image.key:      # no more guesses where each would cost a step in vain
                self._remember(self.contents, guess.seen, None)
            set_key(guess.image, key)
        seq.guesses, seq.image_hashes = [], [image.key for image in seq.images]
        return seq.image_hashes == guessed

    def _guess(self, seq: Sequence, image: ImageItem, seen: Hashable) -> None:
        if (key := self.contents.get(seen)) is not None:
            self._remember(self.contents, seen, key)
            set_key(image, key)
            seq.guesses.append(Guess(image, seen, PendingHash(image.pixels, image.grid, self.threads)))
            return
        identify(image, seq.sampling_params.cache_salt, self.threads)
        if seen not in self.contents:
            self._remember(self.contents, seen, image.key)

    def _fingerprint(self, image: ImageItem) -> int | None:
        if image.fingerprint is None:
            return self.fingerprints.get(image.key)
        self._remember(self.fingerprints, image.key, image.fingerprint)
        return image.fingerprint

    def _remember(self, known: OrderedDict[Hashable, Any], key: Hashable, value: Hashable) -> None:
        known[key] = value
        known.move_to_end(key)
        if len(known) > self.capacity:
            known.popitem(last=False)


def num_bytes(image: ImageItem) -> int:
    return 0 if image.pixels is None else int(image.pixels.nbytes)


def split_prompts(prompts: Any, params: Any, mm_inputs: Any) -> list[tuple[Any, SamplingParams, Any]]:
    """One (prompt, parameters, images) for each prompt of a `generate` call.

    One string or one flat list of ids is one prompt; parameters may be one for all. Raises ValueError if the numbers
    of prompts, parameters and image inputs differ or one of them is no list.
    """
    if not isinstance(prompts, SequenceOf) and getattr(prompts, "ndim", 0) == 0:
        raise ValueError(f"prompts must be a string, token ids, or a list of those, not {type(prompts).__name__}: "
                         f"{prompts!r:.80}")
    if isinstance(prompts, str) or _is_flat(prompts):
        prompts = [prompts]
        mm_inputs = [mm_inputs] if isinstance(mm_inputs, Mapping) else mm_inputs
    prompts = list(prompts)
    params = SamplingParams() if params is None else params
    params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
    if isinstance(mm_inputs, Mapping):
        raise ValueError(f"mm_inputs is one dict for {len(prompts)} prompts: give a list with one for each")
    if mm_inputs is not None and not isinstance(mm_inputs, (list, tuple)):
        raise ValueError(f"mm_inputs must be None or a list with one dict or None for each prompt, not "
                         f"{type(mm_inputs).__name__}: {mm_inputs!r:.80}")
    mm_inputs = [None] * len(prompts) if mm_inputs is None else list(mm_inputs)
    for name, values in (("sampling_params", params), ("mm_inputs", mm_inputs)):
        if len(values) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(values)} {name}: give one for each prompt")
    return list(zip(prompts, params, mm_inputs))


def _is_flat(prompts: Any) -> bool:
    """Whether `prompts` is one prompt's token ids: an array or tensor of one dimension, or a list that begins with a
    number."""
    if hasattr(prompts, "ndim"):
        return int(prompts.ndim) == 1
    return bool(prompts) and not isinstance(prompts[0], (str, list, tuple)) and not hasattr(prompts[0], "__len__")
