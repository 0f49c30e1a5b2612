"""Who holds which slots of KV memory. Plain Python integers: `batch.pack` copies them into the tensor table.

    RegionSlots   one fixed region for each running request
    BlockSlots    blocks of a few slots, taken as a text grows
    SharedSlots   blocks, and texts that begin alike hold the same ones

All have the same three methods, and the scheduler asks `can_reserve` before it calls `reserve`. A request without a
row is a newcomer. Who shares answers two questions more, `find` and `stored`, to which the others say "nothing".
"""

from collections import OrderedDict
from dataclasses import dataclass

from minillm.errors import InputError
from minillm.request import Request


class Slots:
    """What the scheduler and the engine need to know of any of them."""

    shares = False
    n_slots: int  # in all: what the pool must hold
    capacity: int  # most positions of one request
    free_rows: list[int]  # of the slot table

    def check(self, request: Request) -> None:
        """Raises InputError if the request could never be served, were it alone."""
        if request.most_slots > self.capacity:
            raise InputError(
                f"the request may need {request.most_slots} KV slots, but there are {self.capacity} for each; "
                "shorten it, lower max_tokens, or give more memory"
            )

    def can_reserve(self, request: Request, n: int) -> bool:
        """Whether the next n tokens of this request have a place; for a newcomer, whether it may come in."""
        raise NotImplementedError

    def reserve(self, request: Request, n: int) -> None:
        """Gives the request slots for its next n tokens; a newcomer gets a row of the slot table too."""
        raise NotImplementedError

    def release(self, request: Request) -> None:
        """Takes all of them back; releasing what holds nothing changes nothing."""
        raise NotImplementedError

    def find(self, request: Request) -> int:
        """How many of a newcomer's tokens have their K and V in memory already."""
        return 0

    def stored(self, request: Request) -> None:
        """Told after each step: the K and V of `request.computed` tokens are there now."""


class RegionSlots(Slots):
    """One fixed region of `max_len` slots for each running request: row r owns slots r*max_len .. (r+1)*max_len - 1.

    Simple, and wasteful: a short text keeps a long text's memory.
    """

    def __init__(self, max_running: int, max_len: int):
        self.n_slots, self.capacity = max_running * max_len, max_len
        self.free_rows = list(range(max_running))[::-1]

    def can_reserve(self, request: Request, n: int) -> bool:
        return request.row is not None or bool(self.free_rows)

    def reserve(self, request: Request, n: int) -> None:
        if request.row is None:
            request.row = self.free_rows.pop()
        first = request.row * self.capacity
        request.slots = range(first, first + request.computed + n)

    def release(self, request: Request) -> None:
        if request.row is not None:
            self.free_rows.append(request.row)
        request.row, request.slots = None, ()


