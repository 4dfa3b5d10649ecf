"""The rooms, arrows and house rules of docs/architecture.md hold in the source as it stands: nothing is imported."""
from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "nanovllm").rglob("*.py"))
EVERYTHING = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py")),
              *sorted((ROOT / "tools").rglob("*.py")), *sorted(ROOT.glob("*.py"))]

WORDS = {"checks", "config", "metrics", "model_config", "outputs", "plan", "reuse_file", "sampling_params"}
# Modules of engine/ that are rooms of their own; the rest of engine/ is policy.
ENGINE_ROOMS = {"encoder_cache_manager", "llm_engine", "model_runner", "ranked_runner"}
ARROWS = {
    "words": set(),
    "kernels": set(),
    "peer_memory": set(),
    "parallel": {"peer_memory"},
    "contract": set(),
    "attention": {"contract", "kernels"},
    "layers": {"contract", "parallel"},
    "models": {"contract", "layers", "parallel"},
    "runner": {"attention", "contract", "layers", "models", "parallel"},
    "image": set(),
    "policy": {"image"},
    "encoder_cache_manager": {"image", "policy", "runner"},
    "model_runner": {"attention", "contract", "encoder_cache_manager", "layers", "models", "parallel", "policy",
                     "runner"},
    "ranked_runner": {"model_runner", "parallel", "runner"},
    "llm_engine": {"image", "model_runner", "policy", "ranked_runner"},
    "llm": {"llm_engine", "policy"},
    "package": {"llm"},
    "quality": {"package"},                     # like a user of the library
    "calibrate": {"package", "quality"},
}
TORCH_FREE = {"words", "image", "policy", "package"}
TORCH_FREE_PACKAGES = {"numpy", "xxhash", "huggingface_hub"}

# Third-party modules that only the named modules may import.
ONLY_IN = {
    "flash_attn": {"attention.flash"},
    "flash_attn_interface": {"attention.flash"},
    "triton": {"kernels.*"},
    "torch.distributed": {"parallel", "runner.workers"},
    "torch._C": {"peer_memory"},
    "transformers": {"engine.llm_engine", "quality.prompts"},
}
CONFIG_KEYS = {
    "architectures", "attention_bias", "in_chans", "layer_types", "max_window_layers", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta",
    "rope_type", "text_config", "tie_word_embeddings", "torch_dtype", "use_sliding_window", "vision_config",
    "generation_config.json", "config.json", "tokenizer_config.json",
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 40


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """`engine.scheduler` for nanovllm/engine/scheduler.py; a package is its folder, nanovllm itself is ''."""
    parts = path.relative_to(ROOT / "nanovllm").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room a module lives in; an error for a module that has none, so that a new one must be given one."""
    first, _, rest = module.partition(".")
    if not module or module == "__version__":
        return "package"
    if first in WORDS:
        return "words"
    if first == "engine":
        return rest if rest in ENGINE_ROOMS else "policy"
    if module == "attention.contract":
        return "contract"
    assert first in ARROWS, f"nanovllm.{module} is in no room of tests/test_architecture.py"
    return first


def imports_of(tree: ast.AST, package: str = "nanovllm") -> Iterator[str]:
    """Full names of whatever is imported anywhere in `tree`, inside functions and type-checking blocks, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[:len(package.split(".")) + 1 - node.level], base]))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            yield ast.unparse(node)


def imports_of_file(path: Path) -> list[str]:
    parts = ("nanovllm", *path.relative_to(ROOT / "nanovllm").parts[:-1])
    return list(imports_of(parse(path), ".".join(parts)))


