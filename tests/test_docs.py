"""Worked examples in the documentation print what the page says."""
from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_worked_example_of_image_reuse() -> None:
    page = (DOCS / "image-kv-reuse.md").read_text(encoding="utf-8")
    [code], [printed] = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    assert output.getvalue() == printed
