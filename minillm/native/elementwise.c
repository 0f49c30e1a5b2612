/* What a layer does number by number between its matmuls, each in one pass: norm, rotation, silu(gate) * up; and the
   matmul of a single row.

   They round to memory's type where `model` does, so the same numbers come out. All sizes are multiples of STEP. */

#include "vectors.h"

#define MANY 8192 /* numbers; below this a second thread costs more than it does */

/* out[t] = x[t] / rms(x[t]) * weight. x [T, d] with so many numbers from row to row, out [T, d]. */
void norm(const stored *x, const stored *weight, stored *out, int64_t T, int64_t d, int64_t x_stride, double eps,
          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++) {
        const stored *row = x + t * x_stride;
        vec squares[2] = {all(0), all(0)}, a[2], w[2];
        for (int64_t i = 0; i < d; i += STEP) {
            load(row + i, a);
            squares[0] += a[0] * a[0], squares[1] += a[1] * a[1];
        }
        const REAL scale = 1 / sqrt(sum(squares[0] + squares[1]) / d + eps);
        for (int64_t i = 0; i < d; i += STEP) {
            load(row + i, a), load(weight + i, w);
            store(out + t * d + i, rounded(a[0] * scale) * w[0], rounded(a[1] * scale) * w[1]);
        }
    }
}

/* In place: x cos + (b, a) (-sin, sin) for the halves a and b of a head; the tables hold the signs. */
static inline void rotate_head(stored *x, const stored *cos, const stored *sin, int64_t D) {
    for (int64_t i = 0; i < D / 2; i += STEP) {
        stored *lower = x + i, *upper = x + i + D / 2;
        vec a[2], b[2], c[2], s[2];
        load(lower, a), load(upper, b);
        load(cos + i, c), load(sin + i, s);
        store(lower, rounded(a[0] * c[0]) + rounded(b[0] * s[0]), rounded(a[1] * c[1]) + rounded(b[1] * s[1]));
        load(cos + i + D / 2, c), load(sin + i + D / 2, s);
        store(upper, rounded(b[0] * c[0]) + rounded(a[0] * s[0]), rounded(b[1] * c[1]) + rounded(a[1] * s[1]));
    }
}

/* q [T, H, D] and k [T, Hkv, D], each with its stride of so many numbers from token to token; cos and sin [T, D]. */
void rotate(stored *q, stored *k, const stored *cos, const stored *sin, int64_t T, int64_t H, int64_t Hkv, int64_t D,
            int64_t q_stride, int64_t k_stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * (H + Hkv) * D > MANY)
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < H; h++) rotate_head(q + t * q_stride + h * D, cos + t * D, sin + t * D, D);
        for (int64_t h = 0; h < Hkv; h++) rotate_head(k + t * k_stride + h * D, cos + t * D, sin + t * D, D);
    }
}

#define AHEAD 4096 /* bytes: so far before it is read, a weight is asked for */

/* out = weight x, for one row x. weight [n, d], x [d], out [n]. The weights are read once, in the order in which they
   lie; no arithmetic on so few numbers takes as long as that. */
void row(const stored *x, const stored *weight, stored *out, int64_t n, int64_t d, int threads) {
    vec wide[d / LANES];
    for (int64_t i = 0; i < d; i += STEP) load(x + i, wide + i / LANES);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t o = 0; o < n; o++) {
        vec sums[2] = {all(0), all(0)}, w[2];
        for (int64_t i = 0; i < d; i += STEP) {
            load(weight + o * d + i, w);
            __builtin_prefetch((const char *)(weight + o * d + i) + AHEAD);
            sums[0] += w[0] * wide[i / LANES], sums[1] += w[1] * wide[i / LANES + 1];
        }
        out[o] = narrowed(sum(sums[0] + sums[1]));
    }
}

static inline vec silu(vec x) { return rounded(x / (exponential(-x) + 1)); }

/* out = silu(gate) * up. gate_up [T, 2 * d], out [T, d]. */
void silu_times(const stored *gate_up, stored *out, int64_t T, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < d; i += STEP) {
            vec gate[2], up[2];
            load(gate_up + t * 2 * d + i, gate), load(gate_up + t * 2 * d + d + i, up);
            store(out + t * d + i, silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
        }
}
