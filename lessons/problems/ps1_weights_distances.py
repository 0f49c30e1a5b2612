# %% [markdown]
# # Problem set 1 · Four-bit weights, and attention by distance
#
# You read weights that take four bits each out of a file, byte by byte, and you write an attention that knows the order
# of tokens without rotating anything.
#
# It needs lessons 00 (the roofline), 01 (the file) and 02 (attention). No model and no weights: every cell runs in
# seconds. The check tells which properties hold; the marker runs the same properties on other inputs too, of other
# sizes, so write what the text says and not what one example needs. A property that holds counts, whether or not the
# others do. But a function that holds on the shown inputs alone gets nothing for the others.
#
# | part | properties | public checks | other inputs | written | minutes |
# |---|--:|--:|--:|--:|--:|
# | 1. `read_weight` | 6 | 6 points | 2.5 points | | 60 |
# | 2. `alibi` | 6 | 6 points | 2.5 points | | 60 |
# | 3. Explain | | | | 3 points | 20 |
# | together | 12 | 12 points | 5 points | 3 points | 140 |

# %% tags=["setup"]
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm import lab

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}

# %%
lab.start("p1")

# %% [markdown]
# ## Problem 1: weights of four bits
#
# A step of decoding reads every weight once, and on most machines that is what takes its time (lesson 00). So people
# store weights in fewer bits. Here is a simple way to do it, close to what real formats do. The container is the
# safetensors file of lesson 01, unchanged: 8 bytes that say n, a header of n bytes, data; offsets count from the
# beginning of the data.
#
# A tensor called `NAME` is stored in one of two ways.
#
# - **Plain**: the header has an entry `NAME`, of dtype `F32`, `F16` or `BF16`.
# - **Packed**: the header has no entry `NAME`, but two others. They may lie anywhere in the data, in any order.
#
# | entry | dtype | shape | what |
# |---|---|---|---|
# | `NAME.packed` | `U8` | `[rows, cols / 2]` | two weights in each byte |
# | `NAME.scale` | `F16` | `[rows, groups]` | one factor for each group of neighbouring columns |
#
# A byte holds two numbers of four bits, 0 to 15. In byte j of a row the **lower** four bits belong to column 2j and the
# **upper** four to column 2j + 1. A number x stands for x - 8, so 8 is zero. The columns are cut into groups of equal
# size, `size = cols / groups`, and
#
#     weight[r, c] = (number[r, c] - 8) · scale[r, c // size]        in float32
#
# An example: one row of four columns in two groups. The bytes are 0x9F and 0x08, the scales 0.5 and 2.
#
# | column | byte | number | number - 8 | scale | weight |
# |--:|---|--:|--:|--:|--:|
# | 0 | 0x9**F** | 15 | 7 | 0.5 | 3.5 |
# | 1 | 0x**9**F | 9 | 1 | 0.5 | 0.5 |
# | 2 | 0x0**8** | 8 | 0 | 2 | 0 |
# | 3 | 0x**0**8 | 0 | -8 | 2 | -16 |
#
# **A download that broke off.** A file may end before its data do. The header then promises bytes that are not there.
# Tensors whose bytes are all there must still come. For any other, raise a `ValueError` whose message contains the name
# of the entry that is not whole (of a packed tensor `NAME.packed` or `NAME.scale`, and not the one that is whole).
#
# Read the file yourself, as in lesson 01; you may take over your functions from there. Helpers go into the same cell.


# %% task="p1.read_weight"
def read_weight(path: Path, name: str) -> Tensor:
    """The tensor of that name, in float32: [rows, cols] of a packed one, the stored shape of a plain one.

    Raises ValueError, with the entry's name in it, if some of the bytes it needs are not in the file.
    """
    ### BEGIN SOLUTION
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n))

        def stored(entry: str) -> Tensor:
            begin, end = header[entry]["data_offsets"]
            file.seek(8 + n + begin)
            data = bytearray(file.read(end - begin))
            if len(data) < end - begin:
                raise ValueError(f"{path}: {entry} has {len(data)} of its {end - begin} bytes")
            return torch.frombuffer(data, dtype=DTYPES[header[entry]["dtype"]]).reshape(header[entry]["shape"])

        if name in header:
            return stored(name).float()
        packed, scale = stored(f"{name}.packed"), stored(f"{name}.scale").float()
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)  # [rows, cols]
    size = numbers.shape[1] // scale.shape[1]
    return (numbers.float() - 8) * scale.repeat_interleave(size, dim=1)
    ### END SOLUTION


