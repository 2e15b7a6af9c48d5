/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Random load on a CUDA driver, from many threads at once, while another process suspends and
 * resumes this process. Every thread has its own buffers and knows what they must contain.
 *
 *     stress MODE THREADS SEED PTX-FILE
 *
 * MODE is one of four words. "all": everything. "sync": only cuStreamSynchronize and
 * cuCtxSynchronize, which do not wait for the end of a suspend. "corrupt": the program expects a
 * byte that was never written, and its checks must find this. "collect": collectors free the
 * buffers that the threads no longer need, as garbage collection does: at any time, and under a
 * lock that the other threads also need. The number of collected buffers is in the first 8 bytes of
 * the file that COLLECTED names, if it is set. The program prints "ready PID", and works until a
 * line comes on standard input. It then checks all buffers, frees them, prints "done OPERATIONS
 * CHECKS REFUSED", and ends at the end of its input. If the driver returns a result that is not
 * allowed, the program ends with status 3.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BUFFERS 8
#define GRANULE ((size_t)2 << 20)

struct prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    char flags[8];
};
struct access {
    int location_type, location_id, flags;
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
struct set_node {
    uint64_t to;
    size_t pitch;
    unsigned value, unit;
    size_t width, height;
};

/* The program finds the entry points as the CUDA runtime does. */
#define CALLS(X)                                                                                  \
    X(cuInit, (unsigned)) X(cuDevicePrimaryCtxRetain, (void **, int)) X(cuCtxSetCurrent, (void *)) \
    X(cuCtxSynchronize, (void)) X(cuMemGetInfo, (size_t *, size_t *))                             \
    X(cuMemAlloc, (uint64_t *, size_t)) X(cuMemFree, (uint64_t))                                  \
    X(cuMemAllocAsync, (uint64_t *, size_t, void *)) X(cuMemFreeAsync, (uint64_t, void *))        \
    X(cuMemCreate, (uint64_t *, size_t, const struct prop *, unsigned long long))                 \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))            \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                         \
    X(cuMemSetAccess, (uint64_t, size_t, const struct access *, size_t))                          \
    X(cuMemUnmap, (uint64_t, size_t)) X(cuMemRelease, (uint64_t)) X(cuMemAddressFree, (uint64_t, size_t)) \
    X(cuMemcpyHtoDAsync, (uint64_t, const void *, size_t, void *))                                \
    X(cuMemcpyDtoHAsync, (void *, uint64_t, size_t, void *))                                      \
    X(cuMemcpyDtoDAsync, (uint64_t, uint64_t, size_t, void *))                                    \
    X(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *))                                     \
    X(cuStreamCreate, (void **, unsigned)) X(cuStreamSynchronize, (void *)) X(cuStreamQuery, (void *)) \
    X(cuStreamDestroy, (void *)) X(cuEventCreate, (void **, unsigned)) X(cuEventDestroy, (void *)) \
    X(cuEventRecord, (void *, void *)) X(cuEventQuery, (void *)) X(cuEventSynchronize, (void *))  \
    X(cuModuleLoadData, (void **, const void *)) X(cuModuleGetFunction, (void **, void *, const char *)) \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)) \
    X(cuGraphCreate, (void **, unsigned)) X(cuGraphDestroy, (void *))                             \
    X(cuGraphAddMemsetNode, (void **, void *, void *const *, size_t, const struct set_node *, void *)) \
    X(cuGraphAddMemAllocNode, (void **, void *, void *const *, size_t, struct alloc_node *))      \
    X(cuGraphAddMemFreeNode, (void **, void *, void *const *, size_t, uint64_t))                  \
    X(cuDeviceGraphMemTrim, (int))                                                                \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                         \
    X(cuGraphLaunch, (void *, void *)) X(cuGraphExecDestroy, (void *))

#define DECLARE(name, args) static int(*name) args;
CALLS(DECLARE)

static void *context, *add, *spin;
static bool stop;
static char *mode;

static void fail(const char *what, int got)
{
    fprintf(stderr, "stress: %s: %d\n", what, got);
    fflush(stderr);
    _exit(3);
}

#define OK(call)                  \
    do {                          \
        int result_ = (call);     \
        if (result_)              \
            fail(#call, result_); \
    } while (0)

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*find)(const char *, void **, int, uint64_t, int *) = NULL;
    if (library)
        *(void **)&find = dlsym(library, "cuGetProcAddress_v2");
    if (!find)
        fail("no driver", 0);
#define LOAD(name, args) OK(find(#name, (void **)&name, 12080, 0, NULL));
    CALLS(LOAD)
}

/* ---- the work of one thread ---- */

enum kind { NONE, PLAIN, ORDERED, MAPPED };

