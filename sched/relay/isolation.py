"""What a forward may not change of the batch that it runs: ``isolated``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..batch import ScheduleBatch


@contextmanager
def sampling_isolated(batch: ScheduleBatch) -> Iterator[None]:
    """The forward samples with a copy of the sampling state."""
    kept = batch.sampling_info
    batch.sampling_info = kept.copy_for_forward()
    try:
        yield
    finally:
        batch.sampling_info = kept


@contextmanager
def fields_isolated(batch: ScheduleBatch) -> Iterator[None]:
    """Whatever a speculative worker makes of the batch's fields, they are what they were afterwards."""
    kept = batch.set_fields()
    try:
        with sampling_isolated(batch):
            yield
    finally:
        batch.unset(*batch.set_fields().keys() - kept.keys())
        for name, value in kept.items():
            setattr(batch, name, value)
