/* All-reduce and gather among processes of one host, over memory that all of them map.
 *
 * A message is moved in chunks. Every rank copies its chunk to a slot of its own, publishes that by its counter, waits
 * until the counters of all others are as far, and reads all slots in the order of the ranks: so the sums have the same
 * bits everywhere. Of a large chunk each rank adds a share only, and publishes the sums as the next chunk.
 *
 * A rank has two slots and takes them in turns. Who publishes chunk n has read all slots of chunk n - 1, so once all have
 * published chunk n, the slots of chunk n - 1 are free for chunk n + 1: one wait per chunk is enough.
 *
 * A wait ends when the other rank has arrived, when its time is over, or when a rank has set `aborted`. Of these the last
 * two are final: no rank writes or reads a slot after it, so that a rank that comes back late finds an error, and never
 * another call's numbers. */
#define _GNU_SOURCE
#include "runtime.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 64, BLOCK = 4096, SUMMED = 512 };
enum { SHARED_BYTES = 1 << 17 }; /* of a chunk from which a share of the additions is worth a wait */
/* Ranks with a processor each differ by less than the spins last, about 3 us; with fewer processors than ranks, the one
 * that is waited for needs that of the one that waits. */
enum { SPINS = 50 };
static const int64_t YIELD_NS = 1000000; /* in a run of steps no rank is later, and to be woken takes some 50 us */
static const int64_t SLEEP_NS = 20000000; /* then it looks whether the group was aborted */
static const int64_t COUNTED_NS = 200000000; /* of one pause at most */

enum call_kind { ALL_REDUCE = 1, GATHER = 2 };
enum failure { NONE = 0, ABORTED = 1, LATE = 2, DIFFERS = 3 };

/* What a rank publishes, 128 bytes apart because processors fetch lines in pairs. */
struct line {
    _Alignas(128) _Atomic uint32_t arrived; /* number of the last chunk in a slot; wraps around */
    _Atomic uint32_t sleepers;              /* ranks that sleep until it changes */
    _Atomic uint32_t joined;
    uint64_t message[2]; /* of the chunk in each slot: kind, dtype and size of what it is a part of */
};

/* The beginning of the memory. */
struct region {
    int64_t ranks, slot_size, slots_at;
    _Atomic uint32_t aborted; /* failure | rank << 8 | finder << 16 */
    struct line lines[];
};

/* One rank's end of it. The caller owns it, fills the first three and reads the next five and the last. */
struct group {
    struct region *region;
    int64_t rank, deadline_ns;
    int64_t calls, bytes; /* made so far; bytes of the own parts */
    int64_t failure, failed_rank, finder;
    int64_t ranks, slot_size;
    int64_t left_ns; /* of the present call's deadline */
    int64_t chunk;   /* number of the last published */
    int64_t waited_ns; /* for other ranks so far, but for spins */
};

