"""Lesson 00: the roofline of a step, in bytes and operations. Every number here can be checked by hand."""

import builtins
import dis
from types import FunctionType, ModuleType
from typing import Any

from minillm.bench import ceiling
from minillm.bench.ceiling import Ceilings
from minillm.bench.harness import Step
from minillm.config import Config
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same

ENDLESS = 1e30  # a machine that never has to wait for this


def small(**changes: Any) -> Config:
    """A model whose numbers are all different, so that none can stand in for another."""
    sizes: dict[str, Any] = dict(vocab_size=500, d_model=48, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, d_ff=80)
    return Config(**(sizes | changes), norm_eps=1e-5, rope_theta=10000.0, context=4096, tied=True)


def weights(config: Config) -> int:
    return ceiling.layer_weights(config) + config.vocab_size * config.d_model


def expected(batch: int, context: int, config: Config, itemsize: int, bytes_per_s: float, flops_per_s: float) -> float:
    """Tokens per second, by the package's own floor of the step that the harness would have counted."""
    step = Step(
        tokens=batch,
        rows=batch,
        scores=batch * context * config.n_layers * config.n_heads,
        kv_bytes=batch * context * config.kv_bytes_per_token(itemsize),
    )
    machine = Ceilings(bytes_per_s, bytes_per_s, flops_per_s)
    return batch / ceiling.floor_seconds([step], config, itemsize, machine)


def right_floor(weight_bytes: float, kv_bytes: float, flops: float, bytes_per_s: float, flops_per_s: float) -> float:
    return max((weight_bytes + kv_bytes) / bytes_per_s, flops / flops_per_s)


PARTS = {"floor_seconds": right_floor}


