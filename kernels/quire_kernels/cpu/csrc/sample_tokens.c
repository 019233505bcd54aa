/* Draws a token for each row of logits: temperature, top-k, top-p, min-p and Gumbel noise by Philox, without a pass that
 * sorts, and without noise for tokens that cannot win. Compiled for AVX-512, for AVX2, and for every x86-64 CPU; all draw
 * the same tokens. */
#include "runtime.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64 /* tokens, looked at or left out together; 16 calls of Philox */
#define LANES 16 /* sums are made of so many partial ones, on every CPU */
#define CALLS (BLOCK / 4)
#define BINS 1024
#define BINS_A_UNIT 32      /* of the distance from the largest scaled logit */
#define MOST_NOISE 22.88f   /* -log(-log1p(-u)) of the smallest u */

/* Vectors are passed to functions that are inlined always, never by any ABI. */
#pragma GCC diagnostic ignored "-Wpsabi"

/* As wide as a register: gcc takes comparisons of wider vectors apart, one element after the other. */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX2__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { PARTS = LANES / WIDTH };
typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));

/* logits [*, vocab]; the other arrays have an element for each of the rows that are drawn, and `rows` says which row of
 * the logits it is. A temperature of 0 takes the largest. -> tokens, and each row's largest logit, NaN if it has one. */
struct sample {
    const float *logits;
    const int64_t *rows;
    const float *temperature;
    const int64_t *top_k;
    const float *top_p;
    const float *min_p;
    const int64_t *seeds;
    const int64_t *positions;
    int64_t *tokens;
    float *largest;
    int64_t vocab;
};

/* Of one row. Scaled logits are computed anew where they are needed, because memory is slower than a division. */
struct row {
    const float *logits;
    int64_t vocab, blocks;
    float temperature;
    float *block_max; /* [blocks], scaled */
    float *values;    /* [vocab], scaled logits that may be kept */
    float *masses;    /* [vocab], e^(value - most) */
    int64_t count;    /* of these */
    float most;
};

INLINE floats splat(float x) { return x - (floats){0}; }