static char *slot(const struct group *g, int64_t rank, uint32_t chunk) {
    return (char *)g->region + g->region->slots_at + (2 * rank + (chunk & 1)) * g->slot_size;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static int has_failed(struct group *g) {
    uint32_t word = atomic_load_explicit(&g->region->aborted, memory_order_acquire);
    if (!word) return 0;
    g->failure = word & 0xff, g->failed_rank = word >> 8 & 0xff, g->finder = word >> 16;
    return 1;
}

/* End the calls of all ranks. The first failure stays: it is the cause of all others. */
static void abort_group(const struct group *g, enum failure failure, int64_t rank) {
    uint32_t none = 0, word = (uint32_t)(failure | rank << 8 | g->rank << 16);
    atomic_compare_exchange_strong(&g->region->aborted, &none, word);
    for (int64_t r = 0; r < g->ranks; r++) wake(&g->region->lines[r].arrived);
}

static int fail(struct group *g, enum failure failure, int64_t rank) {
    abort_group(g, failure, rank);
    return !has_failed(g);
}

static int is_there(struct line *line, uint32_t chunk) {
    return (int32_t)(atomic_load_explicit(&line->arrived, memory_order_acquire) - chunk) >= 0;
}

/* Sleep until the rank publishes something. It looks for sleepers after it has changed its counter, so they are counted
 * before it is read. */
static void sleep_until_change(struct group *g, struct line *line, uint32_t chunk) {
    const struct timespec longest = {0, SLEEP_NS};
    atomic_fetch_add(&line->sleepers, 1);
    uint32_t seen = atomic_load(&line->arrived);
    if ((int32_t)(seen - chunk) < 0 && !has_failed(g))
        syscall(SYS_futex, &line->arrived, FUTEX_WAIT, seen, &longest, NULL, 0);
    atomic_fetch_sub(&line->sleepers, 1);
}

/* Spin, then offer the processor to others, then sleep. Returns whether the rank has arrived. */
static int await(struct group *g, int64_t rank, uint32_t chunk) {
    struct line *line = &g->region->lines[rank];
    for (int i = 0; i < SPINS; i++) {
        if (is_there(line, chunk)) return 1;
        __builtin_ia32_pause();
    }
    const int64_t began = now_ns();
    for (int64_t last = began;;) {
        if (last - began < YIELD_NS)
            sched_yield();
        else
            sleep_until_change(g, line, chunk);
        const int is_here = is_there(line, chunk);
        int64_t now = now_ns(), waited = now - last;
        g->waited_ns += waited;
        if (is_here) return 1;
        if (has_failed(g)) return 0;
        /* A machine on which this process did not run either does not use up the other rank's time. */
        g->left_ns -= waited < COUNTED_NS ? waited : COUNTED_NS;
        if (g->left_ns <= 0) return fail(g, LATE, rank);
        last = now;
    }
}

/* Publish the chunk in the own slot and wait for everybody's. Returns whether all have arrived with the same message. */
static int exchange(struct group *g, uint32_t chunk, uint64_t message) {
    struct line *own = &g->region->lines[g->rank];
    own->message[chunk & 1] = message;
    atomic_store(&own->arrived, chunk);
    if (atomic_load(&own->sleepers)) wake(&own->arrived);
    for (int64_t rank = 0; rank < g->ranks; rank++)
        if (rank != g->rank && !await(g, rank, chunk)) return 0;
    for (int64_t rank = 0; rank < g->ranks; rank++)
        if (g->region->lines[rank].message[chunk & 1] != message) return fail(g, DIFFERS, rank);
    return !has_failed(g);
}

/* Prepare memory of zeros. The counters start shortly before they wrap around, so that this is seen in every test. */
EXPORT int64_t quire_shm_create(struct region *region, int64_t ranks, int64_t slot_size) {
    const int64_t header = sizeof(struct region) + ranks * sizeof(struct line), slots_at = (header + 4095) / 4096 * 4096;
    if (!region) return slots_at + 2 * ranks * slot_size;
    region->ranks = ranks, region->slot_size = slot_size, region->slots_at = slots_at;
    for (int64_t rank = 0; rank < ranks; rank++) atomic_store(&region->lines[rank].arrived, (uint32_t)-100);
    return 0;
}

static struct group *failed_group;

/* The group whose failure `quire_run` has reported last. */
EXPORT const struct group *quire_shm_failed_group(void) { return failed_group; }

/* Take a place in the group. Returns whether it was free: who left it cannot come back. */
EXPORT int quire_shm_join(struct group *g) {
    struct line *own = &g->region->lines[g->rank];
    g->ranks = g->region->ranks, g->slot_size = g->region->slot_size;
    g->chunk = (int32_t)atomic_load(&own->arrived);
    return !atomic_exchange(&own->joined, 1);
}

/* From any thread: it leaves `g` alone, which a call may be using. */
EXPORT void quire_shm_abort(const struct group *g) { abort_group(g, ABORTED, g->rank); }

/* All threads of a team make a call together, and one of them deals with the other ranks. Whether it failed is read
 * between two barriers, so that all threads go on or none does. */
static int is_well(struct group *g) {
    const int is_well = !g->failure;
#pragma omp barrier
    if (!is_well) quire_stops = 1;
    return is_well;
}

static void note_failure(struct group *g) {
    quire_failures |= RANK_FAILED;
    failed_group = g;
}

/* The start of a call. What was computed without memory must not reach other ranks. */
static int start(struct group *g, int64_t bytes) {
#pragma omp single
    {
        g->calls++;
        g->bytes += bytes;
        g->left_ns = g->deadline_ns;
        if (quire_failures & LACKED_MEMORY) fail(g, ABORTED, g->rank);
        if (has_failed(g)) note_failure(g);
    }
    return is_well(g);
}

static int publish(struct group *g, uint64_t message) {
#pragma omp single
    {
        g->chunk++;
        if (!exchange(g, (uint32_t)g->chunk, message)) note_failure(g);
    }
    return is_well(g);
}

static void copy(char *to, const char *from, int64_t size) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < size; i += BLOCK) memcpy(to + i, from + i, size - i < BLOCK ? size - i : BLOCK);
}

