/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Processes that conformance.c suspends. Each is the same program again: it reads commands, one on
 * each line.
 */
#ifndef CONFORMANCE_TARGETS_H
#define CONFORMANCE_TARGETS_H

#include "conformance_driver.h"

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- kernels: PTX that a real driver compiles ---- */

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry emucuda_spin_ns(.param .u64 ns)\n{\n"
    " .reg .pred %q; .reg .b64 %d<4>;\n ld.param.u64 %d0, [ns]; mov.u64 %d1, %globaltimer;\n"
    "L: mov.u64 %d2, %globaltimer; sub.u64 %d3, %d2, %d1; setp.lt.u64 %q, %d3, %d0; @%q bra L; ret;\n}\n"
    ".visible .entry emucuda_add_u32(.param .u64 p, .param .u64 n, .param .u32 v)\n{\n"
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

static void *add_kernel(void) { return kernel("emucuda_add_u32"); }

static int spin(void *stream, uint64_t ns)
{
    void *params[] = {&ns};
    return cuLaunchKernel(kernel("emucuda_spin_ns"), 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
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

/* ---- targets ---- */

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

/* Returns the handle that another process has exported. CONFORMANCE_HANDLE has its bytes in
 * hexadecimal. */
static struct handle target_handle(void)
{
    struct handle h = {{0}};
    const char *text = getenv("CONFORMANCE_HANDLE");
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

/* Opens the handle of "ipc" again: the address is the same. */
static int target_ipc_again(void)
{
    uint64_t again = 0;
    int result = cuIpcOpenMemHandle_v2(&again, target_handle(), 1);
    return result ? result : again == target_memory ? 0 : -5;
}

static int target_export(void)
{
    struct handle handle;
    return cuIpcGetMemHandle(&handle, target_memory);
}

/* The executable graph of a target. Its launch allocates memory and does not free it. */
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

/* Opens an event that the parent has exported. With "record-event", starts a kernel of three
 * seconds and records the event after it; otherwise, queries the event. */
static int target_shared_event(const char *how)
{
    static void *event;
    int result = event ? 0 : open_context();
    if (!event && !result)
        result = cuIpcOpenEventHandle(&event, target_handle());
    if (!result && !strcmp(how, "record-event"))
        result = spin(NULL, 3000000000ull); /* when a process ends, it waits for its kernels */
    if (!result)
        result = strcmp(how, "record-event") ? cuEventQuery(event) : cuEventRecord(event, NULL);
    return result;
}

static int target_reset(void)
{
    void *before = current_context(), *after = NULL;
    uint64_t p;
    int result = cuDevicePrimaryCtxReset_v2(0);
    if (!result)
        result = cuCtxSetCurrent(before); /* like the CUDA runtime, which also retains the
                                           * context, as below */
    if (!result)
        result = cuMemAlloc_v2(&p, MIB) ? 0 : -3;
    if (!result)
        result = cuDevicePrimaryCtxRetain(&after, 0);
    if (!result)
        result = after == before ? cuMemAlloc_v2(&p, MIB) : -4;
    return result;
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
    if (!strcmp(word, "ipc-again"))
        return target_ipc_again();
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
    if (!strcmp(word, "record-event") || !strcmp(word, "query-event"))
        return target_shared_event(word);
    if (!strcmp(word, "reset"))
        return target_reset();
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

/* Restores a process so that the next device replaces each device. Passes `count` pairs of an old
 * and a new device, from the first device on. */
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

/* Makes a checkpoint call in a new process, and returns its pid. The new process has no context.
 * The test may kill it. */
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

#endif
