"""A run under Nsight Systems: ``python -m schedbench.profiles.ranks.recorded_child SCENARIO --device D``.

It makes one pass without CUPTI, which serves only one tool at a time. Its result is not used; the capture is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..platform.resolve import ask
from .execute import Options, execute


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one scenario once, for a profiler that records it.")
    parser.add_argument("scenario")
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    resolved = ask(given.scenario, given.set)
    execute(resolved, resolved.relays[0], Options(device=given.device, traced=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
