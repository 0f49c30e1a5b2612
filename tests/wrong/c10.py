"""What people write for lesson 10 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

KEYS = """
def block_keys(tokens, size):
    keys = []
    key = None
    for i in range({stop}):
        own = tuple(tokens[i * size : (i + 1) * size])
        key = {key}
        keys.append(key)
    return {result}
"""
FIND = """
def find(index, tokens, size):
    found = []
    for key in {keys}:
        if key not in index:
            {missing}
        found.append(index[key])
    return {result}
"""
TAKE = """
def take(memory):
    {block}
    {count}
    {forget}
    return block
"""
HOLD = """
def hold(memory, blocks):
    for block in blocks:
        {count}
        {free}
    return {result}
"""
GIVE_BACK = """
def give_back(memory, table):
    for block in {order}:
        {count}
        if {empty}:
            {free}
"""
PUBLISH = """
def publish(memory, table, tokens, computed):
    for key, block in zip(block_keys({tokens}, memory.size), table):
        if {new}:
            {index}
            {key_of}
"""
COPY = """
def copy_on_write(memory, table, position):
    size, i = memory.size, {i}
    if {alone}:
        return []
    old = table[i]
    new = {new}
    {count}
    {table}
    return {moves}
"""


def block_keys(stop: str = "len(tokens) // size", key: str = "(key, own)", result: str = "keys") -> str:
    return KEYS.format(stop=stop, key=key, result=result)


def find(
    keys: str = "block_keys(tokens, size)[: (len(tokens) - 1) // size]", missing: str = "break", result: str = "found"
) -> str:
    return FIND.format(keys=keys, missing=missing, result=result)


def take(
    block: str = "block, _ = memory.free.popitem(last=False)",
    count: str = "memory.owners[block] = 1",
    forget: str = "memory.index.pop(memory.key_of.pop(block, None), None)",
) -> str:
    return TAKE.format(block=block, count=count, forget=forget)


def hold(
    count: str = "memory.owners[block] += 1", free: str = "memory.free.pop(block, None)", result: str = "list(blocks)"
) -> str:
    return HOLD.format(count=count, free=free, result=result)


def give_back(
    order: str = "reversed(table)",
    count: str = "memory.owners[block] -= 1",
    empty: str = "memory.owners[block] == 0",
    free: str = "memory.free[block] = None",
) -> str:
    return GIVE_BACK.format(order=order, count=count, empty=empty, free=free)


def publish(
    tokens: str = "tokens[:computed]",
    new: str = "key not in memory.index",
    index: str = "memory.index[key] = block",
    key_of: str = "memory.key_of[block] = key",
) -> str:
    return PUBLISH.format(tokens=tokens, new=new, index=index, key_of=key_of)


def copy_on_write(
    i: str = "position // memory.size",
    alone: str = "i >= len(table) or memory.owners[table[i]] == 1",
    new: str = "take(memory)",
    count: str = "memory.owners[old] -= 1",
    table: str = "table[i] = new",
    moves: str = "[(old * size + j, new * size + j) for j in range(position % size)]",
) -> str:
    return COPY.format(i=i, alone=alone, new=new, count=count, table=table, moves=moves)


WRONG = [
    # ---- block_keys
    Mutant("hash not chained: own tokens alone", block_keys(key="own"), "both hold [9, 9]"),
    Mutant("own tokens and the place: the same tokens after another beginning", block_keys(key="(i, own)"), "one key"),
    Mutant(
        "own tokens and those of the block before, no further",
        block_keys(key="(own, keys[-1][0] if keys else None)"),
        "one key",
    ),
    Mutant("the hash alone is compared", block_keys(key="hash((key, own))"), "that all have the hash 0"),
    Mutant(
        "the hash of what came before, and own tokens", block_keys(key="(hash(key), own)"), "that all have the hash 0"
    ),
    Mutant("the order of tokens is lost", block_keys(key="(key, frozenset(own))"), "one key"),
    Mutant("keys are lists", block_keys(key="[key, own]"), "cannot stand in a dictionary"),
    Mutant(
        "a key for the last block too, though it is not full",
        block_keys(stop="-(-len(tokens) // size)"),
        "keys, one per full block",
    ),
    Mutant("the last full block has none", block_keys(stop="(len(tokens) - 1) // size"), "keys, one per full block"),
    Mutant("a new object for each key", block_keys(key="(key, own, object())"), "the keys are not equal"),
    Mutant("only the last key is returned", block_keys(result="key"), "is None: is a `return` missing?"),
    # ---- find
    Mutant("the whole text found", find(keys="block_keys(tokens, size)"), "which is the whole text"),
    Mutant(
        "one block less than may be found",
        find(keys="block_keys(tokens, size)[: len(tokens) // size - 1]"),
        "all known: expected",
    ),
    Mutant("a gap is passed over", find(missing="continue"), "and all others are: expected"),
    Mutant(
        "block 0 taken for nothing",
        find().replace("key not in index", "not index.get(key)"),
        "block 0 is a block like any other",
    ),
    Mutant("all or nothing", find(missing="return []"), "and all others are: expected"),
    Mutant("returns how many tokens", find(result="len(found) * size"), "it must return a list of block numbers"),
    Mutant("returns keys", find().replace("index[key])", "key)"), "it must return a list of block numbers"),
    Mutant(
        "own tokens are looked for",
        find(keys="[tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size, size)]"),
        "all known: expected",
    ),
    # ---- take
    Mutant("entry kept after reuse", take(forget="pass"), "can still be found under its old key"),
    Mutant(
        "entry kept in the index alone",
        take(forget="memory.key_of.pop(block, None)"),
        "can still be found under its old key",
    ),
    Mutant(
        "entry kept in key_of alone",
        take(forget="memory.index.pop(memory.key_of.get(block), None)"),
        "can still be found under its old key",
    ),
    Mutant(
        "all entries are forgotten", take(forget="memory.index.clear(); memory.key_of.clear()"), "memory.index must be"
    ),
    Mutant(
        "only blocks with an entry can be taken",
        take(forget="del memory.index[memory.key_of.pop(block)]"),
        "take raised KeyError",
    ),
    Mutant("count starts at 0", take(count="pass"), "is its one owner"),
    Mutant(
        "the last given back is taken first",
        take(block="block, _ = memory.free.popitem()"),
        "the first of the free ones",
    ),
    Mutant("taken, and still free", take(block="block = next(iter(memory.free))"), "still in memory.free"),
    Mutant("take returns nothing", take().replace("return block", "pass"), "take returned None"),
    # ---- hold
    Mutant("found blocks stay free", hold(free="pass"), "held and still in memory.free"),
    Mutant("found blocks are not counted", hold(count="pass"), "the owners of block"),
    Mutant("one owner, however many there were", hold(count="memory.owners[block] = 1"), "the owners of block"),
    Mutant("only resting blocks can be found", hold(free="del memory.free[block]"), "hold raised KeyError"),
    Mutant(
        "what is held can no longer be found",
        hold(free="memory.free.pop(block, None); memory.index.pop(memory.key_of.pop(block, None), None)"),
        "memory.index must be",
    ),
    Mutant("two texts with one table", hold(result="blocks"), "the very list it was given"),
    Mutant("hold returns nothing", hold(result="None"), "hold returned None"),
    # ---- give_back
    Mutant("head evicted before tail", give_back(order="table"), "the end of the text first"),
    Mutant("freed though others hold it", give_back(empty="True"), "more tables hold it"),
    Mutant("freed twice: counted down twice", give_back(count="memory.owners[block] -= 2"), "owners"),
    Mutant("count set to 0, whoever else holds it", give_back(count="memory.owners[block] = 0"), "more tables hold it"),
    Mutant(
        "never free again: the last owner is overlooked",
        give_back(empty="memory.owners[block] < 0"),
        "it is lost for ever",
    ),
    Mutant("asked before it is counted", give_back(empty="memory.owners[block] + 1 == 0"), "it is lost for ever"),
    Mutant(
        "what is given back is taken first",
        give_back(free="memory.free[block] = None; memory.free.move_to_end(block, last=False)"),
        "the end of the text first",
    ),
    Mutant(
        "what is given back can no longer be found",
        give_back(free="memory.free[block] = None; memory.index.pop(memory.key_of.pop(block, None), None)"),
        "memory.index must be",
    ),
    # ---- publish
    Mutant("published at allocation", publish(tokens="tokens"), "not all computed"),
    Mutant("published one token early", publish(tokens="tokens[: computed + 1]"), "not all computed"),
    Mutant(
        "published a block late", publish(tokens="tokens[: max(0, computed - 1)]"), "must be found under their keys"
    ),
    Mutant("the newer of two equal blocks takes the entry", publish(new="True"), "block 4 must stay"),
    Mutant(
        "the second of two equal blocks has half an entry",
        publish(new="memory.index.setdefault(key, block)", index="pass"),
        "block 4 must stay",
    ),
    Mutant("index alone is written", publish(key_of="pass"), "must be found under their keys"),
    Mutant("the table backwards", publish().replace("table):", "table[::-1]):"), "not all computed"),
    # ---- copy_on_write
    Mutant("shared block written", copy_on_write(alone="True"), "the others would read its K and V"),
    Mutant("copy forgotten", copy_on_write(moves="[]"), "are to be copied"),
    Mutant(
        "the whole block is copied",
        copy_on_write(moves="[(old * size + j, new * size + j) for j in range(size)]"),
        "moves",
    ),
    Mutant(
        "copied the wrong way",
        copy_on_write(moves="[(new * size + j, old * size + j) for j in range(position % size)]"),
        "are to be copied",
    ),
    Mutant(
        "positions in place of slots",
        copy_on_write(moves="[(j, j) for j in range(i * size, position)]"),
        "are to be copied",
    ),
    Mutant("the old block keeps the owner that left", copy_on_write(count="pass"), "those of block 2 must be 1"),
    Mutant("the copy is not in the table", copy_on_write(table="pass"), "is still"),
    Mutant("the copy comes at the end of the table", copy_on_write(table="table.append(new)"), "the table must become"),
    Mutant(
        "always the last block",
        copy_on_write(i="len(table) - 1", alone="memory.owners[table[i]] == 1"),
        "nothing is to be copied",
    ),
    Mutant("copied even if nobody else holds it", copy_on_write(alone="i >= len(table)"), "nothing is to be copied"),
    Mutant(
        "a new block is not in the table yet",
        copy_on_write(alone="memory.owners[table[i]] == 1"),
        "copy_on_write raised IndexError",
    ),
    Mutant(
        "copied into the next free block, which stays free",
        copy_on_write(new="next(iter(memory.free))"),
        "those of block 2 must be 1",
    ),
    # ---- together
    Mutant("a wrong key: neither find's nor the whole's fault", block_keys(key="own"), "mend block_keys first"),
    Mutant("a wrong take: not copy_on_write's fault", take(forget="pass"), "mend take first"),
]
