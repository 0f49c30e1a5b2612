# %% [markdown]
# # 02 · A Llama, part by part
#
# You write the six functions that a Llama is made of, put them together as one layer, and find that all thirty layers
# of the real model give the numbers they should.
#
# [![Open this lesson in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/minillm/minillm/blob/v0.1.0/lessons/02_llama.ipynb)
#
# **Objectives.** When you are done you can
#
# - write RMSNorm, rotary positions, grouped-query attention and SwiGLU from their formulas, shapes and roundings
#   included;
# - say who may look at whom by one comparison of positions, and draw it;
# - find the first layer in which a model goes wrong;
# - count a forward pass: where its multiplications are, and what rounding to bfloat16 does to it.
#
# | | |
# |---|---|
# | prerequisites | lesson 01 (token ids, and which tensors a checkpoint holds); shapes and broadcasting in PyTorch |
# | minutes | 110, of which the machine works about one |
# | hardware | any CPU, with 2 GB of free memory |
# | the one change | tensors compute: [model.py](../minillm/model.py), [attention.py](../minillm/attention.py) |

# %% tags=["setup"]
import time
from collections import Counter
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from minillm import attention, lab
from minillm.attention import SelfAttend
from minillm.bench.harness import Job, counting, run
from minillm.fetch import find
from minillm.lab.work import from_namespace
from minillm.model import Llama, rope_table
from minillm.tokenizer import Tokenizer

NAME = "smollm2-135m-instruct"
PIECES = ["<bos>", "I", " am", " sure", " this", " pro", "ject"]

# %%
lab.start("02")

# %% [markdown]
# ## The idea
#
# Our running example is a text of seven tokens, `<bos> I am sure this pro ject`; a good next one would be `will`. Each
# token is a row number in the embedding, so the text becomes a table of 7 rows with 576 numbers each. Then thirty
# blocks follow. None of them replaces the table; each **adds** to it, twice:
#
# | step | what it does | rows mix? |
# |---|---|---|
# | norm, then attention | each row gathers something from the rows it may look at | **yes, here alone** |
# | norm, then MLP | each row thinks for itself | no |
#
# In the end the last row is normed once more and multiplied by the embedding, which gives 49,152 numbers, the logits:
# one for each token that might come next.
#
# The names of sizes, here and in the package:
#
# | name | what | here |
# |---|---|--:|
# | `T` | new tokens in this step | 7 |
# | `S` | positions that are looked at | 7 |
# | `L`, `d` | blocks, width of a row | 30, 576 |
# | `H`, `Hkv` | query heads, key-value heads | 9, 3 |
# | `D` | numbers in a head | 64 |
# | `d_ff` | width inside an MLP, which is three products of d by d_ff | 1,536 |
# | `V` | tokens in the vocabulary | 49,152 |
#
# Any function below takes leading dimensions `...` too: none for one text, or `N` for several rows of a rectangle.

# %%
tokenizer = Tokenizer.from_pretrained(find(NAME))
model = Llama.from_pretrained(NAME, "cpu", "float32")
tokens = torch.tensor([tokenizer.special_ids["<|im_start|>"]] + [tokenizer.encode(piece)[0] for piece in PIECES[1:]])
positions = torch.arange(len(tokens))

print("pieces", PIECES)
print("ids   ", tokens.tolist())
by_itself = tokenizer.encode("I am sure this project")
print(f"without <bos>, and left to itself, the tokenizer makes {len(by_itself)} tokens: ' project' is one of its own")
print("rows  ", list(model.embed(tokens).shape), "then", len(model.blocks), "blocks")

# %% [markdown]
# ## Predict
#
# Put a number in place of each `None` before you go on. A wild guess is fine: that you guessed is what counts.
#
# - `mlp_share`: one pass over the 7 tokens, with logits for the last row alone. How many **percent** of all
#   multiplications are in the MLPs?
# - `scores`: how many attention scores does that pass compute, over all blocks and heads, hidden ones included?
# - `first_block`: run the same in bfloat16 and compare with float32 after each block, 0 to 29. After which block are
#   the rows (their median) first more than 1 percent of their length apart?

# %%
lab.predict("02.mlp_share", None)
lab.predict("02.scores", None)
lab.predict("02.first_block", None)

