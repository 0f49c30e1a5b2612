"""Lesson 09, paged KV memory: blocks by their laws (none lost, none twice, never one too many), who enters and who
gives way as in the package, and every token the naive stage's, with NaN in every slot that nobody may read."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from minillm.batch import pack
from minillm.cache import KVPool
from minillm.kernels.gather import GatherAttend
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.checks.c08 import TINY, Plan, Story, Text, Watched, decoding, half_done, model, same_texts
from minillm.lab.work import Work, Wrong, same
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.sampling import sample
from minillm.scheduler import Scheduler
from minillm.slots import BlockSlots

SIZES = (1, 2, 3, 4, 7, 16)
MOST_STEPS = 200  # of a world: far more than it needs
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# ---- right ones, for functions that call others of the learner's


def right_blocks(kv_len: int, size: int) -> int:
    return -(-kv_len // size)


def right_reserve(table: list[int], kv_len: int, free: list[int], size: int) -> bool:
    new = right_blocks(kv_len, size) - len(table)
    if new > len(free):
        return False
    for _ in range(new):
        table.append(free.pop())
    return True


def right_release(table: list[int], free: list[int]) -> None:
    free += table
    table.clear()


def right_may_enter(request: Request, free: list[int], size: int) -> bool:
    return right_blocks(len(request.tokens), size) <= len(free)


def right_preempt(running: list[Request], waiting: deque[Request], free: list[int]) -> Request:
    request = running.pop()
    right_release(request.blocks, free)
    request.computed = 0
    waiting.appendleft(request)
    return request


COUNTS = {"blocks_needed": right_blocks}
PARTS = {
    "blocks_needed": right_blocks,
    "reserve": right_reserve,
    "release": right_release,
    "may_enter": right_may_enter,
    "preempt": right_preempt,
}


# ---- blocks_needed


@holds(
    "09",
    "blocks_needed",
    "by hand: in blocks of 4 the 7 tokens need 2 blocks, 8 still need 2, and the 9th opens a third",
    hint="round up: a block that is begun is taken whole. -(-a // b) is a / b rounded up.",
)
def blocks_by_hand(work: Work) -> None:
    for kv_len, expected in ((7, 2), (8, 2), (9, 3), (1, 1), (0, 0)):
        same(work.call("blocks_needed", kv_len, 4), expected, f"blocks_needed({kv_len}, 4)")


@holds(
    "09",
    "blocks_needed",
    "just enough, for every length from 0 to 40 and every size: one block less would be too small",
    hint="the lengths to try by hand are those at the border of a block: size - 1, size, size + 1.",
)
def blocks_just_enough(work: Work) -> None:
    for size in SIZES:
        for kv_len in range(41):
            n = work.call("blocks_needed", kv_len, size)
            if not isinstance(n, int) or isinstance(n, bool):
                raise Wrong(f"blocks_needed({kv_len}, {size}) is {n!r}; it must be a whole number")
            call = f"blocks_needed({kv_len}, {size}) is {n}"
            if n * size < kv_len:
                raise Wrong(f"{call}: they have {n * size} slots, too few for {kv_len} positions")
            if n and (n - 1) * size >= kv_len:
                raise Wrong(f"{call}; {kv_len} positions need {blocks_of(right_blocks(kv_len, size))}")


# ---- slots_of


def slots_words(table: list[int], start: int, stop: int, size: int) -> str:
    return f"slots_of({table}, {start}, {stop}, {size})"


def must_lie(work: Work, table: list[int], start: int, stop: int, size: int) -> None:
    got = work.call("slots_of", table, start, stop, size)
    words = slots_words(table, start, stop, size)
    if got is None:
        raise Wrong("slots_of returned None: is a `return` missing?")
    if not isinstance(got, list | tuple | range):
        raise Wrong(f"{words} is {type(got).__name__}; it must be a list of slots")
    got = list(got)
    for p, slot in zip(range(start, stop), got, strict=False):
        block, place = divmod(p, size)
        expected = table[block] * size + place
        if slot != expected:
            raise Wrong(
                f"{words}: position {p} lies in block {block} of its text, which is block {table[block]} of the "
                f"memory, at place {place}: slot {expected} was expected, got {slot!r}"
            )
    if len(got) != stop - start:
        raise Wrong(f"{words}: expected {stop - start} slots, one for each position, got {len(got)}")


@holds(
    "09",
    "slots_of",
    "by hand: with the block table [5, 2] and blocks of 4, the 7 tokens lie in 20 to 23 and 8 to 10",
    hint="position p is in block p // size of its text, at place p % size; block b of the memory begins at b * size.",
)
def slots_by_hand(work: Work) -> None:
    must_lie(work, [5, 2], 0, 7, 4)
    must_lie(work, [5, 2], 7, 8, 4)
    must_lie(work, [5, 2], 2, 5, 4)


@holds(
    "09",
    "slots_of",
    "any piece of any text, for every size: also blocks of 1, and pieces that begin and end inside a block",
    hint="go through the positions from start to stop - 1 one by one: each finds its slot by itself.",
)
def slots_anywhere(work: Work) -> None:
    draw = seeds.rng(1)
    for size in SIZES:
        for _ in range(12):
            table = draw.sample(range(30), draw.randint(1, 6))
            start = draw.randint(0, len(table) * size - 1)
            must_lie(work, table, start, draw.randint(start, len(table) * size), size)


# ---- reserve, release


def blocks_of(n: int) -> str:
    return f"{n} block" + ("" if n == 1 else "s")


def ask_reserve(work: Work, table: list[int], kv_len: int, free: list[int], size: int) -> tuple[bool, str]:
    """What the learner's function answers, and the call in words; `table` and `free` change."""
    words = f"reserve(table={table}, kv_len={kv_len}, free={free}, size={size})"
    got = work.call("reserve", table, kv_len, free, size, changes=(0, 2))
    if got is None:
        raise Wrong(f"{words} returned None; it must return True, or False if there are too few blocks")
    if not isinstance(got, bool):
        raise Wrong(f"{words} returned {got!r}; it must return True or False")
    return got, words


