/* The element-wise operations between the matrix products: each is one pass over its rows. */
#include "vectors.h"

#include <string.h>

INLINE void norm_row(const void *x, void *residual, const void *weight, void *y, int64_t size, float eps, int dtype) {
    vec16 squares = zero16();
    void *sum = residual ? residual : (void *)x;
    for (int64_t i = 0; i < size; i += 16) {
        vec16 value = load16(x, i, dtype);
        if (residual) {
            value = rounded16(add16(value, load16(residual, i, dtype)), dtype);
            store16(residual, i, value, dtype);
        }
        squares = fma16(value, value, squares);
    }
    vec16 factor = all16(1.0f / sqrtf(sum16(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
        vec16 value = rounded16(mul16(load16(sum, i, dtype), factor), dtype);
        store16(y, i, mul16(load16(weight, i, dtype), value), dtype);
    }
}

/* All [rows, size], size a multiple of 16; residual may be null. */
struct norm {
    const void *x;
    void *residual;
    const void *weight;
    void *y;
    int64_t size, dtype;
    float eps;
};

INLINE void norm(const struct norm *a, int64_t rows, int dtype) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * a->size;
        void *stream = a->residual ? (void *)at(a->residual, first, dtype) : NULL;
        norm_row(at(a->x, first, dtype), stream, a->weight, (void *)at(a->y, first, dtype), a->size, a->eps, dtype);
    }
}

EXPORT void KERNEL(add_rmsnorm)(const struct norm *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        norm(a, rows, BFLOAT16);
    else
        norm(a, rows, FLOAT32);
}

/* gate_up [rows, 2 size] -> y [rows, size]: silu(gate) * up; size a multiple of 16. */
struct gate {
    const void *gate_up;
    void *y;
    int64_t size, dtype;
};

INLINE void gate(const struct gate *a, int64_t rows, int dtype) {
    const int64_t size = a->size;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += 16) {
            vec16 x = load16(a->gate_up, row * 2 * size + i, dtype);
            vec16 up = load16(a->gate_up, row * 2 * size + size + i, dtype);
            vec16 bound = add16(exp16(sub16(zero16(), x)), all16(1.0f));
            store16(a->y, row * size + i, mul16(rounded16(div16(x, bound), dtype), up), dtype);
        }
}

EXPORT void KERNEL(silu_mul)(const struct gate *a, int64_t rows) {
    if (a->dtype == BFLOAT16)
        gate(a, rows, BFLOAT16);
    else
        gate(a, rows, FLOAT32);
}

INLINE void rotate_head(const void *x, void *y, const float *cos, const float *sin, int64_t half, int dtype) {
    for (int64_t i = 0; i < half; i += 16) {
        vec16 first = load16(x, i, dtype), second = load16(x, half + i, dtype);
        vec16 c = read16(cos + i), s = read16(sin + i);
        store16(y, i, fnma16(second, s, mul16(first, c)), dtype);
        store16(y, half + i, fma16(first, s, mul16(second, c)), dtype);
    }
}

/* qkv [tokens, (heads + 2 kv_heads) head_size] -> q, and k and v to their slots; head_size a multiple of 32. */
struct rope {
    const void *qkv;
    const float *cos, *sin;
    const int64_t *slots;
    void *k_cache, *v_cache, *q;
    int64_t heads, kv_heads, head_size, block_size, dtype;
};

INLINE void rope(const struct rope *a, int64_t tokens, int dtype) {
    const int64_t size = a->head_size, half = size / 2, width = (a->heads + 2 * a->kv_heads) * size;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = a->cos + token * half, *s = a->sin + token * half;
        for (int64_t head = 0; head < a->heads; head++)
            rotate_head(at(a->qkv, token * width + head * size, dtype),
                        (void *)at(a->q, (token * a->heads + head) * size, dtype), c, s, half, dtype);
        int64_t block = a->slots[token] / a->block_size, offset = a->slots[token] % a->block_size;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            int64_t target = ((block * a->kv_heads + head) * a->block_size + offset) * size;
            int64_t key = token * width + (a->heads + head) * size;
            rotate_head(at(a->qkv, key, dtype), (void *)at(a->k_cache, target, dtype), c, s, half, dtype);
            for (int64_t i = 0; i < size; i += 16)
                store16(a->v_cache, target + i, load16(a->qkv, key + a->kv_heads * size + i, dtype), dtype);
        }
    }
}

EXPORT void KERNEL(rope_kv_write)(const struct rope *a, int64_t tokens) {
    if (a->dtype == BFLOAT16)
        rope(a, tokens, BFLOAT16);
    else
        rope(a, tokens, FLOAT32);
}

/* y [rows, size] = table[index - first]; zeros for an index that is not in the table of `count` rows; size in bytes. */
struct take {
    const char *table;
    const int64_t *index;
    char *y;
    int64_t size, first, count;
};

EXPORT void KERNEL(take_rows)(const struct take *a, int64_t rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t index = a->index[row] - a->first;
        if (index >= 0 && index < a->count)
            memcpy(a->y + row * a->size, a->table + index * a->size, a->size);
        else
            memset(a->y + row * a->size, 0, a->size);
    }
}
