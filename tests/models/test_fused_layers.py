"""Models whose layers run on Triton kernels, in its interpreter, against the same ones in plain torch."""
from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch

from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.interpreted import run_interpreted
from tests.paged import Pages, Span, new_cache, run_spans


@torch.inference_mode()
def check_models() -> None:
    from nanovllm.attention.torch_backend import TorchBackend
    from nanovllm.attention.triton_backend import TritonBackend
    from nanovllm.model_config import ModelConfig
    from nanovllm.models.registry import build_model
    from nanovllm.models.weights import load_weights

    lengths = 9, 4
    steps: list[list[Span]] = [[(0, 0, 7)], [(0, 7, 8), (1, 0, 3)], [(0, 8, 9), (1, 3, 4)]]     # 7, 4 and 2 rows
    for number, make in enumerate((make_qwen3, make_qwen2_5_vl)):
        results = []
        with tempfile.TemporaryDirectory() as folder:
            path = make(Path(folder), num_hidden_layers=2)
            config = ModelConfig.from_folder(path)
            for backend in (TorchBackend(), TritonBackend(torch.device("cpu"))):
                model = build_model(config, backend, torch.float32, "cpu")
                load_weights(model, path)
                pages = Pages(lengths, 16, random.Random(0))
                ids = [torch.arange(length) + 5 for length in lengths]
                positions = [torch.arange(length).expand(1 if number == 0 else 3, -1) for length in lengths]
                results.append(torch.cat(run_spans(model, [model.embed(x) for x in ids], positions, steps, pages,
                                                   new_cache(model, pages).zero_())))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)


def test_fused_layers_equal_plain_ones():
    run_interpreted(__name__, "check_models")
