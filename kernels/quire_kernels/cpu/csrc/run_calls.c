/* The entry point of all kernel calls. */
#include "vectors.h"

struct call {
    void (*kernel)(const void *arguments, int64_t rows);
    const void *arguments;
};

int quire_lacked_memory;

/* Make the calls in order, all over the same number of rows. One team of threads makes all of them, because starting
 * a team takes as long as many a kernel. Returns whether a call could not allocate memory, in which case there is no
 * result. Not reentrant. */
EXPORT int quire_run(const struct call *calls, int64_t count, int64_t rows, int is_parallel) {
    quire_lacked_memory = 0;
#pragma omp parallel if (is_parallel)
    for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].arguments, rows);
    return quire_lacked_memory;
}
