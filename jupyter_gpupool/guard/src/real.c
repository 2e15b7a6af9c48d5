/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The real driver: where it is, and the table of its functions. The guard opens the driver at the
 * first call and not when the guard is loaded. So shells and compilers, which inherit LD_PRELOAD,
 * never open it.
 */
#define ENTRIES_TABLE
#include "find.h"
#include "guard.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SONAME "libcuda.so.1"

__attribute__((visibility("default"))) extern const char gpupool_guard[];
const char gpupool_guard[] = FIND_MARK " 1";

extern const int32_t guard_entry_at[];

void *guard_real[E_COUNT + E_SPARES];
uint8_t guard_unloaded HIDDEN = 1;
unsigned guard_driver_version = INT_MAX;

static pthread_mutex_t publishing = PTHREAD_MUTEX_INITIALIZER;
static bool driver_missing, handed_over;
bool guard_settled;
static uint64_t refused_until; /* CLOCK_MONOTONIC, ns: no call looks for the page before this
                                * time */
/* CLOCK_MONOTONIC, ns: no call asks the broker for the page before this time, because the broker
 * was away. */
static uint64_t away_until;
/* After the broker was away, no call asks it for this time, in ns. The time doubles with each
 * failure. 0: the broker was not away. */
static uint64_t away_for;

#define REFUSED_NS 1000000000ull
#define AWAY_MOST_NS (32 * REFUSED_NS)

static CUresult not_in_driver(void)
{
    return CUDA_ERROR_NOT_FOUND;
}

bool guard_has(int entry)
{
    return guard_real[entry] != (void *)not_in_driver;
}

const char *guard_name(int entry)
{
    return entry_names + entry_table[entry].name;
}

void *guard_exported(int entry)
{
    return (char *)guard_entry_at + guard_entry_at[entry];
}

static int compare(const char *name, size_t length, int entry)
{
    size_t base = entry_table[entry].base;
    int order = memcmp(name, guard_name(entry), length < base ? length : base);
    return order ? order : (length > base) - (length < base);
}

