/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuGetProcAddress: if the driver answers with one of its functions, the caller gets the guard's
 * entry point for that function instead.
 */
#include "guard.h"
#include "wraps.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

/* Up to this version of CUDA, entries.txt has every form of every call. */
#define KNOWN_VERSION 13000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The entries, sorted by the address that the driver exports. Several names may share an
 * address. */
static uint16_t by_address[E_COUNT];
static void *exported[E_COUNT];
static int spares;

static int order(const void *a, const void *b)
{
    int i = *(const uint16_t *)a, j = *(const uint16_t *)b;
    uintptr_t p = (uintptr_t)exported[i], q = (uintptr_t)exported[j];
    return p < q ? -1 : p > q ? 1 : i - j;
}

void procaddr_ready(void)
{
    for (int i = 0; i < E_COUNT; i++) {
        by_address[i] = (uint16_t)i;
        exported[i] = guard_has(i) ? guard_real[i] : NULL;
    }
    qsort(by_address, E_COUNT, sizeof *by_address, order);
}

/* The index of the entry whose function the driver exports at `address`; -1: no entry matches. */
static int find_address(const void *address)
{
    int low = 0, high = E_COUNT;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((uintptr_t)exported[by_address[middle]] < (uintptr_t)address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < E_COUNT && exported[by_address[low]] == address ? by_address[low] : -1;
}

/* Returns a spare entry point for a function that entries.txt does not list, because the driver is
 * newer. A call of this entry point waits at the gate, but is not counted. Returns NULL if all 256
 * spares are in use. The guard does not return the driver's function, because a call without the
 * gate would crash the process at a suspend. */
static void *spare_for(void *address)
{
    void *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = E_COUNT; i < E_COUNT + spares && !found; i++)
        if (guard_real[i] == address)
            found = guard_exported(i);
    if (!found && spares < E_SPARES) {
        int entry = E_COUNT + spares++;
        __atomic_store_n(&guard_real[entry], address, __ATOMIC_RELEASE);
        found = guard_exported(entry);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Store `address` as the driver's function of `entry`. It is an answer of the driver's
 * cuGetProcAddress, and may differ from the address that the driver exports. Returns false if an
 * earlier answer has already set another address. */
static bool adopt(int entry, void *address)
{
    bool good;
    pthread_mutex_lock(&lock);
    if (guard_real[entry] == exported[entry] || !guard_has(entry))
        __atomic_store_n(&guard_real[entry], address, __ATOMIC_RELEASE);
    good = guard_real[entry] == address;
    pthread_mutex_unlock(&lock);
    return good;
}

/* Whether the driver has answered with the guard's own function. A driver that was linked without
 * -Bsymbolic looks its names up in the process, and finds the guard's functions first. If the guard
 * stored such an address as the driver's function, the function would call itself without end. */
static bool is_ours(const void *address)
{
    for (int i = 0; i < E_COUNT + E_SPARES; i++)
        if (guard_exported(i) == address)
            return true;
    return false;
}

typedef CUresult (*query)(const char *name, void **out, int version, uint64_t flags);
typedef CUresult (*query_v2)(const char *name, void **out, int version, uint64_t flags, int *status);

/* Calls the driver's own cuGetProcAddress, in the form that the program has called. `asked`: the
 * entry of this form. `five`: this form has a fifth argument. */
static CUresult ask(int asked, bool five, const char *name, void **out, int version,
                    uint64_t flags, int *status)
{
    return five ? ((query_v2)guard_real[asked])(name, out, version, flags, status)
                : ((query)guard_real[asked])(name, out, version, flags);
}

/* Report a missing function as NVIDIA's drivers do: the form with a status argument succeeds, and
 * the older form fails and leaves *out unchanged. */
static CUresult none(bool five, void **out, void *before, int *status, int why)
{
    *out = five ? NULL : before;
    if (status)
        *status = why;
    return five ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* If there is no driver, return the guard's own functions. They report that there is no device. */
static CUresult own(bool five, const char *name, void **out, int version, uint64_t flags, int *status)
{
    if (!name || !out || flags > (PROC_LEGACY_STREAM | PROC_PER_THREAD_STREAM))
        return CUDA_ERROR_INVALID_VALUE;
    int entry = guard_find(name, version, flags & PROC_PER_THREAD_STREAM);
    if (entry < 0)
        return none(five, out, *out, status,
                    guard_find(name, INT_MAX, false) < 0 ? PROC_NOT_FOUND : PROC_TOO_NEW);
    *out = guard_exported(entry);
    if (status)
        *status = PROC_FOUND;
    return CUDA_SUCCESS;
}

static CUresult get(int asked, bool five, const char *name, void **out, int version, uint64_t flags,
                    int *status)
{
    if (guard_slow_never())
        return own(five, name, out, version, flags, status);
    void *before = out ? *out : NULL;
    CUresult error = ask(asked, five, name, out, version, flags, status);
    if (error || !name || !out || !*out)
        return error;
    void *address = *out;
    if (is_ours(address))
        return CUDA_SUCCESS;
    /* The driver has no form of a call that is newer than the driver. So `version` need not be
     * higher than the version of the driver. */
    if ((unsigned)version > guard_driver_version)
        version = (int)guard_driver_version;
    int entry = guard_find(name, version, flags & PROC_PER_THREAD_STREAM);
    if (entry >= 0 && exported[entry] != address && guard_real[entry] != address) {
        int other = find_address(address);
        if (other >= 0) {
            entry = other;
        } else if ((unsigned)version > KNOWN_VERSION) {
            /* The driver may have returned a newer form of the call, with other arguments than the
             * form in entries.txt. So check whether KNOWN_VERSION gives the same address. */
            void *known = NULL;
            if (ask(asked, five, name, &known, KNOWN_VERSION, flags, NULL) || known != address)
                entry = -1;
        }
    } else if (entry < 0) {
        entry = find_address(address);
    }
    if (entry >= 0 && exported[entry] != address && !adopt(entry, address))
        entry = -1;
    *out = entry >= 0 ? guard_exported(entry) : spare_for(address);
    return *out ? CUDA_SUCCESS : none(five, out, before, status, PROC_NOT_FOUND);
}

CUresult wrap_cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    return get(E_cuGetProcAddress, false, name, out, version, flags, NULL);
}

CUresult wrap_cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                                  int *status)
{
    return get(E_cuGetProcAddress_v2, true, name, out, version, flags, status);
}

void procaddr_fork(enum fork_when when)
{
    if (when == FORK_PREPARE)
        pthread_mutex_lock(&lock);
    else
        pthread_mutex_unlock(&lock);
}
