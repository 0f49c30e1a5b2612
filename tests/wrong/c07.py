"""Wrong solutions of lesson 07: what people write when texts lie end to end for the first time."""

from wrong import Mutant

VISIBLE = """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., None, :] {compare} q_pos[..., :, None]
    if q_seq is not None and k_seq is not None:
        mask = {both}
    return mask
"""
SAME = "(k_seq[..., None, :] == q_seq[..., :, None])"

PACK = """
def pack(rows):
    tokens, positions, seq, last = [], [], [], []
    for i, start, new in rows:
        {before}
        tokens += new
        positions += {positions}
        seq += [i] * len(new)
        {after}
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(seq), torch.tensor(last)
"""
GOOD_LAST = "last.append(len(tokens) - 1)"

CONTEXT = """
def context(rows, slot_of):
    slots, positions, seq = [], [], []
    for i, start, new in rows:
        n = {n}
        slots += {slots}
        positions += range(n)
        seq += [i] * n
    return torch.tensor(slots), torch.tensor(positions), torch.tensor(seq)
"""

STEP = """
def step(model, pool, rows, slot_of):
    tokens, positions, seq, last = pack(rows)
    slots, k_pos, k_seq = context(rows, slot_of)
    mask = {mask}
    new_slots = {new_slots}
    index = pool.index(slots)

    def attend(layer, q, k, v):
        {attend}

    hidden = model(tokens, positions, attend)
    return {logits}
"""
STEP_GOOD = dict(
    mask="visible(positions, k_pos, seq, k_seq)",
    new_slots="torch.tensor([slot for i, start, new in rows for slot in slot_of[i][start : start + len(new)]])",
    attend="pool.store(layer, new_slots, k, v); return attention.sdpa(q, *pool.gather(layer, index), mask)",
    logits="model.logits(hidden[last])",
)

GENERATE = """
def generate(model, prompts, n_new, max_running=8):
    texts = [list(prompt) for prompt in prompts]
    longest = max(len(prompt) + n - 1 for prompt, n in zip(prompts, n_new))
    pool = KVPool(model, {size}, 1, 1)
    free = list(range({size}))
    slot_of, finished = {{}}, []
    waiting, running = list(range(len(texts))), []
    while waiting or running:
        while waiting and {room}:
            running.append(waiting.pop(0))
            slot_of[running[-1]] = []
        rows = []
        for place, i in enumerate(running):
            start = {start}
            new = texts[i][start:]
            {reserve}
            rows.append((i, start, new))
        logits = step(model, pool, rows, slot_of)
        for i, token in zip({order}, logits.argmax(-1).tolist()):
            texts[i].append(token)
            if len(texts[i]) {ends} len(prompts[i]) + n_new[i]:
                {release}
        running = [i for i in running if len(texts[i]) {goes_on} len(prompts[i]) + n_new[i]]
    return {result}
"""
GENERATE_GOOD = dict(
    size="max_running * longest",
    room="len(running) < max_running",
    start="len(slot_of[i])",
    reserve="slot_of[i] += [free.pop() for _ in new]",
    order="running",
    ends="==",
    release="free += slot_of.pop(i)",
    goes_on="<",
    result="[text[len(prompt):] for text, prompt in zip(texts, prompts)]",
)


def visible(compare: str = "<=", both: str = f"mask & {SAME}") -> str:
    return VISIBLE.format(compare=compare, both=both)


def pack(before: str = "pass", positions: str = "range(start, start + len(new))", after: str = GOOD_LAST) -> str:
    return PACK.format(before=before, positions=positions, after=after)


def context(n: str = "start + len(new)", slots: str = "slot_of[i][:n]") -> str:
    return CONTEXT.format(n=n, slots=slots)


def step(**parts: str) -> str:
    return STEP.format(**(STEP_GOOD | parts))


def generate(**parts: str) -> str:
    return GENERATE.format(**(GENERATE_GOOD | parts))


WRONG = [
    # visible
    Mutant(
        "off by one: a token does not see itself", visible(compare="<"), "the mask of queries at positions [0, 1, 2"
    ),
    Mutant("the text compared, the position not", visible(both=SAME), "of the values differ"),
    Mutant("the text never compared", visible(both="mask"), "keys at [0, 1, 2, 3, 0, 1, 0] of texts"),
    Mutant("own text or earlier, where both must hold", visible(both=f"mask | {SAME}"), "of the values differ"),
    Mutant(
        "causal by index in the batch, not by position",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    T, S = len(q_pos), len(k_pos)
    mask = torch.arange(S)[None, :] <= torch.arange(T)[:, None]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[None, :] == q_seq[:, None])
    return mask
""",
        "the mask of queries at positions [5]",
    ),
    Mutant(
        "queries and keys swapped",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., :, None] <= q_pos[..., None, :]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., :, None] == q_seq[..., None, :])
    return mask
""",
        "the mask of queries",
    ),
    Mutant(
        "one flat text only: no leading axis",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[None, :] <= q_pos[:, None]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[None, :] == q_seq[:, None])
    return mask
