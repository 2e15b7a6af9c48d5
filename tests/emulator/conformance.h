/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What the cases of conformance.c stand on: the driver's entry points, target processes driven
 * over pipes, and TAP output.
 */
#ifndef GPUPOOL_CONFORMANCE_H
#define GPUPOOL_CONFORMANCE_H

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

/* ---- the driver ---- */

struct copy2d {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray;
    size_t dstPitch, WidthInBytes, Height;
};
struct prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    char flags[8];
};
struct access {
    int location_type, location_id, flags;
};
struct copy3d {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    int srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    int dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
};
struct alloc_node {
    int alloc_type, handle_types, location_type, location_id;
    void *security;
    size_t max_size;
    char rest[56];
    const void *access;
    size_t access_count, bytes;
    uint64_t address;
};
struct pool_props {
    int alloc_type, handle_types, location_type, location_id;
    void *security;
    size_t max_size;
    char rest[56];
};
struct kernel_node {
    void *function;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    void *kernel, *context;
};
struct set_node {
    uint64_t to;
    size_t pitch;
    unsigned value, unit;
    size_t width, height;
};
struct handle { /* of memory, an event, a pointer of a pool */
    unsigned char bytes[64];
};
struct shape {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};
struct resource {
    int type;
    unsigned char rest[140];
};
struct host_node {
    void (*function)(void *);
    void *data;
};

