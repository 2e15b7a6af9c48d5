/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Tests every way to allocate device memory, from every kind of thread and process, and with every
 * way to find the driver's functions. For each combination: does the driver refuse more than the
 * limit with the right code? Does a refusal leak nothing? Does an allocation of exactly the limit
 * succeed? Does a free give the bytes back?
 *
 * The program needs a driver behind the guard. GPUPOOL_PAGE names the session's page. The gate is
 * open, and the grant is BUDGET bytes larger than the charge of a context. TABLE_NVML names the
 * driver's own libnvidia-ml.so.1, which shows the real use of the device. Without arguments the
 * program tests each column in a separate process and prints the table in Markdown. The status is 1
 * if a cell failed. Below the table it prints the holes.
 */
#include "cuda_abi.h"
#include "page.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define BUDGET (160 * MIB)
#define ABSENT (-1)

static struct page *page;
static int (*nvml_memory)(void *, void *);
static void *nvml_device;

static void die(const char *what)
{
    fprintf(stderr, "table: %s\n", what);
    exit(2);
}

/* ---- the two accounts */

static uint64_t used(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < PAGE_SLOTS; i++)
        if (page->slot[i].state == SLOT_LIVE)
            sum += page->slot[i].used[0];
    return sum;
}

static uint64_t taken(void) /* bytes in use on the device by any process */
{
    struct {
        unsigned version;
        unsigned long long total, reserved, free, used;
    } memory = {.version = 0x02000028};
    if (nvml_memory(nvml_device, &memory))
        die("NVML does not answer");
    return memory.used;
}

static uint32_t pins(void)
{
    uint32_t all = 0;
    for (int i = 0; i < PAGE_SLOTS; i++)
        if (page->slot[i].state == SLOT_LIVE)
            all |= page->slot[i].pins;
    return all;
}

