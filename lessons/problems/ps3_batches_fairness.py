# %% [markdown]
# # Problem set 3 · The cheapest batches, and a queue that is fair to users
#
# You find the grouping of texts into padded batches that costs least, and you write a queue in which a user with a
# thousand requests can't keep the others waiting.
#
# It needs lessons 06 (pads), 07 (why a ragged batch has none) and 08 (the queue and the scheduler). There is no model
# in it; every cell runs in seconds. The check tells which properties hold; the marker runs the same properties on other
# inputs too, of other sizes. A property that holds counts, whether or not the others do. But a function that holds on
# the shown inputs alone gets nothing for the others.
#
# | part | properties | public checks | other inputs | written | minutes |
# |---|--:|--:|--:|--:|--:|
# | 1. `plan_batches` | 6 | 6 points | 2.5 points | | 60 |
# | 2. `FairQueue` | 6 | 6 points | 2.5 points | | 60 |
# | 3. Explain | | | | 3 points | 20 |
# | together | 12 | 12 points | 5 points | 3 points | 140 |

# %% tags=["setup"]
import heapq
import random
from collections import defaultdict, deque

from minillm import lab

# %%
lab.start("p3")

# %% [markdown]
# ## Problem 1: which texts go together?
#
# You have n texts, all known beforehand (a night's work, say), and an engine that takes them as rectangles of at most
# `rows` rows (lesson 06). A pass with the texts of one batch pushes the whole rectangle through the model, pads
# included, and it reads all weights, however few tokens it has. Call what that reading costs `fixed`, counted in
# tokens. So
#
#     cost of a batch = fixed + (texts in it) · (length of the longest of them)        [tokens]
#
# and the cost of a plan is the sum over its batches. Few, full batches save passes, batches of equal lengths save pads,
# and one has to give way to the other. Lengths 2, 2, 3, 9 with at most 3 rows:
#
# | plan, by lengths | fixed = 0 | fixed = 4 | fixed = 20 |
# |---|--:|--:|--:|
# | 2 2 · 3 · 9 | **4 + 3 + 9 = 16** | 28 | 76 |
# | 2 2 3 · 9 | 9 + 9 = 18 | **26** | **58** |
# | 2 2 · 3 9 | 4 + 18 = 22 | 30 | 62 |
#
# Write the cheapest plan of all. Two thoughts lead to it. In a cheapest plan, may a batch hold a short and a long text
# while one of a length between them is in another batch? And if you knew the cheapest plan for the first j texts of the
# right order, for each j, how would you find it for one more? A hundred texts have more groupings than there are
# atoms, so trying all of them is out of the question.


# %% task="p3.plan_batches"
def plan_batches(lengths: list[int], rows: int, fixed: int) -> list[list[int]]:
    """The cheapest batches: lists of numbers of texts, 0 .. n - 1, each in exactly one. Any cheapest plan is right.

    lengths: n whole numbers of at least 1, in any order; rows: at least 1; fixed: at least 0. No texts: no batches.
    """
    ### BEGIN SOLUTION
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best = [(0, 0)]  # for the first j texts of `order`: the least cost, and where their last batch begins
    for j in range(1, len(order) + 1):
        longest = lengths[order[j - 1]]
        best.append(min((best[i][0] + fixed + (j - i) * longest, i) for i in range(max(0, j - rows), j)))
    batches, j = [], len(order)
    while j > 0:
        begin = best[j][1]
        batches.append(order[begin:j])
        j = begin
    return batches
    ### END SOLUTION


# %%
lab.check("p3", "plan_batches")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take two batches of a plan, and lay all their texts in a row, sorted. Let the first part, as many as the one with the
# shorter longest text has, be one batch, and the rest the other. No batch has changed its size, and no longest text has
# become longer. So some cheapest plan cuts the sorted row into neighbouring pieces; only the cuts are to be found.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Let best[j] be the least cost of the first j texts of the sorted row. Their last batch begins at some i, j - rows <= i
# < j; its longest text is the last one. best[j] is the least of best[i] + fixed + (j - i) · length, over these i. Keep
# the i as well: walking back from j = n over them gives the batches. Sort numbers of texts, not their lengths.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# This is dynamic programming over the cuts of a sorted row: n times `rows` tries. The common wrong answer sorts and
# fills batches of `rows` from one end. It has the fewest passes, but the batch that is not full may stand anywhere, and
# with a small `fixed` more passes are cheaper. The second one is greedy: it adds the next text while that costs less
# than a pass of its own. What is cheap for this batch may be dear for the next one.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### What sorting buys, and what it costs
#
# 200 texts of very different lengths, at most 8 rows, `fixed` = 30 tokens. In the order of arrival, sorted and filled
# up, and by your plan. (The cell needs your function.)

