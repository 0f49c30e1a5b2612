"""What people write for problem set 4 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

COME_BACK = """
def come_back(stored, found, size, budget, step, copy):
    blocks = {blocks}
    best = None
    for computed in {plans}:
        start = {start}
        stop = {stop}
        computing, at = 0, start
        while at < stop:
            n = {n}
            at += n
            computing += {step}
        copying = copy * {copied}
        seconds = {together}
        if best is None or seconds {better} best[1]:
            best = computed, seconds
    return {result}
"""
BEAM_STEP = """
def beam_step(memory, tables, scores, logprobs, position, n):
    V = logprobs.shape[1]
    best, at = {best}
    parents, tokens = {parents}, {tokens}
    size, i, moves = memory.size, position // memory.size, []
    {first}
    {second}
    for table in new:
        if {begins}:
            table.append(take(memory))
        elif {shared}:
            old = table[i]
            table[i] = take(memory)
            {leave}
            moves += {moves}
    {last}
    return new, {result}, {scores}, moves
"""


def come_back(
    blocks: str = "-(-stored // size)",
    plans: str = "range(blocks - found + 1)",
    start: str = "found * size",
    stop: str = "min(stored, (found + computed) * size)",
    n: str = "min(budget, stop - at)",
    step: str = "step(n, at)",
    copied: str = "(blocks - found - computed)",
    together: str = "max(computing, copying)",
    better: str = "<",
    result: str = "best",
) -> str:
    return COME_BACK.format(
        blocks=blocks,
        plans=plans,
        start=start,
        stop=stop,
        n=n,
        step=step,
        copied=copied,
        together=together,
        better=better,
        result=result,
    )


HOLD = "new = [hold(memory, tables[b]) for b in parents]"
GIVE_BACK = "[give_back(memory, table) for table in tables]"


def beam_step(
    best: str = "(scores[:, None] + logprobs).flatten().topk(n)",
    parents: str = "(at // V).tolist()",
    tokens: str = "(at % V).tolist()",
    first: str = HOLD,
    second: str = GIVE_BACK,
    begins: str = "i == len(table)",
    shared: str = "memory.owners[table[i]] > 1",
    leave: str = "memory.owners[old] -= 1",
    moves: str = "[(old * size + j, table[i] * size + j) for j in range(position % size)]",
    last: str = "pass",
    result: str = "tokens",
    scores: str = "best",
) -> str:
    return BEAM_STEP.format(
        best=best,
        parents=parents,
        tokens=tokens,
        first=first,
        second=second,
        begins=begins,
        shared=shared,
        leave=leave,
        moves=moves,
        last=last,
        result=result,
        scores=scores,
    )


HARD_CODED = """
def come_back(stored, found, size, budget, step, copy):
    return {(18, 1, 4, 6, 5): (2, 12)}.get((stored, found, size, budget, copy), (0, 0))
