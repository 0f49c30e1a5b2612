# %% [markdown]
# # 03 · Naive generation
#
# A model gives scores for one next token. Call it again and again, and it writes. This lesson builds that loop and the
# choice of a token from its scores, and finds what the loop costs: a square.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/03_naive.ipynb)
#
# **Objectives.** At the end you can
#
# - write greedy generation that runs the whole text again for each new token, and stops where it should;
# - choose a token by temperature, top-k and top-p from one number u, exactly;
# - say why u is computed from three numbers instead of taken from a random generator;
# - derive how many tokens go through the model, and find that number in the counters and in the clock.
#
# **Prerequisites:** lesson 02 (the Llama; you use it here, you need not have written it). **Minutes:** about 80, of
# which the machine works 3. **Hardware:** 2 CPU cores, 2 GB of memory; no GPU.
#
# **The one change:** from one pass of the model to a text, with nothing kept between passes. The stage is
# `minillm/stages/naive.py`. It is slow on purpose: every later stage is checked against it.

# %% tags=["setup"]
import random
from itertools import accumulate
from statistics import linear_regression, median
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm import lab
from minillm.attention import SelfAttend
from minillm.batch import line
from minillm.bench.harness import Job, run
from minillm.draws import uniform
from minillm.fetch import find
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.stages import naive
from minillm.tokenizer import Tokenizer

# %%
lab.start("03")

# %% [markdown]
# ## The idea
#
# The model takes tokens and their positions and gives one hidden state per token. A row of hidden states times the head
# gives one score, a **logit**, for each of the V tokens that could come next. The row of token t speaks of token
# t + 1. So to go on with a text, only the **last** row matters.
#
# The running example is a prompt of 7 tokens, `<bos> I am sure this pro ject`. It comes from the article [*Continuous
# batching from first principles*](https://huggingface.co/blog/continuous_batching), where the token after it is `will`.
# Append it, and ask again:
#
# ```
# pass 1    <bos> I am sure this pro ject                  7 tokens in,  `will` out
# pass 2    <bos> I am sure this pro ject will             8 tokens in,  next out
# pass 3    <bos> I am sure this pro ject will ...         9 tokens in,  next out
# ```
#
# Three new tokens have cost 7 + 8 + 9 = 24 tokens through the model. A token looks only at itself and at what stands
# before it. So in pass 2 the first 7 rows come out as they did in pass 1. All that pass 2 **needed** was the row of
# `will`. Count what is needed: each token once, and the last new token not at all, since nothing follows it.
#
# ```
# pushed = n + (n + 1) + ... + (n + m - 1)   [tokens]     n tokens of prompt, m new ones
# needed = n + m - 1                         [tokens]     n = 7, m = 3: 24 pushed, 9 needed
# ```
#
# The last new token is never fed. Keep that in mind: it is where most counts go wrong by one.
#
# The next cells load the real model, and run passes 1 and 2.

# %%
folder = find("smollm2-135m-instruct")
model, tokenizer = Llama.from_pretrained(folder), Tokenizer.from_pretrained(folder)
c, weights = model.config, sum(p.numel() for p in model.parameters())
pack_weights(model)  # faster, the same numbers
# This checkpoint's own tokenizer would write " project" as one token. The seven pieces are the article's.
PIECES = ["I", " am", " sure", " this", " pro", "ject"]
EXAMPLE = [tokenizer.special_ids["<|im_start|>"]] + [token for piece in PIECES for token in tokenizer.encode(piece)]
print(f"{len(EXAMPLE)} tokens: {EXAMPLE}")
head = c.vocab_size * c.d_model
print(f"{model.dtype}; V = {c.vocab_size:,} tokens, d = {c.d_model}; {weights:,} weights")
print(f"the head: {head:,} of them, {head / weights:.0%}, multiplied once for each row that goes through it")

# %%
passes = []
for ids in (EXAMPLE, EXAMPLE + tokenizer.encode(" will")):
    tokens, positions = line(ids, 0, model.device)
    passes.append(model(tokens, positions, SelfAttend(positions)))
