/* y = x W^T + bias with int8 weights and inputs quantized here, one scale per 64 elements of a row.
 *
 * W is packed as uint8 (w + 128), [out / 16][in / 4][16][4]: 64 bytes are 16 outputs times 4 inputs, which
 * are multiplied with 4 inputs broadcast to all lanes. The offset 128 is corrected by the sum of the inputs.
 * Sums within a group are integers, groups are added in order, each row on its own: a result depends on its own
 * row alone.
 */
#include "vectors.h"

#include <string.h>

enum { GROUP = 64 };

/* A quantized element of x, 16 of them written, the weights of 16 outputs for 4 inputs, and their products with 4
 * inputs of a row added to its sums. */
#ifdef __AVX512F__
typedef int8_t input;
typedef __m512i weights;

INLINE void write_inputs(input *to, ints16 x) { write_bytes16(to, x); }
INLINE weights read_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE ints16 multiply_add(ints16 sums, weights w, const input *q) { return add_products16(sums, w, q); }
#else
/* Products of int16, because those of bytes (vpmaddubsw) saturate. An input is int16, each 4 of them in the order 0, 2,
 * 1, 3, like the even bytes and then the odd bytes of the weights. */
typedef int16_t input;
typedef struct {
    ints16 even, odd;
} weights;

INLINE void write_inputs(input *to, ints16 x) {
    const __m256i least = _mm256_set1_epi16(INT8_MIN), most = _mm256_set1_epi16(INT8_MAX);
    __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), _MM_SHUFFLE(3, 1, 2, 0));
    q = _mm256_min_epi16(_mm256_max_epi16(q, least), most);
    q = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(q, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i *)to, q);
}

INLINE weights read_weights(const uint8_t *from) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)from), high = _mm256_loadu_si256((const __m256i *)from + 1);
    const __m256i byte = _mm256_set1_epi16(0xff);
    return (weights){{_mm256_and_si256(low, byte), _mm256_and_si256(high, byte)},
                     {_mm256_srli_epi16(low, 8), _mm256_srli_epi16(high, 8)}};
}

INLINE __m256i two_inputs(const input *q) {
    int32_t both;
    memcpy(&both, q, sizeof both);
    return _mm256_set1_epi32(both);
}

/* Inline assembly, because gcc 12 reorders the additions and then lacks registers. */
INLINE __m256i add_products(__m256i sums, __m256i w, __m256i inputs) {
    __m256i products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(w), "x"(inputs));
    return sums;
}

INLINE ints16 multiply_add(ints16 sums, weights w, const input *q) {
    const __m256i even = two_inputs(q), odd = two_inputs(q + 2);
    sums = (ints16){add_products(sums.low, w.even.low, even), add_products(sums.high, w.even.high, even)};
    return (ints16){add_products(sums.low, w.odd.low, odd), add_products(sums.high, w.odd.high, odd)};
}
#endif

/* x, y: [rows, in], [rows, out]; in a multiple of 64, out of 16; bias may be null. ``scratch``: an
 * input per element of x and a ``struct group`` per group. */
struct linear {
    const void *x;
    const uint8_t *packed;
    const float *row_scales, *bias;
    void *y;
    void *scratch;
    int64_t in, out, dtype;
};

/* Sums start with what takes the weights' offset 128 away. */
struct group {
    float scale;
    int32_t start;
};

INLINE struct group to_group(float scale, ints16 total) { return (struct group){scale, -128 * sum_ints16(total)}; }

#include "linear_walk.h"

INLINE vec16 add_group(const struct group *group, ints16 sums, vec16 total) {
    return add16(total, mul16(to_floats16(sums), all16(group->scale)));
}

/* The weights are read in memory order, as one stream that the hardware prefetches. Totals are used once per group, so that
 * an array is good enough for them. */
#define ADD_GROUP(r) \
    if (r < rows) totals[r] = add_group(x->groups + (row + r) * groups + group, sums##r, totals[r]);

INLINE void tile(const struct linear *a, const struct rows *x, int64_t row, int64_t panel, int rows, int dtype) {
    const int64_t groups = a->in / GROUP;
    const uint8_t *from = a->packed + panel * a->in * LANES;
    const input *q = x->q + row * a->in;
    vec16 totals[ROWS];
    for (int r = 0; r < rows; r++) totals[r] = zero16();
    for (int64_t group = 0; group < groups; group++) {
        EACH_ROW(DECLARE)
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 4, from += 4 * LANES) {
            _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
            const weights w = read_weights(from);
            EACH_ROW(MULTIPLY)
        }
        EACH_ROW(ADD_GROUP)
    }
    for (int r = 0; r < rows; r++) finish(a, row + r, panel, totals[r], dtype);
}

EXPORT void KERNEL(int8_linear)(const struct linear *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        linear(a, rows, BFLOAT16);
    else
        linear(a, rows, FLOAT32);
}
