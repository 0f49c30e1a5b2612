# %% [markdown]
# # 00 · The tour
#
# You see the finished engine first, then find out how fast it could possibly be on your machine.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/00_tour.ipynb)
#
# **Objectives.** You will
#
# - watch several texts grow side by side on one model, and say what a step is;
# - measure your machine's two ceilings: bytes per second and operations per second;
# - compute from them the least time that a step can take (the roofline);
# - predict how many tokens per second one text can have, and 32 texts together, and compare with what you measure.
#
# - **Prerequisites**: Python; you have seen a PyTorch tensor.
# - **Minutes**: 45, of which the machine works about one.
# - **Hardware**: any CPU; a CUDA GPU is used where torch finds one.
# - **The one change**: none yet. This lesson makes the ruler that all others are measured with
#   ([bench/ceiling.py](../minillm/bench/ceiling.py)). It holds a `floor_seconds` too: keep it closed until yours is
#   written.

# %% tags=["setup"]
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from minillm import Engine, SamplingParams, lab
from minillm.bench import ceiling, harness, readme, results
from minillm.bench.harness import Job
from minillm.config import Config
from minillm.errors import InputError

# %%
lab.start("00")

# %% [markdown]
# ## The finished engine
#
# A language model does one thing: it gets a text as a list of numbers, the **tokens**, and gives a score to every
# possible next token. To write, we take the best one, put it at the end, and ask again.
#
# The whole course carries one running example, the seven tokens
#
# | `<bos>` | `I` | `am` | `sure` | `this` | `pro` | `ject` |
# |--:|--:|--:|--:|--:|--:|--:|
# | 1 | 57 | 744 | 2090 | 451 | 348 | 680 |
#
# (with a space at the front of `am`, `sure`, `this` and `pro`). Lesson 01 shows where the numbers come from. Here we
# hand them to the engine that you will have built by lesson 08, together with three questions, and read what comes out,
# token by token.

# %%
engine = Engine.from_pretrained("smollm2-135m-instruct", max_running=4, max_len=512)
model, tokenizer = engine.model, engine.tokenizer

EXAMPLE = [1, 57, 744, 2090, 451, 348, 680]
questions = ["What is the capital of France?", "Name three colours.", "Why is the sky blue?"]
prompts = [EXAMPLE] + [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]

texts, order = {}, ""
for event in engine.stream(prompts, SamplingParams(max_tokens=lab.size(12, 60, 200))):
    texts[event.request] = texts.get(event.request, "") + event.text
    order += "ABCD"[list(texts).index(event.request)]

print("whose token came next:", order)
for letter, (request, text) in zip("ABCD", texts.items(), strict=True):
    n_prompt, n_new = len(request.prompt), request.n_output
    print(f"\n{letter}  {n_prompt} prompt tokens, {n_new} new ones, ended by {request.finish_reason}")
    print(f"   {text.strip()!r}")

# %% [markdown]
# Look at the line of letters. Every text gets one token, then every text gets the next one: the model ran **once** for
# all of them. One such run is a **step**. A short text leaves when it is done, and the others go on.
#
# Why not one text after the other? That would be simpler. The answer is a number, and this lesson computes it.

# %% [markdown]
# ## What each lesson will buy
#
# The engine is a ladder of stages. Each is a small change from the one before it, and makes the same text. This is the
# table that was measured when this version was made; it names its machine. Two columns matter now:
#
# - **pushed per needed**: tokens that went through the model for each one that had to. It is a *counter*: for the same
#   texts it is the same on every machine. Where it is above 1, work is thrown away.
# - **tokens/s**: the time on that one machine. Yours will differ; the order will hardly.

# %%
LESSON = {"naive": 3, "cached": 4, "chunked": 5, "padded": 6, "dynamic": 6, "ragged": 7}
LESSON |= {"continuous": 8, "paged": 9, "shared": 10, "kernels": 11}
try:
    stored = results.load(readme.results_file(readme.README.read_text("utf-8")))["ladder"]
except (InputError, OSError, KeyError, AssertionError):
    print("No stored results are here. `minillm ladder` measures your own, in some minutes.")