#define CALLS(X)                                                                                   \
    X(cuInit, (unsigned)) X(cuDriverGetVersion, (int *))                                           \
    X(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *))                          \
    X(cuGetErrorName, (int, const char **)) X(cuGetErrorString, (int, const char **))              \
    X(cuDeviceGet, (int *, int)) X(cuDeviceGetCount, (int *)) X(cuDeviceGetName, (char *, int, int)) \
    X(cuDeviceGetUuid_v2, (unsigned char *, int)) X(cuDeviceTotalMem_v2, (size_t *, int))          \
    X(cuDeviceGetAttribute, (int *, int, int)) X(cuDeviceGetPCIBusId, (char *, int, int))          \
    X(cuDevicePrimaryCtxRetain, (void **, int)) X(cuCtxSetCurrent, (void *))                       \
    X(cuCtxSynchronize, (void)) X(cuMemAlloc_v2, (uint64_t *, size_t)) X(cuMemFree_v2, (uint64_t)) \
    X(cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned))                        \
    X(cuMemAllocManaged, (uint64_t *, size_t, unsigned)) X(cuMemGetInfo_v2, (size_t *, size_t *))  \
    X(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t)) X(cuMemcpyDtoH_v2, (void *, uint64_t, size_t)) \
    X(cuMemcpyDtoD_v2, (uint64_t, uint64_t, size_t)) X(cuMemcpy, (uint64_t, uint64_t, size_t))     \
    X(cuMemcpy2D_v2, (const struct copy2d *)) X(cuMemsetD8_v2, (uint64_t, unsigned char, size_t))  \
    X(cuMemsetD16_v2, (uint64_t, unsigned short, size_t)) X(cuMemsetD32_v2, (uint64_t, unsigned, size_t)) \
    X(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *)) X(cuMemHostAlloc, (void **, size_t, unsigned)) \
    X(cuMemFreeHost, (void *)) X(cuMemHostGetDevicePointer_v2, (uint64_t *, void *, unsigned))     \
    X(cuPointerGetAttribute, (void *, int, uint64_t)) X(cuStreamCreate, (void **, unsigned))       \
    X(cuStreamDestroy_v2, (void *)) X(cuStreamQuery, (void *)) X(cuStreamSynchronize, (void *))    \
    X(cuEventCreate, (void **, unsigned)) X(cuEventDestroy_v2, (void *)) X(cuEventRecord, (void *, void *)) \
    X(cuEventQuery, (void *)) X(cuEventSynchronize, (void *)) X(cuEventElapsedTime, (float *, void *, void *)) \
    X(cuModuleLoadData, (void **, const void *)) X(cuModuleGetFunction, (void **, void *, const char *)) \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)) \
    X(cuDeviceGetDefaultMemPool, (void **, int)) X(cuMemPoolGetAttribute, (void *, int, void *))   \
    X(cuMemPoolTrimTo, (void *, size_t)) X(cuMemAllocAsync, (uint64_t *, size_t, void *))          \
    X(cuMemFreeAsync, (uint64_t, void *))                                                          \
    X(cuMemGetAllocationGranularity, (size_t *, const struct prop *, int))                         \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))             \
    X(cuMemAddressFree, (uint64_t, size_t))                                                        \
    X(cuMemCreate, (uint64_t *, size_t, const struct prop *, unsigned long long))                  \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long)) X(cuMemUnmap, (uint64_t, size_t)) \
    X(cuMemSetAccess, (uint64_t, size_t, const struct access *, size_t)) X(cuMemRelease, (uint64_t)) \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *)) X(cuCtxGetCurrent, (void **))       \
    X(cuGraphCreate, (void **, unsigned)) X(cuGraphDestroy, (void *))                              \
    X(cuGraphAddEmptyNode, (void **, void *, void *const *, size_t))                               \
    X(cuGraphAddKernelNode_v2, (void **, void *, void *const *, size_t, const struct kernel_node *)) \
    X(cuGraphAddMemcpyNode, (void **, void *, void *const *, size_t, const struct copy3d *, void *)) \
    X(cuGraphAddMemsetNode, (void **, void *, void *const *, size_t, const struct set_node *, void *)) \
    X(cuGraphAddHostNode, (void **, void *, void *const *, size_t, const struct host_node *))      \
    X(cuGraphAddChildGraphNode, (void **, void *, void *const *, size_t, void *))                  \
    X(cuGraphAddMemAllocNode, (void **, void *, void *const *, size_t, struct alloc_node *))       \
    X(cuGraphAddMemFreeNode, (void **, void *, void *const *, size_t, uint64_t))                   \
    X(cuGraphNodeGetType, (void *, int *)) X(cuGraphGetNodes, (void *, void **, size_t *))         \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                          \
    X(cuGraphUpload, (void *, void *)) X(cuGraphLaunch, (void *, void *)) X(cuGraphExecDestroy, (void *)) \
    X(cuDeviceGetGraphMemAttribute, (int, int, void *)) X(cuDeviceGraphMemTrim, (int))             \
    X(cuStreamBeginCapture_v2, (void *, int)) X(cuStreamEndCapture, (void *, void **))             \
    X(cuStreamIsCapturing, (void *, int *))                                                        \
    X(cuStreamGetCaptureInfo_v2, (void *, int *, uint64_t *, void **, const void **, size_t *))    \
    X(cuMipmappedArrayCreate, (void **, const struct shape *, unsigned)) X(cuMipmappedArrayDestroy, (void *)) \
    X(cuMipmappedArrayGetLevel, (void **, void *, unsigned)) X(cuArrayDestroy, (void *))           \
    X(cuArray3DGetDescriptor_v2, (struct shape *, void *))                                         \
    X(cuIpcGetMemHandle, (struct handle *, uint64_t)) X(cuIpcCloseMemHandle, (uint64_t))           \
    X(cuIpcOpenMemHandle_v2, (uint64_t *, struct handle, unsigned))                                \
    X(cuIpcGetEventHandle, (struct handle *, void *))                                              \
    X(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))                   \
    X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                                   \
    X(cuMemPoolCreate, (void **, const struct pool_props *)) X(cuMemPoolDestroy, (void *))         \
    X(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *))                               \
    X(cuMemPoolExportToShareableHandle, (void *, void *, int, unsigned long long))                 \
    X(cuMemPoolImportFromShareableHandle, (void **, void *, int, unsigned long long))              \
    X(cuMemPoolExportPointer, (struct handle *, uint64_t))                                         \
    X(cuMemPoolImportPointer, (uint64_t *, void *, struct handle *))                               \
    X(cuDeviceGetDevResource, (int, struct resource *, int))                                       \
    X(cuDevResourceGenerateDesc, (void **, struct resource *, unsigned))                           \
    X(cuGreenCtxCreate, (void **, void *, int, unsigned)) X(cuGreenCtxDestroy, (void *))           \
    X(cuCtxFromGreenCtx, (void **, void *))                                                        \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned)) X(cuMemHostUnregister, (void *))           \
    X(cuCheckpointProcessGetState, (int, int *)) X(cuCheckpointProcessGetRestoreThreadId, (int, int *)) \
    X(cuCheckpointProcessLock, (int, void *)) X(cuCheckpointProcessCheckpoint, (int, void *))      \
    X(cuCheckpointProcessRestore, (int, void *)) X(cuCheckpointProcessUnlock, (int, void *))

