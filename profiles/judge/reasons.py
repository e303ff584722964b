"""Why there is no verdict: the codes of ``inconclusive``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    LOW_N = "LOW_N"
    DRIFT = "DRIFT"
    WARMUP_RAMP = "WARMUP_RAMP"
    NOT_ENGAGED = "NOT_ENGAGED"
    OUTPUT_DIFF = "OUTPUT_DIFF"
    PROFILED = "PROFILED"
    CONFIG_DIFF = "CONFIG_DIFF"
    ORDER_EFFECT = "ORDER_EFFECT"
    CONSTANTS = "CONSTANTS"
    OF_ZERO = "OF_ZERO"


ABOUT: Final[Mapping[str, str]] = {
    Reason.LOW_N: "There are fewer workload seeds or pairs of blocks than a verdict needs (compare --help says how "
    "many), or too few for their spread: the change of some metric is neither surely within the smallest effect of "
    "interest, nor surely beyond it. Where more --seeds or --pairs can decide, compare says how many; they hardly can "
    "where the metric changes by about that effect. Where requests arrive "
    "at a rate that the engine keeps up with, arrival=burst compares what the engine can do.",
    Reason.DRIFT: "Measured times drift over the blocks.",
    Reason.WARMUP_RAMP: "The first blocks are slower or faster than later ones, by more than the smallest effect of "
    "interest.",
    Reason.NOT_ENGAGED: "Too few steps of B have other device operations than those of A (--min-engagement sets the "
    "share that is asked), and no metric that the verdict is about shows a change or, where times are measured in "
    "turns, is undecided; of captures, which were made at different times, the operations alone count. An order of "
    "streams that changes no time is not compared: check judges it. Host work of the scheduler's own shows only where "
    "it is measured (--set device.host=measured), and SGLang's own model runner runs only where it is asked for "
    "(--set engine.model_runner=own).",
    Reason.OUTPUT_DIFF: "The tokens differ, so that the sides do not do the same work. --allow-divergence judges them "
    "nevertheless.",
    Reason.PROFILED: "The times contain the cost of a profiler.",
    Reason.CONFIG_DIFF: "The sides were measured in different environments.",
    Reason.ORDER_EFFECT: "The order of the blocks within their pairs has a larger effect than the sides.",
    Reason.CONSTANTS: "The sign of the effect depends on constants of the hardware profile within the ranges in which "
    "they are known.",
    Reason.OF_ZERO: "Some measured values of the metric are 0 and others are not: a change from 0 has no percentage.",
}
