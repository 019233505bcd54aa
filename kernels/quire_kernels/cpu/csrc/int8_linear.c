/* y = x W^T + bias with int8 weights and inputs quantized here, one scale per 64 elements of a row.
 *
 * W is packed as uint8 (w + 128), [out / 16][in / 4][16][4]: 64 bytes are 16 outputs times 4 inputs, which
 * are multiplied with 4 inputs broadcast to all lanes. The offset 128 is corrected by the sum of the inputs.
 * Sums within a group are integers, groups are added in order, each row on its own: a result depends on its own
 * row alone.
 */
#include "quantise.h"

#include <string.h>

enum { LANES = 16, GROUP = 64, AHEAD = 8192 };

/* A quantized element of x, 16 of them written, the weights of 16 outputs for 4 inputs, and their products with 4
 * inputs of a row added to its sums. ROWS are as many as have their sums in registers. */
#ifdef __AVX512F__
enum { ROWS = 8 };
#define EACH_ROW(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define EACH_REST(f) f(7) f(6) f(5) f(4) f(3) f(2) f(1)

typedef int8_t input;
typedef __m512i weights;

INLINE void write_inputs(input *to, ints16 x) { write_bytes16(to, x); }
INLINE weights read_weights(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE ints16 multiply_add(ints16 sums, weights w, const input *q) { return add_products16(sums, w, q); }
#else
/* Products of int16, because those of bytes (vpmaddubsw) saturate. An input is int16, each 4 of them in the order 0, 2,
 * 1, 3, like the even bytes and then the odd bytes of the weights. */
enum { ROWS = 4 };
#define EACH_ROW(f) f(0) f(1) f(2) f(3)
#define EACH_REST(f) f(3) f(2) f(1)

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

/* Quantize one row, one scale per group; ``offsets`` are what the weights' offset 128 adds to the sums. */
INLINE void quantise_row(const void *x, int64_t size, input *q, float *scales, int32_t *offsets, int dtype) {
    for (int64_t group = 0; group < size / GROUP; group++) {
        ints16 rounded[GROUP / 16], total = zero_ints16();
        scales[group] = quantise_group(x, group * GROUP, GROUP / 16, dtype, rounded);
        for (int i = 0; i < GROUP / 16; i++) {
            total = add_ints16(total, rounded[i]);
            write_inputs(q + group * GROUP + i * 16, rounded[i]);
        }
        offsets[group] = 128 * sum_ints16(total);
    }
}

/* x, y: [rows, in], [rows, out]; in a multiple of 64, out of 16; bias may be null. ``scratch``: an
 * input per element of x and 8 bytes per group. */
struct linear {
    const void *x;
    const uint8_t *packed;
    const float *weight_scales, *bias;
    void *y;
    void *scratch;
    int64_t in, out, dtype;
};

/* The quantized x. */
struct rows {
    const input *q;
    const float *scales; /* [rows, groups], like the offsets */
    const int32_t *offsets;
};

INLINE vec16 add_group(const struct rows *x, int64_t index, ints16 sums, vec16 total) {
    vec16 value = to_floats16(sub_ints16(sums, all_ints16(x->offsets[index])));
    return add16(total, mul16(value, all16(x->scales[index])));
}

INLINE void finish(const struct linear *a, int64_t row, int64_t panel, vec16 total, int dtype) {
    const int64_t column = panel * LANES;
    vec16 value = mul16(total, read16(a->weight_scales + column));
    if (a->bias) value = add16(value, read16(a->bias + column));
    store16(a->y, row * a->out + column, value, dtype);
}

/* Up to ROWS times one panel: the weights are read in memory order, as one stream that the hardware prefetches. A
 * group's sums are in registers, as named variables, because an array would be on the stack; that is good enough
 * for the totals, which are used once per group. */
#define DECLARE(r) ints16 sums##r = zero_ints16();
#define MULTIPLY(r) \
    if (r < rows) sums##r = multiply_add(sums##r, w, q + r * a->in + k);
#define ADD_GROUP(r) \
    if (r < rows) totals[r] = add_group(x, (row + r) * groups + group, sums##r, totals[r]);

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

#define REST(r) \
    case r: tile(a, x, row, panel, r, dtype); break;

INLINE void strip(const struct linear *a, const struct rows *x, int64_t rows, int64_t panel, int dtype) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) tile(a, x, row, panel, ROWS, dtype);
    switch (rows - row) { EACH_REST(REST) }
}

INLINE void linear(const struct linear *a, int64_t rows, const int dtype) {
    const int64_t groups = a->in / GROUP;
    input *q = a->scratch;
    float *scales = (float *)(q + rows * a->in);
    int32_t *offsets = (int32_t *)(scales + rows * groups);
    const struct rows x = {q, scales, offsets};
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        quantise_row(at(a->x, row * a->in, dtype), a->in, q + row * a->in, scales + row * groups,
                     offsets + row * groups, dtype);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < a->out / LANES; panel++) strip(a, &x, rows, panel, dtype);
}

EXPORT void KERNEL(int8_linear)(const struct linear *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        linear(a, rows, BFLOAT16);
    else
        linear(a, rows, FLOAT32);
}