# %% [markdown]
# ## Build: RMSNorm
#
# Rows grow as thirty blocks add to them. So each half of a block first brings its input to a common size:
#
#     y_i = w_i · x_i / sqrt(mean(x²) + eps)          the mean over the d numbers of one row; eps = 0.00001 here
#
# Unlike LayerNorm it subtracts no mean (Zhang & Sennrich 2019). Two things go wrong in practice, and both are about
# dtypes. **Squares overflow:** float16 ends at 65,504, just below the square of 256. And **the order of roundings:**
# bfloat16 keeps 8 binary digits, so one rounding moves a number by up to 0.4 percent. The checkpoint was trained in
# this order: widen to float32, divide by the root, round back to `x`'s dtype, *then* multiply by `w`. (float64 is
# wider than float32 already: it stays.)


# %% task="02.rms_norm"
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d], weight [d]  ->  [..., d] in x's dtype. Statistics in float32, or in float64 if x is float64."""
    ### BEGIN SOLUTION
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
    ### END SOLUTION


# %%
lab.check("02", "rms_norm")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `mean(-1, keepdim=True)` gives one number for each row, in a shape that divides the row again.
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.promote_types(x.dtype, torch.float32)` is the wider of the two dtypes. `x.to(...)` converts, before you square.
# </details>
# <details><summary>Hint 3</summary>
#
# Three lines: widen; multiply by `torch.rsqrt(mean of squares + eps)`; `.to(x.dtype)` and only then `* weight`.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The code is in the cell above. The common wrong answer multiplies by the weight while still in float32 and rounds
# once, at the end. That is *more* exact, and still wrong: the checkpoint learned its weights with the other rounding,
# and many of the last digits would differ. The second most common one squares in `x`'s own dtype.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: rotary positions
#
# Attention compares a query with a key by their dot product, which knows nothing of order. RoPE (Su et al. 2021) puts
# the order in by **turning** them. A head of D numbers is D/2 pairs, each pair a point in a plane, and at position p
# pair i is turned by an angle:
#
#     angle(p, i) = p · frequency(i)      frequency(i) = theta^(-2i/D)  radians per position,  i = 0 .. D/2 - 1
#
# Turn a query by its position and a key by its own, and the dot product depends on the *difference* of the two alone.
# The first pair turns one radian per position, whatever theta is; the last one hardly moves. First the frequencies.


# %% task="02.frequencies"
def frequencies(head_dim: int, theta: float) -> Tensor:
    """Radians per position of each pair: float64 [head_dim / 2]."""
    ### BEGIN SOLUTION
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    ### END SOLUTION


# %%
lab.check("02", "frequencies")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.arange(0, head_dim, 2)` counts 0, 2, 4 ...: the 2i of the formula.
# </details>
# <details><summary>Hint 2</summary>
#
# A number to the power of a tensor is a tensor: `theta ** exponents`.
# </details>
# <details><summary>Hint 3</summary>
#
# Without `dtype=torch.float64` in `arange`, the division makes float32, and no later conversion brings the digits back.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The common wrong answer is `arange(D // 2) / D`: it counts in ones, so every pair turns too fast, and the slow
# half of them is missing.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Now the turning. The package's `rope_table(positions, frequencies, dtype)` gives two tables, as wide as a head. With
# c and s for cosine and sine of a pair's angle, and `a` and `b` for the first and the second half of a head:
#
#     x        a            b
#     cos      c            c           [..., T, 1, D]: the 1 is for the heads, which all turn alike
#     sin     -s            s           the minus sign is in the table already: you only ever add
#     result   a c - b s    b c + a s
#
# **Which numbers are a pair?** The paper pairs neighbours, 2i with 2i + 1. Hugging Face's checkpoints pair number i
# with number i + D/2, in halves. Both are rotations, both keep the property of differences, and nothing raises
# when you take the wrong one. What the model then says, you will read under *Break it*.

# %%
cos, sin = rope_table(torch.arange(3), torch.tensor([1.0, 0.1], dtype=torch.float64), torch.float32)
print("D = 4, positions 0 1 2: cos", list(cos.shape), "and sin", list(sin.shape))
for p in range(3):
    print(f"position {p}  cos {cos[p, 0].tolist()}\n            sin {sin[p, 0].tolist()}")