struct buffer {
    enum kind kind;
    uint64_t at, handle;
    size_t size;      /* bytes */
    uint32_t *expect; /* the value of each element */
};

struct worker {
    pthread_t thread;
    uint64_t random;
    void *stream;
    struct buffer buffer[BUFFERS];
    uint32_t *scratch;
    uint64_t operations, checks, refused;
};

static uint64_t draw(struct worker *w, uint64_t below)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random % below;
}

/* Waits for the work of this thread, in a randomly chosen way. */
static void wait_for(struct worker *w)
{
    void *event;
    int result;
    switch (draw(w, 4)) {
    case 0:
        OK(cuStreamSynchronize(w->stream));
        return;
    case 1:
        OK(cuCtxSynchronize());
        return;
    case 2:
        while ((result = cuStreamQuery(w->stream)) == 600)
            ;
        if (result)
            fail("cuStreamQuery", result);
        return;
    default:
        OK(cuEventCreate(&event, 2));
        OK(cuEventRecord(event, w->stream));
        while ((result = cuEventQuery(event)) == 600 && draw(w, 4))
            ;
        if (result && result != 600)
            fail("cuEventQuery", result);
        OK(cuEventSynchronize(event));
        OK(cuEventDestroy(event));
    }
}

static bool allocate(struct worker *w, struct buffer *b)
{
    struct prop prop = {.type = 1, .location_type = 1};
    struct access access = {1, 0, 3};
    enum kind kind = PLAIN + draw(w, 3);
    size_t size = draw(w, 8) ? (draw(w, 64) + 1) * 4096 : (draw(w, 4) + 1) * (GRANULE / 4);
    int result;
    if (kind == MAPPED)
        size = GRANULE;
    if (kind == PLAIN)
        result = cuMemAlloc(&b->at, size);
    else if (kind == ORDERED)
        result = cuMemAllocAsync(&b->at, size, w->stream);
    else
        result = cuMemCreate(&b->handle, size, &prop, 0);
    if (result == 2) { /* out of memory is a valid answer */
        w->refused++;
        return false;
    }
    if (result)
        fail("allocation", result);
    if (kind == MAPPED) {
        OK(cuMemAddressReserve(&b->at, size, 0, 0, 0));
        OK(cuMemMap(b->at, size, 0, b->handle, 0));
        OK(cuMemSetAccess(b->at, size, &access, 1));
    }
    b->kind = kind;
    b->size = size;
    b->expect = malloc(size);
    return true;
}

/* ---- garbage collection ---- */

#define GARBAGE 4096

static struct {
    pthread_mutex_t lock;
    struct buffer at[GARBAGE];
    void *event[GARBAGE];
    size_t count;
    bool complete; /* the workers add no more garbage */
    void *stream;
    uint64_t own, *collected;
} garbage = {.lock = PTHREAD_MUTEX_INITIALIZER, .collected = &garbage.own};

static bool thrown_away(struct buffer *b)
{
    void *event;
    if (strcmp(mode, "collect"))
        return false;
    OK(cuEventCreate(&event, 2));
    pthread_mutex_lock(&garbage.lock);
    bool room = garbage.count < GARBAGE;
    if (room) {
        garbage.event[garbage.count] = event;
        garbage.at[garbage.count++] = *b;
    }
    pthread_mutex_unlock(&garbage.lock);
    if (!room)
        OK(cuEventDestroy(event));
    return room;
}

static void destroy(struct buffer *b, void *stream)
{
    if (b->kind == PLAIN) {
        OK(cuMemFree(b->at));
    } else if (b->kind == ORDERED) {
        OK(cuMemFreeAsync(b->at, stream));
    } else if (b->kind == MAPPED) {
        OK(cuMemUnmap(b->at, b->size));
        OK(cuMemRelease(b->handle));
        OK(cuMemAddressFree(b->at, b->size));
    }
}

/* The calls in this function must not wait for a lease. */
static void *collect(void *unused)
{
    (void)unused;
    for (bool over = false; !over;) {
        pthread_mutex_lock(&garbage.lock);
        over = garbage.complete && !garbage.count;
        if (garbage.count) {
            size_t last = --garbage.count;
            /* Error 600 means that the work is not ready. A query may return 600 for more than a
             * second if a suspend on a busy machine takes so long. */
            int result;
            while ((result = cuEventQuery(garbage.event[last])) == 600 ||
                   (!result && (result = cuStreamQuery(garbage.stream)) == 600))
                usleep(1000);
            if (result)
                fail("a query of a collector", result);
            destroy(&garbage.at[last], garbage.stream);
            OK(cuEventDestroy(garbage.event[last]));
            free(garbage.at[last].expect);
            __atomic_add_fetch(garbage.collected, 1, __ATOMIC_SEQ_CST);
        }
        pthread_mutex_unlock(&garbage.lock);
        usleep(200);
    }
    return NULL;
}

