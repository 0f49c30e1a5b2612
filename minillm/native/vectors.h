/* Some numbers at a time, in plain C: gcc's and clang's vector extension makes the best of what the CPU has.

   The compiler is told (-D) REAL, the type to compute in, INT, the integer as wide, and BF16 if memory holds
   bfloat16 (a float whose lower 16 bits are cut off). STEP numbers are read and written together. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(BF16) && defined(__AVX512BF16__)
#define DOT /* one instruction multiplies bfloat16 pairs and adds them up in float */
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8 /* more than a register holds is slow: gcc keeps it in memory */
#endif
#define STEP (2 * LANES)

#define DOUBLE (sizeof(REAL) == 8)

typedef REAL vec __attribute__((vector_size(LANES * sizeof(REAL))));
typedef INT ivec __attribute__((vector_size(LANES * sizeof(INT))));

#ifdef BF16
typedef uint16_t stored;
#define UPPER ((INT)0xFFFF0000)

/* Two bfloat16 lie in each 32 bits. The lower is moved up, the upper is masked out: no lane changes its place, so x[0]
   holds the numbers 0, 2, 4 .. and x[1] 1, 3, 5 ... Sums and products don't mind, and `store` puts them back. */
static inline void load(const stored *from, vec x[2]) {
    ivec both;
    memcpy(&both, from, sizeof both);
    x[0] = (vec)(both << 16), x[1] = (vec)(both & UPPER);
}

/* To the nearest bfloat16, ties to even; not for NaN with only low bits set, which arithmetic never makes. */
static inline vec rounded(vec x) {
    ivec bits = (ivec)x;
    return (vec)((bits + 0x7FFF + ((bits >> 16) & 1)) & UPPER);
}

static inline void store(stored *to, vec a, vec b) {
    ivec both = (((ivec)rounded(a) >> 16) & 0xFFFF) | (ivec)rounded(b);
    memcpy(to, &both, sizeof both);
}
#else
typedef REAL stored;
static inline void load(const stored *from, vec x[2]) { memcpy(x, from, 2 * sizeof(vec)); }
static inline vec rounded(vec x) { return x; }
static inline void store(stored *to, vec a, vec b) {
    memcpy(to, &a, sizeof a);
    memcpy(to + LANES, &b, sizeof b);
}
#endif

static inline vec all(REAL x) { return (vec){0} + x; }

#ifdef BF16
#define PAIR 2 /* numbers that a lane multiplies in one instruction, where there is one */
#else
#define PAIR 1
#endif

/* PAIR vectors as one in memory, number by number. */
static inline void put(stored *to, const vec x[PAIR]) {
#ifdef BF16
    store(to, x[0], x[1]);
#else
    memcpy(to, x, sizeof *x);
#endif
}

/* sum + products: PAIR numbers of a, the same for all lanes, times each lane's own PAIR of b. */
static inline vec pairs(vec sum, const stored *a, const stored *b) {
#ifdef DOT
    int32_t both;
    memcpy(&both, a, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)_mm512_loadu_si512(b));
#elif defined(BF16)
    INT both;
    vec y[2];
    memcpy(&both, a, sizeof both), load(b, y);
    return sum + (vec)((ivec){0} + (both << 16)) * y[0] + (vec)((ivec){0} + (both & UPPER)) * y[1];
#else
    vec y;
    memcpy(&y, b, sizeof y);
    return sum + a[0] * y;
#endif
}

#define INLINE static inline __attribute__((always_inline)) /* so that what is constant at a call is so inside */
#ifdef __AVX512F__
#define ROWS 12 /* so many, times two vectors of sums, and two more are what the registers hold */
#else
#define ROWS 6
#endif

/* The heart of every matmul: R <= ROWS rows of x times a panel of STEP columns. `steps` times PAIR numbers of each row,
   `x_step` apart, are multiplied and summed. x [R, ..] with x_row from row to row, panel [steps, STEP, PAIR],
   y [R, STEP] as two vectors each; `ahead`: so many bytes before it is read, the panel is asked for. */
INLINE void product(const int R, const stored *x, int64_t x_row, int64_t x_step, const stored *panel, int64_t steps,
                    vec y[ROWS][2], const int ahead) {
    for (int r = 0; r < R; r++) y[r][0] = y[r][1] = all(0);
    for (int64_t i = 0; i < steps; i++, x += x_step, panel += STEP * PAIR) {
        for (unsigned b = 0; ahead && b < STEP * sizeof(REAL); b += 64)
            __builtin_prefetch((const char *)panel + ahead + b);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            y[r][0] = pairs(y[r][0], x + r * x_row, panel);
            y[r][1] = pairs(y[r][1], x + r * x_row, panel + LANES * PAIR);
        }
    }
}

/* For a number of rows that is not known before: CASES(f) calls f(R) for the R that `switch` looks at. */
#define CASES(f) CASE(f, 1) CASE(f, 2) CASE(f, 3) CASE(f, 4) CASE(f, 5) CASE(f, 6) MORE(f)
#ifdef __AVX512F__
#define MORE(f) CASE(f, 7) CASE(f, 8) CASE(f, 9) CASE(f, 10) CASE(f, 11) CASE(f, 12)
#else
#define MORE(f)
#endif
#define CASE(f, R) case R: f(R); break;

static inline vec choose(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }

static inline REAL sum(vec x) {
    REAL y = 0;
    for (int i = 0; i < LANES; i++) y += x[i];
    return y;
}

/* The sums of LANES vectors as one vector: neighbours are added pairwise until one is left. */
#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif
static inline vec sums(vec x[LANES]) {
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) {
            vec a = x[2 * i], b = x[2 * i + 1];
            x[i] = __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
        }
    return x[0];
}

/* Columns become rows: to lay half of the vectors between the other half, number by number, log2(LANES) times. */
#if LANES == 16
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#endif
static inline void transpose(vec x[LANES]) {
    for (int n = LANES; n > 1; n /= 2) {
        vec y[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + LANES / 2], FIRST);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + LANES / 2], SECOND);
        }
        memcpy(x, y, sizeof y);
    }
}

static inline REAL largest(vec x) {
    REAL y = x[0];
    for (int i = 1; i < LANES; i++) y = x[i] > y ? x[i] : y;
    return y;
}

/* e^x = 2^n e^r with n whole and |r| <= ln(2) / 2: e^r by its series, 2^n straight into the exponent's bits.
   Outside +-LIMIT it stays at the value there. */
#define MANTISSA (DOUBLE ? 52 : 23) /* bits */
#define TERMS (DOUBLE ? 12 : 7)
#define LIMIT (DOUBLE ? 700 : 80)
static inline vec exponential(vec x) {
    const vec magic = all((REAL)(3LL << (MANTISSA - 1))); /* adding it leaves no bits for a fraction */
    x = choose(x < -LIMIT, all(-LIMIT), choose(x > LIMIT, all(LIMIT), x));
    vec n = x * (REAL)M_LOG2E + magic;
    ivec power = (ivec)n << MANTISSA;
    vec r = x - (n - magic) * (REAL)M_LN2;
    double factor = 1; /* 1 / i!, which the compiler computes */
    for (int i = 2; i <= TERMS; i++) factor /= i;
    vec y = all((REAL)factor);
    for (int i = TERMS; i > 0; i--) y = y * r + (REAL)(factor *= i);
    return (vec)((ivec)y + power);
}
