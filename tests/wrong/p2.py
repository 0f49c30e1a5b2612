"""What people write for problem set 2 that is wrong."""

from wrong import Mutant

WINDOW = """
class WindowAttend:
    def __init__(self, k_memory, v_memory, positions):
        self.k_memory, self.v_memory, self.positions = k_memory, v_memory, positions
        W, start = k_memory.shape[2], int(positions[0])
        self.W = W
        place = torch.arange(W)
        held = start - 1 - (start - 1 - place) % W
        self.places = place[held >= 0]
        k_pos = torch.cat((held[held >= 0], positions))
        self.mask = attention.visible(positions, k_pos) & (k_pos > positions[:, None] - W)

    def __call__(self, layer, q, k, v):
        both = []
        for memory, new in ((self.k_memory[layer], k), (self.v_memory[layer], v)):
            both.append(torch.cat((memory[:, self.places].transpose(0, 1), new)))
            memory[:, self.positions[-self.W :] % self.W] = new[-self.W :].transpose(0, 1)
        return attention.sdpa(q, *both, self.mask)
"""

STORE_FIRST = """
class WindowAttend:
    def __init__(self, k_memory, v_memory, positions):
        self.k_memory, self.v_memory, self.positions = k_memory, v_memory, positions
        W, last = k_memory.shape[2], int(positions[-1])
        self.W = W
        place = torch.arange(W)
        held = last - (last - place) % W
        self.places, k_pos = place[held >= 0], held[held >= 0]
        self.mask = attention.visible(positions, k_pos) & (k_pos > positions[:, None] - W)

    def __call__(self, layer, q, k, v):
        both = []
        for memory, new in ((self.k_memory[layer], k), (self.v_memory[layer], v)):
            memory[:, self.positions[-self.W :] % self.W] = new[-self.W :].transpose(0, 1)
            both.append(memory[:, self.places].transpose(0, 1))
        return attention.sdpa(q, *both, self.mask)
"""

VERIFY = """
def verify(p, q, draft, u, w):
    kept, weights = len(draft), p[-1]
    for i, x in enumerate(draft):
        if not u[i] * q[i, x] < p[i, x]:
            kept, weights = i, (p[i] - q[i]).clamp(min=0)
            break
    running = weights.cumsum(0)
    return [*draft[:kept], int(torch.searchsorted(running, w * running[-1], right=True))]
"""


