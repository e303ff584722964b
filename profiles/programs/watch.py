"""Runs a script that was written for torch on CUDA on a virtual GPU, and makes a result document of what it did.

Steps are found in its NVTX ranges by the maps that captures use; without a map that fits, copies, syncs and hazards are
counted for the whole program. The script runs in a process of its own::

    parent: schedbench watch              child: python -m schedbench.profiles.programs.watch
      request as JSON -- an argument -->    writes an empty line, runs the script, whose stdout goes to stderr, and
      result document <-- a pipe's end --   writes another one, then the document, or the error

The child has a session of its own, so that an interruption reaches it through the parent alone, once: it ends the
script, and the result is that of what the script had done.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn, cast
from weakref import WeakSet

from ...sched.observe import StepInfo, StepKind
from ..captures import maps
from ..captures.capture import CapturedRange, ProfilerCapture
from ..captures.files import chosen
from ..captures.maps import RangeMap
from ..captures.measure import CaptureReading, document
from ..captures.steps import CapturedSteps
from ..platform.hardware import load
from ..platform.interruption import send_again, sending_lost
from ..platform.machine import MachineError
from ..record.environment import environment
from ..record.result import PROGRAM, Abstained, Hazards, Result
from ..record.timeline import Window
from ..run.declared_hazards import split_declared
from ..vgpu.device import CURRENT, Absent, VirtualGpu
from ..vgpu.gpu import open_vgpu
from ..vgpu.ledger import LedgerContext
from ..vgpu.patching import attributes_set
from . import triton_kernels
from .hollow import hollow_packages
from .torch_cuda import cuda_answered
from .triton_kernels import triton_interpreted

# The step of a program whose ranges define none.
_WHOLE: Final = StepInfo(0, cast(StepKind, PROGRAM), 0, 0, False)


class WatchRequest(NamedTuple):
    """``map`` is the name or the file of a map of the program's NVTX ranges, or None for a shipped one that fits.
    ``hollow`` names packages that may be absent."""

    script: str
    arguments: Sequence[str]
    hardware: str
    hazards: bool
    map: str | None
    hollow: Sequence[str] = ()


class ProgramError(RuntimeError):
    """The watched program failed, and there is no result."""


class _Windows(list[Window]):
    """A sink that keeps all windows."""

    feed = list[Window].append


def watched(request: WatchRequest, ended: Callable[[], object] = lambda: None) -> Result:
    """``run.failure`` of the result says how the program failed, if it did, and ``run.cancelled`` whether it was
    interrupted. ``ended`` is called when the script has. Raises ProgramError where it failed before it used the device,
    HardwareError, MapError, OSError."""
    hardware, windows, cancelled, failure = load(request.hardware), _Windows(), False, None
    beside = sorted(Path(request.script).resolve().parent.iterdir())  # files are named from this folder on
    with (
        open_vgpu(hardware, sink=windows, watch=beside, hazards=request.hazards, gradients=True) as gpu,
        cuda_answered(gpu, hardware) as program,
        triton_interpreted(gpu) as kernels,
        hollow_packages(request.hollow) as packages,
    ):
        try:
            failure = _run(request)
        except KeyboardInterrupt:
            cancelled = True
        ended()
    if failure is not None and not any(window.ops for window in windows):
        raise ProgramError(failure)
    notes = (*program.notes(), *kernels.notes(), *packages.notes())
    spans = sorted(program.ranges, key=lambda span: (span.start, -span.end))
    facts = {**environment(), "gpu": hardware.name, "cuda_graph_trace": "graph"}
    capture = ProfilerCapture("vgpu", spans, rows=lambda _: [], facts=facts)
    meaning = chosen(capture) if request.map is None else maps.load(request.map)
    found = _reading(gpu, windows, spans, meaning, request.map, notes)
    hazards: Hazards | Abstained = Abstained(abstained="the run was not watched for hazards")
    if request.hazards:
        hazards = split_declared(gpu.findings, ())
    name = Path(request.script).stem
    return document(capture, meaning, found, name=name, hazards=hazards, failure=failure, cancelled=cancelled)


def _run(request: WatchRequest) -> str | None:
    """Run the script as ``python script arguments`` does. Returns how it failed, if it did; raises KeyboardInterrupt
    where it was interrupted."""
    # Lines of a relative path are not found after a change of the working folder.
    script = str(Path(request.script).absolute())
    folder = str(Path(request.script).resolve().parent)
    others, pools = threading.enumerate(), WeakSet[ThreadPoolExecutor]()
    make = ThreadPoolExecutor.__init__

    def made(pool: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
        make(pool, *args, **kwargs)
        pools.add(pool)

    argv, path, process = [request.script, *request.arguments], [folder, *sys.path], os.getpid()
    with attributes_set([(sys, "argv", argv), (sys, "path", path), (ThreadPoolExecutor, "__init__", made)]):
        try:
            runpy.run_path(script, run_name="__main__")
            if os.getpid() != process:
                sys.exit()
        except BaseException as error:
            # A process that the script forked ends as in a program of its own.
            if os.getpid() != process or isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, SystemExit):
                return None if error.code in (None, 0) else f"exited with {error.code}"
            traceback.print_exception(type(error), error, _from_script(error.__traceback__, script))
            return f"{type(error).__name__}: {error}"
        finally:
            for pool in list(pools):  # as Python does before it exits
                pool.shutdown()
            for thread in threading.enumerate():
                if thread not in others and not thread.daemon:
                    thread.join()
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt in the script: at once, or where it goes on after the emulation, whose state would be
    left half changed, after torch's change of its modes, which would lose the emulation's, or after a backward pass,
    which would abort the process. Before and after the script, the signal is sent again a little later."""
    package, place, outer = f"{__package__.partition('.')[0]}.", frame, frame
    while outer is not None and outer.f_code is not _run.__code__:
        module, name, outer = str(outer.f_globals.get("__name__")), outer.f_code.co_name, outer.f_back
        if module.startswith((package, "torch.overrides")) or name == "_engine_run_backward":
            place = outer
    if outer is None or place is None:
        send_again(number)
    elif place is frame:
        raise KeyboardInterrupt
    else:
        place.f_trace, place.f_trace_opcodes = _raise, True
        sys.settrace(lambda *_: None)


