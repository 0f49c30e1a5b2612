"""Problem set 3, lessons 06 to 08: the cheapest padded batches, and a queue in which no user can crowd out another."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minillm.lab.checking import holds
from minillm.lab.seeds import rng
from minillm.lab.work import Work, Wrong, time_limit

# ---- plan_batches

Batches = list[list[int]]
SOON = 5.0  # seconds for a hundred texts: some hundred times what they take


def cost(batches: Batches, lengths: Sequence[int], fixed: int) -> int:
    return sum(fixed + len(batch) * max(lengths[i] for i in batch) for batch in batches)


def right_batches(lengths: Sequence[int], rows: int, fixed: int) -> Batches:
    """The cheapest cut of the texts in order of length, by dynamic programming."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best, cut = [0], [0]  # cost of the first j texts, and where their last batch begins
    for j in range(1, len(order) + 1):
        tried = [(best[i] + fixed + (j - i) * lengths[order[j - 1]], i) for i in range(max(0, j - rows), j)]
        least, begin = min(tried)
        best.append(least)
        cut.append(begin)
    batches, j = [], len(order)
    while j:
        batches.append(order[cut[j] : j])
        j = cut[j]
    return batches[::-1]


def groupings(texts: Sequence[int], rows: int) -> Iterator[Batches]:
    """Every way to put the texts into batches of at most `rows`."""
    if not texts:
        yield []
        return
    for rest in groupings(texts[1:], rows):
        yield [[texts[0]], *rest]
        for i, batch in enumerate(rest):
            if len(batch) < rows:
                yield [*rest[:i], [texts[0], *batch], *rest[i + 1 :]]


def short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 150 else f"{text[:150]} ..."


def given(lengths: Sequence[int], rows: int, fixed: int) -> str:
    return f"lengths = {short(lengths)}, rows = {rows}, fixed = {fixed}"


def planned(work: Work, lengths: list[int], rows: int, fixed: int) -> Batches:
    """The learner's batches, once every text is in exactly one of them."""
    got, what = work.call("plan_batches", lengths, rows, fixed), given(lengths, rows, fixed)
    if got is None:
        raise Wrong("plan_batches returned None: is a `return` missing?")
    if not isinstance(got, list) or any(not isinstance(batch, list) for batch in got):
        # the same words for all texts: then it is told once
        kinds = sorted({type(batch).__name__ for batch in got}) if isinstance(got, list | tuple) else []
        told = f"{type(got).__name__}{kinds and ' of ' + ', '.join(kinds) or ''}"
        raise Wrong(f"plan_batches returned {told}; it must be a list of lists of numbers of texts")
    for batch in got:
        if not batch:
            raise Wrong(f"{what}: {short(got)} has an empty batch, a pass for nobody")
        if len(batch) > rows:
            raise Wrong(f"{what}: a batch of {len(batch)} texts, {short(batch)}; {rows} rows are the most")
        for i in batch:
            if type(i) is not int or not 0 <= i < len(lengths):
                raise Wrong(f"{what}: {short(batch)} has {i!r} in it; texts have the numbers 0 to {len(lengths) - 1}")
    times = [sum(batch.count(i) for batch in got) for i in range(len(lengths))]
    for i, n in enumerate(times):
        if n != 1:
            raise Wrong(f"{what}: text {i} is in {n} batches of {short(got)}; every text is in exactly one")
    return got


def words(batches: Batches, lengths: Sequence[int], fixed: int) -> str:
    pads = cost(batches, lengths, 0) - sum(lengths)
    return f"{short(batches)} costs {cost(batches, lengths, fixed)} ({len(batches)} passes, {pads} pads)"


def must_cost(work: Work, lengths: list[int], rows: int, fixed: int, best: Batches) -> None:
    got = planned(work, lengths, rows, fixed)
    if cost(got, lengths, fixed) != cost(best, lengths, fixed):
        raise Wrong(
            f"{given(lengths, rows, fixed)}: {words(got, lengths, fixed)}; cheaper is {words(best, lengths, fixed)}"
        )


def some_lengths(draw: random.Random, n: int) -> list[int]:
    """Mostly short, a few long; equal ones among them."""
    return [draw.choice((draw.randint(1, 9), draw.randint(1, 40), draw.randint(30, 120))) for _ in range(n)]