else:
    machine = stored["about"]["machine"]
    print(f"{stored['model']['name']}, {machine['cores']} cores of {machine['cpu']}, {stored['about']['date'][:10]}")
    print(f"\n{'lesson':>6}  {'stage':<11}{'pushed per needed':>18}{'tokens/s':>10}{'x before':>10}   what it is")
    for row in stored["rows"]:
        pushed, before = row["tokens_pushed"] / row["tokens_useful"], row["ratio_before"]
        print(
            f"    {LESSON[row['stage']]:02}  {row['stage']:<11}{pushed:>18.2f}{row['output_throughput']:>10.1f}"
            f"{'-' if before is None else f'{before:.2f}':>10}   {row['about'].split('. ')[0]}"
        )

# %% [markdown]
# Not every stage is faster than the one before it. Some are detours that the field really took, and you will see what
# each one wastes before you remove it.

# %% [markdown]
# ## The idea: a roofline
#
# To run one step, the machine must do two things.
#
# 1. **Move bytes.** Every weight that is multiplied with has to come from memory, once per step. So do the stored keys
#    and values of each text (K and V; lesson 04 is about them).
# 2. **Multiply.** Each token is multiplied with every weight. One weight costs 2 operations: one multiplication, one
#    addition. Operations on such numbers are called flops for short.
#
# Memory and arithmetic work at the same time. If they overlap perfectly, the step takes as long as the slower of the
# two. No program can be faster, so this is a **floor** for the time:
#
# $$ t_{\text{floor}}\,[\text{s}] = \max\left(
# \frac{\text{weight bytes} + \text{K/V bytes}}{\text{bytes per second}},\;
# \frac{\text{operations}}{\text{operations per second}}\right) $$
#
# and a **ceiling** for the speed: a step that makes $B$ tokens can make at most $B / t_{\text{floor}}$ tokens per
# second. Drawn over the ratio of operations to bytes, the ceiling looks like a roof: a slope, then a flat top. Hence
# the name.
#
# Both speeds are properties of your machine. Let us measure them: reading and copying a piece of memory far larger than
# any cache, and multiplying two large square matrices. Each is the best of several tries, for a ceiling is not an
# average.

# %%
config, itemsize = model.config, model.norm.weight.element_size()
ceilings = ceiling.measure(model.device, model.dtype, seconds=lab.size(0.1, 0.5, 2.0))
in_layers, in_head = ceiling.layer_weights(config), config.vocab_size * config.d_model
model_weights = in_layers + in_head

print(f"memory:      {ceilings.bytes_per_s / 1e9:8.1f} GB/s")
print(f"arithmetic:  {ceilings.flops_per_s / 1e9:8.1f} G operations/s in {model.dtype}")
print(f"the model:   {in_layers:,} weights in the layers and {in_head:,} in the head, {itemsize} bytes each")
print(f"K and V:     {config.kv_bytes_per_token(itemsize):,} bytes for each token of a text")

# %% [markdown]
# ## Predict
#
# Take pencil and paper, or a calculator; put your numbers in place of `None` and run the cells. Being right does not
# matter. Having guessed does: a number that surprises you stays with you.
#
# How many tokens per second can **one** text have here at most? Every step reads all the weights and makes one token.
# (Forget K and V; for a short text they are small.)

# %%
lab.predict("00.ceiling_1", None)

# %% [markdown]
# And **32** texts together, in tokens per second over all of them? Careful: both halves of the formula may matter.

# %%
lab.predict("00.ceiling_32", None)

# %% [markdown]
# A ceiling is not yet a speed. When we time both: how many times as many tokens per second will 32 texts make as one?

# %%
lab.predict("00.gain_32", None)

# %% [markdown]
# ## Build: the floor of one step
#
# Three short functions. None of them needs a loop.


# %% task="00.floor_seconds"
def floor_seconds(weight_bytes, kv_bytes, flops, bytes_per_s, flops_per_s):
    """The least time of one step, in seconds.

    weight_bytes  bytes of weights that the step reads       bytes_per_s  what the memory delivers
    kv_bytes      bytes of K and V that it reads             flops_per_s  operations the machine does in a second
    flops         operations that it must do
    """
    ### BEGIN SOLUTION
    moving = (weight_bytes + kv_bytes) / bytes_per_s
    multiplying = flops / flops_per_s
    return max(moving, multiplying)
    ### END SOLUTION


