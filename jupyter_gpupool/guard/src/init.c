/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuInit: the devices that the driver will see, and fork().
 */
#include "guard.h"
#include "wraps.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define VISIBLE "CUDA_VISIBLE_DEVICES"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool chosen;
/* `seen`: how many devices this process sees. `ordinal_of`: the session's ordinal of each of
 * them. */
static int seen, ordinal_of[PAGE_DEVICES];

#define ENDS (-1)      /* the entry names no device and ends the list, as in the driver */
#define ELSEWHERE (-2) /* the entry names a device outside the session */

/* The session's ordinal of the device that `text` names: one entry of CUDA_VISIBLE_DEVICES. The
 * entry is a number, a UUID or the beginning of a UUID. */
static int by_text(const char *text, size_t length, const char *home)
{
    int found = ELSEWHERE;
    if (!length)
        return ENDS;
    if (strncasecmp(text, "GPU-", 4) && strncasecmp(text, "MIG-", 4)) {
        char *end;
        long number = strtol(text, &end, 10);
        if (end == text || end > text + length || number < 0)
            return ENDS;
        return number < (long)guard_page->devices ? (int)number : ELSEWHERE;
    }
    for (int i = 0; i < (int)guard_page->devices; i++)
        if (!strncasecmp(text, guard_page->uuid[i], length) && length < PAGE_UUID) {
            if (found >= 0)
                return ENDS; /* two UUIDs begin with `text`: CUDA then takes the entry for no
                              * device */
            found = i;
        }
    /* The program may have read the UUIDs of the home devices before the session had a lease. So
     * `text` may be one of them. `home` is the list of these UUIDs, and its entry i stands for
     * device i of the slice. */
    for (int i = 0; found < 0 && home && *home && i < (int)guard_page->devices; i++) {
        size_t n = strcspn(home, ",");
        if (n == length && !strncasecmp(text, home, n))
            found = i;
        home += n;
        home += *home == ',';
    }
    return found;
}

/* Writes to ordinal_of the session's devices that `asked` names. Returns whether `asked` also names
 * devices outside the session. If it names only devices outside the session, the caller gives the
 * program all devices of the session. */
static bool choose(const char *asked, const char *home)
{
    bool taken[PAGE_DEVICES] = {false}, others = false;
    for (;;) {
        asked += strspn(asked, " ");
        size_t n = strcspn(asked, ", ");
        int device = by_text(asked, n, home);
        if (device == ENDS)
            return others;
        if (device == ELSEWHERE) {
            others = true;
        } else if (taken[device]) {
            seen = 0; /* a list that names a device twice hides all devices */
            return false;
        } else {
            taken[device] = true;
            ordinal_of[seen++] = device;
        }
        asked += n;
        asked += strspn(asked, " ");
        if (*asked++ != ',')
            return others;
    }
}

/* Replace each entry of CUDA_VISIBLE_DEVICES with the UUID of the session's device that the entry
 * names. */
static void choose_visible(void)
{
    const char *home = getenv("GPUPOOL_VISIBLE"), *asked = getenv(VISIBLE);
    char list[PAGE_DEVICES * (PAGE_UUID + 1)];
    size_t length = 0;
    seen = 0;
    if (!guard_page->devices)
        return;
    bool all = !asked || (home && !strcmp(asked, home));
    if (!all && choose(asked, home)) {
        all = !seen;
        dprintf(2,
                "jupyter_gpupool: CUDA_VISIBLE_DEVICES=\"%.64s\" names a GPU that this session does not "
                "have; %s.\n",
                asked, all ? "CUDA uses the GPU of the session instead" : "CUDA ignores this GPU");
    }
    if (all)
        while (seen < (int)guard_page->devices) {
            ordinal_of[seen] = seen;
            seen++;
        }
    for (int d = 0; d < seen; d++) {
        const char *uuid = guard_page->uuid[ordinal_of[d]];
        size_t n = strnlen(uuid, PAGE_UUID - 1);
        if (length)
            list[length++] = ',';
        memcpy(list + length, uuid, n);
        length += n;
    }
    list[length] = 0;
    setenv(VISIBLE, length ? list : "-1", 1);
    if (all)
        /* A program that this process starts finds the same list in CUDA_VISIBLE_DEVICES and
         * GPUPOOL_VISIBLE. So it sees all devices of the session, too. */
        setenv("GPUPOOL_VISIBLE", list, 1);
    guard_follow(false);
}

