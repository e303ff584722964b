"""In whole runs each op's Triton kernel computes what the torch implementation computes for the same arguments."""

from __future__ import annotations

import pytest

from tests.json_programs import output_of


def sizes(prompt: tuple[int, int], output: tuple[int, int]) -> list[str]:
    parts = {"prompt_tokens": prompt, "output_tokens": output}
    return [
        f"workload.{name}={{dist: uniform, min: {low}, max: {high}}}" for name, (low, high) in parts.items()
    ]


RUNS = {
    "prompts in pieces, decodes among them, scored": [
        *("mixed", *sizes((5, 24), (2, 3)), "measure.repeat=1", "engine.relay=latest", "engine.page_size=16"),
        *("engine.chunked_prefill_size=16", "engine.mixed_chunk=true", "workload.sampling.logprobs=true"),
        *("workload.sampling.temperature=0.7", "workload.sampling.top_p=0.9"),
    ],
    "allocation of an older relay": [
        *(
            "mixed",
            *sizes((20, 40), (2, 5)),
            "engine.relay=pr25945",
            "engine.page_size=4",
            "workload.requests=4",
        ),
        *("engine.max_running_requests=2", "workload.shared_prefix={groups: 1, tokens: 16}"),
    ],
    "hosted KV": ["hisparse", *sizes((60, 80), (2, 3)), "engine.relay=latest"],
    "chains of drafts": ["spec_v2", *sizes((8, 20), (3, 5))],
    "trees of drafts": [
        *("spec_v1", *sizes((8, 20), (3, 5)), "engine.speculative.topk=2"),
        "engine.speculative.draft_tokens=6",
    ],
}


@pytest.mark.wide
@pytest.mark.parametrize("run", RUNS)
def test_kernels_compute_the_same_in_a_run(run: str) -> None:
    report = output_of("sched.kernels.triton_beside", *RUNS[run], TRITON_INTERPRET="1")
    assert report["finished"] and len(report["calls"]) >= 10
    assert report["wrong"] == {}