class BlockSlots(Slots):
    """Blocks of `size` slots, handed out as a text grows (PagedAttention, Kwon et al. 2023): block b is slots
    b*size .. (b+1)*size - 1, and `request.blocks` is the text's block table.

    At most size - 1 slots of a text are unused, those at the end of its last block. Nothing is kept for what a text
    may yet write, so a running one can find no block free: then the scheduler sends the newest away.

    Raises InputError if the memory cannot be cut into such blocks.
    """

    def __init__(self, max_running: int, max_len: int, n_slots: int | None = None, size: int = 16):
        if size < 1:
            raise InputError(f"the block size is {size}; it must be at least 1")
        n_slots = max(max_running, 1) * -(-max_len // size) * size if n_slots is None else n_slots
        if n_slots < size or n_slots % size:
            below, above = n_slots // size * size, (max(n_slots, 0) // size + 1) * size
            right = f"{below} or {above}" if below > 0 else str(above)
            raise InputError(f"{n_slots} KV slots cannot be cut into blocks of {size}; use {right}")
        self.size, self.n_slots, self.capacity = size, n_slots, min(max_len, n_slots)
        self.free_rows = list(range(max_running))[::-1]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_slots // size))  # the first is taken first
        self.holders: dict[Request, None] = {}  # who is in, in order

    def blocks(self, n: int) -> int:
        """Blocks that n positions need."""
        return -(-n // self.size)

    def can_reserve(self, request: Request, n: int) -> bool:
        if request.row is not None:
            return self.blocks(request.computed + n) - len(request.blocks) <= len(self.free)
        return bool(self.free_rows) and self.blocks(len(request.tokens)) + self.owed() <= len(self.free)

    def owed(self) -> int:
        """Blocks that those who are in still need for the tokens they have. A newcomer must leave them, and needs
        room for all of its own tokens: or two long prompts would chase each other out before either is computed."""
        return sum(max(0, self.blocks(len(r.tokens)) - len(r.blocks)) for r in self.holders)

    def reserve(self, request: Request, n: int) -> None:
        if request.row is None:
            self._enter(request)
        while len(request.slots) < request.computed + n:
            self._hold(request, self._take())

    def release(self, request: Request) -> None:
        if request.row is None:
            return
        for block in reversed(request.blocks):
            self._give_back(block)
        del self.holders[request]
        self.free_rows.append(request.row)
        request.row, request.blocks, request.slots, request.entered = None, [], (), 0

    def _enter(self, request: Request) -> None:
        request.row, request.blocks, request.slots = self.free_rows.pop(), [], []
        self.holders[request] = None

    def _hold(self, request: Request, block: int) -> None:
        request.blocks.append(block)
        request.slots = [*request.slots, *range(block * self.size, (block + 1) * self.size)]

    def _take(self) -> int:
        return self.free.popitem(last=False)[0]

    def _give_back(self, block: int) -> None:
        self.free[block] = None


@dataclass(eq=False)
class Entry:
    """A full block that can be found: by its own tokens, and by the entry of the block before it. So the same tokens
    after another beginning are another entry: their K and V differ.

    Keys are compared whole, not by their hash alone; `parent` is compared by identity, which is exact as well.
    """

    block: int
    parent: "Entry | None"
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple["Entry | None", tuple[int, ...]]:
        return self.parent, self.tokens


class SharedSlots(BlockSlots):
    """Blocks with owners counted: texts that begin with the same tokens hold the same blocks.

    A full block can be found from when its K and V are computed until it is taken for something else. One that nobody
    holds is free and keeps what is in it; the one that was given back first is taken first, and of a text its end
    before its beginning. Whoever finds its whole text computes the last token again, or there would be no logits.

    Samples of one prompt begin as a `fork`: they hold all its blocks, also the last and half full one. Who writes into
    a block that others hold too gets a copy first.

    The idea of finding blocks by their content is vLLM's (automatic prefix caching) and SGLang's (RadixAttention,
    Zheng et al. 2024).
    """

    shares = True

    def __init__(self, max_running: int, max_len: int, n_slots: int | None = None, size: int = 16):
        super().__init__(max_running, max_len, n_slots, size)
        self.owners = [0] * (self.n_slots // size)  # of each block
        self.index: dict[tuple[Entry | None, tuple[int, ...]], Entry] = {}
        self.entry_of: dict[int, Entry] = {}  # the same by block
        self.chains: dict[Request, list[Entry]] = {}  # of those who are in: their full blocks, as far as computed
        self.asked = self.found = 0  # tokens of all newcomers so far, and those that were there already

    def find(self, request: Request) -> int:
        return len(self._lookup(request)) * self.size

    def _lookup(self, request: Request) -> list[Entry]:
        entries: list[Entry] = []
        parent = None
        for first in range(0, len(request.tokens) - self.size, self.size):  # one token is left to compute
            entry = self.index.get((parent, tuple(request.tokens[first : first + self.size])))
            if entry is None:
                break
            entries.append(entry)
            parent = entry
        return entries

    def can_reserve(self, request: Request, n: int) -> bool:
        if request.row is not None:
            new = self.blocks(request.computed + n) - len(request.blocks) + self._is_shared(request)
            return new <= len(self.free)
        found = self._lookup(request)
        idle = sum(self.owners[entry.block] == 0 for entry in found)  # free until now, and not to be counted twice
        new = self.blocks(len(request.tokens)) - len(found)
        return bool(self.free_rows) and new + idle + self.owed() <= len(self.free)

    def reserve(self, request: Request, n: int) -> None:
        if request.row is not None and self._is_shared(request):
            self._copy_on_write(request)
        super().reserve(request, n)

    def stored(self, request: Request) -> None:
        """From now on its full blocks can be found; not before, for until then they hold nothing."""
        chain = self.chains[request]
        while (i := len(chain)) < request.computed // self.size:
            tokens = tuple(request.tokens[i * self.size : (i + 1) * self.size])
            entry = Entry(request.blocks[i], chain[-1] if chain else None, tokens)
            known = self.index.setdefault(entry.key, entry)  # someone may have computed the same beside it
            if known is entry:
                self.entry_of[entry.block] = entry
            chain.append(known)

    def fork(self, request: Request, other: Request) -> None:
        """`other`, a newcomer with the same tokens, holds from now on what `request` holds."""
        super()._enter(other)
        other.computed, self.chains[other] = request.computed, list(self.chains[request])
        self._count(other)
        for block in request.blocks:
            self.owners[block] += 1
            self._hold(other, block)

    def release(self, request: Request) -> None:
        super().release(request)
        self.chains.pop(request, None)
        request.moves = []

    def _is_shared(self, request: Request) -> bool:
        """Whether the block that its next token is written to has other owners."""
        i = request.computed // self.size
        return i < len(request.blocks) and self.owners[request.blocks[i]] > 1

    def _copy_on_write(self, request: Request) -> None:
        i = request.computed // self.size
        old, new = request.blocks[i], self._take()
        self._give_back(old)
        request.blocks[i] = new
        slots = list(request.slots)
        slots[i * self.size : (i + 1) * self.size] = range(new * self.size, (new + 1) * self.size)
        request.slots = slots
        request.moves = [(old * self.size + j, new * self.size + j) for j in range(request.computed % self.size)]
        request.entered = min(request.entered, i * self.size)

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        self.chains[request] = self._lookup(request)[: request.computed // self.size]
        self._count(request)
        for entry in self.chains[request]:
            self.owners[entry.block] += 1
            self.free.pop(entry.block, None)
            self._hold(request, entry.block)

    def _count(self, request: Request) -> None:
        if not request.preemptions:  # finding one's own blocks again is no gain
            self.asked += len(request.tokens)
            self.found += request.computed

    def _take(self) -> int:
        block = super()._take()
        self.owners[block] = 1
        if entry := self.entry_of.pop(block, None):
            del self.index[entry.key]
        return block

    def _give_back(self, block: int) -> None:
        self.owners[block] -= 1
        assert self.owners[block] >= 0, "a block was given back twice"
        if self.owners[block] == 0:
            super()._give_back(block)
            if block not in self.entry_of:
                self.free.move_to_end(block, last=False)  # nothing can be found in it: it goes first