def must_reserve(work: Work, table: list[int], kv_len: int, free: list[int], size: int) -> None:
    """What must come of it, where there are enough blocks."""
    table_before, free_before = list(table), list(free)
    done, words = ask_reserve(work, table, kv_len, free, size)
    need = right_blocks(kv_len, size)
    if not done:
        raise Wrong(f"{words} refused, though {need - len(table_before)} more needed and {len(free_before)} are free")
    if table[: len(table_before)] != table_before:
        raise Wrong(f"{words}: the table is {table} then; what was in it must stay as it is, K and V lie there")
    if len(table) != max(need, len(table_before)):
        raise Wrong(f"{words}: the text must hold {blocks_of(need)} then, for {kv_len} positions; it holds {table}")
    new = table[len(table_before) :]
    if len(set(new)) < len(new):
        raise Wrong(f"{words}: the table is {table} then; it holds a block twice")
    for block in new:
        if block not in free_before:
            raise Wrong(f"{words}: the table is {table} then; block {block!r} was not free")
        if block in free:
            raise Wrong(f"{words}: block {block} is in the table then and in `free` too; the next text would get it")
    if sorted([*free, *new]) != sorted(free_before):
        raise Wrong(f"{words}: {new} were taken, but `free` was {free_before} and is {free}")


@holds(
    "09",
    "reserve",
    "by hand: the example takes two blocks for its 7 tokens, none for the 8th, one for the 9th",
    hint="if the number is wrong: what is missing is blocks_needed(kv_len, size) - len(table), often 0.",
    uses=COUNTS,
)
def reserve_by_hand(work: Work) -> None:
    table: list[int] = []
    free = [3, 0, 2, 5]
    for kv_len in (4, 7, 8, 9):
        must_reserve(work, table, kv_len, free, 4)


@holds(
    "09",
    "reserve",
    "at every length from 1 to 17 a text holds exactly the blocks that it needs, however it grows",
    hint="if the number is wrong: kv_len counts every position that has a place after the call; add no 1 to it.",
    uses=COUNTS,
)
def reserve_exact(work: Work) -> None:
    draw = seeds.rng(2)
    for size in SIZES:
        for steps in ([1] * 17, [17], [draw.randint(1, 5) for _ in range(4)]):
            table: list[int] = []
            free, kv_len = draw.sample(range(40), 20), 0
            for n in steps:
                kv_len += n
                must_reserve(work, table, kv_len, free, size)
            must_reserve(work, table, kv_len, free, size)  # asked again for the same: nothing new


@holds(
    "09",
    "reserve",
    "every free block can be had, down to the last one",
    hint="refuse only if more are needed than there are: as many as there are is enough.",
    uses=COUNTS,
)
def reserve_last(work: Work) -> None:
    for table, kv_len, free, size in (([], 4, [3], 4), ([5], 12, [0, 1], 4), ([], 3, [2, 0, 1], 1)):
        must_reserve(work, table, kv_len, free, size)


@holds(
    "09",
    "reserve",
    "too few free blocks: it answers False, and nothing has changed",
    hint="count first, then take: whoever takes until nothing is left holds a part and has to give it back.",
    uses=COUNTS,
)
def reserve_refused(work: Work) -> None:
    for table, kv_len, free, size in (([], 1, [], 4), ([5, 2], 9, [], 4), ([5], 13, [0, 1], 4), ([], 7, [4, 1], 2)):
        before = list(table), list(free)
        done, words = ask_reserve(work, table, kv_len, free, size)
        if (table, free) != before:
            raise Wrong(
                f"{words}: {right_blocks(kv_len, size) - len(before[0])} are needed and {len(before[1])} free, so "
                f"nothing may change; but the table is {table} then, and free is {free}"
            )
        if done:
            raise Wrong(f"{words} returned True, but there are too few blocks")


@holds(
    "09",
    "release",
    "all blocks come back, each once, and the table is empty: the same list, not a new one",
    hint="`table` belongs to the caller: empty the list itself, with table.clear(), after its blocks are in `free`.",
)
def release_all(work: Work) -> None:
    for table, free in (([5, 2], [3]), ([7], []), ([1, 0, 4], [2, 6])):
        words = f"release(table={table}, free={free})"
        before = sorted([*table, *free])
        work.call("release", table, free, changes=(0, 1))
        if sorted(free) != before:
            raise Wrong(f"{words}: `free` must hold the blocks {before} then, in any order; it is {free}")
        if table:
            raise Wrong(f"{words}: the table must be empty then, and is {table}: released again, it frees them twice")


