/* What a layer does beside attention: norm, rotation, silu(gate) * up and sums in one pass each, the matmul, and of these
   the two halves of a layer, before and after its attention.

   They round to memory's type where `model` does, so the same numbers come out. All sizes are multiples of STEP, but
   for the outputs of `linear`. */

#include "vectors.h"

#include <omp.h>

#define MANY 8192 /* numbers; below this a second thread costs more than it does */

/* out = x / rms(x) * weight, d numbers each. */
static inline void norm_row(const stored *x, const stored *weight, stored *out, int64_t d, double eps) {
    vec squares[2] = {all(0), all(0)}, a[2], w[2];
    for (int64_t i = 0; i < d; i += STEP) {
        load(x + i, a);
        squares[0] += a[0] * a[0], squares[1] += a[1] * a[1];
    }
    const REAL scale = 1 / sqrt(sum(squares[0] + squares[1]) / d + eps);
    for (int64_t i = 0; i < d; i += STEP) {
        load(x + i, a), load(weight + i, w);
        store(out + i, rounded(a[0] * scale) * w[0], rounded(a[1] * scale) * w[1]);
    }
}

/* x [T, d] with so many numbers from row to row, out [T, d]. */
void norm(const stored *x, const stored *weight, stored *out, int64_t T, int64_t d, int64_t x_stride, double eps,
          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++) norm_row(x + t * x_stride, weight, out + t * d, d, eps);
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

#define AHEAD 8192 /* bytes: so far before it is read, a weight is asked for */

const int64_t lanes = LANES; /* the layout of weights depends on it */

/* Whether the matmul below is the best that this CPU can do: not where it has a matrix unit, which oneDNN uses. */
#if defined(BF16) && defined(__AMX_BF16__)
const int64_t multiplies = 0;
#else
const int64_t multiplies = 1;
#endif

/* R rows of x times one panel. A weight [n, d] lies in panels of STEP outputs, [n / STEP, d / PAIR, STEP, PAIR] (see
   `to_panels` in panels.py), so that all of it is read in the order in which it lies. x [R, d], out [R, n], of which
   `left` outputs from here on are there; `first`: of the passes over this panel. */
INLINE void tile(const int R, const int first, const stored *x, const stored *panel, stored *out, int64_t left,
                 int64_t n, int64_t d) {
    vec y[ROWS][2];
    product(R, x, d, PAIR, panel, d / PAIR, y, first ? AHEAD : 0);
    for (int r = 0; r < R; r++, out += n) {
        if (left >= STEP) store(out, y[r][0], y[r][1]);
        else {
            stored part[STEP];
            store(part, y[r][0], y[r][1]);
            memcpy(out, part, left * sizeof(stored));
        }
    }
}

/* Outputs from .. to - 1 of x times the weight: x [M, d], panels of a weight [n, d], out [M, n]. A panel comes from
   memory once and is still in the cache for the next rows. */
static void multiply(const stored *x, const stored *panels, stored *out, int64_t M, int64_t n, int64_t d, int64_t from,
                     int64_t to) {
    const int64_t passes = (M + ROWS - 1) / ROWS;
    for (int64_t o = from; o < to; o += STEP)
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t m = M * pass / passes, rows = M * (pass + 1) / passes - m;
#define FIRST_PASS(R) tile(R, 1, x, panels + o * d, out + o, to - o, n, d)
#define OTHER(R) tile(R, 0, x + m * d, panels + o * d, out + m * n + o, to - o, n, d)
            if (pass) switch (rows) { CASES(OTHER) }
            else switch (rows) { CASES(FIRST_PASS) }
        }
}

typedef struct {
    int64_t from, to;
} part;

/* This thread's part of n, in whole pieces. */
static part share(int64_t n, int64_t piece) {
    const int64_t pieces = (n + piece - 1) / piece, me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t to = pieces * (me + 1) / all * piece;
    return (part){pieces * me / all * piece, to < n ? to : n};
}

/* out = x times the weight: x [M, d], panels of a weight [n, d], out [M, n]. */
void linear(const stored *x, const stored *panels, stored *out, int64_t M, int64_t n, int64_t d, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const part p = share(n, STEP);
        multiply(x, panels, out, M, n, d, p.from, p.to);
    }
}

static inline vec silu(vec x) { return rounded(x / (exponential(-x) + 1)); }