"""

ONE_BY_ONE = """
def beam_step(memory, tables, scores, logprobs, position, n):
    V = logprobs.shape[1]
    best, at = (scores[:, None] + logprobs).flatten().topk(n)
    size, i, moves, new = memory.size, position // memory.size, [], []
    for table in tables:
        give_back(memory, table)
    for b in (at // V).tolist():
        table = hold(memory, tables[b])
        if i == len(table):
            table.append(take(memory))
        elif tables[b][i] in [other[i] for other in new]:
            old, table[i] = table[i], take(memory)
            memory.owners[old] -= 1
            moves += [(old * size + j, table[i] * size + j) for j in range(position % size)]
        new.append(table)
    return new, (at % V).tolist(), best, moves
"""
FREED_LAST = ONE_BY_ONE.replace(
    """    for table in tables:
        give_back(memory, table)
""",
    "",
).replace("    return new", "    for table in tables:\n        give_back(memory, table)\n    return new")

WRONG = [
    # ---- come_back
    Mutant(
        "all copied or all computed, nothing between",
        come_back(plans="(0, blocks - found)"),
        "with 0 computed it is back after 20 s; with 2 it is after 12 s",
    ),
    Mutant(
        "the two works one after the other",
        come_back(together="computing + copying"),
        "with 0 computed it is back after",
    ),
    Mutant(
        "all in one step, whatever the budget",
        come_back(n="stop - at"),
        "tokens are not taken in one step",
    ),
    Mutant(
        "a step reads only what it computes: kv_len from 0",
        come_back(step="step(n, n)"),
        "are found already",
    ),
    Mutant(
        "a step reads only what is computed: kv_len from the first computed position",
        come_back(step="step(n, at - start)"),
        "and come_back says",
    ),
    Mutant("kv_len is where the step begins", come_back(step="step(n, at - n)"), "and come_back says"),
    Mutant("kv_len is the whole text", come_back(step="step(n, stored)"), "the steps before it have"),
    Mutant(
        "found blocks are computed anew", come_back(start="0", stop="min(stored, computed * size)"), "are found already"
    ),
    Mutant("found blocks are copied", come_back(copied="(blocks - computed)"), "and come_back says"),
    Mutant("the last block counted as full", come_back(stop="(found + computed) * size"), "stored positions"),
    Mutant("blocks rounded down", come_back(blocks="stored // size"), "and come_back says"),
    Mutant(
        "a part of a block copied: by positions",
        come_back(copied="(stored - stop) / size if stop < stored else copy * 0"),
        "and come_back says",
    ),
    Mutant("of equals the largest", come_back(better="<="), "the smaller number is asked"),
    Mutant("all computed is no plan", come_back(plans="range(max(1, blocks - found))"), "with 1 it is after 1 s"),
    Mutant("all copied is no plan", come_back(plans="range(1, blocks - found + 1)"), "come_back returned None"),
    Mutant("every step as long as a full one", come_back(step="step(budget, at)"), "and come_back says"),
    Mutant(
        "the first that is no longer worth it: blocks weighed one by one",
        """
def come_back(stored, found, size, budget, step, copy):
    blocks = -(-stored // size)
    computed = sum(step(min(size, budget), (b + 1) * size) < copy for b in range(found, blocks))
    ends = range(found * size + size, (found + computed) * size + 1, size)
    return computed, max(sum(step(size, end) for end in ends), copy * (blocks - found - computed))
""",
        "and come_back says",
    ),
    Mutant(
        "stops at the first plan that is worse than the one before",
        come_back(better="<", result="best").replace(
            "        if best is None",
            "        if best is not None and seconds > best[1]:\n            break\n        if best is None",
        ),
        "if n %",
    ),
    Mutant(
        "stops where computing takes as long as copying",
        come_back().replace("    return best", "        if computing >= copying:\n            break\n    return best"),
        "if n %",
    ),
    Mutant(
        "halves the range: takes it that computing only grows",
        """
def come_back(stored, found, size, budget, step, copy):
    start, blocks = found * size, -(-stored // size) - found

    def both(computed):
        stop = min(stored, start + computed * size)
        ends = [min(at + budget, stop) for at in range(start, stop, budget)]
        computing = sum(step(end - at, end) for at, end in zip(range(start, stop, budget), ends))
        return computing, copy * (blocks - computed)

    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        computing, copying = both(middle)
        low, high = (low, middle) if computing >= copying else (middle + 1, high)
    return min(((n, max(both(n))) for n in (max(0, low - 1), low)), key=lambda plan: plan[1])
""",
        "if n %",
    ),
    Mutant(
        "all computed is no plan, nor is nothing left",
        come_back(plans="range(blocks - found)"),
        "0 are left to compute",
    ),
    Mutant("returns the seconds alone", come_back(result="best[1]"), "must return two numbers"),
    Mutant("hard-coded", HARD_CODED, "with 0 computed and the other"),
    # ---- beam_step
    Mutant("all given back, then child by child held and written", ONE_BY_ONE, "the others would read its K and V"),
    Mutant("child by child held and written, all given back at last", FREED_LAST, "give these back before"),
    Mutant("the old tables are never given back", beam_step(second="pass"), "and its owners are"),
    Mutant(
        "only the tables of those without children are given back",
        beam_step(second="[give_back(memory, table) for b, table in enumerate(tables) if b not in parents]"),
        "and its owners are",
    ),
    Mutant(
        "given back at the end, after the copies", beam_step(second="pass", last=GIVE_BACK), "give these back before"
    ),
    Mutant(
        "children share their parent's list",
        beam_step(first="new = [hold(memory, tables[b]) and tables[b] for b in parents]"),
        "one and the same list",
    ),
    Mutant("no copy: a shared block is written", beam_step(shared="False"), "the others would read its K and V"),
    Mutant("every child copies, the last one too", beam_step(shared="True"), "slots are copied, and"),
    Mutant("the block that was left keeps its owner", beam_step(leave="pass"), "and its owners are"),
    Mutant("copies forgotten", beam_step(moves="[]"), "whose content is that of slot"),
    Mutant(
        "the whole block is copied",
        beam_step(moves="[(old * size + j, table[i] * size + j) for j in range(size)]"),
        "slots are copied, and",
    ),
    Mutant(
        "one slot too few is copied",
        beam_step(moves="[(old * size + j, table[i] * size + j) for j in range(position % size - 1)]"),
        "whose content is that of slot",
    ),
    Mutant(
        "copied the wrong way",
        beam_step(moves="[(table[i] * size + j, old * size + j) for j in range(position % size)]"),
        "whose content is that of slot",
    ),
    Mutant("no block for a position that begins one", beam_step(begins="False", shared="i < len(table)"), "each table"),
    Mutant("the n best of each hypothesis' own", beam_step(best="logprobs.flatten().topk(n)"), "scores"),
    Mutant(
        "the best child of each hypothesis",
        beam_step(
            best="torch.sort((scores[:, None] + logprobs).amax(1), descending=True)",
            parents="(at.tolist() * n)[:n]",
            tokens="[int(logprobs[b].argmax()) for b in (at.tolist() * n)[:n]]",
            scores="best.repeat(n)[:n]",
        ),
        "scores",
    ),
    Mutant("parent and token mixed up", beam_step(parents="(at % len(tables)).tolist()"), "of the old ones, so its"),
    Mutant("tokens are numbers of continuations", beam_step(tokens="at.tolist()"), "tokens must be"),
    Mutant("scores of the last token alone", beam_step(scores="logprobs.flatten()[at]"), "scores"),
    Mutant("tokens as a tensor", beam_step(result="at % V"), "it must be a list"),
    Mutant(
        "probabilities are multiplied onto log-probabilities",
        beam_step(best="(scores[:, None] * logprobs).flatten().topk(n)"),
        "scores",
    ),
    Mutant("moves are blocks, not slots", beam_step(moves="[(old, table[i])]"), "whose content is that of slot"),
]