@holds(
    "09",
    "release",
    "released twice, or holding nothing: no block is freed twice",
    hint="an empty table has nothing to give; if the first call has emptied it, the second one does nothing.",
)
def release_twice(work: Work) -> None:
    table, free = [5, 2], [3]
    for _ in range(2):
        work.call("release", table, free, changes=(0, 1))
    if sorted(free) != [2, 3, 5]:
        raise Wrong(
            f"release twice for the table [5, 2], free=[3]: `free` is {free} then; it must hold 2, 3, 5 once each"
        )
    table, free = [], [3]
    work.call("release", table, free, changes=(0, 1))
    if (table, free) != ([], [3]):
        raise Wrong(f"release of an empty table with free=[3]: nothing may change, but free is {free}")


@holds(
    "09",
    "release",
    "with reserve: over many texts that come, grow and go, every block is free or held by one text",
    hint="a block must move from one list to the other: never be in both, never in none.",
    uses={"blocks_needed": right_blocks, "reserve": right_reserve},
)
def nothing_is_lost(work: Work) -> None:
    work.call("release", [], [], changes=(0, 1))
    try:
        work.call("reserve", [], 1, [0], 4, changes=(0, 2))
    except Wrong as wrong:
        if "not written yet" in str(wrong):  # then this waits: it is tried with a right one
            raise Wrong("the texts of this property grow with your `reserve`, which is yet to come") from wrong
    draw = seeds.rng(3)
    for size in (1, 4, 7):
        everything = list(range(12))
        tables: list[list[int]] = [[] for _ in range(4)]
        free, lengths = list(everything), [0] * 4
        for _ in range(60):
            i = draw.randrange(4)
            if draw.random() < 0.3:
                work.call("release", tables[i], free, changes=(0, 1))
                lengths[i] = 0
                if tables[i]:
                    raise Wrong(f"a text released with the others around it still holds {tables[i]}")
            else:
                n = draw.randint(1, 2 * size)
                done, _ = ask_reserve(work, tables[i], lengths[i] + n, free, size)
                lengths[i] += n if done else 0
            found = sorted([*free, *(block for table in tables for block in table)])
            if found != everything:
                raise Wrong(f"after reserve and release of 4 texts: tables {tables}, free {free}; {missing(found, 12)}")


def missing(found: Sequence[int], n: int) -> str:
    """Which of n blocks are not exactly once in a sorted list."""
    for block in range(n):
        if (times := found.count(block)) != 1:
            return f"block {block} is nowhere" if not times else f"block {block} is in {times} places"
    return "there are blocks that the memory does not have"


# ---- may_enter


def must_answer(work: Work, prompt: int, made: int, free: int, size: int) -> None:
    request, blocks = half_done(prompt, made), list(range(free))
    words = f"a request of {prompt} tokens" + (f" and {made} of output" if made else "")
    words += f", {blocks_of(free)} of {size} free"
    got = work.call("may_enter", request, blocks, size, changes=(0, 1))
    if blocks != list(range(free)) or request.blocks or request.computed or len(request.tokens) != prompt + made:
        raise Wrong(f"{words}: may_enter changed something; it only answers")
    if not isinstance(got, bool):
        raise Wrong(f"may_enter returned {got!r}; it must return True or False")
    need = right_blocks(prompt + made, size)
    if got != (need <= free):
        yes, no = ("yes", "no") if need <= free else ("no", "yes")
        raise Wrong(f"{words}: may it enter? All of its tokens need {need}, so {yes} was expected, got {no}")


@holds(
    "09",
    "may_enter",
    "by hand: a prompt enters if all of it has room, not only what the next step computes",
    hint="ask for blocks_needed(len(request.tokens), size): all of its tokens. As many as there are is enough.",
    uses=COUNTS,
)
def enter_whole(work: Work) -> None:
    for prompt, free in ((12, 2), (12, 3), (7, 1), (7, 2), (8, 2), (9, 2), (1, 0)):
        must_answer(work, prompt, 0, free, 4)


@holds(
    "09",
    "may_enter",
    "one that was sent away comes back with its output: prompt and output need room",
    hint="`request.tokens` is prompt and output, `request.prompt` only the prompt.",
    uses=COUNTS,
)
def enter_again(work: Work) -> None:
    for made in (1, 5, 6):
        must_answer(work, 7, made, 3, 4)


@holds(
    "09",
    "may_enter",
    "any length, any size: yes exactly if there is room, and nothing is changed by asking",
    hint="compare blocks with blocks: what the tokens need with what is free.",
    uses=COUNTS,
)
def enter_anywhere(work: Work) -> None:
    for size in SIZES:
        for prompt in range(1, 13):
            for free in range(right_blocks(prompt, size) + 2):
                must_answer(work, prompt, 0, free, size)


# ---- preempt


def holding(request: Request, blocks: Sequence[int]) -> Request:
    request.blocks = list(blocks)
    return request