def borrowed(work: Work, name: str) -> list[str]:
    """Global names that a function reads which are no functions, classes or modules: they come from the notebook."""
    function = work.function(name)
    if not isinstance(function, FunctionType):
        return []
    read = {str(step.argval) for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
    own = {each for each in read if not hasattr(builtins, each)}
    return sorted(each for each in own if not isinstance(work.names.get(each), FunctionType | type | ModuleType))


def one_text_of(itemsize: int) -> str:
    return f"tokens/s of one text at 1 MB/s, {weights(small()):,} weights of {itemsize} bytes each"


def same_ceiling(work: Work, right: float, what: str, *args: Any) -> None:
    """decode_ceiling(*args); a wrong one that reads names of the notebook is told so, by the simplest example."""

    def ask(right: float, what: str, *args: Any) -> Wrong | None:
        try:
            same(work.call("decode_ceiling", *args), right, what)
        except Wrong as wrong:
            return wrong
        return None

    wrong = ask(right, what, *args)
    if wrong is None:
        return
    names = borrowed(work, "decode_ceiling")
    if not names:
        raise wrong
    wrong = ask(1e6 / (2 * weights(small())), one_text_of(2), 1, 0, small(), 2, 1e6, ENDLESS) or wrong
    told = f"did you use a name of the notebook, {' or '.join(names)}, in place of an argument?"
    raise Wrong(f"{wrong}\n{told}\nHere the model and the machine are others, and small.") from wrong.__cause__


# ---- floor_seconds


@holds(
    "00",
    "floor_seconds",
    "with nothing to multiply, a step takes bytes / bandwidth",
    hint="seconds are bytes divided by bytes per second, not the other way round",
)
def moving(work: Work) -> None:
    got = work.call("floor_seconds", 600, 0, 0, 100.0, 50.0)
    same(got, 6.0, "seconds for 600 bytes of weights at 100 bytes/s")


@holds(
    "00",
    "floor_seconds",
    "weights and K/V both have to be moved",
    hint="both kinds of bytes come through the same memory: add them before you divide",
)
def both_are_moved(work: Work) -> None:
    same(work.call("floor_seconds", 0, 700, 0, 100.0, 50.0), 7.0, "seconds for 700 bytes of K and V at 100 bytes/s")
    got = work.call("floor_seconds", 600, 700, 0, 100.0, 50.0)
    same(got, 13.0, "seconds for 600 bytes of weights and 700 bytes of K and V at 100 bytes/s")


@holds(
    "00",
    "floor_seconds",
    "with nothing to move, a step takes operations / operations per second",
    hint="divide flops by flops_per_s; the bandwidth has no part in it",
)
def multiplying(work: Work) -> None:
    got = work.call("floor_seconds", 0, 0, 900, 100.0, 50.0)
    same(got, 18.0, "seconds for 900 operations at 50 operations/s")


@holds(
    "00",
    "floor_seconds",
    "moving and multiplying overlap: the longer one counts, alone",
    hint="a floor is the least time, with both going on at once: max, neither sum nor min",
)
def the_longer_one(work: Work) -> None:
    got = work.call("floor_seconds", 600, 200, 100, 100.0, 50.0)
    same(got, 8.0, "seconds where moving takes 8 s and multiplying 2 s")
    got = work.call("floor_seconds", 600, 200, 1000, 100.0, 50.0)
    same(got, 20.0, "seconds where moving takes 8 s and multiplying 20 s")
    draw = seeds.rng(0)
    for _ in range(200):
        weight_bytes, kv_bytes, flops = (draw.randrange(1, 10**6) for _ in range(3))
        bytes_per_s, flops_per_s = draw.uniform(1, 100), draw.uniform(1, 100)
        moved, multiplied = (weight_bytes + kv_bytes) / bytes_per_s, flops / flops_per_s
        got = work.call("floor_seconds", weight_bytes, kv_bytes, flops, bytes_per_s, flops_per_s)
        same(
            got, max(moved, multiplied), f"seconds where moving takes {moved:.1f} s and multiplying {multiplied:.1f} s"
        )


# ---- decode_ceiling


@holds(
    "00",
    "decode_ceiling",
    "one text, where memory is slow: each token reads every weight once",
    hint="the weights are those of the layers and of the head, times itemsize; one text makes one token per step",
    uses=PARTS,
)
def one_text(work: Work) -> None:
    config = small()
    for itemsize in (2, 4):
        case = 1, 0, config, itemsize, 1e6, ENDLESS
        same_ceiling(work, 1e6 / (itemsize * weights(config)), one_text_of(itemsize), *case)


@holds(
    "00",
    "decode_ceiling",
    "where memory is slow, B texts share one reading of the weights",
    hint="the weights are read once per step, whatever B is; and a step of B texts makes B tokens",
    uses=PARTS,
)
def weights_are_shared(work: Work) -> None:
    config = small()
    one = 1e6 / (2 * weights(config))
    for batch in (2, 8, 32):
        what = f"tokens/s at B = {batch}, without K and V, where one text has {one:.4g}"
        same_ceiling(work, batch * one, what, batch, 0, config, 2, 1e6, ENDLESS)


@holds(
    "00",
    "decode_ceiling",
    "where arithmetic is slow, a larger batch buys nothing",
    hint="every text needs its own multiplications: 2 operations for each weight, times B",
    uses=PARTS,
)
def arithmetic_is_not_shared(work: Work) -> None:
    config = small()
    right = 1e6 / (2 * weights(config))
    for batch in (1, 8, 32):
        what = f"tokens/s at B = {batch}, without K and V at 1 M operations/s"
        same_ceiling(work, right, what, batch, 0, config, 2, ENDLESS, 1e6)


@holds(
    "00",
    "decode_ceiling",
    "every text reads the K and V of its own context",
    hint="K and V are not shared: each of the B texts reads those of all its positions. Of one position, config says "
    "how many bytes they have",
    uses=PARTS,
)
def own_keys_and_values(work: Work) -> None:
    for config in (small(), small(n_kv_heads=6), small(n_kv_heads=1)):
        for batch, context in ((1, 1000), (8, 1000), (8, 2000)):
            case = batch, context, config, 2, 1e6, ENDLESS
            what = f"tokens/s at B = {batch}, S = {context} with Hkv = {config.n_kv_heads}, memory slow"
            same_ceiling(work, expected(*case), what, *case)


@holds(
    "00",
    "decode_ceiling",
    "attention multiplies too: 4 D operations for each score",
    hint="scores per token: context in each of L layers and H query heads; D multiplications and D additions for q k^T "
    "and as many for the sum over v",
    uses=PARTS,
)
def scores_are_multiplied(work: Work) -> None:
    for config in (small(), small(n_layers=5), small(n_heads=2)):
        for batch, context in ((1, 1000), (4, 3000)):
            case = batch, context, config, 2, ENDLESS, 1e6
            what = f"tokens/s at B = {batch}, S = {context} with L = {config.n_layers}, H = {config.n_heads}, "
            same_ceiling(work, expected(*case), what + "arithmetic slow", *case)


@holds(
    "00",
    "decode_ceiling",
    "any model on any machine: equal to the bench's own floor",
    hint="call your floor_seconds with all of a step's bytes and operations, then divide the batch by it",
    uses=PARTS,
)
def any_model(work: Work) -> None:
    draw = seeds.rng(1)
    for _ in range(100):
        n_kv_heads = draw.randint(1, 4)
        config = small(
            vocab_size=draw.randint(10, 5000),
            d_model=draw.randint(8, 200),
            n_layers=draw.randint(1, 9),
            n_heads=n_kv_heads * draw.randint(1, 4),
            n_kv_heads=n_kv_heads,
            head_dim=2 * draw.randint(4, 40),
            d_ff=draw.randint(8, 400),
        )
        batch, context, itemsize = draw.randint(1, 128), draw.randint(0, 4096), draw.choice((1, 2, 4))
        machine = draw.uniform(1e5, 1e7), draw.uniform(1e5, 1e8)
        what = f"tokens/s at B = {batch}, S = {context} at {itemsize} bytes a number ({config})"
        right = expected(batch, context, config, itemsize, *machine)
        same_ceiling(work, right, what, batch, context, config, itemsize, *machine)


# ---- balance_batch


@holds(
    "00",
    "balance_batch",
    "at this batch, moving the weights takes exactly as long as multiplying with them",
    hint="set itemsize * W / bytes_per_s equal to 2 * W * B / flops_per_s and solve for B: W falls out",
)
def balanced(work: Work) -> None:
    same(
        work.call("balance_batch", 2, 100.0, 2000.0), 20.0, "B at 2 bytes a weight, 100 bytes/s and 2,000 operations/s"
    )
    draw = seeds.rng(2)
    for _ in range(100):
        itemsize, bytes_per_s, flops_per_s = draw.choice((1, 2, 4)), draw.uniform(1, 100), draw.uniform(1000, 100000)
        batch = work.call("balance_batch", itemsize, bytes_per_s, flops_per_s)
        same(batch, itemsize * flops_per_s / (2 * bytes_per_s), f"B at {itemsize} bytes a weight")


@holds(
    "00",
    "balance_batch",
    "wider numbers and slower memory need a larger batch, faster arithmetic too",
    hint="check which of the three is above and which below the fraction's line",
)
def directions(work: Work) -> None:
    usual = work.call("balance_batch", 2, 100.0, 2000.0)
    same(work.call("balance_batch", 4, 100.0, 2000.0), 2 * usual, "B at 4 bytes a weight, which was doubled")
    same(work.call("balance_batch", 2, 50.0, 2000.0), 2 * usual, "B at half the bandwidth, which was doubled")
    same(work.call("balance_batch", 2, 100.0, 4000.0), 2 * usual, "B at twice the arithmetic, which was doubled")
