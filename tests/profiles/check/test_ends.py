"""How a check compares the ends of requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from schedbench.profiles.check.examine import not_asked, run_ended
from schedbench.profiles.check.report import Check, Report
from schedbench.profiles.check.tokens import differences
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Result

SAMPLE = Result.from_json((Path(__file__).parents[1] / "sample_result.json").read_text())


def ending(status: str, reason: str) -> Result:
    row = SAMPLE.requests[0].model_copy(update={"status": status, "reason": reason})
    return SAMPLE.model_copy(update={"requests": (row,)})


def test_ends_are_compared_by_status_and_by_reasons_without_their_numbers() -> None:
    state = 'no such token\n{"compute_time_us": '
    assert not list(differences(ending("failed", f"{state}5}}"), ending("failed", f"{state}8}}")))
    [evidence] = differences(ending("failed", f"{state}5}}"), ending("refused", "x" * 121))
    name = SAMPLE.requests[0].id
    expected = f"request {name} ended failed (no such token…) instead of refused ({'x' * 120}…)"
    assert evidence.says == expected


def test_the_check_of_the_run_counts_one_request() -> None:
    assert run_ended(ending("finished", "")).about == "1 request ended"


def test_a_finding_is_a_request_whatever_differs() -> None:
    sides = [[ending(status, "").requests[0] for _ in range(5)] for status in ("failed", "refused")]
    rows = [[row.model_copy(update={"id": f"r{at}"}) for at, row in enumerate(side)] for side in sides]
    rows[0][0] = rows[0][0].model_copy(update={"token_ids": (9,)})
    rows[1][0] = rows[1][0].model_copy(update={"token_ids": (7,)})
    found, expected = (SAMPLE.model_copy(update={"requests": tuple(side)}) for side in rows)
    ends = [f"request r{at} ended failed () instead of refused ()" for at in range(5)]
    ends[0] += "; request r0, output token 0: 9 instead of 7"
    assert [one.says for one in differences(found, expected)] == ends


def test_an_engine_is_not_asked_for_ends_that_no_request_had() -> None:
    asked = replace(ask("mixed"), engine=EngineChoice("mini-sglang:."))

    def left_out(result: Result | None) -> dict[str, str]:
        check = Check("run", "failed", "")
        return not_asked(asked, (), [Report(asked.relays[0], "mini-sglang:.", [check], result)])

    token, client = (
        "by a token (--set workload.sampling={ignore_eos: false, stop_token_ids: [...]})",
        "by a client",
    )
    assert left_out(ending("finished", "length"))["ends of requests"].startswith(f"{token} and {client}")
    assert left_out(ending("aborted", "gone"))["ends of requests"] == token
    assert left_out(ending("finished", "stop"))["ends of requests"].startswith(client)
    assert "ends of requests" not in left_out(None)  # the run broke off
