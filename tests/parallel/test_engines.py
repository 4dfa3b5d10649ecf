"""Several engines at once, and long lives of one, on two ranks."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.outputs import RequestOutput
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import assert_idle, greedy, make_llm, run
from tests.prompts import Prompt, picture, prompt, text

ROOT = Path(__file__).parent.parent.parent
# No main guard, and nothing set that would keep engines apart.
PROGRAM = """
from nanovllm import LLM, SamplingParams
params = SamplingParams(max_tokens=5, top_k=1, ignore_eos=True)
engines = [LLM({folder!r}, device="cpu", tensor_parallel_size=2, kvcache_memory_gb=0.05) for _ in range(2)]
for llm in engines:
    print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("model"), vision=dict(num_heads=2, hidden_size=32))


def test_engines_started_at_once_do_not_meet(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(folder=str(folder))], stdout=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as program, \
            make_llm(folder, tensor_parallel_size=2) as llm:
        expected = tokens(run(llm, [prompt([5, 6, 7])], greedy(5)))
        assert program.communicate(timeout=60)[0] == f"{expected[0]}\n" * 2


def test_ranks_follow_an_encoder_cache_that_drops_images(folder: Path) -> None:
    """30 images through room for about 5, every fourth request refused; then the first ones come again."""
    options = dict(block_size=16, num_kvcache_blocks=40, max_model_len=96)
    prompts = [prompt(text(3, i), picture(112, 112, i), text(4, i)) for i in range(30)]
    # KV is split and encoder rows are not, so the same ratio of bytes is fewer rows beside the KV blocks of a rank.
    with make_llm(folder, encoder_cache_ratio=0.042, **options) as alone, \
            make_llm(folder, encoder_cache_ratio=0.08, tensor_parallel_size=2, **options) as llm:
        assert llm.runner.encoder_num_blocks == alone.runner.encoder_num_blocks == 5
        for start in range(0, 30, 6):
            check_same(alone, llm, prompts[start:start + 6])
        check_same(alone, llm, prompts[:6] + prompts[27:])
        assert llm.stats()["encoder_misses"] == alone.stats()["encoder_misses"] > 30


def check_same(alone: LLM, llm: LLM, prompts: list[Prompt]) -> None:
    for index, each in enumerate(prompts):
        if index % 4 == 3:
            for engine in (alone, llm):
                with pytest.raises(ValueError, match="placeholder|image"):
                    engine.add_request(each.token_ids[:-8], greedy(3), each.mm_inputs)
    assert tokens(run(alone, prompts, greedy(4))) == tokens(run(llm, prompts, greedy(4)))
    assert_idle(llm)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]
