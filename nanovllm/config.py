"""The options of one engine: flat, checked, and resolved against the model folder they name."""
from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.checks import check_bool, check_choice, check_int, check_number
from nanovllm.model_config import DTYPES, ModelConfig
from nanovllm.reuse_file import read_model_ratios
from nanovllm.sampling_params import check_seed, parse_recompute_ratio

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG_FILES = ["*.json", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Config:
    """Every option of an engine; immutable, and `dataclasses.replace` makes a changed one.

    Raises TypeError for an option that does not exist, ValueError naming the value and what to give instead for one
    out of range, and ValueError or FileNotFoundError naming the path for a model that cannot be read.
    """

    model: str                              # a folder, or a hub id such as "Qwen/Qwen3-0.6B"; resolved to the folder
    _: KW_ONLY
    max_num_batched_tokens: int = 16384     # tokens computed in one step at most
    max_num_seqs: int = 512                 # requests that run at once at most
    # Prompt and generated tokens of a request together. None: 4096, or 32768 for a vision-language model. Never more
    # than the model's max_position_embeddings.
    max_model_len: int = None  # type: ignore[assignment]    # resolved to an int
    gpu_memory_utilization: float = 0.9     # share of the device's memory this engine may fill
    tensor_parallel_size: int = 1           # ranks that share the model: GPUs, or processes on the CPU
    vision_parallel: str = "split"          # among ranks: each matrix of the vision tower, or "data": whole images
    enforce_eager: bool = False             # True: no CUDA graphs
    kvcache_block_size: int = 256           # tokens of a KV block
    num_kvcache_blocks: int = -1            # -1: as many as the memory holds
    kvcache_memory_gb: float = 1.0          # GiB of KV pool on the CPU
    encoder_cache_ratio: float = 0.2        # encoder cache / (encoder cache + KV pool), in bytes
    # Share of a reused image's tokens that is computed again: one number, or one per layer; 0: no reuse. A path: read
    # from a file that nanovllm.calibrate wrote; "auto": from the model folder's reuse.json. Resolved to numbers.
    recompute_ratio: float | tuple[float, ...] = 0.0
    reuse_any_ordinal: bool = False         # reuse an image from another place in the order of images, too
    image_kv_variants: int = 4              # entries per image, one per ordinal
    enable_prefix_caching: bool = True
    dtype: str = "auto"                     # of weights and KV: a torch dtype or its name; resolved to the name
    device: str | None = None               # "cuda" or "cpu"; None: cuda where there is one
    load_format: str = "auto"               # "dummy": random weights of the config's sizes
    attention_backend: str = "auto"         # or "flash", "triton" or "torch"; "auto": the fastest there is
    overlap: bool | None = None             # plan the next step while the device runs this one; None: on a GPU
    seed: int | None = None                 # of requests without a seed of their own; None: a new one each time
    model_config: ModelConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        path = resolve_model_path(self.model, with_weights=self.load_format != "dummy")
        for name, value in self._resolved(ModelConfig.from_folder(path)).items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, Any]:
        """The options that need no model folder, checked."""
        counts = {name: check_int(name, getattr(self, name), 1, "a whole number of at least 1")
                  for name in ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "image_kv_variants")}
        flags = {name: check_bool(name, getattr(self, name))
                 for name in ("enforce_eager", "reuse_any_ordinal", "enable_prefix_caching")}
        if check_int("kvcache_block_size", self.kvcache_block_size, 256, "a multiple of 256") % 256:
            raise ValueError(f"kvcache_block_size={self.kvcache_block_size}: give a multiple of 256")
        if self.num_kvcache_blocks != -1:
            check_int("num_kvcache_blocks", self.num_kvcache_blocks, 1, "a number of blocks, or -1 to fill the memory")
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 1, "a whole number of tokens of at least 1, or None")
        dtype = str(self.dtype).removeprefix("torch.")
        check_choice("dtype", dtype, ("auto", *DTYPES))
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        check_choice("attention_backend", self.attention_backend, ("auto", "flash", "triton", "torch"))
        check_choice("vision_parallel", self.vision_parallel, ("split", "data"))
        if self.overlap is not None:
            check_bool("overlap", self.overlap)
        if self.device is not None:
            check_choice("device", self.device, ("cuda", "cpu"))
        return dict(
            **counts, **flags, dtype=dtype, seed=check_seed(self.seed),
            gpu_memory_utilization=check_number("gpu_memory_utilization", self.gpu_memory_utilization,
                                                lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
            kvcache_memory_gb=check_number("kvcache_memory_gb", self.kvcache_memory_gb, lambda x: x > 0,
                                           "a number of GiB above 0"),
            encoder_cache_ratio=check_number("encoder_cache_ratio", self.encoder_cache_ratio, lambda x: 0 <= x < 1,
                                             "a number from 0 to below 1"),
            recompute_ratio=self.recompute_ratio if self._asks_the_folder else parse_recompute_ratio(
                self.recompute_ratio))

    @property
    def _asks_the_folder(self) -> bool:
        return isinstance(self.recompute_ratio, str) and self.recompute_ratio == "auto"

    def _resolved(self, model_config: ModelConfig) -> dict[str, Any]:
        """The options that depend on the model."""
        check_ranks(self.tensor_parallel_size, self.vision_parallel, model_config)
        limit = model_config.text.max_position_embeddings
        default = 32768 if model_config.vision is not None else 4096
        ratio = read_model_ratios(model_config.path) if self._asks_the_folder else self.recompute_ratio
        return dict(
            model=model_config.path, model_config=model_config,
            recompute_ratio=parse_recompute_ratio(ratio, model_config.text.num_layers),
            max_model_len=min(default if self.max_model_len is None else self.max_model_len, limit),
            dtype=model_config.dtype if self.dtype == "auto" else self.dtype)


def check_ranks(size: int, vision_parallel: str, model_config: ModelConfig) -> None:
    """Raises ValueError with the numbers if heads cannot be shared out evenly over `size` ranks.

    Query and vision heads are split; KV heads are split, or copied where there are fewer than ranks. Vocabulary and
    feed-forward sizes are padded, so any will do.
    """
    text, vision = model_config.text, model_config.vision

    def problem(ranks: int) -> str | None:
        if text.num_heads % ranks:
            return f"{text.num_heads} attention heads"
        if max(ranks, text.num_kv_heads) % min(ranks, text.num_kv_heads):
            return f"{text.num_kv_heads} key-value heads"
        if vision is not None and vision_parallel == "split" and vision.num_heads % ranks:
            return f"{vision.num_heads} vision heads"
        return None

    if (found := problem(size)) is not None:
        fitting = [ranks for ranks in range(1, text.num_heads + 1) if problem(ranks) is None]
        hint = ", or vision_parallel=\"data\"" if "vision" in found else ""
        raise ValueError(f"tensor_parallel_size={size}: {found} cannot be shared out evenly over {size} ranks; give "
                         f"one of {fitting}{hint}")


def resolve_model_path(model: str, with_weights: bool = True) -> str:
    """The local folder of `model`: itself where it is one, or the hub's snapshot of an id such as "Qwen/Qwen3-0.6B".

    A path that is absolute or begins with "." or "~" never goes to the hub. Without `with_weights` only the small files
    are fetched. Raises FileNotFoundError for a path that is no folder, ValueError for an id that the hub does not give.
    """
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"model={model!r}: give the folder of a model or a hub id such as 'Qwen/Qwen3-0.6B'")
    name = str(model)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if not HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"{name} is not a folder: give the folder of a model or a hub id such as "
                                "'Qwen/Qwen3-0.6B'")
    # Imported here, since a local folder needs no hub.
    from huggingface_hub import snapshot_download

    patterns = CONFIG_FILES + ["*.safetensors"] * with_weights
    try:
        return str(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:          # of many kinds: no network, no such model, no access
        raise ValueError(f"{name} is not a folder here, and the model hub does not give it ({error}): check the name "
                         "and the network, or give the folder of a model") from error
