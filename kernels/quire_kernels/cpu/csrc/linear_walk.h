/* How a product with quantized weights goes over its rows and panels: inputs are quantized row by row, then each panel of 16
 * outputs is multiplied with up to ROWS rows at a time. The includer has GROUP, the types ``input``, ``weights`` and
 * ``group_sum`` with their functions, and ``struct linear``; after this it defines ``tile``. */
#include "quantise.h"

enum { LANES = 16, AHEAD = 8192 };

/* ROWS are as many as have their sums in registers: as named variables, because an array would be on the stack. */
#ifdef __AVX512F__
enum { ROWS = 8 };
#define EACH_ROW(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7)
#define EACH_REST(f) f(7) f(6) f(5) f(4) f(3) f(2) f(1)
#else
enum { ROWS = 4 };
#define EACH_ROW(f) f(0) f(1) f(2) f(3)
#define EACH_REST(f) f(3) f(2) f(1)
#endif
#define DECLARE(r) ints16 sums##r = zero_ints16();
#define MULTIPLY(r) \
    if (r < rows) sums##r = multiply_add(sums##r, w, q + r * a->in + k);

/* The quantized x. */
struct rows {
    const input *q;
    const float *scales; /* [rows, groups], like the sums of q within a group */
    const group_sum *sums;
};

/* Up to ROWS rows, from this one on, times one panel. */
INLINE void tile(const struct linear *a, const struct rows *x, int64_t row, int64_t panel, int rows, int dtype);

INLINE void quantise_row(const void *x, int64_t size, input *q, float *scales, group_sum *sums, int dtype) {
    for (int64_t group = 0; group < size / GROUP; group++) {
        ints16 rounded[GROUP / 16], total = zero_ints16();
        scales[group] = quantise_group(x, group * GROUP, GROUP / 16, dtype, rounded);
        for (int i = 0; i < GROUP / 16; i++) {
            total = add_ints16(total, rounded[i]);
            write_inputs(q + group * GROUP + i * 16, rounded[i]);
        }
        sums[group] = to_group_sum(sum_ints16(total));
    }
}

INLINE void finish(const struct linear *a, int64_t row, int64_t panel, vec16 total, int dtype) {
    const int64_t column = panel * LANES;
    vec16 value = mul16(total, read16(a->row_scales + column));
    if (a->bias) value = add16(value, read16(a->bias + column));
    store16(a->y, row * a->out + column, value, dtype);
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
    group_sum *sums = (group_sum *)(scales + rows * groups);
    const struct rows x = {q, scales, sums};
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        quantise_row(at(a->x, row * a->in, dtype), a->in, q + row * a->in, scales + row * groups, sums + row * groups,
                     dtype);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < a->out / LANES; panel++) strip(a, &x, rows, panel, dtype);
}
