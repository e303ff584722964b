"""The base of the schedulers behind a router, and the scheduler of a replica."""

from __future__ import annotations

from ..disagg.messages import REQUEST
from ..disagg.router import RoutedSource
from ..link import FOREVER, Link
from ..observe import NO_STEP, SLEEP
from .scheduler import Scheduler


class RoutedScheduler(Scheduler):
    """A scheduler whose requests come from the router."""

    @property
    def source(self) -> RoutedSource:
        assert isinstance(self.engine.source, RoutedSource), "a worker's requests come from the router"
        return self.engine.source

    @property
    def link(self) -> Link:
        """The connections to the other ranks."""
        assert self.engine.link is not None
        return self.engine.link


class Replica(RoutedScheduler):
    """One of several complete engines that share nothing but the router (upstream ``--dp-size`` without data-parallel
    attention)."""

    def receive(self) -> None:
        """As ``Scheduler.receive``. Raises LinkError if the router is gone."""
        gone = self.link.gone()
        super().receive()
        if gone:
            self.source.require_router(gone)

    def rest(self) -> bool:
        if super().rest():
            return True
        if self.source.closes():
            return False
        with self.engine.observer.range(SLEEP, NO_STEP, 0):
            self.link.wait((REQUEST,), FOREVER)
        return True
