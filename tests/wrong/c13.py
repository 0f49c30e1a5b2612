"""What people write for lesson 13 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

METRICS = """
def metrics(sent, times):
    gaps = {gaps}
    ttft = {ttft}
    tpot = {tpot}
    return {result}
"""
FEED = """
def feed(rest, piece):
    data = {data}
    *whole, rest = {split}
    events = []
    for event in whole:
        lines = [{line} for line in event.split(b"\\n") if {wanted}]
        {found}
    return {result}
"""
MEAN_WAIT = """
def mean_wait(rate, services):
    mean = fmean(services)
    load = rate * mean
    if {full}:
        return {infinite}
    return {wait}
"""
BOUNDED = """
def bounded(arrivals, durations, slots, most_waiting):
    free = [0.0] * slots
    starts, let_in = [], []
    for i, (arrival, duration) in enumerate(zip(arrivals, durations)):
        slot = {slot}
        start = {start}
        waiting = {waiting}
        if {refuse}:
            {refused}
            starts.append({mark})
            continue
        free[slot] = {freed}
        starts.append(start)
        let_in.append(start)
    return {result}
"""
GOODPUT = """
def goodput(seen, seconds, most_ttft, most_tpot):
    answered = {answered}
    good = [{kept} for ttft, tpot in answered]
    return {result}
"""
THREAD = """
def engine_thread(engine, inbox, deliver):
    while True:
        while {obeys}:
            command = inbox.get()
            if command is None:
                return
            command(engine)
            {then}
        {step}
"""
ANSWER = """
async def answer(request, queues, inbox):
    {begin}
    ended = False
    try:
        while not ended:
            event = await {take}
            {each}
    {leave}
"""
TWO = """
def two_choices(loads, draw):
    if len(loads) == 1:
        return {single}
    n = len(loads)
    one, other = {drawn}
    return {result}
"""


def metrics(
    gaps: str = "[b - a for a, b in pairwise(times)]",
    ttft: str = "times[0] - sent",
    tpot: str = "fmean(gaps) if gaps else None",
    result: str = "(ttft, tpot, gaps)",
) -> str:
    return METRICS.format(gaps=gaps, ttft=ttft, tpot=tpot, result=result)


FOUND = """if lines:
            events.append(b"\\n".join(lines).decode())"""


def feed(
    data: str = 'rest + piece.replace(b"\\r\\n", b"\\n")',
    split: str = 'data.replace(b"\\r\\n", b"\\n").split(b"\\n\\n")',
    line: str = 'line.removeprefix(b"data:").removeprefix(b" ")',
    wanted: str = 'line.startswith(b"data:")',
    found: str = FOUND,
    result: str = "(events, rest)",
) -> str:
    return FEED.format(data=data, split=split, line=line, wanted=wanted, found=found, result=result)


def mean_wait(
    full: str = "load >= 1",
    infinite: str = "math.inf",
    wait: str = "rate * fmean(s * s for s in services) / (2 * (1 - load))",
) -> str:
    return MEAN_WAIT.format(full=full, infinite=infinite, wait=wait)


def bounded(
    slot: str = "free.index(min(free))",
    start: str = "max(arrival, free[slot])",
    waiting: str = "len(let_in) - bisect.bisect_right(let_in, arrival)",
    refuse: str = "start > arrival and waiting >= most_waiting",
    refused: str = "pass",
    mark: str = "None",
    freed: str = "start + duration",
    result: str = "starts",
) -> str:
    return BOUNDED.format(
        slot=slot,
        start=start,
        waiting=waiting,
        refuse=refuse,
        refused=refused,
        mark=mark,
        freed=freed,
        result=result,
    )


def goodput(
    answered: str = "[pair for pair in seen if pair is not None]",
    kept: str = "ttft <= most_ttft and (tpot is None or tpot <= most_tpot)",
    result: str = "sum(good) / seconds",
) -> str:
    return GOODPUT.format(answered=answered, kept=kept, result=result)


STEP = """if events := engine.step():
            deliver(events)"""


def thread(obeys: str = "not engine.busy or not inbox.empty()", then: str = "pass", step: str = STEP) -> str:
    return THREAD.format(obeys=obeys, then=then, step=step)


BEGIN = """events = queues[request] = asyncio.Queue()
    inbox.put(lambda engine: engine.submit(request))"""
EACH = """ended = event.finish_reason is not None
            yield event"""
LEAVE = """finally:
        del queues[request]
        if not ended:
            inbox.put(lambda engine: engine.abort(request.id))"""


def answer(begin: str = BEGIN, take: str = "events.get()", each: str = EACH, leave: str = LEAVE) -> str:
    return ANSWER.format(begin=begin, take=take, each=each, leave=leave)


def two(
    single: str = "0",
    drawn: str = "draw.sample(range(len(loads)), 2)",
    result: str = "one if loads[one] <= loads[other] else other",
) -> str:
    return TWO.format(single=single, drawn=drawn, result=result)


def fleet(body: str) -> str:
    return f"\ndef fleet(rate, seconds, load, spare):\n    return {body}\n"


POLLS = """
def engine_thread(engine, inbox, deliver):
    while True:
        try:
            command = inbox.get_nowait()
        except Exception:
            if engine.busy:
                if events := engine.step():
                    deliver(events)
            continue
        if command is None:
            return
        command(engine)
