"""What people write for lesson 11 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

MOD = """
def mask_mod(q_pos, k_pos, q_seq, k_seq):
    def mod(b, h, q, k):
        return {rule}
    return {result}
"""
BLOCKS = """
def block_mask(mod, T, S, size):
    rows, columns = {shape}
    mask = torch.zeros(rows * size, columns * size, dtype=torch.bool)
    {fill}
    cells = mask.view(rows, size, columns, size)
    {some}
    {full}
    return {result}
"""
CU = """
def cu_seqlens(chunks):
    cu_q, cu_k = {first}, {first}
    for start, n in chunks:
        cu_q.append({q})
        cu_k.append({k})
    return {result}
"""
VARLEN = """
def varlen_mask(cu_q, cu_k):
    mask = torch.{begin}(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for i in range({texts}):
        queries, keys = (slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_q, cu_k))
        t, s = queries.stop - queries.start, keys.stop - keys.start
        mask[queries, keys] = {own}
    return {result}
"""
PART = """
def part(scores, values):
    m = {m}
    weights = {weights}
    return {result}
"""
MERGE = """
def merge(m1, s1, o1, m2, s2, o2):
    m = {m}
    f1, f2 = {factors}
    return {result}
"""
LOOP = """
def attend_in_blocks(q, q_pos, k, v, size):
    (T, D), n = q.shape, {n}
    m, s, o = q.new_full((T, 1), float("-inf")), q.new_zeros(T, 1), q.new_zeros(T, D)
    for start in range(0, {stop}, size):
        positions = {positions}
        scores = {scores}
        scores = {masked}
        m, s, o = {state}
    return {result}
"""
PROGRAM = """
def paged_decode(n, head, q, k, v, table, kv_len, size):
    D, G = q.shape[-1], q.shape[1] // k.shape[0]
    mine = {mine}
    m, s, o = q.new_full((len(mine), 1), float("-inf")), q.new_zeros(len(mine), 1), q.new_zeros(len(mine), D)
    for start in range(0, {stop}, size):
        positions = {positions}
        live = {live}
        slots = {slots}
        keys, values = {keys}, {values}
        scores = {scores}
        m, s, o = merge(m, s, o, *part(scores, values))
    return {result}
"""
INTENSITY = """
def intensity(n, kv_len, H, Hkv, D, itemsize):
    scores = {scores}
    return {operations} / ({moved})
