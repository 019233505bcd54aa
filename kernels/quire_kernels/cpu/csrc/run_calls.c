/* The entry point of all kernel calls. */
#include "runtime.h"

struct call {
    void (*kernel)(const void *arguments, int64_t rows);
    const void *arguments;
};

int quire_failures;
_Thread_local int quire_stops;

/* Make the calls in order, all over the same number of rows. One team of threads makes all of them, because starting
 * a team takes as long as many a kernel. Returns the flags of what failed; there is a result only without one. Not
 * reentrant. */
EXPORT int quire_run(const struct call *calls, int64_t count, int64_t rows, int is_parallel) {
    quire_failures = 0;
#pragma omp parallel if (is_parallel)
    {
        quire_stops = 0;
        for (int64_t i = 0; i < count && !quire_stops; i++) calls[i].kernel(calls[i].arguments, rows);
    }
    return quire_failures;
}
