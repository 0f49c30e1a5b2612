"""Wrong solutions of lesson 03: loops and draws as learners write them, each with one bug."""

from wrong import Mutant

LOOP = """
def generate(model, prompt, n_new):
    text = list(prompt)
    for _ in range(n_new):
        tokens, positions = line(text, 0, model.device)
        hidden = model(tokens, positions, SelfAttend(positions))
        logits = model.logits(hidden[-1:])
        token = int(logits.argmax(-1))
        text.append(token)
        if token in model.config.eos:
            break
    return text[len(prompt):]
"""

DRAW = """
def choose(logits, temperature, top_k, top_p, u):
    if temperature == 0:
        return int(logits.argmax())
    wide = logits.double()
    probs = ((wide - wide.max()) / temperature).softmax(-1)
    probs, ids = probs.sort(descending=True, stable=True)
    if 0 < top_k < len(probs):
        probs[top_k:] = 0
    total = probs.sum()
    if top_p < 1:
        before = probs.cumsum(0) - probs
        out = before >= top_p * total
        out[0] = False
        probs[out] = 0
    probs = torch.zeros_like(probs).scatter(0, ids, probs)
    probs = probs / probs.sum()
    running = probs.cumsum(0)
    return int(torch.searchsorted(running, torch.tensor(u, dtype=running.dtype), right=True))
"""


