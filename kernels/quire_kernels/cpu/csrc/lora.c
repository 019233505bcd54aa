/* y += B (A x) with the LoRA adapter of each row, beside a linear layer of one, two or three parts (q, k, v).
 *
 * First A x of all parts, then B. Rows of one adapter are computed two at a time, so that its factors, which are read
 * in the order of the memory, are read once for both. Each sum is made in the order of the inputs, or of the ranks: a
 * result does not depend on the other rows of the batch.
 */
#include "vectors.h"

enum { LANES = 16, PAIR = 2, BLOCK = 64, PANELS = 4, AHEAD = 4096 };

/* x [rows, in], y [rows, out]. ``used``: the rank of each slot's adapter. A slot's A is packed [ranks / 2][in / 16][2]
 * [16], the ranks of all parts one after another and an empty one where they are odd, and its B [out / 16][used][16];
 * ``a_size`` and ``b_size`` elements are from slot to slot. ``of``: each row's slot, -1 for none. ``ends`` [parts]: the
 * last column of each part, and one. All columns are multiples of 16. ``shrunk`` [rows, width] is scratch.
 */
struct lora {
    const void *x, *a, *b;
    const int64_t *used, *of, *ends;
    void *y;
    float *shrunk;
    int64_t in, out, parts, width, a_size, b_size, dtype;
};

/* Up to two rows of the same slot, taken out of the rows of a block that are ``left``, one bit for each. */
struct pair {
    int64_t slot, rows[PAIR];
    int count;
};

INLINE struct pair take_pair(const struct lora *a, int64_t first, uint64_t *left) {
    struct pair taken = {-1, {0, 0}, 0};
    for (uint64_t rest = *left; rest && taken.count < PAIR; rest &= rest - 1) {
        const int64_t row = first + __builtin_ctzll(rest), slot = a->of[row];
        if (taken.count && slot != taken.slot) continue;
        *left ^= rest & -rest;
        if (slot < 0 || !a->used[slot]) continue;
        taken.slot = slot;
        taken.rows[taken.count++] = row;
    }
    return taken;
}

INLINE uint64_t rows_of_block(int64_t first, int64_t rows) {
    return rows - first < BLOCK ? ((uint64_t)1 << (rows - first)) - 1 : ~(uint64_t)0;
}

INLINE void prefetch(const void *base, int64_t index, int dtype) {
    _mm_prefetch((const char *)at(base, index, dtype) + AHEAD, _MM_HINT_T0);
}

/* Two ranks of A for one row, or for two. */
INLINE void shrink(const struct lora *a, const struct pair *of, int64_t ranks, const int count, const int dtype) {
    const void *factor = at(a->a, of->slot * a->a_size + ranks * a->in, dtype);
    vec16 sums[PAIR][PAIR];
    for (int i = 0; i < count; i++) sums[i][0] = sums[i][1] = zero16();
    for (int64_t k = 0; k < a->in; k += LANES) {
        prefetch(factor, k * PAIR, dtype);
        const vec16 first = load16(factor, k * PAIR, dtype), second = load16(factor, k * PAIR + LANES, dtype);
        for (int i = 0; i < count; i++) {
            const vec16 value = load16(a->x, of->rows[i] * a->in + k, dtype);
            sums[i][0] = fma16(value, first, sums[i][0]);
            sums[i][1] = fma16(value, second, sums[i][1]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < PAIR; j++) a->shrunk[of->rows[i] * a->width + ranks + j] = sum16(sums[i][j]);
}

/* 16 columns of one row, or of two. */
INLINE void expand(const struct lora *a, const struct pair *of, int64_t panel, int64_t part, const int count,
                   const int dtype) {
    const int64_t used = a->used[of->slot];
    const void *factor = at(a->b, of->slot * a->b_size + panel * used * LANES, dtype);
    vec16 sums[PAIR];
    for (int i = 0; i < count; i++) sums[i] = zero16();
    for (int64_t r = 0; r < used; r++) {
        prefetch(factor, r * LANES, dtype);
        const vec16 each = load16(factor, r * LANES, dtype);
        for (int i = 0; i < count; i++)
            sums[i] = fma16(all16(a->shrunk[of->rows[i] * a->width + part * used + r]), each, sums[i]);
    }
    for (int i = 0; i < count; i++) {
        const int64_t to = of->rows[i] * a->out + panel * LANES;
        store16(a->y, to, add16(load16(a->y, to, dtype), sums[i]), dtype);
    }
}

INLINE void shrink_block(const struct lora *a, int64_t first, int64_t rows, int64_t ranks, const int dtype) {
    for (uint64_t left = rows_of_block(first, rows); left;) {
        const struct pair taken = take_pair(a, first, &left);
        if (!taken.count || ranks >= a->parts * a->used[taken.slot]) continue;
        if (taken.count == PAIR)
            shrink(a, &taken, ranks, PAIR, dtype);
        else
            shrink(a, &taken, ranks, 1, dtype);
    }
}

INLINE void expand_block(const struct lora *a, int64_t first, int64_t rows, int64_t begin, int64_t end,
                         const int dtype) {
    for (uint64_t left = rows_of_block(first, rows); left;) {
        const struct pair taken = take_pair(a, first, &left);
        if (!taken.count) continue;
        for (int64_t panel = begin, part = 0; panel < end; panel++) {
            while (panel * LANES >= a->ends[part]) part++;
            if (taken.count == PAIR)
                expand(a, &taken, panel, part, PAIR, dtype);
            else
                expand(a, &taken, panel, part, 1, dtype);
        }
    }
}

INLINE void add_lora(const struct lora *a, int64_t rows, const int dtype) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK, panels = a->out / LANES;
    const int64_t strips = (panels + PANELS - 1) / PANELS;
    int64_t most = 0;
    for (int64_t row = 0; row < rows; row++)
        if (a->of[row] >= 0 && a->used[a->of[row]] > most) most = a->used[a->of[row]];
    const int64_t pairs = (a->parts * most + PAIR - 1) / PAIR;
#pragma omp for schedule(static)
    for (int64_t each = 0; each < blocks * pairs; each++)
        shrink_block(a, each / pairs * BLOCK, rows, each % pairs * PAIR, dtype);
#pragma omp for schedule(static)
    for (int64_t each = 0; each < blocks * strips; each++) {
        const int64_t begin = each % strips * PANELS, end = begin + PANELS < panels ? begin + PANELS : panels;
        expand_block(a, each / strips * BLOCK, rows, begin, end, dtype);
    }
}

EXPORT void KERNEL(add_lora)(const struct lora *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        add_lora(a, rows, BFLOAT16);
    else
        add_lora(a, rows, FLOAT32);
}