"""


def mask_mod(rule: str = "(k_seq[k] == q_seq[q]) & (k_pos[k] <= q_pos[q])", result: str = "mod") -> str:
    return MOD.format(rule=rule, result=result)


def block_mask(
    shape: str = "-(-T // size), -(-S // size)",
    fill: str = "mask[:T, :S] = mod(0, 0, torch.arange(T)[:, None], torch.arange(S))",
    some: str = "some = cells.any(3).any(1).int()",
    full: str = "full = cells.all(3).all(1).int()",
    result: str = "some + full",
) -> str:
    return BLOCKS.format(shape=shape, fill=fill, some=some, full=full, result=result)


INT32 = "torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)"


def cu_seqlens(
    first: str = "[0]", q: str = "cu_q[-1] + n", k: str = "cu_k[-1] + start + n", result: str = INT32
) -> str:
    return CU.format(first=first, q=q, k=k, result=result)


def varlen_mask(
    own: str = "torch.arange(s) <= torch.arange(s - t, s)[:, None]",
    begin: str = "zeros",
    texts: str = "len(cu_q) - 1",
    result: str = "mask",
) -> str:
    return VARLEN.format(own=own, begin=begin, texts=texts, result=result)


def part(
    m: str = "scores.amax(-1, keepdim=True)",
    weights: str = '(scores - m).exp().masked_fill(scores == float("-inf"), 0.0)',
    result: str = "m, weights.sum(-1, keepdim=True), weights @ values",
) -> str:
    return PART.format(m=m, weights=weights, result=result)


def merge(
    m: str = "torch.maximum(m1, m2)",
    factors: str = '((own - m).exp().masked_fill(own == float("-inf"), 0.0) for own in (m1, m2))',
    result: str = "m, s1 * f1 + s2 * f2, o1 * f1 + o2 * f2",
) -> str:
    return MERGE.format(m=m, factors=factors, result=result)


def attend_in_blocks(
    n: str = "int(q_pos.max()) + 1",
    stop: str = "n",
    positions: str = "torch.arange(start, min(start + size, n))",
    scores: str = "q @ k.load(positions).T * D**-0.5",
    masked: str = 'scores.masked_fill(positions > q_pos[:, None], float("-inf"))',
    state: str = "merge(m, s, o, *part(scores, v.load(positions)))",
    result: str = "o / s",
) -> str:
    return LOOP.format(n=n, stop=stop, positions=positions, scores=scores, masked=masked, state=state, result=result)


def paged_decode(
    mine: str = "q[n, head * G : (head + 1) * G] * D**-0.5",
    stop: str = "kv_len",
    positions: str = "start + torch.arange(size)",
    live: str = "positions < kv_len",
    slots: str = "table.load(n, positions, live=live)",
    keys: str = "k.load(head, slots, live=live)",
    values: str = "v.load(head, slots, live=live)",
    scores: str = '(mine @ keys.T).masked_fill(~live, float("-inf"))',
    result: str = "o / s",
) -> str:
    return PROGRAM.format(
        mine=mine,
        stop=stop,
        positions=positions,
        live=live,
        slots=slots,
        keys=keys,
        values=values,
        scores=scores,
        result=result,
    )


def intensity(
    scores: str = "n * (kv_len - n) + n * (n + 1) / 2",
    operations: str = "4 * D * H * scores",
    moved: str = "itemsize * D * (2 * Hkv * kv_len + 2 * H * n)",
) -> str:
    return INTENSITY.format(scores=scores, operations=operations, moved=moved)


TWO_PASSES = """
def attend_in_blocks(q, q_pos, k, v, size):
    n, scale = int(q_pos.max()) + 1, q.shape[-1] ** -0.5
    blocks = [torch.arange(start, min(start + size, n)) for start in range(0, n, size)]
    def scores(block):
        return (q @ k.load(block).T * scale).masked_fill(block > q_pos[:, None], float("-inf"))
    m = torch.stack([scores(block).amax(-1) for block in blocks]).amax(0)[:, None]
    weights = [(scores(block) - m).exp() for block in blocks]
    s = sum(w.sum(-1, keepdim=True) for w in weights)
    return sum(w @ v.load(block) for w, block in zip(weights, blocks)) / s
"""
ALL_SCORES_KEPT = """
def attend_in_blocks(q, q_pos, k, v, size):
    n, scale = int(q_pos.max()) + 1, q.shape[-1] ** -0.5
    blocks = [torch.arange(start, min(start + size, n)) for start in range(0, n, size)]
    scores = torch.cat([q @ k.load(block).T * scale for block in blocks], -1)
    weights = scores.masked_fill(torch.arange(n) > q_pos[:, None], float("-inf")).softmax(-1)
    return sum(w @ v.load(block) for w, block in zip(weights.split(size, -1), blocks))
"""
QUERY_BY_QUERY = """
def attend_in_blocks(q, q_pos, k, v, size):
    out = []
    for t in range(len(q)):
        m, s, o = torch.full((1, 1), float("-inf")).double(), torch.zeros(1, 1).double(), torch.zeros_like(q[t : t + 1])
        for start in range(0, int(q_pos[t]) + 1, size):
            block = torch.arange(start, min(start + size, int(q_pos[t]) + 1))
            scores = q[t : t + 1] @ k.load(block).T * q.shape[-1] ** -0.5
            m, s, o = merge(m, s, o, *part(scores, v.load(block)))
        out.append(o / s)
    return torch.cat(out)
"""
HEAD_BY_HEAD = """
def paged_decode(n, head, q, k, v, table, kv_len, size):
    G = q.shape[1] // k.shape[0]
    out = []
    for g in range(G):
        mine = q[n, head * G + g : head * G + g + 1] * q.shape[-1] ** -0.5
        m, s, o = mine.new_full((1, 1), float("-inf")), mine.new_zeros(1, 1), torch.zeros_like(mine)
        for start in range(0, kv_len, size):
            positions = start + torch.arange(size)
            live = positions < kv_len
            slots = table.load(n, positions, live=live)
            scores = (mine @ k.load(head, slots, live=live).T).masked_fill(~live, float("-inf"))
            m, s, o = merge(m, s, o, *part(scores, v.load(head, slots, live=live)))
        out.append(o / s)
    return torch.cat(out)
