# %% [markdown]
# # 06 · Padded batch
#
# Several texts go through the model in one rectangle, so the weights are read once for all; the price is pads.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/06_padded_batch.ipynb)
#
# **Objectives.** When you are done, you can
# - build the rectangle of one step: tokens, positions and last indices of rows of unequal length;
# - generate for several prompts at once, each row exactly as if it were alone;
# - say why padding on the right needs no pad mask, and why unused memory must still hold numbers;
# - predict the waste by formula and find it in the counters: pads, ended rows, and the pads of a refill;
# - predict from bytes how much faster tokens come in company, and time it.
#
# **Prerequisites:** lessons 04 (KV cache) and 05 (chunked prefill). **Minutes:** about 75.
# **Hardware:** any CPU; the real model needs about 1 GB of memory.
#
# **The one change:** a step gets a batch axis. It was a line of tokens `[T]`; now it is a rectangle `[B, T]`.
# The stage is [`minillm/stages/padded.py`](../minillm/stages/padded.py); hold it beside `cached.py`.

# %% tags=["setup"]
from statistics import median, quantiles

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm import doctor, lab
from minillm.attention import sdpa, visible
from minillm.bench.ceiling import layer_weights
from minillm.bench.harness import Job, run
from minillm.bench.prompts import load
from minillm.cache import CachedAttend, KVCache
from minillm.config import Config
from minillm.fetch import find
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.tokenizer import Tokenizer

# %%
lab.start("06")

# %% [markdown]
# ## The idea
#
# ### One read of the weights for B tokens
#
# Lesson 04 left us with one token a pass. To make it, every weight of the model is read from memory, and used for
# a single row of numbers. The arithmetic is small. The reading is what takes the time.
#
# Now let B texts take the step together. The weights are read **once**, and each of them is used B times:
#
# ```
# weight bytes per token   W / B                   W: bytes of all weights
# KV bytes per token       K = S · 2·L·Hkv·D · b   S: positions of context, b: bytes of one number
# ```
#
# The second line does not shrink with B: each row has a context of its own, and nobody shares it. If reading were
# all that counts, tokens per second would therefore rise by the factor (W + K) / (W / B + K), a little under B.
#
# ### Texts are not equally long
#
# The running example has two companions now. The numbers on the right say how many tokens each is to get.
#
# ```
# row 0    <bos> I am sure this pro ject       7 tokens     2 new
# row 1    <bos> I am                          3 tokens     5 new
# row 2    <bos> this pro ject will            5 tokens     3 new
# ```
#
# A tensor has no ragged edge. So shorter rows are filled up **on the right** with pads (`·`), and all rows run until
# the last of them is done: one that has ended (`x`) still takes its turn. A `t` is a new token that is fed back.
#
# ```
#          pass 0                             pass 1   pass 2   pass 3   pass 4
# row 0    <bos>  I    am   sure this pro ject   t        x        x        x
# row 1    <bos>  I    am    ·    ·    ·   ·     t        t        t        t
# row 2    <bos> this pro  ject will   ·   ·     t        t        x        x
# ```
#
# Each pass makes one token for each row, so the first new token comes out of pass 0 and the last is never fed back.
# Count: 21 + 4 · 3 = 33 tokens are pushed through the model, and 22 of them are needed. The rest is waste, of two
# kinds. With p tokens in a row's prompt and n new ones, both summed over the rows:
#
# ```
# pads            B · max(p) − Σ p            21 − 15  =  6
# ended rows      B · max(n) − Σ n            15 − 10  =  5
# ```
#
# ### Why no pad mask is needed
#
# To the model a pad is a token like any other. It has a query, a key and a value, and the key and value go into the
# cache. Must we not hide them? Look where they lie. Row 1 has real tokens at positions 0, 1, 2. Its pads **go on
# counting**: 3, 4, 5, 6. By the rule of lesson 04, a query at position p sees the keys at positions up to p. So the
# real queries at 0, 1, 2 see no pad. In pass 1 the row's new token stands at position 3. It is stored first, over
# the pad that lay there; then it looks at 0 .. 3, all real. The pads at 4, 5, 6 lie in the future. Each is overwritten
# in the very pass in which someone could first look at it.
#
# Two things must be right for that:
#
# - **Every row counts from its own start.** In pass 1 the positions are 7, 3 and 5, whatever the width was.
# - **A pad never takes the place of a real token.** The cache has `size` places, 0 .. size − 1. Where counting on
#   would leave it, pads share the last place. So we make it one place larger than the longest text needs. (In this
#   stage only an ended row gets there: the cache is sized for the longest text, and no prompt is longer than that.)
#
# And one thing about the memory. A mask hides a key by giving it weight 0; the value behind it is still multiplied by
# that 0. This leaves nothing of any number, but `0 × NaN` is NaN. So the cache begins as zeros.