int guard_find(const char *name, int version, bool per_thread)
{
    size_t length = strlen(name);
    int low = 0, high = E_COUNT, found = -1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (compare(name, length, middle) > 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (int i = low; i < E_COUNT && !compare(name, length, i); i++) {
        unsigned since = entry_table[i].since;
        /* The usual variant of a name comes before the variant for per-thread streams. Each variant
         * is sorted by version. The answer is the last form that fits. If a name has no variant for
         * per-thread streams, a caller that asks for this variant gets the usual one. */
        if (entry_table[i].per_thread && !per_thread)
            break;
        if (entry_table[i].per_thread && found >= 0 && !entry_table[found].per_thread)
            found = -1;
        if (since && since <= (unsigned)version)
            found = i;
    }
    return found;
}

/* Returns another copy of the guard if the process loaded it before this copy, under the driver's
 * name. Otherwise NULL. */
static void *first_guard(void)
{
    void *loaded = dlopen(SONAME, RTLD_NOLOAD | RTLD_LAZY);
    if (!loaded)
        return NULL;
    const void *mark = dlsym(loaded, "gpupool_guard");
    if (mark && mark != gpupool_guard)
        return loaded;
    dlclose(loaded);
    return NULL;
}

/* ---- the table */

static void load(void)
{
    /* Hold no lock during the calls of the loader. Another thread may hold the loader's lock and
     * call CUDA in a constructor, and would then wait for our lock. All threads find the same
     * functions, and the first thread publishes them. */
    void *table[E_COUNT];
    void *handle = first_guard();
    bool second = handle != NULL;
    if (!handle)
        handle = find_library(SONAME, getenv("GPUPOOL_REAL_LIBCUDA"));
    if (handle)
        for (int i = 0; i < E_COUNT; i++) {
            table[i] = dlsym(handle, guard_name(i));
            if (!table[i])
                table[i] = (void *)not_in_driver;
        }
    /* NVIDIA's drivers answer this query before cuInit, and do not touch a device. */
    int version = 0;
    if (handle && table[E_cuDriverGetVersion] != (void *)not_in_driver)
        ((CUresult(*)(int *))table[E_cuDriverGetVersion])(&version);
    pthread_mutex_lock(&publishing);
    if (guard_unloaded && !driver_missing) {
        if (version > 0)
            guard_driver_version = (unsigned)version;
        if (handle)
            for (int i = 0; i < E_COUNT; i++)
                __atomic_store_n(&guard_real[i], table[i], __ATOMIC_RELAXED);
        for (int i = E_COUNT; i < E_COUNT + E_SPARES; i++)
            guard_real[i] = (void *)not_in_driver;
        handed_over = second;
        __atomic_store_n(&driver_missing, !handle, __ATOMIC_RELEASE);
        procaddr_ready();
        guard_at_fork();
        __atomic_store_n(&guard_unloaded, !handle, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&publishing);
}

/* Load the driver at the first call; return whether it is loaded. If there is no driver, every call
 * returns the same error as on a machine without a GPU. Programs can handle this error, and
 * continue without a GPU. */
static bool loaded(void)
{
    if (!__atomic_load_n(&guard_unloaded, __ATOMIC_ACQUIRE))
        return true;
    if (!__atomic_load_n(&driver_missing, __ATOMIC_ACQUIRE))
        load();
    return !__atomic_load_n(&guard_unloaded, __ATOMIC_ACQUIRE);
}

/* Looks for the page. A refusal is not final, because its cause may be temporary: for example, the
 * process has no descriptor left, or the broker is away. */
static enum page_state look(void)
{
    pthread_mutex_lock(&publishing);
    enum page_state state = PAGE_READY;
    if (!guard_settled) {
        /* If the process has loaded another copy of the guard before this one, the other copy has
         * the gate and counts the calls. This copy then only passes calls on. */
        if (!handed_over && monotonic() < refused_until) {
            state = PAGE_REFUSED;
        } else if (!handed_over) {
            state = page_settle();
            /* The broker was away a short time ago. Do not ask it yet, because this call would wait
             * for seconds. */
            if (state == PAGE_LOST && monotonic() < away_until)
                state = PAGE_REFUSED;
            if (state == PAGE_REFUSED)
                refused_until = monotonic() + REFUSED_NS;
        }
        if (state == PAGE_READY) {
            guard_gates(guard_page ? &guard_page->gate : &guard_open.gate, &guard_open.gate);
            __atomic_store_n(&guard_settled, true, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&publishing);
    return state;
}

static void refuse(enum answer answer)
{
    pthread_mutex_lock(&publishing);
    if (!guard_settled) {
        uint64_t now = monotonic();
        refused_until = now + REFUSED_NS;
        if (answer != ANSWER_AWAY)
            away_for = 0;
        else if (now >= away_until) /* if several threads have waited, only the first one doubles
                                     * the time */
            away_for = !away_for ? REFUSED_NS : away_for < AWAY_MOST_NS ? 2 * away_for : AWAY_MOST_NS;
        if (answer != ANSWER_AWAY || now >= away_until)
            away_until = now + away_for;
        page_lost(answer);
    }
    pthread_mutex_unlock(&publishing);
}

CUresult guard_settle(void)
{
    if (__atomic_load_n(&guard_settled, __ATOMIC_ACQUIRE))
        return CUDA_SUCCESS;
    if (!loaded())
        return CUDA_ERROR_NO_DEVICE;
    enum page_state state = look();
    if (state == PAGE_LOST) {
        /* Do not hold the mutex while this thread asks the broker. The wait releases the
         * interpreter's lock. The thread that then gets this lock may need the mutex for its own
         * first call or for a fork(). */
        enum answer answer = broker_page();
        if (answer == ANSWER_OK)
            state = look();
        if (state == PAGE_LOST && answer != ANSWER_INTERRUPTED)
            refuse(answer);
    }
    /* Another thread may have found the page meanwhile. */
    return __atomic_load_n(&guard_settled, __ATOMIC_ACQUIRE) ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult guard_slow_never(void)
{
    return loaded() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

void real_fork(enum fork_when when)
{
    if (when == FORK_PREPARE) {
        pthread_mutex_lock(&publishing);
        return;
    }
    if (when == FORK_CHILD && !driver_missing) {
        guard_settled = false;
        refused_until = away_until = away_for = 0;
    }
    pthread_mutex_unlock(&publishing);
}
