"""Runs of an engine in several processes, of which one fails: one sentence names it, and no process is left running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schedbench.profiles.engines.client import EngineFailedError
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.platform.resolve import Resolved, ask

from .conftest import (
    ADAPTER,
    SLEEP,
    SMALL,
    Scripted,
    end_once_it_hangs,
    interrupt_when,
    run,
    sleepers,
    wait_until,
)

WORLDS = {
    "pipeline": ("engine.pipeline={stages: 2}", "engine.overlap=auto"),
    "pair": ("engine.disaggregation={mode: pair}",),
}
NAMES = {"pipeline": ("stage 0", "stage 1"), "pair": ("prefill 0", "decode 0")}
CHANGES = (
    ('package = "toy"', 'stages = transfers = True; package = "toy"'),
    ("super().run()", "self._link.receive(1 - self._loop.rank, 'never')"),
)
AT = "(at python/toy/script.py:3)"


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def several(scripted: Scripted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """Gives the toy engine another script, by an adapter that runs several ranks, each of which waits for the other
    behind the script."""
    adapter = tmp_path_factory.mktemp("adapter") / "several.py"
    text = ADAPTER.read_text()
    for old, new in CHANGES:
        assert text.count(old) == 1
        text = text.replace(old, new)
    adapter.write_text(text)
    yield lambda script: scripted(script).replace(str(ADAPTER), str(adapter))


def question(world: str) -> Resolved:
    return ask("mixed", [*SMALL, *WORLDS[world]])


OF_THE_LATER_RANK = {
    "exit(2)": "{name}: exited with 2 {at}",
    "import gone": "{name}: ModuleNotFoundError: No module named 'gone' {at}",
    "import torch; torch.zeros(1, device='cuda:1')": "{name}: RuntimeError: invalid device ordinal",
    "import os; os.kill(os.getpid(), 9)": "the process of {name} was ended by SIGKILL",
    "import os; os.kill(os.getpid(), 11)": "the process of {name} was ended by SIGSEGV",
    "import os; os.closerange(3, 99)": "the process of {name} ",
}
OF_BOTH = {
    "raise ValueError('bad batch')": "{name}: ValueError: bad batch {at}",
    "import os; os._exit(3)": "the process of {name} exited with 3",
}


@pytest.mark.parametrize(
    ("rank", "statement", "says"),
    [
        *((0, *case) for case in OF_BOTH.items()),
        *(pytest.param(1, *case, marks=pytest.mark.wide) for case in (OF_BOTH | OF_THE_LATER_RANK).items()),
    ],
)
def test_the_rank_that_fails_is_named(
    several: Scripted, world: str, rank: int, statement: str, says: str
) -> None:
    engine = several(f"print('noise', flush=True)\nif rank == {rank}:\n    {statement}")
    with pytest.raises(EngineFailedError) as caught:
        run(question(world), engine)
    assert says.format(name=NAMES[world][rank], at=AT) in str(caught.value)


def test_the_sentence_of_a_rank_that_cannot_run_is_kept(several: Scripted, world: str) -> None:
    names = "schedbench.profiles.engines.names"
    script = f"from {names} import EngineError\nif rank:\n    raise EngineError('no such mode')"
    with pytest.raises(EngineError, match=r"^no such mode$"):
        run(question(world), several(script))


def test_an_interrupted_pipeline_has_the_reports_of_its_stages(several: Scripted, tmp_path: Path) -> None:
    stop = f"pathlib.Path({str(tmp_path)!r}, str(rank)).touch()\ntime.sleep(1000)"
    interrupt_when(lambda: len([*tmp_path.iterdir()]) == 2)
    result = run(question("pipeline"), several(f"import pathlib, time\n{stop}"))
    assert result.run.cancelled
    assert len(result.ranks) == 2


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_ended_with_all_it_has_started(
    several: Scripted, world: str, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begins = f"import subprocess; open(f'{tmp_path}/{{rank}}', 'w').close()"
    engine = several(f"{begins}\nif rank == {rank}:\n    subprocess.run({SLEEP.split()})")
    end_once_it_hangs(monkeypatch, engine, 5, (tmp_path / str(rank)).exists)
    with pytest.raises(
        EngineFailedError, match=rf"was ended at python/toy/script\.py:3\nStack of rank {rank} "
    ):
        run(question(world), engine)
    wait_until(lambda: not sleepers())  # they were killed, and end when they get a processor
