"""Who may enter: a request that could never run is refused, one whose image is being computed for another waits."""
from __future__ import annotations

from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


def check_fits(seq: Sequence, manager: BlockManager, max_model_len: int) -> None:
    """Raises ValueError, naming what the request needs and what there is, if it could not run even alone."""
    n, room = seq.num_prompt_tokens, max_model_len - seq.num_prompt_tokens
    if n == 0:
        raise ValueError("the prompt has no tokens: give at least one")
    if room < 1:
        raise ValueError(f"the prompt has {n} tokens but max_model_len is {max_model_len}, which leaves none to "
                         f"generate: shorten it to {max_model_len - 1} or raise max_model_len")
    asked = seq.sampling_params.max_tokens
    max_tokens = room if asked is None else min(asked, room)
    needed = manager.num_blocks_for(n + max_tokens - 1)        # the last token's KV is never written
    if needed > manager.num_blocks:
        raise ValueError(f"the request needs {needed} KV blocks ({n} prompt + {max_tokens} new tokens) but the pool "
                         f"has {manager.num_blocks}: shorten it, lower max_tokens or give the pool more memory")


def waits_for_image(seq: Sequence, running: Iterable[Sequence], manager: BlockManager) -> bool:
    """Whether a running sequence is computing, in full, an image that this one could then reuse."""
    if not seq.images or manager.ratios_of(seq) is None:
        return False
    coming = {(image.kv_key, index) for other in running for index, image in enumerate(other.images)
              if image.stop > other.num_computed and not (other.reuse and index in other.reuse.images)}
    return any((image.kv_key, index) in coming and manager.find_reusable(seq, index) is None
               for index, image in enumerate(seq.images))
