/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Device memory and events that processes share: CUDA IPC, exported VMM memory, exported pools. A
 * handle records the process that has the bytes, and their place. The importing process can map the
 * bytes as long as the exporting process lives. The exporting process is charged for the bytes.
 *
 * A process with a live export or import cannot be suspended. Real drivers before 610 have the same
 * limit (README of NVIDIA/cuda-checkpoint).
 */
#include "driver.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RECORD_MAGIC 0x67707368u

struct record {
    uint32_t magic;
    int32_t kind;
    int32_t pid;
    int32_t fd;     /* descriptor of the device's memory in that process */
    uint64_t start; /* start time of that process: after its end, another process may get its
                     * pid */
    uint32_t device; /* index in the machine */
    uint32_t unused;
    uint64_t offset, size;
};

_Static_assert(sizeof(struct record) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");

void shared_count(int change)
{
    __atomic_add_fetch(&driver.slot->shared, (uint32_t)change, __ATOMIC_ACQ_REL);
}

static struct record record_of(int kind, int device, uint64_t offset, uint64_t size)
{
    return (struct record){RECORD_MAGIC, kind, getpid(), driver.device[device].fd, driver.slot->start,
                           driver.device[device].physical, 0, offset, size};
}

static void pack(CUipcMemHandle *out, struct record r, int fd)
{
    r.fd = fd;
    memset(out, 0, sizeof *out);
    memcpy(out, &r, sizeof r);
}

void share_pack(CUipcMemHandle *out, int kind, int device, uint64_t offset, uint64_t size)
{
    pack(out, record_of(kind, device, offset, size), driver.device[device].fd);
}

CUresult share_file(int *out, int kind, int device, uint64_t offset, uint64_t size)
{
    struct record r = record_of(kind, device, offset, size);
    int fd = memfd_create("emucuda-share", MFD_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (pwrite(fd, &r, sizeof r, 0) != sizeof r) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *out = fd;
    return CUDA_SUCCESS;
}

static CUresult check(const struct record *r, int kind, struct share *out)
{
    if (r->magic != RECORD_MAGIC || r->kind != kind || process_start(r->pid) != r->start)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (struct share){.device = -1, .own = r->pid == getpid(), .offset = r->offset, .size = r->size,
                          .pid = r->pid, .fd = r->fd, .start = r->start};
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].physical == r->device)
            out->device = i;
    return out->device < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult share_unpack(const CUipcMemHandle *handle, int kind, struct share *out)
{
    struct record r;
    memcpy(&r, handle, sizeof r);
    return check(&r, kind, out);
}

CUresult share_read(int fd, int kind, struct share *out)
{
    struct record r;
    return pread(fd, &r, sizeof r, 0) == sizeof r ? check(&r, kind, out) : CUDA_ERROR_INVALID_VALUE;
}

int share_open(const struct share *share)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", share->pid, share->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* ---- CUDA IPC ---- */

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    REQUIRE(out && address);
    GATED;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find(address);
    if (a && a->address == address && a->kind == ALLOC_DEVICE) {
        share_pack(out, SHARE_IPC, a->device, a->address - driver.device[a->device].window, a->size);
        if (!a->shared)
            shared_count(1);
        a->shared = true;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    REQUIRE(out && flags <= 1);
    GATED;
    struct context *c;
    struct share share;
    CUresult result = context_current(&c);
    if (!result)
        result = share_unpack(&handle, SHARE_IPC, &share);
    if (!result && share.own)
        result = CUDA_ERROR_INVALID_CONTEXT; /* only another process may open the handle */
    if (result)
        return result;
    pthread_mutex_lock(&driver.lock);
    result = vmm_import(&share, c, out);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    return cuIpcOpenMemHandle_v2(out, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    bool found = vmm_import_close(address);
    pthread_mutex_unlock(&driver.lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- events: the processes that share an event share a page with its time ---- */

static uint64_t *time_map(int fd)
{
    void *page = mmap(NULL, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? NULL : page;
}

static CUresult event_share(struct event *e)
{
    int fd = memfd_create("emucuda-event", MFD_CLOEXEC);
    uint64_t *page = fd >= 0 && !ftruncate(fd, sizeof *page) ? time_map(fd) : NULL;
    if (!page) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *page = *e->time;
    e->time = page;
    e->fd = fd;
    e->shared = true;
    shared_count(1);
    return CUDA_SUCCESS;
}

void event_unshare(struct event *e)
{
    if (!e->shared)
        return;
    munmap(e->time, sizeof *e->time);
    if (e->fd >= 0)
        close(e->fd);
    e->time = &e->own;
    e->shared = false;
    shared_count(-1);
}

EXPORT CUresult cuIpcGetEventHandle(CUipcMemHandle *out, CUevent e)
{
    REQUIRE(out && e);
    GATED;
    if (e->magic != MAGIC_EVENT)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(e->flags & EVENT_INTERPROCESS) || (e->shared && e->fd < 0)) /* an imported event */
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = e->shared ? CUDA_SUCCESS : event_share(e);
    if (!result)
        pack(out, record_of(SHARE_EVENT, e->context->device, 0, 0), e->fd);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *out, CUipcMemHandle handle)
{
    REQUIRE(out);
    GATED;
    struct context *c;
    struct share share;
    CUresult result = context_current(&c);
    if (!result)
        result = share_unpack(&handle, SHARE_EVENT, &share);
    if (!result && share.own)
        result = CUDA_ERROR_INVALID_CONTEXT; /* only another process may open the handle */
    if (result)
        return result;
    int fd = share_open(&share);
    uint64_t *page = fd < 0 ? NULL : time_map(fd);
    if (fd >= 0)
        close(fd);
    struct event *e = page ? event_new(c, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS) : NULL;
    if (!e) {
        if (page)
            munmap(page, sizeof *page);
        return page ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    }
    e->time = page;
    e->shared = e->recorded = true;
    shared_count(1);
    *out = e;
    return CUDA_SUCCESS;
}
