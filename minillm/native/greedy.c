/* The most likely token of each row of logits: one pass for the largest number of each piece, and a look into the piece
   that has it. */

#include "vectors.h"

#define PIECE 1024

static inline REAL number(stored x) {
#ifdef BF16
    const uint32_t bits = (uint32_t)x << 16;
    REAL y;
    memcpy(&y, &bits, sizeof y);
    return y;
#else
    return x;
#endif
}

/* The first place of the largest of n numbers; -1 where it is infinite, or where one of them is no number. */
static int64_t first_largest(const stored *x, int64_t n) {
    REAL most = -INFINITY;
    int64_t at = 0;
    int none = 0;
    for (int64_t from = 0; from < n; from += PIECE) {
        const int64_t to = from + PIECE < n ? from + PIECE : n;
        vec top = all(-INFINITY), a[2];
        ivec odd = {0};
        int64_t i = from;
        for (; i + STEP <= to; i += STEP) {
            load(x + i, a);
            top = choose(a[0] > top, a[0], top), top = choose(a[1] > top, a[1], top);
            odd |= (a[0] != a[0]) | (a[1] != a[1]);
        }
        for (; i < to; i++) {
            const REAL y = number(x[i]);
            none |= y != y;
            top[0] = y > top[0] ? y : top[0];
        }
        for (int lane = 0; lane < LANES; lane++) none |= odd[lane] != 0;
        const REAL here = largest(top);
        if (here > most) most = here, at = from;
    }
    if (none || !isfinite(most)) return -1;
    while (number(x[at]) != most) at++;
    return at;
}

/* logits [M, V], tokens [M] */
void greedy(const stored *logits, int64_t *tokens, int64_t M, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M > 1)
    for (int64_t m = 0; m < M; m++) tokens[m] = first_largest(logits + m * V, V);
}