def changed(code: str, *changes: str) -> str:
    """The code above, each first string of a pair replaced by the second."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    return code


WRONG = [
    # ---- WindowAttend
    Mutant("stored first, then read, as in lesson 04", STORE_FIRST, "looks at positions"),
    Mutant(
        "no window: everything that the ring still holds is seen",
        changed(WINDOW, " & (k_pos > positions[:, None] - W)", ""),
        "looks at positions",
    ),
    Mutant(
        "a window of W positions and its own",
        changed(WINDOW, "k_pos > positions[:, None] - W", "k_pos >= positions[:, None] - W"),
        "too old: they must be hidden",
    ),
    Mutant(
        "a window one too small",
        changed(WINDOW, "k_pos > positions[:, None] - W", "k_pos > positions[:, None] - W + 1"),
        "looks at positions",
    ),
    Mutant(
        "places taken for positions",
        changed(WINDOW, "held = start - 1 - (start - 1 - place) % W", "held = torch.where(place < start, place, -1)"),
        "looks at positions",
    ),
    Mutant(
        "the ring is read as if it began with the oldest",
        changed(
            WINDOW,
            "held = start - 1 - (start - 1 - place) % W",
            "held = place + max(0, start - W)\n        held = torch.where(held < start, held, -1)",
        ),
        "looks at positions",
    ),
    Mutant(
        "only this step's own tokens",
        changed(WINDOW, "self.places = place[held >= 0]", "held = held[:0]\n        self.places = place[:0]"),
        "looks at positions",
    ),
    Mutant(
        "places not written yet are hidden, but read",
        changed(
            WINDOW,
            "self.places = place[held >= 0]\n        k_pos = torch.cat((held[held >= 0], positions))",
            "self.places = place\n        k_pos = torch.cat((held, positions))",
            "(k_pos > positions[:, None] - W)",
            "(k_pos > positions[:, None] - W) & (k_pos >= 0)",
        ),
        "has NaN",
    ),
    Mutant(
        "places not written yet are seen",
        changed(
            WINDOW,
            "self.places = place[held >= 0]\n        k_pos = torch.cat((held[held >= 0], positions))",
            "self.places = place\n        k_pos = torch.cat((held, positions))",
        ),
        "a text of",
    ),
    Mutant(
        "of a step larger than the window the first W are stored",
        changed(
            WINDOW,
            "memory[:, self.positions[-self.W :] % self.W] = new[-self.W :].transpose(0, 1)",
            "memory[:, self.positions[: self.W] % self.W] = new[: self.W].transpose(0, 1)",
        ),
        "of the k memory position",
    ),
    Mutant(
        "of a step larger than the window all are stored, some in the same place",
        changed(
            WINDOW,
            "memory[:, self.positions[-self.W :] % self.W] = new[-self.W :].transpose(0, 1)",
            "memory[:, self.positions % self.W] = new.transpose(0, 1)",
        ),
        "leaves open which value stays",
    ),
    Mutant(
        "a step's tokens do not see themselves",
        changed(WINDOW, "attention.visible(positions, k_pos)", "(k_pos < positions[:, None])"),
        "missing, and it is the token's own",
    ),
    Mutant(
        "stored from place 0 on",
        changed(
            WINDOW,
            "memory[:, self.positions[-self.W :] % self.W] = ",
            "memory[:, : len(self.positions[-self.W :])] = ",
        ),
        "of the k memory position",
    ),
    Mutant(
        "all layers share the first layer's memory",
        changed(WINDOW, "self.k_memory[layer]", "self.k_memory[0]", "self.v_memory[layer]", "self.v_memory[0]"),
        "after layer 1",
    ),
    Mutant(
        "v is kept where k belongs",
        changed(
            WINDOW,
            "(self.k_memory[layer], k), (self.v_memory[layer], v)",
            "(self.k_memory[layer], v), (self.v_memory[layer], k)",
        ),
        "of the k memory position",
    ),
    Mutant(
        "the ring as it was is moved on in every layer",
        changed(
            WINDOW,
            "        return attention.sdpa(q, *both, self.mask)",
            "        self.positions = self.positions + len(k)\n        return attention.sdpa(q, *both, self.mask)",
        ),
        "hidden states",
    ),
    Mutant(
        "memory glued on the wrong side, the mask as before",
        changed(
            WINDOW,
            "torch.cat((memory[:, self.places].transpose(0, 1), new))",
            "torch.cat((new, memory[:, self.places].transpose(0, 1)))",
        ),
        "looks at positions",
    ),
    # ---- verify
    Mutant(
        "the replacement is drawn from p",
        changed(VERIFY, "(p[i] - q[i]).clamp(min=0)", "p[i]"),
        "of its sum falls on token",
    ),
    Mutant(
        "the replacement is drawn from p without the drafted token",
        changed(
            VERIFY,
            "kept, weights = i, (p[i] - q[i]).clamp(min=0)",
            "kept, weights = i, p[i].clone()\n            weights[x] = 0",
        ),
        "must come with probability",
    ),
    Mutant(
        "the size of p - q",
        changed(VERIFY, ".clamp(min=0)", ".abs()"),
        "of which nothing is left",
    ),
    Mutant("w is not stretched", changed(VERIFY, "w * running[-1]", "w"), "an id that is V"),
    Mutant(
        "a tensor in place of a list",
        changed(
            VERIFY, "return [*draft[:kept],", "return torch.tensor([*draft[:kept],", "right=True))]", "right=True))])"
        ),
        "verify returned Tensor",
    ),
    Mutant(
        "w is not stretched, and cut at the last token",
        changed(
            VERIFY,
            "int(torch.searchsorted(running, w * running[-1], right=True))",
            "min(len(running) - 1, int(torch.searchsorted(running, w, right=True)))",
        ),
        "of its sum falls on token",
    ),
    Mutant("a stretch holds its right end", changed(VERIFY, "right=True", "right=False"), "which has p = 0"),
    Mutant(
        "p and q the wrong way round",
        changed(VERIFY, "u[i] * q[i, x] < p[i, x]", "u[i] * p[i, x] < q[i, x]"),
        "nothing follows",
    ),
    Mutant(
        "kept where the target likes it better, else not",
        changed(VERIFY, "u[i] * q[i, x] < p[i, x]", "q[i, x] <= p[i, x]"),
        "it stays too",
    ),
    Mutant("kept with probability p", changed(VERIFY, "u[i] * q[i, x] < p[i, x]", "u[i] < p[i, x]"), "it stays too"),
    Mutant(
        "kept at p = 0 and u = 0",
        changed(VERIFY, "u[i] * q[i, x] < p[i, x]", "u[i] * q[i, x] <= p[i, x]"),
        "which has p = 0",
    ),
    Mutant(
        "goes on after a replacement",
        changed(
            VERIFY,
            """            kept, weights = i, (p[i] - q[i]).clamp(min=0)
            break
""",
            """            running = (p[i] - q[i]).clamp(min=0).cumsum(0)
            draft = [*draft[:i], int(torch.searchsorted(running, w * running[-1], right=True)), *draft[i + 1 :]]
""",
        ),
        "nothing follows",
    ),
    Mutant(
        "nothing after a draft that stays",
        changed(
            VERIFY,
            "return [*draft[:kept]",
            "if kept == len(draft) and kept:\n        return list(draft)\n    return [*draft[:kept]",
        ),
        "one more follows",
    ),
    Mutant(
        "one more from the row before the last",
        changed(VERIFY, "len(draft), p[-1]", "len(draft), p[len(draft) - 1]"),
        "and then p =",
    ),
    Mutant(
        "the rejected token stays too",
        changed(VERIFY, "return [*draft[:kept],", "return [*draft[: kept + 1],"),
        "nothing follows",
    ),
    Mutant(
        "the most likely token, not drawn",
        changed(VERIFY, "int(torch.searchsorted(running, w * running[-1], right=True))", "int(weights.argmax())"),
        "and then p =",
    ),
    Mutant(
        "the same u for the draw",
        changed(VERIFY, "running = weights", "w = u[min(kept, len(u) - 1)] if u else w\n    running = weights"),
        "must come with probability",
    ),
]
