"""Pages as text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from rich.console import Console

from schedbench.cli.page import Page, print_page

TINY: Final = (
    *("--device", "vgpu", "--set", "workload.requests=5", "--set", "workload.arrival=burst"),
    *("--set", "device.values=none", "--set", "measure.warmup_requests=0"),
)
SAMPLE: Final = Path(__file__).parents[1] / "profiles" / "sample_result.json"


def printed(page: Page, width: int = 120) -> str:
    """The page as a file gets it, in so many columns."""
    file = io.StringIO()
    print_page(page, Console(file=file, width=width, highlight=False))
    return file.getvalue()
