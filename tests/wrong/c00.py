"""What people write for lesson 00 that is wrong."""

from wrong import Mutant

DECODE = """
def decode_ceiling(batch, context, config, itemsize, bytes_per_s, flops_per_s):
    weights = {weights}
    kv_bytes = {kv_bytes}
    flops = {flops}
    return {tokens} / floor_seconds({weight_bytes}, kv_bytes, flops, bytes_per_s, flops_per_s)
"""
RIGHT = {
    "weights": "ceiling.layer_weights(config) + config.vocab_size * config.d_model",
    "kv_bytes": "batch * context * config.kv_bytes_per_token(itemsize)",
    "flops": "batch * (2 * weights + 4 * config.head_dim * config.n_heads * config.n_layers * context)",
    "tokens": "batch",
    "weight_bytes": "itemsize * weights",
}


def decode(**changes: str) -> str:
    return DECODE.format(**(RIGHT | changes))


def floor(body: str) -> str:
    return f"def floor_seconds(weight_bytes, kv_bytes, flops, bytes_per_s, flops_per_s):\n    return {body}\n"


def balance(body: str) -> str:
    return f"def balance_batch(itemsize, bytes_per_s, flops_per_s):\n    return {body}\n"


WRONG = [
    Mutant(
        "moving and multiplying one after the other",
        floor("(weight_bytes + kv_bytes) / bytes_per_s + flops / flops_per_s"),
        "where moving takes 8 s and multiplying 2 s: expected 8, got 10",
    ),
    Mutant(
        "the shorter of the two",
        floor("min((weight_bytes + kv_bytes) / bytes_per_s, flops / flops_per_s)"),
        "seconds for 600 bytes of weights at 100 bytes/s: expected 6, got 0",
    ),
    Mutant(
        "K and V forgotten",
        floor("max(weight_bytes / bytes_per_s, flops / flops_per_s)"),
        "700 bytes of K and V at 100 bytes/s: expected 7, got 0",
    ),
    Mutant(
        "weights and K/V overlap each other",
        floor("max(weight_bytes / bytes_per_s, kv_bytes / bytes_per_s, flops / flops_per_s)"),
        "600 bytes of weights and 700 bytes of K and V at 100 bytes/s: expected 13, got 7",
    ),
    Mutant(
        "divided the wrong way round",
        floor("max(bytes_per_s / (weight_bytes + kv_bytes + 1), flops_per_s / (flops + 1))"),
        "seconds for 600 bytes of weights at 100 bytes/s: expected 6, got",
    ),
    Mutant("result printed, not returned", floor("print(weight_bytes)"), "is a `return` missing?"),
    Mutant(
        "weights read anew for every text",
        decode(weight_bytes="batch * itemsize * weights"),
        "tokens/s at B = 2, without K and V",
    ),
    Mutant("tokens of one text only", decode(tokens="1"), "tokens/s at B = 2, without K and V"),
    Mutant(
        "arithmetic shared like the weights",
        decode(flops="2 * weights + 4 * config.head_dim * config.n_heads * config.n_layers * context"),
        "tokens/s at B = 8, without K and V at 1 M operations/s",
    ),
    Mutant(
        "one operation for each weight",
        decode(flops="batch * (weights + 4 * config.head_dim * config.n_heads * config.n_layers * context)"),
        "tokens/s at B = 1, without K and V at 1 M operations/s",
    ),
    Mutant("head forgotten", decode(weights="ceiling.layer_weights(config)"), "tokens/s of one text at 1 MB/s"),
    Mutant(
        "K and V of one text only",
        decode(kv_bytes="context * config.kv_bytes_per_token(itemsize)"),
        "tokens/s at B = 8, S = 1000 with Hkv = 2, memory slow",
    ),
    Mutant(
        "K and V of every query head",
        decode(kv_bytes="2 * batch * context * config.n_layers * config.n_heads * config.head_dim * itemsize"),
        "tokens/s at B = 1, S = 1000 with Hkv = 2, memory slow",
    ),
    Mutant(
        "K and V of one layer",
        decode(kv_bytes="batch * context * config.kv_bytes_per_token(itemsize) // config.n_layers"),
        "tokens/s at B = 1, S = 1000 with Hkv = 2, memory slow",
    ),
    Mutant("attention is free", decode(flops="batch * 2 * weights"), "arithmetic slow"),
    Mutant(
        "seconds per step instead of tokens per second",
        decode(tokens="1 / batch") + "\nseconds = decode_ceiling\n\n"
        "def decode_ceiling(*args):\n    return 1 / (args[0] * seconds(*args))\n",
        "tokens/s of one text at 1 MB/s",
    ),
    Mutant(
        "the notebook's number of weights in place of the argument's",
        "weights = 134_515_008\n" + decode().replace("    weights = " + RIGHT["weights"] + "\n", ""),
        "did you use a name of the notebook, weights, in place of an argument?",
    ),
    Mutant(
        "the notebook's machine in place of the argument's",
        "ceilings = ceiling.Ceilings(1e10, 1e10, 1e11)\n"
        + decode().replace(", bytes_per_s, flops_per_s)\n", ", ceilings.bytes_per_s, ceilings.flops_per_s)\n"),
        "did you use a name of the notebook, ceilings, in place of an argument?",
    ),
    Mutant(
        "a name of a cell that a file's check does not run",
        decode().replace("    weights = " + RIGHT["weights"] + "\n", "").replace("weights", "all_weights"),
        "did you use a name of the notebook, all_weights, in place of an argument?",
    ),
    Mutant("factor 2 forgotten", balance("itemsize * flops_per_s / bytes_per_s"), "expected 20, got 40"),
    Mutant("upside down", balance("2 * bytes_per_s / (itemsize * flops_per_s)"), "expected 20, got"),
    Mutant("bytes of a weight forgotten", balance("flops_per_s / bytes_per_s"), "B at "),
    Mutant("rounded down", balance("int(itemsize * flops_per_s / (2 * bytes_per_s))"), "B at "),
]
