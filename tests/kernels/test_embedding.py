"""The embedding kernel against plain torch: in Triton's interpreter on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanovllm.runner.cuda_graph import fed_ids
from tests.interpreted import run_interpreted


def check_embed(rows: int, vocab_size: int, size: int, dtype: torch.dtype, device: str) -> None:
    from nanovllm.kernels.embedding import embed

    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(vocab_size, size + 8, generator=generator).to(device, dtype)[:, :size]
    token_ids, last_ids = (torch.randint(vocab_size, (n,), generator=generator).to(device) for n in (rows, 9))
    fed = torch.randint(-1, 9, (rows,), generator=generator).to(device)
    fed[::3] = -1
    last_ids[8] = -7        # of a row that nobody feeds on
    fed[fed == 8] = 7
    assert torch.equal(embed(token_ids, fed, last_ids, weight), F.embedding(fed_ids(token_ids, fed, last_ids), weight))


def check_all_on_cpu() -> None:
    for size in (16, 80, 1024):
        check_embed(11, 30, size, torch.float32, "cpu")
    check_embed(0, 30, 16, torch.float16, "cpu")


def test_interpreted_kernel_equals_the_embedding():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows, vocab_size, size", [(1, 30, 16), (40, 100, 3584), (512, 151936, 1024)])
def test_kernel_equals_the_embedding(rows, vocab_size, size):
    check_embed(rows, vocab_size, size, torch.bfloat16, "cuda")
