"""What people write for problem set 3 that is wrong."""

from wrong import Mutant

PLAN = """
def plan_batches(lengths, rows, fixed):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best = [(0, 0)]
    for j in range(1, len(order) + 1):
        longest = lengths[order[j - 1]]
        best.append(min((best[i][0] + fixed + (j - i) * longest, i) for i in range(max(0, j - rows), j)))
    batches, j = [], len(order)
    while j > 0:
        begin = best[j][1]
        batches.append(order[begin:j])
        j = begin
    return batches
"""

QUEUE = """
class FairQueue:
    def __init__(self):
        self.waiting = {}
        self.counter = defaultdict(int)
        self.pushed = 0
        self.last = None

    def push(self, user, request):
        if user not in self.waiting:
            others = [self.counter[name] for name in self.waiting]
            floor = min(others) if others else self.counter[self.last] if self.last is not None else 0
            self.counter[user] = max(self.counter[user], floor)
            self.waiting[user] = deque()
        self.pushed += 1
        self.waiting[user].append((self.pushed, request))

    def pop(self):
        if not self.waiting:
            return None
        user = min(self.waiting, key=lambda name: (self.counter[name], self.waiting[name][0][0]))
        _, request = self.waiting[user].popleft()
        if not self.waiting[user]:
            del self.waiting[user]
        self.last = user
        return user, request

    def charge(self, user, tokens):
        self.counter[user] += tokens
"""


def changed(code: str, *changes: str) -> str:
    """The code above, each first string of a pair replaced by the second."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    return code


LIFT = "self.counter[user] = max(self.counter[user], floor)"
FLOOR = "min(others) if others else self.counter[self.last] if self.last is not None else 0"

WRONG = [
    # ---- plan_batches
    Mutant(
        "sorted, and filled from the shortest",
        """
def plan_batches(lengths, rows, fixed):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i : i + rows] for i in range(0, len(order), rows)]
""",
        "none are needed",
    ),
    Mutant(
        "as few passes as can be, filled from the longest",
        """
def plan_batches(lengths, rows, fixed):
    if fixed == 0:
        return [[i] for i in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[i : i + rows] for i in range(0, len(order), rows)]
""",
        "cheaper is",
    ),
    Mutant(
        "every text alone",
        """
def plan_batches(lengths, rows, fixed):
    return [[i] for i in range(len(lengths))]
""",
        "are enough",
    ),
    Mutant(
        "greedy: the next text joins while that costs less than a pass of its own",
        """
def plan_batches(lengths, rows, fixed):
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and len(batches[-1]) < rows:
            more = len(batches[-1]) * (lengths[i] - lengths[batches[-1][-1]])
            if more <= fixed:
                batches[-1].append(i)
                continue
        batches.append([i])
    return batches
""",
        "cheaper is",
    ),
    Mutant(
        "in the order of the list",
        changed(
            PLAN,
            "sorted(range(len(lengths)), key=lambda i: lengths[i])",
            "list(range(len(lengths)))",
            "longest = lengths[order[j - 1]]",
            "longest = lengths[order[j - 1]]",
            "(j - i) * longest",
            "(j - i) * max(lengths[i:j])",
        ),
        "cheaper is",
    ),
    Mutant(
        "numbers of the sorted list",
        changed(
            PLAN,
            "sorted(range(len(lengths)), key=lambda i: lengths[i])",
            "list(range(len(lengths)))\n    lengths = sorted(lengths)",
        ),
        "cheaper is",
    ),
    Mutant(
        "the list is sorted in place",
        changed(
            PLAN,
            "    best = [(0, 0)]",
            "    lengths.sort()\n    order = list(range(len(lengths)))\n    best = [(0, 0)]",
        ),
        "changed its argument",
    ),
    Mutant(
        "lengths returned, not numbers",
        changed(PLAN, "batches.append(order[begin:j])", "batches.append([lengths[i] for i in order[begin:j]])"),
        "texts have the numbers",
    ),
    Mutant(
        "one text too many in a batch", changed(PLAN, "max(0, j - rows)", "max(0, j - rows - 1)"), "rows are the most"
    ),
    Mutant(
        "one text too few in a batch", changed(PLAN, "max(0, j - rows)", "max(0, j - max(1, rows - 1))"), "are enough"
    ),
    Mutant(
        "only the first walk back", changed(PLAN, "        j = begin", "        j = 0"), "every text is in exactly one"
    ),
    Mutant(
        "the batch costs what its shortest has",
        changed(PLAN, "(j - i) * longest, i)", "(j - i) * lengths[order[i]], i)"),
        "costs",
    ),
    Mutant("the pass is not counted", changed(PLAN, "best[i][0] + fixed +", "best[i][0] +"), "are enough"),
    Mutant("pads are not counted: only passes", changed(PLAN, " + (j - i) * longest", ""), "none are needed"),
    Mutant(
        "all cuts tried again and again",
        """
