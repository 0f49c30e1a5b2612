"""What people write for lesson 08 that is wrong."""

from wrong import Mutant

# ---- the queues

STATIC = """
def static(arrivals, durations, slots):
    starts = []
    clock = 0.0
    for first in range(0, {stop}, slots):
        group = durations[first : first + slots]
        start = {start}
        clock = start + {longest}
        starts += [start] * len(group)
    return starts
"""
CONTINUOUS = """
def continuous(arrivals, durations, slots):
    free = [0.0] * slots
    starts = []
    for i, (arrival, duration) in enumerate(zip(arrivals, durations)):
        slot = {slot}
        start = {start}
        free[slot] = {freed}
        starts.append(start)
    return starts
"""
FULL = "max(clock, arrivals[first + len(group) - 1])"


def groups(stop: str = "len(arrivals)", start: str = FULL, longest: str = "max(group)") -> str:
    return STATIC.format(stop=stop, start=start, longest=longest)


def refill(
    slot: str = "free.index(min(free))", start: str = "max(arrival, free[slot])", freed: str = "start + duration"
) -> str:
    return CONTINUOUS.format(slot=slot, start=start, freed=freed)


# ---- the scheduler: the right one in parts, each of which a learner gets wrong

SCHEDULE = """
def schedule(running, waiting, budget, max_running):
    plan = []
    left = budget
    for request in {order}:
        n = {share}
        if {some}:
            plan.append((request, n))
            left -= {spent}
    while waiting and {room}:
        request = {first}
        n = {join}
        {gain}
        plan.append((request, n))
        left -= n
    return plan
"""
RIGHT = {
    "order": "sorted(running, key=lambda r: r.pending > 1)",
    "share": "min(request.pending, left)",
    "some": "n",
    "spent": "n",
    "room": "left and len(running) < max_running",
    "first": "waiting.popleft()",
    "join": "min(request.pending, left)",
    "gain": "running.append(request)",
}


def planned(**changes: str) -> str:
    return SCHEDULE.format(**(RIGHT | changes))


UPDATE = """
def update(plan, sampled, running):
    events = []
    for request, n in plan:
        {count}
        {accept}
    {leave}
    return {result}
"""
UPDATED = {
    "count": "request.computed += n",
    "accept": "events += [request.accept(sampled[request])] if request in sampled else []",
    "leave": "running[:] = [r for r in running if r.finish_reason is None]",
    "result": "events",
}


def updated(**changes: str) -> str:
    return UPDATE.format(**(UPDATED | changes))


# ---- the loop

RUN = """
def run(model, requests, budget, max_running):
    requests = list(requests)
    arrivals = Arrivals(requests)
    size = max(request.most_slots for request in requests)
    slots = RegionSlots(max_running, size)
    pool = KVPool(model, max_running * size, max_running, size)
    running, waiting = [], deque()
    {setup}
    while {going}:
        {arrive}
        plan = schedule(running, waiting, budget, max_running)
        for i, (request, n) in enumerate(plan):
            {reserve}
        batch = pack(plan, pool)
        hidden = model(batch.tokens, batch.positions, GatherAttend(pool, batch))
        {sampled}
        events = update(plan, {result}, running)
        for request, _ in plan:
            {release}
        {tell}
"""
LOOP = {
    "setup": "pass",
    "going": "running or waiting or arrivals",
    "arrive": "waiting.extend(arrivals.take(len(requests), wait=not (running or waiting)))",
    "reserve": "slots.reserve(request, n)",
    "sampled": "tokens = [token for token, _ in sample(model.logits(hidden[batch.last]), batch.samples)]",
    "result": "dict(zip(batch.samples, tokens))",
    "release": "slots.release(request) if request.finish_reason else None",
    "tell": "yield from events",
}


def looped(**changes: str) -> str:
    return RUN.format(**(LOOP | changes))


INHERIT = """fresh = request.row is None
            slots.reserve(request, n)
            if fresh:  # its row of memory "is warm already"
                request.computed = min(filled[request.row], request.pending - 1)
                plan[i] = (request, min(n, request.pending))
                slots.reserve(request, plan[i][1])
            filled[request.row] = len(request.slots)"""

BY_INDEX = """request.row = i
            request.slots = range(i * size, i * size + request.computed + n)"""

EVERY_CHUNK = """ends = torch.tensor([n for _, n in plan]).cumsum(0) - 1
        tokens = [token for token, _ in sample(model.logits(hidden[ends]), [r for r, _ in plan])]"""