# %% task="02.rotate"
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every head by its position's angles. x [..., T, heads, D], cos and sin [..., T, 1, D]  ->  as x."""
    ### BEGIN SOLUTION
    a, b = x.chunk(2, dim=-1)  # [..., T, heads, D/2] each
    return x * cos + torch.cat((b, a), dim=-1) * sin
    ### END SOLUTION


# %%
lab.check("02", "rotate")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The result is `x * cos + (something) * sin`. Read off from the table above what stands in front of each sine.
# </details>
# <details><summary>Hint 2</summary>
#
# In front of `-sin` in the first half stands b; in front of `sin` in the second half stands a. So it is x with its
# halves exchanged.
# </details>
# <details><summary>Hint 3</summary>
#
# `x.chunk(2, dim=-1)` cuts in half and `torch.cat((b, a), dim=-1)` joins.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# `(b, a) * (-sin, sin)` is the whole trick; the package says `x.roll(D // 2, -1)`, which is the same. Two common wrong
# answers: pairs of neighbours (`x[..., 0::2]`), and `(-b, a)` from other code bases, where the table has no sign of its
# own: with ours that negates twice, and the first half turns backwards.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: who may look at whom
#
# One rule for the whole course: **a token sees itself and what came before it.** What is missing is the one line that
# makes `mask`. (Where several texts lie side by side, a token sees those of its own text alone. The last lines of the
# cell do that; they are given, and wait for lesson 07.)
#
# Compare *positions*, never row and column numbers. For the whole running example they are the same. For its second
# chunk (4 tokens were computed before, these are the last 3) they are not:
#
#     queries at 4 5 6, keys at 0 .. 6        # . . . . . .   <- wrong: by row and column
#                                             # # # # # . .   <- right: position 4 sees 0 .. 4


# %% task="02.visible"
def visible(q_pos: Tensor, k_pos: Tensor, q_seq: Tensor | None = None, k_seq: Tensor | None = None) -> Tensor:
    """Positions q_pos [..., T] and k_pos [..., S]  ->  bool [..., T, S], true where query t may see key s.

    q_seq [T] and k_seq [S], if given, are numbers of texts: only tokens of the same one see each other (lesson 07).
    """
    ### BEGIN SOLUTION
    mask = k_pos[..., None, :] <= q_pos[..., :, None]  # bool [..., T, S]
    ### END SOLUTION
    if q_seq is not None and k_seq is not None:
        mask = mask & torch.eq(q_seq.unsqueeze(-1), k_seq.unsqueeze(-2))
    return mask


# %%
lab.check("02", "visible")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Broadcasting: a column of queries `[T, 1]` against a row of keys `[1, S]` gives `[T, S]`.
# </details>
# <details><summary>Hint 2</summary>
#
# `q_pos[..., :, None]` makes that column whatever leading dimensions there are; `k_pos[..., None, :]` makes the row.
# </details>
# <details><summary>Hint 3</summary>
#
# One line: `mask = ... <= ...`, with `<=` and not `<`, since a token sees itself.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The common wrong answer is `torch.ones(T, S).tril()`. It draws the first picture below correctly and the second one
# wrongly: its row 0 sees key 0 alone, whatever position row 0 has. `tril(S - T)` mends that, and breaks as soon as
# positions have gaps or another order, which is everyday business from lesson 06 on.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# Your own function draws: the whole text, and its second chunk. What differs from the expected mask would be crossed
# out.

# %%
lab.show_masks(
    {"yours": visible(positions, positions), "expected": attention.visible(positions, positions)}, PIECES, PIECES
)

# %%
lab.show_masks(
    {"yours, second chunk": visible(positions[4:], positions), "expected": attention.visible(positions[4:], positions)},
    PIECES[4:],
    PIECES,
)

