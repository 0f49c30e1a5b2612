/* Attention of many queries of one sequence at once, a block of a prompt. Part of attention.c, whose names it uses. */

#define QUERIES STEP /* that go together */
#define FEWER 16     /* than so many go faster one by one */
#define WORDS (D / PAIR)

/* What `attend_one` does, for n <= QUERIES neighbours of one sequence, as FlashAttention 2 does it (Dao 2023): a piece
   of K and V is read once for all of them, and both sums are matrix products, of K's rows times the queries and of V's
   columns times the weights (in bfloat16 the weights are rounded for that). A lane is a query, so the softmax adds up
   no lanes.
   q and out: G heads of D for each query, with so many numbers from query to query. */
static void attend_block(const stored *q, const stored *k, const stored *v, const int64_t *slots,
                         const int64_t *positions, int n, int64_t q_stride, int64_t out_stride, stored *out) {
    stored query[G][WORDS][QUERIES * PAIR], weights[KEYS / PAIR][QUERIES * PAIR];
    stored keys[KEYS][D], values[KEYS / PAIR][D * PAIR];
    vec acc[G][D][2], score[KEYS][2], most[G][2], total[G][2], y[ROWS][2], x[LANES];
    INT position[QUERIES], least = positions[0], length = 0;
    ivec at[2];
    for (int t = 0; t < QUERIES; t++) {
        position[t] = positions[t < n ? t : n - 1]; /* past the end: the last again */
        least = position[t] < least ? position[t] : least, length = position[t] < length ? length : position[t] + 1;
    }
    memcpy(at, position, sizeof at);
    for (int g = 0; g < G; g++)
        for (int half = 0; half < 2; half++) {
            for (int w = 0; w < WORDS; w += LANES) { /* queries become columns */
                for (int i = 0, t = half * LANES; i < LANES; i++, t++)
                    memcpy(x + i, q + (t < n ? t : n - 1) * q_stride + g * D + w * PAIR, sizeof *x);
                transpose(x);
                for (int i = 0; i < LANES; i++) memcpy(query[g][w + i] + half * LANES * PAIR, x + i, sizeof *x);
            }
            for (int d = 0; d < D; d++) acc[g][d][half] = all(0);
            most[g][half] = all(-INFINITY), total[g][half] = all(0);
        }
    for (INT from = 0; from < length; from += KEYS, slots += KEYS) {
        const int there = length - from < KEYS ? length - from : KEYS;
        for (int j = 0; j < KEYS; j += PAIR) { /* K as it is, of V PAIR positions side by side, as `load` orders it */
            int64_t slot[PAIR];
            for (int i = 0; i < PAIR; i++) {
                slot[i] = slots[j + i < there ? j + i : there - 1];
                memcpy(keys[j + i], k + slot[i] * D, sizeof *keys);
            }
            for (int d = 0; d < D; d += STEP) {
                vec rows[PAIR][2], both[PAIR];
                for (int i = 0; i < PAIR; i++) load(v + slot[i] * D + d, rows[i]);
                for (int half = 0; half < 2; half++) {
                    for (int i = 0; i < PAIR; i++) both[i] = rows[i][half];
                    put(values[j / PAIR] + (d + half * LANES) * PAIR, both);
                }
            }
        }
        for (int g = 0; g < G; g++) {
            vec top[2] = {most[g][0], most[g][1]}, shrink[2];
            for (int j = 0; j < KEYS; j += ROWS) {
                const int rows = KEYS - j < ROWS ? KEYS - j : ROWS;
#define SCORES(R) product(R, keys[j], D, PAIR, query[g][0], WORDS, y, 0)
                switch (rows) { CASES(SCORES) }
                for (int r = 0; r < rows; r++)
                    for (int half = 0; half < 2; half++) {
                        vec scaled = y[r][half] * (REAL)(1 / sqrt(D));
                        if (from + j + r > least) scaled = choose(at[half] >= from + j + r, scaled, all(-INFINITY));
                        score[j + r][half] = scaled;
                        top[half] = choose(scaled > top[half], scaled, top[half]);
                    }
            }
            for (int half = 0; half < 2; half++) {
                shrink[half] = exponential(most[g][half] - top[half]);
                most[g][half] = top[half], total[g][half] *= shrink[half];
                for (int j = 0; j < KEYS; j += PAIR) {
                    vec weight[PAIR];
                    for (int i = 0; i < PAIR; i++)
                        total[g][half] += weight[i] = exponential(score[j + i][half] - top[half]);
                    put(weights[j / PAIR] + half * LANES * PAIR, weight);
                }
            }
            for (int d = 0; d < D; d += ROWS) {
                const int rows = D - d < ROWS ? D - d : ROWS;
#define SUMS(R) product(R, values[0] + d * PAIR, PAIR, D * PAIR, weights[0], KEYS / PAIR, y, 0)
                switch (rows) { CASES(SUMS) }
                for (int r = 0; r < rows; r++)
                    for (int half = 0; half < 2; half++)
                        acc[g][d + r][half] = acc[g][d + r][half] * shrink[half] + y[r][half];
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int half = 0; half < 2; half++)
            for (int d = 0; d < D; d += STEP) { /* columns become answers, in the order in which `store` takes them */
                vec other[LANES];
                for (int i = 0; i < LANES; i++) {
                    x[i] = acc[g][d + i][half] / total[g][half];
                    other[i] = acc[g][d + LANES + i][half] / total[g][half];
                }
                transpose(x), transpose(other);
                for (int i = 0, t = half * LANES; i < LANES && t < n; i++, t++)
                    store(out + t * out_stride + g * D + d, x[i], other[i]);
            }
}
