/* y = x W^T + bias with int4 weights in groups of 32 elements of a row, each with a scale and a zero, and inputs
 * quantized here to int8, one scale per 32 elements of a row.
 *
 * An element of W is (u - zero) * scale * row_scale, u from 0 to 15. u is packed [out / 16][in / 8][16][4]: 64 bytes are 16
 * outputs times 8 inputs, of which the first 4 are the low halves of the bytes. Sums within a group are integers, groups are
 * added in order, each row on its own: a result depends on its own row alone.
 */
#include "vectors.h"

#include <string.h>

enum { GROUP = 32, STEP = 8, SYMMETRIC_ZERO = 8 };

/* The weights of 16 outputs for 4 inputs, and their products with 4 inputs of a row added to its sums, which ``whole`` makes
 * int32. */
#ifdef __AVX512F__
typedef __m512i weights;

INLINE weights read_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE weights low_halves(weights w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
INLINE weights high_halves(weights w) { return low_halves(_mm512_srli_epi16(w, 4)); }
INLINE ints16 multiply_add(ints16 sums, weights w, const int8_t *q) { return add_products16(sums, w, q); }
INLINE ints16 whole(ints16 sums) { return sums; }
INLINE int32_t start_of(ints16 inputs) { return -SYMMETRIC_ZERO * sum_ints16(inputs); }
#else
/* Sums of int16 while they are within a group, each of 16 products: of at most 15 * 127 each, or 8 * 127 in the end, where the
 * zero is subtracted. What overflows meanwhile comes back. */
typedef ints16 weights;

INLINE weights read_weights(const uint8_t *from) {
    return (weights){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}

INLINE weights low_halves(weights w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return (weights){_mm256_and_si256(w.low, mask), _mm256_and_si256(w.high, mask)};
}

INLINE weights high_halves(weights w) {
    return low_halves((weights){_mm256_srli_epi16(w.low, 4), _mm256_srli_epi16(w.high, 4)});
}

/* Inline assembly, because gcc 12 reorders the additions and then lacks registers. */
INLINE __m256i add_products(__m256i sums, __m256i w, __m256i inputs) {
    __m256i products;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(w), "x"(inputs));
    return sums;
}

INLINE ints16 multiply_add(ints16 sums, weights w, const int8_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    const __m256i inputs = _mm256_set1_epi32(four);
    return (ints16){add_products(sums.low, w.low, inputs), add_products(sums.high, w.high, inputs)};
}

/* The part of inputs 0 and 1 of each 4 in the lower half. */
INLINE int32_t start_of(ints16 inputs) {
    const __m256i eight = _mm256_add_epi32(inputs.low, inputs.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i pairs = _mm_hadd_epi32(four, four);
    const int32_t low = -SYMMETRIC_ZERO * _mm_cvtsi128_si32(pairs), high = -SYMMETRIC_ZERO * _mm_extract_epi32(pairs, 1);
    return (int32_t)((uint32_t)high << 16 | (uint16_t)low);
}

INLINE ints16 whole(ints16 sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return (ints16){_mm256_madd_epi16(sums.low, ones), _mm256_madd_epi16(sums.high, ones)};
}
#endif

/* x, y: [rows, in], [rows, out]; in a multiple of 32, out of 16; scales float16 and zeros uint8 [out / 16][in / 32][16],
 * row_scales [out]. Without zeros all are 8; bias may be null. ``scratch``: a byte per element of x and a ``struct group``
 * per group. */
struct linear {
    const void *x;
    const uint8_t *packed;
    const uint16_t *scales;
    const uint8_t *zeros;
    const float *row_scales, *bias;
    void *y;
    void *scratch;
    int64_t in, out, dtype;
};

typedef int8_t input;

/* Sums start with what a zero of 8 subtracts. ``sum``: of the inputs. */
struct group {
    float scale, sum;
    int32_t start;
};

INLINE void write_inputs(input *to, ints16 x) { write_bytes16(to, x); }

INLINE struct group to_group(float scale, ints16 total) {
    return (struct group){scale, (float)sum_ints16(total), start_of(total)};
}

#include "linear_walk.h"

INLINE vec16 add_group(const struct group *group, vec16 value, vec16 scales, vec16 total) {
    return add16(total, mul16(mul16(value, all16(group->scale)), scales));
}

#define OF_ROW(r) (x->groups + (row + r) * groups + group)
#define ADD_GROUP(r) \
    if (r < rows) totals[r] = add_group(OF_ROW(r), to_floats16(whole(sums##r)), scales, totals[r]);
/* In float32, which has all these integers. */
#define SUBTRACT_ZEROS_AND_ADD_GROUP(r)                                                                \
    if (r < rows) {                                                                                    \
        const vec16 value = fnma16(zeros, all16(OF_ROW(r)->sum), to_floats16(whole(sums##r)));         \
        totals[r] = add_group(OF_ROW(r), value, scales, totals[r]);                                    \
    }

INLINE void tile(const struct linear *a, const struct rows *x, int64_t row, int64_t panel, int rows, int dtype) {
    const int64_t groups = a->in / GROUP;
    const uint8_t *from = a->packed + panel * a->in * (LANES / 2);
    const int8_t *q = x->q + row * a->in;
    vec16 totals[ROWS];
    for (int r = 0; r < rows; r++) totals[r] = zero16();
    for (int64_t group = 0; group < groups; group++) {
        EACH_ROW(DECLARE)
        int64_t k = group * GROUP;
        for (int step = 0; step < GROUP / STEP; step++, from += STEP * LANES / 2) {
            _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
            const weights both = read_weights(from);
            weights w = low_halves(both);
            EACH_ROW(MULTIPLY)
            k += STEP / 2;
            w = high_halves(both);
            EACH_ROW(MULTIPLY)
            k += STEP / 2;
        }
        const int64_t first = (panel * groups + group) * LANES;
        const vec16 scales = of_halves16(a->scales + first);
        if (a->zeros) {
            const vec16 zeros = sub16(of_bytes16(a->zeros + first), all16(SYMMETRIC_ZERO));
            EACH_ROW(SUBTRACT_ZEROS_AND_ADD_GROUP)
        } else {
            EACH_ROW(ADD_GROUP)
        }
    }
    for (int r = 0; r < rows; r++) finish(a, row + r, panel, totals[r], dtype);
}

EXPORT void KERNEL(int4_linear)(const struct linear *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        linear(a, rows, BFLOAT16);
    else
        linear(a, rows, FLOAT32);
}
