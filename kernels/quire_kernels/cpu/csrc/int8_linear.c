/* y = x W^T + bias with int8 weights and inputs quantized here, one scale per 64 elements of a row.
 *
 * W is packed as uint8 (w + 128), [out / 16][in / 4][16][4]: one register is 16 outputs times 4 inputs, which
 * vpdpbusd multiplies with 4 inputs broadcast to all lanes. The offset 128 is corrected by the sum of the inputs.
 * Sums within a group are integers, groups are added in order, each row on its own: a result depends on its own
 * row alone.
 */
#include "vectors.h"

enum { LANES = 16, ROWS = 8, GROUP = 64, AHEAD = 8192 };

/* Quantize one row, one scale per group; ``offsets`` are what the weights' offset 128 adds to the sums. */
INLINE void quantise_row(const void *x, int64_t size, int8_t *q, float *scales, int32_t *offsets, int dtype) {
    for (int64_t group = 0; group < size / GROUP; group++) {
        __m512 values[GROUP / 16], largest = _mm512_setzero_ps(), poison = _mm512_setzero_ps();
        for (int i = 0; i < GROUP / 16; i++) {
            values[i] = load16(x, group * GROUP + i * 16, dtype);
            largest = _mm512_max_ps(_mm512_abs_ps(values[i]), largest);
            poison = _mm512_add_ps(poison, _mm512_mul_ps(values[i], _mm512_setzero_ps()));
        }
        const float peak = _mm512_reduce_max_ps(largest);
        const __m512 factor = _mm512_set1_ps(peak > 0 ? 127.0f / peak : 0.0f);
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < GROUP / 16; i++) {
            __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], factor));
            total = _mm512_add_epi32(total, rounded);
            _mm_storeu_si128((__m128i *)(q + group * GROUP + i * 16), _mm512_cvtsepi32_epi8(rounded));
        }
        offsets[group] = 128 * _mm512_reduce_add_epi32(total);
        /* NaN or infinity makes the scale NaN, and with it the whole row of the result. */
        scales[group] = peak / 127.0f + _mm512_reduce_add_ps(poison);
    }
}

/* x, y: [rows, in], [rows, out]; in a multiple of 64, out of 16; bias may be null. ``scratch``: one
 * byte per element of x and 8 per group. */
struct linear {
    const void *x;
    const uint8_t *packed;
    const float *weight_scales, *bias;
    void *y;
    int8_t *scratch;
    int64_t in, out, dtype;
};

/* The quantized x. */
struct rows {
    const int8_t *q;
    const float *scales; /* [rows, groups], like the offsets */
    const int32_t *offsets;
};

/* Inline assembly, because gcc 12 adds a copy and a store to the stack to each use of the intrinsic. */
INLINE __m512i multiply_add(__m512i sums, __m512i weights, const int8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*(const int32_t *)q));
    return sums;
}

INLINE __m512 add_group(const struct rows *x, int64_t index, __m512i sums, __m512 total) {
    __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(x->offsets[index])));
    return _mm512_add_ps(total, _mm512_mul_ps(value, _mm512_set1_ps(x->scales[index])));
}

INLINE void finish(const struct linear *a, int64_t row, int64_t panel, __m512 total, int dtype) {
    const int64_t column = panel * LANES;
    __m512 value = _mm512_mul_ps(total, _mm512_loadu_ps(a->weight_scales + column));
    if (a->bias) value = _mm512_add_ps(value, _mm512_loadu_ps(a->bias + column));
    store16(a->y, row * a->out + column, value, dtype);
}

/* Up to 8 rows times one panel: the weights are read in memory order, as one stream that the hardware prefetches. A
 * group's sums are in registers, as named variables, because an array would be on the stack; that is good enough
 * for the totals, which are used once per group. */
#define EACH_ROW(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define DECLARE(r) __m512i sums##r = _mm512_setzero_si512();
#define MULTIPLY(r) \
    if (r < rows) sums##r = multiply_add(sums##r, w, q + r * a->in + k);
#define ADD_GROUP(r) \
    if (r < rows) totals[r] = add_group(x, (row + r) * groups + group, sums##r, totals[r]);

INLINE void tile(const struct linear *a, const struct rows *x, int64_t row, int64_t panel, int rows, int dtype) {
    const int64_t groups = a->in / GROUP;
    const uint8_t *weights = a->packed + panel * a->in * LANES;
    const int8_t *q = x->q + row * a->in;
    __m512 totals[ROWS];
    for (int r = 0; r < rows; r++) totals[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        EACH_ROW(DECLARE)
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 4, weights += 4 * LANES) {
            _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);
            const __m512i w = _mm512_loadu_si512(weights);
            EACH_ROW(MULTIPLY)
        }
        EACH_ROW(ADD_GROUP)
    }
    for (int r = 0; r < rows; r++) finish(a, row + r, panel, totals[r], dtype);
}

INLINE void strip(const struct linear *a, const struct rows *x, int64_t rows, int64_t panel, int dtype) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) tile(a, x, row, panel, ROWS, dtype);
    switch (rows - row) {
        case 7: tile(a, x, row, panel, 7, dtype); break;
        case 6: tile(a, x, row, panel, 6, dtype); break;
        case 5: tile(a, x, row, panel, 5, dtype); break;
        case 4: tile(a, x, row, panel, 4, dtype); break;
        case 3: tile(a, x, row, panel, 3, dtype); break;
        case 2: tile(a, x, row, panel, 2, dtype); break;
        case 1: tile(a, x, row, panel, 1, dtype); break;
    }
}

INLINE void linear(const struct linear *a, int64_t rows, const int dtype) {
    const int64_t groups = a->in / GROUP;
    int8_t *q = a->scratch;
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

EXPORT void quire_int8_linear(const struct linear *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        linear(a, rows, BFLOAT16);
    else
        linear(a, rows, FLOAT32);
}