def own_module(name: str) -> str | None:
    """The module of ours that the imported name `nanovllm.a.b.thing` lives in; None for other packages' names."""
    first, _, rest = name.partition(".")
    if first != "nanovllm":
        return None
    while rest and not any((ROOT / "nanovllm" / rest.replace(".", "/")).with_suffix(s).exists() for s in (".py", "")):
        rest = rest.rpartition(".")[0]
    return rest


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_arrows_go_one_way(path: Path) -> None:
    room = room_of(module_of(path))
    allowed = ARROWS[room] | {room, "words"}
    targets = {module for name in imports_of_file(path) if (module := own_module(name)) is not None}
    wrong = {module for module in targets if room_of(module) not in allowed}
    assert not wrong, f"{room} may import {sorted(allowed)}, not {sorted(wrong)}"


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(module_of(path)) in TORCH_FREE], ids=by_path)
def test_torch_free_rooms_import_nothing_that_brings_torch(path: Path) -> None:
    known = TORCH_FREE_PACKAGES | {"nanovllm"} | sys.stdlib_module_names
    assert not {name for name in imports_of_file(path) if name.partition(".")[0] not in known}


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_guarded_packages_are_imported_in_one_place(path: Path) -> None:
    module = module_of(path)
    for name in imports_of_file(path):
        for guarded, places in ONLY_IN.items():
            if f"{name}.".startswith(f"{guarded}."):
                assert module in places or f"{module.partition('.')[0]}.*" in places, f"{name} in {module}"
        assert not name.startswith("importlib.import_module") and name != "importlib", "imports are static"
    if "transformers" in {name.partition(".")[0] for name in imports_of_file(path)}:
        internal = {name for name in imports_of_file(path) if re.match(r"transformers\.(?!Auto[A-Z])", name)}
        assert not internal, "only public Auto classes"


@pytest.mark.parametrize("path", [path for path in SOURCES if module_of(path) != "model_config"], ids=by_path)
def test_config_keys_are_known_to_model_config_only(path: Path) -> None:
    strings = {node.value for node in ast.walk(parse(path))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    attributes = {node.attr for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
    own_fields = {"tie_word_embeddings"}       # of TextConfig
    assert not (strings & CONFIG_KEYS) | (attributes & CONFIG_KEYS - own_fields)


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_module_opens_with_one_sentence(path: Path) -> None:
    docstring = (ast.get_docstring(parse(path)) or "").strip()
    assert docstring.endswith("."), "no docstring, or it does not end with a full stop"
    assert not re.search(r"[.!?]\s+[A-Z]", docstring), "more than one sentence: split the file or shorten the promise"


@pytest.mark.parametrize("path", EVERYTHING, ids=by_path)
def test_files_and_functions_are_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert code_lines(node) <= MAX_FUNCTION_LINES, f"{node.name} has {code_lines(node)} lines"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", EVERYTHING, ids=by_path)
def test_nothing_is_left_for_later(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(?:TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b|\bfor[ ]now\b(?!,| in)", text)


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_no_module_state_and_no_drawer_for_everything(path: Path) -> None:
    assert not {"utils", "util", "helpers", "common", "misc"} & set(module_of(path).split("."))
    assert not [node for node in ast.walk(parse(path)) if isinstance(node, ast.Global)], "module state"
    decorators = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for node in ast.walk(parse(path))
                  if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for decorator in node.decorator_list}
    assert not {"cache", "lru_cache"} & decorators, "a cached function is module state"


def run_python(code: str) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)


def test_torch_free_rooms_run_without_torch() -> None:
    modules = [f"nanovllm.{module}".rstrip(".") for path in SOURCES
               if room_of(module := module_of(path)) in TORCH_FREE]
    run_python(f"import sys; sys.modules['torch'] = None\nimport {', '.join(modules)}")


def test_import_needs_neither_gpu_nor_flash_attn() -> None:
    run_python("import sys; from nanovllm import LLM, SamplingParams, __version__\n"
               "assert not {'flash_attn', 'flash_attn_interface'} & set(sys.modules)")


def test_the_scan_sees_what_it_must() -> None:
    code = ("import torch.distributed as dist\nfrom torch import distributed\n"
            "def f():\n    from ..kernels import kv_store\n    torch.distributed.barrier()")
    names = set(imports_of(ast.parse(code), "nanovllm.layers"))
    assert {"torch.distributed", "nanovllm.kernels.kv_store", "torch.distributed.barrier"} <= names
    assert own_module("nanovllm.plan.StepPlan") == "plan"
    assert own_module("nanovllm.engine.scheduler.X") == "engine.scheduler"
    assert own_module("numpy.int64") is None and own_module("nanovllm.LLM") == ""
    with pytest.raises(AssertionError, match="no room"):
        room_of("newroom.thing")