CUresult wrap_cuInit(unsigned flags)
{
    CUresult error = guard_settle();
    if (error)
        return error;
    if (guard_blocked())
        /* cuInit has succeeded before, because the driver blocks calls only in a process that has
         * called cuInit. */
        return CUDA_SUCCESS;
    if (guard_page) {
        /* Set the flag before this process reads the home devices. Once the broker has seen the
         * flag, it no longer changes the home devices. */
        struct page_slot *slot = guard_slot();
        if (slot)
            __atomic_or_fetch(&slot->flags, SLOT_CUDA, __ATOMIC_SEQ_CST);
        /* cuInit binds a process to the devices that the process sees during cuInit. If the session
         * has no lease, the page may still name the devices that were chosen at the kernel's start.
         * So ask the broker to write the devices on which the session would get a slice now. */
        if (!__atomic_load_n(&chosen, __ATOMIC_ACQUIRE) && !gate_lets(false))
            broker_home();
        pthread_mutex_lock(&lock);
        if (!chosen)
            choose_visible();
        __atomic_store_n(&chosen, true, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&lock);
    }
    error = guard_enter_free();
    if (error)
        return error;
    error = REAL(cuInit)(flags);
    if (!error)
        guard_note_init();
    guard_leave();
    return error;
}

/* Returns the text of an error on a machine without a driver. Every call then returns
 * CUDA_ERROR_NO_DEVICE, so only this code and success have a text. */
static CUresult words(CUresult error, const char **out, const char *of_none, const char *of_success)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = error == CUDA_ERROR_NO_DEVICE ? of_none : error ? NULL : of_success;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult wrap_cuGetErrorName(CUresult error, const char **out)
{
    return guard_slow_never() ? words(error, out, "CUDA_ERROR_NO_DEVICE", "CUDA_SUCCESS")
                              : REAL(cuGetErrorName)(error, out);
}

CUresult wrap_cuGetErrorString(CUresult error, const char **out)
{
    return guard_slow_never() ? words(error, out, "no CUDA-capable device is detected", "no error")
                              : REAL(cuGetErrorString)(error, out);
}

int guard_ordinal(CUdevice device)
{
    if (device < 0 || device >= PAGE_DEVICES || !guard_page)
        return -1;
    if (!seen)
        return device < (int)guard_page->devices ? device : -1;
    return device < seen ? ordinal_of[device] : -1;
}

void guard_follow(bool follows)
{
    struct page_slot *slot = guard_slot();
    for (int d = 0; slot && d < seen; d++) {
        uint64_t name = follows ? SEES_SLICE : page_name(guard_page->uuid[ordinal_of[d]]);
        __atomic_store_n(&slot->sees[ordinal_of[d]], name, __ATOMIC_RELEASE);
    }
}

bool guard_sees_slice(int ordinal)
{
    struct page_slot *slot = guard_slot();
    uint64_t sees = slot ? __atomic_load_n(&slot->sees[ordinal], __ATOMIC_ACQUIRE) : SEES_NONE;
    return sees <= SEES_SLICE || sees == page_name(guard_page->uuid[ordinal]);
}

int guard_current(void)
{
    CUdevice device;
    return CALL(CUresult(*)(CUdevice *), cuCtxGetDevice)(&device) ? -1 : guard_ordinal(device);
}

/* ---- fork(): a child has its own slot and no device. The handlers take the locks in the order in
 * which other code nests them. */

static void init_fork(enum fork_when when)
{
    if (when == FORK_PREPARE)
        pthread_mutex_lock(&lock);
    else
        pthread_mutex_unlock(&lock);
}

static void (*const parts[])(enum fork_when when) = {
    init_fork, landing_fork, nvml_calls_fork, procaddr_fork, real_fork, cached_fork, wait_fork, page_fork,
    gate_fork, current_fork,
};
#define PARTS (sizeof parts / sizeof *parts)

static void prepare(void)
{
    for (size_t i = 0; i < PARTS; i++)
        parts[i](FORK_PREPARE);
}

static void in_parent(void)
{
    for (size_t i = PARTS; i-- > 0;)
        parts[i](FORK_PARENT);
}

static void in_child(void)
{
    for (size_t i = PARTS; i-- > 0;)
        parts[i](FORK_CHILD);
}

void guard_at_fork(void)
{
    pthread_atfork(prepare, in_parent, in_child);
}