@holds(
    "p3",
    "plan_batches",
    "every text is in exactly one batch, no batch is empty, and none has more than `rows` texts",
    hint="a last batch may be smaller than the others; without texts there are no batches: [].",
)
def plan_is_legal(work: Work) -> None:
    draw = rng(1)
    for n in (0, 1, 2, *(draw.randint(3, 12) for _ in range(20))):
        planned(work, some_lengths(draw, n), draw.randint(1, 9), draw.choice((0, 5, 50, 10_000)))


@holds(
    "p3",
    "plan_batches",
    "if a pass costs little, texts of equal length share passes, and there is not one pad",
    hint="where lengths differ by 10 and more and `fixed` is below 10, a pad always costs more than a pass.",
)
def cheap_passes(work: Work) -> None:
    draw = rng(2)
    for _ in range(12):
        lengths = sorted(10 * draw.randint(1, 4) for _ in range(draw.randint(2, 12)))
        rows, fixed = draw.randint(2, 5), draw.randint(1, 9)
        got = planned(work, lengths, rows, fixed)
        if pads := cost(got, lengths, 0) - sum(lengths):
            raise Wrong(f"{given(lengths, rows, fixed)}: {short(got)} has {pads} pads; none are needed")
        must_cost(work, lengths, rows, fixed, right_batches(lengths, rows, fixed))


