"""What people write for lesson 12 that is wrong."""

from wrong import Mutant

# each function in parts, of which a learner gets one wrong

STEP_FLOOR = """
def step_floor(config, rows, contexts, bytes_per_s, flops_per_s):
    W = {W}
    S = {S}
    moved = {moved}
    operations = {operations}
    return {result}
"""
RUN_QUEUE = """
def run_queue(kernels, launch):
    times = []
    free = 0.0
    for i, seconds in enumerate(kernels):
        begin = {begin}
        free = {free}
        times.append({entry})
    return {result}
"""
ATTEND = """
def attend_static(pool, static, layer, q, k, v):
    {store}
    {gather}
    mask = attention.visible({q_pos}, {k_pos})
    return {result}
"""
FILL = """
def fill(static, rows, scratch):
    B, S = static.table.shape
    every = {every}
    n = len(every)
    {tokens}
    {positions}
    {slots}
    {table}
"""
DECODE = """
def decode(graphs, rows, scratch, eager):
    size = {size}
    if size is None:
        {none}
    graph = graphs[size]
    {fill}
    {replay}
    return {result}
"""
OVERLAPPED = """
def overlapped(host, device):
    planned = 0.0
    done = [0.0, 0.0]
    for plan, run in zip(host, device):
        planned = {planned}
        done.append({done})
    return {result}
"""
RUN_AHEAD = """
def run_ahead(device, firsts, stop, max_tokens):
    outputs = {{name: [] for name in firsts}}
    ended = set()
    thrown = 0
    device.start({first})
    running = list(firsts)
    while running:
        {start}
        for name, token in device.finish().items():
            {arrives}
            outputs[name].append(token)
            if token == stop:
                ended.add(name)
        running = following
    return {result}
"""


def step_floor(
    W: str = "weights_read(config)",
    S: str = "sum(contexts)",
    moved: str = "2 * W + config.kv_bytes_per_token(2) * S",
    operations: str = "2 * W * rows + 4 * config.n_layers * config.n_heads * config.head_dim * S",
    result: str = "max(moved / bytes_per_s, operations / flops_per_s)",
) -> str:
    return STEP_FLOOR.format(W=W, S=S, moved=moved, operations=operations, result=result)


def run_queue(
    begin: str = "max((i + 1) * launch, free)",
    free: str = "begin + seconds",
    entry: str = "(begin, free)",
    result: str = "times",
) -> str:
    return RUN_QUEUE.format(begin=begin, free=free, entry=entry, result=result)


def bucket(body: str) -> str:
    return f"\ndef bucket(n, sizes):\n    {body}\n"


def attend_static(
    store: str = "pool.store(layer, static.slots, k, v)",
    gather: str = "k, v = pool.gather(layer, pool.index(static.table))",
    q_pos: str = "static.positions[:, None]",
    k_pos: str = "torch.arange(static.table.shape[1], device=q.device)",
    result: str = "attention.sdpa(q[:, None], k, v, mask)[:, 0]",
) -> str:
    return ATTEND.format(store=store, gather=gather, q_pos=q_pos, k_pos=k_pos, result=result)


def fill(
    every: str = "rows + [Row(0, [scratch])] * (B - len(rows))",
    tokens: str = "static.tokens[:n] = torch.tensor([row.token for row in every])",
    positions: str = "static.positions[:n] = torch.tensor([len(row.slots) - 1 for row in every])",
    slots: str = "static.slots[:n] = torch.tensor([row.slots[-1] for row in every])",
    table: str = "static.table[:n] = torch.tensor([row.slots + row.slots[:1] * (S - len(row.slots)) for row in every])",
) -> str:
    return FILL.format(every=every, tokens=tokens, positions=positions, slots=slots, table=table)


def decode(
    size: str = "bucket(len(rows), list(graphs))",
    none: str = "return eager(rows)",
    fill: str = "fill(graph.static, rows, scratch)",
    replay: str = "graph.replay()",
    result: str = "graph.output[: len(rows)].tolist()",
) -> str:
    return DECODE.format(size=size, none=none, fill=fill, replay=replay, result=result)


