"""Wrong solutions of lesson 06, padded batch."""

from wrong import Mutant


def rectangle(
    tokens: str = "torch.tensor([list(row) + [0] * (T - len(row)) for row in new])",
    positions: str = "(torch.tensor(starts)[:, None] + torch.arange(T)).clamp(max=size - 1)",
    last: str = "torch.tensor([len(row) - 1 for row in new])",
) -> str:
    """A right one, with some of its three parts replaced."""
    return f"""
def rectangle(new, starts, size):
    T = max(len(row) for row in new)
    tokens = {tokens}
    positions = {positions}
    last = {last}
    return tokens, positions, last
"""


def generate(
    size: str = "max(len(p) + n for p, n in zip(prompts, n_new))",
    attend: str = "CachedAttend(cache, positions)",
    go_on: str = "any(len(out) < n for out, n in zip(outputs, n_new))",
    ends: str = "hidden[torch.arange(B), last]",
    wants: str = "len(outputs[b]) < n_new[b]",
    grows: str = "len(new[b])",
    prompt: str = "list(p)",
    extra: str = "",
) -> str:
    """A right one, with some of its parts replaced."""
    return f"""{extra}
def generate(model, prompts, n_new):
    B = len(prompts)
    size = {size}
    cache = KVCache(model, B, size)
    new, starts, outputs = [{prompt} for p in prompts], [0] * B, [[] for _ in prompts]
    while {go_on}:
        tokens, positions, last = rectangle(new, starts, size)
        hidden = model(tokens, positions, {attend})
        best = model.logits({ends}).argmax(-1).tolist()
        for b in range(B):
            if {wants}:
                starts[b] += {grows}
                new[b] = [best[b]]
                outputs[b].append(best[b])
    return outputs
"""


LEFT = "torch.tensor([[0] * (T - len(row)) + list(row) for row in new])"
BY_INDEX = """
class ByIndex(CachedAttend):
    def __init__(self, cache, positions):
        super().__init__(cache, positions)
        T, S = self.mask.shape[-2:]
        self.mask = torch.ones(T, S, dtype=torch.bool).tril(S - T).expand(len(positions), T, S)
"""
NO_MASK = """
class NoMask(CachedAttend):
    def __init__(self, cache, positions):
        super().__init__(cache, positions)
        if positions.shape[-1] == 1:
            self.mask = torch.ones_like(self.mask)
"""

