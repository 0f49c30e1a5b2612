# %% [markdown]
# # 05 · Chunked prefill
#
# A long prompt goes through the model in pieces: the text stays the same to the last token, the memory peak shrinks,
# and nobody else has to wait for all of it.
#
# [![Open lesson 05 in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/05_chunked_prefill.ipynb)
#
# **Objectives.** After this lesson you can
#
# - draw the mask of a chunk, whose queries and keys differ in number, and say why a square one is wrong;
# - compute the largest number of attention scores that a step makes, before you run it;
# - write one loop that has neither a prefill phase nor a decode phase;
# - say what chunks save, what they do not, and for whom.
#
# | | |
# |---|---|
# | prerequisites | lesson 02 (`visible`, masks) and lesson 04 (the KV cache and the loop around it) |
# | minutes | 70, of which the machine works two to four |
# | hardware | any CPU with 2 GB of memory free; a GPU is used where torch finds one |
# | the one change | at most m tokens in a step ([stages/chunked.py](../minillm/stages/chunked.py)) |
#
# The stage is the loop of `cached.py` with one more slice and one more `if`. Read it after you have written yours.

# %% tags=["setup"]
import difflib
import inspect
import io
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm import lab
from minillm.attention import visible
from minillm.batch import line
from minillm.bench import memory, prefill, results
from minillm.bench.harness import Job, run
from minillm.bench.workload import QUICK, real_workload
from minillm.cache import CachedAttend, KVCache
from minillm.errors import InputError
from minillm.fetch import find
from minillm.lab.build import ROOT
from minillm.model import Llama
from minillm.packing import pack_weights
from minillm.stages import cached, chunked
from minillm.tokenizer import Tokenizer

SEVEN = ["<bos>", "I", "am", "sure", "this", "pro", "ject"]  # the running example; the next one is "will"

# %%
lab.start("05")

# %% [markdown]
# ## The idea
#
# In lesson 04 the whole prompt was one step: n queries look at n keys. Below is who sees whom for our seven tokens.
# Every cell of the grid is one attention score, for each head and in each layer, and the step computes all 49 of
# them: the hidden ones too, for a mask hides a score after it was computed.

# %%
whole = visible(torch.arange(7), torch.arange(7))  # [7, 7]
lab.show_masks(
    {"the whole prompt": whole},
    rows=SEVEN,
    columns=SEVEN,
    words=(
        f"7 queries by 7 keys, a staircase: the token at position p sees p + 1 tokens. {int(whole.sum())} of "
        f"{whole.numel()} scores are visible."
    ),
)

# %% [markdown]
# Seven are no trouble. But a step holds the scores of a layer all at once, and their number grows with the square:
#
# $$\text{bytes of one layer's scores} = H \cdot n \cdot n \cdot 4$$
#
# for H heads, n tokens and 4 bytes a score (float32). Attention needs a copy or two more for the softmax.

# %%
for n in (7, 512, 2048, 8192):
    print(f"n = {n:>5,}, H = 9: {9 * n * n:>11,} scores, {9 * n * n * 4 / 1e6:>9,.3f} MB")

# %% [markdown]
# Now take the staircase and cut it after the fourth row. With chunks of **m = 4**:
#
# | step | new tokens | `start` | `size` | queries x keys |
# |--:|---|--:|--:|---|
# | 1 | `<bos>` `I` `am` `sure` | 0 | 4 | 4 x 4 |
# | 2 | `this` `pro` `ject` | 4 | 3 | 3 x 7 |
# | 3 | `will` | 7 | 1 | 1 x 8 |
#
# Step 2 has T = 3 queries, its own tokens, and S = 7 keys: its own and the four that the cache holds. Step 3 is what
# lesson 04 called decoding. Here it is a chunk of one token, and nothing else.
#
# **Why the text stays the same.** A token at position p looks at positions 0 .. p. The K and V of all of them are
# there when it looks: those of earlier chunks lie in the cache, those of its own chunk are stored first. Everything
# in the model but attention treats each token alone. So nothing that a token computes depends on where the prompt
# was cut, and each chunk is simply a few rows of the whole mask, cut off at its last token.