def with_bug(code: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def loop(name: str, words: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, with_bug(LOOP, *changes), words)


def draw(name: str, words: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, with_bug(DRAW, *changes), words)


def count(name: str, words: str, expression: str) -> Mutant:
    return Mutant(name, f"def tokens_computed(n_prompt, n_new):\n    return {expression}\n", words)


FORWARD = "tokens, positions = line(text, 0, model.device)"
END = "        if token in model.config.eos:\n            break\n"
CUT = "    if 0 < top_k < len(probs):\n        probs[top_k:] = 0\n"

WRONG = [
    # ---- the loop
    loop(
        "positions restart at 0 at the first new token",
        "the positions of pass 2: first different at index",
        (
            FORWARD,
            FORWARD + "\n        positions = torch.cat((positions[:len(prompt)], positions[:len(text) - len(prompt)]))",
        ),
    ),
    loop(
        "every new token has position 0",
        "the positions of pass 2: first different at index",
        (FORWARD, FORWARD + "\n        positions[len(prompt):] = 0"),
    ),
    loop(
        "positions counted from 1 (the same text, since RoPE is relative)",
        "the positions of pass 1: first different at index 0: expected 0, got 1",
        (FORWARD, "tokens, positions = line(text, 1, model.device)"),
    ),
    loop(
        "positions moved on by the new tokens",
        "the positions of pass 2: first different at index 0",
        (FORWARD, "tokens, positions = line(text, len(text) - len(prompt), model.device)"),
    ),
    loop("logits of row 0", "the head was given row 0", ("hidden[-1:]", "hidden[:1]")),
    loop("logits of the last row but one", "the head was given row 5", ("hidden[-1:]", "hidden[-2:-1]")),
    loop(
        "logits of the prompt's last row in every pass",
        "pass 2 over 8 tokens: the head was given row 6",
        ("hidden[-1:]", "hidden[len(prompt) - 1:len(prompt)]"),
    ),
    loop(
        "argmax over the rows in place of the vocabulary",
        "the new ids after prompt",
        ("hidden[-1:]", "hidden"),
        ("int(logits.argmax(-1))", "int(logits.argmax(0)[-1])"),
    ),
    loop(
        "all rows through the head (right, and T times the work)",
        "7 rows went through the head",
        ("hidden[-1:]", "hidden"),
        ("int(logits.argmax(-1))", "int(logits.argmax(-1)[-1])"),
    ),
    loop(
        "the best token over all rows at once",
        "the new ids after prompt",
        ("hidden[-1:]", "hidden"),
        ("int(logits.argmax(-1))", "int(logits.argmax()) % logits.shape[-1]"),
    ),
    loop(
        "every query sees all tokens: no causal mask",
        "the new ids after",
        (
            "SelfAttend(positions))",
            "lambda layer, q, k, v: sdpa(q, k, v, torch.ones(len(text), len(text), dtype=torch.bool)))",
        ),
        ("    text = list(prompt)\n", "    from minillm.attention import sdpa\n    text = list(prompt)\n"),
    ),
    loop(
        "only the newest token is fed, as if something had been kept",
        "the text that pass 2 is fed",
        (
            FORWARD,
            "start = 0 if len(text) == len(prompt) else len(text) - 1\n"
            "        tokens, positions = line(text[start:], start, model.device)",
        ),
    ),
    loop(
        "only the prompt is fed, again and again",
        "the text that pass 2 is fed, after a prompt of 7: expected 8 entries, got 7",
        (FORWARD, "tokens, positions = line(prompt, 0, model.device)"),
    ),
    loop("one token too many", "expected 1 entries, got 2", ("range(n_new)", "range(n_new + 1)")),
    loop("one token too few", "expected 1 entries, got 0", ("range(n_new)", "range(n_new - 1)")),
    loop(
        "n_new counts the prompt too",
        "expected 1 entries, got 0",
        ("for _ in range(n_new):", "while len(text) < n_new:"),
    ),
    loop(
        "one more pass at the end, for nothing",
        "6 passes for 5 new tokens",
        ("range(n_new)", "range(n_new + 1)"),
        ("    return text[len(prompt):]", "    return text[len(prompt):][:n_new]"),
    ),
    loop("never stops at an end token", "it went on after the end token", (END, "")),
    loop(
        "the end token is left out",
        "is missing: it ends the text, and it is returned too",
        ("        text.append(token)\n" + END, END + "        text.append(token)\n"),
    ),
    loop(
        "the end token comes twice",
        "comes twice at the end",
        ("            break\n", "            text.append(token)\n            break\n"),
    ),
    loop(
        "stops one token after the end token",
        "it went on after the end token",
        (
            "        text.append(token)\n" + END,
            "        done = text[-1] in model.config.eos and len(text) > len(prompt)\n"
            "        text.append(token)\n        if done:\n            break\n",
        ),
    ),
    loop(
        "only the first of several end tokens counts",
        "generate raised IndexError",
        ("in model.config.eos", "== model.config.eos[0]"),
    ),
    loop(
        "only the first of several end tokens counts, and none is no trouble",
        "it went on after the end token",
        ("in model.config.eos", "in model.config.eos[:1]"),
    ),
    loop(
        "an end token in the prompt ends the text",
        "is in the prompt",
        ("if token in model.config.eos:", "if any(t in model.config.eos for t in text):"),
    ),
    loop(
        "a prompt that ends with an end token gets nothing",
        "it stopped after 0 new tokens, because the prompt's last token",
        ("for _ in range(n_new):", "while len(text) < len(prompt) + n_new and text[-1] not in model.config.eos:"),
        (END, ""),
    ),
    loop("the prompt comes back too", "the prompt came back too", ("return text[len(prompt):]", "return text")),
    loop("the caller's prompt grows", "generate changed its argument number 2", ("list(prompt)", "prompt")),
    loop("tensors in the list", "it must hold Python ints", ("int(logits.argmax(-1))", "logits.argmax(-1)[0]")),
    loop(
        "text kept from call to call in a default",
        "the new ids after",
        ("prompt, n_new):", "prompt, n_new, new=[]):"),
        ("list(prompt)", "prompt + new"),
        ("        text.append(token)\n", "        text.append(token)\n        new.append(token)\n"),
        ("return text[len(prompt):]", "return list(new)"),
    ),
    loop("no return", "is a `return` missing?", ("    return text[len(prompt):]\n", "")),
    # ---- the choice
    draw("temperature multiplied", "should come for", (") / temperature).", ") * temperature).")),
    draw("temperature ignored", "should come for", (" / temperature)", ")")),
    draw(
        "probabilities divided by the temperature",
        "should come for",
        (" / temperature).softmax(-1)", ").softmax(-1) / temperature"),
    ),
    draw(
        "temperature 0 divides",
        "temperature 0, top_k 0, top_p 1",
        ("    if temperature == 0:\n        return int(logits.argmax())\n", ""),
    ),
    draw("temperature 0 takes the worst token", "the token at temperature 0", ("logits.argmax()", "logits.argmin()")),
    draw(
        "among equals the last at temperature 0",
        "where ids 1, 3 and 4 are equal: expected 1, got 4",
        ("int(logits.argmax())", "int((logits == logits.max()).nonzero()[-1])"),
    ),
    draw(
        "overflow at a tiny temperature",
        "temperature 1e-308",
        ("(wide - wide.max()) / temperature", "wide / temperature"),
    ),
    draw(
        "top_k keeps everything equal to the k-th",
        "is filtered out; what is left: [0, 1]",
        ("probs[top_k:] = 0", "probs[probs < probs[top_k - 1]] = 0"),
    ),
    draw(
        "top_k keeps one too many",
        "is filtered out",
        ("probs[top_k:] = 0", "probs[top_k + 1:] = 0"),
    ),
    draw("top_k keeps the least likely", "is filtered out", ("probs[top_k:] = 0", "probs[:-top_k] = 0")),
    draw("top_k 0 keeps nothing", "ids run from 0 to", ("0 < top_k < len(probs)", "top_k < len(probs)")),
    draw(
        "a top_k above the vocabulary fails",
        "choose raised RuntimeError",
        ("0 < top_k < len(probs)", "top_k > 0"),
        ("probs[top_k:] = 0", "probs[probs < probs.topk(top_k).values[-1]] = 0"),
    ),
    draw(
        "top_k after top_p",
        "top_k 2, top_p 0.6: token 1 came",
        (CUT, ""),
        ("    probs = torch.zeros", CUT + "    probs = torch.zeros"),
    ),
    draw(
        "top_p against the whole, not against what top_k left",
        "top_k 2, top_p 0.6: token 1 came",
        ("top_p * total", "top_p"),
    ),
    draw(
        "top_p drops the token that crosses the line",
        "should come for",
        ("        before = probs.cumsum(0) - probs\n", ""),
        ("out = before >= top_p", "out = probs.cumsum(0) > top_p"),
    ),
    draw(
        "top_p drops the token that crosses, and may keep none",
        "ids run from 0 to",
        ("        before = probs.cumsum(0) - probs\n", ""),
        ("out = before >= top_p", "out = probs.cumsum(0) > top_p"),
        ("        out[0] = False\n", ""),
    ),
    draw(
        "top_p keeps one too many where the share is met exactly",
        "top_p 0.25: token 1 came",
        ("before >= top_p", "before > top_p"),
    ),
    draw("top_p 0 keeps nothing", "top_p 0, u", ("        out[0] = False\n", "")),
    draw(
        "top_p as a least probability",
        "top_p 0.05",
        ("out = before >= top_p * total", "out = probs < top_p * probs[0]"),
    ),
    draw(
        "top_p on logits before the temperature",
        "temperature 0.5, top_k 6, top_p 0.9",
        ("before = probs.cumsum(0) - probs", "plain = wide.softmax(-1)[ids]\n        before = plain.cumsum(0) - plain"),
        ("top_p * total", "top_p * plain[probs > 0].sum()"),
    ),
    draw(
        "top_p against weights that do not sum to 1",
        "at top_k 0 and top_p 1 nothing may be filtered",
        (".softmax(-1)", ".exp()"),
        ("    if top_p < 1:\n", "    if True:\n"),
        ("top_p * total", "top_p"),
    ),
    draw(
        "top_p 1 filters the tail away, since sums are rounded",
        "the token of logits [-40.0, 0.0] at temperature 1, top_k 0, top_p 1, u = 0",
        ("    if top_p < 1:\n", "    if True:\n"),
    ),
    draw(
        "no weight left, and told so",
        "no token came, nor does one at u = 0: are all weights 0, or NaN?",
        ("0 < top_k < len(probs)", "top_k < len(probs)"),
    ),
    draw("no renormalisation", "does the running sum reach 1", ("    probs = probs / probs.sum()\n", "")),
    draw(
        "no renormalisation, and the last id takes the rest",
        "is filtered out",
        ("    probs = probs / probs.sum()\n", ""),
        ("    return int(torch.search", "    return min(len(probs) - 1, int(torch.search"),
        ("right=True))", "right=True)))"),
    ),
    draw("searchsorted without right=True", "at u = 0.25", (", right=True", "")),
    draw(
        "the running sum in order of likelihood",
        "with a stretch of",
        ("    probs = torch.zeros_like(probs).scatter(0, ids, probs)\n", ""),
        ("    return int(torch.search", "    return int(ids[torch.search"),
        ("right=True))", "right=True)])"),
    ),
    draw(
        "a place in the sorted order returned as an id",
        "should come for",
        ("    probs = torch.zeros_like(probs).scatter(0, ids, probs)\n", ""),
    ),
    draw(
        "ids gathered where they must be scattered",
        "should come for",
        ("torch.zeros_like(probs).scatter(0, ids, probs)", "probs[ids]"),
    ),
    draw(
        "u ignored: multinomial draws",
        "should come for",
        ("    return int(torch.search", "    return int(torch.multinomial(probs, 1))\n    return int(torch.search"),
    ),
    draw(
        "the caller's logits are divided in place",
        "choose changed its argument number 1",
        ("    wide = logits.double()\n", "    logits /= temperature\n    wide = logits.double()\n"),
        (" / temperature).softmax", ").softmax"),
    ),
    draw(
        "the caller's float64 logits are changed, since double() is no copy",
        "choose changed its argument number 1",
        ("    wide = logits.double()\n", "    wide = logits.double()\n    wide -= wide.max()\n"),
    ),
    draw("bfloat16 all the way", "ids run from 0 to 1999", ("wide = logits.double()", "wide = logits")),
    draw(
        "a tensor in place of a number",
        "it must be a Python int",
        ("    return int(torch.search", "    return (torch.search"),
    ),
    # ---- the count
    count(
        "the last new token is fed too",
        "tokens_computed(7, 3): expected 24, got 27",
        "n_new * n_prompt + n_new * (n_new + 1) // 2",
    ),
    count(
        "the needed tokens",
        "tokens_computed(7, 3): expected 24, got 9",
        "n_prompt + n_new - 1",
    ),
    count(
        "the whole square",
        "tokens_computed(7, 3): expected 24, got 100",
        "(n_prompt + n_new) ** 2",
    ),
    count(
        "the prompt once",
        "tokens_computed(7, 3): expected 24, got 10",
        "n_prompt + n_new * (n_new - 1) // 2",
    ),
    count(
        "the prompt in all passes, new tokens once (24 too for 7 and 3)",
        "tokens_computed(1, 1): expected 1, got 2",
        "n_new * n_prompt + n_new",
    ),
    count(
        "halved before the product (24 too for 7 and 3)",
        "tokens_computed(1, 2): expected 3, got 4",
        "n_new * n_prompt + n_new * (n_new // 2)",
    ),
    count(
        "a float",
        "expected 24, got 24.0",
        "n_new * n_prompt + n_new * (n_new - 1) / 2",
    ),
    count(
        "a float, and told so",
        "got 24.0, a float; it must be an int",
        "n_new * n_prompt + n_new * (n_new - 1) / 2",
    ),
    count(
        "a float made whole",
        "tokens_computed(1000000000000001, 100001)",
        "int(n_new * n_prompt + n_new * (n_new - 1) / 2)",
    ),
]