@dataclass
class World:
    """Requests and the memory that they share; A, B, C ... in messages, in the order of arrival."""

    everyone: list[Request]
    running: list[Request]
    waiting: deque[Request]
    free: list[int]
    size: int
    n_blocks: int
    budget: int = 1000
    max_running: int = 26
    names: dict[Request, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = dict(zip(self.everyone, LETTERS, strict=False))

    def line(self, requests: Sequence[Request]) -> str:
        told = (
            f"{self.names[r]} ({len(r.tokens)} tokens, {r.computed} computed, {blocks_of(len(r.blocks))})"
            for r in requests
        )
        return ", ".join(told) or "nobody"

    def plan_words(self, plan: Plan) -> str:
        return ", ".join(f"{self.names[r]} {n}" for r, n in plan) or "nothing"

    def __str__(self) -> str:
        return (
            f"{self.n_blocks} blocks of {self.size}, {len(self.free)} free; running {self.line(self.running)}; waiting "
            f"{self.line(list(self.waiting))}; budget {self.budget}, at most {self.max_running} running"
        )


def crowd(seed: int, n: int) -> Iterator[World]:
    """States in which some run, with their blocks, and some wait."""
    draw = seeds.rng(seed)
    for _ in range(n):
        size = draw.choice((1, 2, 4, 7))
        running: list[Request] = []
        taken = 0
        for _ in range(draw.randint(1, 4)):
            r = decoding(draw.randint(2, 12), draw.randint(1, 5))
            r.computed -= draw.choice((0, 0, 1))
            running.append(holding(r, range(taken, taken + right_blocks(r.computed, size))))
            taken += len(r.blocks)
        waiting = deque(half_done(draw.randint(1, 12)) for _ in range(draw.randint(0, 3)))
        free = list(range(taken, taken + draw.randint(0, 3)))
        yield World([*running, *waiting], running, waiting, free, size, taken + len(free))


def sent_away(work: Work, world: World) -> Request:
    """Whom the learner's function returns; it has changed the world."""
    ran = list(world.running)
    got = work.call("preempt", world.running, world.waiting, world.free, changes=(0, 1, 2))
    if not isinstance(got, Request) or got not in ran:
        told = type(got).__name__ if isinstance(got, Request | list) else repr(got)
        raise Wrong(f"preempt returned {told}; it must return the running request that was sent away")
    return got


def ask_preempt(work: Work, world: World) -> str:
    """The state in words; the newest was sent away."""
    words, expected = str(world), world.running[-1]
    got = sent_away(work, world)
    if got is not expected:
        oldest = ": that is the oldest, and it would never end" if got is world.everyone[0] else ""
        raise Wrong(
            f"{words}:\n{world.names[got]} was sent away{oldest}; the newest, {world.names[expected]}, must give way"
        )
    return words


@holds(
    "09",
    "preempt",
    "the newest gives way, never the oldest; it leaves `running`, and waits in front of all others",
    hint="`running` is in the order of arrival, so the newest is its last; waiting.appendleft puts it first in line.",
    uses={"release": right_release},
)
def newest_gives_way(work: Work) -> None:
    for world in crowd(5, 60):
        running, waiting = list(world.running), list(world.waiting)
        words = ask_preempt(work, world)
        if world.running != running[:-1]:
            raise Wrong(f"{words}:\nrunning must be {world.line(running[:-1])} then; it is {world.line(world.running)}")
        if list(world.waiting) != [running[-1], *waiting]:
            names = ", ".join(world.names[r] for r in world.waiting) or "nobody"
            expected = ", ".join(world.names[r] for r in [running[-1], *waiting])
            raise Wrong(f"{words}:\nthe waiting must be {expected} then, the oldest first; they are {names}")


@holds(
    "09",
    "preempt",
    "it gives up all of its memory and none of its tokens: computed is 0, and every block is free once",
    hint="K and V are lost, so nothing of it is computed; its tokens are what it comes back with.",
    uses={"release": right_release},
)
def memory_goes_tokens_stay(work: Work) -> None:
    for world in crowd(6, 60):
        words, free = str(world), list(world.free)
        before = {r: (list(r.blocks), list(r.tokens)) for r in world.running}
        victim = sent_away(work, world)
        name, (held, tokens) = world.names[victim], before[victim]
        if victim.tokens != tokens or victim.finish_reason is not None:
            raise Wrong(
                f"{words}:\n{name} had {len(tokens)} tokens and has {len(victim.tokens)}: they must stay, its reader "
                "has seen them"
            )
        if victim.computed != 0:
            raise Wrong(f"{words}:\n`computed` of {name} is {victim.computed} then: its K and V are gone, it must be 0")
        if victim.blocks:
            raise Wrong(f"{words}:\n{name} still holds the blocks {victim.blocks} in its table")
        if sorted(world.free) != sorted([*free, *held]):
            raise Wrong(f"{words}:\n{name} held {held} and {free} were free; then `free` is {world.free}")


# ---- schedule


def world_of(draw: random.Random) -> tuple[World, dict[Request, int]]:
    """Newcomers, and how many tokens each of them will write; the memory holds at least the largest of them alone."""
    size = draw.choice((1, 2, 3, 4, 7))
    everyone = [half_done(draw.choice((1, 3, 7, 7, 12))) for _ in range(draw.randint(2, 7))]
    want = {r: draw.randint(1, 9) for r in everyone}
    least = max(right_blocks(len(r.prompt) + want[r] - 1, size) for r in everyone)
    most = draw.randint(1, 4)
    n_blocks = least + draw.choice((0, 0, 1, 2, 5))
    budget = most + draw.choice((0, 2, 6, 40))
    return World(everyone, [], deque(everyone), list(range(n_blocks)), size, n_blocks, budget, most), want


def ask(work: Work, world: World) -> tuple[Plan, str]:
    """The learner's plan, and the state before it in words; what it gave and took stays in the world."""
    words = str(world)
    before = [(r.computed, list(r.tokens)) for r in world.everyone]
    got = work.call(
        "schedule",
        world.running,
        world.waiting,
        world.budget,
        world.max_running,
        world.free,
        world.size,
        changes=(0, 1, 4),
    )
    if got is None:
        raise Wrong("schedule returned None: is a `return` missing?")
    if not isinstance(got, list | tuple):
        raise Wrong(f"schedule returned {type(got).__name__}; it must return a list of pairs (request, n)")
    for entry in got:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise Wrong(f"the plan holds {entry!r}; each entry must be a pair (request, n)")
        if not isinstance(entry[0], Request) or not isinstance(entry[1], int):
            raise Wrong(f"the plan holds ({type(entry[0]).__name__}, {entry[1]!r}); it must be a request and a number")
    plan: Plan = [(request, n) for request, n in got]
    for request, (computed, tokens) in zip(world.everyone, before, strict=True):
        if request.tokens != tokens:
            raise Wrong(f"{words}:\nschedule changed the tokens of {world.names[request]}; nobody may lose or gain any")
        if request.computed not in (computed, 0):
            raise Wrong(
                f"{words}:\nschedule set `computed` of {world.names[request]} to {request.computed}; it grows only "
                "after the step has run"
            )
    return plan, words


def advance(world: World, plan: Plan, want: dict[Request, int]) -> None:
    """The step has run: books are kept, texts grow, who has ended leaves and frees its blocks."""
    for request, n in plan:
        request.computed += n
        if request.pending == 0:
            request.tokens.append(4)
            if request.n_output == want[request]:
                world.running.remove(request)
                right_release(request.blocks, world.free)


def checked_step(work: Work, world: World) -> tuple[Plan, str]:
    """A plan that can be run: or Wrong, before the learner is told of a crash in the books."""
    ran = list(world.running)
    plan, words = ask(work, world)
    made = f"{words}:\nthe plan is {world.plan_words(plan)}"
    if not plan and (world.running or world.waiting):
        raise Wrong(
            f"{words}:\nthe plan is empty, though there is work: where `reserve` says no, somebody must give "
            "way; whoever is alone has room"
        )
    for request, n in plan:
        name = world.names[request]
        if request not in world.running:
            if request not in ran:
                raise Wrong(f"{made}: {name} is in it and not in `running`; a newcomer leaves `waiting` and joins them")
            raise Wrong(
                f"{made}: {name} was sent away in this step, and must not be in it: take whoever `preempt` returns "
                "out, and skip its turn if that is yet to come"
            )
        if not 1 <= n <= request.pending:
            raise Wrong(f"{made}: {name} has {request.pending} pending, so {n} is not possible")
        if len(request.blocks) * world.size < request.computed + n:
            raise Wrong(
                f"{made}: {name} has no room for that: it holds {blocks_of(len(request.blocks))} of {world.size}, "
                f"and needs a place for {request.computed + n} positions"
            )
    if len({r for r, _ in plan}) < len(plan):
        raise Wrong(f"{made}: a request is in it twice")
    return plan, words


def small_world(prompts: Sequence[int], n_blocks: int, budget: int, max_running: int, size: int = 4) -> World:
    everyone = [half_done(n) for n in prompts]
    return World(everyone, [], deque(everyone), list(range(n_blocks)), size, n_blocks, budget, max_running)


def must_plan(work: Work, world: World, want: dict[Request, int], expected: str) -> None:
    """One step; the plan as words, A 4, B 1."""
    plan, words = checked_step(work, world)
    if world.plan_words(plan) != expected:
        raise Wrong(f"{words}:\nexpected {expected}; got {world.plan_words(plan)}")
    advance(world, plan, want)


@holds(
    "09",
    "schedule",
    "by hand, one step: whoever is planned runs, and has its places, no more and no less",
    hint="`reserve` comes before a request goes into the plan, and `may_enter` before a newcomer joins; whoever "
    "`preempt` returns computes nothing in this step.",
    uses=PARTS,
)
def one_step(work: Work) -> None:
    """The usual faults of one step, each in a state that shows its cause."""

    def must_hold(world: World, what: str) -> None:
        plan, words = ask(work, world)
        for r, n in plan:
            need = right_blocks(r.computed + n, world.size)
            if len(r.blocks) != need and r in world.running:
                raise Wrong(
                    f"{words}:\nthe plan is {world.plan_words(plan)}: {world.names[r]} holds "
                    f"{blocks_of(len(r.blocks))} then, and needs {need}: {what}"
                )

    # a newcomer's first piece; then the next piece of who runs
    a = half_done(7)
    must_hold(
        World([a], [], deque([a]), [0, 1], 4, 2, 4, 2), "a newcomer must `reserve` too, its n positions and no more"
    )
    a = holding(half_done(12, computed=4), [0])
    must_hold(
        World([a], [a], deque(), [1, 2, 3], 4, 4, 4, 2), "`reserve` computed + n positions, neither all tokens nor less"
    )
    # 2 blocks are left beside A: enough for B's first piece, too few for all of it
    a, b = holding(decoding(4, 1), [0]), half_done(12)
    world = World([a, b], [a], deque([b]), [1, 2, 3], 4, 4, 5, 2)
    plan, words = ask(work, world)
    if b in dict(plan):
        raise Wrong(
            f"{words}:\nthe plan is {world.plan_words(plan)}: all tokens of B need 3 blocks, and A leaves 2: ask "
            "`may_enter` before anybody joins"
        )
    # A takes a block of B, whose turn is yet to come
    a, b = holding(decoding(4, 1), [0]), holding(decoding(7, 1), [1, 2])
    world = World([a, b], [a, b], deque(), [], 4, 3, 4, 2)
    plan, words = ask(work, world)
    if b in dict(plan) and b not in world.running:
        raise Wrong(
            f"{words}:\nthe plan is {world.plan_words(plan)}: B gave way to A before its own turn, so its turn is "
            "skipped: ask whether a request is still in `running` when its turn comes"
        )
    # B is single and comes first: it takes the last block. Then A needs two, and B has two
    a, b = holding(half_done(12, computed=4), [0]), holding(decoding(4, 1), [1])
    world = World([a, b], [a, b], deque(), [2], 4, 3, 8, 2)
    plan, words = ask(work, world)
    if b in dict(plan) and b not in world.running:
        raise Wrong(
            f"{words}:\nthe plan is {world.plan_words(plan)}: B stood in the plan when it gave way to A: take whoever "
            "`preempt` returns out of the plan"
        )


def cause_first(run: Callable[[Work], None]) -> Callable[[Work], None]:
    """Of a property that does not hold: where one step by hand tells the cause, that is said, in the same words for
    all properties."""

    def tried(work: Work) -> None:
        try:
            run(work)
        except Wrong as wrong:
            if "took longer than" not in str(wrong):
                one_step(work)
            raise

    return tried


@holds(
    "09",
    "schedule",
    "by hand, memory enough: the plans of lesson 08",
    hint="singles first, then prompts half computed, then newcomers; each gets min(pending, what is left).",
    uses=PARTS,
)
@cause_first
def plenty(work: Work) -> None:
    world = small_world((7, 7), 6, 4, 2)
    want = dict.fromkeys(world.everyone, 3)
    for expected in ("A 4", "A 3, B 1", "A 1, B 3", "A 1, B 3", "B 1", "B 1", "nothing"):
        must_plan(work, world, want, expected)


@holds(
    "09",
    "schedule",
    "by hand, three blocks of 4 for two texts: B gives way to A, waits, and is computed again from its first token",
    hint="as long as reserve answers False, preempt; if that hits the very request that asked, it is out of this step.",
    uses=PARTS,
)
@cause_first
def tight(work: Work) -> None:
    world = small_world((3, 3), 3, 16, 2)
    want = {world.everyone[0]: 7, world.everyone[1]: 4}
    # A: 3 + 6 positions, three blocks; B: 3 + 3, two. At its fifth position A takes the third block; B, which wants
    # one for its own fifth, finds none and sends itself away. A ends, B comes back with its 5 tokens
    for expected in ("A 3, B 3", "A 1, B 1", "A 1", "A 1", "A 1", "A 1", "A 1", "B 5", "B 1", "nothing"):
        must_plan(work, world, want, expected)


def half_way(seed: int, n: int) -> Iterator[World]:
    """States that no run from the beginning leads to with a plain queue, but one with priorities may: an older request
    half computed, a newer one that needs a single token."""
    draw = seeds.rng(seed)
    for world in crowd(seed, n):
        for request in world.running:
            right_release(request.blocks, world.free)
            request.computed = draw.choice((len(request.tokens) - 1, draw.randint(1, len(request.tokens) - 1)))
        world.n_blocks = sum(right_blocks(r.computed, world.size) for r in world.running) + draw.randint(0, 3)
        world.n_blocks = max(world.n_blocks, *(right_blocks(len(r.tokens), world.size) for r in world.everyone))
        world.free[:] = range(world.n_blocks)
        for request in world.running:
            right_reserve(request.blocks, request.computed, world.free, world.size)
        world.max_running = len(world.running) + draw.randint(0, 2)
        world.budget = world.max_running + draw.choice((0, 2, 6, 40))
        yield world


def package(world: World) -> tuple[Scheduler, dict[Request, Request]]:
    """The package's scheduler in the same state, and whose twin each of its requests is."""
    slots = BlockSlots(world.max_running, 400, world.n_blocks * world.size, world.size)
    theirs = Scheduler(slots, world.max_running, world.budget)
    original = {}
    for request in world.everyone:
        twin = half_done(len(request.prompt), request.n_output)
        original[twin] = request
        theirs.waiting.add(twin)
        if request in world.running:
            theirs.waiting.remove(twin)
            theirs.running.append(twin)
            twin.computed = request.computed
            slots.reserve(twin, 0)
    return theirs, original


def must_match(work: Work, world: World) -> None:
    theirs, original = package(world)
    right = [(original[r], n) for r, n in theirs.schedule()]
    ran = list(world.running)
    plan, words = checked_step(work, world)
    got = dict(plan)
    if got != dict(right):
        cause = ""
        if away := [world.names[r] for r in ran if r not in world.running]:
            if any(0 < got.get(r, 0) < n for r, n in right):
                cause = (
                    f". {' and '.join(away)} gave way: what was given goes back to what is left; then ask for n anew: "
                    "min(pending, left) has grown"
                )
        raise Wrong(f"{words}:\nexpected {world.plan_words(right)}; got {world.plan_words(plan)}{cause}")
    runs = [original[r] for r in theirs.running]
    if world.running != runs:
        raise Wrong(f"{words}:\nthen {world.line(runs)} must run; it is {world.line(world.running)}")


@holds(
    "09",
    "schedule",
    "who is sent away after it was planned is out of the plan, and its tokens go back to the budget",
    hint="take whoever `preempt` returns out of the plan, and add what it had been given to what is left; then ask for "
    "n anew: min(pending, left) has grown.",
    uses=PARTS,
)
@cause_first
def out_of_the_plan(work: Work) -> None:
    a, b = holding(half_done(12, computed=4), [0]), holding(decoding(4, 1), [1])
    # B is single and comes first: it takes the last block. Then A needs two, and B has two
    must_match(work, World([a, b], [a, b], deque(), [2], 4, 3, 8, 2))
    for world in half_way(14, 200):
        must_match(work, world)


@holds(
    "09",
    "schedule",
    "in every step: nobody without room, no block lost or twice, each holds just what it needs, the budget is kept",
    hint="if one holds too much: reserve computed + n, no more. If a block is lost: only reserve, release and preempt "
    "touch `free`.",
    uses=PARTS,
)
@cause_first
def every_step(work: Work) -> None:
    draw = seeds.rng(11)
    for _ in range(40):
        world, want = world_of(draw)
        for _ in range(MOST_STEPS):
            if not world.running and not world.waiting:
                break
            plan, words = checked_step(work, world)
            made = f"{words}:\nthe plan is {world.plan_words(plan)}"
            if (total := sum(n for _, n in plan)) > world.budget:
                raise Wrong(f"{made}: {total} tokens, and the budget is {world.budget}")
            if len(world.running) > world.max_running:
                raise Wrong(f"{made}: {len(world.running)} run then, and at most {world.max_running} may")
            found = sorted([*world.free, *(b for r in world.everyone for b in r.blocks)])
            if found != list(range(world.n_blocks)):
                raise Wrong(f"{made}, and then {missing(found, world.n_blocks)}")
            given = dict(plan)
            for r in world.everyone:
                need = right_blocks(r.computed + given.get(r, 0), world.size) if r in world.running else 0
                if len(r.blocks) != need:
                    state = "runs" if r in world.running else "does not run"
                    raise Wrong(
                        f"{made}: {world.names[r]} {state}, and holds {blocks_of(len(r.blocks))} then; it needs {need}"
                    )
            advance(world, plan, want)


@holds(
    "09",
    "schedule",
    "the oldest is never sent away, and nobody overtakes: running and then waiting are in the order of arrival",
    hint="if somebody overtakes: newcomers leave `waiting` at its left end, one after the other; if the first may not "
    "enter, nobody does.",
    uses=PARTS,
)
@cause_first
def in_order(work: Work) -> None:
    draw = seeds.rng(12)
    for _ in range(40):
        world, want = world_of(draw)
        for _ in range(MOST_STEPS):
            if not world.running and not world.waiting:
                break
            oldest = world.running[0] if world.running else None
            plan, words = checked_step(work, world)
            now = [*world.running, *world.waiting]
            if oldest is not None and oldest not in world.running:
                raise Wrong(f"{words}:\n{world.names[oldest]}, the oldest, was sent away: so nobody need ever end")
            if now != [r for r in world.everyone if r in now]:
                raise Wrong(
                    f"{words}:\nthen running is {', '.join(world.names[r] for r in world.running)} and waiting "
                    f"{', '.join(world.names[r] for r in world.waiting) or 'nobody'}; both together must be in the "
                    "order of arrival"
                )
            advance(world, plan, want)


@holds(
    "09",
    "schedule",
    "two prompts of 60 % of the memory do not chase each other out: the second waits until it has room",
    hint="if B joins too early: ask may_enter; its first piece may fit where the whole of it does not.",
    uses=PARTS,
)
@cause_first
def no_chase(work: Work) -> None:
    world = small_world((12, 12), 5, 4, 2)
    want = dict.fromkeys(world.everyone, 2)
    a, b = world.everyone
    for step in range(1, 10):
        plan, words = checked_step(work, world)
        if b in world.running and a in world.running:
            raise Wrong(f"step {step}, {words}:\nB runs beside A, and five blocks are too few for both")
        advance(world, plan, want)
    if world.running or world.waiting:
        raise Wrong(f"{world}:\nafter 9 steps both should have ended")


@holds(
    "09",
    "schedule",
    "step by step what the package's scheduler plans over its BlockSlots, and everybody comes to an end",
    hint="if there is less in the plan than expected: newcomers join while budget is left, and each running one gets "
    "min(pending, left).",
    uses=PARTS,
)
@cause_first
def as_the_package(work: Work) -> None:
    draw = seeds.rng(13)
    for _ in range(60):
        world, want = world_of(draw)
        twins = [
            make_request(r.prompt, SamplingParams(max_tokens=want[r], seed=0, ignore_eos=True), TINY, None, 200)
            for r in world.everyone
        ]
        slots = BlockSlots(world.max_running, 200, world.n_blocks * world.size, world.size)
        theirs = Scheduler(slots, world.max_running, world.budget)
        for twin in twins:
            theirs.waiting.add(twin)
        original = dict(zip(twins, world.everyone, strict=True))
        step = 0
        while theirs.busy:
            step += 1
            expected = theirs.schedule()
            plan, words = checked_step(work, world)
            right = {original[r]: n for r, n in expected}
            if dict(plan) != right:
                raise Wrong(
                    f"step {step}, {words}:\nexpected {world.plan_words(list(right.items()))}; got "
                    f"{world.plan_words(plan)}"
                )
            theirs.update(expected, {r: (4, None) for r, n in expected if n == r.pending})
            advance(world, plan, want)
        if world.running or world.waiting:
            raise Wrong(f"{world}:\nall should have ended by now")


# ---- with a model


@dataclass(frozen=True)
class Tight(Story):
    n_blocks: int
    size: int

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.n_blocks} blocks of {self.size}"


