"""What people write for lesson 09 that is wrong."""

from wrong import Mutant

# ---- blocks and slots


def needed(formula: str) -> str:
    return f"def blocks_needed(kv_len, size):\n    return {formula}\n"


def lie(slot: str, positions: str = "range(start, stop)") -> str:
    return f"def slots_of(table, start, stop, size):\n    return [{slot} for p in {positions}]\n"


RIGHT_SLOT = "table[p // size] * size + p % size"

RESERVE = """
def reserve(table, kv_len, free, size):
    new = {new}
    {refuse}
    for _ in range(new):
        {take}
    {answer}
"""
RESERVED = {
    "new": "blocks_needed(kv_len, size) - len(table)",
    "refuse": "if new > len(free): return False",
    "take": "table.append(free.pop())",
    "answer": "return True",
}


def taken(**changes: str) -> str:
    return RESERVE.format(**(RESERVED | changes))


def released(*lines: str) -> str:
    return "def release(table, free):\n" + "".join(f"    {line}\n" for line in lines)


# ---- who enters, who gives way


def entered(room: str) -> str:
    return f"def may_enter(request, free, size):\n    return {room}\n"


PREEMPT = """
def preempt(running, waiting, free):
    request = {who}
    {memory}
    {count}
    {wait}
    return {result}
"""
PREEMPTED = {
    "who": "running.pop()",
    "memory": "release(request.blocks, free)",
    "count": "request.computed = 0",
    "wait": "waiting.appendleft(request)",
    "result": "request",
}


def preempted(**changes: str) -> str:
    return PREEMPT.format(**(PREEMPTED | changes))


# ---- the scheduler: the right one in parts, each of which a learner gets wrong

SCHEDULE = """
def schedule(running, waiting, budget, max_running, free, size):
    plan = {{}}
    left = budget
    for request in {order}:
        {prepare}
        while {going}:
            if reserve(request.blocks, {places}, free, size):
                plan[request] = n
                left -= n
                break
            {room}
    while waiting and left and len(running) < max_running and {enter}:
        request = {first}
        n = min(request.pending, left)
        {hold}
        running.append(request)
        plan[request] = n
        left -= n
    return {result}
"""
SCHEDULED = {
    "order": "sorted(running, key=lambda r: r.pending > 1)",
    "prepare": "pass",
    "going": "request in running and (n := min(request.pending, left))",
    "places": "request.computed + n",
    "room": "left += plan.pop(preempt(running, waiting, free), 0)",
    "enter": "may_enter(waiting[0], free, size)",
    "first": "waiting.popleft()",
    "hold": "reserve(request.blocks, n, free, size)",
    "result": "list(plan.items())",
}


def scheduled(**changes: str) -> str:
    return SCHEDULE.format(**(SCHEDULED | changes))


PASS_BY = """
def schedule(running, waiting, budget, max_running, free, size):
    plan = {}
    left = budget
    for request in sorted(running, key=lambda r: r.pending > 1):
        while request in running and (n := min(request.pending, left)):
            if reserve(request.blocks, request.computed + n, free, size):
                plan[request] = n
                left -= n
                break
            left += plan.pop(preempt(running, waiting, free), 0)
    for request in list(waiting):
        if left and len(running) < max_running and may_enter(request, free, size):
            waiting.remove(request)
            n = min(request.pending, left)
            reserve(request.blocks, n, free, size)
            running.append(request)
            plan[request] = n
            left -= n
    return list(plan.items())
"""