# %% [markdown]
# ## Predict
#
# Write a number in place of each `None` before you read on. A wild guess is fine: having guessed is what helps.
#
# 1. Seven tokens in one step: 49 scores per head and layer. In chunks of 4, both steps **together**: how many?
# 2. A long prompt in 8 equal chunks: its last tokens still look at all of it. How many times fewer scores does the
#    **largest** step make than the whole prompt in one step?
# 3. The same prompt, **all** 8 steps together: what percentage of the whole prompt's scores?
# 4. Seconds for the whole prompt in one step, divided by seconds in 8 chunks?
# 5. Some texts decode, a long prompt joins them. They wait for their next token while it is computed: how many
#    times longer is that wait for the whole prompt in one step than in 8 chunks?

# %%
lab.predict("05.scores_of_seven", None)
lab.predict("05.peak_ratio", None)
lab.predict("05.all_steps_percent", None)
lab.predict("05.time_ratio", None)
lab.predict("05.wait_ratio", None)

# %% [markdown]
# ## Build
#
# ### Task 1: where to cut
#
# Cut n tokens into chunks of m. All are full, but the last one may be short. Each is a pair: where it begins,
# counted in tokens, and how many tokens it has.


# %% task="05.chunks"
def chunks(n: int, m: int) -> list[tuple[int, int]]:
    """The chunks of a prompt of n tokens, at most m tokens each, in order: [(start, size), ...].

    n = 7, m = 4 gives [(0, 4), (4, 3)]. A chunk larger than the prompt is allowed: n = 7, m = 100 gives [(0, 7)].
    """
    ### BEGIN SOLUTION
    return [(start, min(m, n - start)) for start in range(0, n, m)]
    ### END SOLUTION


# %%
lab.check("05", "chunks")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write down by hand where the chunks of n = 7 begin for m = 1, 2, 3, 4. It is always 0, m, 2m, ... as long as that
# is below n. Python's `range` takes a step.
#
# </details>
# <details><summary>Hint 2</summary>
#
# From `start` on there are n - start tokens left. A chunk takes m of them, or all that is left.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `min` of two numbers is the size. There is no need to treat the last chunk apart.
#
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution of task 1, and the common wrong answer</summary>
#
# The starts are `range(0, n, m)`. The size is the smaller of m and what is left, `n - start`.
#
# The common wrong answer counts the chunks first, `n // m`, and loses the last short one: 7 // 4 is 1, so `this pro
# ject` never enters the model. When m divides n nothing is lost, so it passes the tests that people write first. The
# next one rounds up and forgets the `min`: the last chunk then claims a position 7 that the prompt does not have.
#
# </details>
# <!-- END SOLUTION -->
#
# ### Task 2: who sees whom
#
# The mask of one chunk. Its rows are the chunk's tokens, at positions start .. start + size - 1. Its columns are all
# tokens so far, at positions 0 .. start + size - 1. True means that the row's token may see the column's. (`visible`
# from lesson 02 does it in one call; write the comparison yourself.)


# %% task="05.chunk_mask"
def chunk_mask(start: int, size: int) -> Tensor:
    """Who sees whom in the step of one chunk: bool [size, start + size], true where query t may see key s.

    Row t is the token at position start + t; column s is the token at position s.
    """
    ### BEGIN SOLUTION
    queries = torch.arange(start, start + size)  # positions, [T]
    keys = torch.arange(start + size)  # positions, [S]
    return keys <= queries[:, None]  # [T, S]
    ### END SOLUTION


