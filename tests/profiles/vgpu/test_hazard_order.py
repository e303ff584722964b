"""Vector clocks compared with the graph of the order; footprints compared with sets of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedbench.profiles.vgpu.hazards.clocks import Clock, VectorClocks
from schedbench.profiles.vgpu.hazards.footprints import (
    ByteSpan,
    Grid,
    Pieces,
    Scattered,
    StridedSpan,
    joined,
    meet,
    span,
)

STREAMS = (1, 2, 3)

# Waits of the host order all that was launched before them: few, so that the order between streams is seen.
KINDS = [*["launch"] * 4, *["record", "wait"] * 3, "synchronize", "drain"]
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(STREAMS)), min_size=20, max_size=40)


@dataclass
class Reference:
    """Each operation with the set of all operations before it."""

    before: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)
    streams: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: {s: set() for s in STREAMS})
    host: set[tuple[int, int]] = field(default_factory=set)

    def launch(self, stream: int, seq: int) -> None:
        self.streams[stream] |= self.host
        self.before[stream, seq] = set(self.streams[stream])
        self.streams[stream].add((stream, seq))


@given(steps)
def test_clocks_order_exactly_the_operations_before(program: list[tuple[str, int]]) -> None:
    clocks, reference = VectorClocks(), Reference()
    for stream in STREAMS:
        clocks.of(stream)
    events: list[tuple[Clock, set[tuple[int, int]]]] = [([0], set())]
    for what, actor in program:
        known, past = events[-1]
        if what == "launch":
            reference.launch(actor, clocks.launch(actor))
            now = clocks.of(actor)
            seen = {op for op in reference.before if op[1] <= now[op[0]]}
            assert seen == reference.streams[actor]
        elif what == "record":
            events.append((clocks.recorded(actor), set(reference.streams[actor])))
        elif what == "wait":
            clocks.wait(actor, known)
            reference.streams[actor] |= past
        elif what == "synchronize":
            clocks.synchronize(known)
            reference.host |= past
        else:
            clocks.synchronize_all()
            reference.host |= set(reference.before)
    everyone = clocks.known()
    dropped = {op for op in reference.before if op[1] <= everyone[op[0]]}
    assert dropped == reference.host | set.intersection(*reference.streams.values())


def test_a_new_stream_starts_after_the_hosts_waits() -> None:
    clocks = VectorClocks()
    seq = clocks.launch(1)
    clocks.synchronize(clocks.recorded(1))
    clocks.launch(7)
    assert clocks.of(7)[1] == seq


spans = st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda x: ByteSpan(x[0], x[0] + x[1]))


@given(st.lists(spans, max_size=6), st.lists(spans, max_size=6))
def test_pieces_overlap_where_bytes_are_shared(ours: list[ByteSpan], theirs: list[ByteSpan]) -> None:
    shared = {k for s in ours for k in range(*s)} & {k for s in theirs for k in range(*s)}
    assert meet(scattered(ours), scattered(theirs)) == bool(shared)
    if len(theirs) == 1:
        assert meet(scattered(ours), theirs[0]) == meet(theirs[0], scattered(ours)) == bool(shared)


@given(spans, spans)
def test_spans_overlap_where_bytes_are_shared(a: ByteSpan, b: ByteSpan) -> None:
    assert meet(a, b) == bool(set(range(*a)) & set(range(*b)))


def scattered(parts: list[ByteSpan]) -> Scattered:
    starts = np.array([part.start for part in parts], np.int64)
    ends = np.array([part.end for part in parts], np.int64)
    return Scattered(lambda: Pieces.of(starts, ends))


@given(st.data())
def test_an_index_accesses_the_bytes_it_selects(data: st.DataObject) -> None:
    """A write through the index shows which bytes change."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    base = torch.zeros([n + 1 for n in shape], dtype=torch.int16)
    table = base[tuple(slice(1, None) for _ in shape)]
    count = data.draw(st.integers(1, len(shape)))
    indices = [
        data.draw(st.none() | st.lists(st.integers(-n, n - 1), min_size=3, max_size=3).map(torch.tensor))
        for n in shape[:count]
    ]
    grid = Grid.of(table)
    table[tuple(slice(None) if index is None else index for index in indices)] = -1
    written = set(np.flatnonzero(base.flatten().view(torch.uint8).numpy()).tolist())
    pieces = grid.at(indices)
    covered = {k for part in zip(pieces.starts, pieces.ends, strict=True) for k in range(*map(int, part))}
    assert written == covered


def test_rows_are_cut_to_their_lengths() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    pieces = Grid.of(table).rows((torch.tensor([2, 0]), torch.tensor([3, 10]), None))
    assert pieces.starts.tolist() == [0, 80] and pieces.ends.tolist() == [40, 92]


def test_only_the_given_number_of_lines_of_a_row_counts() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    lines = (torch.tensor([[2, 0], [1, 3]]), None, torch.tensor([2, 1]))
    assert Grid.of(table).rows(lines).starts.tolist() == [0, 40, 80]


def test_empty_lines_overlap_nothing() -> None:
    lines = (torch.tensor([1]), torch.tensor([0]), None)
    nothing = Grid.of(torch.zeros(4, 10, dtype=torch.int32)).rows(lines)
    assert not nothing.starts.tolist()


@given(st.data())
def test_a_span_has_the_bytes_of_a_view(data: st.DataObject) -> None:
    """A write through the view shows which bytes change. Those of several views of a graph are joined."""
    base = torch.zeros(4, 5, 3, dtype=torch.int16)
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        cut = [slice(data.draw(st.integers(0, 4)), None, data.draw(st.integers(1, 3))) for _ in base.shape]
        view = base[tuple(cut)].permute(data.draw(st.permutations(range(3))))
        view.fill_(-1)
        parts.append(span(view))
    written = set(np.flatnonzero(base.flatten().view(torch.uint8).numpy()).tolist())
    pieces = joined({*parts}).pieces()
    covered = {k for part in zip(pieces.starts, pieces.ends, strict=True) for k in range(*map(int, part))}
    assert written == covered


def test_a_dense_view_is_one_span() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    assert span(table[1, 2:5]) == ByteSpan(48, 60)
    assert span(table.t()) == span(table[:, None].expand(4, 2, 10)) == ByteSpan(0, 160)
    assert span(table[:, 0]) == StridedSpan(0, 124, 4, ((4, 40),))
    assert span(table[:0]) == ByteSpan(0, 0)