def _raise(*_: object) -> NoReturn:
    raise KeyboardInterrupt  # after which Python traces no more


def _reading(
    gpu: VirtualGpu,
    windows: Sequence[Window],
    spans: Sequence[CapturedRange],
    meaning: RangeMap,
    named: str | None,
    notes: tuple[str, ...],
) -> CaptureReading:
    """``named``: the map, if one was asked for."""
    steps = CapturedSteps(spans, meaning, epoch=0)
    if not steps.launches:
        steps.log.contexts.change(-1, LedgerContext("", 0, False))
        steps.log.launched.append(_WHOLE)
        steps.log.settled.append(_WHOLE)
        which = "of a shipped map" if named is None else f"of the map {named}"
        notes += (f"no NVTX range {which} launches a step: the whole program counts as one",)
    places = ((op, steps.log.contexts.at(op.launched)) for window in windows for op in window.ops)
    callers = ((call, steps.log.contexts.at(call.start)) for window in windows for call in window.calls)
    window = Window(
        0,
        windows[-1].end if windows else 0,
        ranges=steps.log.ranges,
        ops=[op._replace(range=at.range, step=at.step, forward=at.forward) for op, at in places],
        calls=[call._replace(range=at.range, step=at.step) for call, at in callers],
        waits=[wait for window in windows for wait in window.waits],
        launched=steps.log.launched,
        settled=steps.log.settled,
    )
    unfit = None if window.ops else "the program used no CUDA device"
    return CaptureReading(window, gpu.sites, gpu.streams, steps, notes, unfit)