one, two = passes
apart = ((two[:7] - one).abs().max() / one.abs().max()).item()
print(f"hidden states {list(one.shape)}, then {list(two.shape)}; the first 7 rows of both differ by at most")
print(f"{apart:.1e} of the largest value. (Where it is not 0, it is rounding: the same sums in another order.)")

# %% [markdown]
# ## Predict
#
# You will let the real model write after these 7 tokens. How many tokens go through it in all, summed over all passes?
# Run the cell once with `None`: it prints M, how many new ones there will be. Then put your number in its place, worked
# out or guessed, and run it again.

# %%
M = lab.size(ci=32, default=256, long=1024)  # new tokens
print(f"{len(EXAMPLE)} tokens of prompt, M = {M} new ones")
lab.predict("03.tokens_computed", None)

# %% [markdown]
# The last of these new tokens take passes over the longest texts. *Measure* divides the median time of the last M/8 new
# tokens by that of the first M/8 (without the very first). What comes out? (Length alone would say about
# `(7 + 15 M/16) / (7 + M/16)`. Is it that much?)

# %%
lab.predict("03.slowdown", None)

# %% [markdown]
# ## Build
#
# Three functions: the loop, the choice, the count.
#
# ### The loop: `generate`
#
# What you have, and the shapes (T tokens in this pass, d the model's width, V the vocabulary):
#
# | call | gives |
# |---|---|
# | `line(ids, start, device)` | the ids as a tensor [T], and their positions `start`, `start + 1`, ... as another [T] |
# | `SelfAttend(positions)` | attention over this pass's own tokens alone, causal by position |
# | `model(tokens, positions, attend)` | hidden states [T, d] |
# | `model.logits(rows)` | R rows of hidden states [R, d] to logits [R, V] |
# | `model.device`, `model.config.eos` | where the weights are; a tuple of end-of-text ids, none, one or several |
#
# Three things to decide with care. **Positions** run from 0 over the whole text, in every pass. **Only one row** is
# worth the head, a fifth of all weights here. And the **end**: when the model itself chooses an end token,
# the text is over. That token is returned, because the caller must be able to tell "it ended" from "it was cut off".
# An end token inside the *prompt* ends nothing: a chat prompt has one after every message.


# %% task="03.generate"
def generate(model: Llama, prompt: list[int], n_new: int) -> list[int]:
    """Greedy: takes the best next token, n_new times (at least 1), and runs the whole text again each time.

    Returns the new ids alone, as Python ints. An end token (one of model.config.eos) is the last one returned.
    """
    ### BEGIN SOLUTION
    text = list(prompt)
    for _ in range(n_new):
        tokens, positions = line(text, 0, model.device)  # [T]
        hidden = model(tokens, positions, SelfAttend(positions))  # [T, d]
        token = int(model.logits(hidden[-1:]).argmax(-1))  # from [1, V]
        text.append(token)
        if token in model.config.eos:
            break
    return text[len(prompt) :]
    ### END SOLUTION


# %%
lab.check("03", "generate")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Keep one list, the text so far. Begin it as a *copy* of the prompt, and let it grow by one id per pass.
# </details>
#
# <details><summary>Hint 2</summary>
#
# A slice keeps the dimension: `hidden[-1]` is [d], `hidden[-1:]` is [1, d], which is what `model.logits` wants. The
# best of V scores is along the last dimension; the result is a tensor, and `int(...)` makes it a number.
# </details>
#
# <details><summary>Hint 3</summary>
#
# In this order: run, choose, append, *then* ask whether it was an end token. At the end, cut the prompt off again.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation, and the common wrong answer</summary>
#
# `line(text, 0, ...)` is called with the whole text and start 0 in every pass: nothing was kept, so everything is there
# again, at the same positions as before. The order run, choose, append, ask makes both ends right: the end token is in
# the list when the loop stops, once, and the limit needs no extra case.
#
# The common wrong answer asks `if text[-1] in model.config.eos` *before* the first pass, or looks for an end token
# anywhere in `text`. With a bare sentence both look fine. With a chat prompt, which is full of end tokens, the second
# one stops after a single token. The other classic is `text = prompt`: then the caller's list grows.
#
# Positions that start at 1 give the same text (but for rounding), because the rotation makes attention depend on
# differences of positions only. It is still wrong: once K and V are kept (lesson 04), a position says where a token is
# stored.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Now let your loop write, on the real model. Then a chat prompt, by the package's naive stage: count the end tokens in
# its prompt, and look at the last id that it returns.

