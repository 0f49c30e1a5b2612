"""What people write for lesson 01 that is wrong."""

from wrong import Mutant

MERGE = """
def merge(piece, ranks):
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not pairs:
            break
        {choose}
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return {result}
"""
READ = """
def read_tensor(path, name):
    entry = read_header(path)[name]
    begin, end = entry["data_offsets"]
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        file.seek({seek})
        data = bytearray(file.read(end - begin))
    return {tensor}
"""
HEADER = """
def read_header(path):
    with open(path, "rb") as file:
        n = {length}
        return json.loads(file.read({count}))
"""
COUNT = """
def count_parameters(config):
    d, D = config.d_model, config.head_dim
    q = {q}
    kv = {kv}
    layer = q * 2 + kv * 2 + {mlp} * d * config.d_ff + {norms} * d
    embedding = config.vocab_size * d
    return embedding * ({heads}) + config.n_layers * layer + {last}
"""
USUAL_COUNT = {
    "q": "config.n_heads * D * d",
    "kv": "config.n_kv_heads * D * d",
    "mlp": "3",
    "norms": "2",
    "heads": "1 if config.tied else 2",
    "last": "d",
}


def merging(choose: str = "i = min(pairs)[1]", result: str = "[ranks[part] for part in parts]") -> str:
    return MERGE.format(choose=choose, result=result)


def reading(
    seek: str = "8 + n + begin",
    tensor: str = 'torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])',
) -> str:
    return READ.format(seek=seek, tensor=tensor)


def header(length: str = 'int.from_bytes(file.read(8), "little")', count: str = "n") -> str:
    return HEADER.format(length=length, count=count)


def counting(**changes: str) -> str:
    return COUNT.format(**(USUAL_COUNT | changes))