"""
CORNERS = (
    "mask.view(rows, size, columns, size)[:, 0, :, -1].int() + mask.view(rows, size, columns, size)[:, -1, :, 0].int()"
)

WRONG = [
    # ---- mask_mod
    Mutant("indices taken for positions", mask_mod("(k_seq[k] == q_seq[q]) & (k <= q)"), "mod(0, 0, q, k) for"),
    Mutant("causal alone: it reads other texts", mask_mod("k_pos[k] <= q_pos[q]"), "mod(0, 0, q, k) for"),
    Mutant("texts alone: it reads the future", mask_mod("k_seq[k] == q_seq[q]"), "mod(0, 0, q, k) for"),
    Mutant("no token sees itself", mask_mod("(k_seq[k] == q_seq[q]) & (k_pos[k] < q_pos[q])"), "mod(0, 0, q, k) for"),
    Mutant("sees its future", mask_mod("(k_seq[k] == q_seq[q]) & (k_pos[k] >= q_pos[q])"), "mod(0, 0, q, k) for"),
    Mutant("q and k exchanged", mask_mod("(k_seq[q] == q_seq[k]) & (k_pos[q] <= q_pos[k])"), "mod(0, 0, q, k) for"),
    Mutant(
        "queries looked up among the keys' positions",
        mask_mod("(k_seq[k] == q_seq[q]) & (k_pos[k] <= k_pos[q])"),
        "mod(0, 0, q, k) for",
    ),
    Mutant(
        "decided in Python: and",
        mask_mod("(k_seq[k] == q_seq[q]) and (k_pos[k] <= q_pos[q])"),
        "mask_mod raised RuntimeError",
    ),
    Mutant(
        "decided in Python where there is one cell",
        mask_mod(
            "(k_seq[k] == q_seq[q]) & (k_pos[k] <= q_pos[q]) if q.dim() or k.dim() else torch.tensor("
            "bool(k_seq[k] == q_seq[q]) and bool(k_pos[k] <= q_pos[q]))"
        ),
        "torch's create_mask cannot trace",
    ),
    Mutant(
        "indices turned into numbers",
        mask_mod("(k_seq[k] == q_seq[q.item()]) & (k_pos[k.item()] <= q_pos[q.item()])"),
        "mask_mod raised RuntimeError",
    ),
    Mutant(
        "the whole mask, whatever is asked",
        mask_mod("(k_seq[None] == q_seq[:, None]) & (k_pos[None] <= q_pos[:, None])"),
        "it must be a bool tensor without axes",
    ),
    Mutant(
        "a mask returned, no function",
        mask_mod(result="(k_seq[None] == q_seq[:, None]) & (k_pos[None] <= q_pos[:, None])"),
        "it must return a function of (b, h, q, k), not a mask",
    ),
    Mutant("the function is not returned", mask_mod(result="None"), "is a `return` missing?"),
    Mutant(
        "weights in place of truth values",
        mask_mod("((k_seq[k] == q_seq[q]) & (k_pos[k] <= q_pos[q])).int()"),
        "the dtype must be torch.bool",
    ),
    # ---- block_mask
    Mutant("full ones overlooked", block_mask(result="some"), "it must be 2 (full), and is 1"),
    Mutant("partial ones taken for full", block_mask(result="2 * some"), "it must be 1 (partial), and is 2"),
    Mutant("partial ones taken for empty", block_mask(result="2 * full"), "it must be 1 (partial), and is 0"),
    Mutant("full and partial exchanged", block_mask(result="2 * some - full"), "it must be 1 (partial), and is 2"),
    Mutant("empty is 1, full is 0", block_mask(result="2 - some - full"), "it must be 0 (empty), and is 2"),
    Mutant(
        "by the block's indices, as for one text",
        block_mask(
            result="(torch.arange(rows)[:, None] >= torch.arange(columns)).int() + "
            "(torch.arange(rows)[:, None] > torch.arange(columns)).int()"
        ),  # fmt: skip
        "it must be",
    ),
    Mutant("by its corners", block_mask(result=CORNERS), "it must be"),
    Mutant("by its first cell", block_mask(result="2 * cells[:, 0, :, 0].int()"), "it must be 1 (partial), and is 2"),
    Mutant(
        "blocks cut off left out",
        block_mask(
            shape="T // size, S // size",
            fill="mask |= mod(0, 0, torch.arange(rows * size)[:, None], torch.arange(columns * size))",
        ),  # fmt: skip
        "the shape must be",
    ),  # fmt: skip
    Mutant(
        "asks past the edge",
        block_mask(fill="mask |= mod(0, 0, torch.arange(rows * size)[:, None], torch.arange(columns * size))"),
        "ask only for cells that exist",
    ),
    Mutant(
        "what is past the edge counts as visible",
        block_mask(fill="mask[:] = True; mask[:T, :S] = mod(0, 0, torch.arange(T)[:, None], torch.arange(S))"),
        "past the edge: it must be",
    ),
    Mutant("a row for each block of keys", block_mask(result="(some + full).T"), "the shape must be"),
    Mutant(
        "any over the rows alone",
        block_mask(some="some = cells.any(1)[:, :, 0].int()"),
        "it must be 1 (partial), and is 0",
    ),
    Mutant("all over the rows alone", block_mask(full="full = cells.all(3).any(1).int()"), "it must be 1 (partial)"),
    Mutant("shares in place of kinds", block_mask(result="cells.float().mean((1, 3)) * 2"), "whole numbers 0, 1 and 2"),
    Mutant("block_mask returns nothing", block_mask(result="None"), "is a `return` missing?"),
    # ---- cu_seqlens
    Mutant(
        "no 0 in front",
        cu_seqlens(result="torch.tensor(cu_q[1:]).int(), torch.tensor(cu_k[1:]).int()"),
        "expected [0, 2, 5, 6], got [2, 5, 6]",
    ),  # fmt: skip
    Mutant(
        "the total left out",
        cu_seqlens(result="torch.tensor(cu_q[:-1]).int(), torch.tensor(cu_k[:-1]).int()"),
        "expected [0, 2, 5, 6], got [0, 2, 5]",
    ),  # fmt: skip
    Mutant("lengths, not their sums", cu_seqlens(q="n", k="start + n"), "got [0, 2, 3, 1]"),
    Mutant("keys: the new ones alone", cu_seqlens(k="cu_k[-1] + n"), "cu_k of the chunks"),
    Mutant("keys: the old ones alone", cu_seqlens(k="cu_k[-1] + start"), "cu_k of the chunks"),
    Mutant("one list for both: the keys'", cu_seqlens(q="cu_q[-1] + start + n"), "cu_q of the chunks"),
    Mutant("queries where they stand in their text", cu_seqlens(q="start + n"), "cu_q of the chunks"),
    Mutant("int64", cu_seqlens(result="torch.tensor(cu_q), torch.tensor(cu_k)"), "must be torch.int32"),
    Mutant("plain lists", cu_seqlens(result="cu_q, cu_k"), "it must be a tensor"),
    Mutant(
        "keys first",
        cu_seqlens(result="torch.tensor(cu_k, dtype=torch.int32), torch.tensor(cu_q, dtype=torch.int32)"),
        "cu_q of the chunks",
    ),
    Mutant("queries alone", cu_seqlens(result="torch.tensor(cu_q, dtype=torch.int32)"), "must return 2 tensors"),
    # ---- varlen_mask
    Mutant("aligned at the top left", varlen_mask("torch.ones(t, s, dtype=torch.bool).tril()"), "must see key"),
    Mutant("not causal", varlen_mask("True"), "must not see key"),
    Mutant(
        "no token sees itself, in varlen_mask",
        varlen_mask("torch.arange(s) < torch.arange(s - t, s)[:, None]"),
        "must see key 0",
    ),
    Mutant(
        "one key too many",
        varlen_mask("torch.arange(s) <= torch.arange(s - t, s)[:, None] + 1"),
        "must not see key 1",
    ),
    Mutant(
        "all texts shifted alike",
        varlen_mask("torch.arange(s) <= torch.arange(t)[:, None] + mask.shape[1] - mask.shape[0]"),
        "of text 0, is seen; with text 0 alone it is not seen",
    ),
    Mutant("no walls between texts", varlen_mask(begin="ones"), "of another text, is seen"),
    Mutant("the last text left out", varlen_mask(texts="len(cu_q) - 2"), "must see key"),
    Mutant("the first text alone", varlen_mask(texts="1"), "of text 1, is not seen"),
    Mutant("hidden where it should be visible", varlen_mask(result="~mask"), "must see key 0"),
    Mutant("a row for each key", varlen_mask(result="mask.T"), "the shape must be"),
    Mutant("numbers in place of truth values", varlen_mask(result="mask.float()"), "the dtype must be torch.bool"),
    Mutant(
        "mirrored",
        varlen_mask("torch.arange(s) >= torch.arange(t)[:, None]"),
        "see key",
    ),
    # ---- part
    Mutant("no maximum subtracted", part(weights="scores.exp()"), "s of scores"),
    Mutant("the maximum of the whole block", part(m="scores.amax().expand(len(scores), 1)"), "m of scores"),
    Mutant("a row of -inf is NaN", part(weights="(scores - m).exp()"), "has NaN"),
    Mutant(
        "hidden keys have weight 1",
        part(weights='(scores - m).exp().masked_fill(scores == float("-inf"), 1.0)'),
        "s of scores",
    ),
    Mutant(
        "m of a row that sees nothing is 0",
        part(m='scores.amax(-1, keepdim=True).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)'),
        "m of scores",
    ),
    Mutant(
        "divided already",
        part(result="m, weights.sum(-1, keepdim=True), weights @ values / weights.sum(-1, keepdim=True)"),
        "o of scores",
    ),
    Mutant("axes lost", part(result="m[:, 0], weights.sum(-1), weights @ values"), "m of scores"),
    Mutant(
        "s counts the keys", part(result="m, (weights > 0).sum(-1, keepdim=True).double(), weights @ values"), "s of"
    ),
    Mutant(
        "the softmax over the queries",
        part(m="scores.amax(0, keepdim=True).expand_as(scores)[:, :1]"),
        "m of scores",
    ),
    Mutant("o of the scores", part(result="m, weights.sum(-1, keepdim=True), (scores - m) @ values"), "o of scores"),
    Mutant("o and s exchanged", part(result="m, weights @ values, weights.sum(-1, keepdim=True)"), "s of scores"),
    Mutant("the scores are changed in place", part(weights="scores.sub_(m).exp_()"), "changed its argument number 1"),
    Mutant("only o returned", part(result="weights @ values"), "must return 3 tensors"),
    # ---- merge
    Mutant("o not rescaled", merge(result="m, s1 * f1 + s2 * f2, o1 + o2"), "o of two blocks"),
    Mutant("s not rescaled", merge(result="m, s1 + s2, o1 * f1 + o2 * f2"), "s of two blocks"),
    Mutant("nothing rescaled", merge(factors="1, 1"), "of two blocks"),
    Mutant(
        "only the first is rescaled",
        merge(factors='(m1 - m).exp().masked_fill(m1 == float("-inf"), 0.0), 1'),
        "of two blocks",
    ),
    Mutant("rescaled the wrong way", merge(factors="(m - m1).exp(), (m - m2).exp()"), "of two blocks"),
    Mutant("the factors exchanged", merge(result="m, s1 * f2 + s2 * f1, o1 * f2 + o2 * f1"), "of two blocks"),
    Mutant("always the second's m", merge(m="m2"), "m of two blocks"),
    Mutant("the smaller m", merge(m="torch.minimum(m1, m2)"), "m of two blocks"),
    Mutant("m added up", merge(m="m1 + m2"), "m of two blocks"),
    Mutant(
        "one m for all rows",
        merge(m="torch.maximum(m1, m2).amax().expand_as(m1)"),
        "m of two blocks",
    ),
    Mutant("two empty states are NaN", merge(factors="(m1 - m).exp(), (m2 - m).exp()"), "of two empty states has NaN"),
    Mutant(
        "an empty one is left out, but only on the left",
        merge(factors='(m1 - m).exp().masked_fill(m1 == float("-inf"), 0.0), (m2 - m).exp()'),
        "of two empty states has NaN",
    ),
    Mutant(
        "through exp(m) itself",
        merge(result="m, (s1 * m1.exp() + s2 * m2.exp()) / m.exp(), (o1 * m1.exp() + o2 * m2.exp()) / m.exp()"),
        "has NaN",
    ),
    Mutant(
        "the mean of two answers",
        merge(result="m, s1 * f1 + s2 * f2, (o1 / s1 + o2 / s2) / 2"),
        "o of two blocks",
    ),
    Mutant("m in place of f", merge(factors="m1 - m, m2 - m"), "of two blocks"),
    Mutant("m is not returned", merge(result="s1 * f1 + s2 * f2, o1 * f1 + o2 * f2"), "must return 3 tensors"),
    # ---- attend_in_blocks
    Mutant("scale missing", attend_in_blocks(scores="q @ k.load(positions).T"), "the scores are not scaled by D"),
    Mutant("scaled by D", attend_in_blocks(scores="q @ k.load(positions).T / D"), "the result for queries at"),
    Mutant("no mask", attend_in_blocks(masked="scores"), "as if none were hidden"),
    Mutant(
        "mask off by one",
        attend_in_blocks(masked='scores.masked_fill(positions >= q_pos[:, None], float("-inf"))'),
        "the result for queries at",
    ),
    Mutant(
        "each block masked like the first",
        attend_in_blocks(masked='scores.masked_fill(torch.arange(len(positions)) > q_pos[:, None], float("-inf"))'),
        "the result for queries at",
    ),
    Mutant(
        "queries by their index",
        attend_in_blocks(masked='scores.masked_fill(positions > torch.arange(T)[:, None], float("-inf"))'),
        "the result for queries at",
    ),
    Mutant(
        "masked with 0",
        attend_in_blocks(masked="scores.masked_fill(positions > q_pos[:, None], 0.0)"),
        "the result for queries at",
    ),  # fmt: skip
    Mutant("the last short block left out", attend_in_blocks(stop="n // size * size"), "the result for queries at"),
    Mutant(
        "reads all that is stored",
        attend_in_blocks(n="k.shape[0]"),
        "the last visible position is",
    ),
    Mutant(
        "the last block read whole",
        attend_in_blocks(positions="torch.arange(start, min(start + size, k.shape[0]))"),
        "the last visible position is",
    ),
    Mutant("up to the first query alone", attend_in_blocks(n="int(q_pos[0]) + 1"), "the result for queries at"),
    Mutant("not divided", attend_in_blocks(result="o"), "the result for queries at"),
    Mutant(
        "the last block alone",
        attend_in_blocks(state="part(scores, v.load(positions))"),
        "the result for queries at",
    ),
    Mutant("two passes", TWO_PASSES, "was read 2 times; each must be read once"),
    Mutant("query by query", QUERY_BY_QUERY, "each must be read once"),
    Mutant("all scores kept", ALL_SCORES_KEPT, "the whole score matrix has"),
    Mutant(
        "all keys in one block",
        attend_in_blocks().replace("range(0, n, size)", "[0]").replace("min(start + size, n)", "n"),
        "it may read",
    ),
    Mutant(
        "V read for each product",
        attend_in_blocks(state="merge(m, s, o, *part(scores, v.load(positions) + 0 * v.load(positions)))"),
        "of V was read 2 times",
    ),
    # ---- paged_decode
    Mutant("heads tiled", paged_decode(mine="q[n, head :: k.shape[0]] * D**-0.5"), "these are query heads"),
    Mutant("one query head", paged_decode(mine="q[n, head : head + 1] * D**-0.5"), "the shape must be"),
    Mutant("all query heads", paged_decode(mine="q[n] * D**-0.5"), "the shape must be"),
    Mutant(
        "the first group for all", paged_decode(mine="q[n, :G] * D**-0.5"), "program (sequence 0, key-value head 1)"
    ),
    Mutant(
        "scale missing, in paged_decode",
        paged_decode(mine="q[n, head * G : (head + 1) * G]"),
        "the scores are not scaled",
    ),
    Mutant("the table passed over", paged_decode(slots="positions"), "program (sequence 0"),
    Mutant("always the first text's table", paged_decode(slots="table.load(0, positions, live=live)"), "(sequence 1"),
    Mutant("what is dead has the score 0", paged_decode(scores="mine @ keys.T"), "have the score 0 and so a weight"),
    Mutant(
        "dead keys masked with 0",
        paged_decode(scores="(mine @ keys.T).masked_fill(~live, 0.0)"),
        "have the score 0 and so a weight",
    ),
    Mutant(
        "the table read past the end",
        paged_decode(slots="table.load(n, positions)"),
        "should `live` forbid it?",
    ),
    Mutant("free slots read, then masked", paged_decode(values="v.load(head, slots)"), "has NaN"),
    Mutant("one position too few", paged_decode(live="positions < kv_len - 1"), "program (sequence 0"),
    Mutant("one position too many", paged_decode(live="positions <= kv_len"), "should `live` forbid it?"),
    Mutant(
        "the last short block left out, in paged_decode",
        paged_decode(stop="kv_len // size * size"),
        "program (sequence 0",
    ),
    Mutant("the same block again and again", paged_decode(positions="torch.arange(size)"), "program (sequence 0"),
    Mutant("V of another head", paged_decode(values="v.load(0, slots, live=live)"), "key-value head 1"),
    Mutant("not divided, in paged_decode", paged_decode(result="o"), "values differ"),
    Mutant("K read for each query head", HEAD_BY_HEAD, "each must be read once"),
    Mutant(
        "K read twice",
        paged_decode(keys="k.load(head, slots, live=live) + 0 * k.load(head, slots, live=live)"),
        "of K, which is key-value head and slot, was read 2 times",
    ),
    Mutant(
        "the whole text in one block",
        paged_decode().replace("range(0, kv_len, size)", "[0]").replace("torch.arange(size)", "torch.arange(kv_len)"),
        "it may read",
    ),
    Mutant("paged_decode returns nothing", paged_decode(result="None"), "is a `return` missing?"),
    # ---- intensity
    Mutant("V forgotten", intensity(moved="itemsize * D * (Hkv * kv_len + 2 * H * n)"), "times as much"),
    Mutant(
        "K and V anew for each query head", intensity(moved="itemsize * D * (2 * H * kv_len + 2 * H * n)"), "expected"
    ),
    Mutant("no additions", intensity(operations="2 * D * H * scores"), "0.5 times as much"),
    Mutant("q k alone", intensity(operations="2 * D * Hkv * scores"), "times as much"),
    Mutant("only key-value heads compute", intensity(operations="4 * D * Hkv * scores"), "times as much"),
    Mutant("hidden scores too", intensity(scores="n * kv_len"), "intensity(n=2, kv_len=2"),
    Mutant("the old positions alone", intensity(scores="n * (kv_len - n)"), "times as much"),
    Mutant("a square chunk", intensity(scores="n * (n + 1) / 2"), "times as much"),
    Mutant("no diagonal", intensity(scores="n * (kv_len - n) + n * (n - 1) / 2"), "times as much"),
    Mutant("q and result left out", intensity(moved="itemsize * D * 2 * Hkv * kv_len"), "times as much"),
    Mutant("the result left out", intensity(moved="itemsize * D * (2 * Hkv * kv_len + H * n)"), "times as much"),
    Mutant("numbers, not bytes", intensity(moved="D * (2 * Hkv * kv_len + 2 * H * n)"), "2 times as much"),
    Mutant("bits", intensity(moved="8 * itemsize * D * (2 * Hkv * kv_len + 2 * H * n)"), "0.125 times as much"),
    Mutant(
        "bytes per operation",
        intensity(operations="itemsize * D * (2 * Hkv * kv_len + 2 * H * n)", moved="4 * D * H * scores"),
        "times as much",
    ),
    # ---- together
    Mutant("a wrong merge: neither the loop's nor the program's fault", merge(factors="1, 1"), "mend merge first"),
    Mutant("a wrong part: not the loop's fault", part(weights="scores.exp()"), "mend part first"),
]