_ENDS_S: Final = 2.0
_GOES_ON: Final = "has not ended yet; a second interruption ends it without a result"


def run_watched(python: str, request: WatchRequest, notice: Callable[[str], None] = lambda _: None) -> Result:
    """Run the request in a process of the interpreter ``python``. The first KeyboardInterrupt ends the script;
    ``notice`` is called where it goes on.

    Raises ProgramError if the program failed, MachineError if that interpreter has no schedbench, HardwareError and
    MapError; KeyboardInterrupt at the second one, and where the script had not begun.
    """
    load(request.hardware)
    if request.map is not None:
        maps.load(request.map)
    reader, writer = os.pipe()
    command = [python, "-m", __name__, str(writer), json.dumps(request._asdict())]
    with ThreadPoolExecutor(1) as pool, os.fdopen(reader, encoding="utf-8") as answers:
        try:
            child = subprocess.Popen(
                command,
                pass_fds=[writer],
                start_new_session=True,
                stdout=sys.stderr.fileno(),
                env={**os.environ, triton_kernels.VARIABLE: "1"},
            )
        except OSError as error:
            raise MachineError(f"{python} cannot be started: {error.strerror}") from None
        finally:
            os.close(writer)
        try:
            begun, ended = pool.submit(answers.readline), pool.submit(answers.readline)
            answer = pool.submit(answers.read)
            try:
                text, code = begun.result() + answer.result(), child.wait()
            except KeyboardInterrupt:
                if not begun.done():
                    raise
                if not ended.done():
                    child.send_signal(signal.SIGINT)
                if not wait([ended], _ENDS_S).done:
                    notice(f"{request.script} {_GOES_ON}")
                text, code = begun.result() + answer.result(), child.wait()
        except BaseException:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            raise
    return _answer(text, code, python, request)


def _answer(text: str, code: int, python: str, request: WatchRequest) -> Result:
    if text.strip():
        document = json.loads(text)
        if "error" in document:
            raise ProgramError(document["error"])
        return Result.from_document(document, name=request.script)
    if not text:
        raise MachineError(f"{python} has no schedbench: install it there, or write python for this one")
    ended = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    raise ProgramError(f"{request.script}: its process {ended} before it was done")


def main(arguments: Sequence[str]) -> None:
    """The child's part: ``arguments`` are the number of the pipe's end and the request."""
    number, text = arguments
    request = WatchRequest(**json.loads(text))
    _end_with_reader(int(number))
    # What the program starts answers nothing, and may outlast it.
    os.set_inheritable(int(number), False)
    os.register_at_fork(after_in_child=lambda: _forked(int(number)))
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = sending_lost(lambda: signal.SIGINT)
    with os.fdopen(int(number), "w", encoding="utf-8") as answers:

        def ended() -> None:
            atexit._run_exitfuncs()  # the program's, which may use the device
            print(file=answers, flush=True)

        print(file=answers, flush=True)
        try:
            answer = watched(request, ended).to_json()
        except ProgramError as error:
            answer = json.dumps({"error": f"{request.script}: {error}"})
        answers.write(answer)


def _forked(number: int) -> None:
    """In a process that the script forked: nothing is answered, and what the device did before cannot be continued."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    gpu = CURRENT.get()
    if isinstance(gpu, VirtualGpu) and gpu.clock.now():
        why = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        CURRENT.set(cast(VirtualGpu, Absent(why + "'spawn' start method")))  # CUDA's words


def _end_with_reader(number: int) -> None:
    """Make this process exit as soon as the reader of that pipe has ended for any reason."""
    ends = select.poll()
    ends.register(number, 0)  # the end of the reader is always reported

    def wait_for_end() -> None:
        ends.poll()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="end_with_reader", daemon=True).start()


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script's own frame on, as Python itself would print it."""
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main(sys.argv[1:])
