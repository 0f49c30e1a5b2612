"""Blocks of KV memory with more than one owner: a block is found by what is in it, and computed once for all."""

from dataclasses import dataclass, field

from minillm.request import Request
from minillm.slots import BlockSlots


@dataclass(eq=False)
class Entry:
    """A full block that can be found: by its own tokens, and by the entry of the block before it. So the same tokens
    after another beginning are another entry: their K and V differ.

    Keys are compared whole, not by their hash alone; `parent` is compared by identity, which is exact as well.
    """

    block: int
    parent: "Entry | None" = field(repr=False)
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
            new = self.n_blocks(request.computed + n) - len(request.blocks) + self._is_shared(request)
            return new <= len(self.free)
        found = self._lookup(request)
        idle = sum(self.owners[entry.block] == 0 for entry in found)  # free until now, and not to be counted twice
        new = self.n_blocks(len(request.tokens)) - len(found)
        return bool(self.free_rows) and new + idle <= len(self.free)

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
            known = self.index.setdefault(entry.key, entry)
            if known is entry:
                self.entry_of[entry.block] = entry
            else:  # someone computed the same beside it, and one is enough
                self._own(known.block)
                self._exchange(request, i, known.block)
            chain.append(known)

    def fork(self, request: Request, other: Request) -> None:
        super()._enter(other)
        other.computed, self.chains[other] = request.computed, list(self.chains[request])
        self._count(other)
        for block in request.blocks:
            self._own(block)
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
        source, target = self.slots_of(request.blocks[i]), self.slots_of(self._exchange(request, i, self._take()))
        n = request.computed % self.size
        request.moves = list(zip(source[:n], target[:n], strict=True))

    def _exchange(self, request: Request, i: int, block: int) -> int:
        """Gives back the i-th block of its table, and puts this one in its place."""
        self._give_back(request.blocks[i])
        request.blocks[i] = block
        assert isinstance(request.slots, list)
        request.slots[i * self.size : (i + 1) * self.size] = self.slots_of(block)
        request.entered = min(request.entered, i * self.size)
        return block

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        self.chains[request] = self._lookup(request)
        self._count(request)
        for entry in self.chains[request]:
            self._own(entry.block)
            self._hold(request, entry.block)

    def _count(self, request: Request) -> None:
        if not request.preemptions:  # finding one's own blocks again is no gain
            self.asked += len(request.tokens)
            self.found += request.computed

    def _own(self, block: int) -> None:
        """One owner more, of a block that may have been free until now."""
        self.owners[block] += 1
        self.free.pop(block, None)

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
