"""Who holds which slots of KV memory. Plain Python integers: `batch.pack` copies them into the tensor table.

    RegionSlots   one fixed region for each running request
    BlockSlots    blocks of a few slots, taken as a text grows
    SharedSlots   blocks, and texts that begin alike hold the same ones (in `sharing`)

All have the same three methods, and the scheduler asks `can_reserve` before it calls `reserve`. A request without a
row is a newcomer. Who shares does three things more, `find`, `stored` and `fork`: for the others nothing is found,
nothing is to be remembered, and nobody forks.
"""

from collections import OrderedDict

from minillm.errors import InputError, whole_number
from minillm.request import Request


class Slots:
    """What the scheduler and the engine need to know of any of them."""

    shares = False  # whether `fork` may be called
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

    def fork(self, request: Request, other: Request) -> None:
        """`other`, a newcomer with the same tokens, holds from now on what `request` has computed."""
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
    may yet write, so a running one can find no block free: then the scheduler sends someone away.

    Raises InputError if the memory cannot be cut into such blocks.
    """

    def __init__(self, max_running: int, max_len: int, n_slots: int | None = None, size: int = 16):
        whole_number("the block size", size, 1)
        n_slots = max(max_running, 1) * -(-max_len // size) * size if n_slots is None else n_slots
        if whole_number("the number of KV slots", n_slots, 0) < size or n_slots % size:
            below, above = n_slots // size * size, (n_slots // size + 1) * size
            right = f"{below} or {above}" if below > 0 else str(above)
            raise InputError(f"{n_slots} KV slots cannot be cut into blocks of {size}; use {right}")
        self.size, self.n_slots, self.capacity = size, n_slots, min(max_len, n_slots)
        self.free_rows = list(range(max_running))[::-1]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_slots // size))  # the first is taken first

    def n_blocks(self, n: int) -> int:
        """Blocks that n positions need."""
        return -(-n // self.size)

    def can_reserve(self, request: Request, n: int) -> bool:
        if request.row is not None:
            return self.n_blocks(request.computed + n) - len(request.blocks) <= len(self.free)
        # A newcomer needs room for all of its tokens, not only for the next n: or two long prompts would chase each
        # other out before either is computed. The running ones all have their places when a newcomer is asked.
        return bool(self.free_rows) and self.n_blocks(len(request.tokens)) <= len(self.free)

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
        self.free_rows.append(request.row)
        request.row, request.blocks, request.slots, request.entered = None, [], (), 0

    def _enter(self, request: Request) -> None:
        request.row, request.blocks, request.slots = self.free_rows.pop(), [], []

    def _hold(self, request: Request, block: int) -> None:
        request.blocks.append(block)
        assert isinstance(request.slots, list)
        request.slots += self.slots_of(block)

    def slots_of(self, block: int) -> range:
        return range(block * self.size, (block + 1) * self.size)

    def _take(self) -> int:
        return self.free.popitem(last=False)[0]

    def _give_back(self, block: int) -> None:
        self.free[block] = None