WRONG = [
    Mutant(
        "longest token that fits, from the left",
        """
def merge(piece, ranks):
    ids = []
    while piece:
        n = max(n for n in range(1, len(piece) + 1) if piece[:n] in ranks)
        ids.append(ranks[piece[:n]])
        piece = piece[n:]
    return ids
""",
        "merge(b'abc') with",
    ),
    Mutant("leftmost pair that has a rank, not the lowest", merging("i = pairs[0][1]"), "merge(b'abc') with"),
    Mutant("highest rank first", merging("i = max(pairs)[1]"), "merge(b'abc') with"),
    Mutant("rightmost of equal pairs", merging("i = min(pairs, key=lambda p: (p[0], -p[1]))[1]"), "merge(b'aaa') with"),
    Mutant(
        "one pass only: pairs are not looked at anew",
        """
def merge(piece, ranks):
    parts = [bytes([b]) for b in piece]
    i = 0
    for pair in sorted({a + b for a, b in zip(parts, parts[1:])} & set(ranks), key=ranks.get):
        i = 0
        while i + 1 < len(parts):
            if parts[i] + parts[i + 1] == pair:
                parts[i : i + 2] = [pair]
            i += 1
    return [ranks[part] for part in parts]
""",
        "merge(b'aaaa') with",
    ),
    Mutant(
        "rank of the left part instead of the pair",
        """
def merge(piece, ranks):
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [(ranks[a], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]
""",
        "merge(b'abc') with",
    ),
    Mutant("tokens as bytes, not as ids", merging(result="parts"), "merge(b'a')"),
    Mutant(
        "the byte's value taken for its id",
        merging(result="[ranks[p] if len(p) > 1 else p[0] for p in parts]"),
        "merge(b'a')",
    ),
    Mutant(
        "bytes decoded as text",
        """
def merge(piece, ranks):
    parts = [char.encode() for char in piece.decode()]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]
""",
        "UnicodeDecodeError",
    ),
    Mutant(
        "the table written to",
        """
def merge(piece, ranks):
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ranks.setdefault(b"".join(parts), 0)
""",
        "merge changed its argument number 2",
    ),
    Mutant(
        "goes on when no pair has a rank",
        merging().replace("if not pairs:\n            break", "if not pairs:\n            continue"),
        "merge took longer than 3 s",
    ),
    Mutant("parts joined, not listed", merging(result="b''.join(parts)"), "merge(b'a') is bytes; it must be a list"),
    Mutant("length read big-endian", header('int.from_bytes(file.read(8), "big")'), "read_header raised"),
    Mutant(
        "length read big-endian, and told so",
        header('int.from_bytes(file.read(8), "big")'),
        "where it is 254? Is the byte order right?",
    ),
    Mutant(
        "length read big-endian for one tensor",
        reading().replace('"little"', '"big"'),
        "there is nothing where you read: did you seek past the end?",
    ),
    Mutant(
        "length read from two bytes",
        header('int.from_bytes(file.read(2) + bytes(0 * len(file.read(6))), "little")'),
        "read_header raised JSONDecodeError",
    ),
    Mutant(
        "metadata dropped",
        header().replace("def read_header", "def whole") + "\n\ndef read_header(path):\n"
        "    return {name: entry for name, entry in whole(path).items() if not name.startswith('__')}\n",
        "there is no entry '__metadata__'",
    ),
    Mutant("one byte too many", header(count="n + 1"), "read_header raised"),
    Mutant(
        "the whole file read",
        """
def read_header(path):
    data = open(path, "rb").read()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n])
""",
        "read_header took",
    ),
    Mutant(
        "header not parsed", header().replace("json.loads(file.read(n))", "file.read(n).decode()"), "is str; it must be"
    ),
    Mutant("offsets from the file's start", reading(seek="begin"), "a tensor [[1.5, -2, 3.25], [0, 7, -0.5]]"),
    Mutant(
        "the eight bytes of the length forgotten", reading(seek="n + begin"), "a tensor [[1.5, -2, 3.25], [0, 7, -0.5]]"
    ),
    Mutant(
        "header's length computed from its JSON",
        reading(seek="8 + len(json.dumps(read_header(path)).encode()) + begin"),
        "tensor ",
    ),
    Mutant(
        "bfloat16 taken for float16",
        reading(
            tensor='torch.frombuffer(data, dtype=torch.float16 if entry["dtype"] == "BF16" else DTYPES[entry["dtype"]])'
            '.reshape(entry["shape"])'
        ),
        "a tensor stored as BF16: the dtype must be torch.bfloat16",
    ),
    Mutant(
        "bits of bfloat16 read as float16, dtype right",
        reading(
            tensor='torch.frombuffer(data, dtype=torch.float16 if entry["dtype"] == "BF16" else DTYPES[entry["dtype"]])'
            '.to(DTYPES[entry["dtype"]]).reshape(entry["shape"])'
        ),
        "a tensor stored as BF16",
    ),
    Mutant(
        "everything to float32",
        reading(tensor='torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"]).float()'),
        "the dtype must be torch.float64, and is torch.float32",
    ),
    Mutant(
        "reshape forgotten",
        reading(tensor='torch.frombuffer(data, dtype=DTYPES[entry["dtype"]])'),
        "the shape must be [2, 3], and is [6]",
    ),
    Mutant(
        "only tensors with two axes",
        reading(tensor='torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"][0], -1)'),
        "the shape must be [4], and is [4, 1]",
    ),
    Mutant(
        "tensors in the order of the header's names",
        """
def read_tensor(path, name):
    header = {key: entry for key, entry in read_header(path).items() if key != "__metadata__"}
    begin = 0
    for key, entry in header.items():
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        if key == name:
            break
        begin += size
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        file.seek(8 + n + begin)
        data = bytearray(file.read(size))
    return torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
""",
        "tensor z.weight of a file",
    ),
    Mutant(
        "the whole file read for one tensor",
        """
def read_tensor(path, name):
    entry = read_header(path)[name]
    data = bytearray(open(path, "rb").read())
    begin = 8 + int.from_bytes(data[:8], "little") + entry["data_offsets"][0]
    end = begin + entry["data_offsets"][1] - entry["data_offsets"][0]
    return torch.frombuffer(data[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
""",
        "read_tensor took",
    ),
    Mutant("K and V with all query heads", counting(kv="config.n_heads * D * d"), "parameters of a layer of d = 40"),
    Mutant(
        "D as d // H", counting().replace("config.head_dim", "config.d_model // config.n_heads"), "as with D = d // H"
    ),
    Mutant(
        "D as d / H",
        counting().replace("config.head_dim", "config.d_model / config.n_heads"),
        "needs it: the width D of a head is config.head_dim, not d / H",
    ),
    Mutant("d in place of H * D, and told so", counting(q="d * d"), "D is config.head_dim, not d / H"),
    Mutant("q and o as d times d", counting(q="d * d"), "parameters of a layer of d = 40"),
    Mutant("gate forgotten", counting(mlp="2"), "parameters of a layer of d = 40"),
    Mutant("one norm per layer", counting(norms="1"), "parameters of a layer of d = 40"),
    Mutant("last norm forgotten", counting(last="0"), "parameters with a tied head"),
    Mutant("tied head counted twice", counting(heads="2"), "parameters with a tied head"),
    Mutant("head never counted", counting(heads="1"), "parameters with its own head"),
    Mutant("a float", counting(last="d * 1.0"), "must be a whole number"),
]