INLINE floats chosen(ints mask, floats yes, floats no) {
    return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

INLINE float largest_lane(floats x) {
    float lanes[WIDTH];
    memcpy(lanes, &x, sizeof(lanes));
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

INLINE float sum_of_lanes(const floats *parts) {
    float lanes[LANES];
    memcpy(lanes, parts, sizeof(lanes));
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE int32_t is_any(ints x) {
    int64_t found = 0, lanes[WIDTH / 2];
    memcpy(lanes, &x, sizeof(lanes));
    for (int i = 0; i < WIDTH / 2; i++) found |= lanes[i];
    return found != 0;
}

/* Behind the end of a row there is -infinity. */
INLINE floats logits_at(const struct row *r, int64_t i) {
    floats x = splat(-INFINITY);
    const int64_t left = r->vocab - i;
    if (left >= WIDTH)
        memcpy(&x, r->logits + i, sizeof(x)); /* one instruction, unlike a copy of any size */
    else
        memcpy(&x, r->logits + i, sizeof(float) * (left < 0 ? 0 : left));
    return x;
}

/* e^x for x <= 0 by 2^n * polynomial on [-ln2/2, ln2/2] (Cephes' coefficients); 0 below -87. */
INLINE floats exp_lanes(floats x) {
    const floats low = splat(-87.0f), magic = splat(12582912.0f);
    const ints is_zero = x < low;
    x = chosen(is_zero, low, x);
    const floats n = (x * 1.44269504f + magic) - magic;
    floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const ints exponent = __builtin_convertvector(n, ints) << 23;
    return chosen(is_zero, (floats){0}, (floats)((ints)p + exponent));
}

/* Fills in the largest scaled logit of each block; returns the place of the row's largest, or that of the first NaN. */
INLINE int64_t find_largest(struct row *r, float *largest) {
    float most = -INFINITY;
    int64_t block = 0, place;
    ints nan = {0};
    for (int64_t b = 0; b < r->blocks; b++) {
        floats top = splat(-INFINITY);
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += WIDTH) {
            const floats x = logits_at(r, i);
            nan |= x != x;
            top = chosen(x > top, x, top);
        }
        const float peak = largest_lane(top);
        if (peak > most) most = peak, block = b;
        r->block_max[b] = peak / r->temperature; /* division keeps the order */
    }
    r->most = most / r->temperature;
    if (is_any(nan)) {
        for (place = 0; !isnan(r->logits[place]);) place++;
        *largest = NAN;
        return place;
    }
    for (place = block * BLOCK; place < r->vocab - 1 && r->logits[place] != most;) place++;
    *largest = most;
    return place;
}

/* How far below the largest the values may be that are collected; the first that suffices is taken. */
static const float DISTANCES[] = {2.0f, 4.0f, 7.0f, 11.0f, 16.0f, INFINITY};
enum { NUM_DISTANCES = sizeof(DISTANCES) / sizeof(DISTANCES[0]) };

/* The mass e^(scaled - most) and the number of the scaled logits up to each distance, but for the last: that of all. */
struct reach {
    double masses[NUM_DISTANCES];
    int64_t counts[NUM_DISTANCES];
};

INLINE struct reach reach_of(const struct row *r) {
    floats masses[NUM_DISTANCES][PARTS] = {{{0}}};
    ints counts[NUM_DISTANCES] = {{0}};
    for (int64_t b = 0; b < r->blocks; b++) {
        if (r->block_max[b] < r->most - 60.0f) continue; /* below 2^-80 of the sum */
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
            for (int part = 0; part < PARTS; part++) {
                const floats below = logits_at(r, i + part * WIDTH) / r->temperature - r->most;
                const floats mass = exp_lanes(below);
                for (int d = 0; d < NUM_DISTANCES - 1; d++) {
                    const ints is_near = below >= -DISTANCES[d];
                    masses[d][part] += chosen(is_near, mass, (floats){0});
                    counts[d] -= is_near;
                }
                masses[NUM_DISTANCES - 1][part] += mass;
            }
        }
    }
    struct reach reach = {{0}, {0}};
    for (int d = 0; d < NUM_DISTANCES; d++) {
        reach.masses[d] = sum_of_lanes(masses[d]);
        for (int lane = 0; lane < WIDTH; lane++) reach.counts[d] += counts[d][lane];
    }
    reach.counts[NUM_DISTANCES - 1] = r->vocab;
    return reach;
}

/* Puts the scaled logits up to this distance into `values`, and their masses beside them. The comparison is that of
 * `reach_of`, so that as many are collected as were counted. */
INLINE void collect(struct row *r, float distance) {
    int64_t count = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (r->block_max[b] - r->most < -distance) continue;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK && i < r->vocab; i += WIDTH) {
            const floats x = logits_at(r, i) / r->temperature;
            if (!is_any(x - r->most >= -distance)) continue;
            const int lanes = r->vocab - i < WIDTH ? r->vocab - i : WIDTH;
            for (int lane = 0; lane < lanes; lane++) {
                r->values[count] = x[lane];
                count += x[lane] - r->most >= -distance;
            }
        }
    }
    r->count = count;
    for (int64_t i = 0; i < count; i += WIDTH) {
        floats x = splat(-INFINITY);
        const int64_t size = sizeof(float) * (count - i < WIDTH ? count - i : WIDTH);
        memcpy(&x, r->values + i, size);
        x = exp_lanes(x - r->most);
        memcpy(r->masses + i, &x, size);
    }
}

