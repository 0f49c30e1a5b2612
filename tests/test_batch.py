"""Lists of token ids to the tensors of one step: lines, rectangles, packed sequences and their groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import batch
from minillm.batch import Batch, context, groups, line, pack, rectangle
from minillm.cache import KVPool
from minillm.model import Llama
from minillm.request import Request, SamplingParams

CPU = torch.device("cpu")


@dataclass
class Step:
    """A step over requests in any state, in slots that lie anywhere: what `pack` is given."""

    plan: list[tuple[Request, int]]
    n_slots: int
    max_running: int
    max_len: int

    def pool(self, model: Llama, fill: float = float("nan")) -> KVPool:
        """Every slot holds `fill`, every entry of the table points to scratch, but for what was computed before."""
        pool = KVPool(model, self.n_slots, self.max_running, self.max_len)
        pool.k.fill_(fill)
        pool.v.fill_(fill)
        pool.table.fill_(self.n_slots)
        for request, _ in self.plan:
            pool.table[request.row, : request.computed] = torch.tensor(request.slots[: request.computed])
        return pool


def request(tokens: Sequence[int], computed: int, row: int, slots: Sequence[int]) -> Request:
    made = Request(list(tokens), SamplingParams(), seed=0, limit=100)
    made.computed, made.row, made.slots = computed, row, slots
    return made


@st.composite
def steps(draw: st.DrawFn, most: int = 5, longest: int = 12) -> Step:
    """1 to `most` sequences of random lengths, each at a random point, in random rows, order and slots."""
    sequences: list[tuple[int, int, int]] = []  # computed, new, left for later steps
    for _ in range(draw(st.integers(1, most))):
        new = draw(st.one_of(st.just(1), st.integers(1, longest)))
        sequences.append((draw(st.integers(0, longest)), new, draw(st.sampled_from([0, 0, 1, 5]))))
    max_running = most + 2
    rows = draw(st.permutations(range(max_running)))
    n_slots = sum(computed + new for computed, new, _ in sequences) + draw(st.integers(0, 20))
    slots = draw(st.permutations(range(n_slots)))
    plan, used = [], 0
    for row, (computed, new, later) in zip(rows, sequences, strict=False):
        mine = slots[used : used + computed + new]
        used += computed + new
        tokens = draw(st.lists(st.integers(0, 63), min_size=computed + new + later, max_size=computed + new + later))
        plan.append((request(tokens, computed, row, mine), new))
    return Step(plan, n_slots, max_running, 2 * longest)


# ---- line and rectangle


@given(st.lists(st.integers(0, 63), min_size=1), st.integers(0, 50))
def test_line(new: list[int], start: int) -> None:
    tokens, positions = line(new, start, CPU)
    assert tokens.tolist() == new and positions.tolist() == [start + i for i in range(len(new))]
    assert tokens.dtype == positions.dtype == torch.int64


def test_rectangle_of_the_docstring() -> None:
    tokens, positions, last = rectangle([[11, 12, 13], [14]], [5, 9], 12, CPU)
    assert tokens.tolist() == [[11, 12, 13], [14, 0, 0]]
    assert positions.tolist() == [[5, 6, 7], [9, 10, 11]]
    assert last.tolist() == [2, 0]


rows = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 63), min_size=1, max_size=6)), min_size=1)


@given(rows, st.integers(1, 5))
def test_pads_lie_where_no_real_token_looks(rows: list[tuple[int, list[int]]], spare: int) -> None:
    """hf#33095: each row counts from its own start. A pad's place is after its row's text, or the last one."""
    starts, new = [start for start, _ in rows], [tokens for _, tokens in rows]
    size = max(start + len(tokens) for start, tokens in rows) + spare  # one place at least for pads alone
    tokens, positions, last = rectangle(new, starts, size, CPU)
    assert tokens.shape == positions.shape == (len(rows), max(map(len, new)))
    for b, (start, row) in enumerate(rows):
        stop = start + len(row)
        assert tokens[b, : len(row)].tolist() == row and not tokens[b, len(row) :].any()
        assert positions[b, : len(row)].tolist() == list(range(start, stop))
        assert ((positions[b, len(row) :] >= stop) & (positions[b, len(row) :] < size)).all()
        assert last[b] == len(row) - 1


# ---- pack and context


def test_pack_of_three_sequences_end_to_end(tiny: Llama) -> None:
    """huggingface/nanoVLM#204: positions restart with each sequence."""
    lengths = (4, 2, 4)
    plan, first = [], 0
    for row, n in enumerate(lengths):
        plan.append((request(range(n), 0, row, range(first, first + n)), n))
        first += n
    packed = pack(plan, KVPool(tiny, 10, 3, 4))
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert packed.seq.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert packed.last.tolist() == [3, 5, 9]