# %%
print(tokenizer.decode(EXAMPLE) + " |" + tokenizer.decode(generate(model, EXAMPLE, 8)))

# %%
chat = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
asked = run(model, "naive", [Job(tuple(chat), 32, ignore_eos=False)])
[end] = c.eos
print(f"prompt: {len(chat)} tokens, {chat.count(end)} of them the end token {end}")
print(f"output: {asked.outputs[0]}, finish reason: {asked.finish_reasons[0]}")
print(repr(tokenizer.decode(asked.outputs[0], skip_special=False)))

# %% [markdown]
# ### The choice: `choose`
#
# The best token every time makes flat text, and the same text every time. So one draws: the token of id i comes with a
# probability that grows with its logit. Four numbers say how.
#
# - **temperature** divides the logits before the softmax: `weight[i] = exp(logit[i] / temperature)`. Below 1 the best
#   tokens gain, above 1 the others do. At 0 the best token is simply taken.
# - **top_k** keeps the k most likely tokens; 0 keeps all, and so does a k above V. Among equals the lower ids stay, so
#   that it is k and not more.
# - **top_p** keeps the smallest set of most likely tokens whose share *of what top_k left* is at least top_p. So the
#   token that crosses the line stays, and one token always does. At 1 nothing is filtered, however small its weight:
#   leave the filter out then, for a rounded sum may reach the whole before the last tokens have been added.
# - **u**, in [0, 1), makes the draw. Lay the weights that are left end to end, in order of ids, and stretch u over
#   their sum. The token in whose stretch it falls is chosen. A stretch holds its left end and not its right one.
#
# ```
# weights kept      a: 5     b: 0     c: 3     d: 2         sum 10
# running sum          5        5        8       10
# u = 0.00 -> 0 -> a     u = 0.50 -> 5 -> c     u = 0.79 -> 7.9 -> c     u = 0.80 -> 8 -> d
# ```
#
# At 5 it is c: a's stretch ends before 5, and b's is empty. b was filtered out, and must not come for any u.
#
# Here is what temperature and top_p do to the real logits after the 7 tokens. Nothing is drawn yet.

# %%
tokens, positions = line(EXAMPLE, 0, model.device)
row = model.logits(model(tokens, positions, SelfAttend(positions))[6:])[0]  # [V]: the row of the 7th token
for temperature in (0.5, 1.0, 2.0):
    share, ids = (row.double() / temperature).softmax(-1).sort(descending=True)  # [V]
    held = share.cumsum(0)
    kept = {p: int((held < p).sum()) + 1 for p in (0.5, 0.9)}
    first = zip(ids[:4].tolist(), share[:4].tolist(), strict=True)
    top = ", ".join(f"{tokenizer.decode([i])!r} {s:.0%}" for i, s in first)
    print(f"temperature {temperature}: {top}; half the weight lies on {kept[0.5]:,} tokens, 90% on {kept[0.9]:,}")

# %% [markdown]
# Work in float64. The model's logits may be bfloat16, with 8 significant bits: a running sum over 49,152 tokens in that
# would lose most of them. And a temperature may be as small as a float can be: take care that nothing overflows.


# %% task="03.choose"
def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    """One token id out of one row, logits [V] of any float dtype. The row is not changed.

    temperature 0 takes the best token (the lowest id among equals), whatever the other three say. Otherwise: weights,
    then top_k, then top_p, then the token in whose stretch of the running sum u lies, in order of ids.
    """
    ### BEGIN SOLUTION
    if temperature == 0:
        return int(logits.argmax())
    wide = logits.double()
    weights = ((wide - wide.max()) / temperature).exp()  # [V]: the best has 1, so nothing overflows
    ordered, ids = weights.sort(descending=True, stable=True)  # [V], equals by id
    if top_k > 0:
        ordered[top_k:] = 0
    if top_p < 1:
        before = ordered.cumsum(0) - ordered  # [V]: the weight of all more likely tokens
        out = before >= top_p * ordered.sum()
        out[0] = False
        ordered[out] = 0
    running = torch.zeros_like(ordered).scatter(0, ids, ordered).cumsum(0)  # [V], in order of ids again
    return int(torch.searchsorted(running, u * running[-1], right=True))
    ### END SOLUTION


