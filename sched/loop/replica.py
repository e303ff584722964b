"""One of several engines that share nothing but the router in front of them (upstream ``--dp-size`` without
data-parallel attention)."""

from __future__ import annotations

from ..disagg.messages import REQUEST
from ..link import FOREVER
from ..observe import NO_STEP, SLEEP
from .driver import Delegate, link_of, routed


class Replica(Delegate):
    def receive(self) -> None:
        """Take what has arrived. Raises LinkError when the router is gone."""
        gone = link_of(self.engine).gone()
        self._scheduler.receive()
        if gone:
            routed(self.engine).needs_router(gone)

    def rest(self) -> bool:
        engine = self.engine
        if self._scheduler.rest():
            return True
        if routed(engine).closes():
            return False
        with engine.observer.range(SLEEP, NO_STEP, 0):
            link_of(engine).wait((REQUEST,), FOREVER)
        return True
