/* Decode attention: one new token per sequence, read from the paged KV cache in place, without a gathered copy.
 *
 * A task is one sequence (or one KV head of it, if there are few sequences) with all query heads that share a KV
 * head: scores, softmax, then the weighted sum of the values, in float32. Its result depends on that sequence alone.
 */
#include "vectors.h"

enum { FEW = 4 }; /* with fewer sequences, the KV heads of each are distributed over the threads */
enum { LINE = 64 };

/* q, out [sequences, heads, head_size]; caches [blocks, kv_heads, block_size, head_size]; head_size 64, 96, 128 or
 * 256; block_size a multiple of 4; table [sequences, table_width], or one row for all if table_width is 0; window 0:
 * no window. */
struct attention {
    const void *q, *k_cache, *v_cache;
    const int64_t *table, *lengths;
    void *out;
    int64_t heads, kv_heads, head_size, block_size, table_width, window, dtype;
    float scale;
};

/* The buffers of one thread, all float32. */
struct scratch {
    float *scores; /* [heads, reach] */
    int64_t reach;
    float *q, *sums, *block, *totals; /* [heads, size] twice, [block_size, size], [heads] */
};

/* Convert to float32 and prefetch the same part of ``next``: blocks are scattered in memory, and waiting for memory
 * at each of them would take twice as long as the arithmetic. */
INLINE void widen(const void *from, int64_t index, float *to, int64_t count, const void *next, int dtype) {
    for (int64_t i = 0; i < count; i += 64 / size_of(dtype)) {
        _mm_prefetch(at(next, i, dtype), _MM_HINT_T0);
        write16(to + i, load16(from, index + i, dtype));
        if (dtype == BFLOAT16) write16(to + i + 16, load16(from, index + i + 16, dtype));
    }
}

/* The scores of one query with all keys of a block [tokens, size]; tokens a multiple of 4. */
INLINE void score(const float *q, const float *keys, float *scores, int64_t tokens, float scale, int64_t size) {
    for (int64_t t = 0; t < tokens; t += 4) {
        const float *k = keys + t * size;
        vec16 a = zero16(), b = a, c = a, d = a;
        for (int64_t i = 0; i < size; i += 16) {
            vec16 x = read16(q + i);
            a = fma16(x, read16(k + i), a);
            b = fma16(x, read16(k + size + i), b);
            c = fma16(x, read16(k + 2 * size + i), c);
            d = fma16(x, read16(k + 3 * size + i), d);
        }
        _mm_storeu_ps(scores + t, _mm_mul_ps(sums4(a, b, c, d), _mm_set1_ps(scale)));
    }
}

/* sums [size] += weights [tokens] times values [tokens, size]; size a multiple of 32. */
INLINE void weigh(const float *weights, const float *values, float *sums, int64_t tokens, int64_t size) {
    for (int64_t i = 0; i < size; i += 32) {
        vec16 a = read16(sums + i), b = read16(sums + i + 16);
        vec16 c = zero16(), d = c;
        int64_t t = 0;
        for (; t + 1 < tokens; t += 2) {
            const float *v = values + t * size + i;
            vec16 even = all16(weights[t]), odd = all16(weights[t + 1]);
            a = fma16(even, read16(v), a);
            b = fma16(even, read16(v + 16), b);
            c = fma16(odd, read16(v + size), c);
            d = fma16(odd, read16(v + size + 16), d);
        }
        if (t < tokens) {
            vec16 last = all16(weights[t]);
            a = fma16(last, read16(values + t * size + i), a);
            b = fma16(last, read16(values + t * size + i + 16), b);
        }
        write16(sums + i, add16(a, c));
        write16(sums + i + 16, add16(b, d));
    }
}

/* exp(score - greatest) in place over the scores [first, last), zero up to ``padded``; their sum. */
INLINE float exponentials(float *scores, int64_t first, int64_t last, int64_t padded) {
    for (int64_t i = 0; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = last; i < padded; i++) scores[i] = -INFINITY;
    vec16 most = all16(-INFINITY), sum = zero16();
    for (int64_t i = 0; i < padded; i += 16) most = max16(read16(scores + i), most);
    vec16 top = all16(largest16(most));
    for (int64_t i = 0; i < padded; i += 16) {
        vec16 value = read16(scores + i);
        lanes16 alive = differ16(value, all16(-INFINITY));
        value = only16(alive, exp16(sub16(value, top)));
        write16(scores + i, value);
        sum = add16(sum, value);
    }
    return sum16(sum);
}

/* Offset of a block's rows of one KV head, in elements. */
INLINE int64_t place(const struct attention *a, const int64_t *table, int64_t block, int64_t kv_head, int64_t size) {
    return (table[block] * a->kv_heads + kv_head) * a->block_size * size;
}