WRONG = [
    # ---- blocks_needed
    Mutant("off by one at the border: one block more", needed("kv_len // size + 1"), "expected 2, got 3"),
    Mutant("off by one: rounded down", needed("kv_len // size"), "expected 2, got 1"),
    Mutant("off by one: the next token counted in", needed("-(-(kv_len + 1) // size)"), "expected 2, got 3"),
    Mutant("off by one: at least one block", needed("max(1, -(-kv_len // size))"), "blocks_needed(0, 4)"),
    Mutant(
        "off by one: at least one block, of one slot",
        needed("max(int(size == 1), -(-kv_len // size))"),
        "blocks_needed(0, 1) is 1; 0 positions need 0 blocks",
    ),
    Mutant("rounded to the nearest", needed("round(kv_len / size)"), "too few for"),
    Mutant("a division that leaves a fraction", needed("kv_len / size"), "expected 2, got 1.75"),
    Mutant("blocks of 4, whatever they are asked for", needed("-(-kv_len // 4)"), "too few for"),
    # ---- slots_of
    Mutant("// and % swapped", lie("table[p % size] * size + p // size"), "slots_of raised IndexError"),
    Mutant("// and % swapped, made to fit", lie("table[p % len(table)] * size + p // size"), "lies in block"),
    Mutant("the place in the block is forgotten", lie("table[p // size] * size"), "at place 1"),
    Mutant("the block table is forgotten: one region", lie("table[0] * size + p"), "lies in block 1"),
    Mutant("the table holds slots, not blocks", lie("table[p // size] + p % size"), "slot 20 was expected"),
    Mutant("counted from the piece's own start", lie(RIGHT_SLOT, "range(stop - start)"), "position 7 lies in block 1"),
    Mutant("stop is taken too", lie(RIGHT_SLOT, "range(start, min(stop + 1, len(table) * size))"), "got 8"),
    Mutant(
        "whole blocks in place of the piece",
        "def slots_of(table, start, stop, size):\n"
        "    return [b * size + i for b in table for i in range(size)][start:]\n",
        "one for each position",
    ),
    # ---- reserve
    Mutant(
        "off by one: a block for the token after", taken(new="blocks_needed(kv_len + 1, size) - len(table)"), "must"
    ),
    Mutant(
        "what it holds is not taken off",
        taken(new="blocks_needed(kv_len, size)"),
        "the text must hold 2 blocks then, for 7 positions",
    ),
    Mutant(
        "a block taken before every step",
        taken(new="1"),
        "the text must hold",
    ),
    Mutant("a new block when the last is full", taken(new="int(kv_len % size == 0)"), "the text must hold"),
    Mutant(
        "state changed on refusal: takes until none is left",
        taken(refuse="pass", take="if not free: return False\n        table.append(free.pop())"),
        "nothing may change",
    ),
    Mutant("refused at the last block", taken(refuse="if new >= len(free): return False"), "refused, though"),
    Mutant("nobody asks whether there are enough", taken(refuse="pass"), "reserve raised IndexError"),
    Mutant("a block in the table and free too", taken(take="table.append(free[-1])"), "the next text would get it"),
    Mutant(
        "blocks in the table and free too",
        "def reserve(table, kv_len, free, size):\n"
        "    new = max(0, blocks_needed(kv_len, size) - len(table))\n"
        "    if new > len(free):\n"
        "        return False\n"
        "    table += free[:new]\n"
        "    free = free[new:]\n"
        "    return True\n",
        "in `free` too",
    ),
    Mutant("the new block goes in front", taken(take="table.insert(0, free.pop())"), "must stay as it is"),
    Mutant("the answer is forgotten", taken(answer="pass"), "returned None"),
    # ---- release
    Mutant("block freed twice: the table stays", released("free.extend(table)"), "the table must be empty then"),
    Mutant(
        "block freed twice: only the name is given a new list",
        released("free.extend(table)", "table = []"),
        "the table must be empty then",
    ),
    Mutant("emptied before it is given back", released("table.clear()", "free.extend(table)"), "`free` must hold"),
    Mutant("only the last block comes back", released("free.append(table.pop())"), "`free` must hold"),
    Mutant("the table is freed as one block", released("free.append(list(table))", "table.clear()"), "release"),
    Mutant(
        "every second block, by removing while going through",
        released("for block in table:", "    free.append(block)", "    table.remove(block)"),
        "`free` must hold",
    ),
    # ---- may_enter
    Mutant("admission by the first block only", entered("len(free) > 0"), "need 3, so no was expected, got yes"),
    Mutant("admission of everybody", entered("True"), "so no was expected, got yes"),
    Mutant(
        "only the prompt, though it comes back with its output",
        entered("blocks_needed(len(request.prompt), size) <= len(free)"),
        "of output, 3 blocks of 4 free: may it enter? All of its tokens need 4",
    ),
    Mutant(
        "full is refused", entered("blocks_needed(len(request.tokens), size) < len(free)"), "yes was expected, got no"
    ),
    Mutant("tokens against blocks", entered("len(request.tokens) <= len(free)"), "yes was expected, got no"),
    Mutant(
        "tokens against slots that are free, a block too few",
        entered("len(request.tokens) < len(free) * size"),
        "yes was expected, got no",
    ),
    Mutant(
        "the token after is counted in",
        entered("blocks_needed(len(request.tokens) + 1, size) <= len(free)"),
        "yes was expected, got no",
    ),
    Mutant(
        "may_enter takes the blocks at once",
        entered("reserve(request.blocks, len(request.tokens), free, size)"),
        "it only answers",
    ),
    # ---- preempt
    Mutant("the oldest is sent away", preempted(who="running.pop(0)"), "that is the oldest, and it would never end"),
    Mutant(
        "the longest is sent away",
        preempted(who="max(running, key=lambda r: len(r.blocks)); running.remove(request)"),
        "must give way",
    ),
    Mutant("order swapped: it waits behind everybody", preempted(wait="waiting.append(request)"), "the oldest first"),
    Mutant("it does not wait: it is lost", preempted(wait="pass"), "the waiting must be"),
    Mutant("computed stays", preempted(count="pass"), "its K and V are gone, it must be 0"),
    Mutant(
        "computed is set to the prompt",
        preempted(count="request.computed = len(request.prompt)"),
        "its K and V are gone, it must be 0",
    ),
    Mutant(
        "tokens lost: it begins again with its prompt",
        preempted(count="request.computed, request.tokens = 0, list(request.prompt)"),
        "they must stay",
    ),
    Mutant(
        "tokens lost: the last one",
        preempted(count="request.computed = 0; request.tokens.pop()"),
        "they must stay",
    ),
    Mutant("its blocks stay with it", preempted(memory="pass"), "still holds the blocks"),
    Mutant("its blocks are forgotten", preempted(memory="request.blocks.clear()"), "then `free` is"),
    Mutant("block freed twice: its table stays", preempted(memory="free.extend(request.blocks)"), "still holds"),
    Mutant("preempt returns nothing", preempted(result="None"), "preempt returned None"),
    # ---- schedule
    Mutant(
        "who was sent away stays in the plan",
        scheduled(room="preempt(running, waiting, free)"),
        "take whoever `preempt` returns out",
    ),
    Mutant(
        "budget not given back",
        scheduled(room="plan.pop(preempt(running, waiting, free), None)"),
        "expected",
    ),
    Mutant(
        "only the one that asks gives way",
        scheduled(
            room="running.remove(request); waiting.appendleft(request); "
            "release(request.blocks, free); request.computed = 0"
        ),
        "was sent away: so nobody need ever end",
    ),
    Mutant(
        "who was sent away before its turn is planned all the same",
        scheduled(
            going="(n := min(request.pending, left))",
            room="""gone = preempt(running, waiting, free)
            left += plan.pop(gone, 0)
            if gone is request: break""",
        ),
        "B gave way to A before its own turn, so its turn is skipped",
    ),
    Mutant(
        "no room: it just waits a step",
        scheduled(room="break"),
        "expected",
    ),
    Mutant(
        "admission by the first chunk only",
        scheduled(enter="blocks_needed(min(waiting[0].pending, left), size) <= len(free)"),
        "ask `may_enter` before anybody joins",
    ),
    Mutant("nobody asks whether a newcomer may enter", scheduled(enter="True"), "ask `may_enter` before anybody joins"),
    Mutant("order swapped: the last in line joins", scheduled(first="waiting.pop()"), "order of arrival"),
    Mutant("order swapped: those who fit pass", PASS_BY, "order of arrival"),
    Mutant(
        "a newcomer reserves all of its prompt at once",
        scheduled(hold="reserve(request.blocks, request.pending, free, size)"),
        "its n positions and no more",
    ),
    Mutant("a newcomer reserves nothing", scheduled(hold="pass"), "a newcomer must `reserve` too"),
    Mutant(
        "a newcomer leaves the line and joins nobody",
        scheduled().replace("running.append(request)", "pass"),
        "a newcomer leaves `waiting` and joins them",
    ),
    Mutant(
        "off by one: places for what is computed only",
        scheduled(places="request.computed"),
        "neither all tokens nor less",
    ),
    Mutant(
        "n is asked for once, before anybody gives way",
        scheduled(prepare="n = min(request.pending, left)", going="request in running and n"),
        "then ask for n anew: min(pending, left) has grown",
    ),
    Mutant(
        "off by one: a place for the token after too",
        scheduled(places="request.computed + n + 1"),
        "A holds 3 blocks then, and needs 2",
    ),
    Mutant("places for all tokens at once", scheduled(places="len(request.tokens)"), "neither all tokens nor less"),
    Mutant("single tokens not first: in order of arrival alone", scheduled(order="list(running)"), "expected"),
    Mutant(
        "computed already when planned",
        scheduled(hold="reserve(request.blocks, n, free, size); request.computed += n"),
        "it grows only after",
    ),
    Mutant("schedule returns nothing", scheduled(result="None"), "schedule returned None"),
    Mutant(
        "a wrong blocks_needed: nobody else's fault",
        needed("kv_len // size + 1"),
        "mend blocks_needed first: with a right one in the place of yours, this holds",
    ),
    Mutant(
        "a wrong preempt: not the scheduler's fault",
        preempted(who="running.pop(0)"),
        "mend preempt first: with a right one in the place of yours, this holds",
    ),
    Mutant(
        "preempt and schedule wrong: both are told",
        preempted(wait="waiting.append(request)") + scheduled(room="preempt(running, waiting, free)"),
        "(this stays so with a right preempt in the place of yours)",
    ),
]
