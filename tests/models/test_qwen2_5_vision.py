"""The vision tower against transformers, row by row, and its windows against tables worked by hand."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from nanovllm.attention import select_backend
from nanovllm.model_config import ModelConfig, VisionConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.qwen2_5_vision import VisionTower, grid_layout
from nanovllm.models.registry import build_model
from nanovllm.models.weights import init_dummy_weights, load_weights
from tests.checkpoints import make_qwen2_5_vl

Grid = tuple[int, int, int]
SMALL, WIDE, CORNERED, PAGE, SQUARE = (1, 4, 4), (1, 4, 10), (1, 10, 16), (1, 24, 36), (1, 32, 32)
VIDEO = (4, 4, 10)
GRIDS = {
    "56x56": [SMALL], "56x140": [WIDE], "140x224": [CORNERED], "336x504": [PAGE], "448x448": [SQUARE],
    "video": [VIDEO], "several": [WIDE, VIDEO, SMALL, CORNERED, WIDE], "videos": [(2, 10, 16), (3, 4, 4)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


def load(folder, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = build_model(ModelConfig.from_folder(folder), select_backend("torch", "cpu"), dtype, "cpu")
    load_weights(model, folder)
    return model


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.visual.eval()


def random_patches(grids: list[Grid], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), 1176, generator=generator)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS.keys())
@torch.inference_mode()
def test_rows_equal_transformers(model, reference, grids):
    patches = random_patches(grids)
    rows = model.encode_images(patches, grids)
    expected = reference(patches, grid_thw=torch.tensor(grids))
    expected = getattr(expected, "pooler_output", expected)
    assert rows.shape == expected.shape and expected.std() > 0.1
    assert (rows - expected).abs().max() < 1e-4


@torch.inference_mode()
def test_rows_of_an_image_do_not_depend_on_its_neighbours(model):
    grids = [SMALL, WIDE, (1, 8, 8)]
    alone = {grid: model.encode_images(random_patches([grid], grid[2]), [grid]) for grid in grids}
    for order in (grids, grids[::-1], grids[1:] + grids[:1]):
        patches = torch.cat([random_patches([grid], grid[2]) for grid in order])
        rows = model.encode_images(patches, order)
        torch.testing.assert_close(rows, torch.cat([alone[grid] for grid in order]), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_frames_of_a_video_do_not_see_each_other(model):
    patches = random_patches([(2, 8, 12)])
    one_by_one = torch.cat([model.encode_images(frame, [(1, 8, 12)]) for frame in patches.chunk(2)])
    torch.testing.assert_close(model.encode_images(patches, [(2, 8, 12)]), one_by_one, rtol=0, atol=1e-5)


def test_windows_of_140x224_by_hand():
    """5 x 8 merged rows in windows of 4 x 4: two of 4 x 4 above two of 1 x 4."""
    layout = grid_layout(CORNERED, merge=2, window=4)
    assert [length // 4 for length in layout.window_lens] == [16, 16, 4, 4]
    assert layout.frame_lens == (160,)
    assert layout.order[:16].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    assert layout.order[16:20].tolist() == [4, 5, 6, 7] and layout.order[32:].tolist() == list(range(32, 40))
    assert layout.coordinates[:, :8].T.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


@pytest.mark.parametrize("grid", [(1, 2, 2), SMALL, (3, 8, 8), (2, 10, 18), PAGE])
def test_every_merged_row_is_in_one_window(grid):
    layout = grid_layout(grid, merge=2, window=4)
    t, h, w = grid
    assert sorted(layout.order.tolist()) == list(range(t * h * w // 4))
    assert sum(layout.window_lens) == sum(layout.frame_lens) == t * h * w == layout.coordinates.shape[1]
    assert min(layout.window_lens) > 0 and len(layout.frame_lens) == t
    assert len(layout.window_lens) == t * -(-h // 8) * -(-w // 8)


@pytest.mark.parametrize("full_layers,reach", [((), "window"), ((3,), "all"), ((0,), "all")])
@torch.inference_mode()
def test_a_patch_reaches_its_window_until_a_full_layer(full_layers, reach):
    config = VisionConfig(depth=4, hidden_size=48, num_heads=3, intermediate_size=80, out_hidden_size=64, patch_size=14,
                          spatial_merge_size=2, temporal_patch_size=2, in_channels=3, window_size=112,
                          fullatt_block_indexes=full_layers, tokens_per_second=2.0)
    tower = VisionTower(config, select_backend("torch", "cpu"))
    init_dummy_weights(tower, seed=0)
    for parameter in tower.parameters():
        parameter *= 1 if parameter.eq(1).all() else 10
    patches = random_patches([SQUARE])
    changed = patches.clone()
    changed[-1] += 3                    # bottom right of 16 x 16 merged rows
    moved = (tower(patches, [SQUARE]) != tower(changed, [SQUARE])).any(1)
    window = np.zeros((16, 16), bool)
    window[12:, 12:] = True
    assert moved.tolist() == window.ravel().tolist() if reach == "window" else moved.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_half_precision_is_finite_and_near(folder, model, dtype):
    half = load(folder, dtype)
    assert half.visual.patch_embed.proj.weight.dtype == torch.bfloat16
    assert half.model.norm.weight.dtype == dtype
    for patches in (random_patches([SQUARE]), torch.full((1024, 1176), 2.2)):
        rows = half.encode_images(patches, [SQUARE])
        assert rows.dtype == dtype and rows.isfinite().all()
        assert cosine(rows, model.encode_images(patches, [SQUARE])).min() > 0.99


@torch.inference_mode()
def test_float16_survives_activations_beyond_its_range(folder):
    half = load(folder, torch.float16)
    half.visual.blocks[0].mlp.down_proj.weight *= 1e5
    stream: list[Tensor] = []
    half.visual.blocks[0].register_forward_hook(lambda *call: stream.append(call[-1]))
    rows = half.encode_images(random_patches([SQUARE]), [SQUARE])
    assert sum(stream[0]).abs().max() > 65504 and rows.isfinite().all()
