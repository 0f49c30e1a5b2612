/* Attention over a table of slots: every query against the keys of its own sequence, up to its own position.

   For one query and one key-value head, the keys come in pieces of KEYS. Of each piece the scores are computed and
   the softmax goes on from where it was (Milakov & Gimelshein 2018): a larger maximum shrinks what was summed before.
   So every K and V is read once, straight from its slot, for all G query heads of its group, and nothing is written
   but the answer. While K is read, V of the same slots is asked for, and while V is read, the next K. Many queries of
   one sequence go together, in blocks (blocks.h).

   The compiler is told, besides what vectors.h wants, D, the head dim (a multiple of STEP), and G = H / Hkv. */

#include "vectors.h"

#define W (D / LANES) /* vectors in one row */
#define TILES 2
#define KEYS (TILES * LANES)

static inline void load_row(const stored *from, vec x[W]) {
    for (int w = 0; w < W; w += 2) load(from + w * LANES, x + w);
}

static inline void fetch(const stored *row) {
    for (unsigned i = 0; i < D * sizeof(stored); i += 64) __builtin_prefetch((const char *)row + i);
}

/* q and out: G heads of D. k and v: one head's slots of D each. slots: where positions 0 .. length-1 lie. */
static void attend_one(const stored *q, const stored *k, const stored *v, const int64_t *slots, int64_t length,
                       stored *out) {
    vec query[G][W], acc[G][W], weights[G][TILES];
    REAL most[G], total[G];
    for (int g = 0; g < G; g++) {
        load_row(q + g * D, query[g]);
        for (int w = 0; w < W; w++) query[g][w] *= (REAL)(1 / sqrt(D)), acc[g][w] = all(0);
        most[g] = -INFINITY, total[g] = 0;
    }
    for (; length > 0; length -= KEYS, slots += KEYS) {
        const int n = length < KEYS ? length : KEYS, tiles = (n + LANES - 1) / LANES;
        for (int t = 0; t < tiles; t++) {
            vec x[G][LANES], key[W];
            for (int i = 0; i < LANES; i++) {
                const int j = t * LANES + i;
                const int64_t slot = slots[j < n ? j : n - 1]; /* past the end: the last again */
                load_row(k + slot * D, key);
                fetch(v + slot * D);
                for (int g = 0; g < G; g++) {
                    x[g][i] = query[g][0] * key[0];
                    for (int w = 1; w < W; w++) x[g][i] += query[g][w] * key[w];
                }
            }
            for (int g = 0; g < G; g++) weights[g][t] = sums(x[g]);
        }
        for (int g = 0; g < G; g++) {
            for (int j = n; j < tiles * LANES; j++) weights[g][j / LANES][j % LANES] = -INFINITY;
            vec top = weights[g][0], added = all(0);
            for (int t = 1; t < tiles; t++) top = choose(weights[g][t] > top, weights[g][t], top);
            const REAL before = most[g], now = largest(top);
            most[g] = now > before ? now : before;
            const REAL shrink = exponential(all(before - most[g]))[0];
            for (int t = 0; t < tiles; t++) added += weights[g][t] = exponential(weights[g][t] - most[g]);
            total[g] = total[g] * shrink + sum(added);
            for (int w = 0; w < W; w++) acc[g][w] *= shrink;
        }
        for (int j = 0; j < n; j++) {
            vec value[W];
            load_row(v + slots[j] * D, value);
            if (length > KEYS + j) fetch(k + slots[KEYS + j] * D);
            for (int g = 0; g < G; g++) {
                const REAL weight = ((REAL *)weights[g])[j];
                for (int w = 0; w < W; w++) acc[g][w] += weight * value[w];
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int w = 0; w < W; w += 2)
            store(out + g * D + w * LANES, acc[g][w] / total[g], acc[g][w + 1] / total[g]);
}

#include "blocks.h"

/* The new K and V go to their slots, then every query attends.
   q [T, Hkv * G, D], new_k and new_v [T, Hkv, D], each with its stride of so many numbers from token to token;
   out [T, Hkv * G, D]; k and v [Hkv, slots, D], head_stride from head to head; table [rows, max_len]; seq, positions
   and slots [T]. */
void attend(const stored *q, const stored *new_k, const stored *new_v, stored *out, stored *k, stored *v,
            const int64_t *table, const int64_t *seq, const int64_t *positions, const int64_t *slots, int64_t T,
            int64_t Hkv, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t head_stride,
            int64_t table_stride, int threads) {
    int64_t first[T + 1], blocks = 0; /* a block: neighbours of one sequence */
    for (int64_t t = 0; t < T; t++) {
        if (t == 0 || seq[t] != seq[t - 1] || t - first[blocks - 1] == QUERIES) first[blocks++] = t;
        for (int64_t h = 0; h < Hkv; h++) {
            memcpy(k + h * head_stride + slots[t] * D, new_k + t * k_stride + h * D, D * sizeof(stored));
            memcpy(v + h * head_stride + slots[t] * D, new_v + t * v_stride + h * D, D * sizeof(stored));
        }
    }
    first[blocks] = T;
    const int64_t out_stride = Hkv * G * D;
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t h = 0; h < Hkv; h++) {
            const int64_t from = first[b], n = first[b + 1] - from, *row = table + seq[from] * table_stride;
            const stored *keys = k + h * head_stride, *values = v + h * head_stride;
            const stored *mine = q + from * q_stride + h * G * D;
            stored *to = out + from * out_stride + h * G * D;
            if (n >= FEWER) attend_block(mine, keys, values, row, positions + from, n, q_stride, out_stride, to);
            else
                for (int64_t t = 0; t < n; t++)
                    attend_one(mine + t * q_stride, keys, values, row, positions[from + t] + 1, to + t * out_stride);
        }
}