# %%
draw = random.Random(0)
lengths = [min(400, int(draw.lognormvariate(3.5, 1))) + 1 for _ in range(200)]
by_length = sorted(range(200), key=lambda i: lengths[i])
plans = {
    "as they came, eight by eight": [list(range(i, i + 8)) for i in range(0, 200, 8)],
    "sorted, eight by eight": [by_length[i : i + 8] for i in range(0, 200, 8)],
    "your plan, fixed = 30": plan_batches(lengths, 8, 30),
    "your plan, fixed = 1,000": plan_batches(lengths, 8, 1000),
}
print(f"{sum(lengths):,} tokens in all")
print(f"{'':<32}passes    pads   cost at fixed = 30")
for name, plan in plans.items():
    tokens = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)
    print(f"{name:<32}{len(plan):>6}{tokens - sum(lengths):>8,}{30 * len(plan) + tokens:>20,}")

# %% [markdown]
# ## Problem 2: fair to users
#
# The queue of lesson 08 is first come, first served. If a user sends 1,000 requests at noon, whoever comes a minute
# later waits for all of them. Limits on the number of requests do not help much, since requests are of very different
# size. So count what users really get, in tokens, and let the one who has had least come next (after Sheng et al. 2024,
# *Fairness in Serving Large Language Models*, [arXiv 2401.00588](https://arxiv.org/abs/2401.00588)).
#
# `FairQueue` holds the requests that wait. The engine calls three methods:
#
# - `push(user, request)`: a request comes and waits.
# - `pop()`: there is room; whose request starts? Returns `(user, request)`, or `None` if nobody waits. A popped request
#   does not wait any more: it runs.
# - `charge(user, tokens)`: so many tokens were computed for this user. It comes after each step, while the request
#   runs; so it often comes for users of whom no request waits.
#
# The rules:
#
# 1. Each user has a counter. It begins at 0, and `charge` adds to it. It never falls.
# 2. `pop` takes the user with the smallest counter among those who have a request waiting; of equal ones, the user
#    whose first waiting request was pushed before the others'. Of that user it takes the request that was pushed first.
# 3. **No credit for absence.** If `push` comes for a user of whom no request waits, the user's counter is first lifted
#    to the smallest counter of the users who wait: it becomes the larger of its own and that one.
# 4. If nobody waits at all, rule 3 lifts to the counter (as it is by now) of the user whose request was popped last,
#    if there was one.
#
# | call | counters of those who wait, then | returns |
# |---|---|---|
# | `push("ann", 1)`, `push("ann", 2)`, `push("ann", 3)` | ann 0 | |
# | `pop()`, `charge("ann", 50)` | ann 50 | `("ann", 1)` |
# | `push("bob", 4)` | ann 50, bob **50** (rule 3) | |
# | `pop()`, `charge("ann", 10)` | ann 60, bob 50 | `("ann", 2)`: equal, and 2 was there before 4 |
# | `pop()` | ann 60 | `("bob", 4)` |


