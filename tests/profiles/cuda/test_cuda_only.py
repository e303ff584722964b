"""The docs list exactly the code that no CPU test reaches."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MARK = re.compile(r"^(?:class|def) (\w+).*# cuda-only$", re.MULTILINE)


def marked():
    for path in sorted(path for room in ("profiles", "sched") for path in (ROOT / room).rglob("*.py")):
        for name in MARK.findall(path.read_text()):
            yield f"{path.relative_to(ROOT).as_posix()}: {name}"


def test_the_list_in_the_docs_equals_the_codes():
    listed = re.findall(
        r"^- `((?:profiles|sched)/[^`]+: \w+)`$", (ROOT / "docs" / "cuda.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(marked())