# %% [markdown]
# ## Build: attention
#
# For each query head, over the keys it may see (Vaswani et al. 2017):
#
#     score(t, s) = q_t · k_s / sqrt(D)       out_t = sum over s of softmax(score)(t, s) · v_s
#
# - **The scale.** A dot product of D numbers of size 1 is about sqrt(D) in size: 8 here. Undivided, the softmax would
#   give nearly all weight to one key.
# - **The mask comes before the softmax.** A hidden score becomes -inf, whose weight is exactly 0, and the others sum
#   to 1.
# - **Grouped queries** (Ainslie et al. 2023). Nine query heads share three key-value heads: 0 1 2 read the first, 3 4 5
#   the second, 6 7 8 the third. That makes K and V three times smaller, which lesson 04 will be glad of.
# - **A query that sees nothing** answers 0. None does in this lesson; free rows of a batch will.
# - **Dtypes.** The softmax in float32 at least; its weights are rounded to `v`'s dtype for the sum; the result in
#   `q`'s dtype.


# %% task="02.sdpa"
def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [..., T, H, D]; k and v [..., S, Hkv, D]; mask bool [..., T, S], true = visible  ->  [..., T, H, D]."""
    ### BEGIN SOLUTION
    G = q.shape[-2] // k.shape[-2]  # query heads for each key-value head
    k, v = k.repeat_interleave(G, dim=-2), v.repeat_interleave(G, dim=-2)  # [..., S, H, D]
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))  # [..., H, T or S, D]
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # [..., H, T, S]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~mask[..., None, :, :], float("-inf"))
    out = (scores.softmax(-1).to(v.dtype) @ v).transpose(-3, -2)  # [..., T, H, D]
    return out.masked_fill(~mask.any(-1)[..., None, None], 0.0)
    ### END SOLUTION


# %%
lab.check("02", "sdpa")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Order of work: give every query head its key-value head; put heads before tokens (`transpose(-3, -2)`); scores
# `[..., H, T, S]`; mask; softmax over the last dimension; times `v`; tokens before heads again.
# </details>
# <details><summary>Hint 2</summary>
#
# `repeat_interleave(G, dim=-2)` makes heads 0 0 0 1 1 1 2 2 2. The mask has no heads: `mask[..., None, :, :]` gives
# it one. `~mask` is what must be filled.
# </details>
# <details><summary>Hint 3</summary>
#
# A softmax over -inf alone is NaN, and NaN times 0 is NaN. So fill, do not multiply, at the very end:
# `out.masked_fill(~mask.any(-1)[..., None, None], 0.0)`.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The common wrong answer uses `repeat(1, G, 1)`, which *tiles*: heads 0 1 2 0 1 2 0 1 2. All shapes fit, nothing
# raises, and most query heads read the wrong keys. The package's own version repeats nothing at all: it folds the G
# query heads of a group into the rows of one product (exercise 3).
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: SwiGLU
#
# The other half of a block works on each row alone (Shazeer 2020). Two products widen the row from 576 to 1,536
# numbers. One of them, the gate, says how far each channel of the other is open; the third product leads back:
#
#     down( silu(gate x) * (up x) )           silu(z) = z · sigmoid(z)
#
# Matrices lie as `[out, in]`, as in the checkpoint and as `torch.nn.functional.linear(x, matrix)` wants them.


# %% task="02.swiglu"
def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [..., d]; gate and up [d_ff, d]; down [d, d_ff]  ->  [..., d]."""
    ### BEGIN SOLUTION
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    ### END SOLUTION


# %%
lab.check("02", "swiglu")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `F.linear(x, gate)` is `x @ gate.T`: `[..., d]` to `[..., d_ff]`.
# </details>
# <details><summary>Hint 2</summary>
#
# `F.silu` exists. It goes around the gate, not around `up`, and not around the product.
# </details>
# <details><summary>Hint 3</summary>
#
# Three `F.linear`, one `F.silu`, one `*` between numbers of the same shape.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The common wrong answer is silu around `up`. With random weights the two look alike, since gate and up are the same
# kind of matrix; with trained weights they are not.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Build: one block
#
# Now all of it in the right order. `layer` holds one block's weights, as `model.blocks[0]` does:
#
# | in `layer` | what |
# |---|---|
# | `attn_norm.weight`, `attn_norm.eps` | `[d]` and a number, for the norm before attention |
# | `attn.qkv.weight` | `[(H + 2 Hkv) D, d]`: rows of q, below them k, below them v |
# | `attn.heads`, `attn.head_dim` | `(H, Hkv, Hkv)` and `D`: in this order they follow each other |
# | `attn.o.weight` | `[d, H D]`, from the heads back to a row |
# | `mlp_norm.weight`, `mlp_norm.eps` | the same for the norm before the MLP |
# | `mlp.gate_up.weight` | `[2 d_ff, d]`: the rows of `gate`, then those of `up` |
# | `mlp.down.weight` | `[d, d_ff]` |
#
# q, k and v lie in one matrix because one large product is faster than three small ones. Call *your* functions. The
# last property of the check runs your block thirty times, through the real model in float32, and names the first one
# that differs.


