"""Images of a step through the vision tower, several in one call, and the time that each request's took."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.parallel import ALONE, TensorParallel
from nanovllm.plan import ImageEncode


class EncodesImages(Protocol):
    """A vision-language model, as far as its tower goes."""

    @property
    def pixel_dtype(self) -> torch.dtype:
        """What the tower casts patches to."""
        ...

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        ...

    def encode_images(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Rows `[merged rows, hidden]` of patches `[patches, patch_dim]` of several grids (t, h, w)."""
        ...


class DeviceTimer:
    """Seconds from its making to `stop` on the device's own clock; on a GPU neither waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self.times: list[float] = []
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self.events is not None:
            self.events[which].record()
        else:
            self.times.append(perf_counter())

    def seconds(self) -> float:
        """The time between; to be asked once the device has come past `stop`."""
        if self.events is not None:
            return self.events[0].elapsed_time(self.events[1]) / 1000
        return self.times[1] - self.times[0]


@dataclass
class EncodedImages:
    """Rows of the images of one step, and the timers of the calls that made them."""

    rows: list[Tensor] = field(default_factory=list)      # [rows of the image, hidden] each, in the order asked for
    calls: list[tuple[DeviceTimer, Counter[int]]] = field(default_factory=list)     # patches by seq_id

    def seconds_by_seq(self) -> dict[int, float]:
        """Seconds of vision encoding by seq_id; a call that several share is divided by patches."""
        seconds: dict[int, float] = defaultdict(float)
        for timer, patches in self.calls:
            for seq_id, count in patches.items():
                seconds[seq_id] += timer.seconds() * count / patches.total()
        return dict(seconds)


def encode_images(model: EncodesImages, encodes: Sequence[ImageEncode], max_patches: int,
                  device: torch.device, parallel: TensorParallel = ALONE) -> EncodedImages:
    """Encodes images and videos, as many in one call as have `max_patches` patches together, or one larger alone.

    parallel: the ranks that encode them together; rank 0 has the pixels, and sends them from device to device.
    """
    encoded = EncodedImages()
    for group in _groups(encodes, max_patches):
        timer = DeviceTimer(device)
        if parallel.rank:
            shape = sum(map(_num_patches, group)), model.patch_dim
            patches = torch.empty(shape, dtype=model.pixel_dtype, device=device)
        else:
            patches = _to_device([torch.as_tensor(encode.pixels) for encode in group], model.pixel_dtype, device)
        patches = parallel.broadcast(patches.contiguous())
        rows = model.encode_images(patches, [encode.grid for encode in group])
        timer.stop()
        merged = sum(map(_num_patches, group)) // len(rows)      # patches of one row
        encoded.rows += rows.split([_num_patches(encode) // merged for encode in group])
        encoded.calls.append((timer, _shares(group)))
    return encoded


def encode_spread_images(model: EncodesImages, encodes: Sequence[ImageEncode], max_patches: int, merge: int,
                         like: Tensor, parallel: TensorParallel) -> EncodedImages:
    """As `encode_images`, each image on one rank only, which sends its rows to all the others.

    merge: patches of a row's side; like: a tensor `[any, hidden]` of the rows' dtype and device.
    """
    timer = DeviceTimer(like.device)
    owners = image_owners(encodes, parallel.size)
    mine = [encode for encode, owner in zip(encodes, owners) if owner == parallel.rank]
    done = iter(encode_images(model, mine, max_patches, like.device).rows)
    rows = [next(done).contiguous() if owner == parallel.rank
            else like.new_empty(_num_patches(encode) // merge**2, like.shape[1])
            for encode, owner in zip(encodes, owners)]
    for each, owner in zip(rows, owners):
        parallel.broadcast(each, owner)
    timer.stop()
    return EncodedImages(rows, [(timer, _shares(encodes))])


def image_owners(encodes: Sequence[ImageEncode], size: int) -> list[int]:
    """The rank of each image: largest first, each to the rank with the fewest patches so far."""
    owners, loads = [0] * len(encodes), [0] * size
    for index in sorted(range(len(encodes)), key=lambda i: -_num_patches(encodes[i])):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += _num_patches(encodes[index])
    return owners


def _shares(encodes: Sequence[ImageEncode]) -> Counter[int]:
    """Patches by seq_id."""
    shares: Counter[int] = Counter()
    for encode in encodes:
        shares[encode.seq_id] += _num_patches(encode)
    return shares


def _to_device(pixels: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All pixels as one tensor [patches, patch_dim]; to a GPU they travel in `dtype`, from pinned memory."""
    if device.type == "cpu":
        return torch.cat([each.to(dtype) for each in pixels]) if len(pixels) > 1 else pixels[0].to(dtype)
    staged = torch.empty(sum(map(len, pixels)), pixels[0].shape[1], dtype=dtype, pin_memory=True)
    for part, each in zip(staged.split([len(each) for each in pixels]), pixels):
        part.copy_(each)
    return staged.to(device, non_blocking=True)


def _num_patches(encode: ImageEncode) -> int:
    t, h, w = encode.grid
    return t * h * w


def _groups(encodes: Sequence[ImageEncode], max_patches: int) -> Iterator[list[ImageEncode]]:
    group: list[ImageEncode] = []
    total = 0
    for encode in encodes:
        if group and total + _num_patches(encode) > max_patches:
            yield group
            group, total = [], 0
        group.append(encode)
        total += _num_patches(encode)
    if group:
        yield group