# %%
lab.check("05", "chunk_mask")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Look at the staircase above, and put a ruler under its fourth row. What is below is the mask of the chunk (4, 3):
# three rows, seven columns.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The rule is the one of lesson 02, and it speaks of positions: a token sees those whose position is not larger than
# its own. Make the two rows of positions with `torch.arange`, and compare every one with every other.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A column [T, 1] compared with a row [S] gives [T, S]. `x[:, None]` makes a column of x.
#
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution of task 2, and the common wrong answer</summary>
#
# Positions of the queries in a column, positions of the keys in a row, and `<=` between them. This is
# `minillm.attention.visible`, which every stage uses: causality, the cache and the chunks are one comparison.
#
# The common wrong answer is `torch.ones(size, start + size).tril()`. Its triangle begins in the top left corner: the
# first token of the chunk would see position 0 and nothing else. It has to end in the bottom right corner,
# `.tril(start)`. For the first chunk, where start is 0, the two are the same, so a short prompt never shows it. The
# other one is a square mask, `[size, size]`: the chunk forgets that there was anything before it.
#
# </details>
# <!-- END SOLUTION -->
#
# Your own function draws the two steps of the seven tokens, beside the expected ones. A cell that differs would be
# crossed out. Lay the second grid under the first: it is the staircase again.

# %%
for start, size in ((0, 4), (4, 3)):
    end = start + size
    expected = visible(torch.arange(start, end), torch.arange(end))
    lab.show_masks({"yours": chunk_mask(start, size), "expected": expected}, rows=SEVEN[start:end], columns=SEVEN[:end])

# %% [markdown]
# ### Task 3: the largest step
#
# The step of a chunk computes
#
# $$H \cdot \text{size} \cdot (\text{start} + \text{size}) \;\le\; H \cdot m \cdot n \quad\text{scores per layer.}$$
#
# For a fixed m the peak grows with n, no longer with n squared.
#
# How many scores does one layer make in the step that makes the most? That step decides how much memory the prompt
# needs. You have the chunks of task 1 and this formula.


# %% task="05.peak_scores"
def peak_scores(n: int, m: int, heads: int) -> int:
    """The largest number of attention scores of one layer in one step: a prompt of n tokens in chunks of m."""
    ### BEGIN SOLUTION
    return max(heads * size * (start + size) for start, size in chunks(n, m))
    ### END SOLUTION


# %%
lab.check("05", "peak_scores")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Every query is multiplied with every key that the step reads, in every head. Hidden ones count: they are computed
# before the mask hides them.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Do it by hand for n = 7, m = 4, and then for n = 5, m = 4. Which step is the largest in each?
#
# </details>
# <details><summary>Hint 3</summary>
#
# One line: the `max` over your `chunks(n, m)` of heads x queries x keys.
#
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution of task 3, and the common wrong answer</summary>
#
# For n = 7, m = 4 the steps make 4 x 4 = 16 and 3 x 7 = 21 scores per head; with 9 heads the peak is 189.
#
# The common wrong answer is the bound, heads x m x n. It is reached when m divides n, and is too large otherwise: it
# pairs the full size of an early chunk with the keys of the last one. The other takes the last chunk for the
# largest. For n = 5, m = 4 the last one makes 1 x 5 scores, and the first 4 x 4.
#
# </details>
# <!-- END SOLUTION -->
#
# ### Task 4: one loop
#
# Now the loop itself. In lesson 04 it had two parts: the prompt, then one token at a time. Here is the thought that
# makes them one. A text in the making is a list of tokens and **one number**: how many of them are *computed*, that
# is, have their K and V stored. Every step does the same:
#
# - take the tokens that are not computed yet, at most m of them;
# - put them through the model at their own positions;
# - if none is left, the last row of the output (`hidden[-1:]`) says what comes next, and that token joins the list.
#
# For a prompt that takes several steps. For a new token it takes one. Nobody asks which of the two it is. (Two loops,
# one over your chunks and one over new tokens, pass the check as well. One is shorter, and lesson 08 needs it.)
#
# You have `KVCache(model, S)`, room for S positions: S must hold the prompt and the new tokens. You have
# `CachedAttend(cache, positions)`, which stores K and V and makes the mask. `line(new, start, device)` makes the two
# tensors of a step out of a list of token ids; `start` is the position of the first of them.