# %% task="02.block"
def block(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, layer) -> Tensor:
    """x [..., T, d], cos and sin [..., T, 1, D], mask [..., T, T]  ->  [..., T, d]. `layer` holds the weights."""
    ### BEGIN SOLUTION
    attn, mlp = layer.attn, layer.mlp
    h = rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps)
    qkv = F.linear(h, attn.qkv.weight).unflatten(-1, (-1, attn.head_dim))  # [..., T, H + 2 Hkv, D]
    q, k, v = qkv.split(attn.heads, dim=-2)
    out = sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)  # [..., T, H, D]
    x = x + F.linear(out.flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    gate, up = mlp.gate_up.weight.chunk(2)
    return x + swiglu(h, gate, up, mlp.down.weight)
    ### END SOLUTION


# %%
lab.check("02", "block")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two lines in outline: `x = x + attention_half(norm(x))`, then `x = x + mlp_half(norm(x))`. The second norm reads the
# *new* x.
# </details>
# <details><summary>Hint 2</summary>
#
# `F.linear(h, layer.attn.qkv.weight).unflatten(-1, (-1, D))` has all heads in one dimension; `.split(heads, dim=-2)`
# gives q, k and v. Rotate q and k.
# </details>
# <details><summary>Hint 3</summary>
#
# After attention, `.flatten(-2)` lays the heads side by side, `[..., T, H D]`, for `o`. `gate_up.weight.chunk(2)` is
# gate and up.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked solution, and the common wrong answer</summary>
#
# The common wrong answer is `x = rms_norm(x, ...)` at the start: then the normed row goes on, not the row. The norm is
# for the half alone; what thirty blocks add to is never normed. That is why the first property of `block` silences both
# halves and asks for x back.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Put it into the engine
#
# The package's model calls `rotate`, `visible` and `sdpa` by their module, so yours can take their place. `lab.use`
# does that, and returns what undoes it. First the engine's own numbers, then the same with your three functions in
# it.


# %%
def last_logits(model: Llama) -> Tensor:
    """[V]: what the model thinks of every possible next token of the running example."""
    return model.logits(model(tokens, positions, SelfAttend(positions))[-1:])[0]


def top5(logits: Tensor) -> list[str]:
    chances, best = logits.float().softmax(-1).topk(5)
    return [f"{tokenizer.decode([token])!r} {p:.1%}" for p, token in zip(chances.tolist(), best.tolist(), strict=True)]


def rank(logits: Tensor, piece: str) -> int:
    return int((logits > logits[tokenizer.encode(piece)[0]]).sum()) + 1


reference = last_logits(model)
print("next, by the engine:", ", ".join(top5(reference)))
print("' will' is number", rank(reference, " will"), "of", len(reference))

# %%
undo = lab.use(from_namespace(globals()))
try:
    mine = last_logits(model)
finally:
    undo()
print("next, with yours:   ", ", ".join(top5(mine)))
print(f"largest difference of all logits: {(mine - reference).abs().max():.2g} (they spread by {reference.std():.2g})")

# %% [markdown]
# ## Measure
#
# From here on the package's functions run, so you can go on if you are stuck. Counters first. A matrix `[out, in]`
# times `T` rows is `T · out · in` multiplications, so every number can be predicted from `config.json`:
#
#     q, k, v, o    L · T · (d (H + 2 Hkv) D + H D d)
#     attention     L · 2 · H · D · T · S             scores, then the sum over v
#     MLP           L · T · 3 · d · d_ff
#     head          1 · d · V                         the last row alone
#
# The bench's `counting` sees the pass from outside and counts scores; torch's `FlopCounterMode` counts multiplications
# and additions, so half of what it says.

# %%
c, n = model.config, len(tokens)
d, H, Hkv, D = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
predicted = {
    "q k v o": c.n_layers * n * (d * (H + 2 * Hkv) * D + H * D * d),
    "attention": c.n_layers * 2 * H * D * n * n,
    "MLP": c.n_layers * n * 3 * d * c.d_ff,
    "head": d * c.vocab_size,
}
with counting(model, []) as counts, FlopCounterMode(display=False) as flops:
    last_logits(model)

by_module = {name: sum(found.values()) // 2 for name, found in flops.get_flop_counts().items()}


def counted_in(*ends: str) -> int:
    return sum(number for name, number in by_module.items() if name.endswith(ends))


projections = counted_in(".attn.qkv", ".attn.o")
counted = {
    "q k v o": projections,
    "attention": counted_in(".attn") - projections,
    "MLP": counted_in(".mlp"),
    "head": counted_in(".head"),
}
for part in predicted:
    print(f"{part:10} predicted {predicted[part]:>12,}   counted {counted[part]:>12,}")
print(f"in all     predicted {sum(predicted.values()):>12,}   counted {by_module['Global']:>12,}")
step = counts.steps[-1]
print(f"{step.tokens} tokens pushed, {step.rows} row of logits, {step.scores:,} attention scores")
print(f"visible among them: {int(attention.visible(positions, positions).sum()) * H * c.n_layers:,}")

# %%
lab.reveal("02.mlp_share", round(100 * counted["MLP"] / by_module["Global"], 1))
lab.reveal("02.scores", step.scores)

# %% [markdown]
# The scores are `L · H · T · S = 30 · 9 · 7 · 7`. The mask hides almost half of them, and they were computed all the
# same. At 7 tokens that costs nothing; it is the one part that grows with the *square* of the text, and lesson 03
# pays for it.
#
# Now the time of each part, by clocks around them, and that of a pass, with its spread.


# %%
def time_parts(model: Llama) -> dict[str, float]:
    """Seconds of one pass over the running example, by part; "all" is the whole."""
    spent, attend = Counter(), SelfAttend(positions)

    def clocked(part, call):
        def timed(*args):
            began = time.perf_counter()
            out = call(*args)
            spent[part] += time.perf_counter() - began
            return out

        return timed

    watched = [("head", model.head)]
    for layer in model.blocks:
        watched += [("q k v o", layer.attn.qkv), ("q k v o", layer.attn.o), ("MLP", layer.mlp)]
    for part, module in watched:
        module.forward = clocked(part, module.forward)
    began = time.perf_counter()
    model.logits(model(tokens, positions, clocked("attention", attend))[-1:])
    spent["all"] = time.perf_counter() - began
    for _, module in watched:
        del module.forward  # the class's own again
    return spent


in_bf16 = Llama.from_pretrained(NAME, "cpu", "bfloat16")
rounds = lab.size(ci=3, default=30, long=200)
seconds = {"float32": [], "bfloat16": []}
parts = []
for _ in range(rounds + 1):  # by turns; the first round warms up
    parts.append(time_parts(model))
    seconds["float32"].append(parts[-1]["all"])
    seconds["bfloat16"].append(time_parts(in_bf16)["all"])
for dtype, found in seconds.items():
    found = [1e3 * one for one in found[1:]]
    print(f"{dtype:9} {median(found):.1f} ms a pass ({min(found):.1f} to {max(found):.1f}, {rounds} passes)")
timed = {part: median(found[part] for found in parts[1:]) for part in predicted}

# %% [markdown]
# ## Plot
#
# Predicted, counted and timed, each as a share of its own sum. Where the bars of one part agree, time follows the
# multiplications. Where time's bar is longer, something else takes it: the head reads 28 million weights to multiply
# each of them once, and attention is thirty times a handful of small operations.

# %%
bars = {"predicted": (predicted, "0.85", ""), "counted": (counted, "0.65", "//"), "timed": (timed, "0.95", "..")}
shares = {name: {p: values[p] / sum(values.values()) for p in values} for name, (values, _, _) in bars.items()}
figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
for i, (name, (_, grey, hatch)) in enumerate(bars.items()):
    for j, part in enumerate(predicted):
        y, share = j + (i - 1) * 0.27, shares[name][part]
        axes.barh(y, share, 0.25, color=grey, hatch=hatch, edgecolor="black")
        axes.text(share + 0.01, y, f"{name} {share:.1%}", va="center", fontsize=8)
axes.set_yticks(range(len(predicted)), list(predicted))
axes.invert_yaxis()
axes.set_xlim(0, 1)
axes.xaxis.set_major_formatter("{x:.0%}")
axes.set_xlabel("share of the multiplications, or of the time of these parts")
axes.set_title("One pass over 7 tokens in float32", loc="left")
lab.show(
    figure,
    "Bars, one pass over 7 tokens. "
    + " ".join(
        f"{part}: predicted {shares['predicted'][part]:.1%}, counted {shares['counted'][part]:.1%}, "
        f"timed {shares['timed'][part]:.1%}."
        for part in predicted
    ),
)

# %% [markdown]
# Now bfloat16 against float32, block by block: how far apart are the rows, as a share of their length? The weights are
# the same numbers (the checkpoint is in bfloat16), so whatever appears comes from rounding on the way.


# %%
def after_each_block(model: Llama) -> list[Tensor]:
    rows = []
    hooks = [layer.register_forward_hook(lambda module, args, out: rows.append(out.float())) for layer in model.blocks]
    model(tokens, positions, SelfAttend(positions))
    for hook in hooks:
        hook.remove()
    return rows


exact, rounded = after_each_block(model), after_each_block(in_bf16)
distances = [(b - a).norm(dim=-1) / a.norm(dim=-1) for a, b in zip(exact, rounded, strict=True)]  # [T] each
apart = [float(distance.median()) for distance in distances]
assert torch.equal(model.embed(tokens), in_bf16.embed(tokens).float())  # they start from the same rows
first_block = next((i for i, share in enumerate(apart) if share > 0.01), len(apart))
lab.reveal("02.first_block", first_block)

# %%
figure = Figure(figsize=(8, 3.6), layout="constrained")
axes = figure.subplots()
axes.plot(range(len(apart)), [100 * share for share in apart], color="black", marker="o", markersize=4)
axes.axhline(1, color="black", linestyle="--", linewidth=1)
axes.text(len(apart) - 1, 1, "1 %", va="bottom", ha="right")
axes.set_xlabel("after block")
axes.set_ylabel("difference, percent of the row's length")
axes.set_ylim(bottom=0)
axes.set_title("bfloat16 against float32, the median token", loc="left")
lab.show(
    figure,
    "A line over the blocks, the distance of bfloat16 from float32 as a share of the row's length, the median token: "
    f"{apart[0]:.2%} after block 0, {max(apart):.2%} at most (after block {apart.index(max(apart))}) "
    f"and {apart[-1]:.2%} after block {len(apart) - 1}. "
    + (f"Block {first_block} is the first above 1 %." if first_block < len(apart) else "No block is above 1 %."),
)

# %%
in_bf16_logits = last_logits(in_bf16).float()
for dtype, logits in (("float32", reference), ("bfloat16", in_bf16_logits)):
    print(f"{dtype:9} {', '.join(top5(logits))};  ' will' is number {rank(logits, ' will')}")
difference = (in_bf16_logits - reference).abs().max()
lead = float(reference.topk(2).values.diff().abs())
print(f"largest difference of all logits: {difference:.2g}; the best token leads the second by {lead:.2g}")

# %% [markdown]
# So the two dtypes part in the very first block, by about one rounding, and drift from there. (Where they cross 1
# percent may be another block on your machine: its sums run in another order.) As long as the best token leads by
# more than the drift, the text is the same; where two tokens are nearly as good, rounding decides. Remember that when
# a batched engine and a plain one disagree on a word, and check in float64 before you look for a bug: there, they
# must agree exactly. Most checks of this course run in float64 for that reason.

# %% [markdown]
# ## Explain
#
# Neighbour pairs and half-split pairs are both rotations, both keep the length of a head, and under both the scores
# depend on differences of positions alone. Why, then, does a checkpoint that was trained with one go wrong under the
# other? And what could a converter do to the rows of the q and k matrices, so that the other one becomes right?

# %%
lab.answer("02.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# Training taught each row of the q and k matrices for the frequency that its pair turns with. Under the other pairing
# the same number meets another partner, and turns with another frequency: fast where it learned slow. The lengths are
# right and the content is not. Permuting the rows of q and k within each head (i, i + D/2 to 2i, 2i + 1) brings every
# number to its partner; since q and k are permuted alike, their dot products stay. GGUF files are stored that way, and
# whoever reads them has to undo it, k with Hkv heads and not with H.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ## Break it
#
# Put the most famous bug in: neighbours as pairs. Guess first which properties of `rotate` catch it, and which block
# the real model names. (`block` calls `rotate`, so yours goes wrong with it.)


# %%
def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., half:]
    a, b = x[..., 0::2], x[..., 1::2]  # the bug
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


right, rotate = rotate, interleaved
lab.check("02", "rotate", "block")
rotate = right

# %% [markdown]
# At position 0 nothing turns, differences of positions still count alone, dtypes are right: three properties of five
# hold, and all of the block's but the last. Only numbers tell. And what does a reader notice? Here is what the engine
# writes, first with its own `rotate`, then with the bug. (Making text out of logits is lesson 03; we borrow it.)

# %%
question = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
jobs = [
    Job(tuple(prompt), max_tokens=lab.size(ci=8, default=24, long=60), ignore_eos=False)
    for prompt in (tokens.tolist(), question)
]


def written() -> None:
    for output in run(model, "cached", jobs).outputs:
        print("   ", repr(tokenizer.decode(output)))


written()
undo = lab.use(from_namespace({"rotate": interleaved}))
try:
    written()
    print("' will' is now number", rank(last_logits(model), " will"))
finally:
    undo()

# %% [markdown]
# It still writes English, and no longer answers. A small bug in a good model looks like a bad model: that is the
# danger of it, and why nobody should judge an engine by reading its output.
#
# Now break something of your own, in your own cell: take the scale out of `sdpa`, or swap gate and up in `block`. Guess
# first which property will notice. Then mend it, and run the cell again.

# %% [markdown]
# ## Recap
#
# - A Llama is a table of rows to which every block adds twice: what attention gathers, and what the MLP makes of each
#   row.
# - Only attention mixes rows. Everything else is per token, which is why the model never needs to know about batches.
# - Order is in the angles of q and k; who sees whom is one comparison of positions.
# - Three quarters of a block's multiplications are in its MLP; attention's own are few while texts are short.
# - What cannot be seen in shapes: pairs, tiled heads, the scale, where the norm rounds. So we compare numbers, layer by
#   layer.
#
# Next: lesson 03 takes the best logit, appends that token, and runs everything again. And again.
#
# ## Exercises
#
# 1. **Logit lens.** Apply the last norm and the head to the rows after each block. From which block on is the final
#    best token the best? (difficulty 2 of 5, importance 3 of 5, 20 minutes)
# 2. **float16.** Build q and k whose scaled score fits float16 while `q @ k.T` does not. In which order must `sdpa`
#    scale and multiply? (difficulty 2, importance 3, 15 minutes)
# 3. **No repeating.** Write `sdpa` without `repeat_interleave`: fold the G query heads of a group into the rows of one
#    product. Check it, then compare with the package's. (difficulty 4, importance 4, 40 minutes)
# 4. **A longer context.** Llama 3 slows some pairs down. Read `rope_frequencies` in the package, add the scaling to
#    yours, and plot which pairs change. (difficulty 3, importance 3, 30 minutes)
# 5. **torch's own.** Call `F.scaled_dot_product_attention` with `is_causal=True` for the second chunk, and find out
#    which mask it draws. (difficulty 2, importance 4, 20 minutes)
#
# ## References
#
# - Touvron et al. 2023, [LLaMA](https://arxiv.org/abs/2302.13971): section 2.2, the three choices that make it a Llama.
# - Zhang & Sennrich 2019, [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467): why no mean is
#   needed.
# - Su et al. 2021, [RoFormer](https://arxiv.org/abs/2104.09864): section 3, from the wish for differences to the
#   rotation.
# - Ainslie et al. 2023, [GQA](https://arxiv.org/abs/2305.13245): figure 2, and what grouping costs in quality.
# - Shazeer 2020, [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202): three pages, and an honest
#   conclusion.
# - Vaswani et al. 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762): section 3.2.1, on the scale.
# - Hugging Face 2025, *Continuous batching from first principles*: the running example, and attention drawn step by
#   step.
# - `modeling_llama.py` in Hugging Face's transformers: the reference for the order of casts.