static void open_collected(void)
{
    const char *path = getenv("COLLECTED");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd < 0)
        return;
    void *p = mmap(NULL, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        fail("COLLECTED", 0);
    garbage.collected = p;
    close(fd);
}

/* Frees a buffer that is no longer in use. */
static void release(struct worker *w, struct buffer *b)
{
    if (b->kind != NONE && thrown_away(b)) {
        memset(b, 0, sizeof *b);
        return;
    }
    if (b->kind == MAPPED)
        OK(cuStreamSynchronize(w->stream));
    destroy(b, w->stream);
    free(b->expect);
    memset(b, 0, sizeof *b);
}

static void check(struct worker *w, struct buffer *b)
{
    OK(cuMemcpyDtoHAsync(w->scratch, b->at, b->size, w->stream));
    wait_for(w);
    if (memcmp(w->scratch, b->expect, b->size))
        fail("the bytes are not those that were written", (int)b->kind);
    w->checks++;
}

static void write_all(struct worker *w, struct buffer *b)
{
    uint32_t x = (uint32_t)draw(w, 1u << 31);
    for (size_t i = 0; i < b->size / 4; i++)
        b->expect[i] = x += 2654435761u;
    OK(cuMemcpyHtoDAsync(b->at, b->expect, b->size, w->stream));
    wait_for(w); /* the copy is complete, so the source may change from now on */
    if (!strcmp(mode, "corrupt"))
        b->expect[0] ^= 1;
}

static void launch_add(struct worker *w, struct buffer *b)
{
    uint64_t n = b->size / 4;
    uint32_t value = (uint32_t)draw(w, 1000);
    void *params[] = {&b->at, &n, &value};
    OK(cuLaunchKernel(add, 8, 1, 1, 64, 1, 1, 0, w->stream, params, NULL));
    for (size_t i = 0; i < n; i++)
        b->expect[i] += value;
}

static void set(struct buffer *b, uint32_t value)
{
    for (size_t i = 0; i < b->size / 4; i++)
        b->expect[i] = value;
}

static void by_graph(struct worker *w, struct buffer *b)
{
    void *graph, *run, *node;
    struct set_node fill = {b->at, 0, (unsigned)draw(w, 1u << 31), 4, b->size / 4, 1};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemsetNode(&node, graph, NULL, 0, &fill, context));
    OK(cuGraphInstantiateWithFlags(&run, graph, 0));
    OK(cuGraphDestroy(graph));
    OK(cuGraphLaunch(run, w->stream));
    wait_for(w);
    OK(cuGraphExecDestroy(run));
    set(b, fill.value);
}

/* Runs a graph that allocates memory. The program must free this memory itself. */
static void by_graph_memory(struct worker *w)
{
    void *graph, *run = NULL, *node;
    struct alloc_node alloc = {.alloc_type = 1, .location_type = 1, .bytes = (draw(w, 64) + 1) * 4096};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &alloc));
    struct set_node fill = {alloc.address, 0, (unsigned)draw(w, 1u << 31), 4, alloc.bytes / 4, 1};
    OK(cuGraphAddMemsetNode(&node, graph, &node, 1, &fill, context));
    int result = cuGraphInstantiateWithFlags(&run, graph, 0);
    if (!result)
        result = cuGraphLaunch(run, w->stream);
    if (!result) {
        OK(cuMemcpyDtoHAsync(w->scratch, alloc.address, alloc.bytes, w->stream));
        wait_for(w);
        for (size_t i = 0; i < alloc.bytes / 4; i++)
            if (w->scratch[i] != fill.value)
                fail("the memory of a graph", (int)i);
        w->checks++;
        OK(cuMemFreeAsync(alloc.address, w->stream));
    } else if (result == 2) {
        w->refused++;
    } else {
        fail("graph with memory", result);
    }
    if (run)
        OK(cuGraphExecDestroy(run));
    OK(cuGraphDestroy(graph));
    if (!draw(w, 4))
        OK(cuDeviceGraphMemTrim(0));
}

static void copy(struct worker *w, struct buffer *to, struct buffer *from)
{
    size_t size = to->size < from->size ? to->size : from->size;
    OK(cuMemcpyDtoDAsync(to->at, from->at, size, w->stream));
    memmove(to->expect, from->expect, size);
}

static void busy(struct worker *w)
{
    uint64_t ns = draw(w, 1000000);
    void *params[] = {&ns};
    OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, w->stream, params, NULL));
}

