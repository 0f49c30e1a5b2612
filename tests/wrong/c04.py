"""Wrong solutions of lesson 04."""

from wrong import Mutant

GENERATE = """
def generate(model, prompt, n_new):
    c = model.config
    k_memory = torch.zeros(c.n_layers, c.n_kv_heads, len(prompt) + n_new, c.head_dim, dtype=model.dtype)
    v_memory = torch.zeros_like(k_memory)
    tokens, computed = list(prompt), 0
    for _ in range(n_new):
        new = torch.tensor(tokens[computed:])
        positions = torch.arange(computed, len(tokens))
        hidden = model(new, positions, CachedAttend(k_memory, v_memory, positions))
        computed = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
"""


def generate(*changes: str) -> str:
    """The code above, each first string of a pair replaced by the second."""
    code = GENERATE
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    return code


WRONG = [
    # ---- kv_bytes_per_token
    Mutant(
        "bytes of one layer only (the published 16 KB)",
        """
def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, itemsize):
    return 2 * n_kv_heads * head_dim * itemsize
""",
        "one layer's share",
    ),
    Mutant(
        "bytes of K alone",
        """
def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, itemsize):
    return n_layers * n_kv_heads * head_dim * itemsize
""",
        "half of it",
    ),
    Mutant(
        "always two bytes a number",
        """
def kv_bytes_per_token(n_layers, n_kv_heads, head_dim, itemsize):
    return 2 * n_layers * n_kv_heads * head_dim * 2
""",
        "torch.float64: bytes: expected",
    ),
    # ---- store
    Mutant(
        "position 0 never written",
        """
def store(memory, positions, new):
    for t, p in enumerate(positions.tolist()):
        if p:
            memory[:, p] = new[t]
""",
        "new[0] belongs at position 0",
    ),
    Mutant(
        "stored from position 0 on in every step",
        """
def store(memory, positions, new):
    memory[:, : len(positions)] = new.transpose(0, 1)
""",
        "belongs at position 7",
    ),
    Mutant(
        "reshaped where it must be transposed",
        """
def store(memory, positions, new):
    T, heads, dim = new.shape
    memory[:, positions] = new.reshape(heads, T, dim)
""",
        "belongs at position",
    ),
    Mutant(
        "a copy of the memory is written",
        """
def store(memory, positions, new):
    memory = memory.clone()
    memory[:, positions] = new.transpose(0, 1)
    return memory
""",
        "must write into it in place",
    ),
    Mutant(
        "positions taken for a run",
        """
def store(memory, positions, new):
    start = int(positions[0])
    stop = min(start + len(positions), memory.shape[1])
    memory[:, start:stop] = new.transpose(0, 1)[:, : stop - start]
""",
        "belongs at position",
    ),
    Mutant(
        "added to what is there",
        """
def store(memory, positions, new):
    memory[:, positions] += new.transpose(0, 1)
""",
        "belongs at position",
    ),
    Mutant(
        "a wrong store: not CachedAttend's fault, nor generate's",
        """
def store(memory, positions, new):
    memory[:, positions - int(positions[0])] = new.transpose(0, 1)
""",
        "mend store first",
    ),
    # ---- CachedAttend
    Mutant(
        "keys stored before rotation",
        """
from minillm.model import rope_table, rotate

class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        D = k.shape[-1]
        freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        cos, sin = rope_table(self.positions, freq, k.dtype)
        return super().__call__(layer, q, rotate(k, cos, -sin), v)
""",
        "the k memory [L, Hkv, S, D]",
    ),
    Mutant(
        "keys rotated once more when they are stored",
        """
from minillm.model import rope_table, rotate

class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        D = k.shape[-1]
        freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        return super().__call__(layer, q, rotate(k, *rope_table(self.positions, freq, k.dtype)), v)
""",
        "the k memory [L, Hkv, S, D]",
    ),
    Mutant(
        "values stored into keys",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, v)
        store(self.v_memory[layer], self.positions, v)
        keys = self.k_memory[layer, :, : self.size].transpose(0, 1)
        values = self.v_memory[layer, :, : self.size].transpose(0, 1)
        return attention.sdpa(q, keys, values, self.mask)
""",
        "the k memory holds v",
    ),
    Mutant(
        "new K and V stored after attention",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        keys = self.k_memory[layer, :, : self.size].transpose(0, 1)
        values = self.v_memory[layer, :, : self.size].transpose(0, 1)
        out = attention.sdpa(q, keys, values, self.mask)
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        return out
""",
        "looks at positions",
    ),
    Mutant(
        "top-left causal mask",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        self.mask = torch.ones(len(positions), self.size, dtype=torch.bool).tril()
""",
        "looks at positions [0]; it must look at [0, 1, 2, 3, 4, 5, 6, 7]",
    ),
    Mutant(
        "is_causal=True with a cache",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        keys, values = self.k_memory[layer, :, : self.size], self.v_memory[layer, :, : self.size]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)
""",
        "looks at positions [0]; it must look at [0, 1, 2, 3, 4, 5, 6, 7]",
    ),
    Mutant(
        "no mask where there is a cache",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        if positions[0] > 0:
            self.mask = torch.ones_like(self.mask)
""",
        "the one at position 4 looks at positions [0, 1, 2, 3, 4, 5, 6]",
    ),
    Mutant(
        "reads one position too many",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        self.size = min(self.size + 1, k_memory.shape[2])
        self.mask = attention.visible(positions, torch.arange(self.size))
""",
        "has NaN",
    ),
    Mutant(
        "sees one position too many",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        self.mask = attention.visible(positions + 1, torch.arange(self.size))
""",
        "the one at position 0 looks at positions [0, 1]",
    ),
    Mutant(
        "reads one position too few",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        self.size = int(positions.max())
        self.mask = attention.visible(positions, torch.arange(self.size))
""",
        "the one at position 6 looks at positions [0, 1, 2, 3, 4, 5]; it must look at [0, 1, 2, 3, 4, 5, 6]",
    ),
    Mutant(
        "reads the whole memory under a mask",
        """
class CachedAttend(CachedAttend):
    def __init__(self, k_memory, v_memory, positions):
        super().__init__(k_memory, v_memory, positions)
        self.size = k_memory.shape[2]
        self.mask = attention.visible(positions, torch.arange(self.size))
""",
        "has NaN",
    ),
    Mutant(
        "grows by torch.cat along the wrong axis",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        start = int(self.positions[0])
        keys, values = k, v
        if start:
            keys = torch.cat((self.k_memory[layer, :, :start].transpose(0, 1), k), dim=1)
            values = torch.cat((self.v_memory[layer, :, :start].transpose(0, 1), v), dim=1)
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        return attention.sdpa(q, keys, values, self.mask)
""",
        "raised RuntimeError: Sizes of tensors must match",
    ),
    Mutant(
        "keys and values not transposed",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        keys, values = self.k_memory[layer, :, : self.size], self.v_memory[layer, :, : self.size]
        return attention.sdpa(q, keys, values, self.mask)
""",
        "was given K as [Hkv, S, D], as it lies in the memory; it wants [S, Hkv, D], so transpose heads and positions",
    ),
    Mutant(
        "one value too few is read",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        keys = self.k_memory[layer, :, : self.size].transpose(0, 1)
        values = self.v_memory[layer, :, : self.size - 1].transpose(0, 1)
        return attention.sdpa(q, keys, values, self.mask)
""",
        "attention.sdpa was given V [4, 2, 8] and a mask [T, S] of [5, 5]; it wants K and V as [S, Hkv, D]",
    ),
    Mutant(
        "layer index ignored",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        return super().__call__(0, q, k, v)
""",
        "the k memory of layer 0 was written, which is another layer's",
    ),
    Mutant(
        "only this step's own tokens are read",
        """
class CachedAttend(CachedAttend):
    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        return attention.sdpa(q, k, v, attention.visible(self.positions, self.positions))
""",
        "the one at position 7 looks at positions [7]",
    ),
    Mutant(
        "what is kept belongs to the class",
        """
class CachedAttend(CachedAttend):
    kept = {}

    def __call__(self, layer, q, k, v):
        store(self.k_memory[layer], self.positions, k)
        store(self.v_memory[layer], self.positions, v)
        keys, values = k, v
        if self.positions[0] > 0 and layer in self.kept:
            keys, values = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v)))
        self.kept[layer] = (keys, values)
        return attention.sdpa(q, keys, values, attention.visible(self.positions, torch.arange(len(keys))))
""",
        "of two texts in turn",
    ),
    # ---- generate
    Mutant(
        "rotary offset restarted at 0",
        generate("hidden = model(new, positions, ", "hidden = model(new, torch.arange(len(new)), "),
        "step 2: the positions given to the model: first different at index 0: expected 7, got 0",
    ),
    Mutant(
        "places and rotation both restarted at 0",
        generate("torch.arange(computed, len(tokens))", "torch.arange(len(new))"),
        "step 2: the positions given to the model: first different at index 0: expected 7, got 0",
    ),
    Mutant(
        "new tokens counted from one further on",
        generate("torch.arange(computed, len(tokens))", "torch.arange(len(new)) + (computed + 1 if computed else 0)"),
        "step 2: the positions given to the model: first different at index 0: expected 7, got 8",
    ),
    Mutant(
        "forgets the last prompt token",
        """
def generate(model, prompt, n_new):
    c = model.config
    k_memory = torch.zeros(c.n_layers, c.n_kv_heads, len(prompt) + n_new, c.head_dim, dtype=model.dtype)
    v_memory = torch.zeros_like(k_memory)
    output, new, start = [], list(prompt[:-1]) or list(prompt), 0
    while len(output) < n_new:
        positions = torch.arange(start, start + len(new))
        hidden = model(torch.tensor(new), positions, CachedAttend(k_memory, v_memory, positions))
        start += len(new)
        output.append(int(model.logits(hidden[-1:]).argmax()))
        new = output[-1:]
    return output
""",
        "it takes 7 + 4 - 1 = 10",
    ),
    Mutant(
        "the whole text in every step, cache or no cache",
        generate("computed = len(tokens)\n", "computed = 0\n"),
        "34 tokens went through the model",
    ),
    Mutant(
        "the last new token is pushed too",
        generate(
            "for _ in range(n_new):",
            "while computed < len(prompt) + n_new:",
            "return tokens[len(prompt) :]",
            "return tokens[len(prompt) : len(prompt) + n_new]",
        ),
        "11 tokens went through the model",
    ),
    Mutant(
        "computed grows by one a step",
        generate("computed = len(tokens)\n", "computed += 1\n"),
        "and must push [19]: before it, 7 tokens have gone through the model, and `computed` is their number",
    ),
    Mutant(
        "computed is set after the new token is appended",
        generate(
            "        computed = len(tokens)\n", "", "argmax()))\n", "argmax()))\n        computed = len(tokens)\n"
        ),
        "Set it before the new token is appended",
    ),
    Mutant(
        "one memory for K and V",
        generate("v_memory = torch.zeros_like(k_memory)", "v_memory = k_memory"),
        "step 1, positions 0 to 6: hidden states [T, d]",
    ),
    Mutant(
        "new memories in every step",
        generate(
            "        new = ",
            "        k_memory, v_memory = torch.zeros_like(k_memory), torch.zeros_like(v_memory)\n        new = ",
        ),
        "step 2, position 7: hidden states [T, d]",
    ),
    Mutant(
        "cache shared between requests",
        """
def generate(model, prompt, n_new, cache={}):
    c = model.config
    if not cache:
        cache["k"] = torch.zeros(c.n_layers, c.n_kv_heads, c.context, c.head_dim, dtype=model.dtype)
        cache["v"] = torch.zeros_like(cache["k"])
        cache["computed"] = 0
    if cache["computed"] >= len(prompt):
        cache["computed"] = 0
    tokens = list(prompt)
    for _ in range(n_new):
        new = torch.tensor(tokens[cache["computed"] :])
        positions = torch.arange(cache["computed"], len(tokens))
        hidden = model(new, positions, CachedAttend(cache["k"], cache["v"], positions))
        cache["computed"] = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "request 2 of five in turn",
    ),
    Mutant(
        "memories in float32, whatever the model's dtype",
        generate(", dtype=model.dtype", ""),
        "generate raised RuntimeError",
    ),
    Mutant(
        "samples after the first row",
        generate("hidden[-1:]", "hidden[:1]"),
        "4 new tokens after a prompt of 7: first different at index 0",
    ),
    Mutant(
        "the caller's prompt grows",
        generate("list(prompt), 0", "prompt, 0", "return tokens[len(prompt) :]", "return tokens[-n_new:]"),
        "generate changed its argument number 2",
    ),
    Mutant(
        "tokens given back as tensors",
        generate("int(model.logits(hidden[-1:]).argmax())", "model.logits(hidden[-1:]).argmax()"),
        "entry 0 is a Tensor",
    ),
    Mutant(
        "a batch of one text",
        generate(
            "torch.tensor(tokens[computed:])",
            "torch.tensor([tokens[computed:]])",
            "torch.arange(computed, len(tokens))",
            "torch.arange(computed, len(tokens))[None]",
        ),
        "the model was given tokens [1, 7] of torch.int64",
    ),
    Mutant(
        "the prompt is given back too",
        generate("return tokens[len(prompt) :]", "return tokens"),
        "4 new tokens after a prompt of 7",
    ),
]