# %%
lab.check("03", "choose")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `exp(logit / temperature)` overflows where logit / temperature is large. Only ratios of weights matter, so subtract
# the largest logit first: then the best token has weight 1 and all others less.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Sort once, with `descending=True, stable=True`; keep the ids that `sort` returns. Both filters are simple on sorted
# weights: top_k cuts after k, and top_p drops a token if the weight of all tokens *before* it already reaches top_p
# times the sum of what top_k left. `weights[ids] = ordered` puts them back where they belong.
# </details>
#
# <details><summary>Hint 3</summary>
#
# The weights that are left do not sum to 1. So multiply u by their sum, as top_p by the sum of what top_k left. The
# first index whose running sum is *above* that is the token. `torch.searchsorted` finds it; look up what its `right`
# does when the value is equal to an entry.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation, and the common wrong answer</summary>
#
# The weight of all more likely tokens is `running - ordered`: 0 for the best token, so it stays for any top_p above 0.
# A token goes only if that weight reaches the share *without* it. Hence the token that crosses the line stays.
#
# The common wrong answer compares the running sum *with* the token in it: `running > top_p` goes out. Then the crossing
# token is lost. With top_p = 0.5 and a best token of 60 %, nothing is left at all.
#
# The second one filters probabilities and forgets that they no longer sum to 1: u = 0.95 then points past the last
# token. `u * running[-1]` renormalises without a division. And without `right=True`, u = 0 picks index 0 even if token
# 0 was filtered out: its running sum, 0, is not below 0.
#
# A top_k written as `logits < the k-th largest` keeps every token that equals the k-th: among four equal logits, top_k
# = 2 would leave four.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### Where u comes from
#
# The usual way is a random generator: a hidden state, and each draw moves it on. Then a draw depends on **how many
# draws came before it**, by anybody. Alone, request A gets draws 0, 1, 2, 3. Beside B it gets every other one. Its text
# changes because a stranger arrived. An engine that batches has strangers all the time.
#
# So here randomness is a counter (`minillm/draws.py`): u is a fixed, scrambling function of three numbers.
#
# - **seed**: what the user asked for. The same seed gives the same text tomorrow.
# - **sample**: which of several texts from one prompt. Without it all of them would be the same text.
# - **n_emitted**: how many tokens this text has so far. Without it every token would be drawn at the same u.
#
# None of the three knows who else is there, in which order, or whether the request was stopped halfway and begun again.


# %%
def shared_generator(order: str) -> dict[str, list[float]]:
    """Four steps; in each, every request of `order` takes the next number of one generator."""
    generator, draws = random.Random(0), {name: [] for name in order}
    for _ in range(4):
        for name in order:
            draws[name].append(round(generator.random(), 3))
    return draws


def counter(order: str) -> dict[str, list[float]]:
    """The same four steps; request A has seed 7, B has seed 8."""
    return {name: [round(uniform({"A": 7, "B": 8}[name], 0, n), 3) for n in range(4)] for name in order}


for way in (shared_generator, counter):
    print(f"{way.__name__:16}  A alone: {way('A')['A']}   A with B: {way('BA')['A']}")
    print(f"{'':16}  A's draws are {'the same' if way('A')['A'] == way('BA')['A'] else 'different'}")

# %% [markdown]
# With u fixed, a draw has one right answer, and two programs can be compared token by token. The next cell puts *your*
# `choose` in the place of the engine's own, over the real model, and compares the texts. (If it is not written yet,
# skip this cell.)


# %%
def draw_mine(logits: Tensor, requests: list) -> Tensor:
    """What minillm.sampling.draw does, by your function, row by row."""
    drawn = []
    for row, request in zip(logits, requests, strict=True):
        p, u = request.params, uniform(request.seed, request.sample_index, request.n_output)
        drawn.append(choose(row, p.temperature, p.top_k, p.top_p, u))
    return torch.tensor(drawn)