# %% task="05.generate"
def generate(model: Llama, prompt: list[int], n_new: int, m: int) -> list[int]:
    """The n_new tokens (at least 1) that the model prefers after the prompt, with at most m tokens in a step.

    In a step:  ids, positions = line(new, start, model.device)        [T] each
                hidden = model(ids, positions, attend)                 [T, d]
                model.logits(rows of hidden)                           [rows, V]; its argmax is the token, an int
    The prompt stays as it is. There is no end-of-text token to look for: always n_new tokens.
    """
    ### BEGIN SOLUTION
    tokens, computed = list(prompt), 0
    cache = KVCache(model, len(prompt) + n_new - 1)  # the last token is never fed back
    while len(tokens) < len(prompt) + n_new:
        new = tokens[computed : computed + m]
        ids, positions = line(new, computed, model.device)  # [T]
        hidden = model(ids, positions, CachedAttend(cache, positions))  # [T, d]
        computed += len(new)
        if computed == len(tokens):  # nothing is left to compute: the last row says what comes next
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
    ### END SOLUTION


# %%
lab.check("05", "generate")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before the loop: a copy of the prompt, computed = 0, and one cache with room for the prompt and all new tokens. In
# the loop: a slice of the list that begins at `computed`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The start of a step is `computed` itself, so the positions are right for the prompt and for new tokens alike. After
# the step, `computed` grows by what was in it: that is not always m.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Sample when `computed` has caught up with the length of the list, and append the token to the same list. The next
# slice is then that one token. Sampling after every chunk would put new tokens into the middle of the prompt.
#
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution of task 4, and the common wrong answer</summary>
#
# The slice `tokens[computed : computed + m]` is a chunk while the prompt lasts, and a single token afterwards. A token
# is sampled exactly when nothing is left to compute. The package's `Request` holds the same two counters, and lesson
# 08 builds a scheduler on them.
#
# The common wrong answer keeps a loop over chunks and samples in it: the prediction after `sure` is then taken for
# the eighth token. It is what the model would say after four tokens, and nobody asked. A close relative takes "one
# token in the step" as the sign of decoding. It is right until a prompt of 9 meets chunks of 8, whose last chunk is
# one token, or m is 1.
#
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Measure
#
# The measuring cells run the package's own stage, `chunked`, so they work whether or not your functions do. First
# what the counters say, which is the same on every machine: the running example, seven tokens in chunks of 4, then
# three new ones. (Any seven tokens will do: their number decides.)

# %%
NAME = "smollm2-135m-instruct"
model = pack_weights(Llama.from_pretrained(NAME))
L, H = model.config.n_layers, model.config.n_heads
text = real_workload(Tokenizer.from_pretrained(find(NAME)), QUICK, model.config).text  # many token ids

done = run(model, "chunked", [Job(tuple(text[:7]), 3)], {"chunk": 4})
for i, step in enumerate(done.counts.steps, 1):
    print(f"step {i}: T = {step.tokens}, scores per head and layer: {step.scores // (L * H):>2}")