/* The own slot that is published next. */
static char *next_slot(const struct group *g) { return slot(g, g->rank, (uint32_t)g->chunk + 1); }

/* x [rows, size] += the parts of all other ranks, in place. */
struct all_reduce {
    struct group *group;
    void *x;
    int64_t size, dtype;
};

INLINE float load(const void *base, int64_t index, int dtype) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    const union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)base)[index] << 16};
    return wide.value;
}

/* To bfloat16 to nearest even, as torch does; NaN stays NaN. */
INLINE void store(void *base, int64_t index, float value, int dtype) {
    if (dtype == FLOAT32) {
        ((float *)base)[index] = value;
        return;
    }
    const union { float value; uint32_t bits; } wide = {value};
    const uint32_t rounded = wide.bits + 0x7fff + (wide.bits >> 16 & 1);
    ((uint16_t *)base)[index] = value != value ? 0x7fc0 : rounded >> 16;
}

/* The compiler makes vectors of it. The numbers are added in the order of the ranks, whatever their width. */
INLINE void sum(const void *const *parts, int64_t ranks, int64_t count, void *x, int dtype) {
#pragma omp for schedule(static)
    for (int64_t first = 0; first < count; first += SUMMED) {
        float sums[SUMMED];
        const int64_t end = count - first < SUMMED ? count - first : SUMMED;
        for (int64_t i = 0; i < end; i++) sums[i] = load(parts[0], first + i, dtype);
        for (int64_t rank = 1; rank < ranks; rank++)
            for (int64_t i = 0; i < end; i++) sums[i] += load(parts[rank], first + i, dtype);
        for (int64_t i = 0; i < end; i++) store(x, first + i, sums[i], dtype);
    }
}

__attribute__((target_clones("avx512f", "avx2", "default"))) static void sum_parts(
    const void *const *parts, int64_t ranks, int64_t count, void *x, int dtype) {
    if (dtype == BFLOAT16)
        sum(parts, ranks, count, x, BFLOAT16);
    else
        sum(parts, ranks, count, x, FLOAT32);
}

/* x += the parts of all other ranks: each rank adds all of it. */
static int sum_whole(struct group *g, char *x, int64_t count, int dtype, uint64_t message) {
    copy(next_slot(g), x, count * size_of(dtype));
    if (!publish(g, message)) return 0;
    const void *parts[MAX_RANKS];
    for (int64_t rank = 0; rank < g->ranks; rank++)
        parts[rank] = rank == g->rank ? x : slot(g, rank, (uint32_t)g->chunk);
    sum_parts(parts, g->ranks, count, x, dtype);
    return 1;
}