INLINE int bin_of(const struct row *r, float value) {
    const float distance = (r->most - value) * BINS_A_UNIT;
    return distance < BINS - 1 ? (int)distance : BINS - 1;
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Moves the values of a bin to the front of `sorted`, the largest first; returns their number. */
INLINE int64_t sort_bin(const struct row *r, int bin, float *sorted) {
    int64_t count = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (bin_of(r, r->values[i]) == bin) sorted[count++] = r->values[i];
    qsort(sorted, count, sizeof(float), descending);
    return count;
}

/* The k-th largest of the values, which are at least so many. */
INLINE float kth_largest(const struct row *r, int64_t k, const int64_t *counts, float *sorted) {
    int bin = 0;
    while (bin < BINS - 1 && counts[bin] < k) k -= counts[bin++];
    sort_bin(r, bin, sorted);
    return sorted[k - 1];
}

/* The smallest value of the nucleus: values not below `floor`, the largest first, until their mass is `wanted`. `floor`
 * where that of all is less, by rounding. */
INLINE float end_of_nucleus(const struct row *r, float floor, double wanted, const double *masses, float *sorted) {
    double before = 0;
    for (int bin = 0; bin < BINS; bin++) {
        if (before + masses[bin] < wanted) {
            before += masses[bin];
            continue;
        }
        const int64_t count = sort_bin(r, bin, sorted);
        for (int64_t i = 0; i < count && sorted[i] >= floor; i++) {
            before += expf(sorted[i] - r->most);
            if (before >= wanted || (i + 1 < count ? sorted[i + 1] < floor : 0)) return sorted[i];
        }
        if (count) return sorted[count - 1] >= floor ? sorted[count - 1] : floor;
    }
    return floor;
}

/* The smallest scaled logit that top-k and top-p leave. Top-p applies to the mass that top-k leaves. */
INLINE float top_threshold(struct row *r, int64_t top_k, float top_p, float *sorted) {
    const struct reach reach = reach_of(r);
    double total = reach.masses[NUM_DISTANCES - 1];
    int d = 0;
    while (d < NUM_DISTANCES - 1 && (top_k > 0 ? reach.counts[d] < top_k : reach.masses[d] < top_p * total * 1.0001)) d++;
    collect(r, DISTANCES[d]);
    int64_t counts[BINS] = {0};
    double masses[BINS] = {0};
    for (int64_t i = 0; i < r->count; i++) {
        const int bin = bin_of(r, r->values[i]);
        counts[bin]++, masses[bin] += r->masses[i];
    }
    float floor = -INFINITY;
    if (top_k > 0) {
        floor = kth_largest(r, top_k, counts, sorted), total = 0;
        for (int64_t i = 0; i < r->count; i++) total += r->values[i] >= floor ? r->masses[i] : 0;
    }
    return top_p < 1.0f ? end_of_nucleus(r, floor, top_p * total, masses, sorted) : floor;
}

/* The words of one row's noise, by Philox4x32-10: those of tokens 4 c to 4 c + 3 from the counter (c, position). Words
 * 4 i to 4 i + 3 of a block are w0[i] to w3[i]. */
struct words {
    uint32_t w0[CALLS], w1[CALLS], w2[CALLS], w3[CALLS];
};

#define ROUND_KEYS(round) \
    const uint32_t k0 = (uint32_t)seed + round * 0x9E3779B9u, k1 = (uint32_t)((uint64_t)seed >> 32) + round * 0xBB67AE85u
enum { M0 = (int32_t)0xD2511F53u, M1 = (int32_t)0xCD9E8D57u };

#ifdef __AVX512F__
/* High and low halves of 16 products. */
#define MULTIPLY_512(x, m, high, low)                                                          \
    const __m512i even_##high = _mm512_mul_epu32(x, m);                                        \
    const __m512i odd_##high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);                  \
    const __m512i high = _mm512_mask_shuffle_epi32(odd_##high, 0x5555, even_##high, 0xf5);     \
    const __m512i low = _mm512_mask_shuffle_epi32(even_##high, 0xaaaa, odd_##high, 0xa0)

INLINE void philox(uint32_t first, int64_t position, int64_t seed, struct words *w) {
    const __m512i m0 = _mm512_set1_epi32(M0), m1 = _mm512_set1_epi32(M1);
    const __m512i ramp = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(first), ramp), c1 = _mm512_set1_epi32((int32_t)position);
    __m512i c2 = _mm512_set1_epi32((int32_t)((uint64_t)position >> 32)), c3 = _mm512_setzero_si512();
    for (uint32_t round = 0; round < 10; round++) {
        ROUND_KEYS(round);
        MULTIPLY_512(c0, m0, a_high, a_low);
        MULTIPLY_512(c2, m1, b_high, b_low);
        c0 = _mm512_xor_si512(_mm512_xor_si512(b_high, c1), _mm512_set1_epi32(k0)), c1 = b_low;
        c2 = _mm512_xor_si512(_mm512_xor_si512(a_high, c3), _mm512_set1_epi32(k1)), c3 = a_low;
    }
    _mm512_storeu_si512(w->w0, c0), _mm512_storeu_si512(w->w1, c1);
    _mm512_storeu_si512(w->w2, c2), _mm512_storeu_si512(w->w3, c3);
}
#else
INLINE void philox(uint32_t first, int64_t position, int64_t seed, struct words *w) {
    for (int i = 0; i < CALLS; i++) {
        uint32_t c0 = first + i, c1 = (uint32_t)position, c2 = (uint32_t)((uint64_t)position >> 32), c3 = 0;
        for (uint32_t round = 0; round < 10; round++) {
            ROUND_KEYS(round);
            const uint64_t a = (uint64_t)c0 * (uint32_t)M0, b = (uint64_t)c2 * (uint32_t)M1;
            c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
            c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
        }
        w->w0[i] = c0, w->w1[i] = c1, w->w2[i] = c2, w->w3[i] = c3;
    }
}
#endif

INLINE float noise_of(uint32_t word) {
    const float uniform = (float)((word + 0.5) * 0x1p-32);
    return -logf(-log1pf(-uniform)); /* -infinity where the uniform is 1, by rounding */
}

/* The largest word whose noise may be more than x, with some room for rounding. */
INLINE uint32_t word_limit(float x) {
    const double uniform = x < -4.0f ? 1.0 : -expm1(-exp(-(double)x + 1e-4));
    const double limit = (uniform + 1e-7) * 0x1p32;
    return limit >= 0x1p32 ? UINT32_MAX : (uint32_t)limit;
}

struct best {
    float score;
    int64_t token;
};

/* Takes in the tokens of a block; those below the threshold and those that cannot win are left out. */
INLINE void draw_from(
    const struct row *r, int64_t block, float threshold, int64_t position, int64_t seed, struct best *best) {
    struct words words;
    philox((uint32_t)(block * CALLS), position, seed, &words);
    const uint32_t limit = word_limit(best->score - r->block_max[block]);
    uint32_t least[CALLS], smallest = UINT32_MAX;
    for (int i = 0; i < CALLS; i++) {
        const uint32_t a = words.w0[i] < words.w1[i] ? words.w0[i] : words.w1[i];
        const uint32_t b = words.w2[i] < words.w3[i] ? words.w2[i] : words.w3[i];
        least[i] = a < b ? a : b;
    }
    for (int i = 0; i < CALLS; i++) smallest = least[i] < smallest ? least[i] : smallest;
    if (smallest > limit) return;
    for (int i = 0; i < CALLS; i++) {
        if (least[i] > limit) continue;
        const uint32_t four[4] = {words.w0[i], words.w1[i], words.w2[i], words.w3[i]};
        const int64_t first = block * BLOCK + 4 * i;
        for (int64_t token = first; token < first + 4 && token < r->vocab; token++) {
            const float scaled = r->logits[token] / r->temperature;
            if (four[token - first] > limit || !(scaled >= threshold && scaled > -INFINITY)) continue;
            const float score = scaled + noise_of(four[token - first]);
            if (score > best->score || (score == best->score && token < best->token))
                best->score = score, best->token = token;
        }
    }
}

INLINE int64_t draw(struct row *r, int64_t place, float threshold, int64_t position, int64_t seed) {
    struct best best = {-INFINITY, place};
    draw_from(r, place / BLOCK, threshold, position, seed, &best);
    for (int64_t block = 0; block < r->blocks; block++) {
        const float most = r->block_max[block];
        if (block != place / BLOCK && most >= threshold && most + MOST_NOISE >= best.score)
            draw_from(r, block, threshold, position, seed, &best);
    }
    return best.token;
}

static void sample_row(const struct sample *a, int64_t i, float *memory) {
    const float temperature = a->temperature[i];
    struct row r = {.logits = a->logits + a->rows[i] * a->vocab, .vocab = a->vocab};
    r.blocks = (a->vocab + BLOCK - 1) / BLOCK;
    r.temperature = temperature > 0 ? temperature : 1.0f;
    r.values = memory, r.masses = memory + a->vocab, r.block_max = memory + 3 * a->vocab;
    int64_t token = find_largest(&r, &a->largest[i]);
    if (temperature > 0 && isfinite(a->largest[i])) {
        float threshold = -INFINITY;
        if (a->top_k[i] > 0 || a->top_p[i] < 1.0f) {
            const int64_t top_k = a->top_k[i] < a->vocab ? a->top_k[i] : a->vocab;
            threshold = top_threshold(&r, top_k, a->top_p[i], memory + 2 * a->vocab);
        }
        if (a->min_p[i] > 0) {
            const float floor = r.most + logf(a->min_p[i]);
            if (floor > threshold) threshold = floor;
        }
        token = draw(&r, token, threshold, a->positions[i], a->seeds[i]);
    }
    a->tokens[i] = token;
}

EXPORT void KERNEL(sample_tokens)(const struct sample *a, int64_t rows) {
    float *memory = malloc(sizeof(float) * (3 * a->vocab + a->vocab / BLOCK + 1));
    if (!memory) {
#pragma omp atomic update
        quire_failures |= LACKED_MEMORY;
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < rows; i++)
        if (memory) sample_row(a, i, memory);
    free(memory);
}