# %% [markdown]
# ## Predict
#
# Three guesses, before anything is measured. Put numbers in place of `None`; a wild guess is fine.
#
# 1. Eight equal texts of the real model in a rectangle, against one alone: by what factor do output tokens per second
#    rise?

# %%
lab.predict("06.speedup", None)

# %% [markdown]
# 2. Real prompts of very different lengths, answers that end when they end, eight rows: how many tokens does the
#    padded stage push through the model for each one that is needed? (The running example: 33 / 22 = 1.5.)

# %%
lab.predict("06.pushed_per_needed", None)

# %% [markdown]
# 3. Seven rows are in the middle of their texts, one token a pass each. The eighth is free, and a new prompt of 100
#    tokens takes it. How many pads does that one pass push?

# %%
lab.predict("06.refill_pads", None)

# %% [markdown]
# ## Build
#
# ### 1. The rectangle of one step
#
# In any step, row b brings its new tokens `new[b]`: first its whole prompt, later the one token it just made. The
# first of them stands at position `starts[b]` of its text. The example in passes 0 and 1:
#
# ```
# pass 0   new = [[7 ids], [3 ids], [5 ids]]         pass 1   new = [[1 id], [1 id], [1 id]]
#          starts = [0, 0, 0]                                 starts = [7, 3, 5]
#
#          positions  0 1 2 3 4 5 6    last  6                positions  7    last  0
#                     0 1 2 3 4 5 6          2                           3          0
#                     0 1 2 3 4 5 6          4                           5          0
# ```
#
# Rows may also be at different points of their texts. Here `new = [[a, b, c], [d]]`, `starts = [5, 9]`, `size = 11`;
# the second pad would stand at 11, which is no place of the cache, so it shares the last one, 10:
#
# ```
# tokens  a b c     positions  5  6  7     last  2
#         d 0 0                9 10 10           0
# ```


