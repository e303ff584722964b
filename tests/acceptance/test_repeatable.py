"""Two emulated runs of one scenario are the same document, byte for byte, outside ``run`` and ``environment``."""

from __future__ import annotations

import pytest

from schedbench import __version__
from schedbench.profiles.record.provenance import Tool
from tests.acceptance.runs import schedbench
from tests.conftest import RunCommand

NONE = ("overlap_on", "--set", "workload.requests=8", "--set", "workload.output_tokens=8")


@pytest.mark.parametrize(
    "question",
    [pytest.param(("mixed", "--set", "workload.requests=24"), marks=pytest.mark.wide), NONE],
    ids=["mixed", "values none"],
)
def test_a_run_repeats_byte_for_byte(
    question: tuple[str, ...], run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another process, with other addresses and hashes."""
    asked = ("run", *question, "--save-tokens", "--format", "json")
    # A commit between two runs changes the recorded version of the tool.
    first = schedbench(*asked, env={"GIT_DIR": "nowhere"})
    monkeypatch.setattr("schedbench.profiles.run.document.tool", lambda: Tool(version=__version__))
    second = run_command(*asked)
    assert (first.returncode, first.stderr) == (second.code, second.err) == (0, "")
    assert lasting(first.stdout) == lasting(second.out)


def lasting(document: str) -> str:
    """Returns the document's text without the two entries that may differ; each entry begins on its own line."""
    entries = document.split('\n"')
    return '\n"'.join(entry for entry in entries if not entry.startswith(('run"', 'environment"')))
