"""One of several engines that share nothing but the router in front of them (upstream ``--dp-size`` without
data-parallel attention)."""

from __future__ import annotations

from ..disagg.messages import REQUEST
from ..observe import NO_STEP, SLEEP
from .prefilling import IDLE
from .turns import Delegate, routed


class Replica(Delegate):
    def rest(self) -> bool:
        engine = self.engine
        if self._scheduler.rest():
            return True
        if routed(engine).closes():
            return False
        assert engine.link is not None
        with engine.observer.range(SLEEP, NO_STEP, 0):
            engine.link.wait((REQUEST,), engine.clock.now() + IDLE)
        return True