# %%
lab.check("00", "floor_seconds")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are two times to compute. Each is an amount divided by a speed.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Weights, K and V all come out of the same memory. The formula above adds them before it divides.
# </details>
#
# <details><summary>Hint 3</summary>
#
# The two times go on at once. When you cook rice and vegetables side by side, dinner takes as long as the slower pot.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# Moving takes (weight bytes + K/V bytes) / bandwidth; multiplying takes operations / speed; the result is the larger
# one. The common wrong answer is the **sum**. It describes a machine that loads everything, stops, and only then
# multiplies. Real hardware fetches the next weights while it multiplies the present ones. A sum would set the floor too
# high, and then a good program would be faster than what you called the least time.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: the ceiling of a batch
#
# Now for a real step. $B$ texts decode together, each of them gets one new token, and each token looks at $S$ positions
# of its own text. What does the step cost?
#
# | what | how much |
# |---|---|
# | weights $W$ | `ceiling.layer_weights(config)` for the layers, $V \cdot d$ (`vocab_size`, `d_model`) for the head |
# | bytes of weights | $W$ times `itemsize`. Read **once**, for all texts |
# | bytes of K and V | for each text: $S$ times `config.kv_bytes_per_token(itemsize)` |
# | operations on weights | for each token: $2 W$ |
# | operations in attention | for each token: $4 \cdot D$ for each of its $L \cdot H \cdot S$ scores |
#
# ($L$ layers, $H$ query heads, $D$ numbers in a head. A score is a dot product of length $D$: $D$ multiplications and
# $D$ additions. It then weighs a value of $D$ numbers: as many again.)
#
# For this model and the seven tokens of our example, with $B = 1$ and $S = 7$: 7 times the K/V bytes printed above,
# and $30 \cdot 9 \cdot 7 = 1890$ scores for the next token.
#
# Add all of it up over the $B$ texts, and let your `floor_seconds` do the rest. Use only the arguments: the check tries
# other models.


# %% task="00.decode_ceiling"
def decode_ceiling(
    batch: int, context: int, config: Config, itemsize: int, bytes_per_s: float, flops_per_s: float
) -> float:
    """Most tokens per second, over all texts together, when `batch` texts decode, each looking at `context` positions.

    config    has vocab_size, d_model, n_layers, n_heads, head_dim, and kv_bytes_per_token(itemsize)
    itemsize  bytes of one number: 2 in bfloat16, 4 in float32
    """
    ### BEGIN SOLUTION
    weights = ceiling.layer_weights(config) + config.vocab_size * config.d_model
    kv_bytes = batch * context * config.kv_bytes_per_token(itemsize)
    scores = batch * context * config.n_layers * config.n_heads
    flops = 2 * weights * batch + 4 * config.head_dim * scores
    return batch / floor_seconds(itemsize * weights, kv_bytes, flops, bytes_per_s, flops_per_s)
    ### END SOLUTION


# %%
lab.check("00", "decode_ceiling")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Fill the table above row by row into variables. Then hand them to your `floor_seconds`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Which rows grow with the batch? Those that say "for each".
# </details>
#
# <details><summary>Hint 3</summary>
#
# `floor_seconds` gives the seconds of a step. The step makes one token for each text. Tokens per second is the one
# divided by the other.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# Of the table's rows, only the weight bytes do not grow with B: whoever has fetched a weight can multiply it with 32
# tokens as well as with one. That is the whole secret of batching. The common wrong answer multiplies the weight bytes
# by B too; then a batch buys nothing, and the check for two texts fails. The opposite mistake shares the arithmetic as
# well; then a batch of a thousand would be a thousand times as fast.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: where the roof bends
#
# With one text, moving the weights takes longer than multiplying with them. With enough texts it is the other way
# round. Where do the two take equally long? Leave K, V and attention out, so that only the weights count:
#
# $$ \frac{\text{itemsize} \cdot W}{\text{bytes per second}} = \frac{2 \cdot W \cdot B}{\text{operations per second}} $$
#
# Solve it for $B$. The number of weights falls out: the answer is a property of the machine and the dtype, not of the
# model.


# %% task="00.balance_batch"
def balance_batch(itemsize: int, bytes_per_s: float, flops_per_s: float) -> float:
    """The batch at which moving the weights takes exactly as long as multiplying with them. Not rounded."""
    ### BEGIN SOLUTION
    return itemsize * flops_per_s / (2 * bytes_per_s)
    ### END SOLUTION