/* out = silu(gate) * up, n numbers each. */
static inline void silu_row(const stored *gate, const stored *up, stored *out, int64_t n) {
    for (int64_t i = 0; i < n; i += STEP) {
        vec g[2], u[2];
        load(gate + i, g), load(up + i, u);
        store(out + i, silu(g[0]) * u[0], silu(g[1]) * u[1]);
    }
}

/* gate_up [T, 2 * d], out [T, d]. */
void silu_times(const stored *gate_up, stored *out, int64_t T, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++) silu_row(gate_up + t * 2 * d, gate_up + t * 2 * d + d, out + t * d, d);
}

static inline void add_row(const stored *x, const stored *y, stored *out, int64_t n) {
    for (int64_t i = 0; i < n; i += STEP) {
        vec a[2], b[2];
        load(x + i, a), load(y + i, b);
        store(out + i, a[0] + b[0], a[1] + b[1]);
    }
}

/* x += y, [T, d] each. */
void add(stored *x, const stored *y, int64_t T, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++) add_row(x + t * d, y + t * d, x + t * d, d);
}

/* sum = x + y, and out its norm, [T, d] each. */
void add_norm(const stored *x, const stored *y, const stored *weight, stored *sum, stored *out, int64_t T, int64_t d,
              double eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (T > 1 && T * d > MANY)
    for (int64_t t = 0; t < T; t++) {
        add_row(x + t * d, y + t * d, sum + t * d, d);
        norm_row(sum + t * d, weight, out + t * d, d, eps);
    }
}

/* The half of a layer before its attention: norm, then q, k and v, then the `turned` heads of q and k rotated.
   x and normed [M, d], cos and sin [M, D], out [M, heads, D]; qkv in panels. */
void before(const stored *x, const stored *norm, const stored *qkv, const stored *cos, const stored *sin,
            stored *normed, stored *out, int64_t M, int64_t d, int64_t heads, int64_t turned, int64_t D, double eps,
            int threads) {
    const int64_t n = heads * D;
#pragma omp parallel num_threads(threads)
    {
        const part row = share(M, 1), p = share(n, D);
        for (int64_t m = row.from; m < row.to; m++) norm_row(x + m * d, norm, normed + m * d, d, eps);
#pragma omp barrier
        multiply(normed, qkv, out, M, n, d, p.from, p.to);
        for (int64_t m = 0; m < M; m++)
            for (int64_t at = p.from; at < p.to && at < turned * D; at += D)
                rotate_head(out + m * n + at, cos + m * D, sin + m * D, D);
    }
}

/* The half after it: y = x + o(attended), then y + down(silu(gate) * up) with gate and up of y's norm.
   attended [M, a], x and out [M, d], scratch M * (3 f + d) numbers for gate and up [M, 2 f] and what follows; the
   weights in panels. */
void after(const stored *attended, const stored *x, const stored *o, const stored *norm, const stored *gate_up,
           const stored *down, stored *scratch, stored *out, int64_t M, int64_t a, int64_t d, int64_t f, double eps,
           int threads) {
    stored *const both = scratch, *const product = both + M * 2 * f, *const last = product + M * f;
#pragma omp parallel num_threads(threads)
    {
        const part row = share(M, 1), p = share(d, STEP), q = share(f, STEP);
        multiply(attended, o, out, M, d, a, p.from, p.to);
#pragma omp barrier
        for (int64_t m = row.from; m < row.to; m++) {
            add_row(x + m * d, out + m * d, out + m * d, d);
            norm_row(out + m * d, norm, last + m * d, d, eps);
        }
#pragma omp barrier
        multiply(last, gate_up, both, M, 2 * f, d, q.from, q.to);
        multiply(last, gate_up, both, M, 2 * f, d, f + q.from, f + q.to);
        for (int64_t m = 0; m < M; m++) {
            const stored *gate = both + m * 2 * f + q.from;
            silu_row(gate, gate + f, product + m * f + q.from, q.to - q.from);
        }
#pragma omp barrier
        multiply(product, down, last, M, d, f, p.from, p.to);
        for (int64_t m = 0; m < M; m++) {
            stored *const y = out + m * d + p.from;
            add_row(last + m * d + p.from, y, y, p.to - p.from);
        }
    }
}
