/* y += B (A x) with the LoRA adapter of each row, beside a linear layer of one, two or three parts (q, k, v).
 *
 * First A x, then B: each output is added by one thread, its row alone, in the order of the ranks, so that a result
 * does not depend on the other rows of the batch.
 */
#include "vectors.h"

enum { LANES = 16, PANEL = 64, TOGETHER = 4 };

/* x [rows, in], y [rows, out]. For each slot: A [parts * rank, in], B transposed [rank, out], and how many of ``rank``
 * are used. ``of``: each row's slot, -1 for none. ``ends`` [parts]: the last column of each part, and one. All columns
 * are multiples of 16. ``shrunk`` [rows, parts * rank] is scratch.
 */
struct lora {
    const void *x, *a, *b;
    const int64_t *used, *of, *ends;
    void *y;
    float *shrunk;
    int64_t in, out, parts, rank, dtype;
};

INLINE void shrink(const void *x, const void *a, float *shrunk, int64_t in, int64_t count, int dtype) {
    int64_t r = 0;
    for (; r + TOGETHER <= count; r += TOGETHER) {
        vec16 sums[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) sums[i] = zero16();
        for (int64_t k = 0; k < in; k += LANES) {
            const vec16 value = load16(x, k, dtype);
            for (int i = 0; i < TOGETHER; i++)
                sums[i] = fma16(value, load16(a, (r + i) * in + k, dtype), sums[i]);
        }
        for (int i = 0; i < TOGETHER; i++) shrunk[r + i] = sum16(sums[i]);
    }
    for (; r < count; r++) {
        vec16 sum = zero16();
        for (int64_t k = 0; k < in; k += LANES)
            sum = fma16(load16(x, k, dtype), load16(a, r * in + k, dtype), sum);
        shrunk[r] = sum16(sum);
    }
}

INLINE void expand(const float *shrunk, const void *b, void *y, int64_t column, int64_t out, int64_t count, int wide,
                   int dtype) {
    vec16 sums[PANEL / LANES];
    for (int i = 0; i < wide; i++) sums[i] = zero16();
    for (int64_t r = 0; r < count; r++) {
        const vec16 value = all16(shrunk[r]);
        for (int i = 0; i < wide; i++)
            sums[i] = fma16(value, load16(b, r * out + column + i * LANES, dtype), sums[i]);
    }
    for (int i = 0; i < wide; i++) {
        const int64_t at = column + i * LANES;
        store16(y, at, add16(load16(y, at, dtype), sums[i]), dtype);
    }
}

INLINE void add_lora(const struct lora *a, int64_t rows, const int dtype) {
    const int64_t width = a->parts * a->rank;
#pragma omp for schedule(static)
    for (int64_t each = 0; each < rows * a->parts; each++) {
        const int64_t row = each / a->parts, part = each % a->parts, slot = a->of[row];
        if (slot < 0) continue;
        const void *factor = at(a->a, (slot * width + part * a->rank) * a->in, dtype);
        shrink(at(a->x, row * a->in, dtype), factor, a->shrunk + row * width + part * a->rank, a->in, a->used[slot],
               dtype);
    }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < (a->out + PANEL - 1) / PANEL; panel++) {
        const int64_t begin = panel * PANEL, end = begin + PANEL < a->out ? begin + PANEL : a->out;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t slot = a->of[row];
            if (slot < 0) continue;
            const void *factor = at(a->b, slot * a->rank * a->out, dtype);
            void *y = (void *)at(a->y, row * a->out, dtype);
            int64_t part = 0;
            for (int64_t column = begin; column < end;) {
                while (column >= a->ends[part]) part++;
                const float *shrunk = a->shrunk + row * width + part * a->rank;
                const int is_whole = column + PANEL <= a->ends[part] && column == begin;
                if (is_whole)
                    expand(shrunk, factor, y, column, a->out, a->used[slot], PANEL / LANES, dtype);
                else
                    expand(shrunk, factor, y, column, a->out, a->used[slot], 1, dtype);
                column += is_whole ? PANEL : LANES;
            }
        }
    }
}

EXPORT void KERNEL(add_lora)(const struct lora *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        add_lora(a, rows, BFLOAT16);
    else
        add_lora(a, rows, FLOAT32);
}