# %%
lab.check("00", "balance_batch")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Divide both sides by W.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Then bring B to one side. Operations per second go to the top, bytes per second to the bottom.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Test it: 2 bytes a weight, 100 bytes/s, 2,000 operations/s. One weight takes 2/100 s to move and 2/2,000 s to use. So
# it can be used 20 times while it is moved.
# </details>

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# B is itemsize times operations per second, divided by twice the bytes per second. The usual slip forgets the 2,
# because "one multiplication per weight" sounds right; but the product must also be added to something, and machines
# are rated in both. The other slip rounds: 19.7 is a fine answer for a place on a curve.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Your three functions on your machine. (This cell needs all of them; the measuring below does not.)

# %%
print(f"the roof bends at a batch of about {balance_batch(itemsize, ceilings.bytes_per_s, ceilings.flops_per_s):.1f}\n")
print(f"{'B':>4}{'ceiling, tokens/s':>20}{'for each text':>16}")
for batch in (1, 2, 4, 8, 16, 32, 64, 128):
    most = decode_ceiling(batch, 80, config, itemsize, ceilings.bytes_per_s, ceilings.flops_per_s)
    print(f"{batch:>4}{most:>20.0f}{most / batch:>16.1f}")

# %% [markdown]
# ## Measure
#
# Now the real model, with the package's own stages, so that you can go on even if a function is not done yet. The stage
# `cached` makes one text at a time; `continuous` makes $B$ at once. The prompts are plain runs of ids: how long a step
# takes does not depend on what the text says.
#
# **Counters first.** The bench counts from outside what each step did: tokens through the layers, rows through the
# head, attention scores, bytes of K and V. From the table above you can say what these must be, to the byte.

# %%
PROMPT, NEW = lab.size((16, 6), (64, 32), (256, 64))
BATCHES = lab.size((1, 32), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64))


def decode_steps(stage, batch):
    """Steps in which `batch` texts got one token each; all of them have the same length."""
    jobs = [Job(tuple(range(100 + i, 100 + i + PROMPT)), NEW) for i in range(batch)]
    limits = {"max_running": batch, "budget": batch * PROMPT}  # all prompts fit into the first step
    done = harness.run(model, stage, jobs, limits)
    return [step for step in done.counts.steps if step.tokens == batch]


runs = {}
for stage, batch in [("cached", 1)] + [("continuous", batch) for batch in BATCHES]:
    decode_steps(stage, batch)  # the first run of a shape prepares things; it is not kept
    runs[stage, batch] = decode_steps(stage, batch)

print(f"the first of {NEW - 1} decode steps, S = {PROMPT + 1}")
print(f"{'stage':<11}{'B':>4}{'rows of the head':>18}{'scores':>12}{'K/V bytes counted':>19}{'as predicted':>14}")
for (stage, batch), steps in runs.items():
    first = steps[0]
    scores = batch * (PROMPT + 1) * config.n_layers * config.n_heads
    kv_bytes = batch * (PROMPT + 1) * config.kv_bytes_per_token(itemsize)
    exact = "yes" if (first.rows, first.scores, first.kv_bytes) == (batch, scores, kv_bytes) else "no"
    print(f"{stage:<11}{batch:>4}{first.rows:>18}{first.scores:>12,}{first.kv_bytes:>19,}{exact:>14}")

# %% [markdown]
# **Then time.** For each batch: the floor of a step by what was counted, the median time, and its spread (the 5th and
# 95th percentile of the steps). A wide spread means that something else was busy on your machine.

# %%
# the machine may have been busy when its ceilings were measured: measure again, and keep the better of each
ceilings = ceilings.best(ceiling.measure(model.device, model.dtype, seconds=lab.size(0.1, 0.5, 2.0)))

timed = {}
print(f"{'stage':<11}{'B':>4}{'floor ms':>10}{'median ms':>11}{'spread ms':>17}{'tokens/s':>10}{'of the ceiling':>16}")
for (stage, batch), steps in runs.items():
    seconds = [step.ended - step.began for step in steps]
    low, high = np.percentile(seconds, (5, 95))
    floor = ceiling.floor_seconds(steps, config, itemsize, ceilings) / len(steps)
    timed[stage, batch] = dict(floor=floor, low=low, high=high, median=median(seconds))
    middle = timed[stage, batch]["median"]
    spread = f"{low * 1e3:.1f} to {high * 1e3:.1f}"
    print(
        f"{stage:<11}{batch:>4}{floor * 1e3:>10.2f}{middle * 1e3:>11.2f}{spread:>17}"
        f"{batch / middle:>10.0f}{floor / middle:>16.0%}"
    )

