"""What people write for problem set 1 that is wrong."""

from wrong import Mutant

READ = """
def read_weight(path, name):
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n))

        def stored(entry):
            begin, end = header[entry]["data_offsets"]
            file.seek(8 + n + begin)
            data = bytearray(file.read(end - begin))
            if len(data) < end - begin:
                raise ValueError(f"{entry} is not whole")
            return torch.frombuffer(data, dtype=DTYPES[header[entry]["dtype"]]).reshape(header[entry]["shape"])

        if name in header:
            return stored(name).float()
        packed, scale = stored(f"{name}.packed"), stored(f"{name}.scale").float()
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    size = numbers.shape[1] // scale.shape[1]
    return (numbers.float() - 8) * scale.repeat_interleave(size, dim=1)
"""

ALIBI = """
def alibi(q, k, v, q_pos, k_pos):
    H, D = q.shape[-2:]
    G = H // k.shape[-2]
    P = 1 << (H.bit_length() - 1)
    exponents = [-8 * (h + 1) / P for h in range(P)] + [-8 * (2 * h + 1) / (2 * P) for h in range(H - P)]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).transpose(0, 1)
    keys, values = (x.to(wide).repeat_interleave(G, dim=1).transpose(0, 1) for x in (k, v))
    distance = q_pos[:, None] - k_pos
    slope = 2.0 ** torch.tensor(exponents, dtype=wide)
    scores = queries @ keys.transpose(1, 2) * D**-0.5 - slope[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    out = (weights @ values).transpose(0, 1)
    return out.masked_fill((distance < 0).all(-1)[:, None, None], 0.0).to(q.dtype)
"""