# %% task="06.rectangle"
def rectangle(new: list[list[int]], starts: list[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unequal length as one rectangle, padded on the right with 0.

    new     the new token ids of each row: B lists, none of them empty
    starts  the position of each row's first new token: B numbers
    size    how many positions the cache has; a pad that would stand behind them takes the last, size - 1

    Returns  tokens     int64 [B, T], T the length of the longest row
             positions  int64 [B, T], counted on from each row's start, over the pads too
             last       int64 [B], the index in 0 .. T-1 of each row's last real token
    """
    ### BEGIN SOLUTION
    T = max(len(row) for row in new)
    tokens = torch.tensor([[*row, *[0] * (T - len(row))] for row in new])  # [B, T]
    positions = torch.tensor(starts)[:, None] + torch.arange(T)  # [B, 1] + [T] -> [B, T]
    last = torch.tensor([len(row) - 1 for row in new])  # [B]
    return tokens, positions.clamp(max=size - 1), last
    ### END SOLUTION


# %%
lab.check("06", "rectangle")

# %% [markdown]
# <details><summary>Hint 1</summary>
# Find T first: the length of the longest list. <code>torch.tensor</code> makes [B, T] from lists of equal length.
# </details>
# <details><summary>Hint 2</summary>
# A column [B, 1] plus a row [T] is a rectangle [B, T]. <code>x[:, None]</code> turns [B] into a column.
# </details>
# <details><summary>Hint 3</summary>
# Positions do not care which cells are pads: count on over all T, then <code>clamp(max=...)</code>. Only
# <code>last</code> needs the lengths of the rows.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation: the rectangle</summary>
#
# Only `last` knows about pads; tokens are filled up with any valid id, and positions are one sum. A common wrong
# answer lets positions stop at the last real token, so that the pads share its place: that looks harmless. But a pad
# is stored too, and of two tokens stored in one place one is lost. The text then looks into its past and finds token
# 0 where its last word was. Nothing crashes; the answer is only a little stupid. Another is `last = T - 1` for all
# rows: right for the longest, so a test with equal lengths passes.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### What your masks look like
#
# `CachedAttend` makes its mask from positions alone. Here are the masks that your rectangle leads to: pass 0 first.

# %%
EXAMPLE = [[1, 10, 11, 12, 13, 14, 15], [1, 10, 11], [1, 13, 14, 15, 16]]  # ids stand for the words
_, pass_0, _ = rectangle(EXAMPLE, [0, 0, 0], 8)
notes = [f"keys {len(row)} to 6 are pads" if len(row) < 7 else "no pads" for row in EXAMPLE]
lab.show_masks(
    {f"row {b}: {notes[b]}": visible(pass_0[b], torch.arange(7)) for b in range(3)},
    words="Pass 0: three equal masks of 7 queries by 7 keys, each a staircase: a query sees its own position and all "
    "before. In row 1 the keys 3 to 6 are pads, in row 2 the keys 5 and 6; only the queries at the same places see any "
    "of them, and those are pads too.",
)

# %% [markdown]
# Then pass 1: one query a row, at 7, 3 and 5. Beside it a bug that is easily written: every row's start grows by the
# **width** of the rectangle, 7, instead of its own tokens. Crosses mark what must not be seen.

# %%
_, pass_1, _ = rectangle([[20], [21], [22]], [7, 3, 5], 8)
_, by_width, _ = rectangle([[20], [21], [22]], [7, 7, 7], 8)
good, bad = visible(pass_1, torch.arange(8))[:, 0], visible(by_width, torch.arange(8))[:, 0]  # [B, S]
lab.show_masks(
    {"starts grow by the width": bad, "by each row's own tokens": good},
    rows=["row 0", "row 1", "row 2"],
    words=f"Pass 1: three queries by 8 keys. With the bug, rows 1 and 2 see {int((bad & ~good).sum())} keys too many.",
)

# %% [markdown]
# ### 2. Generate
#
# Now the loop. Its parts are those of lesson 04, with a batch axis in front:
#
# ```
# KVCache(model, B, size)                      memory of B rows, `size` places each
# CachedAttend(cache, positions)               stores at positions [B, T], and masks by them; one for each pass
# model(tokens, positions, attend)             [B, T], [B, T]  ->  hidden states [B, T, d]
# model.logits(rows)                           [M, d]  ->  [M, V]
# ```
#
# A text with p prompt tokens and n new ones stores p + n − 1, since its last token is never fed back; add one place
# for pads. Choose the token with the largest logit. A row that has ended stays in the rectangle and emits nothing.
# It must be fed something that does no harm: the token it made last, at the same place again and again, does.


# %% task="06.generate"
def generate(model: Llama, prompts: list[list[int]], n_new: list[int]) -> list[list[int]]:
    """Makes n_new[b] tokens (at least one) after prompts[b], for all rows together: B lists of new token ids.

    One cache for all rows. The first pass takes all prompts as one rectangle [B, T], each later one a token a row,
    [B, 1]; max(n_new) passes in all. Greedy; an end-of-text token is a token like any other here.
    """
    ### BEGIN SOLUTION
    B = len(prompts)
    size = max(len(prompt) + n for prompt, n in zip(prompts, n_new, strict=True))  # one more than any text stores
    cache = KVCache(model, B, size)
    new, starts = [list(prompt) for prompt in prompts], [0] * B
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(max(n_new)):
        tokens, positions, last = rectangle(new, starts, size)  # [B, T], [B, T], [B]
        hidden = model(tokens, positions, CachedAttend(cache, positions))  # [B, T, d]
        ends = hidden[torch.arange(B), last]  # [B, d]
        for b, token in enumerate(model.logits(ends).argmax(-1).tolist()):
            if len(outputs[b]) < n_new[b]:  # a row that has ended changes no more: it is fed the same again
                starts[b] += len(new[b])
                new[b] = [token]
                outputs[b].append(token)
    return outputs
    ### END SOLUTION


# %%
lab.check("06", "generate")

# %% [markdown]
# <details><summary>Hint 1</summary>
# Keep three things for each row: the tokens to feed next (at first a copy of the prompt), the position of the first of
# them (at first 0), and the tokens made so far.
# </details>
# <details><summary>Hint 2</summary>
# Row b's next token comes from <code>hidden[b, last[b]]</code>. An index of two vectors, <code>torch.arange(B)</code>
# and <code>last</code>, takes one state from each row: [B, d].
# </details>
# <details><summary>Hint 3</summary>
# After a pass, for each row that still needed a token: its start grows by the number of tokens <b>it</b> brought, and
# the token it made is what it brings next. For a row that has ended, change nothing at all.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation: the loop</summary>
#
# The loop never asks whether it is at the prompt or later: a row brings some tokens and starts where it stopped. The
# common wrong answer takes `hidden[:, -1]`, as for a single text. In pass 0 that is a pad in all rows but the longest,
# so each shorter text goes on from token 0. From pass 1 on the width is 1 and the index is right again, so the text
# looks as if it had merely taken a strange turn. Another drops ended rows and then hands the k-th token to row k; it
# belongs to the k-th row that is still alive.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 3. Count the waste
#
# The two formulas from above. Lengths are enough; no model is needed.


# %% task="06.wasted"
def wasted(prompts: list[list[int]], n_new: list[int]) -> tuple[int, int]:
    """Tokens that `generate` pushes through the model for nothing: (pads, tokens of rows that have ended)."""
    ### BEGIN SOLUTION
    lengths = [len(prompt) for prompt in prompts]
    return len(prompts) * max(lengths) - sum(lengths), len(prompts) * max(n_new) - sum(n_new)
    ### END SOLUTION


# %%
lab.check("06", "wasted")

# %% [markdown]
# <details><summary>Hint 1</summary>
# The area of a rectangle, less the part in use: once for pass 0, once for all later passes together.
# </details>
# <details><summary>Hint 2</summary>
# There are max(n) − 1 later passes of B tokens. A row with n new tokens needs n − 1 of them.
# </details>
# <details><summary>Hint 3</summary>
# B · (max(n) − 1) − Σ (n − 1): the ones cancel.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation: the waste</summary>
#
# Pads come from unequal prompts, ended rows from unequal answers; the two have nothing to do with each other. The
# common wrong answer takes one rectangle for the whole life of a text, B · max(p + n). It is too small whenever the
# longest prompt does not get the longest answer: each maximum must be paid for itself.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### 4. Refill a row, and pay
#
# A row that has ended could take the next text at once instead of idling. The package's stage
# [`dynamic`](../minillm/stages/dynamic.py) does so. But the newcomer brings n tokens into a rectangle in which each of
# the B − 1 other rows brings one, and all are padded to n:
#
# ```
# newcomer   t t t t t t t t     n tokens
# row 1      t · · · · · · ·
# row 2      t · · · · · · ·     B − 1 other rows
# ```


# %% task="06.refill_pads"
def refill_pads(n: int, B: int) -> int:
    """Pads of the one pass in which a prompt of n tokens joins B - 1 rows that bring one token each."""
    ### BEGIN SOLUTION
    return (n - 1) * (B - 1)
    ### END SOLUTION


# %%
lab.check("06", "refill_pads")

# %% [markdown]
# <details><summary>Hint 1</summary>
# How many cells has the rectangle?
# </details>
# <details><summary>Hint 2</summary>
# How many of them hold real tokens? The newcomer's, and one in each other row.
# </details>
# <details><summary>Hint 3</summary>
# n · B − n − (B − 1) is a product of two brackets.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation: the refill</summary>
#
# Each of B − 1 rows has n − 1 cells without a token. The common wrong answer is n (B − 1): it forgets that the other
# rows do bring a token each, and says 700 where 693 is right. The cost is sometimes called quadratic. It is not: it is
# a straight line in n while B stays, and a straight line in B while n stays. That is **bilinear**.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure
#
# These cells run the package's own stages, so they work even if a function of yours is not done. First company: all
# texts of a rectangle are equal here, so there is no waste, and every difference is the batch's. Counters first
# (bytes, the same on every machine with this dtype), then time, on the real model.

# %%
real = pack_weights(Llama.from_pretrained("smollm2-135m-instruct"))
tokenizer = Tokenizer.from_pretrained(find("smollm2-135m-instruct"))
W = (layer_weights(real.config) + real.config.vocab_size * real.config.d_model) * real.dtype.itemsize  # bytes
sizes = lab.size(ci=(1, 8), default=(1, 2, 4, 8, 16, 32), long=(1, 2, 4, 8, 16, 32, 64))
most_new, rounds = lab.size(ci=(8, 1), default=(40, 3), long=(128, 5))
prompt = tuple(tokenizer.encode("I am sure this project will be finished one day, because"))

seconds: dict[int, list[float]] = {B: [] for B in sizes}  # of each pass after the first
moved: dict[int, float] = {}  # bytes per token
for _ in range(rounds):  # interleaved, so that a busy moment of the machine hits all sizes alike
    for B in sizes:
        steps = run(real, "padded", [Job(prompt, most_new)] * B, {"max_running": B}).counts.steps[1:]
        seconds[B] += [step.ended - step.began for step in steps]
        moved[B] = sum(W + step.kv_bytes for step in steps) / sum(step.rows for step in steps)

counted = {B: moved[1] / moved[B] for B in sizes}
timed = {B: B * median(seconds[1]) / median(seconds[B]) for B in sizes}
print(f"{W / 1e6:.0f} MB of weights, {real.dtype}; {doctor.cpu_name()}, {torch.get_num_threads()} threads")
print("  B   weights/token   all bytes/token   factor by bytes   factor timed   tokens/s (middle half)")
for B in sizes:
    fast, middle, slow = (B / t for t in quantiles(seconds[B], n=4))
    print(
        f"{B:3}   {W / B / 1e6:10.1f} MB   {moved[B] / 1e6:12.1f} MB   {counted[B]:15.2f}   {timed[B]:12.2f}   "
        f"{middle:8.1f} ({slow:.0f} to {fast:.0f})"
    )

# %%
lab.reveal("06.speedup", round(timed[8], 2))

# %% [markdown]
# Weight bytes per token fall exactly as 1 / B. Time follows as long as reading is the longer part of a pass. Arithmetic
# is the same for every token and is not shared: where it becomes the longer part, time falls behind. On the roofline
# of lesson 00, a batch moves a pass from the slope towards the roof.
#
# ### The waste, on real prompts
#
# Now prompts as people write them, and answers that end when the model ends them. Three stages, the same prompts: one
# by one (`cached`), in rectangles that start and end together (`padded`), refilled at once (`dynamic`).

# %%
n_prompts, longest, cap, B = lab.size(ci=(4, 60, 6, 2), default=(16, 400, 64, 8), long=(32, 1500, 128, 8))
chats = [tuple(tokenizer.encode_chat(list(one.messages))) for one in load()]
jobs = [Job(chat, cap, ignore_eos=False) for chat in chats if len(chat) <= longest][:n_prompts]
STAGES = ("cached", "padded", "dynamic")
runs = {name: [run(real, name, jobs, {"max_running": B}) for _ in range(rounds)] for name in STAGES}

lengths = sorted(len(job.prompt) for job in jobs)
print(f"{len(jobs)} prompts of {lengths[0]} to {lengths[-1]} tokens, B = {B}")
print("stage          pushed     needed   pushed per needed   output tokens/s (least to most)")
for name, (one, *more) in runs.items():
    rates = sorted(each.summary.output_throughput for each in (one, *more))
    print(
        f"{name:10} {one.tokens_pushed:10,} {one.tokens_useful:10,} {one.tokens_pushed / one.tokens_useful:19.2f}   "
        f"{median(rates):8.1f} ({rates[0]:.1f} to {rates[-1]:.1f})"
    )

# %%
padded = runs["padded"][0]
lab.reveal("06.pushed_per_needed", round(padded.tokens_pushed / padded.tokens_useful, 2))

# %% [markdown]
# Does your formula say the same as the counter? The stage takes the prompts B at a time, in order. `wasted` gets each
# such batch, with the number of tokens that every answer turned out to have.

# %%
batches = [([list(job.prompt) for job in jobs[i : i + B]], padded.outputs[i : i + B]) for i in range(0, len(jobs), B)]
pads, ended = map(sum, zip(*(wasted(rows, [len(out) for out in outs]) for rows, outs in batches), strict=True))
print(f"by formula   {pads:,} pads + {ended:,} tokens of ended rows = {pads + ended:,}")
pushed, needed = padded.tokens_pushed, padded.tokens_useful
print(f"counted      {pushed:,} pushed - {needed:,} needed = {pushed - needed:,}")

# %% [markdown]
# ### The pads of a refill
#
# Seven rows at work, a free one, a prompt of 100 tokens: the package's `dynamic` stage on the real model, one pass
# looked at. The first text makes two tokens, so its row is free before the third pass, and the newcomer takes it.


# %%
def joining(model: Llama, n: int, B: int) -> int:
    """Pads of the pass in which a prompt of n tokens joins B - 1 rows, counted."""
    first, others, newcomer = Job((9,), 2), [Job((9,), 6)] * (B - 1), Job((9,) * n, 1)
    step = run(model, "dynamic", [first, *others, newcomer], {"max_running": B}).counts.steps[2]
    return step.tokens - sum(step.new.values())


lab.reveal("06.refill_pads", joining(real, 100, 8))

# %% [markdown]
# ## Plot
#
# First what company buys: B times, if weights were all; by the bytes counted; by the clock.

# %%
figure = Figure(figsize=(6.4, 4), layout="constrained")
axes = figure.subplots()
axes.plot(sizes, sizes, color="0.35", linestyle=":", linewidth=1.5)
axes.plot(sizes, [counted[B] for B in sizes], color="black", linestyle="--", marker="s", markerfacecolor="white")
quarters = {B: [B * median(seconds[1]) / t for t in quantiles(seconds[B], n=4)] for B in sizes}  # fast, middle, slow
bars = [[q[1] - q[2] for q in quarters.values()], [q[0] - q[1] for q in quarters.values()]]
axes.errorbar(sizes, [timed[B] for B in sizes], yerr=bars, color="black", marker="o", capsize=4)
top = sizes[-1]
for text, y, below in (
    ("B times (ideal)", top, 4),
    ("by bytes counted", counted[top], -8),
    ("timed, middle half", timed[top], -8),
):
    axes.annotate(text, (top, y), textcoords="offset points", xytext=(8, below))
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(sizes, sizes)
axes.set_yticks(sizes, sizes)
axes.set_xlim(0.9, top * 5)
axes.set_ylim(0.85, top * 1.4)
axes.set_xlabel("B, rows in the rectangle")
axes.set_ylabel("tokens per second, times those of one row")
lab.show(
    figure,
    f"Three lines over B. Dotted, B itself. At 8 rows, tokens per second should be {counted[8]:.1f} times those of one "
    f"row by the bytes counted (dashed), and are {timed[8]:.1f} times by the clock (solid)"
    + (f"; at {top} rows {counted[top]:.1f} and {timed[top]:.1f}." if top > 8 else ".")
    + " Bars hold the middle half of all passes.",
)

# %% [markdown]
# Then the waste, as an area. Every cell is a token of the first batch of real prompts that went through the model.

# %%
rows, outs = batches[0]
p, n = [len(row) for row in rows], [len(out) for out in outs]
wide, total = max(p), max(p) + max(n) - 1
PARTS = {  # left edges, widths, grey, hatch
    "prompt": ([0] * len(p), p, "0.85", ""),
    "pads": (p, [wide - one for one in p], "white", "////"),
    "new": ([wide] * len(p), [one - 1 for one in n], "0.45", ""),
    "ended": ([wide + one - 1 for one in n], [max(n) - one for one in n], "white", "xxxx"),
}
figure = Figure(figsize=(7.6, 0.35 * len(p) + 1.2), layout="constrained")
axes = figure.subplots()
for name, (left, width, grey, hatch) in PARTS.items():
    axes.barh(range(len(p)), width, left=left, color=grey, hatch=hatch, edgecolor="black", linewidth=0.5)
    b = width.index(max(width))  # named where there is most room
    if width[b]:
        box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        axes.text(left[b] + width[b] / 2, b, name, ha="center", va="center", fontsize=8, bbox=box)
axes.axvline(wide, color="black", linewidth=2)
axes.set_yticks(range(len(p)), [f"row {b}" for b in range(len(p))], fontsize=8)
axes.invert_yaxis()
axes.set_xlabel("tokens of each row: pass 0 up to the thick line, then one a pass")
used = {name: sum(width) for name, (_, width, _, _) in PARTS.items()}
lab.show(
    figure,
    f"A rectangle of {len(p)} rows by {total} tokens. Pass 0: {used['prompt']} tokens of prompts and "
    f"{used['pads']} pads. Later: {used['new']} new tokens and {used['ended']} of rows that have ended. "
    f"{(used['prompt'] + used['new']) / sum(used.values()):.0%} of the area is needed.",
)

# %% [markdown]
# And the refill. For counting, weights do not matter, so a tiny random model does. Points are counted, lines are the
# formula (n − 1)(B − 1).

# %%
tiny = Llama.random(Config(64, 32, 1, 2, 1, 16, 32, norm_eps=1e-5, rope_theta=1e4, context=512))
SWEEPS = {"n, tokens of the newcomer (B = 8)": [(n, 8) for n in (1, 50, 100, 150, 200)]}
SWEEPS["B, rows (n = 100)"] = [(100, B) for B in (1, 4, 8, 12, 16)]
figure = Figure(figsize=(7.6, 3), layout="constrained")
words = []
for axes, (label, pairs), at in zip(figure.subplots(1, 2), SWEEPS.items(), (0, 1), strict=True):
    xs, ys = [pair[at] for pair in pairs], [joining(tiny, *pair) for pair in pairs]
    formula = [(n - 1) * (B - 1) for n, B in pairs]
    axes.plot(xs, formula, color="0.5", label="(n − 1)(B − 1)")
    axes.plot(xs, ys, color="black", marker="o", linestyle="", label="counted")
    axes.annotate(f"{ys[2]}", (xs[2], ys[2]), textcoords="offset points", xytext=(-26, 4))
    axes.set_xticks(xs)
    axes.set_xlabel(label)
    axes.set_ylabel("pads in that pass")
    axes.legend(frameon=False, loc="upper left")
    found = ", ".join(f"{x}: {y}" for x, y in zip(xs, ys, strict=True))
    off = sum(y != expected for y, expected in zip(ys, formula, strict=True))
    on = f"{off} of {len(ys)} are off" if off else "all are on"
    words.append(f"Pads over {label}: {found}; {on} the straight line (n − 1)(B − 1).")
lab.show(figure, " ".join(words))

# %% [markdown]
# Straight in n, straight in B: bilinear. It is dear all the same. A refill saves one token a pass, for as long as
# the row would have idled, and pays (n − 1)(B − 1) at once. Compare `padded` and `dynamic` in the table above.

# %% [markdown]
# ## Explain
#
# In three or four sentences: after pass 1 of the running example, which pads still lie in row 1's part of the cache,
# and why can no query ever see them? And why must there be numbers in places that nobody may look at?

# %%
lab.answer("06.why", """ """)

# %% [markdown]
# ## Break it
#
# Many engines pad on the **left**, so that all rows end in the same column and `last` is T − 1 for everybody. If
# positions then count from the first pad, pads stand in every shorter row's past. Which properties notice? Guess, then
# run. (Real libraries had this bug: only the longest row of a batch was right, and the others looked plausible.)

# %%
kept = rectangle


def rectangle(new, starts, size):  # the bug: pads on the left, positions counted from the pad
    T = max(map(len, new))
    filled = [[0] * (T - len(row)) + list(row) for row in new]
    counted_on = torch.arange(T) + torch.tensor(starts).unsqueeze(1)
    return torch.tensor(filled), counted_on.clamp(max=size - 1), torch.full((len(new),), T - 1)


lab.check("06", "rectangle", "generate")
rectangle = kept

# %% [markdown]
# Two properties of `rectangle` fail over a matter of taste: where the pads are put, and so which column is the last.
# Shapes and the number of passes are right, and what looks only at those holds. That the texts are different ones, the
# properties tell that compare each row with its run alone.
#
# Now the memory: one query, two keys, and the second is masked. What lies in the hidden place?

# %%
query, mask = torch.ones(1, 1, 2), torch.tensor([[True, False]])  # [T, H, D], [T, S]
for hidden in (0.0, 1e4, float("nan")):
    memory = torch.tensor([1.0, hidden])[:, None, None].expand(2, 1, 2)  # [S, Hkv, D], as keys and as values
    print(f"{hidden:8} in the hidden place: attention answers {sdpa(query, memory, memory, mask).flatten().tolist()}")

# %% [markdown]
# Weight 0 hides any number, however large, but no NaN. That is why the checks fill the memory with 10,000, and why
# `KVCache` begins as zeros. From lesson 07 on, a place that is not written is not even read.

# %% [markdown]
# ## Recap
#
# - B rows share one read of the weights: W / B bytes per token. K and V are not shared.
# - Right pads need no mask of their own: positions count on from each row's own start, so a pad lies in its row's
#   future until the real token of that position overwrites it.
# - The waste is B · max(p) − Σ p pads and B · max(n) − Σ n tokens of ended rows; the counters agree.
# - A refill costs (n − 1)(B − 1) pads, 693 for 100 tokens and 8 rows: bilinear, not quadratic.
# - The trouble is the rectangle itself. Lesson 07 takes the batch axis away again.

# %% [markdown]
# ## Exercises
#
# 1. **Sort first** (difficulty 1/5, importance 4/5, 15 minutes). Sort the real prompts by length before they are cut
#    into batches. By `wasted`, what share of the pads goes away? Why can ended rows not be sorted away? Who waits?
# 2. **When K and V catch up** (difficulty 2/5, importance 4/5, 10 minutes). With 8 rows, at which context S does a
#    pass read as many bytes of K and V as of weights? At 16 bits this model keeps 23,040 bytes per position.
# 3. **Is a refill worth it?** (difficulty 3/5, importance 5/5, 20 minutes) A row ends k passes before the others.
#    Padded pays k tokens for it, dynamic pays a refill. For which k, n and B is the refill cheaper in tokens pushed?
#    Try `run` with prompts of 5 tokens and of 500.
# 4. **Left padding, done right** (difficulty 4/5, importance 3/5, 40 minutes). Make `generate` exact with pads on the
#    left. Which positions do pads get, where do their K and V go, and what do you need that right padding did not?

# %% [markdown]
# ## References
#
# - *Continuous batching from first principles*, Hugging Face, November 2025: padding and dynamic batching on the same
#   running example. It calls the pads of a refill quadratic; see what you measured.
# - Pope et al. 2022, [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102): the cost of weights
#   against that of K and V as the batch grows.
# - Yu et al. 2022, *Orca* (OSDI): what goes wrong when a batch starts and ends together.
# - Williams, Waterman and Patterson 2009, *Roofline*: why speed follows the bytes first, and then does not.