# %%
one, many = timed["continuous", 1], timed["continuous", 32]
lab.reveal("00.ceiling_1", round(1 / one["floor"], 1))
lab.reveal("00.ceiling_32", round(32 / many["floor"], 1))
lab.reveal("00.gain_32", round(32 * one["median"] / many["median"], 2))

# %% [markdown]
# ## Plot
#
# On the left the roof itself, and where each batch stands below it. On the right the same points as tokens per second.

# %%
figure = Figure(figsize=(11, 4.4), layout="constrained")
roof, speed = figure.subplots(1, 2)

intensity = np.geomspace(0.3, 300, 200)  # operations per byte
roof.loglog(intensity, np.minimum(intensity * ceilings.bytes_per_s, ceilings.flops_per_s) / 1e9, color="black")
near = dict(textcoords="offset points", fontsize=9)
roof.annotate("limited by\nmemory", (1, ceilings.bytes_per_s / 1e9), (-12, 8), ha="right", **near)
roof.annotate("limited by arithmetic", (300, ceilings.flops_per_s / 1e9), (0, 6), ha="right", **near)
told, points = [], []
for batch in BATCHES:
    step, now = runs["continuous", batch][-1], timed["continuous", batch]
    flops = 2 * model_weights * batch + 4 * config.head_dim * step.scores
    ratio = flops / (itemsize * model_weights + step.kv_bytes)
    roof.plot(ratio, flops / now["median"] / 1e9, marker="o", color="black", linestyle="none")
    at = (ratio, flops / now["median"] / 1e9)
    points.append(at[1])
    roof.annotate(f"B = {batch}", at, (7, -10), **near)
    told.append(f"B = {batch}: {ratio:.1f} operations per byte, {now['floor'] / now['median']:.0%} of the ceiling")
roof.set_ylim(0.6 * min(points), 2 * ceilings.flops_per_s / 1e9)
roof.set_title("The roof, and each batch below it", loc="left", fontsize=11)
roof.set_xlabel("operations per byte moved")
roof.set_ylabel("G operations per second")

most = [batch / timed["continuous", batch]["floor"] for batch in BATCHES]
middle = [batch / timed["continuous", batch]["median"] for batch in BATCHES]
below = [m - batch / timed["continuous", batch]["high"] for m, batch in zip(middle, BATCHES, strict=True)]
above = [batch / timed["continuous", batch]["low"] - m for m, batch in zip(middle, BATCHES, strict=True)]
speed.plot(BATCHES, most, color="black", linestyle="--", marker="^")
speed.errorbar(BATCHES, middle, yerr=[below, above], color="black", marker="o", capsize=4)
speed.plot(1, 1 / timed["cached", 1]["median"], marker="s", color="white", markeredgecolor="black", markersize=9)
speed.annotate("ceiling", (BATCHES[-1], most[-1]), (9, -3), **near)
speed.annotate("measured,\n5 to 95 %", (BATCHES[-1], middle[-1]), (9, -3), **near)
speed.annotate("cached", (1, 1 / timed["cached", 1]["median"]), (-9, 6), ha="right", **near)
speed.set_xscale("log", base=2)
speed.set_yscale("log")
speed.set_xticks(BATCHES, BATCHES)
speed.set_xlim(0.45, 3 * BATCHES[-1])
ticks = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**4, 10**5) if middle[0] / 3 < n < 2 * most[-1]]
speed.set_yticks(ticks, ticks)
speed.set_yticks([], minor=True)
speed.set_title("Ceiling and measured", loc="left", fontsize=11)
speed.set_xlabel("texts in a step, B")
speed.set_ylabel("tokens per second, all texts together")

