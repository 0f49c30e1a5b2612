"""What people write for problem set 5 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

DECODE = """
def decode_shared(q, k, v, tables, kv_lens, size):
    N, H, D = q.shape
    Hkv = k.shape[1]
    rows = {rows}
    m = torch.full_like(rows[..., :1], float("-inf"))
    s, o = torch.zeros_like(m), torch.zeros_like(rows)
    holders, live = {{}}, {{}}
    for n, (table, kv_len) in enumerate(zip(tables, kv_lens, strict=True)):
        for i in {blocks}:
            {hold}
            live[table[i]] = {live}
    for block, texts in {rounds}:
        slots = {slots}
        keys, values = k.load(slots).transpose(0, 1)[:, None], v.load(slots).transpose(0, 1)[:, None]
        scores = rows[:, texts] @ keys.transpose(-2, -1)
        {update}
    return {result}
"""
KEEP = """
def keep(seconds, deadlines, now):
    kept, done = [], {begin}
    for i in {order}:
        if {hopeless}:
            continue
        heapq.heappush(kept, ({key}, i))
        done += seconds[i]
        if done {late} deadlines[i]:
            {refuse}
    return {result}
"""

UPDATE = "m[:, texts], s[:, texts], o[:, texts] = merge(m[:, texts], s[:, texts], o[:, texts], *part(scores, values))"

THE_LATE_ONE = "done -= seconds[i]; kept.remove((-seconds[i], i)); heapq.heapify(kept)"
ANOTHER = (
    "kept.remove((-seconds[i], i)); heapq.heapify(kept); done += heapq.heappop(kept)[0] if kept else 0; "
    "heapq.heappush(kept, (-seconds[i], i))"
)


def decode_shared(
    rows: str = "(q * D**-0.5).view(N, Hkv, H // Hkv, D).transpose(0, 1)",
    blocks: str = "range(-(-kv_len // size))",
    hold: str = "holders.setdefault(table[i], []).append(n)",
    live: str = "min(size, kv_len - i * size)",
    rounds: str = "holders.items()",
    slots: str = "block * size + torch.arange(live[block])",
    update: str = UPDATE,
    result: str = "(o / s).transpose(0, 1).reshape(N, H, D)",
) -> str:
    return DECODE.format(
        rows=rows,
        blocks=blocks,
        hold=hold,
        live=live,
        rounds=rounds,
        slots=slots,
        update=update,
        result=result,
    )


def keep(
    begin: str = "now",
    order: str = "sorted(range(len(seconds)), key=deadlines.__getitem__)",
    hopeless: str = "False",
    key: str = "-seconds[i]",
    late: str = ">",
    refuse: str = "done += heapq.heappop(kept)[0]",
    result: str = "sorted((i for _, i in kept), key=deadlines.__getitem__)",
) -> str:
    return KEEP.format(begin=begin, order=order, hopeless=hopeless, key=key, late=late, refuse=refuse, result=result)


ONE_LOAD = """
def decode_shared(q, k, v, tables, kv_lens, size):
    N, H, D = q.shape
    Hkv = k.shape[1]
    held = [[t[p // size] * size + p % size for p in range(n)] for t, n in zip(tables, kv_lens)]
    every = sorted(set(sum(held, [])))
    place = {slot: i for i, slot in enumerate(every)}
    keys, values = LOADS
    mask = torch.zeros(N, len(every), dtype=torch.bool)
    for n, slots in enumerate(held):
        mask[n, [place[slot] for slot in slots]] = True
    keys, values = (x.repeat_interleave(H // Hkv, 1) for x in (keys, values))
    scores = torch.einsum("nhd,shd->nhs", q * D**-0.5, keys).masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("nhs,shd->nhd", scores.softmax(-1), values)
"""
BLOCK_LOADS = (
    "(torch.cat([x.load(torch.tensor([slot for slot in every if slot // size == block])) "
    "for block in sorted({slot // size for slot in every})]) for x in (k, v))"
)
COMMON_PREFIX = """
def decode_shared(q, k, v, tables, kv_lens, size):
    N, H, D = q.shape
    Hkv = k.shape[1]
    rows = (q * D**-0.5).view(N, Hkv, H // Hkv, D).transpose(0, 1)
    state = [torch.full_like(rows[..., :1], float("-inf")), torch.zeros_like(rows[..., :1]), torch.zeros_like(rows)]
    common = 0
    while all(kv_len >= (common + 1) * size for kv_len in kv_lens) and len({table[common] for table in tables}) == 1:
        common += 1
    todo = [(list(range(N)), tables[0], i, size) for i in range(common)]
    for n, kv_len in enumerate(kv_lens):
        todo += [([n], tables[n], i, min(size, kv_len - i * size)) for i in range(common, -(-kv_len // size))]
    for texts, table, i, live in todo:
        slots = table[i] * size + torch.arange(live)
        keys, values = k.load(slots).transpose(0, 1)[:, None], v.load(slots).transpose(0, 1)[:, None]
        scores = rows[:, texts] @ keys.transpose(-2, -1)
        for x, y in zip(state, merge(*(x[:, texts] for x in state), *part(scores, values))):
            x[:, texts] = y
    return (state[2] / state[1]).transpose(0, 1).reshape(N, H, D)
"""
ALL_CHOICES = """
def keep(seconds, deadlines, now):
    from itertools import combinations
    every = sorted(range(len(seconds)), key=deadlines.__getitem__)

    def good(choice):
        at = now
        for i in choice:
            at += seconds[i]
            if at > deadlines[i]:
                return False
        return True

    for n in range(len(every), -1, -1):
        found = [choice for choice in combinations(every, n) if good(choice)]
        if found:
            return list(min(found, key=lambda choice: sum(seconds[i] for i in choice)))
"""
HARD_CODED = """
def keep(seconds, deadlines, now):
    return [1, 2, 4, 3] if seconds == [5, 2, 2, 3, 1] else []
"""

WRONG = [
    # ---- decode_shared
    Mutant(
        "text by text: shared blocks are read again",
        decode_shared(hold="holders[n, i] = table[i]", rounds="[(b, [n]) for (n, i), b in holders.items()]"),
        "was read 2 times",
    ),
    Mutant("only what all texts have in common is read once", COMMON_PREFIX, "was read 2 times"),
    Mutant(
        "one load of everything",
        ONE_LOAD.replace("LOADS", "(x.load(torch.tensor(every)) for x in (k, v))"),
        "a load may read one block",
    ),
    Mutant("block by block, but kept until the end", ONE_LOAD.replace("LOADS", BLOCK_LOADS), "are more than enough"),
    Mutant(
        "the scale is missing",
        decode_shared(rows="q.view(N, Hkv, H // Hkv, D).transpose(0, 1)"),
        "of the values differ",
    ),
    Mutant(
        "scaled by the square root twice",
        decode_shared(rows="(q / D).view(N, Hkv, H // Hkv, D).transpose(0, 1)"),
        "of the values differ",
    ),
    Mutant(
        "heads tiled: every Hkv-th belongs to a key-value head",
        decode_shared(rows="(q * D**-0.5).view(N, H // Hkv, Hkv, D).permute(2, 0, 1, 3)"),
        "of the values differ",
    ),
    Mutant("the whole of a last block", decode_shared(live="size"), "the result for"),
    Mutant(
        "a full last block is empty: kv_len % size",
        decode_shared(live="size if (i + 1) * size < kv_len else kv_len % size"),
        "raised IndexError",
    ),
    Mutant(
        "reserved blocks are read too",
        decode_shared(blocks="range(len(table))", live="min(size, max(0, kv_len - i * size)) or size"),
        "the result for",
    ),
    Mutant(
        "whole blocks alone: the last one is left out", decode_shared(blocks="range(kv_len // size)"), "the result for"
    ),
    Mutant(
        "only the first holder gets the block",
        decode_shared(hold="holders.setdefault(table[i], [n])"),
        "of the values differ",
    ),
    Mutant(
        "only the last holder gets the block", decode_shared(hold="holders[table[i]] = [n]"), "of the values differ"
    ),
    Mutant(
        "each block's answer is divided, then all are added",
        decode_shared(update="_, s2, o2 = part(scores, values); s[:, texts] += 1; o[:, texts] += o2 / s2"),
        "of the values differ",
    ),
    Mutant(
        "sums of different maxima are added",
        decode_shared(update="_, s2, o2 = part(scores, values); s[:, texts] += s2; o[:, texts] += o2"),
        "of the values differ",
    ),
    Mutant(
        "no maximum: exp of the scores themselves",
        decode_shared(update="w = scores.exp(); s[:, texts] += w.sum(-1, keepdim=True); o[:, texts] += w @ values"),
        "an exp was too large",
    ),
    Mutant(
        "one maximum for all texts of a block",
        decode_shared(
            update="c = scores.max(); w = (scores - c).exp(); "
            "new = (torch.full_like(m[:, texts], c), w.sum(-1, keepdim=True), w @ values); "
            + UPDATE.replace("part(scores, values)", "new")
        ),
        "is not finite",
    ),
    Mutant(
        "the state is made anew for each block",
        decode_shared(update="m[:, texts], s[:, texts], o[:, texts] = part(scores, values)"),
        "of the values differ",
    ),
    Mutant(
        "divided after each block",
        decode_shared(update=UPDATE + "; o[:, texts] /= s[:, texts]"),
        "of the values differ",
    ),
    Mutant("never divided", decode_shared(result="o.transpose(0, 1).reshape(N, H, D)"), "of the values differ"),
    Mutant(
        "heads before texts in the result", decode_shared(result="(o / s).reshape(N, H, D)"), "of the values differ"
    ),
    Mutant("the result has the shape of the state", decode_shared(result="o / s"), "the shape must be"),
    Mutant(
        "the whole of a last block, hidden by -inf",
        decode_shared(
            slots="block * size + torch.arange(size)",
            update="scores = scores.masked_fill(torch.arange(size) >= live[block], float('-inf')); " + UPDATE,
        ),
        "nobody has stored anything there",
    ),
    Mutant("loaded once to count, once to use", decode_shared(update="k.load(slots); " + UPDATE), "was read 2 times"),
    # ---- keep
    Mutant("whoever would be late is refused", keep(refuse=THE_LATE_ONE), "are kept, which are"),
    Mutant(
        "first come, first served, late ones refused",
        keep(order="range(len(seconds))", refuse=THE_LATE_ONE, result="sorted(i for _, i in kept)"),
        "are kept, which are 2",
    ),
    Mutant("by deadline, nobody is refused", keep(refuse="pass"), "it is kept and not good"),
    Mutant(
        "the shortest is refused",
        keep(key="seconds[i]", refuse="done -= heapq.heappop(kept)[0]"),
        "it is kept and not good",
    ),
    Mutant(
        "the first of those let in is refused",
        keep(key="len(kept)", refuse="done -= seconds[heapq.heappop(kept)[1]]"),
        "are kept, which are 3",
    ),
    Mutant(
        "the longest of those before it is refused, never the newest",
        keep(refuse=ANOTHER),
        "are as many and take",
    ),
    Mutant(
        "in order of length, the shortest first",
        keep(order="sorted(range(len(seconds)), key=seconds.__getitem__)"),
        "it is kept and not good",
    ),
    Mutant("in order of arrival", keep(order="range(len(seconds))"), "are kept, which are 3"),
    Mutant("the result in order of arrival", keep(result="sorted(i for _, i in kept)"), "it is kept and not good"),
    Mutant(
        "the result in order of length",
        keep(result="[i for _, i in sorted(kept, reverse=True)]"),
        "it is kept and not good",
    ),
    Mutant("begins at 0, whatever the time is", keep(begin="0"), "it is kept and not good"),
    Mutant("at the very deadline is late", keep(late=">="), "are kept, which are"),
    Mutant(
        "those who are refused are returned",
        keep(result="[i for i in range(len(seconds)) if i not in [j for _, j in kept]]"),
        "are kept, which are 1",
    ),
    Mutant("those who are refused still cost their time", keep(refuse="heapq.heappop(kept)"), "are kept, which are"),
    Mutant("all choices are tried", ALL_CHOICES, "keep took longer than"),
    Mutant("how many, not whom", keep(result="len(kept)"), "must return a list of request numbers"),
    Mutant("hard-coded", HARD_CODED, "are kept, which are 0"),
]