# %%
lab.check("p1", "read_weight")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write a helper that returns one entry as it is stored, whatever its dtype, and refuses one whose bytes are not all
# there. A plain tensor needs one call of it, a packed one two. What is left is arithmetic on `[rows, cols / 2]`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `packed & 15` and `packed >> 4` are `[rows, cols / 2]` each. Column 2j comes from one of them and column 2j + 1 from
# the other: stack them in a new last dimension, and flatten that. Mind the dtypes before you subtract and before you
# multiply: in uint8, 3 - 8 is 251.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# `torch.stack((low, high), -1).flatten(1)` interleaves the two halves; `torch.cat` would put all low ones first, with
# the right shape and every column but the outer two in the wrong place. The common wrong answers are about dtypes:
# `packed & 15` is uint8, so `- 8` goes round at 0, and a product in float16 overflows from 65,504 on and has 11 bits
# where 15 are needed. The group is found by a division of the column, never by a remainder. And `file.read` does not
# complain at the end of a file: without a look at the length, torch fails later with a message that names nothing.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### What four bits cost
#
# Here is the way back: a matrix is cut into groups, the number furthest from 0 of each group becomes -8 or 7, and
# everything is rounded. Each group brings its own scale of 16 bits. So small groups fit better, and take more room.
# Which size would you choose? (The cell needs your function. The error is that of all weights together, as a share of
# their length.)


# %%
def write_packed(path: Path, name: str, weight: Tensor, size: int) -> None:
    """weight [rows, cols], in groups of `size` columns."""
    groups = weight.unflatten(1, (-1, size))  # [rows, groups, size]
    scale = (groups.abs().amax(-1) / 7).to(torch.float16)  # [rows, groups]
    numbers = (groups / scale.float()[..., None] + 8).round().clamp(0, 15).to(torch.uint8).flatten(1)
    save_file({f"{name}.packed": numbers[:, 0::2] | numbers[:, 1::2] << 4, f"{name}.scale": scale}, path)


generator = torch.Generator().manual_seed(0)
matrix = torch.randn(64, 256, generator=generator) * torch.logspace(-1, 0, 256)  # columns of very different size
print("group size   bits a weight   error of all weights together")
for size in (256, 64, 32, 16, 4):
    with tempfile.TemporaryDirectory() as folder:
        write_packed(Path(folder) / "model.safetensors", "w", matrix, size)
        error = (read_weight(Path(folder) / "model.safetensors", "w") - matrix).norm() / matrix.norm()
    print(f"{size:>10}{4 + 16 / size:>16.2f}{error:>19.1%}")

# %% [markdown]
# ## Problem 2: attention by distance
#
# Lesson 02 puts the order of tokens into the angles of q and k. There is an older way that rotates nothing (*ALiBi*,
# Press, Smith and Lewis 2022, [arXiv 2108.12409](https://arxiv.org/abs/2108.12409)): every position between a query and
# a key costs the key some of its score. How much depends on the head; that is the head's **slope**.
#
#     score(t, s) = q_t · k_s / sqrt(D)  -  slope(h) · (position of t - position of s)
#
# Everything else is as in lesson 02: a query sees keys at its own position and before, the mask comes before the
# softmax, neighbouring query heads share a key-value head, and a query that sees nothing answers 0. The slopes belong
# to the H **query** heads, h = 0 .. H - 1:
#
# - If H is a power of two, slope(h) = 2^(-8 (h + 1) / H). For 8 heads: 1/2, 1/4, 1/8, ... 1/256.
# - If not, let P be the largest power of two below H. The first P heads have the slopes of P heads. The others have
#   those of 2P heads, every second one, beginning with the first.
#
# | H | slopes |
# |--:|---|
# | 4 | 1/4, 1/16, 1/64, 1/256 |
# | 6 | 1/4, 1/16, 1/64, 1/256, then 1/2, 1/8 |
# | 8 | 1/2, 1/4, 1/8, 1/16, 1/32, 1/64, 1/128, 1/256 |
#
# q, k and v may have 16 bits. Scores, distances and softmax must be computed in float32 then (in float64 if the inputs
# are float64), and the answer has the dtype of q. Positions are whole numbers and may be large: bfloat16 has no 257.