WRONG = [
    # ---- static
    Mutant(
        "static does not wait for the longest, only for the last of the group",
        groups(longest="group[-1]"),
        "requests hold a slot, of",
    ),
    Mutant("static waits for the shortest", groups(longest="min(group)"), "request 2 must start at 5, and starts at 1"),
    Mutant(
        "a group does not wait until it is full",
        groups(start="max(clock, arrivals[first])"),
        "before it arrives at",
    ),
    Mutant(
        "static: each starts when it arrives",
        "def static(arrivals, durations, slots):\n"
        "    starts, clock = [], 0.0\n"
        "    for first in range(0, len(arrivals), slots):\n"
        "        group = range(first, min(first + slots, len(arrivals)))\n"
        "        starts += [max(clock, arrivals[i]) for i in group]\n"
        "        clock = max(starts[i] + durations[i] for i in group)\n"
        "    return starts\n",
        "are one group and must start together",
    ),
    Mutant(
        "the last group, not full, runs over the end of the list",
        groups(start="max(clock, arrivals[first + slots - 1])"),
        "static raised IndexError",
    ),
    Mutant(
        "the last group, not full, is dropped",
        groups(stop="len(arrivals) - slots + 1"),
        "expected 3 starts, got 2",
    ),
    # ---- continuous
    Mutant("continuous refills late: slots in turn", refill(slot="i % slots"), "waits although a slot is free"),
    Mutant(
        "continuous refills late: when all slots are free",
        refill(start="max(arrival, max(free))"),
        "waits although a slot is free",
    ),
    Mutant("continuous starts before the arrival", refill(start="free[slot]"), "before it arrives at"),
    Mutant("continuous: a slot is free after a duration, not at an end", refill(freed="duration"), "of 2 slots"),
    Mutant(
        "order swapped: the shortest first",
        "def continuous(arrivals, durations, slots):\n"
        "    free, starts = [0.0] * slots, [0.0] * len(arrivals)\n"
        "    for i in sorted(range(len(arrivals)), key=lambda i: durations[i]):\n"
        "        slot = free.index(min(free))\n"
        "        starts[i] = max(arrivals[i], free[slot])\n"
        "        free[slot] = starts[i] + durations[i]\n"
        "    return starts\n",
        "first come, first served, but request",
    ),
    # ---- schedule
    Mutant("prefill starves decode: in order of arrival alone", planned(order="list(running)"), "gets none"),
    Mutant(
        "prefill starves decode: the longest first",
        planned(order="sorted(running, key=lambda r: -r.pending)"),
        "gets none",
    ),
    Mutant(
        "decode starves prefill",
        planned(order="[r for r in running if r.pending == 1] or list(running)"),
        "the running prompts must get",
    ),
    Mutant(
        "newcomers before those who run",
        "def schedule(running, waiting, budget, max_running):\n"
        "    plan, left, before = [], budget, list(running)\n"
        "    while waiting and left and len(running) < max_running:\n"
        "        running.append(waiting.popleft())\n"
        "        plan.append((running[-1], min(running[-1].pending, left)))\n"
        "        left -= plan[-1][1]\n"
        "    for request in sorted(before, key=lambda r: r.pending > 1):\n"
        "        if n := min(request.pending, left):\n"
        "            plan.append((request, n))\n"
        "            left -= n\n"
        "    return plan\n",
        "gets none",
    ),
    Mutant("budget exceeded: newcomers come whole", planned(join="request.pending"), "tokens, and the budget is"),
    Mutant("budget exceeded: nothing is taken off", planned(spent="0"), "tokens, and the budget is"),
    Mutant("entries of no tokens: those who run", planned(some="True"), "an entry of 0 tokens"),
    Mutant("entries of no tokens: newcomers", planned(room="len(running) < max_running"), "an entry of 0 tokens"),
    Mutant("more run than may", planned(room="left"), "requests run then, and at most"),
    Mutant("order swapped: the last in the queue joins", planned(first="waiting.pop()"), "first come, first served"),
    Mutant(
        "order swapped: the shortest prompt joins",
        planned(first="min(waiting, key=lambda r: r.pending); waiting.remove(request)"),
        "first come, first served",
    ),
    Mutant(
        "running is sorted for good",
        "def schedule(running, waiting, budget, max_running):\n"
        "    running.sort(key=lambda r: r.pending > 1)\n" + planned(order="running").split("\n", 2)[2],
        "its order must be kept",
    ),
    Mutant("who joins stays in the queue", planned(first="waiting[0]"), "a request is in it twice"),
    Mutant("who joins is not among those who run", planned(gain="pass"), "running must gain"),
    Mutant(
        "a newcomer joins only with its whole prompt",
        planned(room="left >= waiting[0].pending and len(running) < max_running"),
        "the plan is empty, though there is work",
    ),
    Mutant(
        "computed already when planned", planned(gain="running.append(request); request.computed += n"), "only plans"
    ),
    Mutant("schedule returns nothing", planned().replace("return plan", "pass"), "schedule returned None"),
    # ---- update
    Mutant(
        "computed counted twice: the sampled token too",
        updated(count="request.computed += n + (request in sampled)"),
        "`computed` of",
    ),
    Mutant(
        "computed is set to the length of the text",
        updated(count="request.computed = len(request.tokens)"),
        "`computed` of",
    ),
    Mutant("computed stays", updated(count="pass"), "`computed` of"),
    Mutant(
        "a half computed prompt takes a token",
        updated(accept="events.append(request.accept(sampled.get(request, 0)))"),
        "the new tokens of",
    ),
    Mutant(
        "every request is asked for its token",
        updated(accept="events.append(request.accept(sampled[request]))"),
        "KeyError",
    ),
    Mutant(
        "the token is appended past accept",
        updated(accept="request.tokens += [sampled[request]] if request in sampled else []"),
        "only `request.accept(token)` knows",
    ),
    Mutant("finished request keeps its slot", updated(leave="pass"), "has ended and is still in running"),
    Mutant(
        "finished request leaves a step late",
        updated(leave="pass").replace(
            "    events = []\n", "    events = []\n    running[:] = [r for r in running if r.finish_reason is None]\n"
        ),
        "has ended and is still in running",
    ),
    Mutant(
        "running is made anew, and nobody knows",
        updated(leave="running = [r for r in running if r.finish_reason is None]"),
        "has ended and is still in running",
    ),
    Mutant(
        "removed while going through the list",
        updated(leave="[running.remove(r) for r in running if r.finish_reason is not None]"),
        "has ended and is still in running",
    ),
    Mutant(
        "who had no part in the step leaves too",
        updated(leave="running[:] = [r for r, _ in plan if r.finish_reason is None]"),
        "must stay in running, but is gone",
    ),
    Mutant(
        "EOS emitted twice",
        updated(result="events + [event for event in events if event.finish_reason]"),
        "one for each sampled token",
    ),
    Mutant("update returns the tokens", updated(result="list(sampled.values())"), "what `request.accept` returned"),
    Mutant(
        "a wrong update: not the loop's fault",
        updated(leave="pass", count="request.computed += 1"),
        "mend update first: with a right one in the place of yours, this holds",
    ),
    Mutant(
        "a wrong schedule: not the loop's fault",
        planned(order="list(running)", room="left"),
        "mend schedule first: with a right one in the place of yours, this holds",
    ),
    Mutant(
        "schedule, update and run all wrong: all are told",
        planned(room="left") + updated(count="pass") + looped(tell="yield from events; yield from events"),
        "in the events; once is right\n(this stays so with right schedule and update in the place of yours)",
    ),
    # ---- run
    Mutant("who has ended keeps its row", looped(release="pass"), "no row of memory is left"),
    Mutant(
        "new request inherits the old one's K and V",
        looped(setup="filled = [0] * max_running", reserve=INHERIT),
        "as the naive stage has it",
    ),
    Mutant("rows gathered from the wrong request", looped(reserve=BY_INDEX), "as the naive stage has it"),
    Mutant("nothing is reserved", looped(reserve="pass"), "pack refused the plan"),
    Mutant(
        "samples before the prompt is complete",
        looped(setup="import torch", sampled=EVERY_CHUNK, result="dict(zip([r for r, _ in plan], tokens))"),
        "as the naive stage has it",
    ),
    Mutant(
        "sampled from the last rows of the step, whosever they are",
        looped(
            sampled="rows = hidden[len(hidden) - len(batch.samples) :]\n"
            "        tokens = [token for token, _ in sample(model.logits(rows), batch.samples)]"
        ),
        "as the naive stage has it",
    ),
    Mutant("ends when nobody waits", looped(going="waiting or arrivals"), "never ended"),
    Mutant(
        "arrivals are taken when nobody runs",
        looped(arrive="waiting.extend([] if running or waiting else arrivals.take(len(requests)))"),
        "must have",
    ),
    Mutant(
        "one arrival in each step",
        looped(arrive="waiting.extend(arrivals.take(1, wait=not (running or waiting)))"),
        "must have",
    ),
    Mutant(
        "EOS emitted twice: the end is told again",
        looped(tell="yield from events; yield from [event for event in events if event.finish_reason]"),
        "ends 2 times in the events",
    ),
    Mutant(
        "tells only the ends",
        looped(tell="yield from [event for event in events if event.finish_reason]"),
        "its events",
    ),
    Mutant("yields token ids", looped(tell="yield from tokens"), "it must yield the events"),
]