def changed(code: str, *changes: str) -> str:
    """The code above, each first string of a pair replaced by the second."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    return code


WRONG = [
    # ---- read_weight
    Mutant(
        "the upper four bits first", changed(READ, "(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)"), "HIGH"
    ),
    Mutant(
        "all low halves, then all high ones",
        changed(
            READ,
            "torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)",
            "torch.cat((packed & 15, packed >> 4), 1)",
        ),
        "all low halves came first",
    ),
    Mutant("8 is not taken off", changed(READ, "(numbers.float() - 8)", "numbers.float()"), "the 8 is not taken off"),
    Mutant("8 taken off in uint8", changed(READ, "(numbers.float() - 8)", "(numbers - 8).float()"), "expected -"),
    Mutant(
        "read as two's complement",
        changed(READ, "(numbers.float() - 8)", "torch.where(numbers > 7, numbers.float() - 16, numbers.float())"),
        "two's complement",
    ),
    Mutant(
        "the group is the remainder",
        changed(READ, "scale.repeat_interleave(size, dim=1)", "scale.repeat(1, size)"),
        "a run of neighbouring columns",
    ),
    Mutant(
        "one scale for a row",
        changed(READ, "scale.repeat_interleave(size, dim=1)", "scale[:, :1]"),
        "every group has the scale of the first",
    ),
    Mutant(
        "groups of 32, always",
        changed(
            READ,
            "size = numbers.shape[1] // scale.shape[1]",
            "size = 32",
            "(size, dim=1)",
            "(size, dim=1)[:, : numbers.shape[1]]",
        ),
        "weights: ",
    ),
    Mutant(
        "product in float16",
        changed(
            READ,
            'stored(f"{name}.scale").float()',
            'stored(f"{name}.scale")',
            "(numbers.float() - 8) * scale.repeat_interleave(size, dim=1)",
            "((numbers.half() - 8) * scale.repeat_interleave(size, dim=1)).float()",
        ),
        "taken in float16",
    ),
    Mutant(
        "offsets from the beginning of the file",
        changed(READ, "file.seek(8 + n + begin)", "file.seek(begin)"),
        "weights",
    ),
    Mutant(
        "the header's length from its text again",
        changed(READ, "file.seek(8 + n + begin)", "file.seek(8 + len(json.dumps(header)) + begin)"),
        "in a file of the entries",
    ),
    Mutant(
        "scales expected right behind the bytes",
        changed(
            READ,
            'stored(f"{name}.scale").float()',
            'torch.frombuffer(bytearray(file.read(2 * header[f"{name}.scale"]["shape"][1] * header[f"{name}.scale"]'
            '["shape"][0])), dtype=torch.float16).reshape(header[f"{name}.scale"]["shape"]).float()',
        ),
        "in a file of the entries",
    ),
    Mutant(
        "plain tensors left in 16 bits",
        changed(READ, "return stored(name).float()", "return stored(name)"),
        "dtype must be",
    ),
    Mutant(
        "both 16-bit dtypes read as float16",
        changed(
            READ, 'dtype=DTYPES[header[entry]["dtype"]]', 'dtype=DTYPES[header[entry]["dtype"].replace("BF", "F")]'
        ),
        "a tensor of torch.bfloat16",
    ),
    Mutant(
        "length not looked at",
        changed(READ, "if len(data) < end - begin:", "if False:"),
        "it must raise a ValueError that",
    ),
    Mutant(
        "what is missing filled with zeros",
        changed(READ, 'raise ValueError(f"{entry} is not whole")', "data += bytes(end - begin - len(data))"),
        "it must raise a ValueError that names",
    ),
    Mutant(
        "both entries are named, whichever is not whole",
        changed(
            READ,
            '        packed, scale = stored(f"{name}.packed"), stored(f"{name}.scale").float()',
            '        try:\n            packed, scale = stored(f"{name}.packed"), stored(f"{name}.scale").float()\n'
            '        except ValueError:\n            raise ValueError(f"{name}.packed or {name}.scale is not whole")',
        ),
        "is whole, and is named too",
    ),
    Mutant(
        "the file's size compared with all that the header promises",
        changed(
            READ,
            "        def stored(entry):",
            "        most = max(e['data_offsets'][1] for key, e in header.items() if key != '__metadata__')\n"
            "        if Path(path).stat().st_size < 8 + n + most:\n"
            '            raise ValueError(f"{path} is cut short")\n\n'
            "        def stored(entry):",
        ),
        "read_weight raised ValueError",
    ),
    # ---- alibi
    Mutant(
        "the slope is divided by sqrt(D) too",
        changed(
            ALIBI,
            "* D**-0.5 - slope[:, None, None] * distance",
            "* D**-0.5 - slope[:, None, None] * distance * D**-0.5",
        ),
        "the slope divided by sqrt(D)",
    ),
    Mutant("slopes begin at 1", changed(ALIBI, "-8 * (h + 1) / P for", "-8 * h / P for"), "and costs 1"),
    Mutant(
        "every number of heads treated like a power of two",
        changed(ALIBI, "P = 1 << (H.bit_length() - 1)", "P = H"),
        "3 heads, head 0",
    ),
    Mutant(
        "the left-over heads go on where the others end",
        changed(
            ALIBI, "[-8 * (2 * h + 1) / (2 * P) for h in range(H - P)]", "[-8 * (h + 1) / (2 * P) for h in range(P, H)]"
        ),
        "3 heads, head 2",
    ),
    Mutant(
        "the bias is added, not subtracted",
        changed(ALIBI, "- slope[:, None, None]", "+ slope[:, None, None]"),
        "and costs -",
    ),
    Mutant(
        "distances of row numbers",
        changed(
            ALIBI,
            "slope[:, None, None] * distance\n",
            "slope[:, None, None] * (torch.arange(len(q_pos))[:, None] - torch.arange(len(k_pos)))\n",
        ),
        "queries at [",
    ),
    Mutant("no mask", changed(ALIBI, '.masked_fill(distance < 0, float("-inf"))', ""), "it sees them"),
    Mutant(
        "the distance's size instead of a mask",
        changed(ALIBI, "* distance\n", "* distance.abs()\n", '.masked_fill(distance < 0, float("-inf"))', ""),
        "it sees them",
    ),
    Mutant("a token does not see itself", changed(ALIBI, "distance < 0", "distance <= 0"), "[T, H, D]"),
    Mutant(
        "NaN where nothing is seen",
        changed(ALIBI, ".masked_fill((distance < 0).all(-1)[:, None, None], 0.0)", ""),
        "sees nothing and must answer 0",
    ),
    Mutant(
        "heads tiled",
        changed(ALIBI, "x.to(wide).repeat_interleave(G, dim=1)", "x.to(wide).repeat(1, G, 1)"),
        "H = 4, Hkv = 2",
    ),
    Mutant(
        "slopes of the key-value heads",
        changed(
            ALIBI,
            "P = 1 << (H.bit_length() - 1)",
            "H = k.shape[-2]\n    P = 1 << (H.bit_length() - 1)",
            "torch.tensor(exponents, dtype=wide)",
            "torch.tensor(exponents, dtype=wide).repeat_interleave(G)",
        ),
        "must cost 0.0625",
    ),
    Mutant(
        "positions in the dtype of q",
        changed(
            ALIBI, "distance = q_pos[:, None] - k_pos", "distance = q_pos.to(q.dtype)[:, None] - k_pos.to(q.dtype)"
        ),
        "torch.bfloat16, ",
    ),
    Mutant(
        "scores in 16 bits",
        changed(ALIBI, "torch.promote_types(q.dtype, torch.float32)", "q.dtype"),
        "torch.bfloat16, ",
    ),
    Mutant(
        "slopes as Python numbers: times whole numbers, that is float32",
        changed(
            ALIBI,
            "slope = 2.0 ** torch.tensor(exponents, dtype=wide)",
            "bias = torch.stack([2.0**x * distance for x in exponents])",
            "slope[:, None, None] * distance\n",
            "bias\n",
        ),
        "one query of zeros",
    ),
    Mutant(
        "always float32", changed(ALIBI, "torch.promote_types(q.dtype, torch.float32)", "torch.float32"), "[T, H, D]"
    ),
    Mutant(
        "the answer left in float32", changed(ALIBI, ", 0.0).to(q.dtype)", ", 0.0)"), "the dtype must be torch.bfloat16"
    ),
]
