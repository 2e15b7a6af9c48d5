/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The properties of the devices. The guard returns the driver's answer. While the session is
 * suspended the driver would block, and the guard returns the driver's last answer. So a query
 * about the devices never takes a lease.
 */
#include "guard.h"
#include "wraps.h"

#include <pthread.h>
#include <string.h>

#define ATTRIBUTES 256
#define NAME 128

static struct {
    uint64_t epoch;
    int version, count;
    struct {
        char name[NAME];
        CUuuid uuid, uuid_v2;
        int major, minor;
        size_t total;
        int attribute[ATTRIBUTES];
        CUresult attribute_error[ATTRIBUTES];
    } device[PAGE_DEVICES];
    bool filled;
} cache;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

/* Asks the driver for the properties of all devices. The cached answers are valid for one lease
 * only, because a session may resume on other devices. */
void cached_fill(void)
{
    if (!guard_page)
        return;
    pthread_rwlock_wrlock(&lock);
    cache.epoch = __atomic_load_n(&guard_page->epoch, __ATOMIC_ACQUIRE);
    cache.count = 0;
    bool good = !REAL(cuDriverGetVersion)(&cache.version) &&
                !REAL(cuDeviceGetCount)(&cache.count) && cache.count <= PAGE_DEVICES;
    for (int d = 0; good && d < cache.count; d++) {
        good = !REAL(cuDeviceGetName)(cache.device[d].name, NAME, d) &&
               !REAL(cuDeviceGetUuid)(&cache.device[d].uuid, d);
        if (REAL(cuDeviceGetUuid_v2)(&cache.device[d].uuid_v2, d))
            cache.device[d].uuid_v2 = cache.device[d].uuid;
        REAL(cuDeviceComputeCapability)
        (&cache.device[d].major, &cache.device[d].minor, d);
        if (REAL(cuDeviceTotalMem_v2)(&cache.device[d].total, d))
            cache.device[d].total = 0;
        for (int a = 0; a < ATTRIBUTES; a++)
            cache.device[d].attribute_error[a] =
                REAL(cuDeviceGetAttribute)(&cache.device[d].attribute[a], a, d);
    }
    cache.filled = good;
    pthread_rwlock_unlock(&lock);
}

static __attribute__((noinline)) bool remembered_slowly(void)
{
    if (!guard_blocked())
        return false;
    pthread_rwlock_rdlock(&lock);
    if (cache.filled)
        return true;
    pthread_rwlock_unlock(&lock);
    return false;
}

/* Whether to answer from the cache. If the result is true, this thread holds the lock. A fast test
 * comes first: if the byte at guard_free_gate is zero, the driver does not block, and the slower
 * guard_blocked() is not needed. */
static inline bool remembered(void)
{
    return __builtin_expect(*__atomic_load_n(&guard_free_gate, __ATOMIC_ACQUIRE), 0) && remembered_slowly();
}

static bool known(CUdevice device)
{
    return device >= 0 && device < cache.count;
}

bool cached_total(size_t *bytes, CUdevice device)
{
    pthread_rwlock_rdlock(&lock);
    bool is = cache.filled && known(device) && cache.device[device].total &&
              cache.epoch == __atomic_load_n(&guard_page->epoch, __ATOMIC_ACQUIRE);
    if (is)
        *bytes = cache.device[device].total;
    pthread_rwlock_unlock(&lock);
    return is;
}

/* ASK(call): return the driver's answer. If the driver would block and the cache has no answer,
 * first wait at the gate. */
#define ASK(call)                             \
    do {                                      \
        CUresult error = guard_enter_free();  \
        if (error)                            \
            return error;                     \
        if (guard_page && cache.epoch != guard_page->epoch && guard_has_context()) \
            cached_fill();                    \
        error = call;                         \
        guard_leave();                        \
        return error;                         \
    } while (0)

#define REMEMBERED(device, what)                   \
    if (remembered()) {                            \
        CUresult answer = CUDA_ERROR_INVALID_DEVICE; \
        if (known(device)) {                       \
            what;                                  \
        }                                          \
        pthread_rwlock_unlock(&lock);              \
        return answer;                             \
    }

CUresult wrap_cuDriverGetVersion(int *version)
{
    if (version && remembered()) {
        *version = cache.version;
        pthread_rwlock_unlock(&lock);
        return CUDA_SUCCESS;
    }
    ASK(REAL(cuDriverGetVersion)(version));
}

CUresult wrap_cuDeviceGetCount(int *count)
{
    if (count && remembered()) {
        *count = cache.count;
        pthread_rwlock_unlock(&lock);
        return CUDA_SUCCESS;
    }
    ASK(REAL(cuDeviceGetCount)(count));
}

CUresult wrap_cuDeviceGet(CUdevice *device, int ordinal)
{
    if (device)
        REMEMBERED(ordinal, *device = ordinal; answer = CUDA_SUCCESS)
    ASK(REAL(cuDeviceGet)(device, ordinal));
}

CUresult wrap_cuDeviceGetName(char *name, int length, CUdevice device)
{
    if (name && length > 0)
        REMEMBERED(device, strncpy(name, cache.device[device].name, (size_t)length);
                   name[length - 1] = 0; answer = CUDA_SUCCESS)
    ASK(REAL(cuDeviceGetName)(name, length, device));
}

CUresult wrap_cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    if (uuid)
        REMEMBERED(device, *uuid = cache.device[device].uuid; answer = CUDA_SUCCESS)
    ASK(REAL(cuDeviceGetUuid)(uuid, device));
}

CUresult wrap_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    if (uuid)
        REMEMBERED(device, *uuid = cache.device[device].uuid_v2; answer = CUDA_SUCCESS)
    ASK(REAL(cuDeviceGetUuid_v2)(uuid, device));
}

CUresult wrap_cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    if (value && attribute >= 0 && attribute < ATTRIBUTES)
        REMEMBERED(device, answer = cache.device[device].attribute_error[attribute];
                   if (!answer) *value = cache.device[device].attribute[attribute])
    ASK(REAL(cuDeviceGetAttribute)(value, attribute, device));
}

CUresult wrap_cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    if (major && minor)
        REMEMBERED(device, *major = cache.device[device].major;
                   *minor = cache.device[device].minor; answer = CUDA_SUCCESS)
    ASK(REAL(cuDeviceComputeCapability)(major, minor, device));
}

void cached_fork(enum fork_when when)
{
    if (when == FORK_PREPARE)
        pthread_rwlock_wrlock(&lock);
    else if (when == FORK_PARENT)
        pthread_rwlock_unlock(&lock);
    else /* glibc stores the thread id of a write lock's holder. The thread has another id in the
          * child, so the child cannot unlock the lock and makes a new one */
        lock = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
}