""",
        "visible raised RuntimeError",
    ),
    Mutant(
        "one flat text only, and told so",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[None, :] <= q_pos[:, None]
    return mask if q_seq is None or k_seq is None else mask & (k_seq[None, :] == q_seq[:, None])
""",
        "with [None, :] and [:, None] the mask fits one text only",
    ),
    # pack
    Mutant("positions not reset for each text", pack(positions="range(len(positions), len(tokens))"), "positions of"),
    Mutant("positions from 0 in every step", pack(positions="range(len(new))"), "positions of"),
    Mutant("last: the row's first token", pack("last.append(len(tokens))", after="pass"), "last of"),
    Mutant("last: within the row, not in the batch", pack(after="last.append(len(new) - 1)"), "last of"),
    Mutant("last: one too far", pack(after="last.append(len(tokens))"), "last of"),
    Mutant(
        "tokens of the texts by turns",
        """
from itertools import zip_longest

def pack(rows):
    tokens, positions, seq, last = [], [], [], {}
    for place, column in enumerate(zip_longest(*(new for _, _, new in rows))):
        for (i, start, new), token in zip(rows, column):
            if token is not None:
                tokens.append(token)
                positions.append(start + place)
                seq.append(i)
                last[i] = len(tokens) - 1
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(seq), torch.tensor([last[i] for i, _, _ in rows])
""",
        "tokens of",
    ),
    Mutant(
        "the number of the row in place of the text's",
        """
def pack(rows):
    tokens, positions, seq, last = [], [], [], []
    for place, (i, start, new) in enumerate(rows):
        tokens += new
        positions += range(start, start + len(new))
        seq += [place] * len(new)
        last.append(len(tokens) - 1)
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(seq), torch.tensor(last)
""",
        "seq of",
    ),
    Mutant(
        "padded to the longest, as before",
        """
def pack(rows):
    most = max(len(new) for _, _, new in rows)
    tokens, positions, seq, last = [], [], [], []
    for i, start, new in rows:
        last.append(len(tokens) + len(new) - 1)
        tokens += new + [0] * (most - len(new))
        positions += range(start, start + most)
        seq += [i] * most
    return torch.tensor(tokens), torch.tensor(positions), torch.tensor(seq), torch.tensor(last)
""",
        "the shape must be",
    ),
    # context
    Mutant("the new tokens left out", context(n="start"), "S must be"),
    Mutant("only the new tokens", context(n="len(new)", slots="slot_of[i][start : start + n]"), "S must be"),
    Mutant("reserved slots read, to be masked", context(n="len(slot_of[i])"), "S must be"),
    Mutant(
        "rows gathered from the wrong request: slot_of taken to be in the order of the rows",
        """
def context(rows, slot_of):
    slots, positions, seq = [], [], []
    for (i, start, new), own in zip(rows, slot_of.values()):
        n = start + len(new)
        slots += own[:n]
        positions += range(n)
        seq += [i] * n
    return torch.tensor(slots), torch.tensor(positions), torch.tensor(seq)
""",
        "S must be",
    ),
    Mutant("the first text's slots for everyone", context(slots="slot_of[rows[0][0]][:n]"), "you read slot"),
    Mutant("positions in place of slots", context(slots="range(n)"), "you read slot"),
    # step
    Mutant("leak: the mask is not told the texts", step(mask="visible(positions, k_pos)"), "they must not move at all"),
    Mutant(
        "read before written",
        step(
            attend="kv = pool.gather(layer, index); pool.store(layer, new_slots, k, v); "
            "return attention.sdpa(q, *kv, mask)"
        ),
        "NaN",
    ),
    Mutant(
        "new K and V at the front of the context: right for prompts alone",
        step(new_slots="slots[: len(tokens)]"),
        "should now lie in slots",
    ),
    Mutant(
        "new K and V at the slots of the last T positions read",
        step(new_slots="slots[-len(tokens) :]"),
        "should now lie in slots",
    ),
    Mutant(
        "the last rows of the batch in place of `last`", step(logits="model.logits(hidden[-len(rows) :])"), "logits"
    ),
    Mutant("the head on every token", step(logits="model.logits(hidden)[last]"), "rows pushed through the head"),
    Mutant("a row of logits for every token", step(logits="model.logits(hidden)"), "the shape must be"),
    Mutant(
        "read before written, and told so",
        step(
            attend="kv = pool.gather(layer, index); pool.store(layer, new_slots, k, v); "
            "return attention.sdpa(q, *kv, mask)"
        ),
        "have NaN: a slot is read before it is written",
    ),
    Mutant(
        "a row of logits for every token, and told so",
        step(logits="model.logits(hidden)"),
        "a row for each token: only those in `last` are worth the head",
    ),
    Mutant(
        "slots gathered in place of an index",
        step(attend="pool.store(layer, new_slots, k, v); return attention.sdpa(q, *pool.gather(layer, slots), mask)"),
        "it wants what pool.index(slots) makes, not the slots themselves",
    ),
    Mutant(
        "every free slot read and masked",
        """
def step(model, pool, rows, slot_of):
    tokens, positions, seq, last = pack(rows)
    k_pos = torch.zeros(pool.k.shape[2], dtype=torch.int64)
    k_seq = torch.full_like(k_pos, -1)
    for i, start, new in rows:
        own = torch.tensor(slot_of[i][: start + len(new)])
        k_pos[own], k_seq[own] = torch.arange(len(own)), i
    mask = visible(positions, k_pos, seq, k_seq)
    new_slots = torch.tensor([slot for i, start, new in rows for slot in slot_of[i][start : start + len(new)]])
    index = pool.index(torch.arange(len(k_pos)))

    def attend(layer, q, k, v):
        pool.store(layer, new_slots, k, v)
        return attention.sdpa(q, *pool.gather(layer, index), mask)

    return model.logits(model(tokens, positions, attend)[last])
""",
        "NaN",
    ),
    Mutant(
        "text by text: the model called once for each row",
        """
one_step = step

def step(model, pool, rows, slot_of):
    return torch.cat([one_step(model, pool, [row], slot_of) for row in rows])
""",
        "tokens pushed through the layers in each step",
    ),
    # generate
    Mutant(
        "slots by place among the running: used again while in use",
        generate(
            start="0 if i not in slot_of or not slot_of[i] else len(slot_of[i])",
            reserve="slot_of[i] = [place * longest + p for p in range(start + len(new))]",
            release="slot_of.pop(i)",
        ),
        "new tokens of text",
    ),
    Mutant(
        "a finished text keeps its slots, and told so",
        generate(release="pass"),
        "does a text that has ended give its slots back, in time?",
    ),
    Mutant(
        "the first of those that wait comes in again and again",
        generate().replace("waiting.pop(0)", "waiting[0]"),
        "is it taken out of `waiting` when it comes in?",
    ),
    Mutant(
        "the list of running texts changed while going over it",
        generate(release="free += slot_of.pop(i); running.remove(i)"),
        "Did you change the list of running texts while going over it?",
    ),
    Mutant("a finished text keeps its slots", generate(release="pass"), "pop from empty list"),
    Mutant(
        "a pool for all texts, and no slot ever freed",
        generate(size="len(texts) * longest", release="slot_of.pop(i)"),
        "slots are enough",
    ),
    Mutant(
        "slots given back at every step, while the text goes on",
        generate(reserve="slot_of[i] += [free.pop() for _ in new]; free += slot_of[i][-1:]"),
        "new tokens of text",
    ),
    Mutant(
        "the whole group ends before anyone comes in",
        generate(room="len(running) < max_running and not any(slot_of[i] for i in running)"),
        "tokens in each step",
    ),
    Mutant("one more than max_running", generate(room="len(running) <= max_running"), "pop from empty list"),
    Mutant(
        "the whole text again in every step",
        generate(start="0", reserve="slot_of[i] += [free.pop() for _ in range(len(new) - len(slot_of[i]))]"),
        "tokens in each step",
    ),
    Mutant("leaves one step late", generate(ends=">", goes_on="<="), "pop from empty list"),
    Mutant(
        "leaves one step late, with memory to spare",
        generate(ends=">", goes_on="<=", size="(max_running * longest + max_running)"),
        "new tokens of text",
    ),
    Mutant("the prompt returned too", generate(result="texts"), "new tokens of text"),
    Mutant("rows answered in the wrong order", generate(order="sorted(running, reverse=True)"), "new tokens of text"),
    Mutant(
        "in order of ending, not of the prompts",
        generate(
            release="free += slot_of.pop(i); finished.append(i)",
            result="[texts[i][len(prompts[i]):] for i in finished]",
        ),
        "new tokens of text",
    ),
    # scores
    Mutant("dense counts only T", "def scores_dense(news, lengths):\n    return sum(news) ** 2\n", "scores_dense("),
    Mutant(
        "dense as a rectangle",
        "def scores_dense(news, lengths):\n    return len(news) * max(news) * max(lengths)\n",
        "scores_dense(",
    ),
    Mutant(
        "dense counts the blocks alone",
        "def scores_dense(news, lengths):\n    return sum(t * s for t, s in zip(news, lengths))\n",
        "scores_dense(",
    ),
    Mutant(
        "needed forgets that a chunk is causal",
        "def scores_needed(news, lengths):\n    return sum(t * s for t, s in zip(news, lengths))\n",
        "scores_needed(",
    ),
    Mutant(
        "needed forgets the token itself",
        "def scores_needed(news, lengths):\n"
        "    return sum(t * (s - t) + t * (t - 1) // 2 for t, s in zip(news, lengths))\n",
        "scores_needed(",
    ),
    Mutant(
        "needed forgets what was computed before",
        "def scores_needed(news, lengths):\n    return sum(t * (t + 1) // 2 for t in news)\n",
        "scores_needed(",
    ),
]