@holds(
    "p3",
    "plan_batches",
    "if a pass costs more than all tokens, there are as few as can be, and then as few pads as can be",
    hint="n texts need ceil(n / rows) passes. Which of them is the one that is not full? Not always the last, nor the "
    "first: let the costs decide.",
)
def dear_passes(work: Work) -> None:
    draw = rng(3)
    for _ in range(15):
        rows = draw.randint(2, 4)
        lengths = sorted(some_lengths(draw, draw.randint(rows + 1, 3 * rows)))
        fixed = sum(lengths) * len(lengths)
        got, least = planned(work, lengths, rows, fixed), -(-len(lengths) // rows)
        if len(got) > least:
            raise Wrong(f"{given(lengths, rows, fixed)}: {short(got)} has {len(got)} passes, and {least} are enough")
        must_cost(work, lengths, rows, fixed, right_batches(lengths, rows, fixed))


@holds(
    "p3",
    "plan_batches",
    "no grouping of a few texts is cheaper: all of them were tried",
    hint="the cheapest plan cuts the texts in order of length. Where it cuts, no simple rule says: try every size of "
    "the last batch, and take the best plan for all texts before it.",
)
def all_tried(work: Work) -> None:
    draw = rng(4)
    for _ in range(20):
        lengths, rows, fixed = some_lengths(draw, draw.randint(2, 7)), draw.randint(2, 4), draw.randint(1, 60)
        every = groupings(range(len(lengths)), rows)
        best = min(every, key=lambda batches: cost(batches, lengths, fixed))
        must_cost(work, lengths, rows, fixed, best)


@holds(
    "p3",
    "plan_batches",
    "numbers are those of the list as it was given, in whatever order it stands",
    hint="sort the numbers of the texts by length (`sorted(range(n), key=...)`), not the lengths, and leave the list "
    "as it is.",
)
def any_order(work: Work) -> None:
    draw = rng(6)
    for _ in range(8):
        lengths = draw.sample(range(1, 100), draw.randint(3, 12))
        rows, fixed = draw.randint(2, 4), draw.randint(20, 200)
        for _ in range(3):
            draw.shuffle(lengths)
            must_cost(work, list(lengths), rows, fixed, right_batches(lengths, rows, fixed))


@holds(
    "p3",
    "plan_batches",
    "more than a hundred texts, in the time of n times `rows` tries",
    hint="keep the least cost of the first j texts for every j, instead of asking for it again and again; then walk "
    "back over the cuts.",
)
def many_texts(work: Work) -> None:
    draw = rng(5)
    for _ in range(4):
        lengths = some_lengths(draw, draw.randint(100, 150))  # few enough for a recursion that remembers
        rows, fixed = draw.randint(5, 20), draw.randint(10, 300)
        with time_limit(SOON, "plan_batches"):
            must_cost(work, lengths, rows, fixed, right_batches(lengths, rows, fixed))


# ---- FairQueue

NAMES = "ABCDEFGH"


class RightQueue:
    """The rules as they stand, slowly."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Any]] = []
        self.charged = dict.fromkeys(NAMES, 0)
        self.last: str | None = None

    def push(self, user: str, request: Any) -> None:
        others = {name for name, _ in self.waiting}
        if user not in others:
            floor = min((self.charged[name] for name in others), default=self.charged[self.last] if self.last else 0)
            self.charged[user] = max(self.charged[user], floor)
        self.waiting.append((user, request))

    def pop(self) -> tuple[str, Any] | None:
        if not self.waiting:
            return None
        least = min(self.charged[name] for name, _ in self.waiting)
        chosen = next(one for one in self.waiting if self.charged[one[0]] == least)
        self.waiting.remove(chosen)
        self.last = chosen[0]
        return chosen

    def charge(self, user: str, tokens: int) -> None:
        self.charged[user] += tokens


class Story:
    """Both queues side by side; what happened is told when they part."""

    def __init__(self, work: Work, request: Callable[[int], Any] = int):
        self.mine, self.right = work.call("FairQueue"), RightQueue()
        self.told: list[str] = []
        self.number, self.request = 0, request  # what the n-th request is

    def push(self, *users: str) -> None:
        for user in users:
            self.number += 1
            request = self.request(self.number)
            self.told.append(f"push({user!r}, {request!r})")
            self.right.push(user, request)
            self.mine.push(user, request)

    def charge(self, user: str, tokens: int) -> None:
        self.told.append(f"charge({user!r}, {tokens})")
        self.right.charge(user, tokens)
        self.mine.charge(user, tokens)

    def pop(self, why: str = "") -> tuple[str, Any] | None:
        state = ", ".join(f"{name} {self.right.charged[name]}" for name, _ in dict(self.right.waiting).items())
        expected, got = self.right.pop(), self.mine.pop()
        self.told.append("pop()")
        if got != expected or (got is not None and not isinstance(got, tuple)):
            waits = f"waiting, with counters: {state or 'nobody'}"
            raise Wrong(
                f"after {'; '.join(self.told[-14:-1]) or 'nothing'} ({waits}): pop() must return {expected!r}, and "
                f"returned {got!r}{why and f'. {why}'}"
            )
        return expected

    def served(self, draw: random.Random) -> tuple[str, Any] | None:
        """One request leaves the queue, and its user pays for it."""
        if one := self.pop():
            self.charge(one[0], draw.randint(1, 30))
        return one


@holds(
    "p3",
    "FairQueue",
    "one user alone: first come, first served, and None when nobody waits",
    hint="a queue (deque) for each user: append at the right end, take from the left.",
)
def one_user(work: Work) -> None:
    draw = rng(11)
    for _ in range(6):
        story, user = Story(work), draw.choice(NAMES)
        story.pop()
        for _ in range(draw.randint(5, 20)):
            story.push(*[user] * draw.randint(0, 3))
            if draw.random() < 0.6:
                story.served(draw)
        while story.right.waiting:
            story.pop()
        story.pop()
        other = work.call("FairQueue")  # a new queue is empty, whatever another one holds
        story.push(user)
        if (got := other.pop()) is not None:
            raise Wrong(f"a new FairQueue must be empty, and its pop() returned {got!r}: two queues share something")


@holds(
    "p3",
    "FairQueue",
    "several users wait: who was charged least comes next, and of equals the one who has waited longest",
    hint="compare (counter, number of the user's first waiting request); a number counts all pushes.",
)
def least_charged(work: Work) -> None:
    draw = rng(12)
    for _ in range(12):
        story, users = Story(work), draw.sample(NAMES, draw.randint(2, 5))
        story.push(*draw.choices(users, k=draw.randint(6, 14)), *users)
        while len(set(dict(story.right.waiting))) > 1:
            if one := story.pop():
                story.charge(one[0], draw.choice((0, 5, 5, 10, draw.randint(1, 30))))


@holds(
    "p3",
    "FairQueue",
    "what a user was charged counts for ever, also if it comes while none of its requests waits",
    hint="tokens are charged while a request runs, and then it waits no more. Keep a user's counter when its last "
    "request leaves, and never set it lower.",
)
def debts_stay(work: Work) -> None:
    draw = rng(13)
    for _ in range(10):
        story, (greedy, modest) = Story(work), draw.sample(NAMES, 2)
        story.push(greedy, *[modest] * 6, greedy)
        story.charge(modest, 1)  # no two counters are equal here
        debt, why = draw.randint(20, 60), f"{greedy!r} was charged more than {modest!r}"
        for tokens in (debt, debt, 0):  # greedy, modest, and the last of greedy's
            if one := story.pop():
                story.charge(one[0], tokens)
        story.charge(greedy, draw.randint(8, 19))  # while its request runs
        story.push(greedy)
        for _ in range(4):
            if one := story.pop(f"{why}: none of its requests waited meanwhile, and the debt stays"):
                story.charge(one[0], 1)


@holds(
    "p3",
    "FairQueue",
    "who comes (back) has no credit: the counter is lifted to the least of those who wait",
    hint="in push, if none of this user's requests waits: counter = max(its own, the least counter of users who wait). "
    "Those who wait already are not lifted.",
)
def no_credit(work: Work) -> None:
    draw = rng(14)
    for _ in range(10):
        story, users = Story(work), draw.sample(NAMES, draw.randint(3, 5))
        newcomer, *busy = users
        for i, user in enumerate(busy):
            story.push(*[user] * draw.randint(6, 9))
            story.charge(user, i)  # so that few counters are equal
        for _ in range(draw.randint(2 * len(busy), 4 * len(busy))):
            story.served(draw)
        story.push(*[newcomer] * draw.randint(3, 6))
        story.charge(newcomer, 1)
        why = f"{newcomer!r} came late: it begins with the least counter of those who waited, not with 0"
        for _ in range(8):
            if one := story.pop(why):
                story.charge(one[0], draw.randint(1, 30))


@holds(
    "p3",
    "FairQueue",
    "if nobody waits, the counter is lifted to that of the user who was served last",
    hint="remember whose request the last pop returned. What counts is the counter that user has when the newcomer "
    "comes.",
)
def nobody_waits(work: Work) -> None:
    draw = rng(15)
    for i in range(12):
        story, (first, second, third) = Story(work), draw.sample(NAMES, 3)
        story.push(*draw.choices((first, second), k=draw.randint(1, 4)), first, second)
        while story.right.waiting:
            one = story.served(draw)
        assert one is not None
        story.charge(one[0], draw.randint(50, 90))  # while it runs
        if i % 2:  # the last one served is not the one that had most
            story.charge(second if one[0] == first else first, draw.randint(300, 400))
        story.push(third)
        story.charge(third, 1)
        story.push(*draw.choices((first, second, third), k=6), first, second)
        why = f"nobody waited when {third!r} came, and {one[0]!r} had been served last"
        for _ in range(6):
            if found := story.pop(why):
                story.charge(found[0], draw.randint(1, 40))


@holds(
    "p3",
    "FairQueue",
    "a service in which users come, flood and go, with requests of any kind: at every turn the one whose turn it is",
    hint="if the properties above hold, look at a user whose last request left and who comes again: is it in the "
    "queue's books twice, or not at all? And at one who pushes again while it waits: rule 3 is not for that. A request "
    "is only kept and given back: it may be equal to another one, or a list, or None.",
)
def comes_and_goes(work: Work) -> None:
    draw = rng(16)
    kinds: list[Callable[[int], Any]] = [int, lambda n: [n % 3], lambda n: (None, "", 0)[n % 3]]
    for i in range(6):
        story, users = Story(work, kinds[i % 3]), draw.sample(NAMES, draw.randint(2, 5))
        running: deque[str] = deque()
        for _ in range(80):
            if draw.random() < 0.45:
                story.push(*[draw.choice(users)] * draw.choice((1, 1, 1, 6)))
            if len(running) < 3 and (one := story.pop()):
                running.append(one[0])
            for user in list(running):
                story.charge(user, draw.choice((1, 1, 7)))
            if running and draw.random() < 0.5:
                running.popleft()
        while story.pop():
            pass