def written(seed: int) -> str:
    params = SamplingParams(max_tokens=10, temperature=0.8, top_k=50, top_p=0.95, seed=seed)
    request = make_request(EXAMPLE, params, c, tokenizer, c.context)
    return "".join(event.text for event in naive.run(model, request))


for seed in range(lab.size(ci=2, default=4, long=8)):
    ours = written(seed)
    with patch("minillm.sampling.draw", draw_mine):
        yours = written(seed)
    print(f"seed {seed}: {yours!r}{'' if yours == ours else f'; the engine: {ours!r}'}")

# %% [markdown]
# ### The count: `tokens_computed`
#
# How many tokens go through the model for a prompt of n and m new tokens, if nothing stops it? You have the sum above.
# Write it without a loop, in whole numbers. For n = 7 and m = 3 it is 24. Try m = 4 on paper too: some wrong formulas
# give 24 by chance.


# %% task="03.tokens_computed"
def tokens_computed(n_prompt: int, n_new: int) -> int:
    """Tokens pushed through the model by `generate` over all its passes, if no end token comes. Closed form."""
    ### BEGIN SOLUTION
    return n_new * n_prompt + n_new * (n_new - 1) // 2
    ### END SOLUTION


# %%
lab.check("03", "tokens_computed")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many passes are there? Every one of them pushes the prompt. That is the first part.
# </details>
#
# <details><summary>Hint 2</summary>
#
# The rest: how many *new* tokens are in the text in pass 1, in pass 2, ..., in the last pass? Careful: the last new
# token is in none of them.
# </details>
#
# <details><summary>Hint 3</summary>
#
# 0 + 1 + ... + (m - 1): pair the first with the last. The product of two neighbours is even, so `//` loses nothing;
# `/` would make a float, which is no longer exact for large numbers.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation, and the common wrong answer</summary>
#
# m passes push the prompt: m n. Pass i (from 0) also pushes i new tokens: 0 + 1 + ... + (m - 1) = m (m - 1) / 2.
# Together m n + m (m - 1) / 2. For n = 7, m = 3: 21 + 3 = 24.
#
# The common wrong answer ends in m (m + 1) / 2 and gives 27 (or 30, with n counted once more): it feeds each new token
# in the pass that makes it. But that pass makes it only at its end.
#
# For m much larger than n the second part rules, and it is a square: twice the text, four times the tokens.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure
#
# From here on the package's naive stage runs, so you can go on even if a function is still missing. First the counters:
# they are the same on every machine. `run` counts from outside, by hooks on the model, what each pass pushes through
# it.

# %%
n, rounds = len(EXAMPLE), lab.size(ci=2, default=3, long=5)
runs = [run(model, "naive", [Job(tuple(EXAMPLE), M)]) for _ in range(rounds + 1)][1:]  # the first one warms up
lengths = [step.tokens for step in runs[0].counts.steps]  # tokens pushed in each pass
pushed = list(accumulate(lengths))
marks = [m for m in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if m <= M]
print("new tokens     needed    counted  n + (n+1) + ...  pushed per needed")
for m in marks:
    print(f"{m:10,} {n + m - 1:10,} {pushed[m - 1]:10,} {sum(range(n, n + m)):16,} {pushed[m - 1] / (n + m - 1):18.2f}")
print(f"from {M // 2} to {M} new tokens: {pushed[M - 1] / pushed[M // 2 - 1]:.2f} times the tokens pushed")

# %%
lab.reveal("03.tokens_computed", pushed[-1])

# %% [markdown]
# Counted is what the sum says, in every line. The price per needed token grows without end.
#
# Now the clock. Each pass made one token, so its time is the time per token at that length. The middle of several
# rounds is shown, with the fastest and the slowest beside it.