# %% task="p1.alibi"
def alibi(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Attention with linear biases: q [T, H, D]; k, v [S, Hkv, D]; int64 q_pos [T], k_pos [S]  ->  [T, H, D].

    Positions may have gaps and come in any order. H is a multiple of Hkv.
    """
    ### BEGIN SOLUTION
    H, D = q.shape[-2:]
    G = H // k.shape[-2]
    P = 1 << (H.bit_length() - 1)  # the power of two at or below H
    exponents = [-8 * (h + 1) / P for h in range(P)] + [-8 * (2 * h + 1) / (2 * P) for h in range(H - P)]

    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).transpose(0, 1)  # [H, T, D]
    keys, values = (x.to(wide).repeat_interleave(G, dim=1).transpose(0, 1) for x in (k, v))  # [H, S, D]
    distance = q_pos[:, None] - k_pos  # int64 [T, S]
    slope = 2.0 ** torch.tensor(exponents, dtype=wide)  # [H]
    scores = queries @ keys.transpose(1, 2) * D**-0.5 - slope[:, None, None] * distance  # [H, T, S]
    weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
    out = (weights @ values).transpose(0, 1)  # [T, H, D]
    return out.masked_fill((distance < 0).all(-1)[:, None, None], 0.0).to(q.dtype)
    ### END SOLUTION


# %%
lab.check("p1", "alibi")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with your `sdpa` of lesson 02, with heads in front: scores `[H, T, S]`. Two things are new. Distances are one
# table `[T, S]`, made from positions; the mask can be read off the same table. Slopes are a column `[H, 1, 1]`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# For H = 6, P is 4 and two heads are left over. Their slopes are those of heads 0 and 2 of 8 heads, 2^(-8 · 1 / 8) and
# 2^(-8 · 3 / 8). `1 << (H.bit_length() - 1)` is P. Widen q and k before the product; take differences of positions
# while they are still whole numbers.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# One table of distances serves twice: as the bias, and (where it is below 0) as the mask. The common wrong answers:
# the scale 1 / sqrt(D) around the whole sum, so that the slopes are divided too; distances of row numbers,
# `arange(T)[:, None] - arange(S)`, right for a whole prompt and wrong for its second chunk; and slopes given to
# key-value heads, before the heads are repeated. A bias needs no table of angles and nothing in the KV cache: keys are
# stored as they are, and may be moved to another position for free.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### How far a head looks
#
# All keys alike, 200 positions: then the distance alone decides. The last query gives each head's weights; how many
# positions hold half of them, and how many nine tenths? (The cell needs your function.)

# %%
n = 200
marks = torch.eye(n, dtype=torch.float64)[:, None]  # [S, 1, n]: the value of position s is 1 in dimension s
nothing = torch.zeros(1, 8, n, dtype=torch.float64)
weights = alibi(nothing, torch.zeros_like(marks), marks, torch.tensor([n - 1]), torch.arange(n))[0]  # [H, n]
print("head   slope   newest key   positions for half of the weight, for nine tenths")
for h in range(8):
    held = weights[h].flip(0).cumsum(0)  # the newest key first
    half, most = (int((held < share).sum()) + 1 for share in (0.5, 0.9))
    print(f"{h:>4}   1/{2 ** (h + 1):<5}{weights[h, -1]:>9.1%}{half:>14}{most:>24}")

# %% [markdown]
# ## Explain
#
# Write between the quotes, in eight to ten sentences. A model is stored as in problem 1, in groups of 32 columns.
#
# 1. How many bits does a weight take, and by which factor does the ceiling of lesson 00 for decoding **one** short text
#    rise against bfloat16, if the kernel unpacks as it reads and the arithmetic stays as it is?
# 2. From which batch on is nothing gained any more, compared with bfloat16? Say it in terms of the batch at which the
#    roof bends.
# 3. A program calls your `read_weight` for every matrix when it starts, and computes with what it returns. What does it
#    gain in decoding, and why?

# %%
lab.answer("p1.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# A weight takes 4 bits and 1/32 of a scale of 16 bits: 4.5 bits. With one short text, reading the weights is all that
# counts, so the ceiling rises by 16 / 4.5 = 3.6 times. The operations are as many as before. In bfloat16 the roof bends
# at a batch B where reading the weights and multiplying take equally long; with 4.5 bits reading takes 3.6 times less,
# so it bends at B / 3.6 already. Between the two the gain shrinks, and from B on arithmetic limits both: nothing is
# gained. A program that unpacks at the start has float32 matrices in memory. Every step reads 32 bits a weight, so it
# is half as fast as in bfloat16; only the file is smaller, and the start may be quicker.
# </details>
# <!-- END SOLUTION -->