/* Convert the rows of one block and head to float32; prefetch the next head, the next block, or ``after``. */
INLINE const float *rows(const struct attention *a, const void *cache, const int64_t *table, int64_t block, int64_t last,
                         int64_t kv_head, int64_t from, int64_t to, const void *after, struct scratch *work,
                         int dtype, int64_t size) {
    int64_t next_head = kv_head + 1 < to ? kv_head + 1 : from, next = kv_head + 1 < to ? block : block + 1;
    if (next < last) after = at(cache, place(a, table, next, next_head, size), dtype);
    widen(cache, place(a, table, block, kv_head, size), work->block, a->block_size * size, after, dtype);
    return work->block;
}

/* One sequence, KV heads [from, to): block by block, and head by head within a block, in memory order. */
INLINE void task(const struct attention *a, int64_t sequence, int64_t from, int64_t to, struct scratch *work, int dtype,
                 const int64_t size) {
    const int64_t group = a->heads / a->kv_heads, length = a->lengths[sequence], width = a->block_size;
    const int64_t start = a->window && length > a->window ? length - a->window : 0;
    const int64_t first = start / width, last = (length + width - 1) / width, base = first * width;
    const int64_t *table = a->table + sequence * a->table_width;
    const int64_t row = sequence * a->heads + from * group, heads = (to - from) * group;
    const void *first_values = at(a->v_cache, place(a, table, first, from, size), dtype);
    widen(a->q, row * size, work->q, heads * size, at(a->k_cache, place(a, table, first, from, size), dtype), dtype);
    for (int64_t block = first; block < last; block++)
        for (int64_t kv_head = from; kv_head < to; kv_head++) {
            const float *keys =
                rows(a, a->k_cache, table, block, last, kv_head, from, to, first_values, work, dtype, size);
            for (int64_t h = (kv_head - from) * group; h < (kv_head - from + 1) * group; h++)
                score(work->q + h * size, keys, work->scores + h * work->reach + block * width - base, width,
                      a->scale, size);
        }
    const int64_t padded = ((last - first) * width + 15) / 16 * 16;
    for (int64_t h = 0; h < heads; h++)
        work->totals[h] = exponentials(work->scores + h * work->reach, start - base, length - base, padded);
    for (int64_t i = 0; i < heads * size; i++) work->sums[i] = 0;
    for (int64_t block = first; block < last; block++) {
        int64_t begin = block * width < start ? start - block * width : 0;
        int64_t end = (block + 1) * width > length ? length - block * width : width;
        for (int64_t kv_head = from; kv_head < to; kv_head++) {
            const float *values =
                rows(a, a->v_cache, table, block, last, kv_head, from, to, first_values, work, dtype, size);
            for (int64_t h = (kv_head - from) * group; h < (kv_head - from + 1) * group; h++)
                weigh(work->scores + h * work->reach + block * width - base + begin, values + begin * size,
                      work->sums + h * size, end - begin, size);
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < size; i += 16)
            store16(a->out, (row + h) * size + i,
                    div16(read16(work->sums + h * size + i), all16(work->totals[h])), dtype);
}

INLINE void attend(const struct attention *a, int64_t sequences, int dtype, const int64_t size) {
    int64_t longest = 0;
    for (int64_t i = 0; i < sequences; i++)
        if (a->lengths[i] > longest) longest = a->lengths[i];
    const int64_t reach = (longest + 2 * a->block_size + 31) / 16 * 16;
    const int64_t heads_each = sequences < FEW ? 1 : a->kv_heads, parts = a->kv_heads / heads_each;
    const int64_t heads = heads_each * a->heads / a->kv_heads;
    /* In whole cache lines: none is shared by two threads, and no register is read from two of them. */
    const int64_t floats = heads * (reach + 2 * size + 1) + a->block_size * size;
    float *memory = aligned_alloc(LINE, (floats * sizeof(float) + LINE - 1) / LINE * LINE);
    if (!memory) {
#pragma omp atomic update
        quire_failures |= LACKED_MEMORY;
    }
    struct scratch work = {.scores = memory, .reach = reach, .q = memory + heads * reach};
    work.sums = work.q + heads * size, work.block = work.sums + heads * size;
    work.totals = work.block + a->block_size * size;
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < sequences * parts; index++)
        if (memory) task(a, index / parts, index % parts * heads_each, (index % parts + 1) * heads_each, &work, dtype, size);
    free(memory);
}

#define SIZES(f) f(64) f(96) f(128) f(256)
#define ATTEND(size)                               \
    case size:                                     \
        if (a->dtype == BFLOAT16)                  \
            attend(a, sequences, BFLOAT16, size);  \
        else                                       \
            attend(a, sequences, FLOAT32, size);   \
        break;

EXPORT void KERNEL(decode_attention)(const struct attention *a, int64_t sequences) {
    switch (a->head_size) { SIZES(ATTEND) }
}
