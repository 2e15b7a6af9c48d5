/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * A driver with behaviour that is allowed but that the emulated driver does not have. Its
 * cuGetProcAddress returns functions that differ from the exported ones, newer forms of calls, and
 * hundreds of unknown calls. It prints each request to standard output.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { EXPORTED = 0x1000, INNER = 0x2000 };

/* 300 functions that return 1000, 1001, ... */
__asm__(".pushsection .text\n"
        ".balign 16\n"
        "future:\n"
        ".set n, 0\n"
        ".rept 300\n"
        "  movl $(1000 + n), %eax\n"
        "  ret\n"
        ".balign 16\n"
        "  .set n, n + 1\n"
        ".endr\n"
        ".popsection\n");
extern char future[];

static int initialised;

EXPORT int cuInit(unsigned flags)
{
    initialised = !flags;
    return flags ? 1 : 0;
}

EXPORT int cuDriverGetVersion(int *version)
{
    *version = 14000;
    return 0;
}

EXPORT int cuDeviceGetCount(int *count)
{
    *count = 1;
    return 0;
}

EXPORT int cuCtxSynchronize(void)
{
    return 0;
}

EXPORT int cuStreamSynchronize(void *stream)
{
    return stream ? EXPORTED : EXPORTED + 1;
}

static int inner_synchronise(void *stream)
{
    return stream ? INNER : INNER + 1;
}

EXPORT int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    *out = EXPORTED + bytes;
    return 0;
}

static int inner_alloc(unsigned long long *out, size_t bytes)
{
    *out = INNER + bytes;
    return 0;
}

static int inner_alloc_async(unsigned long long *out, size_t bytes, void *stream)
{
    *out = INNER + bytes + (stream ? 1 : 0);
    return 0;
}

static int inner_alloc_async_ptsz(unsigned long long *out, size_t bytes, void *stream)
{
    *out = 2 * INNER + bytes + (stream ? 1 : 0);
    return 0;
}

/* A future form of cuStreamCreate, with arguments that the guard does not know. */
static int newest_stream_create(int a, int b, int c, int d, int e, int f, int g, int h)
{
    return a + b + c + d + e + f + g + h;
}

EXPORT int cuStreamCreate(void **out, unsigned flags)
{
    *out = (void *)(uintptr_t)(EXPORTED + flags);
    return 0;
}

/* The form of cuMemAlloc before CUDA 3.2. The guard refuses this form, like every call with 32-bit
 * addresses. */
EXPORT int cuMemAlloc(unsigned *out, unsigned bytes)
{
    *out = bytes;
    return 0;
}

/* Like NVIDIA's driver, checks for cuInit before it checks the arguments. */
EXPORT int cuMemAllocManaged(unsigned long long *out, size_t bytes, unsigned flags)
{
    return !initialised ? 3 : out && bytes && flags ? 0 : 1;
}

EXPORT int cuMemCreate(unsigned long long *out, size_t bytes, const void *prop, unsigned long long flags)
{
    return !initialised ? 3 : out && bytes && prop && !flags ? 0 : 1;
}

EXPORT int cuMemPoolCreate(void **out, const void *props)
{
    return !initialised ? 3 : out && props ? 0 : 1;
}

/* Shares device memory with other devices. It fails without a handle. */
EXPORT int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t bytes, int type,
                                         unsigned long long flags)
{
    return handle && address + bytes + flags + (unsigned)type ? 0 : 1;
}

EXPORT int cuGLRegisterBufferObject(unsigned buffer)
{
    return buffer ? 0 : 1;
}

EXPORT int cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags)
{
    *out = graph;
    return (int)flags;
}

EXPORT int cuGraphInstantiate_v2(void **out, void *graph, void *node, char *log, size_t size)
{
    *out = graph;
    return node || log ? 1 : (int)size;
}

static int inner_instantiate(void **out, void *graph, void *node, char *log, size_t size)
{
    return cuGraphInstantiate_v2(out, graph, node, log, size + INNER);
}

EXPORT int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);

static void *find(const char *name, int version, uint64_t flags, int *status)
{
    int number;
    *status = 0;
    if (!strcmp(name, "cuMemAlloc"))
        return version >= 3020 ? (void *)inner_alloc : (void *)cuMemAlloc;
    if (!strcmp(name, "cuMemAllocAsync"))
        return flags == 2 ? (void *)inner_alloc_async_ptsz : (void *)inner_alloc_async;
    if (!strcmp(name, "cuStreamSynchronize"))
        return (void *)inner_synchronise;
    if (!strcmp(name, "cuStreamCreate"))
        return version > 13000 ? (void *)newest_stream_create : (void *)cuStreamCreate;
    if (!strcmp(name, "cuGraphInstantiate"))
        return version >= 14000 ? (void *)cuGraphInstantiateWithFlags : (void *)inner_instantiate;
    if (!strcmp(name, "cuGetProcAddress"))
        return version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
    if (!strcmp(name, "cuRenamed"))
        return (void *)cuStreamSynchronize;
    if (sscanf(name, "cuFuture%d", &number) == 1)
        return future + 16 * number;
    *status = !strcmp(name, "cuTooNew") ? 2 : 1;
    return NULL;
}

/* For a missing name, this returns the same as NVIDIA's drivers. */
EXPORT int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    int found;
    *out = find(name, version, flags, &found);
    if (status)
        *status = found;
    printf("five %s %d %llu\n", name, version, (unsigned long long)flags);
    fflush(stdout);
    return 0;
}

EXPORT int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    int status;
    void *found = find(name, version, flags, &status);
    printf("four %s %d %llu\n", name, version, (unsigned long long)flags);
    fflush(stdout);
    if (found)
        *out = found;
    return found ? 0 : 500;
}
