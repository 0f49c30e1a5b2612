"""Wrong solutions of lesson 05."""

from wrong import Mutant

WRONG = [
    # ---- chunks
    Mutant(
        "last short chunk dropped",
        """
def chunks(n, m):
    return [(i * m, m) for i in range(n // m)]
""",
        "is in no chunk",
    ),
    Mutant(
        "last chunk padded to m",
        """
def chunks(n, m):
    return [(start, m) for start in range(0, n, m)]
""",
        "is beyond the prompt",
    ),
    Mutant(
        "start counted in chunks, not in tokens",
        """
def chunks(n, m):
    return [(i, min(m, n - i * m)) for i in range((n + m - 1) // m)]
""",
        "chunks(7, 4): first different at index 1: expected (4, 3), got (1, 3)",
    ),
    Mutant(
        "chunk offset off by one",
        """
def chunks(n, m):
    found, start = [], 0
    while start < n:
        size = min(m, n - start)
        found.append((start, size))
        start += size + 1
    return found
""",
        "position 1 is in no chunk",
    ),
    Mutant(
        "where a chunk ends in place of its size",
        """
def chunks(n, m):
    return [(start, min(start + m, n)) for start in range(0, n, m)]
""",
        "expected (4, 3), got (4, 7)",
    ),
    Mutant(
        "an empty chunk at the end when m divides n",
        """
def chunks(n, m):
    return [(i * m, min(m, n - i * m)) for i in range(n // m + 1)]
""",
        "expected 1 entries, got 2",
    ),
    Mutant(
        "the short chunk comes first",
        """
def chunks(n, m):
    found, end = [], n
    while end > 0:
        size = min(m, end)
        found.insert(0, (end - size, size))
        end -= size
    return found
""",
        "expected (0, 4), got (0, 3)",
    ),
    # ---- chunk_mask
    Mutant(
        "square mask on a chunk",
        """
def chunk_mask(start, size):
    return torch.ones(size, size, dtype=torch.bool).tril()
""",
        "the shape must be [3, 7], and is [3, 3]",
    ),
    Mutant(
        "top-left causal",
        """
def chunk_mask(start, size):
    return torch.ones(size, start + size, dtype=torch.bool).tril()
""",
        "first at [0, 1]: expected True, got False",
    ),
    Mutant(
        "chunk sees the future of its own chunk",
        """
def chunk_mask(start, size):
    return torch.ones(size, start + size, dtype=torch.bool)
""",
        "first at [0, 5]: expected False, got True",
    ),
    Mutant(
        "a token does not see itself",
        """
def chunk_mask(start, size):
    return torch.arange(start + size) < torch.arange(start, start + size)[:, None]
""",
        "first at [0, 4]: expected True, got False",
    ),
    Mutant(
        "a token sees the next one",
        """
def chunk_mask(start, size):
    return torch.ones(size, start + size, dtype=torch.bool).tril(start + 1)
""",
        "first at [0, 5]: expected False, got True",
    ),
    Mutant(
        "earlier chunks are hidden",
        """
def chunk_mask(start, size):
    keys, queries = torch.arange(start + size), torch.arange(start, start + size)[:, None]
    return (keys <= queries) & (keys >= start)
""",
        "scores are visible in all, and",
    ),
    Mutant(
        "keys before the chunk only",
        """
def chunk_mask(start, size):
    return (torch.arange(start + size) < start).expand(size, -1)
""",
        "the hidden state at position 0 differs by",
    ),
    Mutant(
        "queries and keys swapped",
        """
def chunk_mask(start, size):
    return torch.arange(start + size)[:, None] <= torch.arange(start, start + size)
""",
        "the shape must be [3, 7], and is [7, 3]",
    ),
    Mutant(
        "true where hidden",
        """
def chunk_mask(start, size):
    return torch.arange(start + size) > torch.arange(start, start + size)[:, None]
""",
        "first at [0, 0]: expected True, got False",
    ),
    Mutant(
        "zeros and ones in place of bool",
        """
def chunk_mask(start, size):
    return torch.ones(size, start + size).tril(start)
""",
        "the dtype must be torch.bool, and is torch.float32",
    ),
    # ---- peak_scores
    Mutant(
        "the bound m x n in place of the peak",
        """
def peak_scores(n, m, heads):
    return heads * min(m, n) * n
""",
        "peak_scores(7, 4, 9): expected 189, got 252",
    ),
    Mutant(
        "the last chunk taken for the largest",
        """
def peak_scores(n, m, heads):
    start = (n - 1) // m * m
    return heads * (n - start) * n
""",
        "peak_scores(3, 2, 1): expected 4, got 3",
    ),
    Mutant(
        "keys of the own chunk alone",
        """
def peak_scores(n, m, heads):
    return heads * min(m, n) ** 2
""",
        "peak_scores(7, 4, 9): expected 189, got 144",
    ),
    Mutant(
        "all steps added up",
        """
def peak_scores(n, m, heads):
    return sum(heads * min(m, n - start) * min(start + m, n) for start in range(0, n, m))
""",
        "peak_scores(7, 4, 9): expected 189, got 333",
    ),
    Mutant(
        "visible scores alone",
        """
def peak_scores(n, m, heads):
    return heads * max(
        sum(p + 1 for p in range(start, min(start + m, n))) for start in range(0, n, m)
    )
""",
        "counted in the model: expected 84, got 72",
    ),
    Mutant(
        "heads forgotten",
        """
def peak_scores(n, m, heads):
    return max(min(m, n - start) * min(start + m, n) for start in range(0, n, m))
""",
        "expected 189, got 21",
    ),
    # ---- generate
    Mutant(
        "samples after every chunk",
        """
def generate(model, prompt, n_new, m):
    cache = KVCache(model, len(prompt) + n_new)
    new, start, output = list(prompt), 0, []
    while len(output) < n_new:
        ids, positions = line(new[:m], start, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        start += len(ids)
        output.append(int(model.logits(hidden[-1:]).argmax()))
        new = new[m:] or [output[-1]]
    return output
""",
        "and must have [4, 3, 1, 1]",
    ),
    Mutant(
        "a chunk of one token taken for a new token's step",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new + len(prompt))
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if len(new) == 1 or computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "generate(model, a prompt of 2, 3, 1): first different",
    ),
    Mutant(
        "m ignored",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    for _ in range(n_new):
        ids, positions = line(tokens[computed:], computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed = len(tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "the steps had [7, 1, 1] tokens, and must have [4, 3, 1, 1]",
    ),
    Mutant(
        "last chunk padded to m in the loop",
        """
def generate(model, prompt, n_new, m):
    tokens = list(prompt)
    cache = KVCache(model, len(prompt) + n_new + m)
    for start in range(0, len(prompt), m):
        new = prompt[start : start + m]
        ids, positions = line([*new, *[0] * (m - len(new))], start, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
    tokens.append(int(model.logits(hidden[len(new) - 1 : len(new)]).argmax()))
    while len(tokens) < len(prompt) + n_new:
        ids, positions = line(tokens[-1:], len(tokens) - 1, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "the steps had [4, 4, 1, 1] tokens",
    ),
    Mutant(
        "the token is read from a pad of the last chunk",
        """
def generate(model, prompt, n_new, m):
    tokens = list(prompt)
    cache = KVCache(model, len(prompt) + n_new + m)
    for start in range(0, len(prompt), m):
        new = prompt[start : start + m]
        ids, positions = line([*new, *[0] * (m - len(new))], start, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
    while True:
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if len(tokens) == len(prompt) + n_new:
            return tokens[len(prompt) :]
        ids, positions = line(tokens[-1:], len(tokens) - 1, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
""",
        "generate(model, a prompt of 7, 3, 4): first different",
    ),
    Mutant(
        "last short chunk dropped in the loop",
        """
def generate(model, prompt, n_new, m):
    tokens = list(prompt)
    cache = KVCache(model, len(prompt) + n_new)
    for i in range(max(1, len(prompt) // m)):
        ids, positions = line(prompt[i * m : (i + 1) * m], i * m, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
    while True:
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if len(tokens) == len(prompt) + n_new:
            return tokens[len(prompt) :]
        ids, positions = line(tokens[-1:], len(tokens) - 1, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
""",
        "generate(model, a prompt of 7, 3, 4): the hidden state at position 7 is NaN",
    ),
    Mutant(
        "positions start again in every chunk",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, 0, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "positions, all steps together: first different at index 4: expected 4, got 0",
    ),
    Mutant(
        "chunk offset off by one in the loop",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new + 1)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed + (computed > 0), model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "positions, all steps together: first different at index 4: expected 4, got 5",
    ),
    Mutant(
        "start counted in chunks in the loop",
        """
def generate(model, prompt, n_new, m):
    tokens = list(prompt)
    cache = KVCache(model, len(prompt) + n_new)
    for i in range(-(-len(prompt) // m)):
        ids, positions = line(prompt[i * m : (i + 1) * m], i, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
    while True:
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if len(tokens) == len(prompt) + n_new:
            return tokens[len(prompt) :]
        ids, positions = line(tokens[-1:], len(tokens) - 1, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
""",
        "first different at index 4: expected 4, got 1",
    ),
    Mutant(
        "a new cache for every chunk",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + n_new:
        cache = KVCache(model, len(prompt) + n_new)
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "the hidden state at position 4 is NaN",
    ),
    Mutant(
        "chunks attend to themselves alone",
        """
def generate(model, prompt, n_new, m):
    from minillm.attention import SelfAttend
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, SelfAttend(positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "the hidden state at position 4 differs by",
    ),
    Mutant(
        "the token is read from the first row of the chunk",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[:1]).argmax()))
    return tokens[len(prompt) :]
""",
        "generate(model, a prompt of 7, 3, 4): first different at index 0",
    ),
    Mutant(
        "logits of every row of every chunk",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        logits = model.logits(model(ids, positions, CachedAttend(cache, positions)))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
""",
        "9 rows went through the head, and 3 would do",
    ),
    Mutant(
        "the last new token is fed back",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while computed < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) : len(prompt) + n_new]
""",
        "the steps had [4, 3, 1, 1, 1] tokens",
    ),
    Mutant(
        "the prompt grows",
        """
def generate(model, prompt, n_new, m):
    tokens, n, computed = prompt, len(prompt), 0
    cache = KVCache(model, n + n_new)
    while len(tokens) < n + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[n:]
""",
        "changed its argument number 2",
    ),
    Mutant(
        "a cache kept between two texts",
        """
def generate(model, prompt, n_new, m, kept={}):
    tokens, computed = list(prompt), 0
    cache = kept.setdefault("cache", KVCache(model, 64))
    computed = kept.get("computed", 0) if prompt == kept.get("prompt") else 0
    kept["prompt"] = list(prompt)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        kept["computed"] = min(computed, len(prompt) - 1)
    return tokens[len(prompt) :]
""",
        "the steps had",
    ),
    Mutant(
        "the prompt comes back with the new tokens",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens
""",
        "return the 3 new tokens alone",
    ),
    Mutant(
        "computed grows by m",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += m
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "does `computed` grow by what was in the step, and not by m?",
    ),
    Mutant(
        "a cache for the prompt alone",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt))
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "has the cache room for the prompt and the new tokens?",
    ),
    Mutant(
        "the prompt grows, and the loop runs on beyond the cache",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = prompt, 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "generate changed its argument number 2, the prompt; work on a copy",
    ),
    Mutant(
        "computed does not grow",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        if computed == len(tokens):
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
""",
        "does `computed` grow after each step?",
    ),
    Mutant(
        "a tensor for a token",
        """
def generate(model, prompt, n_new, m):
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new)
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)
        hidden = model(ids, positions, CachedAttend(cache, positions))
        computed += len(new)
        if computed == len(tokens):
            tokens.append(model.logits(hidden[-1:]).argmax())
    return tokens[len(prompt) :]
""",
        "the list holds Tensor; token ids must be whole numbers",
    ),
]
