"""Reads the recompute ratios that `nanovllm.calibrate` writes, from a file or from a model's folder."""
from __future__ import annotations

import json
from pathlib import Path

from nanovllm.checks import check_number

FILE_NAME = "reuse.json"
KEY = "recompute_ratio"


def read_ratios(file: str | Path) -> float | tuple[float, ...]:
    """The ratio, or one per decoder layer, in a JSON file: a number, a list, or an object with "recompute_ratio".

    Raises ValueError naming the file and what to give instead.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"recompute_ratio={str(file)!r}: give a number from 0 to 1, one per decoder layer, or the "
                         "path of a file that `python -m nanovllm.calibrate` wrote")
    remedy = "numbers from 0 to 1: write it with `python -m nanovllm.calibrate`"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): give {remedy}") from error
    value = value.get(KEY) if isinstance(value, dict) else value
    if isinstance(value, list):
        return tuple(check_number(f"{path}: {KEY}", ratio, lambda x: 0 <= x <= 1, remedy) for ratio in value)
    return check_number(f"{path}: {KEY}", value, lambda x: 0 <= x <= 1, remedy)


def read_model_ratios(folder: str) -> float | tuple[float, ...]:
    """What recompute_ratio="auto" means for a model folder: its reuse.json; ValueError where there is none."""
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        raise ValueError(f"recompute_ratio='auto': give a number, or write {file} with `python -m nanovllm.calibrate "
                         f"{folder} --questions FILE`")
    return read_ratios(file)