/* A forked child cannot use CUDA. Whenever the fork happens, the child's calls must return an error
 * and must not hang. */
static void forks(void)
{
    int status = 0;
    pid_t pid = fork();
    if (!pid) {
        uint64_t p;
        alarm(30);
        int first = cuInit(0), second = cuMemAlloc(&p, 4096);
        _exit(first == 3 && second == 3 ? 0 : 1);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
        fail("the child of a fork", status);
}

static void look(void)
{
    size_t free = 0, total = 0;
    OK(cuMemGetInfo(&free, &total));
    if (free > total || !total)
        fail("cuMemGetInfo", 0);
}

static void step(struct worker *w)
{
    struct buffer *b = &w->buffer[draw(w, BUFFERS)], *other = &w->buffer[draw(w, BUFFERS)];
    w->operations++;
    if (!strcmp(mode, "sync")) {
        OK(draw(w, 2) ? cuStreamSynchronize(w->stream) : cuCtxSynchronize());
        return;
    }
    if (b->kind == NONE) {
        if (allocate(w, b))
            write_all(w, b);
        return;
    }
    switch (draw(w, 11)) {
    case 0:
        check(w, b);
        release(w, b);
        break;
    case 1:
        write_all(w, b);
        break;
    case 2:
    case 3:
        launch_add(w, b);
        break;
    case 4:
        set(b, (uint32_t)w->random);
        OK(cuMemsetD32Async(b->at, (uint32_t)w->random, b->size / 4, w->stream));
        break;
    case 5:
        if (other->kind != NONE && other != b)
            copy(w, b, other);
        break;
    case 6:
        by_graph(w, b);
        break;
    case 7:
        busy(w);
        wait_for(w);
        break;
    case 8:
        if (draw(w, 8))
            look();
        else
            forks();
        break;
    case 9:
        by_graph_memory(w);
        break;
    default:
        check(w, b);
    }
}

static void *work(void *argument)
{
    struct worker *w = argument;
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&w->stream, 1));
    w->scratch = malloc(GRANULE);
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE))
        step(w);
    for (int i = 0; i < BUFFERS; i++)
        if (w->buffer[i].kind != NONE) {
            check(w, &w->buffer[i]);
            release(w, &w->buffer[i]);
        }
    OK(cuStreamSynchronize(w->stream));
    OK(cuStreamDestroy(w->stream));
    free(w->scratch);
    return NULL;
}

static char *read_file(const char *path)
{
    char *text = calloc(1, 65536);
    FILE *file = fopen(path, "r");
    if (!file || !fread(text, 1, 65535, file))
        fail(path, 0);
    fclose(file);
    return text;
}

int main(int argc, char **argv)
{
    char line[16];
    void *module;
    if (argc != 5)
        fail("usage: stress MODE THREADS SEED PTX-FILE", argc);
    mode = argv[1];
    int count = atoi(argv[2]);
    struct worker *workers = calloc((size_t)count, sizeof *workers);
    char *ptx = read_file(argv[4]);
    load();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&add, module, "emucuda_add_u32"));
    OK(cuModuleGetFunction(&spin, module, "emucuda_spin_ns"));
    pthread_t collector[2];
    bool collects = !strcmp(mode, "collect");
    open_collected();
    OK(cuStreamCreate(&garbage.stream, 1));
    for (int i = 0; collects && i < 2; i++)
        if (pthread_create(&collector[i], NULL, collect, NULL))
            fail("pthread_create", i);
    for (int i = 0; i < count; i++) {
        workers[i].random = (strtoull(argv[3], NULL, 10) + 1) * 1000003 + (uint64_t)i * 7919 + 1;
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]))
            fail("pthread_create", i);
    }
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin))
        fail("no thread is there", 0);
    __atomic_store_n(&stop, true, __ATOMIC_RELEASE);
    uint64_t operations = 0, checks = 0, refused = 0;
    for (int i = 0; i < count; i++) {
        pthread_join(workers[i].thread, NULL);
        operations += workers[i].operations;
        checks += workers[i].checks;
        refused += workers[i].refused;
    }
    pthread_mutex_lock(&garbage.lock);
    garbage.complete = true;
    pthread_mutex_unlock(&garbage.lock);
    for (int i = 0; collects && i < 2; i++)
        pthread_join(collector[i], NULL);
    OK(cuStreamDestroy(garbage.stream));
    OK(cuCtxSynchronize());
    OK(cuDeviceGraphMemTrim(0));
    printf("done %llu %llu %llu\n", (unsigned long long)operations, (unsigned long long)checks,
           (unsigned long long)refused);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin))
        ;
    free(ptx);
    free(workers);
    return 0;
}