seven = [step.scores // (L * H) for step in done.counts.steps[:2]]
lab.reveal("05.scores_of_seven", sum(seven))

# %% [markdown]
# The prompt's two steps make fewer than 49: the corner of the grid to the right of the first chunk, which is all
# hidden, is never computed. If m divides n, all steps together make n (n + m) / 2 scores per head, and n (n + 1) / 2
# of them are visible whatever m is.
#
# Now a long prompt of n tokens, in chunks of several sizes.

# %%
n = lab.size(ci=96, default=2048, long=4096)
sizes = [n // k for k in lab.size(ci=(8, 2, 1), default=(32, 16, 8, 4, 2, 1), long=(64, 32, 16, 8, 4, 2, 1))]
eighth = n // 8
job = Job(tuple(text[:n]), 1)

peak, total = {}, {}  # scores of one layer: in the largest step, in all steps
print(f"A prompt of {n:,} tokens, {H} heads; scores of one layer")
for m in sizes:
    done = run(model, "chunked", [job], {"chunk": m})
    scores = [step.scores // L for step in done.counts.steps]
    peak[m], total[m] = max(scores), sum(scores)
    print(f"m = {m:>5,}: {len(scores):>3} steps, largest {peak[m]:>11,}, all together {total[m]:>11,}")
lab.reveal("05.peak_ratio", round(peak[n] / peak[eighth], 2))
lab.reveal("05.all_steps_percent", 100 * total[eighth] / total[n])

# %% [markdown]
# Your `peak_scores` said so before anything ran. (This cell needs your function.)

# %%
for m in sizes:
    said = peak_scores(n, m, H)
    print(f"m = {m:>5,}: predicted {said:>11,}, counted {peak[m]:>11,}{'' if said == peak[m] else '   they differ'}")

# %% [markdown]
# And your loop, on the real model, beside the package's. In bfloat16 or float32 two ways to add up the same numbers
# round differently, so two texts may part where two tokens are nearly equal; the check above was in float64. (This
# cell needs your function.)

# %%
tokenizer = Tokenizer.from_pretrained(find(NAME))
question = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
for m in (len(question), 16, 5, 1):
    print(f"m = {m:>2}: {tokenizer.decode(generate(model, question, 7, m))!r}")

# %% [markdown]
# Now the memory. Scores are the part that grows, so the peak should follow them. `memory.long_prompt` asks the
# system by how much the process grew at most, less the K and V that every size stores alike. Not every system tells.
# The layers' other tensors and the gaps between them count too: for a short prompt they are more than the scores.

# %%
megabytes = {}
try:
    for m in sorted(sizes):
        megabytes[m] = memory.long_prompt(model, job, m)[1] / 1e6
        scores_alone = memory.scores_bytes(model.config, model.dtype, m, n) / 1e6
        print(f"m = {m:>5,}: {megabytes[m]:>8,.1f} MB measured, {scores_alone:>8,.1f} MB of it predicted for scores")
except OSError as error:
    megabytes.clear()
    print(f"This system does not tell a process's peak memory ({error}). The counters above carry the argument.")

# %% [markdown]
# Then the time until the first new token. What should one expect? Each token passes the weights of the Linear layers
# once, P of them, at two operations a weight. Each score costs 2 D operations for q k and 2 D for its share of V. So
# one prompt takes
#
# $$2 P n + 4 D L \cdot \text{scores of one layer, all steps together} \quad\text{operations.}$$
#
# The first term does not depend on m; the second, at most, halves. Rounds take turns, so that a busy moment of the
# machine does not hit one size alone.

# %%
c = model.config
P = L * c.d_model * (2 * c.n_heads * c.head_dim + 2 * c.n_kv_heads * c.head_dim + 3 * c.d_ff)  # q, o; k, v; MLP
operations = {m: 2 * P * n + 4 * c.head_dim * L * total[m] for m in sizes}

rounds = lab.size(ci=1, default=3, long=5)
seconds = {m: [] for m in sizes}
print(f"Rounds: {rounds}")
for _ in range(rounds):
    for m in sizes:
        seconds[m].append(run(model, "chunked", [job], {"chunk": m}).times[0][0])
for m in sizes:
    least, most = min(seconds[m]), max(seconds[m])
    print(
        f"m = {m:>5,}: {operations[m] / 1e9:>7,.1f} G operations, median {median(seconds[m]):.3f} s, "
        f"{least:.3f} to {most:.3f} s"
    )
print(f"By operations alone, whole to 8 chunks: {operations[n] / operations[eighth]:.2f}")
lab.reveal("05.time_ratio", round(median(seconds[n]) / median(seconds[eighth]), 2))

# %% [markdown]
# ## Plot
#
# Predicted, counted and timed, over the size of the chunk. The line on the left is no fit: it is H m n, straight on two
# logarithmic axes.

# %%
figure = Figure(figsize=(11, 3.6), layout="constrained")
left, middle, right = figure.subplots(1, 3)
ms = sorted(sizes)
left.plot(ms, [H * m * n for m in ms], "--", color="0.5", label="predicted, H m n")
left.plot(ms, [peak[m] for m in ms], "o", color="black", label="counted")
for axes, values, unit in ((left, peak, ""), (middle, megabytes, " MB")):
    for m, value in values.items():
        where = dict(xytext=(-5, 5), textcoords="offset points", ha="right", fontsize=8)
        axes.annotate(f"{value:,.0f}{unit}", (m, value), **where)
left.set_title("Scores of the largest step", loc="left", fontsize=10)
alone = [memory.scores_bytes(model.config, model.dtype, m, n) / 1e6 for m in ms]
middle.plot(ms, alone, "--", color="0.5", label="scores alone, predicted")
if megabytes:
    middle.plot(ms, [megabytes[m] for m in ms], "s", color="black", label="peak, measured")
middle.set_title("Memory of the step, in MB", loc="left", fontsize=10)
medians = [median(seconds[m]) for m in ms]
below = [median(seconds[m]) - min(seconds[m]) for m in ms]
above = [max(seconds[m]) - median(seconds[m]) for m in ms]
right.errorbar(
    ms,
    medians,
    yerr=[below, above],
    fmt="^",
    color="black",
    ecolor="0.5",
    capsize=3,
    label=f"median and range, rounds: {rounds}",
)
right.set_title("Seconds to the first token", loc="left", fontsize=10)
right.set_ylim(0, 1.2 * max(max(values) for values in seconds.values()))
for axes in (left, middle, right):
    axes.set_xscale("log", base=2)
    axes.margins(x=0.4, y=0.15)
    if axes is not right:
        axes.set_yscale("log")
    axes.set_xticks(ms, [f"{m:,}" if m < n else "whole" for m in ms], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("m, tokens in a chunk")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
measured = "; ".join(f"m = {m:,}: {megabytes[m]:,.0f} MB" for m in ms) if megabytes else "not told by this system"
lab.show(
    figure,
    f"Three charts over the size of a chunk for a prompt of {n:,} tokens, the first two with logarithmic axes. Left, "
    f"scores of one layer in the largest step: counted points on the predicted line H m n, from {peak[ms[0]]:,} at "
    f"m = {ms[0]:,} to {peak[n]:,} for all "
    f"in one step. Middle, peak memory: {measured}; scores alone, predicted: {alone[0]:,.1f} MB at m = {ms[0]:,} to "
    f"{alone[-1]:,.1f} MB at m = {ms[-1]:,}. Right, seconds to the first token: "
    + "; ".join(f"m = {m:,}: {median(seconds[m]):.3f}" for m in ms)
    + ".",
)

# %% [markdown]
# ## Who waits
#
# So far one prompt was alone, and chunks were about memory. In an engine it is not alone. A step cannot be
# interrupted: while a long prompt is computed in one step, every other text waits for its next token. In chunks, each
# step carries one token of every running text, and as much of the prompt as a **token budget** leaves: with R texts
# running and a budget of b tokens, b - R tokens of the prompt, in ceil(n / (b - R)) steps.
#
# The package's experiment does that on the continuous engine, which lesson 08 builds: R texts decode, and a long
# prompt arrives. Counters first: the largest step is what the others wait for.

# %%
running = lab.size(ci=2, default=8, long=16)
long_prompt = lab.size(ci=48, default=1024, long=2048)
# the first budget: an eighth of the prompt, and one token for each running text
budgets = lab.size(ci=(8,), default=(136, 264), long=(272, 528))
waited = prefill.measure(
    model,
    NAME,
    text,
    Console(file=io.StringIO(), force_jupyter=False),
    long_prompt,
    running,
    budgets,
    lab.size(ci=1, default=2, long=3),
)
print(f"{running} texts decode; a prompt of {long_prompt:,} tokens arrives")
for point in waited.points:
    print(
        f"budget {point.label:>5}: {point.steps:>2} steps until its first token, {point.largest_step:>5,} tokens in "
        f"the largest"
    )

# %% [markdown]
# Then the time between two tokens of a running text: before the prompt came, and the longest while it was computed.
# The other side of the trade is how long the prompt itself waits for its first token (ttft).

# %%
for point in waited.points:
    if point.void or not (point.gap_before and point.gap_longest and point.ttft):
        print(f"budget {point.label:>5}: not shown, {point.void}")
        continue
    print(
        f"budget {point.label:>5}: gap {point.gap_before.median * 1e3:.0f} ms before, longest "
        f"{point.gap_longest.median * 1e3:.0f} ms ({point.gap_longest.least * 1e3:.0f} to "
        f"{point.gap_longest.most * 1e3:.0f}); ttft of the prompt {point.ttft.median:.2f} s"
    )
smallest, all_at_once = waited.points[0].gap_longest, waited.points[-1].gap_longest
if smallest and all_at_once:
    lab.reveal("05.wait_ratio", round(all_at_once.median / smallest.median, 2))
lab.show(prefill.plot(waited), prefill.alt_text(waited))

# %% [markdown]
# The same in full, as stored with this version. These numbers belong to the machine that is named; `minillm bench
# prefill` makes your own.

# %%
stored = []
for path in sorted((ROOT / "results").glob("*.json")):
    try:
        section = results.load(path).get("prefill")
    except InputError:  # of an older version
        continue
    if section:
        stored.append(section)
        about = section["about"]["machine"]
        print(f"{about['gpu'] or about['cpu']}, {about['cores']} cores, {section['about']['date'][:10]}")
        print(section["finding"])
if not stored:
    print("No stored result is here. Run `minillm bench prefill`, which takes some minutes.")

# %% [markdown]
# ## Explain
#
# A colleague says: "Chunked prefill makes the engine faster, since it computes fewer scores." Use your counters and
# times. What do chunks save, and what do they not? Who gains, who pays, and what is wrong with m = 1? Five sentences.

# %%
lab.answer("05.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer, to compare with yours</summary>
#
# Chunks save scores: with 8 of them the largest step makes an eighth, and all steps together little more than half.
# They do not save tokens: each goes through the Linear layers once either way, so one prompt alone gets faster only as
# far as its scores weigh, which is little for a short one. Memory gains, since a step holds the scores of one chunk.
# The other texts gain most, for the longest step bounds their wait, and the prompt itself pays, for its first token
# comes after several steps that it shares with them. With m = 1 every token of the prompt reads all weights anew, as
# decoding does: the arithmetic that many tokens share in one step is given away.
#
# </details>
# <!-- END SOLUTION -->
#
# ## Break it
#
# torch's own attention has an argument `is_causal=True`. It looks like what a chunk needs. Which mask does it really
# use? With all scores equal and a unit matrix for V, the output shows the weights themselves, so what is above zero
# is what was seen.

# %%
q, k, v = torch.zeros(1, 3, 7), torch.zeros(1, 7, 7), torch.eye(7)[None]  # 3 queries, 7 keys
top_left = scaled_dot_product_attention(q, k, v, is_causal=True)[0] > 0  # [3, 7]
expected = visible(torch.arange(4, 7), torch.arange(7))
lab.show_masks({"is_causal=True": top_left, "expected": expected}, rows=SEVEN[4:], columns=SEVEN)

# %% [markdown]
# It is aligned to the top left corner: `this` would see `<bos>` and nothing else, not even itself. For a prompt in one
# step the mask is square, and the two agree. So the bug sleeps until the first prompt is longer than a chunk.
#
# Put it in. Which of the four properties of `chunk_mask` will catch it, and at which chunk first? Say it before you run
# the cell.

# %%
mine = chunk_mask


def chunk_mask(start: int, size: int) -> Tensor:
    return torch.ones(size, start + size, dtype=torch.bool).tril()  # the bug: top left


lab.check("05", "chunk_mask")
chunk_mask = mine  # yours again

# %% [markdown]
# All four catch it, and none of them at a first chunk. They name the same bug in other words: a row, a sum, a hidden
# state. The last one counts most, since a wrong mask is only a picture until a model computes with it. Try two more:
# a square mask, `torch.ones(size, size)`, and a mask without any limit, `torch.ones(size, start + size)`, both bool.
# The one without a limit fails at a first chunk already, (0, 2).
#
# ## Recap
#
# - A chunk is a few rows of the staircase: size queries, start + size keys. Compare positions, and the mask is right.
# - The largest step makes at most H m n scores in place of H n n; m is a dial for memory.
# - All steps together make fewer scores too, at best half. But each token still goes through the Linear layers once: a
#   prompt that is not very long is hardly faster.
# - A new token is a chunk of one. There are no phases: tokens, computed, and a token is sampled when nothing is left.
# - A step is what others wait for, so m is a dial for their wait as well.
#
# What changed in the package, all of it:

# %%
before, after = (inspect.getsource(stage.run).splitlines() for stage in (cached, chunked))
print("\n".join(difflib.unified_diff(before, after, "cached.run", "chunked.run", lineterm="", n=1)))

# %% [markdown]
# ## Exercises
#
# 1. **Memory for scores.** Write `largest_chunk(n, heads, limit)`: the largest m with
#    `4 * peak_scores(n, m, heads) <= limit` bytes. Is a larger m always a larger peak?
#    (difficulty 2/5, importance 4/5, 15 minutes)
# 2. **No crumbs.** 1,025 tokens in chunks of 1,024 leave a chunk of one, a step that reads all weights for one token.
#    Cut into as many chunks, but of nearly equal sizes. When is that better, and for whom?
#    (difficulty 2/5, importance 3/5, 20 minutes)
# 3. **Equal areas.** Early chunks read few keys, late ones many. Choose sizes so that every step makes about as many
#    scores. How do the sizes fall, and how many chunks does it take for the same peak?
#    (difficulty 4/5, importance 2/5, 40 minutes)
# 4. **A budget for all.** Write `split(budget, running, pending)`: one token for each running text, then as much of
#    each waiting prompt as is left, in order. What must the budget be at least, so that nobody starves? You have begun
#    lesson 08. (difficulty 3/5, importance 5/5, 30 minutes)
# 5. **Never hold m x n either.** Softmax over the keys in pieces: keep a running maximum and a running sum, and the
#    scores of a step need not be there all at once. Compare with `sdpa` in float64.
#    (difficulty 5/5, importance 4/5, 120 minutes)
#
# ## References
#
# - Agrawal et al. 2023, [SARATHI](https://arxiv.org/abs/2308.16369): chunked prefills and decodes that ride along in
#   the same step. Read sections 3 and 4 for why a chunk should be large enough to keep the arithmetic busy.
# - Agrawal et al. 2024, [Sarathi-Serve](https://arxiv.org/abs/2403.02310): the same in a server, without stalls. Read
#   it for how the token budget is chosen, and for the tail of the gaps between tokens.
# - Holmes et al. 2024, [DeepSpeed-FastGen](https://arxiv.org/abs/2401.08671): the same idea under the name Dynamic
#   SplitFuse. Read it for the curve of throughput over tokens in a step.
# - Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135): exercise 5, done for GPUs. Read section 3.1.
# - Vaswani et al. 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762): equation 1, and the mask.
# - [*Continuous batching from first principles*](https://huggingface.co/blog/continuous_batching) (Hugging Face,
#   November 2025): the seven tokens and their chunks of 4. Read it for the pictures.