"""
LEFT_BEHIND = """
async def answer(request, queues, inbox):
    events = queues[request] = asyncio.Queue()
    inbox.put(lambda engine: engine.submit(request))
    ended = False
    while not ended:
        event = await events.get()
        ended = event.finish_reason is not None
        yield event
    del queues[request]
"""
ONE_QUEUE = """
shared = None

async def answer(request, queues, inbox):
    global shared
    shared = shared or asyncio.Queue()
    queues[request] = shared
    inbox.put(lambda engine: engine.submit(request))
    ended = False
    try:
        while not ended:
            event = await shared.get()
            ended = event.finish_reason is not None
            yield event
    finally:
        del queues[request]
        if not ended:
            inbox.put(lambda engine: engine.abort(request.id))
"""
ALL_AT_ONCE = """
async def answer(request, queues, inbox):
    events = queues[request] = asyncio.Queue()
    inbox.put(lambda engine: engine.submit(request))
    made = []
    while not made or made[-1].finish_reason is None:
        made.append(await events.get())
    del queues[request]
    return made
"""

WRONG = [
    # ---- metrics
    Mutant(
        "tpot over everything", metrics(tpot="(times[-1] - sent) / len(times)"), "the wait for the first token is in it"
    ),
    Mutant(
        "tpot of the whole time",
        metrics(tpot="(times[-1] - sent) / (len(times) - 1) if gaps else None"),
        "the wait for the first token is in it",
    ),
    Mutant(
        "tpot by tokens, not by gaps",
        metrics(tpot="(times[-1] - times[0]) / len(times) if gaps else None"),
        "tokens have",
    ),
    Mutant("tpot is the median gap", metrics(tpot="median(gaps) if gaps else None"), "tpot: expected"),
    Mutant("one token: tpot 0", metrics(tpot="fmean(gaps) if gaps else 0.0"), "so it must be None"),
    Mutant("one token: an error", metrics(tpot="fmean(gaps)"), "metrics raised StatisticsError"),
    Mutant("one token: tpot is its ttft", metrics(tpot="fmean(gaps) if gaps else ttft"), "so it must be None"),
    Mutant(
        "the first gap is the ttft", metrics(gaps="[b - a for a, b in pairwise([sent, *times])]"), "gaps between them"
    ),
    Mutant("gaps from the sending", metrics(gaps="[t - sent for t in times[1:]]"), "gaps: first different"),
    Mutant("ttft is when, not how long", metrics(ttft="times[0]"), "ttft: expected"),
    Mutant("ttft to the last token", metrics(ttft="times[-1] - sent"), "ttft: expected"),
    Mutant("tpot and ttft swapped", metrics(result="(tpot, ttft, gaps)"), "ttft: expected"),
    Mutant("metrics without gaps", metrics(result="(ttft, tpot)"), "it must return 3 values"),
    # ---- feed
    Mutant("decodes each piece", feed(data="rest + piece.decode().encode()"), "feed raised UnicodeDecodeError"),
    Mutant(
        "decodes each piece, ignoring what is broken",
        feed(data='rest + piece.decode(errors="ignore").encode()'),
        "the pieces",
    ),
    Mutant("looks at the piece alone", feed(data="piece"), "expected the events"),
    Mutant("forgets what waits", feed(result='(events, b"")'), "expected the events"),
    Mutant("gives all of it back", feed(result="(events, data)"), "is said to wait still"),
    Mutant("a line is an event", feed(split='data.replace(b"\\r\\n", b"\\n").split(b"\\n")'), "so only 'a' is whole"),
    Mutant(
        "Windows' lines are not known", feed(data="rest + piece", split='data.split(b"\\n\\n")'), "expected the events"
    ),
    Mutant(
        "Windows' lines only within a piece",
        feed(data='rest + piece.replace(b"\\r\\n", b"\\n")', split='data.split(b"\\n\\n")'),
        "expected the events",
    ),
    Mutant("strips letters, not a prefix", feed(line='line.lstrip(b"data: ")'), "expected the events"),
    Mutant("strips all blanks", feed(line="line[5:].strip()"), "expected the events"),
    Mutant("keeps the blank", feed(line="line[5:]"), "expected the events"),
    Mutant("always takes six characters", feed(line="line[6:]"), "expected the events"),
    Mutant("comments are events", feed(wanted="True"), "expected the events"),
    Mutant("a colon anywhere", feed(wanted='b"data:" in line'), "expected the events"),
    Mutant(
        "an event without data is an empty one",
        feed(found='events.append(b"\\n".join(lines).decode())'),
        "expected the events",
    ),
    Mutant(
        "each line of data is an event",
        feed(found="events += [line.decode() for line in lines]"),
        "expected the events",
    ),
    Mutant(
        "lines glued together", feed(found='if lines: events.append(b"".join(lines).decode())'), "expected the events"
    ),
    Mutant(
        "splits at characters that are no ends of lines",
        feed(
            found='if lines: events.append("\\n".join(b"\\n".join(lines).decode().splitlines()))',
        ),
        "expected the events",
    ),
    Mutant(
        "an event is given out when the next one begins",
        feed(split='(lambda p: p[:-2] + [b"\\n\\n".join(p[-2:])])(data.replace(b"\\r\\n", b"\\n").split(b"\\n\\n"))'),
        "is whole and must be given out",
    ),
    Mutant(
        "bytes, not text",
        feed(found='if lines: events.append(b"\\n".join(lines))'),
        "the events must be a list of texts",
    ),
    Mutant("events only", feed(result="events"), "it must return 2 values"),
    Mutant(
        "stops at [DONE]",
        feed(found=FOUND.replace("if lines:", 'if lines and lines != [b"[DONE]"]:')),
        "expected the events",
    ),
    # ---- mean_wait
    Mutant("the square of the mean", mean_wait(wait="rate * mean * mean / (2 * (1 - load))"), "these are not"),
    Mutant("M/M/1, whatever the services", mean_wait(wait="load * mean / (1 - load)"), "expected"),
    Mutant(
        "the two forgotten",
        mean_wait(wait="rate * fmean(s * s for s in services) / (1 - load)"),
        "half done on average",
    ),
    Mutant(
        "the service is in it",
        mean_wait(wait="mean + rate * fmean(s * s for s in services) / (2 * (1 - load))"),
        "that is the time in the system",
    ),
    Mutant("negative beyond 1", mean_wait(full="load == 1"), "expected inf"),
    Mutant("an error at 1", mean_wait(full="load > 1"), "mean_wait raised ZeroDivisionError"),
    Mutant("no wait when it is full", mean_wait(infinite="0.0"), "expected inf"),
    Mutant("None when it is full", mean_wait(infinite="None"), "is a `return` missing?"),
    Mutant("the load is the rate", mean_wait(full="rate >= 1"), "mean_wait("),
    Mutant("the longest counts", mean_wait(wait="rate * max(services) ** 2 / (2 * (1 - load))"), "expected"),
    # ---- bounded
    Mutant(
        "those who run count as waiting",
        bounded(waiting="sum(s is not None and s + d > arrival for s, d in zip(starts, durations))"),
        "a place is free",
    ),
    Mutant(
        "all who ever waited count",
        bounded(waiting="sum(s is not None and s > a for s, a in zip(starts, arrivals))"),
        "a place is free",
    ),
    Mutant(
        "all starts are looked at each time",
        bounded(waiting="sum(s is not None and s > arrival for s in starts)"),
        "bounded took longer than",
    ),
    Mutant("those refused count", bounded(waiting="sum(s is None or s > arrival for s in starts)"), "a place is free"),
    Mutant(
        "one too many",
        bounded(refuse="start > arrival and waiting > most_waiting"),
        "it must be refused, and is let in",
    ),
    Mutant("one too few", bounded(refuse="start > arrival and waiting + 1 >= most_waiting"), "a place is free"),
    Mutant("refused though a slot is free", bounded(refuse="waiting >= most_waiting"), "though a slot is free"),
    Mutant("refused whenever all slots are taken", bounded(refuse="start > arrival"), "a place is free"),
    Mutant("nobody is refused", bounded(refuse="False"), "it must be refused, and is let in"),
    Mutant("a refused one takes the slot", bounded(refused="free[slot] = start + duration"), "must start at"),
    Mutant("a limit on time, not on places", bounded(refuse="start - arrival > most_waiting"), "request"),
    Mutant("slots in turn", bounded(slot="i % slots"), "must start at"),
    Mutant("starts before it arrives", bounded(start="free[slot]"), "starts at"),
    Mutant("refused is minus one", bounded(mark="-1.0"), "request 2 must be refused, and starts at -1"),
    Mutant(
        "refused ones are left out",
        bounded(result="[s for s in starts if s is not None]"),
        "expected a list of 5 starts",
    ),
    Mutant("a slot is free after a duration", bounded(freed="duration"), "must start at"),
    Mutant(
        "whole numbers only",
        bounded(refuse="start > arrival and waiting in range(most_waiting, 99)"),
        "bounded raised TypeError",
    ),
    # ---- goodput
    Mutant("a share, not a rate", goodput(result="sum(good) / max(1, len(seen))"), "expected"),
    Mutant("a count, not a rate", goodput(result="sum(good)"), "expected"),
    Mutant("either limit", goodput(kept="ttft <= most_ttft or (tpot is None or tpot <= most_tpot)"), "expected"),
    Mutant("ttft alone", goodput(kept="ttft <= most_ttft"), "expected"),
    Mutant("below, not at most", goodput(kept="ttft < most_ttft and (tpot is None or tpot < most_tpot)"), "expected"),
    Mutant(
        "one token is not good",
        goodput(kept="ttft <= most_ttft and tpot is not None and tpot <= most_tpot"),
        "expected",
    ),
    Mutant(
        "one token is an error", goodput(kept="ttft <= most_ttft and tpot <= most_tpot"), "goodput raised TypeError"
    ),
    Mutant(
        "a first token at once is none",
        goodput(kept="bool(ttft) and ttft <= most_ttft and (tpot or 0) <= most_tpot"),
        "expected",
    ),
    Mutant("refused ones are good", goodput(result="(sum(good) + seen.count(None)) / seconds"), "expected"),
    Mutant("refused ones are not foreseen", goodput(answered="seen"), "goodput raised TypeError"),
    # ---- engine_thread
    Mutant(
        "one command for each step",
        thread(step="if engine.busy and (events := engine.step()): deliver(events)", then="break"),
        "in the inbox",
    ),
    Mutant("looks into the inbox when idle only", thread(obeys="not engine.busy"), "in the inbox"),
    Mutant(
        "sleeps in every turn",
        thread(obeys="True", then="break", step="if engine.busy and (events := engine.step()): deliver(events)"),
        "all streams stand still",
    ),
    Mutant("sleeps after each command", thread(obeys="True"), "all streams stand still"),
    Mutant("never sleeps", POLLS, "keeps a core busy"),
    Mutant("steps with nothing to do", thread(then="break"), "with nothing to do"),
    Mutant("an event at a time", thread(step="for event in engine.step(): deliver([event])"), "all its"),
    Mutant("empty deliveries", thread(step="deliver(engine.step())"), "with no events"),
    Mutant("the last event only", thread(step="if events := engine.step(): deliver(events[-1:])"), "all its"),
    Mutant("never delivers", thread(step="engine.step()"), "never delivered"),
    Mutant("in another order", thread(step="if events := engine.step(): deliver(events[::-1])"), "all its"),
    Mutant(
        "ends when there is nothing to do",
        thread(obeys="not inbox.empty()", step="if not engine.busy: return\n        " + STEP),
        "before None came",
    ),
    Mutant(
        "None is called",
        thread().replace("            if command is None:\n                return\n", ""),
        "engine_thread raised TypeError",
    ),
    Mutant(
        "None is the end when all is done only",
        thread().replace(
            "if command is None:",
            "if command is None and engine.busy:\n                continue\n            if command is None:",
        ),
        "the thread goes on",
    ),
    Mutant(
        "commands without the engine",
        thread().replace("command(engine)", "command(None)"),
        "must be called with the engine",
    ),
    # ---- answer
    Mutant("no finally", LEFT_BEHIND, "no abort was sent"),
    Mutant(
        "GeneratorExit only",
        answer(
            leave="""except GeneratorExit:
        inbox.put(lambda engine: engine.abort(request.id))
        raise
    finally:
        del queues[request]"""
        ),
        "no abort was sent",
    ),
    Mutant(
        "an Exception only",
        answer(
            leave="""except Exception:
        inbox.put(lambda engine: engine.abort(request.id))
        raise
    finally:
        del queues[request]"""
        ),
        "no abort was sent",
    ),
    Mutant(
        "CancelledError only",
        answer(
            leave="""except asyncio.CancelledError:
        inbox.put(lambda engine: engine.abort(request.id))
        raise
    finally:
        del queues[request]"""
        ),
        "no abort was sent",
    ),
    Mutant(
        "swallows the cancelling",
        answer(
            leave="""except asyncio.CancelledError:
        pass
    finally:
        del queues[request]
        if not ended:
            inbox.put(lambda engine: engine.abort(request.id))"""
        ),
        "swallowed it",
    ),
    Mutant(
        "aborts in any case",
        answer(
            leave="""finally:
        del queues[request]
        inbox.put(lambda engine: engine.abort(request.id))"""
        ),
        "an abort was sent all the same",
    ),
    Mutant(
        "the end is noticed after the yield",
        answer(
            each="""yield event
            ended = event.finish_reason is not None"""
        ),
        "an abort was sent all the same",
    ),
    Mutant(
        "the queue stays",
        answer(
            leave="""finally:
        if not ended:
            inbox.put(lambda engine: engine.abort(request.id))"""
        ),
        "its queue stays in `queues`",
    ),
    Mutant(
        "all queues go",
        answer(leave=LEAVE.replace("del queues[request]", "queues.clear()")),
        "the queue of another one is gone",
    ),
    Mutant(
        "aborts the request, not its number",
        answer(leave=LEAVE.replace("request.id", "request")),
        "it takes the number, request.id",
    ),
    Mutant(
        "sends first, then makes the queue",
        answer(
            begin="""inbox.put(lambda engine: engine.submit(request))
    events = queues[request] = asyncio.Queue()"""
        ),
        "came before its queue was in `queues`",
    ),
    Mutant("never submits", answer(begin="events = queues[request] = asyncio.Queue()"), "nothing was submitted"),
    Mutant(
        "submits by itself",
        answer(begin=BEGIN.replace("inbox.put(lambda engine: engine.submit(request))", "inbox.submit(request)")),
        "has no attribute 'submit'",
    ),
    Mutant(
        "a call in place of a command",
        answer(begin=BEGIN.replace("inbox.put(lambda engine: engine.submit(request))", "inbox.put(request)")),
        "a command is a function",
    ),
    Mutant(
        "a queue with a length",
        answer(begin=BEGIN.replace("asyncio.Queue()", "asyncio.Queue(maxsize=16)")),
        "the engine's side never waits for a reader",
    ),
    Mutant("one queue for all", ONE_QUEUE, "a queue of an earlier call"),
    Mutant("a list at the end", ALL_AT_ONCE, "it must be an async generator"),
    Mutant(
        "the last event is not told",
        answer(
            each="""ended = event.finish_reason is not None
            if not ended:
                yield event"""
        ),
        "were yielded",
    ),
    Mutant("does not end", answer(each="yield event"), "yields nothing and does not end"),
    Mutant(
        "tokens, not events",
        answer(each=EACH.replace("yield event", "yield event.token")),
        "answer",
    ),
    Mutant(
        "a queue for threads: the event loop stands still",
        answer(
            begin="import queue\n    " + BEGIN.replace("asyncio.Queue()", "queue.Queue()"),
            take="asyncio.sleep(0, events.get())",
        ),
        "does it block the loop?",
    ),
    # ---- two_choices
    Mutant("at random", two(result="one"), "has the most, and was chosen"),
    Mutant(
        "the more loaded one", two(result="one if loads[one] > loads[other] else other"), "has the most, and was chosen"
    ),
    Mutant(
        "the least of all",
        two(result="min(range(len(loads)), key=loads.__getitem__)"),
        "so all are asked, not two",
    ),
    Mutant("with replacement", two(drawn="draw.choices(range(len(loads)), k=2)"), "has the most, and was chosen"),
    Mutant(
        "neighbours",
        two(drawn="(lambda i: (i, (i + 1) % len(loads)))(draw.randrange(len(loads)))"),
        "should be chosen about",
    ),
    Mutant(
        "the best of three",
        two(drawn="(lambda s: (min(s[:-1], key=loads.__getitem__), s[-1]))(draw.sample(range(n), min(3, n)))"),
        "should be chosen about",
    ),
    Mutant("the first and another", two(drawn="(0, draw.randrange(1, len(loads)))"), "should be chosen about"),
    Mutant("the smaller number of equals", two(drawn="sorted(draw.sample(range(len(loads)), 2))"), "with equal loads"),
    Mutant("a draw of its own", two(drawn="random.sample(range(len(loads)), 2)"), "chose differently the second time"),
    Mutant(
        "the load, not the number", two(result="min(loads[one], loads[other])"), "it must be the number of a replica"
    ),
    Mutant(
        "two of one", two().replace("    if len(loads) == 1:\n        return 0\n", ""), "two_choices raised ValueError"
    ),
    # ---- fleet
    Mutant("multiplied by the load", fleet("math.ceil(rate * seconds * load) + spare"), "expected"),
    Mutant("rounded down", fleet("int(rate * seconds / load) + spare"), "above"),
    Mutant("rounded to the nearest", fleet("round(rate * seconds / load) + spare"), "above"),
    Mutant("one more in any case", fleet("int(rate * seconds / load) + 1 + spare"), "would be enough"),
    Mutant("spare ones forgotten", fleet("math.ceil(rate * seconds / load)"), "expected"),
    Mutant("spare ones counted as working", fleet("max(math.ceil(rate * seconds / load), spare + 1)"), "expected"),
    Mutant("full load", fleet("math.ceil(rate * seconds) + spare"), "expected"),
    Mutant("not a whole number", fleet("rate * seconds / load + spare"), "there are whole replicas only"),
    Mutant("rate over seconds", fleet("math.ceil(rate / seconds / load) + spare"), "expected"),
    Mutant("spare ones in the load", fleet("math.ceil((rate * seconds + spare) / load)"), "expected"),
    # ---- together
    Mutant(
        "a wrong thread is not answer's fault",
        thread(step="engine.step()"),
        "mend engine_thread first",
    ),
]