def plan_batches(lengths, rows, fixed):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])

    def best(j):
        if j == 0:
            return 0, []
        found = []
        for i in range(max(0, j - rows), j):
            least, plan = best(i)
            found.append((least + fixed + (j - i) * lengths[order[j - 1]], plan + [order[i:j]]))
        return min(found)

    return best(len(order))[1]
""",
        "took longer than",
    ),
    # ---- FairQueue
    Mutant(
        "first come, first served",
        changed(QUEUE, "(self.counter[name], self.waiting[name][0][0])", "self.waiting[name][0][0]"),
        "pop() must return",
    ),
    Mutant(
        "users in turn, whatever they were charged",
        changed(
            QUEUE,
            "(self.counter[name], self.waiting[name][0][0])",
            "0",
            "        self.last = user\n",
            "        else:\n            self.waiting[user] = self.waiting.pop(user)\n        self.last = user\n",
        ),
        "pop() must return",
    ),
    Mutant(
        "equal counters by name",
        changed(QUEUE, "(self.counter[name], self.waiting[name][0][0])", "(self.counter[name], name)"),
        "pop() must return",
    ),
    Mutant("the newest request of a user first", changed(QUEUE, ".popleft()", ".pop()"), "pop() must return"),
    Mutant(
        "IndexError when nobody waits",
        changed(QUEUE, "        if not self.waiting:\n            return None\n", ""),
        "raised ValueError",
    ),
    Mutant(
        "nobody waits: lifted to the largest counter of all",
        changed(QUEUE, FLOOR, "min(others) if others else max(self.counter.values(), default=0)"),
        "pop() must return",
    ),
    Mutant(
        "the last one served counts among those who wait",
        changed(
            QUEUE,
            FLOOR,
            "min(others + [self.counter[self.last]]) if self.last is not None else min(others, default=0)",
        ),
        "pop() must return",
    ),
    Mutant(
        "the number of a push is looked up by its request",
        changed(
            QUEUE,
            "self.waiting[user].append((self.pushed, request))",
            "self.numbers = {**getattr(self, 'numbers', {}), request: self.pushed}\n"
            "        self.waiting[user].append((self.numbers[request], request))",
        ),
        "raised TypeError",
    ),
    Mutant(
        "a request that is false is no request",
        changed(
            QUEUE,
            "        self.last = user\n",
            "        self.last = user\n        if not request:\n            return None\n",
        ),
        "pop() must return",
    ),
    Mutant("no lift", changed(QUEUE, LIFT, "pass"), "came late: it begins with the least counter"),
    Mutant("the counter is set, not lifted", changed(QUEUE, LIFT, "self.counter[user] = floor"), "and the debt stays"),
    Mutant(
        "lifted at every push",
        changed(
            QUEUE,
            "        if user not in self.waiting:\n            others = ",
            "        if True:\n            others = ",
            "            self.waiting[user] = deque()",
            "            self.waiting.setdefault(user, deque())",
            "for name in self.waiting]",
            "for name in self.waiting if name != user]",
        ),
        "pop() must return",
    ),
    Mutant(
        "lifted to the largest of those who wait",
        changed(QUEUE, "floor = min(others)", "floor = max(others)"),
        "came late",
    ),
    Mutant(
        "lifted to the least of all who ever came",
        changed(QUEUE, "for name in self.waiting]", "for name in self.counter if name != user]"),
        "pop() must return",
    ),
    Mutant("no lift if nobody waits", changed(QUEUE, FLOOR, "min(others, default=0)"), "nobody waited when"),
    Mutant(
        "the counter of the last one as it was at its pop",
        changed(
            QUEUE,
            "self.counter[self.last] if self.last is not None else 0",
            "self.last or 0",
            "self.last = user",
            "self.last = self.counter[user]",
        ),
        "nobody waited when",
    ),
    Mutant(
        "the counter goes with the last request",
        changed(
            QUEUE,
            "            del self.waiting[user]",
            "            del self.waiting[user]\n            del self.counter[user]",
        ),
        "pop() must return",
    ),
    Mutant(
        "charge only while a request waits",
        changed(
            QUEUE,
            "        self.counter[user] += tokens",
            "        if user in self.waiting:\n            self.counter[user] += tokens",
        ),
        "and the debt stays",
    ),
    Mutant(
        "pop charges one request",
        changed(QUEUE, "        self.counter[user] += tokens", "        self.counter[user] += 1"),
        "pop() must return",
    ),
    Mutant(
        "books in the class: two queues share them",
        changed(QUEUE, "class FairQueue:\n", "class FairQueue:\n    waiting = {}\n", "        self.waiting = {}\n", ""),
        "two queues share something",
    ),
    Mutant(
        "the request alone is returned", changed(QUEUE, "return user, request", "return request"), "pop() must return"
    ),
]