WRONG = [
    # ---- rectangle
    Mutant(
        "pads on the left, positions counted from the pad",
        rectangle(tokens=LEFT, last="torch.full((len(new),), T - 1)"),
        "computes alone",
    ),
    Mutant(
        "pads on the left: the real tokens' positions",
        rectangle(tokens=LEFT),
        "positions of the real tokens of row 1, in columns 2 .. 2, for new",
    ),
    Mutant("last-token index always T-1", rectangle(last="torch.full((len(new),), T - 1)"), "last for new"),
    Mutant(
        "last-token index counted in the text",
        rectangle(last="torch.tensor([s + len(row) - 1 for s, row in zip(starts, new)])"),
        "last for new",
    ),
    Mutant(
        "positions shared by all rows",
        rectangle(positions="(max(starts) + torch.arange(T)).clamp(max=size - 1).expand(len(new), T)"),
        "positions of the real tokens",
    ),
    Mutant(
        "positions not counted on from the start",
        rectangle(positions="torch.arange(T).expand(len(new), T).clamp(max=size - 1)"),
        "positions of the real tokens",
    ),
    Mutant(
        "pads overwrite the last real token's K and V (positions stop there)",
        rectangle(
            positions="torch.tensor([[s + min(t, len(row) - 1) for t in range(T)] for s, row in zip(starts, new)])"
        ),
        "computes alone",
    ),
    Mutant(
        "pads overwrite the first token's K and V (position 0)",
        rectangle(
            positions="torch.tensor([[s + t if t < len(row) else 0 for t in range(T)] for s, row in zip(starts, new)])"
        ),
        "computes alone",
    ),
    Mutant(
        "clamp onto a real place",
        rectangle(positions="(torch.tensor(starts)[:, None] + torch.arange(T)).clamp(max=size - 2)"),
        "computes alone",
    ),
    Mutant(
        "clamp one past the end",
        rectangle(positions="(torch.tensor(starts)[:, None] + torch.arange(T)).clamp(max=size)"),
        "positions of the pads",
    ),
    Mutant(
        "no clamp",
        rectangle(positions="torch.tensor(starts)[:, None] + torch.arange(T)"),
        "must be in 0 ..",
    ),
    Mutant(
        "pads appended to the caller's lists",
        """
def rectangle(new, starts, size):
    T = max(len(row) for row in new)
    last = torch.tensor([len(row) - 1 for row in new])
    for row in new:
        row += [0] * (T - len(row))
    positions = torch.tensor(starts)[:, None] + torch.arange(T)
    return torch.tensor(new), positions.clamp(max=size - 1), last
""",
        "rectangle changed its argument number 1",
    ),
    Mutant("positions as floats", rectangle(positions="torch.tensor(starts)[:, None] + torch.arange(0.0, T)"), "dtype"),
    Mutant(
        "return forgotten", "def rectangle(new, starts, size):\n    T = max(map(len, new))\n", "is a `return` missing"
    ),
    Mutant(
        "last counted wrongly: not generate's fault",
        rectangle(last="torch.tensor([0 for row in new])"),
        "mend rectangle first: with a right one in the place of yours, this holds",
    ),
    # ---- generate
    Mutant("state of the last column, a pad", generate(ends="hidden[:, -1]"), "alone the row makes"),
    Mutant("ended row goes on emitting", generate(wants="True"), "and asked for"),
    Mutant(
        "batch ends with the first ended row",
        generate(go_on="all(len(out) < n for out, n in zip(outputs, n_new))"),
        "and asked for",
    ),
    Mutant("pad keys visible: starts grow by the width", generate(grows="tokens.shape[1]"), "alone the row makes"),
    Mutant("starts grow by one, whatever was fed", generate(grows="1"), "alone the row makes"),
    Mutant(
        "pad keys visible: causal by index alone",
        generate(attend="ByIndex(cache, positions)", extra=BY_INDEX),
        "alone the row makes",
    ),
    Mutant(
        "pad keys visible: a single new token gets no mask",
        generate(attend="NoMask(cache, positions)", extra=NO_MASK),
        "alone the row makes",
    ),
    Mutant(
        "what is not written yet is seen: a single new token gets no mask",
        generate(attend="NoMask(cache, positions)", extra=NO_MASK),
        "with 1e4 in every place that is not written yet, and",
    ),
    Mutant(
        "one start for all rows: its company got in",
        generate(grows="max(len(p) for p in new) if len(outputs[b]) == 0 else 1"),
        "as the only row, and",
    ),
    Mutant("cache too small: no places for new tokens", generate(size="max(map(len, prompts)) + 1"), "alone"),
    Mutant(
        "size off by one: the last token shares a place",
        generate(size="max(len(p) + n for p, n in zip(prompts, n_new)) - 2"),
        "alone",
    ),
    Mutant(
        "rows gathered from the wrong request",
        generate()
        .replace(
            "for b in range(B):", "for b, token in zip([b for b in range(B) if len(outputs[b]) < n_new[b]], best):"
        )
        .replace("best[b]", "token"),
        "alone the row makes",
    ),
    Mutant(
        "rows sorted by length and not put back",
        generate(extra="").replace(
            "    B = len(prompts)\n",
            "    B = len(prompts)\n    order = sorted(range(B), key=lambda b: -len(prompts[b]))\n"
            "    prompts, n_new = [prompts[b] for b in order], [n_new[b] for b in order]\n",
        ),
        "and asked for",
    ),
    Mutant(
        "every row gets the first row's token",
        generate(ends="hidden[0, last]"),
        "alone",
    ),
    Mutant(
        "the caller's prompts grow",
        generate(prompt="p").replace("new[b] = [best[b]]", "new[b] = [best[b]]; prompts[b].append(best[b])"),
        "generate changed its argument number 2",
    ),
    Mutant(
        "one text after another",
        generate().replace("def generate(", "def single(")
        + """
def generate(model, prompts, n_new):
    return [single(model, [p], [n])[0] for p, n in zip(prompts, n_new)]
""",
        "the model ran",
    ),
    Mutant(
        "the whole text again in every pass",
        generate().replace("starts[b] += len(new[b])", "").replace("new[b] = [best[b]]", "new[b] = new[b] + [best[b]]"),
        "pass 1 took tokens",
    ),
    # ---- wasted
    Mutant(
        "one rectangle for the whole life of a text",
        """
def wasted(prompts, n_new):
    pads = len(prompts) * max(map(len, prompts)) - sum(map(len, prompts))
    whole = [len(p) + n - 1 for p, n in zip(prompts, n_new)]
    return pads, len(whole) * max(whole) - sum(whole) - pads
""",
        "tokens of ended rows (prompts",
    ),
    Mutant(
        "rows that have ended, instead of their tokens",
        """
def wasted(prompts, n_new):
    pads = sum(max(map(len, prompts)) - len(p) for p in prompts)
    return pads, sum(n < max(n_new) for n in n_new)
""",
        "tokens of ended rows (prompts",
    ),
    Mutant(
        "pads counted in every pass",
        """
def wasted(prompts, n_new):
    pads = sum(max(map(len, prompts)) - len(p) for p in prompts) * max(n_new)
    return pads, len(n_new) * max(n_new) - sum(n_new)
""",
        "pads (prompts",
    ),
    # ---- refill_pads
    Mutant(
        "the others' own tokens forgotten", "def refill_pads(n, B):\n    return n * (B - 1)\n", "expected 693, got 700"
    ),
    Mutant("the newcomer pads itself", "def refill_pads(n, B):\n    return (n - 1) * B\n", "expected 693, got 792"),
    Mutant(
        "right when the prompt is short",
        "def refill_pads(n, B):\n    return (n - 1) * (B - 1) if n < 200 else n * (B - 1)\n",
        "refill_pads(399, 16), twice the 2985 of (200, 16) since n - 1 is doubled: expected 5970, got 5985",
    ),
    Mutant("quadratic", "def refill_pads(n, B):\n    return (n - 1) ** 2\n", "expected 693, got 9801"),
]
