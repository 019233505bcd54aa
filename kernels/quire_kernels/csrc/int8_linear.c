/* y = x W^T + bias with int8 weights and activations that are quantised here: a scale for each 64 numbers of a row.
 *
 * W is packed as uint8 (w + 128), [out / 16][in / 4][16][4]: one register is 16 outputs times 4 inputs, which
 * vpdpbusd multiplies with 4 activations broadcast to all lanes. The offset 128 is taken out again by the sum of
 * the activations. Sums within a group are integers, groups are added in order, one row by itself: a result
 * depends on its own row alone.
 */
#include "vectors.h"

enum { LANES = 16, PANELS = 3, ROWS = 8, GROUP = 64, AHEAD = 1024 };

/* One row, a scale for each group of its numbers; ``offsets`` are what the weights' offset 128 adds to the sums. */
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
        /* What is not finite makes the scale, and so the whole row of the result, NaN: never hidden. */
        scales[group] = peak / 127.0f + _mm512_reduce_add_ps(poison);
    }
}

struct problem {
    const uint8_t *packed;
    const float *weight_scales, *bias;
    const int8_t *q;
    const float *row_scales; /* [rows, groups], as the offsets */
    const int32_t *offsets;
    void *y;
    int64_t in, out;
};

/* Assembly, for gcc 12 makes of the intrinsic a copy and a store to the stack each time. */
INLINE __m512i multiply_add(__m512i sums, __m512i weights, const int8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*(const int32_t *)q));
    return sums;
}

INLINE __m512 add_group(const struct problem *p, int64_t index, __m512i sums, __m512 total) {
    __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(p->offsets[index])));
    return _mm512_add_ps(total, _mm512_mul_ps(value, _mm512_set1_ps(p->row_scales[index])));
}

INLINE void finish(const struct problem *p, int64_t row, int64_t panel, __m512 total, int dtype) {
    const int64_t column = panel * LANES;
    __m512 value = _mm512_mul_ps(total, _mm512_loadu_ps(p->weight_scales + column));
    if (p->bias) value = _mm512_add_ps(value, _mm512_loadu_ps(p->bias + column));
    store16(p->y, row * p->out + column, value, dtype);
}

/* Up to 8 rows times 3 panels, a group's sums in registers: named ones, for an array would live on the stack, which
 * is good enough for the totals, touched once a group. */
#define EACH_ROW(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define DECLARE(r) __m512i a##r = zero, b##r = zero, c##r = zero;
#define MULTIPLY(r)                                                       \
    if (r < rows) {                                                       \
        a##r = multiply_add(a##r, wa, q + r * p->in + k);                 \
        if (panels > 1) b##r = multiply_add(b##r, wb, q + r * p->in + k); \
        if (panels > 2) c##r = multiply_add(c##r, wc, q + r * p->in + k); \
    }
#define ADD_GROUP(r)                                                                                  \
    if (r < rows) {                                                                                   \
        totals[r][0] = add_group(p, (row + r) * groups + group, a##r, totals[r][0]);                  \
        if (panels > 1) totals[r][1] = add_group(p, (row + r) * groups + group, b##r, totals[r][1]);  \
        if (panels > 2) totals[r][2] = add_group(p, (row + r) * groups + group, c##r, totals[r][2]);  \
    }

INLINE void tile(const struct problem *p, int64_t row, int64_t panel, int rows, int panels, int dtype) {
    const __m512i zero = _mm512_setzero_si512();
    const int64_t stride = p->in * LANES, groups = p->in / GROUP;
    const uint8_t *weights = p->packed + panel * stride;
    const int8_t *q = p->q + row * p->in;
    __m512 totals[ROWS][PANELS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < panels; c++) totals[r][c] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++) {
        EACH_ROW(DECLARE)
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 4, weights += 4 * LANES) {
            for (int c = 0; c < panels; c++)
                _mm_prefetch((const char *)weights + c * stride + AHEAD, _MM_HINT_T0);
            const __m512i wa = _mm512_loadu_si512(weights);
            const __m512i wb = panels > 1 ? _mm512_loadu_si512(weights + stride) : zero;
            const __m512i wc = panels > 2 ? _mm512_loadu_si512(weights + 2 * stride) : zero;
            EACH_ROW(MULTIPLY)
        }
        EACH_ROW(ADD_GROUP)
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < panels; c++) finish(p, row + r, panel + c, totals[r][c], dtype);
}

INLINE void strip(const struct problem *p, int64_t rows, int64_t panel, int panels, int dtype) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) tile(p, row, panel, ROWS, panels, dtype);
    switch (rows - row) {
        case 7: tile(p, row, panel, 7, panels, dtype); break;
        case 6: tile(p, row, panel, 6, panels, dtype); break;
        case 5: tile(p, row, panel, 5, panels, dtype); break;
        case 4: tile(p, row, panel, 4, panels, dtype); break;
        case 3: tile(p, row, panel, 3, panels, dtype); break;
        case 2: tile(p, row, panel, 2, panels, dtype); break;
        case 1: tile(p, row, panel, 1, panels, dtype); break;
    }
}

static void linear(const void *x, struct problem *p, int64_t rows, const int dtype) {
    const int64_t groups = p->in / GROUP;
    int8_t *q = malloc(rows * (p->in + groups * 8));
    float *scales = (float *)(q + rows * p->in);
    int32_t *offsets = (int32_t *)(scales + rows * groups);
    p->q = q, p->row_scales = scales, p->offsets = offsets;
    const int64_t panels = p->out / LANES, strips = (panels + PANELS - 1) / PANELS;
#pragma omp parallel if (rows * p->in * p->out > 200000)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            quantise_row(at(x, row * p->in, dtype), p->in, q + row * p->in, scales + row * groups,
                         offsets + row * groups, dtype);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < strips; index++) {
            int64_t panel = index * PANELS;
            if (panel + PANELS <= panels)
                strip(p, rows, panel, PANELS, dtype);
            else
                for (; panel < panels; panel++) strip(p, rows, panel, 1, dtype);
        }
    }
    free(q);
}

/* x, y: [rows, in], [rows, out]; in a multiple of 64, out of 16; bias may be null. */
EXPORT void quire_int8_linear(const void *x, const uint8_t *packed, const float *weight_scales, const float *bias,
                              void *y, int64_t rows, int64_t in, int64_t out, int dtype) {
    struct problem p = {packed, weight_scales, bias, NULL, NULL, NULL, y, in, out};
    if (dtype == BFLOAT16)
        linear(x, &p, rows, BFLOAT16);
    else
        linear(x, &p, rows, FLOAT32);
}
