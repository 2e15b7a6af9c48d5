/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Cases of conformance.c about memory that other processes share, arrays, and host memory.
 */
#ifndef CONFORMANCE_SHARING_H
#define CONFORMANCE_SHARING_H

#include "conformance.h"

static void put_pattern(uint64_t p, size_t bytes)
{
    uint32_t *host = malloc(bytes);
    for (size_t i = 0; i < bytes / 4; i++)
        host[i] = pattern(i);
    OK(cuMemcpyHtoD_v2(p, host, bytes));
    free(host);
}

static struct child start_with(const struct handle *handle)
{
    static char variable[160];
    size_t at = (size_t)sprintf(variable, "CONFORMANCE_HANDLE=");
    for (unsigned i = 0; i < sizeof *handle; i++)
        at += (size_t)sprintf(variable + at, "%02x", handle->bytes[i]);
    return start(variable);
}

static void case_ipc(void)
{
    struct handle handle;
    uint64_t p = 0, other = 0;
    OK(cuMemAlloc_v2(&p, 2 * MIB));
    put_pattern(p, 2 * MIB);
    OK(cuIpcGetMemHandle(&handle, p));
    IS(cuIpcOpenMemHandle_v2(&other, handle, 1), 201); /* allowed only in another process */
    struct child c = start_with(&handle);
    IS(ask(&c, "ipc"), 0);
    IS(ask(&c, "verify"), 0);
    IS(ask(&c, "ipc-again"), 0);
    IS(ask(&c, "close"), 0);
    IS(ask(&c, "verify"), 0); /* the handle was opened twice */
    IS(ask(&c, "close"), 0);
    CHECK(ask(&c, "verify") != 0);
    end(&c);
    OK(cuMemFree_v2(p));
}

static void case_ipc_event(void)
{
    struct handle handle;
    void *event = NULL, *other = NULL, *stream = NULL;
    OK(cuStreamCreate(&stream, 1));
    OK(cuEventCreate(&event, 6)); /* flags: without timing, for other processes */
    OK(cuIpcGetEventHandle(&handle, event));
    IS(cuIpcOpenEventHandle(&other, handle), 201); /* allowed only in another process */
    struct child c = start_with(&handle);
    IS(ask(&c, "query-event"), 0);
    IS(ask(&c, "record-event"), 0);
    IS(cuEventQuery(event), 600);
    OK(cuEventRecord(event, stream));
    OK(cuStreamSynchronize(stream));
    IS(ask(&c, "query-event"), 0);
    end(&c);
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
}

static void case_shared_vmm(void)
{
    struct prop prop = {.type = 1, .location_type = 1, .handle_types = 1};
    struct access access = {1, 0, 3};
    uint64_t handle = 0, again = 0, va = 0;
    char command[20];
    int fd = -1;
    OK(cuMemCreate(&handle, 2 * MIB, &prop, 0));
    OK(cuMemAddressReserve(&va, 2 * MIB, 0, 0, 0));
    OK(cuMemMap(va, 2 * MIB, 0, handle, 0));
    OK(cuMemSetAccess(va, 2 * MIB, &access, 1));
    put_pattern(va, 2 * MIB);
    OK(cuMemExportToShareableHandle(&fd, handle, 1, 0));
    OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, 1)); /* also in this process */
    OK(cuMemRelease(again));
    int copy = dup(fd); /* a descriptor that a child inherits */
    struct child c = start(NULL);
    sprintf(command, "vmm %d", copy);
    IS(ask(&c, command), 0);
    IS(ask(&c, "verify"), 0);
    end(&c);
    close(copy);
    close(fd);
    OK(cuMemUnmap(va, 2 * MIB));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(va, 2 * MIB));
}

static void case_shared_pool(void)
{
    struct pool_props props = {.alloc_type = 1, .handle_types = 1, .location_type = 1};
    struct handle handle;
    void *pool = NULL, *stream = NULL;
    uint64_t p = 0;
    char command[20];
    int fd = -1;
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemPoolCreate(&pool, &props));
    OK(cuMemAllocFromPoolAsync(&p, 2 * MIB, pool, stream));
    OK(cuStreamSynchronize(stream));
    put_pattern(p, 2 * MIB);
    OK(cuMemPoolExportToShareableHandle(&fd, pool, 1, 0));
    OK(cuMemPoolExportPointer(&handle, p));
    int copy = dup(fd);
    struct child c = start_with(&handle);
    sprintf(command, "pool %d", copy);
    IS(ask(&c, command), 0);
    IS(ask(&c, "verify"), 0);
    end(&c);
    close(copy);
    close(fd);
    OK(cuMemFreeAsync(p, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuMemPoolDestroy(pool));
    OK(cuStreamDestroy_v2(stream));
}

