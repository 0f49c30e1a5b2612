"""Who holds which slots of KV memory. Plain Python integers: `batch.pack` copies them into the tensor table."""

from minillm.request import Request


class RegionSlots:
    """One fixed region of `max_len` slots for each running request: row r owns slots r*max_len .. (r+1)*max_len - 1.

    Simple, and wasteful: a short text keeps a long text's memory.
    """

    def __init__(self, max_running: int, max_len: int):
        self.max_len = max_len
        self.free_rows = list(range(max_running))[::-1]

    def can_reserve(self, request: Request, n: int) -> bool:
        """Whether the next n tokens of this request have a place."""
        return request.row is not None or bool(self.free_rows)

    def reserve(self, request: Request, n: int) -> None:
        """Gives the request slots for its next n tokens."""
        if request.row is None:
            request.row = self.free_rows.pop()
        first = request.row * self.max_len
        request.slots = range(first, first + request.computed + n)

    def release(self, request: Request) -> None:
        """Takes all of them back; releasing what holds nothing changes nothing."""
        if request.row is not None:
            self.free_rows.append(request.row)
        request.row, request.slots = None, ()
