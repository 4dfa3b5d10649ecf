"""Finds the model that a script runs: a given folder, a published size, the user's own copy, or a small one."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.published import write_published
from tests.checkpoints import make_qwen2_5_vl

VISION_MODEL, TEXT_MODEL = "Qwen2.5-VL-3B-Instruct", "Qwen3-0.6B"
SHAPES_MODEL = Path(__file__).parent.parent / "assets" / "shapes-vl"    # small, and trained: tools/train_shapes_vl.py
DEMO_MAX_PIXELS = 2304 * 28 * 28        # a 16:9 picture of any size becomes at most 64 x 36 tokens


@dataclass(frozen=True)
class ModelFolder:
    """A folder that `LLM` loads, and where its weights come from."""

    path: str
    name: str
    weights: str        # "checkpoint", "dummy" (random, of a published size, not stored) or "demo" (random, small)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LLM` that the folder needs."""
        return {"load_format": "dummy"} if self.weights == "dummy" else {}


@contextmanager
def open_model(model: str | None, size: str | None = None, published: str = VISION_MODEL) -> Iterator[ModelFolder]:
    """The folder `model`; else `size` as `write_published` writes it; else ~/huggingface/`published` where that
    exists; else the demo model. Folders made here are removed at the end of the `with` block."""
    own = Path("~/huggingface", published).expanduser()
    if model is None and size is None and own.is_dir():
        model = str(own)
    if model is not None:
        yield ModelFolder(model, Path(model).name, "checkpoint")
        return
    with TemporaryDirectory(prefix="nanovllm-") as folder:
        if size is not None:
            yield ModelFolder(folder, write_published(size, Path(folder)), "dummy")
        else:
            yield ModelFolder(str(write_demo_model(Path(folder))), "demo", "demo")


def write_demo_model(folder: Path) -> Path:
    """A Qwen2.5-VL of 7 M random float32 parameters, with tokenizer and processor: real in all but what it says."""
    return make_qwen2_5_vl(
        folder, hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=768, max_position_embeddings=32768, max_pixels=DEMO_MAX_PIXELS,
        vision=dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, fullatt_block_indexes=[1]))