/* The same, where each rank adds a share and copies the others' sums: one more wait, and less to add. */
static int sum_shares(struct group *g, char *x, int64_t count, int dtype, uint64_t message) {
    int64_t bounds[MAX_RANKS + 1];
    const int64_t vectors = (count + 15) / 16;
    for (int64_t rank = 0; rank <= g->ranks; rank++) {
        const int64_t bound = vectors * rank / g->ranks * 16;
        bounds[rank] = (bound < count ? bound : count) * size_of(dtype);
    }
    const int64_t begin = bounds[g->rank], end = bounds[g->rank + 1];
    copy(next_slot(g), x, begin);
    copy(next_slot(g) + end, x + end, bounds[g->ranks] - end);
    if (!publish(g, message)) return 0;
    const void *parts[MAX_RANKS];
    for (int64_t rank = 0; rank < g->ranks; rank++)
        parts[rank] = (rank == g->rank ? x : slot(g, rank, (uint32_t)g->chunk)) + begin;
    sum_parts(parts, g->ranks, (end - begin) / size_of(dtype), x + begin, dtype);
    copy(next_slot(g) + begin, x + begin, end - begin);
    if (!publish(g, message)) return 0;
    for (int64_t rank = 0; rank < g->ranks; rank++)
        if (rank != g->rank)
            copy(x + bounds[rank], slot(g, rank, (uint32_t)g->chunk) + bounds[rank], bounds[rank + 1] - bounds[rank]);
    return 1;
}

EXPORT void quire_shm_all_reduce(const struct all_reduce *a, int64_t rows) {
    struct group *g = a->group;
    const int64_t total = rows * a->size, each = g->slot_size / size_of(a->dtype);
    const uint64_t message = ALL_REDUCE | (uint64_t)a->dtype << 2 | (uint64_t)total << 8;
    if (!total || !start(g, total * size_of(a->dtype))) return;
    for (int64_t first = 0; first < total; first += each) {
        const int64_t count = total - first < each ? total - first : each;
        char *x = (char *)a->x + first * size_of(a->dtype);
        const int is_shared = count * size_of(a->dtype) >= SHARED_BYTES;
        if (!(is_shared ? sum_shares : sum_whole)(g, x, count, a->dtype, message)) return;
    }
}

/* y [rows, ranks, size] of rank 0 = the parts x [rows, size] of all ranks; size in bytes, y null on other ranks. */
struct gather {
    struct group *group;
    const char *x;
    char *y;
    int64_t size;
};

/* Bytes [first, first + count) of one rank's part, which the pointer begins with, to their places. */
static void place(const struct gather *a, int64_t rank, const char *part, int64_t first, int64_t count) {
    const int64_t size = a->size, end = first + count;
#pragma omp for schedule(static)
    for (int64_t row = first / size; row <= (end - 1) / size; row++) {
        int64_t from = row * size < first ? first : row * size;
        int64_t to = (row + 1) * size < end ? (row + 1) * size : end;
        memcpy(a->y + (row * a->group->ranks + rank) * size + from - row * size, part + from - first, to - from);
    }
}

EXPORT void quire_shm_gather(const struct gather *a, int64_t rows) {
    struct group *g = a->group;
    const int64_t total = rows * a->size;
    const uint64_t message = GATHER | (uint64_t)total << 8;
    if (!total || !start(g, total)) return;
    for (int64_t first = 0; first < total; first += g->slot_size) {
        const int64_t count = total - first < g->slot_size ? total - first : g->slot_size;
        if (g->rank) copy(next_slot(g), a->x + first, count);
        if (!publish(g, message)) return;
        if (g->rank) continue;
        for (int64_t rank = 0; rank < g->ranks; rank++)
            place(a, rank, rank ? slot(g, rank, (uint32_t)g->chunk) : a->x + first, first, count);
    }
}