static void open_accounts(void)
{
    const char *path = getenv("GPUPOOL_PAGE"), *nvml = getenv("TABLE_NVML");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0 || (page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
        die("GPUPOOL_PAGE cannot be mapped");
    close(fd);
    void *library = nvml ? dlopen(nvml, RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*init)(void) = library ? (int (*)(void))dlsym(library, "nvmlInit_v2") : NULL;
    int (*by_uuid)(const char *, void **) =
        library ? (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByUUID") : NULL;
    nvml_memory = library ? (int (*)(void *, void *))dlsym(library, "nvmlDeviceGetMemoryInfo_v2") : NULL;
    if (!init || !nvml_memory || !by_uuid || init() || by_uuid(page->uuid[0], &nvml_device))
        die("TABLE_NVML cannot be used");
}

/* ---- how a program finds the functions */

enum lookup { BY_SYMBOL, BY_STATIC_CUDART, BY_PROC_ADDRESS, BY_PER_THREAD };
static enum lookup lookup;

typedef CUresult (*proc_v1)(const char *, void **, int, uint64_t);
typedef CUresult (*proc_v2)(const char *, void **, int, uint64_t, int *);

static void *find(const char *symbol, const char *name, int version)
{
    static proc_v2 through;
    void *found = NULL;
    int status;
    switch (lookup) {
    case BY_SYMBOL:
        return dlsym(RTLD_DEFAULT, symbol);
    case BY_PROC_ADDRESS: {
        proc_v1 get = (proc_v1)dlsym(RTLD_DEFAULT, "cuGetProcAddress");
        return get && !get(name, &found, version, 0) ? found : NULL;
    }
    case BY_STATIC_CUDART:
    case BY_PER_THREAD:
        if (!through) {
            /* As in the static runtime: find cuGetProcAddress_v2 by its symbol, call it to look up
             * cuGetProcAddress, and use the result to look up all other functions. */
            void *library = dlopen("libcuda.so.1", RTLD_NOW);
            proc_v2 get = library ? (proc_v2)dlsym(library, "cuGetProcAddress_v2") : NULL;
            if (!get || get("cuGetProcAddress", (void **)&through, 12000, 0, &status) || !through)
                die("cuGetProcAddress_v2 is not there");
        }
        return !through(name, &found, version, lookup == BY_PER_THREAD ? 2 : 0, &status) ? found : NULL;
    }
    return NULL;
}

/* CU(version, name, suffix, arguments...) calls the function, or returns ABSENT. */
#define CU(version, name, suffix, types, ...)                                                    \
    ({                                                                                           \
        CUresult(*f_) types = (CUresult(*) types)find(#name suffix, #name, version);             \
        f_ ? f_(__VA_ARGS__) : ABSENT;                                                           \
    })

static CUresult alloc(CUdeviceptr *p, uint64_t n)
{
    return CU(3020, cuMemAlloc, "_v2", (CUdeviceptr *, size_t), p, n);
}
static CUresult release(CUdeviceptr p) { return CU(3020, cuMemFree, "_v2", (CUdeviceptr), p); }
static CUresult synchronise(void) { return CU(2000, cuCtxSynchronize, "", (void), ); }

/* ---- rows: take() stores the address or the handle of its memory in these variables. give() frees
 * the memory. */

static CUdeviceptr address;
static void *handle, *other, *stream;
static CUmemGenericAllocationHandle block;

static CUresult take_plain(uint64_t n) { return alloc(&address, n); }
static CUresult give_plain(void) { return release(address); }

static CUresult take_pitch(uint64_t n)
{
    size_t pitch;
    return CU(3020, cuMemAllocPitch, "_v2", (CUdeviceptr *, size_t *, size_t, size_t, unsigned), &address, &pitch,
              65536, n / 65536, 4);
}

/* A row of 100 bytes is smaller than the alignment. The driver makes each row longer, so only the
 * pitch that it returns shows the real size. */
static CUresult take_narrow(uint64_t n)
{
    size_t pitch;
    return CU(3020, cuMemAllocPitch, "_v2", (CUdeviceptr *, size_t *, size_t, size_t, unsigned), &address, &pitch,
              100, n / 512, 4);
}

static CUresult take_array(uint64_t n)
{
    CUDA_ARRAY_DESCRIPTOR d = {65536, n / 65536, 0x01, 1};
    return CU(3020, cuArrayCreate, "_v2", (void **, const CUDA_ARRAY_DESCRIPTOR *), &handle, &d);
}

static CUresult take_array_3d(uint64_t n)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {4096, 64, n / (4096 * 64 * 4), 0x20, 1, 0};
    return CU(3020, cuArray3DCreate, "_v2", (void **, const CUDA_ARRAY3D_DESCRIPTOR *), &handle, &d);
}

static CUresult give_array(void) { return CU(2000, cuArrayDestroy, "", (void *), handle); }

static CUresult take_mipmap(uint64_t n) /* The second of the two levels has a quarter of the
                                         * first level's size. */
{
    CUDA_ARRAY3D_DESCRIPTOR d = {65536, (n / 5 * 4 + 131071) / 65536, 0, 0x01, 1, 0};
    d.Height -= d.Height % 2;
    return CU(5000, cuMipmappedArrayCreate, "", (void **, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned), &handle, &d, 2);
}

static CUresult give_mipmap(void) { return CU(5000, cuMipmappedArrayDestroy, "", (void *), handle); }

static CUresult take_block(uint64_t n)
{
    CUmemAllocationProp prop = {.type = 1, .location = {MEM_LOCATION_DEVICE, 0}};
    return CU(10020, cuMemCreate, "",
              (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &block,
              (n + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), &prop, 0);
}

static CUresult drop_block(void) { return CU(10020, cuMemRelease, "", (CUmemGenericAllocationHandle), block); }

/* Map the block, release the handle at once (unlike PyTorch's segments), then unmap the block. */
static CUresult take_mapped(uint64_t n)
{
    n = (n + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    CUresult result = take_block(n);
    if (result)
        return result;
    result = CU(10020, cuMemAddressReserve, "", (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long),
                &address, n, 0, 0, 0);
    if (!result)
        result = CU(10020, cuMemMap, "",
                    (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long), address, n, 0,
                    block, 0);
    drop_block();
    return result;
}

static CUresult give_mapped(void)
{
    if (used() < BUDGET)
        return CUDA_ERROR_INVALID_VALUE; /* wrong: the guard has credited a mapped block */
    CUmemGenericAllocationHandle again;
    CUresult result = CU(11000, cuMemRetainAllocationHandle, "", (CUmemGenericAllocationHandle *, void *), &again,
                         (void *)(address + MIB));
    if (!result)
        result = CU(10020, cuMemUnmap, "", (CUdeviceptr, size_t), address, BUDGET);
    if (!result && used() < BUDGET)
        return CUDA_ERROR_INVALID_VALUE; /* wrong: the guard has credited a block with a handle */
    block = again;
    if (!result)
        result = drop_block();
    return result ? result : CU(10020, cuMemAddressFree, "", (CUdeviceptr, size_t), address, BUDGET);
}

static CUresult take_async(uint64_t n)
{
    return CU(11020, cuMemAllocAsync, "", (CUdeviceptr *, size_t, void *), &address, n, NULL);
}

static CUresult give_async(void)
{
    CUresult result = CU(11020, cuMemFreeAsync, "", (CUdeviceptr, void *), address, NULL);
    return result ? result : synchronise();
}

static CUresult give_async_plainly(void)
{
    CUresult result = release(address);
    return result ? result : synchronise();
}

static CUresult take_pooled(uint64_t n)
{
    CUmemPoolProps props = {.allocType = 1, .location = {MEM_LOCATION_DEVICE, 0}};
    if (!other) {
        CUresult result = CU(11020, cuMemPoolCreate, "", (void **, const CUmemPoolProps *), &other, &props);
        if (result)
            return result;
        uint64_t all = UINT64_MAX; /* the pool keeps its memory, and only a trim returns it */
        CU(11020, cuMemPoolSetAttribute, "", (void *, int, void *), other, 4, &all);
    }
    return CU(11020, cuMemAllocFromPoolAsync, "", (CUdeviceptr *, size_t, void *, void *), &address, n, other, NULL);
}

static CUresult give_pooled(void)
{
    CUresult result = give_async();
    if (!result && used() < BUDGET)
        result = CUDA_ERROR_INVALID_VALUE; /* wrong: the guard has credited memory that the
                                            * pool still reserves */
    if (!result)
        result = CU(11020, cuMemPoolTrimTo, "", (void *, size_t), other, 0);
    return result;
}

static CUresult give_pool(void) /* destroys the pool while it has an allocation */
{
    CUresult result = CU(11020, cuMemPoolDestroy, "", (void *), other);
    other = NULL;
    if (!result && used() < BUDGET)
        result = CUDA_ERROR_INVALID_VALUE;
    return result ? result : give_async();
}

/* ---- graphs: a graph makes one allocation, which stays after the launch. Each way to instantiate
 * a graph has its own row. */

struct alloc_node {
    CUmemPoolProps pool;
    const void *access;
    size_t accesses, bytes;
    CUdeviceptr address;
};

static void *graph;
static enum { BY_FLAGS, BY_V2, BY_PARAMS } instantiate_by;
static bool upload, roomy, launched;

static CUresult instantiate(void)
{
    void *node;
    char log[64];
    struct {
        unsigned long long flags;
        void *stream, *error;
        int result;
    } params = {.flags = 0};
    switch (instantiate_by) {
    case BY_V2:
        return CU(11000, cuGraphInstantiate, "_v2", (void **, void *, void **, char *, size_t), &handle, graph, &node,
                  log, sizeof log);
    case BY_PARAMS:
        return CU(12000, cuGraphInstantiateWithParams, "", (void **, void *, void *), &handle, graph, &params);
    default:
        return CU(11040, cuGraphInstantiateWithFlags, "", (void **, void *, unsigned long long), &handle, graph, 0);
    }
}

static CUresult give_graph(void)
{
    CUresult result = launched ? give_async() : CUDA_SUCCESS;
    launched = false;
    if (handle && !result)
        result = CU(10000, cuGraphExecDestroy, "", (void *), handle);
    handle = NULL;
    CUresult second = CU(10000, cuGraphDestroy, "", (void *), graph);
    CUresult third = CU(11040, cuDeviceGraphMemTrim, "", (CUdevice), 0);
    return result ? result : second ? second : third;
}

static CUresult run_graph(void)
{
    uint64_t before = page->granted[0];
    handle = NULL;
    if (roomy) /* enlarge the grant for a moment: the guard must refuse only the upload or launch */
        page->granted[0] = 2 * before;
    CUresult result = instantiate();
    page->granted[0] = before;
    if (!result && upload)
        result = CU(11010, cuGraphUpload, "", (void *, void *), handle, stream);
    if (!result)
        result = CU(10000, cuGraphLaunch, "", (void *, void *), handle, stream);
    if (!result)
        result = synchronise();
    launched = !result;
    if (result)
        give_graph();
    return result;
}

static CUresult take_graph(uint64_t n)
{
    struct alloc_node params = {.pool = {.allocType = 1, .location = {MEM_LOCATION_DEVICE, 0}}, .bytes = n};
    void *node;
    CUresult result = CU(10000, cuGraphCreate, "", (void **, unsigned), &graph, 0);
    if (result)
        return result;
    result = CU(11040, cuGraphAddMemAllocNode, "", (void **, void *, void *const *, size_t, struct alloc_node *),
                &node, graph, NULL, 0, &params);
    address = params.address;
    if (result) {
        CU(10000, cuGraphDestroy, "", (void *), graph);
        return result;
    }
    return run_graph();
}

static CUresult take_captured(uint64_t n)
{
    if (!stream) {
        CUresult result = CU(2000, cuStreamCreate, "", (void **, unsigned), &stream, 1);
        if (result)
            return result;
    }
    CUresult result = CU(10010, cuStreamBeginCapture, "_v2", (void *, int), stream, 2);
    if (result)
        return result;
    CUresult inside = CU(11020, cuMemAllocAsync, "", (CUdeviceptr *, size_t, void *), &address, n, stream);
    result = CU(10000, cuStreamEndCapture, "", (void *, void **), stream, &graph);
    return inside ? inside : result ? result : run_graph();
}

#define GRAPH_ROW(name, how, uploads, late, from)      \
    static CUresult take_##name(uint64_t n)            \
    {                                                  \
        instantiate_by = how, upload = uploads, roomy = late; \
        return from(n);                                \
    }
GRAPH_ROW(graph_flags, BY_FLAGS, false, false, take_graph)
GRAPH_ROW(graph_v2, BY_V2, false, false, take_graph)
GRAPH_ROW(graph_params, BY_PARAMS, false, false, take_graph)
GRAPH_ROW(graph_launch, BY_FLAGS, false, true, take_graph)
GRAPH_ROW(graph_upload, BY_FLAGS, true, true, take_graph)
GRAPH_ROW(graph_captured, BY_FLAGS, false, false, take_captured)

/* ---- calls that are refused at any size; host memory; memory of another process */

static CUresult take_managed(uint64_t n)
{
    return CU(6000, cuMemAllocManaged, "", (CUdeviceptr *, size_t, unsigned), &address, n, 1);
}

static CUresult take_managed_pool(uint64_t n)
{
    CUmemPoolProps props = {.allocType = 2, .location = {MEM_LOCATION_DEVICE, 0}};
    (void)n;
    return CU(11020, cuMemPoolCreate, "", (void **, const CUmemPoolProps *), &handle, &props);
}

static CUresult take_managed_default(uint64_t n)
{
    CUmemLocation location = {MEM_LOCATION_DEVICE, 0};
    (void)n;
    return CU(13000, cuMemGetDefaultMemPool, "", (void **, CUmemLocation *, int), &handle, &location, 2);
}

static CUresult take_host(uint64_t n) { return CU(2020, cuMemHostAlloc, "", (void **, size_t, unsigned), &handle, n, 0); }
static CUresult take_host_v2(uint64_t n) { return CU(3020, cuMemAllocHost, "_v2", (void **, size_t), &handle, n); }
static CUresult give_host(void) { return CU(2000, cuMemFreeHost, "", (void *), handle); }

static CUresult take_registered(uint64_t n)
{
    handle = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return handle == MAP_FAILED
               ? CUDA_ERROR_OUT_OF_MEMORY
               : CU(6050, cuMemHostRegister, "_v2", (void *, size_t, unsigned), handle, n, 0);
}

static CUresult give_registered(void) { return CU(4000, cuMemHostUnregister, "", (void *), handle); }

static CUresult take_ipc_export(uint64_t n)
{
    char data[64];
    CUresult result = alloc(&address, n - 2 * MIB);
    return result ? result : CU(4010, cuIpcGetMemHandle, "", (void *, CUdeviceptr), data, address);
}

typedef struct {
    char data[64];
} ipc_handle;

/* The exporter is another process of the session. It owns the memory, so the guard charges the
 * memory to the exporter. This process only opens the memory. */
static pid_t exporter;
static int exporter_end;

static CUresult take_ipc_import(uint64_t n)
{
    int there[2], back[2];
    ipc_handle data;
    char size[32];
    if (pipe(there) || pipe(back))
        return ABSENT;
    snprintf(size, sizeof size, "%llu", (unsigned long long)n);
    exporter = fork();
    if (!exporter) {
        dup2(there[0], 0);
        dup2(back[1], 1);
        close(there[1]);
        close(back[0]);
        execl("/proc/self/exe", "table", "export", size, (char *)NULL);
        _exit(2);
    }
    close(there[0]);
    close(back[1]);
    exporter_end = there[1];
    ssize_t got = read(back[0], &data, sizeof data);
    close(back[0]);
    if (got != sizeof data)
        return ABSENT;
    return CU(11000, cuIpcOpenMemHandle, "_v2", (CUdeviceptr *, ipc_handle, unsigned), &address, data, 1);
}

static CUresult give_ipc_import(void)
{
    int status;
    CUresult result = CU(4010, cuIpcCloseMemHandle, "", (CUdeviceptr), address);
    close(exporter_end);
    waitpid(exporter, &status, 0);
    return result;
}

static CUresult take_vmm_import(uint64_t n)
{
    CUmemAllocationProp prop = {.type = 1, .requestedHandleTypes = 1, .location = {MEM_LOCATION_DEVICE, 0}};
    CUmemGenericAllocationHandle imported;
    int fd = -1;
    (void)n;
    CUresult result = CU(10020, cuMemCreate, "",
                         (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long),
                         &block, BUDGET, &prop, 0);
    if (result)
        return result;
    result = CU(10020, cuMemExportToShareableHandle, "",
                (void *, CUmemGenericAllocationHandle, int, unsigned long long), &fd, block, 1, 0);
    if (!result)
        result = CU(10020, cuMemImportFromShareableHandle, "", (CUmemGenericAllocationHandle *, void *, int), &imported,
                    (void *)(intptr_t)fd, 1);
    if (!result && used() > page->granted[0])
        result = CUDA_ERROR_INVALID_VALUE; /* wrong: the guard has counted the memory twice */
    if (!result)
        result = CU(10020, cuMemRelease, "", (CUmemGenericAllocationHandle), imported);
    if (fd >= 0)
        close(fd);
    if (result)
        drop_block();
    return result;
}

static CUresult take_pool_import(uint64_t n)
{
    CUmemPoolProps props = {.allocType = 1, .handleTypes = 1, .location = {MEM_LOCATION_DEVICE, 0}};
    int fd = -1;
    handle = NULL;
    CUresult result = CU(11020, cuMemPoolCreate, "", (void **, const CUmemPoolProps *), &other, &props);
    if (result)
        return result;
    result = CU(11020, cuMemAllocFromPoolAsync, "", (CUdeviceptr *, size_t, void *, void *), &address, n - 2 * MIB,
                other, NULL);
    if (!result)
        result = CU(11020, cuMemPoolExportToShareableHandle, "", (void *, void *, int, unsigned long long), &fd, other,
                    1, 0);
    if (!result)
        result = CU(11020, cuMemPoolImportFromShareableHandle, "", (void **, void *, int, unsigned long long), &handle,
                    (void *)(intptr_t)fd, 1, 0);
    if (fd >= 0)
        close(fd);
    return result;
}

static CUresult give_pool_import(void)
{
    CUresult result = handle ? CU(11020, cuMemPoolDestroy, "", (void *), handle) : CUDA_SUCCESS;
    CUresult second = give_async();
    CUresult third = CU(11020, cuMemPoolDestroy, "", (void *), other);
    other = NULL;
    return result ? result : second ? second : third;
}

static CUresult take_external(uint64_t n)
{
    char description[104] = {0};
    (void)n;
    return CU(10000, cuImportExternalMemory, "", (void **, const void *), &handle, description);
}

static CUresult take_multicast(uint64_t n)
{
    struct {
        unsigned devices;
        size_t bytes;
        unsigned long long types, flags;
    } prop = {2, n, 0, 0};
    return CU(12010, cuMulticastCreate, "", (CUmemGenericAllocationHandle *, const void *), &block, &prop);
}

static CUresult take_graphics(uint64_t n)
{
    (void)n;
    return CU(3000, cuGraphicsGLRegisterBuffer, "", (void **, unsigned, unsigned), &handle, 1, 0);
}

/* ---- the rows */

enum kind {
    COUNTED,   /* refused above the limit, succeeds at the limit; a free gives the bytes back */
    REFUSED,   /* always NOT_SUPPORTED */
    UNCOUNTED, /* host memory: also succeeds beyond the limit */
    PINNED,    /* shared memory: counts once, and pins the session */
};

static const struct row {
    const char *name;
    enum kind kind;
    CUresult (*take)(uint64_t bytes);
    CUresult (*give)(void);
    uint32_t pin;
} rows[] = {
    {"`cuMemAlloc`", COUNTED, take_plain, give_plain, 0},
    {"`cuMemAllocPitch`", COUNTED, take_pitch, give_plain, 0},
    {"`cuMemAllocPitch`, rows of 100 bytes", COUNTED, take_narrow, give_plain, 0},
    {"`cuArrayCreate`", COUNTED, take_array, give_array, 0},
    {"`cuArray3DCreate`", COUNTED, take_array_3d, give_array, 0},
    {"`cuMipmappedArrayCreate`", COUNTED, take_mipmap, give_mipmap, 0},
    {"`cuMemCreate`, `cuMemRelease`", COUNTED, take_block, drop_block, 0},
    {"`cuMemCreate`, `cuMemMap`, `cuMemUnmap`", COUNTED, take_mapped, give_mapped, 0},
    {"`cuMemAllocAsync`", COUNTED, take_async, give_async, 0},
    {"`cuMemAllocAsync`, `cuMemFree`", COUNTED, take_async, give_async_plainly, 0},
    {"`cuMemAllocFromPoolAsync`, kept, trimmed", COUNTED, take_pooled, give_pooled, 0},
    {"`cuMemAllocFromPoolAsync`, pool destroyed", COUNTED, take_pooled, give_pool, 0},
    {"graph node, `cuGraphInstantiateWithFlags`", COUNTED, take_graph_flags, give_graph, 0},
    {"graph node, `cuGraphInstantiate_v2`", COUNTED, take_graph_v2, give_graph, 0},
    {"graph node, `cuGraphInstantiateWithParams`", COUNTED, take_graph_params, give_graph, 0},
    {"graph node, `cuGraphLaunch`", COUNTED, take_graph_launch, give_graph, 0},
    {"graph node, `cuGraphUpload`", COUNTED, take_graph_upload, give_graph, 0},
    {"captured `cuMemAllocAsync`", COUNTED, take_graph_captured, give_graph, 0},
    {"`cuMemAllocManaged`", REFUSED, take_managed, NULL, 0},
    {"`cuMemPoolCreate`, managed", REFUSED, take_managed_pool, NULL, 0},
    {"`cuMemGetDefaultMemPool`, managed", REFUSED, take_managed_default, NULL, 0},
    {"`cuMemHostAlloc`", UNCOUNTED, take_host, give_host, 0},
    {"`cuMemAllocHost`", UNCOUNTED, take_host_v2, give_host, 0},
    {"`cuMemHostRegister`", UNCOUNTED, take_registered, give_registered, 0},
    {"`cuIpcGetMemHandle`", PINNED, take_ipc_export, give_plain, PIN_IPC},
    {"`cuIpcOpenMemHandle`", PINNED, take_ipc_import, give_ipc_import, PIN_IPC},
    {"`cuMemImportFromShareableHandle`", PINNED, take_vmm_import, drop_block, PIN_IPC},
    {"`cuMemPoolImportFromShareableHandle`", PINNED, take_pool_import, give_pool_import, PIN_IPC},
    {"`cuImportExternalMemory`", PINNED, take_external, NULL, PIN_IPC},
    {"`cuMulticastCreate`", PINNED, take_multicast, NULL, PIN_MULTICAST},
    {"`cuGraphicsGLRegisterBuffer`", PINNED, take_graphics, NULL, PIN_GRAPHICS},
};
#define ROWS (sizeof rows / sizeof *rows)

static bool absent(CUresult result)
{
    return result == ABSENT || result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_NOT_SUPPORTED;
}

/* Tests one row, and returns the text for its cell of the table. If the test fails, the text begins
 * with "FAILED". */
static const char *cell(const struct row *row)
{
    static char text[160];
    uint64_t used0 = used(), taken0 = taken(), limit = page->granted[0];
    CUdeviceptr one;
    CUresult result;
#define FAIL(...) return snprintf(text, sizeof text, "FAILED: " __VA_ARGS__), text
#define SAME(when)                                                                            \
    if (used() != used0 || taken() != taken0)                                                 \
    FAIL("%s, %lld bytes counted and %lld taken are left", when, (long long)(used() - used0), \
         (long long)(taken() - taken0))
    if (used0 + BUDGET != limit)
        FAIL("begins with %llu bytes counted", (unsigned long long)used0);

    if (row->kind == REFUSED) {
        result = row->take(MIB);
        SAME("refused");
        if (pins())
            FAIL("refused and pinned");
        if (result != CUDA_ERROR_NOT_SUPPORTED)
            FAIL("%d instead of 801", result);
        return "refused (801)";
    }
    if (row->kind == UNCOUNTED) {
        result = row->take(BUDGET + MIB);
        if (result || used() != used0 || taken() != taken0)
            FAIL("%d, counted %lld", result, (long long)(used() - used0));
        return row->give() ? "FAILED: not freed" : "host memory: not counted";
    }
    if (row->kind == PINNED) {
        result = row->take(BUDGET);
        if (absent(result)) {
            SAME("not supported");
            return "not in the emulated driver";
        }
        if (result)
            FAIL("%d", result);
        if (used() - used0 != taken() - taken0)
            FAIL("%lld bytes are counted and %lld taken", (long long)(used() - used0), (long long)(taken() - taken0));
        if (!(pins() & row->pin))
            FAIL("not pinned");
        result = row->give();
        if (result)
            FAIL("free: %d", result);
        SAME("freed");
        for (int i = 0; i < PAGE_SLOTS; i++)
            page->slot[i].pins = 0; /* clear the pins for the next row */
        return "counted once, pinned";
    }

    result = row->take(BUDGET + MIB);
    if (absent(result)) {
        SAME("not supported");
        return "not in the emulated driver";
    }
    if (!result)
        FAIL("%llu MiB above the limit were given", (unsigned long long)((used() - limit) / MIB));
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        FAIL("above the limit, %d instead of 2", result);
    SAME("refused");
    result = row->take(BUDGET);
    if (result)
        FAIL("%d at the limit, which fits", result);
    if (used() != limit || taken() != taken0 + BUDGET)
        FAIL("at the limit, %llu bytes are counted and %llu taken", (unsigned long long)used(),
             (unsigned long long)(taken() - taken0));
    if (alloc(&one, MIB) != CUDA_ERROR_OUT_OF_MEMORY)
        FAIL("one MiB more was given");
    result = row->give();
    if (result)
        FAIL("free: %d", result);
    SAME("freed");
    return "refused (2)";
}

/* ---- contexts: the charge for the first context of a process */

static CUresult primary(void **context)
{
    return CU(7000, cuDevicePrimaryCtxRetain, "", (void **, CUdevice), context, 0);
}
static CUresult primary_end(void *context)
{
    (void)context;
    return CU(11000, cuDevicePrimaryCtxRelease, "_v2", (CUdevice), 0);
}
static CUresult created(void **context)
{
    return CU(3020, cuCtxCreate, "_v2", (void **, unsigned, CUdevice), context, 0, 0);
}
static CUresult created_v4(void **context)
{
    return CU(12050, cuCtxCreate, "_v4", (void **, void *, unsigned, CUdevice), context, NULL, 0, 0);
}
static CUresult created_end(void *context) { return CU(4000, cuCtxDestroy, "_v2", (void *), context); }

static CUresult green(void **context)
{
    char resource[144] = {0};
    void *description;
    CUresult result = CU(12040, cuDeviceGetDevResource, "", (CUdevice, void *, int), 0, resource, 1);
    if (!result)
        result = CU(12040, cuDevResourceGenerateDesc, "", (void **, void *, unsigned), &description, resource, 1);
    return result ? result
                  : CU(12040, cuGreenCtxCreate, "", (void **, void *, CUdevice, unsigned), context, description, 0, 1);
}
static CUresult green_end(void *context) { return CU(12040, cuGreenCtxDestroy, "", (void *), context); }

static const struct context_row {
    const char *name;
    CUresult (*make)(void **);
    CUresult (*end)(void *);
} contexts[] = {
    {"`cuDevicePrimaryCtxRetain`", primary, primary_end},
    {"`cuCtxCreate_v2`", created, created_end},
    {"`cuCtxCreate_v4`", created_v4, created_end},
    {"`cuGreenCtxCreate`", green, green_end},
};
#define CONTEXTS (sizeof contexts / sizeof *contexts)

static const char *context_cell(const struct context_row *row)
{
    static char text[160];
    uint64_t limit = page->granted[0], constant = page->context_bytes, used0 = used(), taken0 = taken();
    void *context = NULL, *second = NULL;
    page->granted[0] = constant - MIB;
    CUresult result = row->make(&context);
    page->granted[0] = limit;
    if (absent(result))
        return "not in the emulated driver";
    if (result != CUDA_ERROR_OUT_OF_MEMORY)
        FAIL("above the limit, %d instead of 2", result);
    SAME("refused");
    page->granted[0] = constant;
    result = row->make(&context);
    if (!result)
        result = row->make(&second); /* the second context takes no more memory */
    page->granted[0] = limit;
    if (result)
        FAIL("%d at the limit, which fits", result);
    if (used() != constant || taken() != taken0 + constant)
        FAIL("%llu bytes are counted and %llu taken", (unsigned long long)used(),
             (unsigned long long)(taken() - taken0));
    if (row->end(second) || used() != constant || row->end(context))
        FAIL("not ended");
    SAME("ended");
    return "refused (2)";
}

/* ---- columns */

static void say(const char *name, const char *text)
{
    printf("%s\t%s\n", name, text);
    fflush(stdout);
}

static void *column(void *unused)
{
    void *context;
    (void)unused;
    if (CU(2000, cuInit, "", (unsigned), 0))
        die("cuInit");
    for (size_t i = 0; i < CONTEXTS; i++)
        say(contexts[i].name, context_cell(&contexts[i]));
    if (primary(&context) || CU(4000, cuCtxSetCurrent, "", (void *), context))
        die("no context");
    for (size_t i = 0; i < ROWS; i++)
        say(rows[i].name, cell(&rows[i]));
    if (primary_end(context) || used())
        die("the context is still counted");
    return NULL;
}

static int in_thread(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, column, NULL) || pthread_join(thread, NULL))
        die("no thread");
    return 0;
}

static int in_child(bool executed)
{
    int status, version;
    /* The parent has loaded the guard, but not called cuInit. */
    if (CU(2020, cuDriverGetVersion, "", (int *), &version))
        die("cuDriverGetVersion");
    pid_t child = fork();
    if (!child && executed) {
        execl("/proc/self/exe", "table", "main", (char *)NULL);
        _exit(2);
    }
    if (!child) {
        column(NULL);
        exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status)
        die("the child failed");
    return 0;
}

static int export(const char *size)
{
    void *context;
    CUdeviceptr p;
    ipc_handle data;
    char end;
    if (CU(2000, cuInit, "", (unsigned), 0))
        return 1;
    /* The grant has room for only one context, which the parent has. Enlarge the grant by the
     * context of this process. */
    uint64_t before = page->granted[0];
    page->granted[0] = before + page->context_bytes;
    if (primary(&context) || CU(4000, cuCtxSetCurrent, "", (void *), context) || alloc(&p, strtoull(size, NULL, 10)) ||
        CU(4010, cuIpcGetMemHandle, "", (ipc_handle *, CUdeviceptr), &data, p) ||
        write(1, &data, sizeof data) != sizeof data)
        return 1;
    (void)!read(0, &end, 1);
    CUresult result = release(p) || primary_end(context);
    page->granted[0] = before;
    return result != 0;
}

static const struct {
    const char *argument, *title;
} columns[] = {
    {"main", "main thread"},
    {"thread", "second thread"},
    {"fork", "child of `fork`"},
    {"exec", "child of `exec`"},
    {"static", "static cudart's look-up"},
    {"address", "`cuGetProcAddress`"},
    {"per-thread", "per-thread streams"},
};
#define COLUMNS (sizeof columns / sizeof *columns)

static int one_column(const char *name)
{
    if (!strcmp(name, "thread"))
        return in_thread();
    if (!strcmp(name, "fork") || !strcmp(name, "exec"))
        return in_child(name[0] == 'e');
    lookup = !strcmp(name, "static")       ? BY_STATIC_CUDART
             : !strcmp(name, "address")    ? BY_PROC_ADDRESS
             : !strcmp(name, "per-thread") ? BY_PER_THREAD
                                           : BY_SYMBOL;
    column(NULL);
    return 0;
}

/* ---- the whole table */

static char results[COLUMNS][CONTEXTS + ROWS][160];

static void run(size_t c)
{
    char line[400];
    int ends[2], status;
    size_t n = 0;
    if (pipe(ends))
        die("no pipe");
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], 1);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "table", columns[c].argument, (char *)NULL);
        _exit(2);
    }
    close(ends[1]);
    FILE *from = fdopen(ends[0], "r");
    while (n < CONTEXTS + ROWS && fgets(line, sizeof line, from)) {
        char *text = strchr(line, '\t');
        if (text)
            snprintf(results[c][n++], sizeof results[c][0], "%.*s", (int)strcspn(text + 1, "\n"), text + 1);
    }
    fclose(from);
    if (waitpid(child, &status, 0) != child || status)
        snprintf(results[c][n < CONTEXTS + ROWS ? n : 0], sizeof results[c][0], "FAILED: status %#x", status);
}

static const char holes[] =
#include "table_holes.h"
    ;

int main(int argc, char **argv)
{
    bool failed = false;
    open_accounts();
    if (argc == 3 && !strcmp(argv[1], "export"))
        return export(argv[2]);
    if (argc == 2)
        return one_column(argv[1]);
    for (size_t c = 0; c < COLUMNS; c++)
        run(c);
    printf("| takes memory by |");
    for (size_t c = 0; c < COLUMNS; c++)
        printf(" %s |", columns[c].title);
    printf("\n|---|");
    for (size_t c = 0; c < COLUMNS; c++)
        printf("---|");
    printf("\n");
    for (size_t r = 0; r < CONTEXTS + ROWS; r++) {
        printf("| %s |", r < CONTEXTS ? contexts[r].name : rows[r - CONTEXTS].name);
        for (size_t c = 0; c < COLUMNS; c++) {
            const char *text = results[c][r][0] ? results[c][r] : "FAILED: not reached";
            failed = failed || !strncmp(text, "FAILED", 6);
            printf(" %s |", text);
        }
        printf("\n");
    }
    printf("\n%s", holes);
    return failed;
}
