"""What `LLM` promises its callers: outputs, ends, aborts, seeds, logprobs, and an engine that survives every error."""
from __future__ import annotations

import json
import math
import shutil
from itertools import count

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from tests.checkpoints import END_OF_TEXT, TURN_END, make_qwen2_5_vl, make_qwen3
from tests.engines import assert_idle, assert_right, generate, greedy, make_llm, run
from tests.oracle import Oracle
from tests.prompts import END, IMAGE, START, TOKENIZER, picture, prompt, text

VOCAB = len(TOKENIZER)
EOS, OTHER_EOS = TOKENIZER.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
KEYS = {"seq_id", "text", "token_ids", "finish_reason", "ttft", "hash_time", "vit_time", "num_prompt_tokens",
        "num_cached_tokens", "num_reused_tokens", "num_recomputed_image_tokens"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def shared(folder, request):
    """An engine that tests leave as they found it."""
    with make_llm(folder, max_model_len=1024, overlap=request.param) as llm:
        yield llm


def force(llm, monkeypatch, ids, at=None):
    """The i-th step of a lone request draws ids[i]; `at`: only that step is changed, by a bias that wins."""
    compute_logits, steps = llm.runner.model.compute_logits, count()

    def forced(hidden):
        logits, step = compute_logits(hidden), next(steps)
        if at is None or step == at:
            logits[:, ids[min(step, len(ids) - 1)]] += 1e4
        return logits

    monkeypatch.setattr(llm.runner.model, "compute_logits", forced)


# ---------------------------------------------------------------- outputs

def test_output_of_text(llm):
    output, = generate(llm, text(20))
    assert set(output) == KEYS
    assert len(output["token_ids"]) == 8 and output["finish_reason"] == "length" and output["num_prompt_tokens"] == 20
    assert output["text"] == TOKENIZER.decode(output["token_ids"], skip_special_tokens=True)
    assert output["ttft"] > 0 and output["hash_time"] == output["vit_time"] == output["num_cached_tokens"] == 0


def test_output_of_an_image_cold_and_warm(llm):
    words = prompt(text(300), picture(224, 224), text(20))
    cold, warm = generate(llm, words)[0], generate(llm, words)[0]
    assert cold["token_ids"] == warm["token_ids"]
    assert cold["hash_time"] > 0 and cold["ttft"] > cold["vit_time"] + cold["hash_time"] > cold["vit_time"] > 0
    assert warm["vit_time"] == 0 and (cold["num_cached_tokens"], warm["num_cached_tokens"]) == (0, 256)


def test_every_form_of_one_prompt(llm):
    ids = text(12)
    expected = generate(llm, ids)[0]["token_ids"]
    arrays = np.array(ids), [np.array(ids)], torch.tensor(ids), torch.tensor([ids])
    for form in (ids, tuple(ids), [ids], (ids,), *arrays):
        output, = llm.generate(form, greedy(8), use_tqdm=False)
        assert output["token_ids"] == expected, form
    words = "which colour has the circle?"
    assert generate(llm, words)[0]["token_ids"] == generate(llm, TOKENIZER(words)["input_ids"])[0]["token_ids"]
    assert llm.generate([], greedy(8)) == []


def test_string_with_an_image_mark_is_expanded(llm):
    image = picture(56, 140)
    string = "see <|vision_start|><|image_pad|><|vision_end|> what?"
    before, after = (TOKENIZER(part)["input_ids"] for part in ("see ", " what?"))
    ids = [*before, START, *[IMAGE] * image.num_tokens, END, *after]
    mm_inputs = {"pixel_values": image.pixels, "image_grid_thw": [image.grid]}
    outputs = [llm.generate(form, greedy(8), mm_inputs=mm, use_tqdm=False)[0]["token_ids"]
               for form in (string, ids, [ids]) for mm in (mm_inputs, [mm_inputs])
               if not (form == [ids] and mm is mm_inputs)]
    as_arrays = {"pixel_values": image.pixels.numpy(), "image_grid_thw": np.array([image.grid])}
    outputs.append(llm.generate([ids], greedy(8), mm_inputs=[as_arrays], use_tqdm=False)[0]["token_ids"])
    assert len(outputs[0]) == 8 and all(output == outputs[0] for output in outputs)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    lengths = (7, 3, 5, 1)
    outputs = llm.generate([text(9, seed) for seed in range(4)], [greedy(n) for n in lengths], use_tqdm=False)
    assert tuple(len(output["token_ids"]) for output in outputs) == lengths


def test_logprobs(folder, llm):
    words = prompt(text(30))
    output, = generate(llm, words, logprobs=-1)
    assert_right(Oracle(folder), words, output)
    assert set(output) == KEYS | {"logprobs"} and all(set(row) == set(range(VOCAB)) for row in output["logprobs"])
    # of the raw logits, whatever is done to them before a token is drawn
    changed, plain = llm.generate([words.token_ids] * 2, [
        SamplingParams(max_tokens=1, temperature=0.1, top_k=3, repetition_penalty=2.0, logprobs=2, seed=0),
        greedy(3)], use_tqdm=False)
    row, = changed["logprobs"]
    best = dict(sorted(output["logprobs"][0].items(), key=lambda item: -item[1])[:2])
    assert set(row) == set(best) | {changed["token_ids"][0]} and "logprobs" not in plain
    assert all(math.isclose(row[i], output["logprobs"][0][i], abs_tol=1e-5) for i in row)
    sampled_only, = generate(llm, words, logprobs=0)
    assert [list(row) for row in sampled_only["logprobs"]] == [[i] for i in output["token_ids"]]


def test_padding_of_the_vocabulary_is_never_sampled(tmp_path):
    with make_llm(make_qwen3(tmp_path, vocab_padding=64)) as llm:
        llm.runner.model.lm_head.weight[VOCAB:] *= 100
        outputs = llm.generate([text(5)] * 2, [greedy(16), SamplingParams(temperature=5.0, max_tokens=16, seed=1)],
                               use_tqdm=False)
    assert max(max(output["token_ids"]) for output in outputs) < VOCAB


# ---------------------------------------------------------------- how requests end

@pytest.mark.parametrize("written", [[EOS, OTHER_EOS], OTHER_EOS, None], ids=str)
def test_every_end_of_sequence_id_stops(folder, tmp_path, monkeypatch, written):
    """Tokenizer and config say TURN_END; generation_config a list, another id alone, or nothing."""
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").unlink()
    if written is not None:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    plain = text(3)
    with make_llm(copy) as llm:
        for end in (EOS,) if written is None else (EOS, OTHER_EOS):
            ids = [plain[0], plain[1], end, plain[2]]
            with monkeypatch.context() as patch:
                force(llm, patch, ids)
                output, = generate(llm, text(5), max_tokens=10, ignore_eos=False)
                assert output["token_ids"] == ids[:3] and output["finish_reason"] == "stop"
                assert output["text"] == TOKENIZER.decode(plain[:2])
            with monkeypatch.context() as patch:
                force(llm, patch, ids)
                output, = generate(llm, text(5), max_tokens=10)
                assert len(output["token_ids"]) == 10 and output["finish_reason"] == "length"
            with monkeypatch.context() as patch:
                force(llm, patch, [end] * 10)
                output, = generate(llm, text(5), max_tokens=10, ignore_eos=False, min_tokens=5)
                assert len(output["token_ids"]) == 6 and output["token_ids"][5] == end
                assert not {EOS, *[OTHER_EOS] * (written is not None)} & set(output["token_ids"][:5])


def test_end_of_sequence_id_of_the_tokenizer_alone(folder, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    del config["eos_token_id"]
    (copy / "config.json").write_text(json.dumps(config))
    with make_llm(copy) as llm:
        force(llm, monkeypatch, [5, 6, EOS])
        assert generate(llm, text(5), max_tokens=10, ignore_eos=False)[0]["token_ids"] == [5, 6, EOS]


def test_stop_token_ids_stop_also_with_ignore_eos(llm):
    free, = generate(llm, text(15), max_tokens=12)
    end = free["token_ids"][5]
    first = free["token_ids"].index(end)
    for ignore_eos in (True, False):
        output, = generate(llm, text(15), max_tokens=12, stop_token_ids=[end], ignore_eos=ignore_eos)
        assert output["token_ids"] == free["token_ids"][:first + 1] and output["finish_reason"] == "stop"
        assert output["text"] == TOKENIZER.decode(free["token_ids"][:first], skip_special_tokens=True)
    later, = generate(llm, text(15), max_tokens=12, stop_token_ids=[end], min_tokens=first + 1)
    assert end not in later["token_ids"][:first + 1]


def test_stop_strings_are_cut_exactly_and_across_tokens(llm, monkeypatch):
    pieces = [i for word in ("E", "N", "D", "x", "y") for i in TOKENIZER(word)["input_ids"]]
    e, n, d, x, y = pieces
    for stop, ids, expected, num_tokens in [
        ("END", [x, e, n, d, y], "x", 4), (["nope", "ND"], [x, e, n, d, y], "xE", 4),
        (["D", "END"], [x, e, n, d, y], "x", 4), ("END", [x, e, n, x, d], None, 5), ("x", [x, e, n, d, y], "", 1),
    ]:
        with monkeypatch.context() as patch:
            force(llm, patch, ids)
            output, = generate(llm, text(5), max_tokens=5, stop=stop)
        assert len(output["token_ids"]) == num_tokens, stop
        assert output["text"] == (TOKENIZER.decode(ids) if expected is None else expected)
        assert output["finish_reason"] == ("length" if expected is None else "stop")


def test_max_tokens_is_clamped_to_the_room(folder):
    with make_llm(folder, max_model_len=64) as llm:
        for max_tokens in (None, 10**9, 20):
            output, = generate(llm, text(50), max_tokens=max_tokens)
            assert len(output["token_ids"]) == 14 and output["finish_reason"] == "length"
        last, = generate(llm, text(63), max_tokens=None)
        assert len(last["token_ids"]) == 1 and last["finish_reason"] == "length"
        for length in (64, 65):
            with pytest.raises(ValueError, match=rf"{length} tokens.*64"):
                generate(llm, text(length))
            assert len(generate(llm, text(5))[0]["token_ids"]) == 8
    for bad in (0, -1):
        with pytest.raises(ValueError, match="max_tokens"):
            SamplingParams(max_tokens=bad)


def test_request_beyond_the_pool_is_refused_when_it_is_added(folder):
    with make_llm(folder, num_kvcache_blocks=4, max_model_len=4096) as llm:
        small = llm.add_request(text(10), greedy(4))
        with pytest.raises(ValueError, match=r"6 KV blocks.*900.*500.*4"):
            llm.add_request(text(900), greedy(500))
        outputs = []
        for _ in range(5):
            outputs += llm.step()
        assert [output["seq_id"] for output in outputs] == [small]
        assert_idle(llm)


# ---------------------------------------------------------------- requests one by one

@pytest.mark.parametrize("overlap", [False, True])
def test_abort_of_running_and_waiting_requests(folder, overlap):
    with make_llm(folder, max_num_seqs=2, overlap=overlap) as llm:
        ids = [llm.add_request(text(9, seed), greedy(6)) for seed in range(4)]
        for _ in range(3):
            assert llm.step() == []
        assert llm.abort(ids[0]) and llm.abort(ids[3]) and not llm.abort(ids[0]) and not llm.abort(10**9)
        outputs = {}
        while not llm.is_finished():
            outputs |= {output["seq_id"]: output for output in llm.step()}
        assert {i: outputs[i]["finish_reason"] for i in ids} == dict(zip(ids, ("abort", "length", "length", "abort")))
        assert [len(outputs[i]["token_ids"]) for i in ids] == [3, 6, 6, 0] and outputs[ids[3]]["ttft"] == 0
        assert_idle(llm)


def test_generate_beside_requests_added_one_by_one(llm):
    alone = [generate(llm, text(9, seed), max_tokens=n)[0]["token_ids"] for seed, n in ((1, 12), (2, 3), (3, 5))]
    long, short = llm.add_request(text(9, 1), greedy(12)), llm.add_request(text(9, 2), greedy(3))
    llm.step()
    mine, = generate(llm, text(9, 3), max_tokens=5)
    assert mine["token_ids"] == alone[2]
    outputs = {}
    while not llm.is_finished():
        outputs |= {output["seq_id"]: output["token_ids"] for output in llm.step()}
    assert outputs == {long: alone[0], short: alone[1]}
    assert llm.step() == []


def test_seeded_tokens_do_not_depend_on_the_batch(folder):
    def sampled(seed):
        return SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, seed=seed)

    words = [prompt(text(20, seed)) for seed in range(5)]
    with make_llm(folder) as llm:
        alone, = run(llm, words[:1], sampled(7))
        others = [greedy(12), SamplingParams(temperature=0.7, top_k=5, max_tokens=3), sampled(8), greedy(2)]
        batch = run(llm, words[1:] + words[:1], [*others, sampled(7)])
        assert batch[-1]["token_ids"] == alone["token_ids"]
        assert run(llm, words[:1], sampled(8))[0]["token_ids"] != alone["token_ids"]
        unseeded = [run(llm, words[:1], sampled(None))[0]["token_ids"] for _ in range(2)]
        assert unseeded[0] != unseeded[1]
    tokens = []
    for _ in range(2):
        with make_llm(folder, seed=3) as llm:
            tokens.append(run(llm, words[:1], sampled(None))[0]["token_ids"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("budget", [7, 64])
def test_preemption_and_chunks_change_neither_sampled_nor_penalised_tokens(folder, budget):
    params = [SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True, seed=1),
              greedy(24, repetition_penalty=1.8), SamplingParams(max_tokens=24, ignore_eos=True, seed=2, top_p=0.9,
                                                                 repetition_penalty=1.3)]
    words = [prompt(text(12, seed)) for seed in range(3)]
    with make_llm(folder, block_size=4, enable_prefix_caching=False) as llm:
        expected = [output["token_ids"] for output in run(llm, words, params)]
        assert llm.stats()["preemptions"] == 0
    with make_llm(folder, block_size=4, enable_prefix_caching=False, num_kvcache_blocks=12,
                  max_num_batched_tokens=budget) as llm:
        assert [output["token_ids"] for output in run(llm, words, params)] == expected
        assert llm.stats()["preemptions"] >= 2


def test_reset_caches_forgets_prefixes_and_images(llm):
    words = prompt(text(300), picture(112, 112), text(5))
    generate(llm, words)
    llm.reset_caches()
    stats = llm.stats()
    assert stats["blocks_cached"] == stats["image_kv_entries"] == 0
    cold, = generate(llm, words)
    assert cold["num_cached_tokens"] == 0 and cold["vit_time"] > 0
