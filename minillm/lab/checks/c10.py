"""Lesson 10, prefix sharing: keys by what they must tell apart, blocks by their owners, and seven functions inside the
real engine, whose every token is the naive stage's, with NaN in every slot that is neither held nor to be found."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from minillm.engine import Engine
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.tiny import TINY
from minillm.lab.work import Work, Wrong
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, Request, make_request
from minillm.sharing import Entry, SharedSlots
from minillm.slots import BlockSlots
from minillm.stages import naive

# ---- what the lesson hands out


@dataclass
class Memory:
    """What is known of the blocks of one pool. Block b is slots b*size .. (b+1)*size - 1; a block table is a list of
    block numbers, one for each `size` positions of a text."""

    size: int  # slots of a block
    owners: list[int]  # of each block: how many tables it stands in
    free: OrderedDict[int, None]  # the blocks that stand in none; the first is taken first
    index: dict[Any, int]  # {key: block}: the blocks that can be found, whether held or free
    key_of: dict[int, Any]  # {block: key}: the same the other way round

    @classmethod
    def fresh(cls, n_blocks: int, size: int) -> "Memory":
        """Nothing is held, and nothing can be found."""
        return cls(size, [0] * n_blocks, OrderedDict.fromkeys(range(n_blocks)), {}, {})


FUNCTIONS = ("find", "take", "hold", "give_back", "publish", "copy_on_write")  # what the engine calls


class FunctionSlots(SharedSlots):
    """The package's `SharedSlots` with another head: the lesson's functions decide, here they are only called.

    functions  {name: function}, at least those of FUNCTIONS
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        max_running: int,
        max_len: int,
        n_slots: int | None = None,
        size: int = 16,
    ):
        super().__init__(max_running, max_len, n_slots, size)
        self.call = {name: functions[name] for name in FUNCTIONS}
        self.memory = Memory(size, self.owners, self.free, {}, {})

    def _lookup(self, request: Request) -> list[Entry]:
        return [Entry(block, None, ()) for block in self.call["find"](self.memory.index, request.tokens, self.size)]

    def _enter(self, request: Request) -> None:
        found = [entry.block for entry in self._lookup(request)[: request.computed // self.size]]
        BlockSlots._enter(self, request)
        self._count(request)
        self._give_table(request, self.call["hold"](self.memory, found))

    def _give_table(self, request: Request, table: list[int]) -> None:
        request.blocks = table
        request.slots = [block * self.size + j for block in table for j in range(self.size)]

    def _take(self) -> int:
        block: int = self.call["take"](self.memory)
        return block

    def reserve(self, request: Request, n: int) -> None:
        if request.row is not None:
            request.moves = list(self.call["copy_on_write"](self.memory, request.blocks, request.computed))
            self._give_table(request, request.blocks)
            if request.moves:
                request.entered = min(request.entered, request.computed // self.size * self.size)
        BlockSlots.reserve(self, request, n)

    def stored(self, request: Request) -> None:
        self.call["publish"](self.memory, request.blocks, request.tokens, request.computed)

    def fork(self, request: Request, other: Request) -> None:
        BlockSlots._enter(self, other)
        other.computed = request.computed
        self._count(other)
        self._give_table(other, self.call["hold"](self.memory, request.blocks))

    def release(self, request: Request) -> None:
        if request.row is not None:
            self.call["give_back"](self.memory, request.blocks)
            request.blocks = []
        super().release(request)


# ---- right ones, for when a function that another one calls is wrong


def right_block_keys(tokens: Sequence[int], size: int) -> list[Any]:
    return [tuple(tokens[: (i + 1) * size]) for i in range(len(tokens) // size)]


def finder(block_keys: Callable[..., list[Any]]) -> Callable[..., list[int]]:
    def right_find(index: dict[Any, int], tokens: Sequence[int], size: int) -> list[int]:
        found: list[int] = []
        for key in block_keys(tokens, size)[: (len(tokens) - 1) // size]:
            if key not in index:
                break
            found.append(index[key])
        return found

    return right_find


def right_take(memory: Memory) -> int:
    block, _ = memory.free.popitem(last=False)
    memory.owners[block] = 1
    if block in memory.key_of:
        del memory.index[memory.key_of.pop(block)]
    return block


def right_hold(memory: Memory, blocks: Sequence[int]) -> list[int]:
    for block in blocks:
        memory.owners[block] += 1
        memory.free.pop(block, None)
    return list(blocks)


def right_give_back(memory: Memory, table: Sequence[int]) -> None:
    for block in reversed(table):
        memory.owners[block] -= 1
        if memory.owners[block] == 0:
            memory.free[block] = None


def publisher(block_keys: Callable[..., list[Any]]) -> Callable[..., None]:
    def right_publish(memory: Memory, table: Sequence[int], tokens: Sequence[int], computed: int) -> None:
        for key, block in zip(block_keys(tokens[:computed], memory.size), table, strict=False):
            if key not in memory.index:
                memory.index[key] = block
                memory.key_of[block] = key

    return right_publish


def right_copy_on_write(memory: Memory, table: list[int], position: int) -> list[tuple[int, int]]:
    i, size = position // memory.size, memory.size
    if i >= len(table) or memory.owners[table[i]] == 1:
        return []
    old, new = table[i], right_take(memory)
    memory.owners[old] -= 1
    table[i] = new
    return [(old * size + j, new * size + j) for j in range(position % size)]


KEYS = {"block_keys": right_block_keys}
RIGHT: dict[str, Callable[..., Any]] = {
    "find": finder(right_block_keys),
    "take": right_take,
    "hold": right_hold,
    "give_back": right_give_back,
    "publish": publisher(right_block_keys),
    "copy_on_write": right_copy_on_write,
}


ENGINE = "in the engine, beside right other functions, every token is the naive stage's; free slots hold NaN"


# ---- block_keys

Text = list[int]


class Same(int):
    """A token whose hash is that of every other one: what anyone can bring about who knows the hash."""

    def __hash__(self) -> int:
        return 0


def keys_of(work: Work, tokens: Sequence[int], size: int) -> list[Any]:
    """The learner's keys, once they are a list of things that can stand in a dictionary."""
    got = work.call("block_keys", tokens, size)
    where = f"block_keys({list(map(int, tokens))}, {size})"
    if got is None:
        raise Wrong(f"{where} is None: is a `return` missing?")
    if not isinstance(got, list | tuple):
        raise Wrong(f"{where} is {type(got).__name__}; it must be a list of keys, one for each full block")
    for key in got:
        try:
            hash(key)
        except TypeError as error:
            raise Wrong(
                f"{where}: a key cannot stand in a dictionary ({error}); make a tuple of what is a list"
            ) from error
    return list(got)


def texts(seed: int, n: int) -> Iterator[tuple[Text, Text, int]]:
    """Pairs of texts of few different tokens, so that they agree in many places; and a size of block."""
    yield [1, 1, 9, 9, 5], [2, 2, 9, 9], 2
    draw = seeds.rng(seed)
    for _ in range(n):
        size = draw.choice((1, 2, 3, 4))
        first = [draw.choice((7, 8)) for _ in range(draw.randint(0, 13))]
        keep = draw.randint(0, len(first))
        second = first[:keep] + [draw.choice((7, 8)) for _ in range(draw.randint(0, 6))]
        if draw.random() < 0.4 and len(first) > keep:  # another beginning, the same end
            second = [draw.choice((7, 8)) for _ in range(keep)] + first[keep:]
        yield first, second, size


@holds(
    "10",
    "block_keys",
    "one key for each full block; a last block that is not full has none",
    hint="a text of n tokens has n // size full blocks: a range up to there, and a slice for each.",
)
def keys_full_blocks(work: Work) -> None:
    for n in range(14):
        for size in (1, 2, 4, 16):
            got = len(keys_of(work, list(range(10, 10 + n)), size))
            if got != n // size:
                raise Wrong(
                    f"a text of {n} in blocks of {size}: expected {n // size} keys, one per full block; got {got}"
                )


@holds(
    "10",
    "block_keys",
    "two blocks have equal keys exactly if their texts agree from the first token to the end of the block",
    hint="take the key of the block before into this one: key = (key, tuple(own tokens)), and begin with None.",
)
def keys_are_chained(work: Work) -> None:
    for first, second, size in texts(1, 200):
        mine, other = keys_of(work, first, size), keys_of(work, second, size)
        for i, key in enumerate(mine):
            for words, text, keys in ((f"{first} and {second}", second, other), (f"{first} twice", first, mine)):
                for j in range(len(keys)):
                    whole, theirs = first[: (i + 1) * size], text[: (j + 1) * size]
                    if (key == keys[j]) == (whole == theirs):
                        continue
                    if whole == theirs:
                        raise Wrong(
                            f"blocks of {size} of {words}: block {i} is the same in both, with all that came before, "
                            "and has different keys"
                        )
                    own, other_own = whole[i * size :], theirs[j * size :]
                    tells = f"both hold {own}" if own == other_own else f"they hold {own} and {other_own}"
                    raise Wrong(
                        f"blocks of {size} of {words}: block {i} of the first and block {j} of the second have one "
                        f"key; {tells}, and end the texts {whole} and {theirs}, so their K and V differ"
                    )
        if mine != keys_of(work, list(first), size):
            raise Wrong(f"block_keys({first}, {size}) asked twice: the keys are not equal, so nothing is ever found")


@holds(
    "10",
    "block_keys",
    "texts whose hashes are all equal still have different keys: the whole key is compared, never its hash alone",
    hint="return what is hashed, not `hash(...)` of it: a dictionary hashes the key by itself, then compares it whole.",
)
def keys_survive_collisions(work: Work) -> None:
    for first, second, size in [([5, 6], [6, 5], 2), *texts(2, 60)]:
        mine = keys_of(work, [Same(t) for t in first], size)
        other = keys_of(work, [Same(t) for t in second], size)
        for i, (key, theirs) in enumerate(zip(mine, other, strict=False)):
            if key == theirs and first[: (i + 1) * size] != second[: (i + 1) * size]:
                raise Wrong(
                    f"tokens that all have the hash 0: block {i} of {first} and of {second} (size {size}) have the "
                    f"same key, {key!r}. Whoever can make two texts with one hash then reads another's K and V"
                )


@holds(
    "10", "block_keys", ENGINE, hint="a key must hold all that K and V depend on: every token from the first one on."
)
def keys_in_the_engine(work: Work) -> None:
    in_the_engine(work, "block_keys", 31)


# ---- find


def index_of(work: Work, tokens: Sequence[int], size: int, blocks: Sequence[int]) -> dict[Any, int]:
    return dict(zip(keys_of(work, tokens, size), blocks, strict=False))


def found(work: Work, index: dict[Any, int], tokens: Text, size: int, words: str) -> list[int]:
    got = work.call("find", index, tokens, size)
    if got is None:
        raise Wrong(f"find returned None{words}: is a `return` missing?")
    if not isinstance(got, list | tuple) or not all(isinstance(block, int) for block in got):
        raise Wrong(f"find returned {got!r}{words}; it must return a list of block numbers")
    return list(got)


@holds(
    "10",
    "find",
    "at least one token is left to compute, even if the whole text is known",
    hint="only the first (n - 1) // size blocks of a text of n tokens may be found.",
    uses=KEYS,
)
def find_leaves_one(work: Work) -> None:
    if got := found(work, {}, [5], 4, " for an empty index"):
        raise Wrong(f"nothing is known, and find returned {got}; expected []")
    for size in (4, 1, 2):
        whole = list(range(20, 32))
        index = index_of(work, whole, size, range(30, 60))
        for n in range(1, 13):
            expected = [30 + i for i in range((n - 1) // size)]
            got = found(work, index, whole[:n], size, "")
            if len(got) * size >= n:
                raise Wrong(
                    f"{n} tokens in blocks of {size}, all known: find returned {got}, which is the whole text. Nothing "
                    f"would be computed, so there would be no logits; expected {expected}"
                )
            if got != expected:
                raise Wrong(f"{n} tokens in blocks of {size}, all known: expected {expected}, got {got}")


@holds(
    "10",
    "find",
    "the blocks found are a beginning of the text, in order, and the longest that is known",
    hint="go through the keys in order, and stop at the first that is not in the index.",
    uses=KEYS,
)
def find_a_beginning(work: Work) -> None:
    found(work, {}, [5], 4, " for an empty index")
    whole = list(range(20, 33))
    for gone in range(4):
        for there in ((7, 2, 9, 4), (0, 3, 5, 1), (6, 0, 8, 2)):
            index = {key: b for key, b in index_of(work, whole, 3, there).items() if b != there[gone]}
            expected, got = list(there[:gone]), found(work, index, whole, 3, "")
            if got != expected:
                zero = "; block 0 is a block like any other: compare with None" if 0 in expected else ""
                raise Wrong(
                    f"13 tokens in blocks of 3, of which block {gone} is not known and all others are: expected "
                    f"{expected}, got {got}{zero}"
                )
    for first, second, size in texts(3, 100):
        common = 0
        while common < min(len(first), len(second)) and first[common] == second[common]:
            common += 1
        if second:
            blocks = list(range(50, 90))
            expected = blocks[: min(common // size, (len(second) - 1) // size)]
            got = found(work, index_of(work, first, size, blocks), second, size, "")
            if got != expected:
                raise Wrong(f"{first} is known, {second} is looked for, size {size}: expected {expected}, got {got}")


@holds(
    "10",
    "find",
    ENGINE,
    hint="which blocks may be found in the story of the message, and which token must be computed?",
)
def find_in_the_engine(work: Work) -> None:
    in_the_engine(work, "find", 32)


# ---- take, hold, give_back


def words_of(memory: Memory) -> str:
    return f"owners {memory.owners}, free {list(memory.free)}, key_of {memory.key_of}"


def compare(name: str, before: str, got: Memory, expected: Memory) -> None:
    """Every part of the memory, named, after a call of `name`."""
    for i, (mine, ours) in enumerate(zip(got.owners, expected.owners, strict=True)):
        if mine != ours:
            raise Wrong(f"{before}:\nafter {name} the owners of block {i} must be {ours}, and are {mine}")
    for part in ("index", "key_of"):
        mine, ours = getattr(got, part), getattr(expected, part)
        if mine != ours:
            raise Wrong(f"{before}:\nafter {name} memory.{part} must be {ours}, and is {mine}")
    if list(got.free) != list(expected.free):
        kind = "" if set(got.free) != set(expected.free) else ": the same blocks in another order"
        raise Wrong(
            f"{before}:\nafter {name} memory.free must be {list(expected.free)}, the next to be taken first, and is "
            f"{list(got.free)}{kind}"
        )


def memories(seed: int, n: int) -> Iterator[tuple[Memory, list[list[int]]]]:
    """Memories in all sorts of states, and the tables in them: some free blocks can be found, some tables share."""
    draw = seeds.rng(seed)
    for _ in range(n):
        memory = Memory.fresh(8, draw.choice((2, 4)))
        tables: list[list[int]] = []
        for step in range(draw.randint(2, 12)):
            kind = draw.random()
            if kind < 0.5 and len(memory.free) > 1:
                tables.append([right_take(memory) for _ in range(draw.randint(1, min(3, len(memory.free) - 1)))])
                for block in tables[-1][: draw.randint(0, 3)]:
                    key = f"key {step}.{block}"
                    memory.index[key], memory.key_of[block] = block, key
            elif kind < 0.7 and tables:
                tables.append(right_hold(memory, draw.choice(tables)))
            elif tables:
                right_give_back(memory, tables.pop(draw.randrange(len(tables))))
        yield memory, tables


@holds(
    "10",
    "take",
    "the block that was given back first is taken, and has one owner",
    hint="`memory.free.popitem(last=False)` gives the first (block, None); then set its count to 1.",
)
def take_the_oldest(work: Work) -> None:
    for memory, _ in memories(11, 60):
        if not memory.free:
            continue
        before, expected = words_of(memory), next(iter(memory.free))
        got = work.call("take", memory, changes=(0,))
        if got is None:
            raise Wrong("take returned None: is a `return` missing? It must return the number of the block")
        if got != expected:
            raise Wrong(f"{before}:\nexpected block {expected}, the first of the free ones; got {got!r}")
        if memory.owners[got] != 1:
            raise Wrong(f"{before}:\nwho takes block {got} is its one owner; owners[{got}] is {memory.owners[got]}")
        if got in memory.free:
            raise Wrong(f"{before}:\nblock {got} was taken and is still in memory.free: it would be given out twice")


@holds(
    "10",
    "take",
    "a block that is taken can no longer be found: its entry goes from both dictionaries, and no other does",
    hint="key = memory.key_of.pop(block, None); if there is one, del memory.index[key].",
)
def take_forgets(work: Work) -> None:
    for memory, _ in memories(12, 80):
        while memory.free:
            before, expected = words_of(memory), deepcopy(memory)
            block = work.call("take", memory, changes=(0,))
            if block not in expected.free:
                return  # which one to take is another property's
            expected.free.move_to_end(block, last=False)
            right_take(expected)
            if block in memory.index.values() or block in memory.key_of:
                raise Wrong(
                    f"{before}:\nblock {block} is taken for something else, and can still be found under its old key"
                )
            if (memory.index, memory.key_of) != (expected.index, expected.key_of):
                compare("take", before, memory, expected)
            if list(memory.free) != list(expected.free):
                return


@holds(
    "10",
    "hold",
    "every block has one owner more, and none of them is free any longer; the rest stays",
    hint="owners[block] += 1, and `memory.free.pop(block, None)`: who is found may be free or held by others.",
)
def hold_counts(work: Work) -> None:
    draw = seeds.rng(13)
    for memory, tables in memories(13, 80):
        resting = [block for block in memory.key_of if memory.owners[block] == 0]
        for blocks in [[], resting, *tables, [*resting[:1], *draw.choice([[], *tables])]]:
            before, expected = words_of(memory), deepcopy(memory)
            right_hold(expected, blocks)
            work.call("hold", memory, blocks, changes=(0,))
            for block in blocks:
                if block in memory.free:
                    raise Wrong(
                        f"{before}, hold {blocks}:\nblock {block} is held and still in memory.free: the next `take` "
                        "would give it to someone else"
                    )
            compare(f"hold {blocks}", before, memory, expected)


@holds(
    "10",
    "hold",
    "it returns a table of its own: what is done to one table later changes no other",
    hint="return list(blocks): a new list with the same numbers, not the same list.",
)
def hold_copies(work: Work) -> None:
    for memory, tables in memories(14, 20):
        for table in tables:
            got = work.call("hold", memory, table, changes=(0,))
            if got is None:
                raise Wrong("hold returned None: is a `return` missing? It must return the new table")
            if not isinstance(got, list) or got != table:
                raise Wrong(f"hold({table}) returned {got!r}; it must return a list of the same blocks")
            if got is table:
                raise Wrong(
                    f"hold({table}) returned the very list it was given: when one text takes a block, the other gets "
                    "it too"
                )
            right_give_back(memory, got)


@holds(
    "10",
    "give_back",
    "each block loses one owner; only who has none left is free, and can still be found",
    hint="count down first, then ask whether it is 0. The entries stay: a free block keeps what is in it.",
)
def give_back_counts(work: Work) -> None:
    for memory, tables in memories(15, 80):
        for table in tables:
            before, expected = words_of(memory), deepcopy(memory)
            right_give_back(expected, table)
            work.call("give_back", memory, list(table), changes=(0, 1))
            for block in table:
                if memory.owners[block] < 0:
                    raise Wrong(f"{before}, give back {table}:\nblock {block} has {memory.owners[block]} owners")
                if block in memory.free and expected.owners[block]:
                    raise Wrong(
                        f"{before}, give back {table}:\nblock {block} is free, though {expected.owners[block]} more "
                        "tables hold it: someone else will write into it"
                    )
                if block not in memory.free and not expected.owners[block]:
                    raise Wrong(
                        f"{before}, give back {table}:\nblock {block} has no owner left and is not free: it is lost "
                        "for ever"
                    )
            for state in (memory, expected):  # the order is the next property's
                state.free = OrderedDict.fromkeys(sorted(state.free))
            compare(f"give_back {table}", before, memory, expected)


@holds(
    "10",
    "give_back",
    "of a text its end is taken before its beginning, and of several the one first given back",
    hint="go through reversed(table), and put each block at the end of memory.free.",
)
def give_back_tail_first(work: Work) -> None:
    for n in range(1, 5):
        memory = Memory.fresh(4, 2)
        table = [right_take(memory) for _ in range(n)]
        work.call("give_back", memory, list(table), changes=(0, 1))
        taken = list(memory.free)[4 - n :]
        if set(taken) == set(table) and taken != table[::-1]:
            raise Wrong(
                f"the table {table} was given back: its blocks must be taken in the order {table[::-1]}, the end of "
                f"the text first, and would be in the order {taken}. Without its beginning no block of a text is found"
            )
    for memory, tables in memories(16, 60):
        for table in tables:
            before, expected = words_of(memory), deepcopy(memory)
            right_give_back(expected, table)
            work.call("give_back", memory, list(table), changes=(0, 1))
            compare(f"give_back {table}", before, memory, expected)


# ---- publish


@holds(
    "10",
    "publish",
    "full blocks can be found once all their tokens are computed, not before",
    hint="keys of tokens[:computed]: a block that the step has not reached holds nothing yet.",
    uses=KEYS,
)
def publish_what_is_computed(work: Work) -> None:
    tokens = list(range(20, 31))
    for size in (4, 2):
        for computed in range(len(tokens) + 1):
            memory = Memory.fresh(8, size)
            table = right_hold(memory, [5, 3, 6, 1, 7, 0][: -(-len(tokens) // size)])
            before = f"11 tokens in blocks of {size}, table {table}, {computed} tokens computed"
            work.call("publish", memory, list(table), list(tokens), computed, changes=(0,))
            expected = dict(zip(table[: computed // size], keys_of(work, tokens, size), strict=False))
            for block in memory.key_of:
                if block not in expected:
                    raise Wrong(
                        f"{before}: block {block} can be found, but its K and V are not all computed; only "
                        f"{list(expected)} may be found"
                    )
            if memory.key_of != expected or memory.index != {key: block for block, key in expected.items()}:
                raise Wrong(
                    f"{before}: blocks {list(expected)} must be found under their keys, in index and in key_of; index "
                    f"is {memory.index}, key_of {memory.key_of}"
                )


@holds(
    "10",
    "publish",
    "of two blocks with the same content the first to come stays in the index, and the other one is never entered",
    hint="`if key not in memory.index`: two requests may have computed the same in one step.",
    uses=KEYS,
)
def publish_keeps_the_first(work: Work) -> None:
    memory = Memory.fresh(8, 2)
    tokens = [20, 21, 22, 23, 24]
    work.call("publish", memory, [4, 2, 6], tokens, 5, changes=(0,))
    first = deepcopy(memory)
    work.call("publish", memory, [4, 2, 6], tokens, 5, changes=(0,))
    compare("publish a second time", "table [4, 2, 6]", memory, first)
    work.call("publish", memory, [1, 3, 5], tokens, 5, changes=(0,))
    if 1 in memory.index.values() or 1 in memory.key_of:
        raise Wrong(
            "tables [4, 2, 6] and [1, 3, 5] hold the same text, and [4, 2, 6] was published first: block 4 must stay "
            f"in the index, and block 1 have no entry; index is {memory.index}, key_of {memory.key_of}. When one of "
            "them is taken, it would take the other's entry with it, or leave one that leads to a block of others"
        )
    compare("publish [1, 3, 5], the same text in other blocks", "table [4, 2, 6] is published", memory, first)


@holds("10", "publish", ENGINE, hint="only what is computed may be found: `computed` tokens, not all that there are.")
def publish_in_the_engine(work: Work) -> None:
    in_the_engine(work, "publish", 33)


# ---- copy_on_write


@holds(
    "10",
    "copy_on_write",
    "who is the only owner writes in place, and a block that the table does not hold yet is not copied",
    hint="first ask: is there a block at position // size, and has it more than one owner? If not, return [].",
)
def own_blocks_stay(work: Work) -> None:
    for position in (4, 5, 6, 7, 8):
        memory = Memory.fresh(4, 4)
        table = [right_take(memory), right_take(memory)]
        memory.owners[0] = 3  # its beginning is shared, and is not written to
        memory.owners[1] = 3 if position == 8 else 1
        before, expected, kept = words_of(memory), deepcopy(memory), list(table)
        got = work.call("copy_on_write", memory, table, position, changes=(0, 1))
        if got is None:
            raise Wrong("copy_on_write returned None: is a `return` missing? Where nothing is to be copied: []")
        words = f"{before}, table {kept}, size 4, next position {position}"
        if got != [] or table != kept:
            raise Wrong(
                f"{words}: nothing is to be copied, for it writes into a block of its own or a new one; got {got}, "
                f"table {table}"
            )
        compare("copy_on_write", words, memory, expected)


@holds(
    "10",
    "copy_on_write",
    "who writes into a block of several owners gets a copy of what is in it; the others keep theirs",
    hint="take a block, put it into the table at position // size, count the old one down, return (from, to) pairs.",
    uses={"take": right_take},
)
def shared_blocks_are_copied(work: Work) -> None:
    for position in (4, 5, 6, 7):
        for owners in (2, 3):
            memory = Memory.fresh(6, 4)
            table = [right_take(memory), right_take(memory)]
            memory.owners[0] = memory.owners[1] = owners
            memory.index["stale"], memory.key_of[2] = 2, "stale"  # block 2 is free, and can be found
            other = list(table)
            words = f"{words_of(memory)}, table {table}, size 4, next position {position}"
            expected = deepcopy(memory)
            ours = list(table)
            moves = right_copy_on_write(expected, ours, position)
            got = work.call("copy_on_write", memory, table, position, changes=(0, 1))
            if table == other:
                raise Wrong(
                    f"{words}: {owners} texts hold block 1 and this one is about to write into it; its table must "
                    f"become {ours}, and is still {table}: the others would read its K and V"
                )
            if table != ours:
                raise Wrong(f"{words}: the table must become {ours}, and is {table}")
            if memory.owners[1] != owners - 1 or memory.owners[2] != 1:
                raise Wrong(
                    f"{words}: the owners of block 1 must then be {owners - 1}, those of block 2 must be 1; they are "
                    f"{memory.owners[1]} and {memory.owners[2]}"
                )
            compare("copy_on_write", words, memory, expected)
            if not isinstance(got, list | tuple) or [tuple(move) for move in got] != moves:
                raise Wrong(
                    f"{words}: the slots of positions 4 to {position - 1} are to be copied, moves {moves}; got {got}"
                    if moves
                    else f"{words}: nothing is stored in the block yet, so there are no moves; got {got}"
                )


# ---- in the engine


@cache
def model() -> Llama:
    return Llama.random(TINY, seed=0, dtype=torch.float64)


@dataclass(frozen=True)
class Ask:
    """n samples of one prompt, sent before a step."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1


@dataclass(frozen=True)
class Story:
    words: str
    asks: tuple[Ask, ...]
    aborts: tuple[tuple[int, int], ...] = ()  # (step, number of the request)
    size: int = 2
    n_blocks: int = 30
    max_running: int = 4
    budget: int = 8

    def __str__(self) -> str:
        return f"{self.words} ({self.n_blocks} blocks of {self.size}, budget {self.budget})"


def greedy(n: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)


X, Y = (11, 11, 19, 19, 15), (12, 12, 19, 19)
LONG = tuple(range(20, 33))
BY_HAND = (
    Story(
        "the same tokens after another beginning",
        (Ask(0, X, greedy()), Ask(4, Y, greedy()), Ask(8, X, greedy())),
        n_blocks=4,
    ),
    Story("a prompt of whole blocks, asked again", (Ask(0, LONG[:8], greedy()), Ask(6, LONG[:8], greedy())), size=4),
    Story("three equal prompts in one step", tuple(Ask(0, LONG, greedy(5)) for _ in range(3)), budget=50),
    Story("equal prompts, the first one half computed", (Ask(0, LONG, greedy()), Ask(1, LONG, greedy())), budget=6),
    Story(
        "the first is aborted in the middle of a block",
        (Ask(0, LONG, greedy()), Ask(1, LONG, greedy())),
        ((1, 0),),
        4,
        budget=6,
    ),
    Story(
        "three samples of one prompt", (Ask(0, LONG[:7], SamplingParams(6, 1.0, seed=3, ignore_eos=True), 3),), size=4
    ),
    Story("one prompt goes on where another ended", (Ask(0, LONG, greedy(6)), Ask(9, LONG + (5,), greedy())), size=4),
)


@seeds.cache
def stories(seed: int, n: int) -> list[Story]:
    """Random ones: prompts that begin alike, samples, aborts, and so few blocks that they are used again and again."""
    draw = seeds.rng(seed)
    made = []
    for number in range(n):
        size, most = draw.choice((1, 2, 4)), draw.randint(2, 4)
        base = [draw.choice((11, 12)) for _ in range(12)]
        asks = []
        for _ in range(draw.randint(4, 8)):
            prompt = base[: draw.randint(1, 12)] + [draw.choice((11, 12)) for _ in range(draw.randint(0, 4))]
            seeded = SamplingParams(draw.randint(1, 6), draw.choice((0.0, 1.0)), seed=draw.randrange(99))
            asks.append(Ask(draw.randint(0, 12), tuple(prompt), seeded, draw.choice((1, 1, 1, 2, most))))
        total = sum(ask.n for ask in asks)
        aborts = tuple((draw.randint(1, 14), draw.randrange(total)) for _ in range(draw.randint(0, 2)))
        blocks = -(-22 // size) + draw.randint(0, 8)
        budget = most + draw.choice((0, 2, 30))
        made.append(Story(f"random requests {number}", tuple(asks), aborts, size, blocks, most, budget))
    return made


@cache
def alone(prompt: tuple[int, ...], params: tuple[Any, ...], sample_index: int) -> tuple[list[int], str | None]:
    """The oracle: this text by itself, by the naive stage, which keeps nothing between two tokens."""
    most, temperature, seed, ignore_eos = params
    asked = SamplingParams(most, temperature, seed=seed, ignore_eos=ignore_eos)
    request = make_request(prompt, asked, TINY, None, TINY.context, sample_index=sample_index)
    for _ in naive.generate(model(), [request]):
        pass
    return request.output, request.finish_reason


class Spoiled(Engine):
    """Before each step, every slot that is neither held and computed, nor in a block that can be found, is NaN."""

    def step(self) -> list[Event]:
        slots = self.scheduler.slots
        assert isinstance(slots, FunctionSlots)
        keep = [slot for r in self.scheduler.running for slot in list(r.slots)[: r.computed]]
        keep += [b * slots.size + j for b in slots.memory.index.values() for j in range(slots.size)]
        free = torch.ones(self.pool.k.shape[2], dtype=torch.bool)
        free[torch.tensor(keep, dtype=torch.int64)] = False
        self.pool.k[:, :, free] = self.pool.v[:, :, free] = math.nan
        return super().step()


def sane(story: Story, at: int, slots: FunctionSlots, running: Sequence[Request]) -> None:
    """The counts are the tables', and the two dictionaries say the same."""
    memory = slots.memory
    held = [0] * len(memory.owners)
    for request in running:
        for block in request.blocks:
            held[block] += 1
    for block, (mine, ours) in enumerate(zip(memory.owners, held, strict=True)):
        if mine != ours:
            raise Wrong(f"{story}, step {at}: block {block} stands in {ours} tables, and owners says {mine}")
        if (block in memory.free) != (ours == 0):
            is_free = "is free" if block in memory.free else "is not free"
            raise Wrong(f"{story}, step {at}: block {block} stands in {ours} tables and {is_free}")
    for key, block in memory.index.items():
        if memory.key_of.get(block) != key:
            raise Wrong(f"{story}, step {at}: index leads to block {block} by a key that key_of does not have for it")
    for block, key in memory.key_of.items():
        if memory.index.get(key) != block:
            raise Wrong(f"{story}, step {at}: key_of has a key for block {block} that does not lead to it in index")


def serve(work: Work, story: Story, functions: Mapping[str, Callable[..., Any]]) -> None:
    """The story from beginning to end on the engine; every text must be the naive stage's."""
    slots = partial(FunctionSlots, functions, n_slots=story.n_blocks * story.size, size=story.size)
    engine = Spoiled(model(), max_running=story.max_running, budget=story.budget, max_len=64, slots=slots)
    engine.pool.k.fill_(math.nan)
    engine.pool.v.fill_(math.nan)
    head = engine.scheduler.slots
    assert isinstance(head, FunctionSlots)
    requests: list[Request] = []
    wanted: list[tuple[Ask, int]] = []
    at, last = 0, max(ask.step for ask in story.asks)
    try:
        while engine.busy or at <= last:
            for ask in story.asks:
                if ask.step == at:
                    requests += engine.add_samples(ask.prompt, ask.params, ask.n)
                    wanted += [(ask, i) for i in range(ask.n)]
            for step, which in story.aborts:
                if step == at and which < len(requests):
                    engine.abort(requests[which].id)
            engine.step()
            sane(story, at, head, engine.scheduler.running)
            at += 1
            if at > 400:
                raise Wrong(f"{story}: after 400 steps somebody still waits; blocks that are never given back?")
    except (AssertionError, IndexError, KeyError, RuntimeError, TypeError) as error:
        if isinstance(error, NotImplementedError) or work.line(error.__traceback__):
            raise
        why = f"{type(error).__name__} {error}".strip()
        if isinstance(error, AssertionError) and not str(error):
            why = "a sum in it no longer holds; were more blocks found than there are tokens to leave one to compute?"
        raise Wrong(f"{story}: the engine stopped in step {at}: {why}") from error
    for i, (request, (ask, index)) in enumerate(zip(requests, wanted, strict=True)):
        if request.finish_reason == "abort":
            continue
        p = ask.params
        expected, reason = alone(ask.prompt, (p.max_tokens, p.temperature, p.seed, p.ignore_eos), index)
        who = f"{story}: request {i} ({len(ask.prompt)} tokens from step {ask.step} on)"
        if request.finish_reason == "error":
            raise Wrong(
                f"{who} got logits that are not numbers: it read a block in which nothing of its text is stored. Was "
                "the block found before it was computed, given to two at once, or written over?"
            )
        for j, (mine, ours) in enumerate(zip(request.output, expected, strict=False)):
            if mine != ours:
                raise Wrong(f"{who}: token {j} must be {ours}, as the naive stage has it, and is {mine}")
        if (request.output, request.finish_reason) != (expected, reason):
            raise Wrong(
                f"{who}: expected {expected} and then {reason!r}; got {request.output} and {request.finish_reason!r}"
            )


def in_the_engine(work: Work, name: str, seed: int, n: int = 2) -> None:
    """The learner's function of that name, with right ones beside it: what goes wrong is its own fault."""
    parts: dict[str, Callable[..., Any]] = dict(RIGHT)
    if name == "block_keys":
        keys = work.function("block_keys")
        parts |= {"find": finder(keys), "publish": publisher(keys)}
    else:
        parts[name] = work.function(name)
    others = {other: right for other, right in (KEYS | RIGHT).items() if other != name}
    with work.replaced(others):
        serve_all(work, parts, seed, n)


def serve_all(work: Work, parts: Mapping[str, Callable[..., Any]], seed: int, n: int) -> None:
    for story in [*BY_HAND, *stories(seed, n)]:
        serve(work, story, parts)


@holds(
    "10",
    "copy_on_write",
    "all seven together in the engine: every token is the naive stage's; free slots hold NaN",
    hint="two samples must never write into one block: the later writer keeps it, the earlier gets a copy.",
    uses=KEYS | {name: right for name, right in RIGHT.items() if name != "copy_on_write"},
)
def all_in_the_engine(work: Work) -> None:
    work.call("copy_on_write", Memory.fresh(1, 4), [], 0, changes=(0, 1))  # if it is written at all
    serve_all(work, {name: work.function(name) for name in FUNCTIONS}, 34, 8)