@given(steps())
def test_pack_lays_every_new_token_once(tiny: Llama, step: Step) -> None:
    pool = step.pool(tiny)
    packed = pack(step.plan, pool)
    expected: dict[str, list[Any]] = {"tokens": [], "positions": [], "seq": [], "slots": [], "last": []}
    samples = []
    for r, n in step.plan:
        for p in range(r.computed, r.computed + n):
            assert r.row is not None
            for name, value in zip(expected, (r.tokens[p], p, r.row, r.slots[p]), strict=False):
                expected[name].append(value)
        if r.computed + n == len(r.tokens):  # no sample before the last chunk of a prompt
            expected["last"].append(len(expected["tokens"]) - 1)
            samples.append(r)
    for name, value in expected.items():
        assert getattr(packed, name).tolist() == value, name
    assert packed.samples == samples
    assert [(c.row, c.start, c.n) for c in packed.chunks] == [(r.row, r.computed, n) for r, n in step.plan]
    for r, n in step.plan:
        stop = r.computed + n
        assert pool.table[r.row, :stop].tolist() == list(r.slots[:stop])
        assert (pool.table[r.row, stop:] == step.n_slots).all()  # a neighbour's row and later places: untouched


@given(steps())
def test_context_lists_each_sequence_up_to_its_last_new_token(tiny: Llama, step: Step) -> None:
    pool = step.pool(tiny)
    slots, positions, seq = context(pack(step.plan, pool), pool.table)
    expected = [(r.slots[p], p, r.row) for r, n in step.plan for p in range(r.computed + n)]
    assert list(zip(slots.tolist(), positions.tolist(), seq.tolist(), strict=True)) == expected


# ---- groups


def check_groups(packed: Batch, pool: KVPool) -> list[batch.Group]:
    """What every grouping must be: nothing is left out, doubled, mixed, or read without having been written."""
    made = groups(packed, pool.table)
    covered = torch.cat([group.queries.flatten() for group in made])
    assert sorted(covered.tolist()) == list(range(len(packed.tokens)))
    for group in made:
        N, t = group.queries.shape
        S = group.slots.shape[1]
        assert group.slots.shape == (N, S) and group.mask.shape == (N, t, S)
        assert (N == 1 or t == 1) and t <= batch.TILE
        for queries, slots, mask in zip(group.queries, group.slots, group.mask, strict=True):
            (row,) = set(packed.seq[queries].tolist())
            own = pool.table[row, : int(packed.positions[queries].max()) + 1]
            assert torch.equal(slots[: len(own)], own)
            assert (slots[len(own) :] == own[0]).all()
            assert torch.equal(mask, torch.arange(S) <= packed.positions[queries][:, None])
    return made


@given(steps())
def test_groups_cover_each_token_once_and_read_their_own_slots_alone(tiny: Llama, step: Step) -> None:
    pool = step.pool(tiny)
    check_groups(pack(step.plan, pool), pool)


@given(steps(most=8), st.integers(0, 12), st.integers(1, 13))
def test_groups_stay_right_where_they_split(tiny: Llama, step: Step, split: int, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT", split)
        patch.setattr(batch, "TILE", tile)
        pool = step.pool(tiny)
        check_padding(check_groups(pack(step.plan, pool), pool), pool, split)


def scores(model: Llama, chunks: list[tuple[int, int]]) -> int:
    """Attention scores that a step of chunks (start, n) computes, one head's."""
    plan = [(request([0] * (s + n), s, row, [0] * (s + n)), n) for row, (s, n) in enumerate(chunks)]
    pool = KVPool(model, 1, len(chunks), max(s + n for s, n in chunks))
    return sum(group.mask.numel() for group in groups(pack(plan, pool), pool.table))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=4), st.integers(1, 310))
def test_scores_above_the_diagonal_are_skipped_but_for_corners(
    tiny: Llama, chunks: list[tuple[int, int]], tile: int
) -> None:
    """Of a chunk of n new tokens, no more than n * (tile - 1) / 2 scores are computed and masked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT", 0)
        patch.setattr(batch, "TILE", tile)
        needed = sum(n * s + n * (n + 1) // 2 for s, n in chunks)
        assert needed <= scores(tiny, chunks) <= needed + sum(n * (tile - 1) for _, n in chunks) // 2


def test_a_long_prompt_computes_little_more_than_half_of_the_square(tiny: Llama) -> None:
    assert scores(tiny, [(0, 2048)]) < 0.54 * 2048**2
    # and a chunk that fits one tile is one rectangle
    assert scores(tiny, [(100, batch.TILE)]) == batch.TILE * (100 + batch.TILE)


def check_padding(made: list[batch.Group], pool: KVPool, split: int) -> None:
    """No group reads more unneeded slots than one more rectangle would cost."""
    for group in made:
        lengths = group.mask.any(1).sum(-1)  # [N]
        assert int((group.slots.shape[1] - lengths).sum()) <= split


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.sampled_from([1, 30, 3000]))
def test_padding_of_single_tokens_is_bounded(tiny: Llama, lengths: list[int], split: int) -> None:
    """Lengths that grow little by little must not creep past the bound either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPLIT", split)
        check_single_tokens(tiny, lengths, split)


def test_padding_does_not_creep(tiny: Llama) -> None:
    check_single_tokens(tiny, [90 * i for i in range(1, 33)], batch.SPLIT)


def check_single_tokens(model: Llama, lengths: list[int], split: int) -> None:
    plan = [(request([0] * n, n - 1, row, [0] * n), 1) for row, n in enumerate(lengths)]
    pool = KVPool(model, 1, len(lengths), max(lengths))
    made = groups(pack(plan, pool), pool.table)
    check_padding(made, pool, split)
    assert sum(len(group.queries) for group in made) == len(lengths)
    # and no more rectangles than that calls for: equal lengths share one
    assert len(made) <= len(set(lengths))
    if max(lengths) * len(lengths) - sum(lengths) <= split:
        assert len(made) == 1