# %% task="p3.FairQueue"
class FairQueue:
    """Requests that wait, in the order of rules 1 to 4. A user is a string; a request may be anything."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.waiting: dict[str, deque] = {}  # of users who wait: (number of the push, request), in order
        self.counter: dict[str, int] = defaultdict(int)
        self.pushed = 0
        self.last: str | None = None  # whose request was popped last
        ### END SOLUTION

    def push(self, user: str, request) -> None:
        ### BEGIN SOLUTION
        if user not in self.waiting:
            others = [self.counter[name] for name in self.waiting]
            floor = min(others) if others else self.counter[self.last] if self.last is not None else 0
            self.counter[user] = max(self.counter[user], floor)
            self.waiting[user] = deque()
        self.pushed += 1
        self.waiting[user].append((self.pushed, request))
        ### END SOLUTION

    def pop(self):
        """(user, request), or None if nobody waits."""
        ### BEGIN SOLUTION
        if not self.waiting:
            return None
        user = min(self.waiting, key=lambda name: (self.counter[name], self.waiting[name][0][0]))
        _, request = self.waiting[user].popleft()
        if not self.waiting[user]:
            del self.waiting[user]
        self.last = user
        return user, request
        ### END SOLUTION

    def charge(self, user: str, tokens: int) -> None:
        ### BEGIN SOLUTION
        self.counter[user] += tokens
        ### END SOLUTION


# %%
lab.check("p3", "FairQueue")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two dictionaries: a queue of waiting requests for each user who waits, and a counter for every user ever seen. A user
# whose last request was popped leaves the first and stays in the second. Number the pushes, and keep a request's number
# beside it.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `min(users, key=lambda name: (counter, number of the first waiting request))` is rule 2. For rules 3 and 4 look at who
# waits *before* the new request is put in. The lift is a `max`, so that a user who has had much keeps that.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# The counters say who is owed; the lift says that time spent away is not owed. The common wrong answer leaves the lift
# out: a user who comes after a quiet day has a counter far below all others, and is served alone until it has caught
# up. The next one *sets* the counter to the least instead of lifting it, so a user can wipe out a debt by letting the
# queue run empty. The third deletes the counter together with the user's last request, with the same result.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### Who waits for whom
#
# One user sends 40 requests at once; another sends one every 60 steps. The engine of this cell runs four requests at a
# time, one token each in a step. The same requests in the same order, first come first served and by your queue. (The
# cell needs your class.)


# %%
class FirstCome:
    def __init__(self):
        self.line = deque()

    def push(self, user, request):
        self.line.append((user, request))

    def pop(self):
        return self.line.popleft() if self.line else None

    def charge(self, user, tokens):
        pass


def simulate(queue, arrivals, slots=4):
    """arrivals: (step, user, tokens) in order. Returns the steps that each user's requests waited, and all steps."""
    coming, running, waits, left, now = deque(arrivals), [], defaultdict(list), len(arrivals), 0
    while left:
        while coming and coming[0][0] <= now:
            step, user, tokens = coming.popleft()
            queue.push(user, (step, tokens))
        while len(running) < slots and (one := queue.pop()):
            user, (step, tokens) = one
            waits[user].append(now - step)
            heapq.heappush(running, (now + tokens, user))
        for _, user in running:
            queue.charge(user, 1)
        now += 1
        while running and running[0][0] <= now:
            heapq.heappop(running)
            left -= 1
    return waits, now


draw = random.Random(0)
arrivals = [(0, "flood", draw.randint(20, 100)) for _ in range(40)]
arrivals += [(60 * i, "now and then", draw.randint(20, 100)) for i in range(1, 10)]
arrivals.sort(key=lambda one: one[0])
print("                       steps that requests waited: mean, longest")
for queue in (FirstCome(), FairQueue()):
    waits, steps = simulate(queue, arrivals)
    print(f"{type(queue).__name__}: {steps} steps in all")
    for user, waited in waits.items():
        print(f"    {user:<14}{len(waited):>4} requests{sum(waited) / len(waited):>20.1f}{max(waited):>9}")

# %% [markdown]
# ## Explain
#
# Write between the quotes, in eight to ten sentences.
#
# 1. `plan_batches` knows all texts beforehand. A service does not: texts come all the time, and whenever the engine is
#    free it could plan those that wait and run the batch with the fewest pads. Who may wait for ever, and why can that
#    not happen in the queue of lesson 08, nor in yours?
# 2. Let requests start in the order of `FairQueue`. What does that order cost in pads if they run in padded rectangles,
#    compared with a plan by length? And what in the ragged batch of lessons 07 and 08? Say why.
# 3. Leave rules 3 and 4 out. What could a user do, and who pays?

# %%
lab.answer("p3.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# The long text that nothing resembles: as long as short texts come, there is always a batch of them with fewer pads, so
# it is put off again and again. First come, first served starts each request after a fixed number of others, whatever
# its length; in `FairQueue` a user who waits is charged nothing while the others' counters grow, so at some time it has
# the least (those who come new begin at the least counter, not below). In rectangles the order of users mixes lengths:
# each row is filled up to the longest of whoever happens to come together, so fairness is paid in pads, about as much
# as taking texts as they came. In the ragged batch there are no pads in the Linears, and a step is filled up to its
# budget with anybody's tokens: whoever comes first, the same tokens are computed, so the order is free. Without the
# lift a user who has been away, or a new name, has a counter far below all others. It is served alone until it has
# caught up, and those who were there all the time wait; so one would save up by staying away, or come under ever new
# names.
# </details>
# <!-- END SOLUTION -->
