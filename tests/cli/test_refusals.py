"""Command lines that are refused before anything runs: an exit code, a sentence that says what was expected, no output.

``TOY`` stands for the adapter of the toy engine. tests/acceptance/test_bad_input.py has the mistakes in a scenario.
"""

from __future__ import annotations

import shlex
from typing import Final

import pytest
import torch

from tests.conftest import RunCommand
from tests.profiles.engines.conftest import ADAPTER

DEATH: Final = "--set 'faults=[{rank: decode 0, dies: {phase: transfer, nth: 5}}]'"
USAGE: Final = {
    "calibrate --host-only --batch-sizes 1,x": "--batch-sizes: expected numbers from 1 on",
    "calibrate --host-only --prompt-tokens 0": "--prompt-tokens: expected numbers from 1 on",
    "calibrate --host-only --base h20": "did you mean",
    "check": "a scenario, or --all-faults",
    "check mixed --all-faults": "--all-faults has its scenarios",
    "check --all-faults --adversarial 1": "--all-faults has its scenarios",
    "check --all-faults --device cuda": "--all-faults has its scenarios",
    "check mixed --expect nonsense": "--expect: expected KIND.STREAM.COUNTER=N",
    "check mixd": "mixed",
    "check mixed --relay lates": "latest",
    "check mixed --fault no-barier": "no-barrier",
    "check mixed --expect decode.steady.schedule.snyc=0": "sync",
    "check mixed --device cuda --adversarial 0": "which a real device does not allow",
    "check mixed --device cuda --seeds 4": "which a real device does not allow",
    "check mixed --engine --seeds 1": "--engine: ENGINE is missing: the option --seeds",
    "check mixed --engine sglang:. --device cuda": "runs on the virtual GPU",
    "check mixed --engine sglang:. --engine-wheels .": "leave it out with sglang:.",
    "check mixed --against sglang:.": "--against is about sources of an engine",
    "check mixed --format svg": "'svg' is not one of 'table', 'json', 'md', 'csv', 'html'",
    "compare mixed": "needs --a and --b, or one of them against the scenario as it stands, or a case",
    "compare --a overlap=true": "a scenario is needed",
    "compare mixed --a hardware=h200 --b hardware=a100": "device.hardware: 'h200' against 'a100'",
    "compare mixed --a measure.seed=1": "measure.seed: 1 against 0",
    "compare mixed --a requests=3": "workload.requests: 3 against 64",
    "compare mixed --a overlab=1": "did you mean 'overlap'",
    "compare mixed --a overlap=true --gate speed:-1%": "is no metric",
    "compare mixed --engine sglang:folder": "as in --a sglang:folder --b sglang:folder,KEY=VALUE",
    "compare mixed --a nothing.json": "No such file",
    "compare mixed --a relay=nowhere": "unknown relay state",
    "compare mixed --b relay.index=ring": "--b: engine.relay.index: pr25945 with index=ring",
    "compare mixed --b gone:.": "there is no adapter for 'gone'",
    "compare mixed --b overlap=true --engine-wheels .": "no engine is named",
    "compare mixed --a --b ''": "--a: SIDE is missing: the option --b follows",
    "compare mixed --a git:HEAD --b git:HEAD --worth": (
        "worth: lines of a git: side cannot be changed: leave one side to the working tree"
    ),
    "compare mixed --b relay=latest --set device.host=measured --worth": "worth: device.host=measured measures",
    f"compare disagg --b overlap=false {DEATH}": "compare judges runs that come to their end",
    "doctor --engine sglnag:.": "nano-vllm, vllm, did you mean 'sglang'?",
    "doctor --engine --engine-python python": "--engine: ENGINE is missing: the option",
    "explain ttft_m": "schedbench: no metric and no scenario key 'ttft_m', did you mean 'ttft_ms'?\n",
    "explain step_ms.no": "schedbench: no metric and no scenario key 'step_ms.no', did you mean 'step_ms'?\n",
    "explain ovelap": "schedbench: no metric and no scenario key 'ovelap', did you mean 'overlap'?\n",
    "explain %%": "`schedbench explain` lists them",
    "onebatch mixed --batch 0 --prompt 8": "--batch: expected numbers from 1 on",
    "onebatch mixed --batch 1 --prompt 8,x": "--prompt: expected numbers from 1 on, e.g. 1,8, got '8,x'",
    "onebatch mixed --fault never-resolve": (
        "fault never-resolve belongs to the overlapped loop, and this run's is"
    ),
    "onebatch spec_v2": "onebatch runs the serial loop's engine without speculation",
    "onebatch embedding": "onebatch runs the serial loop's engine without embedding",
    "run mixed --fault no-barier": "schedbench: no fault 'no-barier', did you mean 'no-barrier'?",
    "run mixed --fault xyz": "schedbench: no fault 'xyz'; schedbench list faults has them all",
    "run mixed --fault small-ring": (
        "schedbench: fault small-ring belongs to pr25774, pr25774-before, not to pr25945: --relay pr25774 has it"
    ),
    "run mixed --fault penalties-from-input": (
        "schedbench: fault penalties-from-input belongs to the serial loop, and this run's is"
    ),
    "run mixed --fault hot-buffer-by-sentinel": (
        "schedbench: fault hot-buffer-by-sentinel needs engine.hisparse.enabled=true"
    ),
    "run mixed --fault idle-rows-stashed": (
        "schedbench: fault idle-rows-stashed waits for sampled padding of idle ranks, which this"
    ),
    "run mixed --fault onebatch-never-resolves": (
        "schedbench: fault onebatch-never-resolves belongs to the onebatch loop, and this run's"
    ),
    "run mixed --adversarial 1 --hazards on": "program order",
    "run mixed --engine gone:/gone": "there is no adapter for 'gone'",
    "run mixed --engine sglang:": "expected NAME:FOLDER",
    "run mixed --engine TOY:. --relay latest": "--relay is about the relay",
    "run ladder --engine TOY:.": "engine.relays is about the relay",
    "run mixed --engine-python python": "--engine-python: no engine is named",
    "run mixed --engine-timeout 9": "--engine-timeout: no engine is named",
    "run mixed --quick": "--quick: no option of run, but of compare, check, worth, sweep",
    "run spec_v1 --set engine.page_size=16": (
        "--set: engine.page_size: draft trees cannot be combined with pages"
    ),
    f"run ladder --set engine.overlap=auto --set engine.pipeline.stages=2 {DEATH}": "expected one relay",
    f"run disagg --set engine.disaggregation.mode=none {DEATH}": "ranks and links break where",
    "run pp2 --world distributed --set 'faults=[{link: [stage 0, stage 1], tag: proxy, does: drop}]'": (
        "faults.0: with --world distributed ranks die; their links are real"
    ),
    "run pp2 --world distributed --set 'faults=[{rank: stage 0, dies: forward}]'": (
        "faults.0: with --world distributed stage 0 is the command itself"
    ),
    "run mixed --ranges --set device.host=measured": (
        "--ranges: device.host=measured measures the host's times"
    ),
    "run mixed --ranges --adversarial 1": "--ranges: an adversary's times mean nothing",
    "run pp2 --ranges --world distributed": "--ranges: ranks in processes have clocks of their own",
    "run ladder --ranges": "--ranges: it takes one relay",
    "run mixed --worth --set device.host=measured": "worth: device.host=measured measures the host's times",
    "run start --expect decode.schedule.sync=0 --expect decode.schedule.sync=5": (
        "schedbench: --expect: 2 budgets for decode.schedule.sync\n"
    ),
    "run mixed --set overlap=false --set expect.decode.steady.when.relay=lastest": (
        "unknown relay state, did you mean 'latest'?"
    ),
    "run mixed --set overlap=false --expect decode.steady.schedule.sync=9": (
        "the scenario's budget of decode.steady is asked where overlap is true, and here it is false"
    ),
    "run start --relay latest --set staging=bar": (
        "engine.relay.staging: expected pinned or pageable, got 'bar'"
    ),
    "run start --relay latest --set relay=pr25945": (
        "--relay latest and --set relay=pr25945 both choose the relay"
    ),
    "run start --relay my_relay.py": "a file without the state in it: expected FILE.py:NAME",
    "sweep mixed --over engine=sglang:{.,..} --engine-wheels .": "leave it out with sglang:. and sglang:..",
    "sweep mixed --over --metric ttft": "is missing: the option --metric follows",
    "sweep mixed --over concurrency=1 --resume": "--resume needs the --output-dir of an earlier sweep",
    "sweep mixed --over concurrency=1 --alone --a overlap=true": "--alone has no sides: leave out --a and --b",
    "sweep mixed --over preset=tiny-lama": "--over model.preset=tiny-lama: no cell could run: model.preset",
    "sweep mixed --over concurency=1,2": "--over: concurency: unknown key",
    f"sweep disagg --over overlap=true,false {DEATH}": "a cell's run comes to its end",
    "verify mixed --set engine.overlp=true": "overlap",
    "watch --engine=x -- python --": "--engine: no option of watch, but of run, compare,",
    "watch -- python nosuch.py": "nosuch.py: no such script",
    "watch -- python -m train": "not Python's option -m",
    "watch -- ls": "watch runs Python programs",
    "worth mixed --device cuda": "check, profile, sweep, onebatch\n",
    "worth mixed --set device.host=measured": "worth: device.host=measured measures the host's times",
}
UNABLE: Final = {
    "check mixed --engine TOY:. --against sglang:.": "no sglang in that folder",
    "compare mixed --a TOY:. --b sglang:.": "no sglang in that folder",
    "compare mixed --a sglang==9 --b ''": "pip download --no-deps sglang==9",
    "run mixed --engine sglang:.": "no python/sglang and no sglang in that folder",
    "run mixed --engine sglang:gone": "gone is no folder",
    "run mixed --engine sglang==9 --engine-wheels gone": "gone is no folder",
    "run mixed --world distributed --set engine.replicas=256 --set engine.kv_tokens=1000000": "fewer ranks",
    "sweep mixed --over engine=sglang:{.,..} --alone": "no cell could run: sglang:..: no python/sglang",
}


@pytest.mark.parametrize(
    ("code", "line", "says"),
    [(code, *case) for code, cases in ((2, USAGE), (3, UNABLE)) for case in cases.items()],
)
def test_a_wrong_command_line_is_refused(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, code: int, line: str, says: str
) -> None:
    """Here and on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run_command(*shlex.split(line.replace("TOY", str(ADAPTER))))
    assert (said.code, said.out) == (code, "")
    assert says in said.err
