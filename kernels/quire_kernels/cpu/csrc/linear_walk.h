/* How a product with quantized weights goes over its rows and panels: inputs are quantized row by row, then each panel of 16
 * outputs is multiplied with up to ROWS rows at a time. The includer has GROUP, the types ``input`` and ``weights`` with their
 * functions, ``struct linear``, and ``struct group``: what a product needs of a group of a row's inputs but for them, among it
 * the ``start`` of its sums; after this it defines ``tile``. */
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
#define DECLARE(r) ints16 sums##r = all_ints16(r < rows ? x->groups[(row + r) * groups + group].start : 0);
#define MULTIPLY(r) \
    if (r < rows) sums##r = multiply_add(sums##r, w, q + r * a->in + k);

/* The quantized x. */
struct rows {
    const input *q;
    const struct group *groups; /* [rows, groups] */
};

/* Up to ROWS rows, from this one on, times one panel. */
INLINE void tile(const struct linear *a, const struct rows *x, int64_t row, int64_t panel, int rows, int dtype);

INLINE void quantise_row(const void *x, int64_t size, input *q, struct group *groups, int dtype) {
    for (int64_t group = 0; group < size / GROUP; group++) {
        ints16 rounded[GROUP / 16], total = zero_ints16();
        const float scale = quantise_group(x, group * GROUP, GROUP / 16, dtype, rounded);
        for (int i = 0; i < GROUP / 16; i++) {
            total = add_ints16(total, rounded[i]);
            write_inputs(q + group * GROUP + i * 16, rounded[i]);
        }
        groups[group] = to_group(scale, total);
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
    struct group *of_rows = (struct group *)(q + rows * a->in);
    const struct rows x = {q, of_rows};
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        quantise_row(at(a->x, row * a->in, dtype), a->in, q + row * a->in, of_rows + row * groups, dtype);
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < a->out / LANES; panel++) strip(a, &x, rows, panel, dtype);
}