def overlapped(
    planned: str = "max(planned, done[-2]) + plan",
    done: str = "max(planned, done[-1]) + run",
    result: str = "(sum(host) + sum(device), done[-1])",
) -> str:
    return OVERLAPPED.format(planned=planned, done=done, result=result)


GOES_ON = "[name for name in running if name not in ended and len(outputs[name]) + 1 < max_tokens]"
START = """following = {following}
        if following:
            device.start({{name: {token} for name in following}})"""
ARRIVES = """if name in ended:
                thrown += 1
                continue"""


def run_ahead(
    first: str = "firsts",
    following: str = GOES_ON,
    token: str = "LAST",
    arrives: str = ARRIVES,
    result: str = "(outputs, thrown)",
) -> str:
    start = START.format(following=following, token=token)
    return RUN_AHEAD.format(first=first, start=start, arrives=arrives, result=result)


WAITS_FIRST = """
def run_ahead(device, firsts, stop, max_tokens):
    outputs = {name: [] for name in firsts}
    rows = dict(firsts)
    while rows:
        device.start(rows)
        rows = {}
        for name, token in device.finish().items():
            outputs[name].append(token)
            if token != stop and len(outputs[name]) < max_tokens:
                rows[name] = token
    return outputs, 0
"""
NO_ROOM = """
def fill(static, rows, scratch):
    B, S = static.table.shape
    while len(rows) < B:
        rows.append(Row(0, [scratch]))
    static.tokens.copy_(torch.tensor([row.token for row in rows]))
    static.positions.copy_(torch.tensor([len(row.slots) - 1 for row in rows]))
    static.slots.copy_(torch.tensor([row.slots[-1] for row in rows]))
    static.table.copy_(torch.tensor([row.slots + row.slots[:1] * (S - len(row.slots)) for row in rows]))
"""
LOCKSTEP = """
def overlapped(host, device):
    return sum(host) + sum(device), {together}
"""