#define DECLARE(name, args) static int(*name) args;
CALLS(DECLARE)

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("Bail out! %s\n", dlerror());
        exit(2);
    }
#define LOAD(name, args)                                        \
    *(void **)&name = dlsym(library, #name);                    \
    if (!name) {                                                \
        printf("Bail out! the driver has no %s\n", #name);      \
        exit(2);                                                \
    }
    CALLS(LOAD)
}

/* ---- TAP ---- */

struct test {
    const char *name;
    void (*run)(void);
};
extern const struct test tests[];
static int failures;
static const char *skipped;

#define IS(got, want)                                                                             \
    do {                                                                                          \
        long long got_ = (long long)(got), want_ = (long long)(want);                             \
        if (got_ != want_) {                                                                      \
            printf("# line %d: %s is %lld, not %lld\n", __LINE__, #got, got_, want_);             \
            failures++;                                                                           \
        }                                                                                         \
    } while (0)
#define OK(call) IS(call, 0)
#define CHECK(condition)                                             \
    do {                                                             \
        if (!(condition)) {                                          \
            printf("# line %d: not %s\n", __LINE__, #condition);     \
            failures++;                                              \
        }                                                            \
    } while (0)

static void skip(const char *why) { skipped = why; }

/* ---- kernels: PTX that a real driver compiles ---- */

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry gpupool_spin_ns(.param .u64 ns)\n{\n"
    " .reg .pred %q; .reg .b64 %d<4>;\n ld.param.u64 %d0, [ns]; mov.u64 %d1, %globaltimer;\n"
    "L: mov.u64 %d2, %globaltimer; sub.u64 %d3, %d2, %d1; setp.lt.u64 %q, %d3, %d0; @%q bra L; ret;\n}\n"
    ".visible .entry gpupool_add_u32(.param .u64 p, .param .u64 n, .param .u32 v)\n{\n"
    " .reg .pred %q; .reg .b32 %r<6>; .reg .b64 %d<6>;\n"
    " mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %nctaid.x;\n"
    " mul.wide.u32 %d3, %r0, %r1; cvt.u64.u32 %d4, %r2; add.u64 %d3, %d3, %d4; mul.wide.u32 %d4, %r3, %r1;\n"
    " ld.param.u64 %d0, [p]; cvta.to.global.u64 %d0, %d0; ld.param.u64 %d1, [n]; ld.param.u32 %r4, [v];\n"
    "L: setp.ge.u64 %q, %d3, %d1; @%q bra E; shl.b64 %d5, %d3, 2; add.u64 %d5, %d5, %d0;\n"
    " ld.global.u32 %r5, [%d5]; add.u32 %r5, %r5, %r4; st.global.u32 [%d5], %r5; add.u64 %d3, %d3, %d4; bra L;\n"
    "E: ret;\n}\n";

static void *kernel(const char *name)
{
    static void *module;
    void *function = NULL;
    if (!module && cuModuleLoadData(&module, ptx))
        return NULL;
    cuModuleGetFunction(&function, module, name);
    return function;
}

static void *add_kernel(void) { return kernel("gpupool_add_u32"); }

static int spin(void *stream, uint64_t ns)
{
    void *params[] = {&ns};
    return cuLaunchKernel(kernel("gpupool_spin_ns"), 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static int open_context(void)
{
    void *context = NULL;
    int result = cuInit(0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&context, 0);
    return result ? result : cuCtxSetCurrent(context);
}

static void *current_context(void)
{
    void *context = NULL;
    cuCtxGetCurrent(&context);
    return context;
}

static size_t free_memory(void)
{
    size_t free = 0, total = 0;
    cuMemGetInfo_v2(&free, &total);
    return free;
}

/* ---- targets: this program again, obeying one line at a time ---- */

struct child {
    pid_t pid;
    int in, out;
};

static uint64_t target_memory;
static size_t target_bytes;

static uint32_t pattern(size_t i) { return (uint32_t)(i * 2654435761u + 12345); }

static int target_alloc(size_t mib)
{
    int result = open_context();
    if (result)
        return result;
    uint64_t p = 0;
    size_t bytes = mib * MIB;
    uint32_t *host = malloc(bytes);
    result = cuMemAlloc_v2(&p, bytes);
    for (size_t i = 0; i < bytes / 4; i++)
        host[i] = pattern(i);
    if (!result)
        result = cuMemcpyHtoD_v2(p, host, bytes);
    free(host);
    if (!target_memory) {
        target_memory = p;
        target_bytes = bytes;
    }
    return result;
}

/* What another process shares, as text in the environment. */
static struct handle target_handle(void)
{
    struct handle h = {{0}};
    const char *text = getenv("GPUPOOL_HANDLE");
    for (unsigned i = 0; text && i < sizeof h && text[2 * i]; i++) {
        char two[3] = {text[2 * i], text[2 * i + 1], 0};
        h.bytes[i] = (unsigned char)strtoul(two, NULL, 16);
    }
    return h;
}

static int target_import(const char *how, int fd)
{
    void *pool = NULL, *from = (void *)(intptr_t)fd;
    struct handle handle = target_handle();
    struct access access = {1, 0, 3};
    uint64_t shared = 0;
    int result = open_context();
    target_bytes = 2 * MIB;
    if (result)
        return result;
    if (!strcmp(how, "ipc"))
        return cuIpcOpenMemHandle_v2(&target_memory, handle, 1);
    if (!strcmp(how, "pool")) {
        result = cuMemPoolImportFromShareableHandle(&pool, from, 1, 0);
        return result ? result : cuMemPoolImportPointer(&target_memory, pool, &handle);
    }
    result = cuMemImportFromShareableHandle(&shared, from, 1);
    if (!result)
        result = cuMemAddressReserve(&target_memory, target_bytes, 0, 0, 0);
    if (!result)
        result = cuMemMap(target_memory, target_bytes, 0, shared, 0);
    return result ? result : cuMemSetAccess(target_memory, target_bytes, &access, 1);
}

static int target_export(void)
{
    struct handle handle;
    return cuIpcGetMemHandle(&handle, target_memory);
}

/* The memory of a launched graph that does not free it. */
static void *target_run;

static int target_graph(size_t mib)
{
    void *graph = NULL, *node = NULL;
    struct alloc_node alloc = {.alloc_type = 1, .location_type = 1, .bytes = mib * MIB};
    uint32_t *host = malloc(alloc.bytes);
    for (size_t i = 0; i < alloc.bytes / 4; i++)
        host[i] = pattern(i);
    int result = open_context();
    if (!result)
        result = cuGraphCreate(&graph, 0);
    if (!result)
        result = cuGraphAddMemAllocNode(&node, graph, NULL, 0, &alloc);
    if (!result)
        result = cuGraphInstantiateWithFlags(&target_run, graph, 0);
    if (!result)
        result = cuGraphLaunch(target_run, NULL);
    if (!result)
        result = cuMemcpyHtoD_v2(alloc.address, host, alloc.bytes);
    free(host);
    target_memory = alloc.address;
    target_bytes = alloc.bytes;
    return result;
}

static int target_relaunch(void)
{
    int result = cuMemFree_v2(target_memory);
    return result ? result : cuGraphLaunch(target_run, NULL);
}

static int target_verify(void)
{
    uint32_t *host = calloc(1, target_bytes);
    int result = cuMemcpyDtoH_v2(host, target_memory, target_bytes);
    for (size_t i = 0; i < target_bytes / 4 && !result; i++)
        if (host[i] != pattern(i))
            result = -1;
    free(host);
    return result;
}

static int target_event(void)
{
    void *event = NULL;
    int result = cuEventCreate(&event, 0);
    if (!result)
        result = cuEventRecord(event, NULL);
    return result ? result : cuEventSynchronize(event);
}

static int obey(const char *word, size_t number)
{
    uint64_t p;
    char text[24];
    if (!strcmp(word, "init"))
        return cuInit(0);
    if (!strcmp(word, "show")) {
        snprintf(text, sizeof text, "%zu", number);
        return setenv("CUDA_VISIBLE_DEVICES", text, 1);
    }
    if (!strcmp(word, "alloc"))
        return target_alloc(number);
    if (!strcmp(word, "ipc") || !strcmp(word, "pool") || !strcmp(word, "vmm"))
        return target_import(word, (int)number);
    if (!strcmp(word, "export"))
        return target_export();
    if (!strcmp(word, "close"))
        return cuIpcCloseMemHandle(target_memory);
    if (!strcmp(word, "graph"))
        return target_graph(number);
    if (!strcmp(word, "relaunch"))
        return target_relaunch();
    if (!strcmp(word, "hold"))
        return cuMemAlloc_v2(&p, number * MIB);
    if (!strcmp(word, "verify"))
        return target_verify();
    if (!strcmp(word, "spin"))
        return spin(NULL, number * 1000000ull);
    if (!strcmp(word, "event"))
        return target_event();
    if (!strcmp(word, "query"))
        return cuStreamQuery(NULL);
    if (!strcmp(word, "managed"))
        return cuMemAllocManaged(&p, MIB, 1);
    return strcmp(word, "sync") ? -2 : cuCtxSynchronize();
}

static int target_main(void)
{
    char line[100], word[20];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (fgets(line, sizeof line, stdin)) {
        size_t number = 0;
        if (sscanf(line, "%19s %zu", word, &number) < 1)
            continue;
        printf("%d\n", obey(word, number));
        fflush(stdout);
    }
    return 0;
}

static struct child start(const char *variable)
{
    int in[2], out[2];
    if (pipe(in) || pipe(out))
        exit(2);
    fflush(stdout);
    struct child c = {fork(), in[1], out[0]};
    if (!c.pid) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        close(in[1]);
        close(out[0]);
        if (variable)
            putenv((char *)(uintptr_t)variable);
        execl("/proc/self/exe", "conformance", "--target", NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    return c;
}

static void tell(struct child *c, const char *command)
{
    if (dprintf(c->in, "%s\n", command) < 0)
        exit(2);
}

static bool answers_within(struct child *c, int ms)
{
    struct pollfd p = {c->out, POLLIN, 0};
    return poll(&p, 1, ms) > 0;
}

static int answer(struct child *c)
{
    char line[32] = "";
    if (!answers_within(c, 60000))
        return -1000;
    for (size_t n = 0; n < sizeof line - 1 && read(c->out, line + n, 1) == 1 && line[n] != '\n';)
        n++;
    return *line ? atoi(line) : -1001;
}

static int ask(struct child *c, const char *command)
{
    tell(c, command);
    return answer(c);
}

static void end(struct child *c)
{
    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    close(c->in);
    close(c->out);
}

static int signal_of(struct child *c)
{
    int status = 0;
    close(c->in);
    waitpid(c->pid, &status, 0);
    close(c->out);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static int op(struct child *c, char which, unsigned timeout_ms)
{
    uint32_t args[16] = {0};
    int state;
    switch (which) {
    case 'l':
        args[0] = timeout_ms;
        return cuCheckpointProcessLock(c->pid, args);
    case 'c': return cuCheckpointProcessCheckpoint(c->pid, args);
    case 'r': return cuCheckpointProcessRestore(c->pid, args);
    case 'u': return cuCheckpointProcessUnlock(c->pid, args);
    default: return cuCheckpointProcessGetState(c->pid, &state);
    }
}

static int state(struct child *c)
{
    int state = -1, result = cuCheckpointProcessGetState(c->pid, &state);
    return result ? -result : state;
}

static int thread_id(struct child *c)
{
    int tid = -1;
    return cuCheckpointProcessGetRestoreThreadId(c->pid, &tid) ? -1 : tid;
}

/* Restores with every device replaced by the next one; `count` pairs are passed. */
static int restore_elsewhere(struct child *c, int count)
{
    unsigned char pairs[64][2][16];
    struct {
        void *pairs;
        unsigned count;
        char rest[52];
    } args;
    int total = 0;
    memset(&args, 0, sizeof args);
    cuDeviceGetCount(&total);
    for (int i = 0; i < count; i++) {
        cuDeviceGetUuid_v2(pairs[i][0], i);
        cuDeviceGetUuid_v2(pairs[i][1], (i + 1) % total);
    }
    args.pairs = pairs;
    args.count = (unsigned)count;
    return cuCheckpointProcessRestore(c->pid, &args);
}

/* Makes the call in a process of its own, which has no context and may be killed. */
static pid_t fork_op(struct child *c, char which, unsigned timeout_ms)
{
    pid_t pid = fork();
    if (!pid) {
        char target[20], timeout[20], name[2] = {which, 0};
        snprintf(target, sizeof target, "%d", (int)c->pid);
        snprintf(timeout, sizeof timeout, "%u", timeout_ms);
        execl("/proc/self/exe", "conformance", "--op", name, target, timeout, NULL);
        _exit(127);
    }
    return pid;
}

static bool ends_within(pid_t pid, int ms)
{
    for (int i = 0; i < ms / 10; i++) {
        siginfo_t info = {0};
        if (!waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) && info.si_pid)
            return true;
        usleep(10000);
    }
    return false;
}

static void run_case(const struct test *t, int number)
{
    int before = failures;
    skipped = NULL;
    t->run();
    if (failures != before)
        printf("not ok %d - %s\n", number, t->name);
    else if (skipped)
        printf("ok %d - %s # SKIP %s\n", number, t->name, skipped);
    else
        printf("ok %d - %s\n", number, t->name);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    load_driver();
    if (argc > 1 && !strcmp(argv[1], "--target"))
        return target_main();
    if (argc == 5 && !strcmp(argv[1], "--op")) {
        struct child c = {atoi(argv[3]), -1, -1};
        cuInit(0);
        return op(&c, *argv[2], (unsigned)atoi(argv[4])) != 0;
    }
    signal(SIGPIPE, SIG_IGN);
    OK(cuInit(0));
    int number = 0, failed = 0;
    bool context = false;
    for (const struct test *t = tests; t->name; t++) {
        bool leave_out = false;
        for (int i = 1; i < argc; i++)
            leave_out = leave_out || !strcmp(argv[i], t->name);
        number++;
        if (leave_out) {
            printf("ok %d - %s # SKIP by request\n", number, t->name);
            continue;
        }
        if (!context && !strcmp(t->name, "copies")) { /* the cases before it want none */
            OK(open_context());
            context = true;
        }
        int before = failures;
        run_case(t, number);
        failed += failures != before;
    }
    printf("1..%d\n# %d of %d cases failed\n", number, failed, number);
    return failures != 0;
}

#endif