# %%
times = list(zip(*[[s.ended - s.began for s in each.counts.steps] for each in runs], strict=True))  # [M][rounds]
middle = [median(all_rounds) for all_rounds in times]  # seconds, for each pass
slope, base = linear_regression(lengths, middle)  # seconds per token pushed, seconds per pass
print(" length T   ms per token   fastest to slowest       line")
for m in marks:
    fit = 1e3 * (base + slope * lengths[m - 1])
    low, high = 1e3 * min(times[m - 1]), 1e3 * max(times[m - 1])
    print(f"{lengths[m - 1]:9,} {1e3 * middle[m - 1]:14.1f} {low:10.1f} to {high:8.1f} {fit:10.1f}")
total = sum(middle)
print(f"The line: {1e3 * base:.1f} ms a pass and {1e3 * slope:.3f} ms a token pushed.")
print(f"All passes: {total:.1f} s; {slope:.2e} s x {pushed[-1]:,} tokens pushed = {slope * pushed[-1]:.1f} s of it.")

# %%
few = M // 8
slowdown = median(middle[-few:]) / median(middle[1 : 1 + few])
longer = median(lengths[-few:]) / median(lengths[1 : 1 + few])
print(f"the last {few} tokens against the first {few} that follow the first one; ", end="")
print(f"the text is {longer:.1f} times as long")
lab.reveal("03.slowdown", round(slowdown, 2))

# %% [markdown]
# Time per token is close to a line in the length: a fixed part, reading all weights once per pass however short the
# text, and a part for each token pushed. The fixed part is why the slowdown is smaller than the growth of the text. Add
# the line up over all passes, and the second part becomes the square that you counted.

# %% [markdown]
# ## Plot
#
# Left: tokens pushed, predicted by the sum (line) and counted (dots), over the tokens needed (dashes). Right: the time
# per token at each length, fastest to slowest (grey) and middle (dots), and the line through them.

