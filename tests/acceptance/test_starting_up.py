"""``schedbench --help`` starts quickly: it imports no heavy module."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from schedbench.cli.app import main
sys.argv = ["schedbench", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *sorted({{"torch", "triton", "numpy"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"]], ids=" ".join)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    program = PROGRAM.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "schedbench" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"