/* According to reports, drivers before 610 refuse to suspend a process with exported memory. But
 * driver 580.159.04 suspends it. The case accepts both; the process must continue afterwards. */
static void case_exported_memory(void)
{
    struct child c = start(NULL);
    IS(ask(&c, "alloc 4"), 0);
    IS(ask(&c, "export"), 0);
    IS(op(&c, 'l', 5000), 0);
    int refused = op(&c, 'c', 0);
    printf("# a checkpoint of a process with exported memory returns %d\n", refused);
    if (!refused)
        IS(op(&c, 'r', 0), 0);
    IS(op(&c, 'u', 0), 0);
    IS(ask(&c, "verify"), 0);
    end(&c);
}

static void case_mipmap(void)
{
    struct shape shape = {1024, 1024, 0, 0x20, 4, 0}, level = {0};
    void *mipmap = NULL, *array = NULL;
    size_t before = free_memory();
    OK(cuMipmappedArrayCreate(&mipmap, &shape, 3));
    CHECK(before - free_memory() >= 21 * MIB); /* the levels have 16, 4 and 1 MiB */
    OK(cuMipmappedArrayGetLevel(&array, mipmap, 2));
    OK(cuArray3DGetDescriptor_v2(&level, array));
    CHECK(level.width == 256 && level.height == 256);
    CHECK(cuMipmappedArrayGetLevel(&array, mipmap, 3) != 0);
    OK(cuMipmappedArrayDestroy(mipmap));
    FREE_AGAIN(before);
}

static void case_green_context(void)
{
    struct resource all;
    void *desc = NULL, *green = NULL, *context = NULL, *event = NULL, *stream = NULL, *before = current_context();
    uint64_t p = 0;
    OK(cuDeviceGetDevResource(0, &all, 1));
    OK(cuDevResourceGenerateDesc(&desc, &all, 1));
    OK(cuGreenCtxCreate(&green, desc, 0, 1));
    OK(cuCtxFromGreenCtx(&context, green));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&p, 4096));
    OK(cuMemFree_v2(p));
    OK(cuCtxSetCurrent(before));
    /* An event of the primary context, in a stream of the green context. */
    OK(cuEventCreate(&event, 0));
    OK(cuGreenCtxStreamCreate(&stream, green, 1, 0));
    OK(cuEventRecord(event, stream));
    OK(cuEventSynchronize(event));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
    OK(cuGreenCtxDestroy(green));
}

/* The end of a context frees its arrays and unregisters its host memory, but memory of a pool
 * stays. */
static void case_context_end(void)
{
    struct shape shape = {4096, 1024, 0, 0x20, 4, 0};
    void *context = NULL, *mipmap = NULL, *stream = NULL, *pool = NULL, *host = aligned_alloc(4096, MIB);
    void *before = current_context();
    uint64_t p = 0;
    uint32_t v = 0;
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemPoolTrimTo(pool, 0));
    size_t free_before = free_memory();
    OK(cuCtxCreate_v2(&context, 0, 0));
    OK(cuMipmappedArrayCreate(&mipmap, &shape, 1));
    OK(cuMemHostRegister_v2(host, MIB, 0));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAllocAsync(&p, 2 * MIB, stream));
    OK(cuMemsetD32Async(p, 0x01020304, 16, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuCtxDestroy_v2(context));
    OK(cuCtxSetCurrent(before));
    OK(cuMemcpyDtoH_v2(&v, p + 60, 4));
    IS(v, 0x01020304);
    OK(cuMemHostRegister_v2(host, MIB, 0));
    OK(cuMemHostUnregister(host));
    OK(cuMemFreeAsync(p, NULL));
    OK(cuCtxSynchronize());
    OK(cuMemPoolTrimTo(pool, 0));
    FREE_AGAIN(free_before);
    free(host);
}

static void case_registered_memory(void)
{
    void *host = aligned_alloc(4096, 32 * MIB);
    uint64_t device = 0;
    size_t before = free_memory();
    OK(cuMemHostRegister_v2(host, 32 * MIB, 0));
    CHECK(before - free_memory() < 16 * MIB); /* host memory takes no device memory */
    IS(cuMemHostRegister_v2(host, 32 * MIB, 0), 712);
    OK(cuMemHostGetDevicePointer_v2(&device, host, 0));
    OK(cuMemsetD32_v2(device, 0x11111111, 4));
    CHECK(*(uint32_t *)host == 0x11111111);
    OK(cuMemHostUnregister(host));
    IS(cuMemHostUnregister(host), 713);
    free(host);
}

#endif