WRONG = [
    # ---- step_floor
    Mutant(
        "weights read once for each row",
        step_floor(moved="2 * W * rows + config.kv_bytes_per_token(2) * S"),
        "one read serves all rows",
    ),
    Mutant(
        "both times added up",
        step_floor(result="moved / bytes_per_s + operations / flops_per_s"),
        "they overlap, so the longer one counts",
    ),
    Mutant(
        "the shorter of the two",
        step_floor(result="min(moved / bytes_per_s, operations / flops_per_s)"),
        "which is the time of the arithmetic alone",
    ),
    Mutant("bandwidth only", step_floor(result="moved / bytes_per_s"), "which is the time to read alone"),
    Mutant("no K and V", step_floor(moved="2 * W"), "which is reading without K and V"),
    Mutant(
        "K and V of one layer",
        step_floor(moved="2 * W + config.kv_bytes_per_token(2) * S / config.n_layers"),
        "each layer keeps its own",
    ),
    Mutant(
        "K and V of every query head",
        step_floor(moved="2 * W + 4 * config.n_layers * config.n_heads * config.head_dim * S"),
        "Hkv is smaller",
    ),
    Mutant("the longest context for all", step_floor(S="max(contexts) * rows"), "count the positions that are there"),
    Mutant(
        "numbers, not bytes",
        step_floor(moved="W + config.kv_bytes_per_token(2) * S / 2"),
        "numbers instead of bytes",
    ),
    Mutant("four bytes a number", step_floor(moved="4 * W + config.kv_bytes_per_token(4) * S"), "16 bits are 2"),
    Mutant("the head forgotten", step_floor(W="c12.layer_weights(config)"), "its weights are read and multiplied too"),
    Mutant(
        "one operation for each weight",
        step_floor(operations="W * rows + 4 * config.n_layers * config.n_heads * config.head_dim * S"),
        "a multiplication and an addition are two",
    ),
    Mutant(
        "no arithmetic for attention", step_floor(operations="2 * W * rows"), "which is no arithmetic for attention"
    ),
    Mutant(
        "attention's arithmetic for key heads",
        step_floor(operations="2 * W * rows + 4 * config.n_layers * config.n_kv_heads * config.head_dim * S"),
        "every query head computes its own scores",
    ),
    Mutant(
        "attention's arithmetic for one layer",
        step_floor(operations="2 * W * rows + 4 * config.n_heads * config.head_dim * S"),
        "attention's arithmetic for one layer",
    ),
    Mutant(
        "one product of attention",
        step_floor(operations="2 * W * rows + 2 * config.n_layers * config.n_heads * config.head_dim * S"),
        "are two products",
    ),
    Mutant(
        "arithmetic of live rows only",
        step_floor(operations="2 * W * len(contexts) + 4 * config.n_layers * config.n_heads * config.head_dim * S"),
        "dummy rows go through the Linears too",
    ),
    # ---- run_queue
    Mutant("host and device take turns", run_queue(begin="free + launch"), "it could at"),
    Mutant("device only", run_queue(begin="free"), "the host has handed it over at"),
    Mutant("host only", run_queue(begin="(i + 1) * launch"), "the device runs one after the other"),
    Mutant("the first is handed over at 0", run_queue(begin="max(i * launch, free)"), "the host has handed it over at"),
    Mutant("the later becomes the sooner", run_queue(begin="min((i + 1) * launch, free)"), "handed it over at"),
    Mutant("a launch before each end", run_queue(free="begin + max(seconds, launch)"), "it must end at"),
    Mutant("pairs of begin and duration", run_queue(entry="(begin, seconds)"), "it must end at"),
    Mutant("ends only", run_queue(entry="free"), "a list of (begin, end)"),
    Mutant("the end of the last alone", run_queue(result="free"), "a list of (begin, end)"),
    Mutant(
        "the host waits for each kernel",
        run_queue(begin="max((i + 1) * launch, free + launch)"),
        "it could at",
    ),
    Mutant("run_queue returns nothing", run_queue(result="None"), "is None: is a `return` missing?"),
    # ---- bucket
    Mutant(
        "bucket too small: the next smaller",
        bucket("return max((s for s in sizes if s <= n), default=None)"),
        "which is too small",
    ),
    Mutant("one more row than needed", bucket("return min((s for s in sizes if s > n), default=None)"), "is enough"),
    Mutant("the largest always", bucket("return max(sizes) if sizes and max(sizes) >= n else None"), "is enough"),
    Mutant(
        "the largest where none is enough",
        bucket("return min((s for s in sizes if s >= n), default=max(sizes, default=None))"),
        "so it must be None",
    ),
    Mutant(
        "the first in the list that fits",
        bucket("return next((s for s in sizes if s >= n), None)"),
        "is enough",
    ),
    Mutant("the nearest size", bucket("return min(sizes, key=lambda s: abs(s - n), default=None)"), "too small"),
    Mutant("a power of two, if there is one or not", bucket("return 1 << (n - 1).bit_length()"), "there is no graph"),
    Mutant("its place in the list", bucket("return sum(s < n for s in sorted(sizes))"), "bucket(1, [1, 2, 4, 8]) is 0"),
    Mutant("no default", bucket("return min(s for s in sizes if s >= n)"), "bucket raised ValueError"),
    Mutant("0 in place of None", bucket("return min((s for s in sizes if s >= n), default=0)"), "it must be None"),
    # ---- attend_static
    Mutant(
        "shape from the data: as far as the longest text",
        attend_static(
            gather="S = int(static.positions.max()) + 1; k, v = pool.gather(layer, pool.index(static.table[:, :S]))",
            k_pos="torch.arange(S)",
        ),
        "it cannot be captured",
    ),
    Mutant(
        "one row after the other, each as long as it is",
        attend_static(gather="rows = static.table.tolist(); k, v = pool.gather(layer, pool.index(torch.tensor(rows)))"),
        "tolist asks for a value",
    ),
    Mutant(
        "host value baked in: the length of the capture",
        attend_static(
            gather="k, v = pool.gather(layer, pool.index(static.table[:, :4]))",
            k_pos="torch.arange(4)",
        ),
        "the 3 live rows",
    ),
    Mutant(
        "stored after it is read",
        attend_static(
            store="new = (k, v)",
            gather="k, v = pool.gather(layer, pool.index(static.table)); pool.store(layer, static.slots, *new)",
        ),
        "or at its own before its K and V were stored",
    ),
    Mutant("never stored", attend_static(store="pass"), "or at its own before its K and V were stored"),
    Mutant(
        "stored at the position, not at the slot",
        attend_static(store="pool.store(layer, static.positions, k, v)"),
        "it looked at a slot of nobody",
    ),
    Mutant(
        "no mask: places beyond the text are seen",
        attend_static(q_pos="torch.full_like(static.positions[:, None], 99)"),
        "the 3 live rows",
    ),
    Mutant("the token does not see itself", attend_static(q_pos="static.positions[:, None] - 1"), "the 3 live rows"),
    Mutant(
        "mask by slot numbers",
        attend_static(q_pos="static.slots[:, None]", k_pos="static.table"),
        "the 3 live rows",
    ),
    Mutant(
        "V before it is mixed",
        attend_static(result="attention.sdpa(q[:, None], k, k, mask)[:, 0]"),
        "the 3 live rows",
    ),
    Mutant(
        "an axis too many",
        attend_static(result="attention.sdpa(q[:, None], k, v, mask)"),
        "the shape must be [4, 4, 8]",
    ),
    Mutant(
        "always layer 0",
        attend_static(gather="k, v = pool.gather(0, pool.index(static.table))"),
        "it looked at a slot of nobody",
    ),
    Mutant(
        "a tensor on the CPU, whatever the device",
        attend_static(k_pos="torch.arange(static.table.shape[1])"),
        "with all tensors on another device",
    ),
    Mutant(
        "all rows by the first row's table",
        attend_static(gather="k, v = pool.gather(layer, pool.index(static.table[:1].expand_as(static.table)))"),
        "the 3 live rows",
    ),
    # ---- fill
    Mutant(
        "rebinding: a new tensor for the name",
        fill(tokens="static.tokens = torch.tensor([row.token for row in every])"),
        "static.tokens is another tensor now",
    ),
    Mutant(
        "rebinding the table alone",
        fill(table="static.table = torch.tensor([row.slots + row.slots[:1] * (S - len(row.slots)) for row in every])"),
        "static.table is another tensor now",
    ),
    Mutant(
        "other memory under the same tensor",
        fill(positions="static.positions.data = torch.tensor([len(row.slots) - 1 for row in every])"),
        "static.positions is another tensor now",
    ),
    Mutant("stale rows from a bigger step", fill(every="rows"), "is it left from a larger step?"),
    Mutant("dummy rows in slot 0", fill(every="rows + [Row(0, [0])] * (B - len(rows))"), "0 is a slot like any other"),
    Mutant(
        "dummies repeat the first live row",
        fill(every="rows + rows[:1] * (B - len(rows))"),
        "writes its K and V over somebody's",
    ),
    Mutant(
        "dummies write to scratch, and look at the last live row",
        fill(
            table="static.table[:n] = torch.tensor([r.slots + r.slots[:1] * (S - len(r.slots)) for r in "
            "rows + rows[-1:] * (B - len(rows))])"
        ),
        "looks at a slot of somebody else",
    ),
    Mutant(
        "places beyond a text are left as they were",
        fill(
            table="""for b, row in enumerate(every):
        static.table[b, : len(row.slots)] = torch.tensor(row.slots)"""
        ),
        "which is not a slot of row",
    ),
    Mutant(
        "places beyond a text are slot 0",
        fill(table="static.table[:n] = torch.tensor([row.slots + [0] * (S - len(row.slots)) for row in every])"),
        "0 is a slot like any other",
    ),
    Mutant(
        "positions one too far",
        fill(positions="static.positions[:n] = torch.tensor([len(row.slots) for row in every])"),
        "static.positions[0] must be",
    ),
    Mutant(
        "the first slot in place of the last",
        fill(slots="static.slots[:n] = torch.tensor([row.slots[0] for row in every])"),
        "static.slots[1] must be",
    ),
    Mutant(
        "slots backwards",
        fill(
            table="static.table[:n] = torch.tensor([row.slots[::-1] + row.slots[:1] * (S - len(row.slots)) "
            "for row in every])"
        ),
        "positions 0 on",
    ),
    Mutant(
        "the position in place of the token", fill(tokens="static.tokens[:n] = static.positions[:n]"), "static.tokens["
    ),
    Mutant("the rows of the caller grow", NO_ROOM, "fill changed the list of rows"),
    # ---- decode
    Mutant(
        "replayed before it is filled",
        decode(fill="graph.replay()", replay="fill(graph.static, rows, scratch)"),
        "id 0 must be",
    ),
    Mutant("never replayed", decode(replay="pass"), "must be replayed once"),
    Mutant("never filled", decode(fill="pass"), "as without a graph"),
    Mutant("replayed twice", decode(replay="graph.replay(); graph.replay()"), "must be replayed once"),
    Mutant("ids of dummies too", decode(result="graph.output.tolist()"), "the rest are dummies"),
    Mutant("a view of the output", decode(result="graph.output[: len(rows)]"), "decode returned a tensor"),
    Mutant("a list of views", decode(result="list(graph.output[: len(rows)])"), "it must be a list of ints"),
    Mutant("the last rows, not the first", decode(result="graph.output[-len(rows) :].tolist()"), "as without a graph"),
    Mutant(
        "read before it is replayed",
        decode(fill="fill(graph.static, rows, scratch); ids = graph.output[: len(rows)].tolist()", result="ids"),
        "as without a graph",
    ),
    Mutant(
        "the largest graph always",
        decode(size="max(graphs) if len(rows) <= max(graphs) else None"),
        "must be replayed once",
    ),
    Mutant("no way without a graph", decode(none="pass"), "the largest graph has"),
    Mutant("always eager", decode(size="None"), "and the step ran eagerly"),
    Mutant(
        "only exact sizes by a graph",
        decode(size="len(rows) if len(rows) in graphs else None"),
        "and the step ran eagerly",
    ),
    Mutant(
        "too many rows: the last ones are left out",
        decode(none="size = max(graphs); rows = rows[:size]"),
        "eager must be called once",
    ),
    Mutant("the eager step is forgotten", decode(none="return None"), "eager must be called once"),
    Mutant(
        "dummies in slot 0, by its own word", decode(fill="fill(graph.static, rows, 0)"), "as the naive stage has it"
    ),
    # ---- overlapped
    Mutant(
        "the host may run as far ahead as it likes", overlapped(planned="planned + plan"), "its tokens are not known"
    ),
    Mutant(
        "one after the other, twice", overlapped(planned="max(planned, done[-1]) + plan"), "that is one after the other"
    ),
    Mutant(
        "the longer of two sums",
        LOCKSTEP.format(together="max(sum(host), sum(device))"),
        "nothing runs while the first step",
    ),
    Mutant(
        "step k beside its own plan",
        LOCKSTEP.format(together="sum(max(h, d) for h, d in zip(host, device))"),
        "not while step k is",
    ),
    Mutant(
        "the first plan forgotten",
        LOCKSTEP.format(together="sum(max(d, h) for d, h in zip(device, host[1:])) + device[-1]"),
        "nothing runs while the first step is planned",
    ),
    Mutant(
        "the last run forgotten",
        LOCKSTEP.format(together="host[0] + sum(max(d, h) for d, h in zip(device, host[1:]))"),
        "overlapped they take",
    ),
    Mutant("does not wait for the plan", overlapped(done="done[-1] + run"), "overlapped they take"),
    Mutant("the device does two at once", overlapped(done="planned + run"), "overlapped they take"),
    Mutant(
        "overlapped first", overlapped(result="(done[-1], sum(host) + sum(device))"), "one after the other they take"
    ),
    Mutant("one number", overlapped(result="done[-1]"), "it must be two numbers"),
    Mutant(
        "the gain in place of the time",
        overlapped(result="(sum(host) + sum(device), sum(host) + sum(device) - done[-1])"),
        "overlapped they take",
    ),
    # ---- run_ahead
    Mutant("the old loop: waits, then begins", WAITS_FIRST, "had nothing to do"),
    Mutant("the token behind the stop is kept", run_ahead(arrives="pass"), "goes on after the stop"),
    Mutant("thrown away, not counted", run_ahead(arrives="if name in ended: continue"), "computed and thrown away"),
    Mutant(
        "max_tokens is seen late too",
        run_ahead(
            following="[name for name in running if name not in ended and len(outputs[name]) < max_tokens]",
            arrives="""if name in ended or len(outputs[name]) == max_tokens:
                thrown += 1
                continue""",
        ),
        "it ends by max_tokens",
    ),
    Mutant(
        "max_tokens is seen late, and its token kept",
        run_ahead(following="[name for name in running if name not in ended and len(outputs[name]) < max_tokens]"),
        "tokens: expected",
    ),
    Mutant(
        "one token too few",
        run_ahead(following="[name for name in running if name not in ended and len(outputs[name]) + 2 < max_tokens]"),
        "the tokens of",
    ),
    Mutant(
        "a text that has ended goes on being computed",
        run_ahead(following="[name for name in running if len(outputs[name]) + 1 < max_tokens]"),
        "every text has ended long ago",
    ),
    Mutant(
        "the token of the step before the last",
        run_ahead(token="(outputs[name] or [firsts[name]])[-1]"),
        "was given a token that is not its own",
    ),
    Mutant("always the first token", run_ahead(token="firsts[name]"), "was given a token that is not its own"),
    Mutant(
        "a step for nobody",
        run_ahead().replace("if following:\n            device.start", "if True:\n            device.start"),
        "a step with nobody in it",
    ),
    Mutant(
        "the stop is left out",
        run_ahead().replace(
            "outputs[name].append(token)\n            if token == stop:\n                ended.add(name)",
            "if token == stop:\n                ended.add(name)\n            else:\n"
            "                outputs[name].append(token)",
        ),
        "the tokens of",
    ),
    Mutant(
        "everybody in every step",
        run_ahead(following="[name for name in firsts if len(outputs[name]) + 1 < max_tokens]"),
        "every text has ended long ago",
    ),
    Mutant("one stop ends all", run_ahead(following=f"[] if ended else {GOES_ON}"), "the tokens of"),
    Mutant(
        "LAST from the very beginning", run_ahead(first="{name: LAST for name in firsts}"), "was not in the step before"
    ),
    Mutant("texts only, no count", run_ahead(result="outputs"), "how many were thrown away"),
    Mutant("run_ahead returns nothing", run_ahead(result="None"), "is a `return` missing?"),
    # ---- together
    Mutant(
        "a wrong bucket is not decode's fault",
        bucket("return max((s for s in sizes if s <= n), default=None)"),
        "mend bucket first",
    ),
    Mutant(
        "a wrong fill is not decode's fault", fill(every="rows + [Row(0, [0])] * (B - len(rows))"), "mend fill first"
    ),
    Mutant("a wrong attend_static is not decode's fault", attend_static(store="pass"), "mend attend_static first"),
]
