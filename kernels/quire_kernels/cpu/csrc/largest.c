/* The largest value of each row and its place: greedy sampling of logits, of which each rank has a part. */
#include "vectors.h"

#include <string.h>

/* x [rows, width], `stride` elements from row to row -> pairs [rows, 2]: the largest value, NaN if there is one, and
 * `first` plus its place, that of the first of equals. A row of nothing has the value -infinity at place 0. */
struct largest {
    const void *x;
    float *pairs;
    int64_t width, stride, first, dtype;
};

/* 16 values from index i on of a row, -infinity behind its end. */
INLINE vec16 values_at(const void *row, int64_t i, int64_t width, int dtype) {
    if (width - i >= 16) return load16(row, i, dtype);
    char full[64] = {0};
    memcpy(full, at(row, i, dtype), (width - i) * size_of(dtype));
    return where16((mask16)((1u << (width - i)) - 1), load16(full, 0, dtype), all16(-INFINITY));
}

INLINE void largest_of_row(const void *row, int64_t width, int64_t first, float *pair, int dtype) {
    vec16 most = all16(-INFINITY);
    mask16 nan = 0;
    for (int64_t i = 0; i < width; i += 16) {
        vec16 value = values_at(row, i, width, dtype);
        nan |= unordered16(value, value);
        most = max16(value, most);
    }
    const float peak = nan ? NAN : largest16(most);
    mask16 found = 0;
    int64_t i = 0;
    for (; i < width; i += 16) {
        vec16 value = values_at(row, i, width, dtype);
        found = nan ? unordered16(value, value) : equal16(value, all16(peak));
        if (found) break;
    }
    pair[0] = peak;
    pair[1] = (float)(first + (found ? i + __builtin_ctz(found) : 0));
}

EXPORT void KERNEL(largest)(const struct largest *a, int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const void *x = at(a->x, row * a->stride, a->dtype);
        if (a->dtype == BFLOAT16)
            largest_of_row(x, a->width, a->first, a->pairs + 2 * row, BFLOAT16);
        else
            largest_of_row(x, a->width, a->first, a->pairs + 2 * row, FLOAT32);
    }
}

/* The pair with the largest value of each row of x [rows, pairs, 2], the first of equals or of NaN -> y [rows, 2]. */
struct largest_pair {
    const float *x;
    float *y;
    int64_t pairs;
};

EXPORT void KERNEL(largest_pair)(const struct largest_pair *a, int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *best = a->x + row * a->pairs * 2;
        for (int64_t i = 1; i < a->pairs && !isnan(best[0]); i++) {
            const float *pair = a->x + (row * a->pairs + i) * 2;
            if (pair[0] > best[0] || isnan(pair[0])) best = pair;
        }
        memcpy(a->y + 2 * row, best, 2 * sizeof(float));
    }
}
