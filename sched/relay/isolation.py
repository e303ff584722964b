"""Context managers that keep a forward from changing the batch that it runs."""

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
    """Restore all fields of the batch, which a speculative worker may have changed."""
    kept = batch.set_fields()
    try:
        with sampling_isolated(batch):
            yield
    finally:
        batch.unset(*batch.set_fields().keys() - kept.keys())
        for name, value in kept.items():
            setattr(batch, name, value)