lab.show(
    figure,
    f"Two charts, all axes logarithmic. Left, a roofline: memory gives {ceilings.bytes_per_s / 1e9:.0f} GB/s, "
    f"arithmetic {ceilings.flops_per_s / 1e9:.0f} G operations/s. {'; '.join(told)}. "
    f"Right, tokens per second against the batch, from B = {BATCHES[0]} to B = {BATCHES[-1]}: the ceiling goes from "
    f"{most[0]:.0f} to {most[-1]:.0f}, what was measured from {middle[0]:.0f} to {middle[-1]:.0f}. Bars hold the "
    f"5th to the 95th percentile. The stage `cached` at B = 1, a square: {1 / timed['cached', 1]['median']:.0f}.",
)

# %% [markdown]
# ## Explain
#
# In your own words, in two or three sentences: why does a step with 32 texts take much less than 32 times as long as a
# step with one, and why can that not go on for ever as the batch grows?

# %%
lab.answer("00.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# With one text nearly all the time goes into fetching the weights, and they are fetched once per step, however many
# texts share them; so further texts cost almost nothing at first. But each text brings multiplications of its own, and
# K and V of its own to read. Both grow with the batch, and from some point on they are what the step waits for.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Three things to read off the table, now that you have your own answer:
#
# - **One text and 32 texts read the same weights.** That is why the step of 32 takes nowhere near 32 times as long.
# - **A ceiling is only a bound.** Small operations, the scheduler and Python itself take their share, and a step that
#   is short has the least room for them.
# - **At small batches the floor hardly moves**, since the weights outweigh everything else. Further up, K, V and the
#   arithmetic take over.

# %% [markdown]
# ## Break it
#
# A salesman says: "B texts are B times as fast. Just take a bigger batch." Put that belief in place of your function,
# and see which properties catch it. Before you run the cell: which will be the first to catch it?

# %%
mine = decode_ceiling


def salesman(batch, context, config, itemsize, bytes_per_s, flops_per_s):
    return batch * mine(1, context, config, itemsize, bytes_per_s, flops_per_s)


decode_ceiling = salesman
lab.check("00", "decode_ceiling")
decode_ceiling = mine  # and back again

# %% [markdown]
# The pessimist says: "Every text needs its own pass anyway, so B texts make as many tokens per second as one." Change
# the `return` of the cell above to `mine(1, ...)` without the factor, and run it again: this time the shared weights
# catch him first.

# %% [markdown]
# ## Recap
#
# - A **step** is one run of the model. It makes one token for each text in it.
# - A step must move bytes and must multiply; its floor is the longer of the two. Tokens per second have a ceiling.
# - The weights are read once per step for all texts. This is what batching buys, and lessons 06 to 08 are about it.
# - K and V are read for each text. They are what a long context costs, and lesson 04 is about them.
# - Counters are the same on every machine; times are not. From here on, every lesson counts first.
#
# ## Exercises
#
# 1. Put four prompts of your own into the first cell, one of them very long, one asking for a single word. Predict the
#    line of letters, then run it. *Difficulty 1/5, importance 4/5, 5 minutes.*
# 2. At which context do the K and V of one text weigh as much as all the weights? And those of 32 texts together? Is
#    that within this model's context of 8,192? *Difficulty 2/5, importance 5/5, 10 minutes.*
# 3. Store every weight in one byte instead of two and leave the arithmetic as it is. Which ceilings move, at B = 1 and
#    at B = 128, and where does the roof bend now? Use your functions. *Difficulty 2/5, importance 4/5, 10 minutes.*
# 4. A prompt of 256 tokens goes through the layers in one step, and only its last row through the head. Is that limited
#    by memory or by arithmetic here? How many tokens per second is it at most? *Difficulty 3/5, importance 4/5, 20
#    minutes.*
# 5. Run `minillm ladder` in a terminal, and put your table beside the stored one: which columns agree exactly, which in
#    their order, which not at all? *Difficulty 2/5, importance 3/5, 15 minutes.*
#
# ## References
#
# - Williams, Waterman & Patterson 2009, *Roofline: an insightful visual performance model*: the first four pages, for
#   the picture and its assumptions.
# - Pope et al. 2022, [*Efficiently scaling transformer inference*](https://arxiv.org/abs/2211.05102): section 2, for
#   the same two costs on machines with many chips.
# - Hugging Face 2025, [*Continuous batching from first principles*](https://huggingface.co/blog/continuous_batching):
#   for the whole course's idea in one reading; the running example is theirs.
# - [bench/ceiling.py](../minillm/bench/ceiling.py): how the two speeds are measured; it is short.
