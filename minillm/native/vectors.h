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

static inline void narrow(vec x, stored to[LANES]) {
    const ivec bits = (ivec)rounded(x);
    for (int i = 0; i < LANES; i++) to[i] = (stored)(bits[i] >> 16);
}

static inline void store(stored *to, vec a, vec b) {
    ivec both = (((ivec)rounded(a) >> 16) & 0xFFFF) | (ivec)rounded(b);
    memcpy(to, &both, sizeof both);
}
#else
typedef REAL stored;
static inline void load(const stored *from, vec x[2]) { memcpy(x, from, 2 * sizeof(vec)); }
static inline vec rounded(vec x) { return x; }
static inline void narrow(vec x, stored to[LANES]) { memcpy(to, &x, sizeof x); }
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

static inline REAL largest(vec x) {
    REAL y = x[0];
    for (int i = 1; i < LANES; i++) y = x[i] > y ? x[i] : y;
    return y;
}

/* e^x = 2^n e^r with n whole and |r| <= ln(2) / 2: e^r by its series, 2^n straight into the exponent's bits.
   Outside +-LIMIT it stays at the value there. */
#define DOUBLE (sizeof(REAL) == 8)
#define MANTISSA (DOUBLE ? 52 : 23) /* bits */
#define TERMS (DOUBLE ? 12 : 7)
#define LIMIT (DOUBLE ? 700 : 80)
static inline vec exponential(vec x) {
    const vec magic = all((REAL)(3LL << (MANTISSA - 1))); /* adding it leaves no bits for a fraction */
    x = choose(x < -LIMIT, all(-LIMIT), choose(x > LIMIT, all(LIMIT), x));
    vec n = x * (REAL)M_LOG2E + magic;
    ivec power = (ivec)n << MANTISSA;
    vec r = x - (n - magic) * (REAL)M_LN2;
    vec y = all(1);
    for (int i = TERMS; i > 0; i--) y = y * r * (1 / (REAL)i) + 1;
    return (vec)((ivec)y + power);
}
