/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * How the runtime finds the driver; the current device; the errors.
 */
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct driver_calls drv;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int start_result = -1;
static CUcontext primary[DEVICES];
static __thread int current;
static __thread cudaError last;
static cudaError unseen;      /* the error of a kernel that cannot run here; shared by all threads,
                               * because any thread may copy the kernel's results */
static __thread bool my_unseen; /* this thread has launched such a kernel */

/* The name of an export table that only the emulated driver has; see export.c. */
static const char emulated[16] = "emucuda: devices";

cudaError noted(cudaError error)
{
    if (error && error != CUDA_ERROR_NOT_READY)
        last = error;
    return error;
}

cudaError not_run(cudaError error)
{
    my_unseen = true;
    __atomic_store_n(&unseen, error, __ATOMIC_SEQ_CST);
    return noted(error);
}

static void asked(void)
{
    if (my_unseen)
        __atomic_store_n(&unseen, CUDA_SUCCESS, __ATOMIC_SEQ_CST);
    my_unseen = false;
}

cudaError unasked(void)
{
    return __atomic_exchange_n(&unseen, CUDA_SUCCESS, __ATOMIC_SEQ_CST);
}

void say(const char *name, const char *why)
{
    static const char *told[256];
    static unsigned count;
    pthread_mutex_lock(&lock);
    bool known = false;
    for (unsigned i = 0; i < count && !known; i++)
        known = !strcmp(told[i], name);
    if (!known && count < sizeof told / sizeof *told)
        told[count++] = name;
    pthread_mutex_unlock(&lock);
    if (!known)
        fprintf(stderr, "emucuda: %s %s\n", name, why);
}

static CUresult missing(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static cudaError load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library)
        *(void **)&drv.find = dlsym(library, "cuGetProcAddress_v2");
    if (!drv.find)
        return cudaErrorInsufficientDriver;
#define FIND(name, parameters)                                                      \
    if (drv.find(#name, (void **)&drv.name, 12040, 0, NULL) || !drv.name)           \
        drv.name = (CUresult(*) parameters)(void *)missing;
    DRIVER(FIND)
    return CUDA_SUCCESS;
}

static cudaError start(void)
{
    const void *table = NULL;
    cudaError error = load();
    if (error)
        return error;
    /* This runtime works only with the emulated driver. For a real driver there is NVIDIA's own
     * runtime. */
    if (drv.cuGetExportTable(&table, emulated) || !table) {
        say("libcudart", "found a driver that is not emulated; use NVIDIA's runtime there.");
        return cudaErrorInsufficientDriver;
    }
    error = drv.cuInit(0);
    if (!error)
        error = drv.cuDeviceGetCount(&drv.count);
    return error;
}

cudaError started(void)
{
    int error = __atomic_load_n(&start_result, __ATOMIC_ACQUIRE);
    if (error >= 0)
        return error;
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (start_result < 0)
        /* The result never changes, even if it is an error, as in NVIDIA's runtime. */
        __atomic_store_n(&start_result, start(), __ATOMIC_RELEASE);
    pthread_mutex_unlock(&once);
    return start_result;
}

int device_now(void)
{
    CUcontext c = NULL;
    int device = current;
    if (!drv.cuCtxGetCurrent(&c) && c)
        drv.cuCtxGetDevice(&device);
    return device;
}

CUcontext primary_of(int d) { return __atomic_load_n(&primary[d], __ATOMIC_ACQUIRE); }

cudaError enter_device(int d)
{
    if (d < 0 || d >= drv.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!primary_of(d)) {
        CUcontext c = NULL;
        CUresult result = CUDA_SUCCESS;
        pthread_mutex_lock(&lock);
        if (!primary[d] && !(result = drv.cuDevicePrimaryCtxRetain(&c, d)))
            __atomic_store_n(&primary[d], c, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&lock);
        if (result)
            return result;
    }
    return drv.cuCtxSetCurrent(primary_of(d));
}

cudaError ready(void)
{
    CUcontext c = NULL;
    cudaError error = started();
    if (error)
        return error;
    if (!drv.cuCtxGetCurrent(&c) && c)
        return CUDA_SUCCESS;
    return enter_device(current);
}

EXPORT cudaError cudaGetLastError(void)
{
    cudaError error = last;
    last = CUDA_SUCCESS;
    asked();
    return error;
}

EXPORT cudaError cudaPeekAtLastError(void)
{
    asked();
    return last;
}

static const struct {
    cudaError error;
    const char *name, *text;
} own_errors[] = { /* errors of the runtime that have no number in the driver */
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "the emulated driver is not loaded"},
    {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "__global__ function call is not configured"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
};

static const char *described(cudaError error, bool name)
{
    const char *text = NULL;
    for (unsigned i = 0; i < sizeof own_errors / sizeof *own_errors; i++)
        if (own_errors[i].error == error)
            return name ? own_errors[i].name : own_errors[i].text;
    started();
    if (drv.cuGetErrorName && (name ? drv.cuGetErrorName : drv.cuGetErrorString)(error, &text))
        text = NULL;
    return text ? text : "unrecognized error code";
}

EXPORT const char *cudaGetErrorName(cudaError error) { return described(error, true); }
EXPORT const char *cudaGetErrorString(cudaError error) { return described(error, false); }

EXPORT cudaError cudaRuntimeGetVersion(int *version)
{
    *version = RUNTIME == 12 ? 12080 : 13000;
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaDriverGetVersion(int *version)
{
    *version = 0;
    started();
    return drv.cuDriverGetVersion ? noted(drv.cuDriverGetVersion(version)) : CUDA_SUCCESS;
}

EXPORT cudaError cudaGetDeviceCount(int *count)
{
    *count = 0;
    STARTED;
    *count = drv.count;
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaGetDevice(int *device)
{
    STARTED;
    *device = device_now();
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaSetDevice(int device)
{
    STARTED;
    cudaError error = enter_device(device); /* since CUDA 12 this call makes the context */
    if (!error)
        current = device;
    return noted(error);
}

EXPORT cudaError cudaDeviceReset(void)
{
    STARTED;
    int device = device_now();
    pthread_mutex_lock(&lock);
    __atomic_store_n(&primary[device], NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    cudaError error = drv.cuDevicePrimaryCtxReset(device);
    drv.cuCtxSetCurrent(NULL);
    return noted(error);
}

static cudaError entry_point(const char *name, void **out, int version, uint64_t flags, int *found)
{
    STARTED;
    int status = PROC_NOT_FOUND;
    CUresult result = drv.find(name, out, version, flags, &status);
    if (found)
        *found = status;
    return noted(result);
}

EXPORT cudaError cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                                  unsigned long long flags, int *found)
{
    return entry_point(name, out, (int)version, flags, found);
}

EXPORT cudaError cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *found)
{
    return entry_point(name, out, RUNTIME == 12 ? 12080 : 13000, flags, found);
}

EXPORT cudaError cudaProfilerStart(void) { return CUDA_SUCCESS; }
EXPORT cudaError cudaProfilerStop(void) { return CUDA_SUCCESS; }