@seeds.cache
def tight_stories(n: int) -> list[Tight]:
    draw = seeds.rng(21)

    def text() -> Text:
        prompt = tuple(draw.randrange(10, 64) for _ in range(draw.choice((1, 3, 6, 7, 7, 12))))
        stops = tuple(range(2, 2 + draw.randint(0, 4)))  # so that texts end at any time
        temperature = draw.choice((0.0, 1.0))
        return Text(
            prompt, SamplingParams(draw.randint(1, 8), temperature, seed=draw.randrange(1000), stop_token_ids=stops)
        )

    six = [Text(tuple(range(10 + i, 16 + i)), SamplingParams(8, seed=0, ignore_eos=True)) for i in (0, 7)]
    made = [Tight(tuple(six), 16, 2, 6, 4)]  # 13 positions each, so four blocks: six are too few for both at their end
    for _ in range(n):
        texts, most, size = tuple(text() for _ in range(draw.randint(3, 6))), draw.randint(2, 4), draw.choice(SIZES[:5])
        least = max(right_blocks(len(t.prompt) + t.params.max_tokens - 1, size) for t in texts)
        made.append(Tight(texts, most + draw.choice((0, 1, 3, 30)), most, least + draw.choice((0, 0, 1, 3)), size))
    return made


def serve(work: Work, watched: Watched, story: Tight) -> None:
    """The loop of the lesson around the learner's functions."""
    requests = watched.requests
    world = World(requests, [], deque(requests), [], story.size, story.n_blocks, story.budget, story.max_running)
    world.free += range(story.n_blocks)
    pool = KVPool(model(), story.n_blocks * story.size, story.max_running, story.n_blocks * story.size)
    while world.running or world.waiting:
        plan, words = checked_step(work, world)
        if not plan or len(world.running) > story.max_running:
            raise Wrong(f"{words}:\nthe plan is {world.plan_words(plan)}; {len(world.running)} run then")
        for request in world.waiting:
            request.slots = ()
        for row, request in enumerate(world.running):
            request.row, request.entered = row, 0
        for request, n in plan:
            request.slots = work.call("slots_of", request.blocks, 0, request.computed + n, story.size)
        batch = pack(plan, pool)
        hidden = watched(batch.tokens, batch.positions, GatherAttend(pool, batch))
        tokens = [token for token, _ in sample(watched.logits(hidden[batch.last]), batch.samples)]
        for request, n in plan:
            request.computed += n
        for request, token in zip(batch.samples, tokens, strict=True):
            request.accept(token)
        for request in [r for r in world.running if r.finish_reason is not None]:
            world.running.remove(request)
            work.call("release", request.blocks, world.free, changes=(0, 1))
            request.row = None


def right_slots(table: list[int], start: int, stop: int, size: int) -> list[int]:
    return [table[p // size] * size + p % size for p in range(start, stop)]


@holds(
    "09",
    "schedule",
    "with a model: every token is the naive stage's, though memory is short and every free slot holds NaN",
    hint="if a token differs: who comes back computes prompt and output again, from position 0.",
    uses={**PARTS, "slots_of": right_slots},
)
@cause_first
def every_token_is_naive(work: Work) -> None:
    for story in tight_stories(14):
        requests = story.requests()
        watched = Watched(requests, poison=True)
        watched.most *= 4  # who is sent away needs more steps
        serve(work, watched, story)
        same_texts(story, requests)