# %%
figure = Figure(figsize=(10, 4), layout="constrained")
left, right = figure.subplots(1, 2)
made = range(1, M + 1)
left.plot(made, [sum(range(n, n + m)) for m in made], color="black", label="predicted: n + (n+1) + ...")
left.plot(marks, [pushed[m - 1] for m in marks], "o", color="black", markerfacecolor="white", label="counted")
left.plot(made, [n + m - 1 for m in made], "--", color="grey")
left.annotate("needed", (M, n + M - 1), xytext=(-4, 6), textcoords="offset points", ha="right")
left.annotate("pushed", (M, pushed[-1]), xytext=(-12, 0), textcoords="offset points", ha="right", va="top")
left.set(title="Tokens through the model", xlabel="new tokens", ylabel="tokens")
left.legend(frameon=False, loc="upper left")
every = max(1, M // 32)
low, high = ([1e3 * pick(t) for t in times] for pick in (min, max))
right.fill_between(lengths, low, high, color="0.8", label="all rounds")
right.plot(lengths[::every], [1e3 * t for t in middle[::every]], ".", color="black", label="middle")
right.plot(lengths, [1e3 * (base + slope * T) for T in lengths], color="black", linewidth=1, label="fitted line")
right.set(title="Time for one more token", xlabel="length of the text T, in tokens", ylabel="ms for one token")
right.set_ylim(bottom=0)
right.legend(frameon=False, loc="upper left")
lab.show(
    figure,
    f"Left: tokens pushed through the model rise as a square to {pushed[-1]:,} at {M} new tokens, every counted point "
    f"on the predicted line, while only {n + M - 1:,} are needed. Right: the time for one more token goes "
    f"from about {1e3 * median(middle[1 : 1 + few]):.0f} ms at the beginning to about "
    f"{1e3 * median(middle[-few:]):.0f} ms at the end (medians of {few} tokens), near a straight line in the length of "
    "the text.",
)

# %% [markdown]
# ## Explain
#
# A colleague wants to simplify: "u from a seed and n_emitted is enough; or use one `torch.Generator` for the engine and
# seed it at the start. It is random anyway." Write in a few sentences what a user would notice in each case, in an
# engine that runs many requests, several samples of one prompt, and sometimes begins a stopped request again.

# %%
lab.answer("03.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# Without the sample's number, four samples of one prompt are four times the same text. With one generator, a draw
# depends on how many draws all other requests made before it: the same seed gives another text whenever the company
# changes, so a user cannot repeat a result, and a bug that one text shows cannot be shown again. A request that was
# stopped and begun again goes on with other draws than it would have had. From (seed, sample, n_emitted) each draw is
# computed anew, so none of this can happen, and nothing has to be stored with the request but what it has anyway.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# A check is worth something if it catches wrong code. Two bugs, each put around your own function. Say before you run
# them **which property** catches each first, and which others follow. (If your function is not written yet, all of them
# say so.)
#
# First: the end token ends the text, but the caller never sees it.

# %%
right_generate = generate


def generate(model: Llama, prompt: list[int], n_new: int) -> list[int]:
    return [token for token in right_generate(model, prompt, n_new) if token not in model.config.eos]


lab.check("03", "generate")
generate = right_generate

# %% [markdown]
# Second: the temperature multiplies where it should divide. Which values of the temperature would not show it?

# %%
right_choose = choose


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    return right_choose(logits, 1 / temperature if temperature else 0.0, top_k, top_p, u)


lab.check("03", "choose")
choose = right_choose

# %% [markdown]
# ## Recap
#
# - A text is made by one pass per token. Only the last row of hidden states is worth the head.
# - The end token ends the text when the model *makes* it, and is part of what is returned.
# - A draw: weights by temperature, filtered by top_k, then top_p, then inverted at u. The crossing token stays, and the
#   sum of what is left counts as 1.
# - u is computed from (seed, sample, n_emitted): company, order and new beginnings cannot change it.
# - Running everything again pushes m n + (0 + 1 + ... + (m - 1)) tokens where n + m - 1 are needed. It is a square, in
#   the counters exactly and in the clock nearly.
#
# What pass 2 computes for the first 7 tokens, pass 1 had computed already. Lesson 04 keeps it.
#
# ## Exercises
#
# Difficulty and importance out of 5.
#
# 1. **The cube.** Pass i computes T x T attention scores for each of L layers and H heads. Predict `runs[0].scores`
#    from `lengths` and `model.config` alone, then compare. By what factor does it grow when the text doubles? When does
#    that begin to show in the clock? (difficulty 3, importance 4, 15 minutes)
# 2. **Positions from 1000.** Call `line(text, 1000, ...)` in your loop. What happens to the text, and which property
#    notices? Explain it from how RoPE turns q and k. (difficulty 2, importance 4, 10 minutes)
# 3. **min_p.** Add a filter that keeps tokens with at least `min_p` times the best token's weight, and compare with
#    `SamplingParams(min_p=...)` through the cell that puts your `choose` into the engine. Does its place in the order
#    of the filters matter? (difficulty 2, importance 3, 15 minutes)
# 4. **One stream.** Replace `uniform(...)` in `draw_mine` by numbers of one `random.Random(0)`. Write two texts one
#    after the other, then in the other order. What changed? (difficulty 1, importance 4, 10 minutes)
# 5. **When it pays.** With the line of your machine, from which length on does a pass cost twice its fixed part? Up to
#    there, what would keeping K and V save at most? Check it against the plot. (difficulty 3, importance 4, 15 minutes)
#
# ## References
#
# - [*Continuous batching from first principles*](https://huggingface.co/blog/continuous_batching) (Hugging Face, 2025):
#   its first part has these 7 tokens and the same loop.
# - Holtzman et al. 2020, *The Curious Case of Neural Text Degeneration* ([arXiv](https://arxiv.org/abs/1904.09751)):
#   sections 3 and 4, for why the best token every time makes dull text, and for top-p.
# - Fan et al. 2018, *Hierarchical Neural Story Generation* ([arXiv](https://arxiv.org/abs/1805.04833)): section 5, for
#   top-k.
# - Salmon et al. 2011, *Parallel Random Numbers: As Easy as 1, 2, 3*: for randomness as a function of a counter.
# - Steele, Lea and Flood 2014, *Fast Splittable Pseudorandom Number Generators*: for the scrambling in
#   `minillm/draws.py`.
# - `minillm/stages/naive.py` and `minillm/sampling.py`: the same in the engine, with penalties and many rows at once.
