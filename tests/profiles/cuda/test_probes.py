"""Probes as far as they go without a GPU: what they make of what they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from schedbench.profiles.cuda.kineto import rows
from schedbench.profiles.lab.probes import __main__ as command
from schedbench.profiles.lab.probes.copies import waited
from schedbench.profiles.lab.probes.environment import version
from schedbench.profiles.lab.probes.expressions import tally
from schedbench.profiles.lab.probes.kernels import attends
from schedbench.profiles.lab.probes.kineto_rows import examples, replays
from schedbench.profiles.lab.probes.nsys import found
from schedbench.profiles.lab.probes.nsys import version as tool_version
from schedbench.profiles.lab.probes.sanitizer import judged
from schedbench.profiles.lab.probes.timing import host_ns, spread, told

ROOT = Path(__file__).resolve().parents[3]

KERNELS = """
import torch
from schedbench.profiles.lab.probes.triton_kernels import add_one, gather, gather_by_pointer
x = torch.zeros(64)
add_one[(1,)](x, 60, width=64)
assert x.sum() == 60
host, rows, target = torch.arange(128.0).view(8, 16), torch.tensor([3, 1, 7]), torch.empty(3, 16)
gather[(2,)](host, rows, target, 3, width=16)
assert torch.equal(target, host[rows])
gather_by_pointer[(1,)](host.data_ptr() + rows * 64, target.zero_(), 3, width=16)
assert torch.equal(target, host[rows])
"""


COMPILED = """
from tests.sched.kernels.triton_compiled import compiling
made = compiling()
import torch
from schedbench.profiles.lab.probes.triton_kernels import add_one, gather, gather_by_pointer
x, rows = torch.zeros(64), torch.tensor([3, 1, 7])
add_one[(1,)](x, 60, width=64)
gather[(2,)](x, rows, x, 3, width=16)
gather_by_pointer[(1,)](rows, x, 3, width=16)
assert len(made) == 3
"""


@pytest.mark.parametrize(("program", "interpreted"), [(KERNELS, "1"), (COMPILED, "0")])
def test_kernels_compute_what_they_say_and_compile(program, interpreted, tmp_path):
    changes = {"TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **changes},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_expressions_operations_and_syncs_are_tallied(trace):
    trace.copy("HtoD (Pageable -> Device)", 0, size=8, blocking=True)
    trace.launch(20)
    trace.call("cudaDeviceSynchronize", 30, 40)
    assert tally(rows(trace.document())) == {"cudaStreamSynchronize": 1, "h2d pageable": 1, "kernel": 1}


def test_a_replays_kernels_are_counted_by_correlation(trace):
    correlation = trace.call("cudaGraphLaunch", 0, 1)
    for n in range(3):
        trace.kernel(correlation, 2 + n, 2.5 + n)
    trace.launch(10)
    assert replays(trace.document()["traceEvents"]) == [{"name": "cudaGraphLaunch", "kernels": 3}]


def test_rows_are_shown_by_example(trace):
    for n in range(9):
        trace.launch(10 * n)
    shown = examples(trace.document()["traceEvents"])
    assert shown["kernel: k"]["count"] == 9
    assert len(shown["kernel: k"]["first"]) == 6


def test_a_group_that_fails_says_why():
    def failing(small):
        raise RuntimeError(f"no kernel for {small.device}")

    assert told(lambda: failing(torch.zeros(1))) == {"error": "RuntimeError: no kernel for cpu"}
    assert told(lambda: {"n": 3}) == {"n": 3}


def test_a_call_as_long_as_the_stream_is_busy_waited():
    assert waited(19e6)
    assert not waited(30e3)


@pytest.mark.parametrize(
    ("text", "code", "found"), [("CSAN detected a possible data race", 1, True), ("", 0, False)]
)
def test_the_sanitizer_is_judged_by_its_words(text, code, found):
    assert judged(code, text)["found"] is found


def test_samples_are_summed_up():
    assert spread([3, 1, 2]) == {"n": 3, "min": 1, "p10": 1, "median": 2, "p90": 3}


def test_the_host_is_timed_apart_from_what_comes_before():
    before = []
    assert host_ns(lambda: None, repeat=4, before=lambda: before.append(1))["n"] == 4
    assert len(before) == 4


def test_nsight_is_looked_for_where_it_may_be(tmp_path):
    folder = tmp_path / "nsight" / "host-linux-x64"
    folder.mkdir(parents=True)
    (folder / "QdstrmImporter").touch()
    (folder / "other").touch()
    assert list(found([tmp_path, tmp_path / "absent"])) == [folder / "QdstrmImporter"]


def test_a_tool_that_cannot_run_says_so(tmp_path):
    assert "FileNotFoundError" in tool_version(str(tmp_path / "nsys"))
    assert tool_version(sys.executable).startswith("Python 3")


def test_versions_of_what_is_installed():
    assert version("no-such-package") is None
    assert version("pytest")


def test_a_probe_leaves_its_answer_in_a_file(tmp_path):
    output = tmp_path / "answer.json"
    assert command.main("nsys", str(output)) == 0
    assert "files" in json.loads(output.read_text())


@pytest.mark.parametrize(("new", "before"), [(1, 40), (24, 0), (8, 16)])
def test_what_is_timed_of_attention_is_attention(new: int, before: int) -> None:
    """Each request attends to pages of its own, causally."""
    torch.manual_seed(5)
    action = attends(2, new, before, device="cpu", dtype=torch.float32)
    q, keys, values = action.args[:3]
    whole = [
        t.view(2, before + new, 8, 128).repeat_interleave(4, dim=2).transpose(1, 2) for t in (keys, values)
    ]
    mask = torch.ones(new, before + new, dtype=torch.bool).tril(before)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.view(2, new, 32, 128).transpose(1, 2), *whole, attn_mask=mask
    )
    assert torch.allclose(action().view(2, new, 32, 128).transpose(1, 2), expected, atol=1e-5)
