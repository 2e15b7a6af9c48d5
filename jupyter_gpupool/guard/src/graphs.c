/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Graphs with memory nodes. The driver reserves their memory when the graph is launched or
 * uploaded, and keeps it reserved for the next launch. cuDeviceGraphMemTrim gives it back. The
 * guard reads all nodes of a graph when the graph is made executable. So it also sees nodes that
 * come from a captured stream, from a clone or from a child graph. The sum over the nodes is the
 * most that the first launch may take. The launch takes less if nodes share memory. After the
 * launch the guard counts the driver's own figure. The guard can refuse a graph that is too large
 * at two moments: when the program makes the graph executable, and when it launches the graph.
 *
 * A later launch may reserve memory again: another graph may hold the memory that this graph used,
 * or use it at the same time in another stream. Before such a launch the guard charges nothing. The
 * driver counts the memory of finished graphs as used, so it does not say whether the launch finds
 * enough idle memory. A charge would refuse launches that need no more memory. After the launch the
 * guard counts the driver's figure, even if it exceeds the grant.
 */
#include "counting.h"
#include "own.h"
#include "wraps.h"

#include <sys/mman.h>

enum { NODE_GRAPH = 4, NODE_MEM_ALLOC = 10 };
enum { GRAPH_ATTR_USED = 0, GRAPH_ATTR_RESERVED = 2 };

#define NODES 64
#define DEEPEST 16
#define MIB (1ull << 20)

struct alloc_node {
    CUmemPoolProps pool;
    const CUmemAccessDesc *access;
    size_t accesses, bytes;
    CUdeviceptr address;
};

struct totals {
    uint64_t bytes[PAGE_DEVICES];
    bool look[PAGE_DEVICES]; /* charge nothing, but count the growth of the reserve */
    CUdevice device[PAGE_DEVICES];
};

static void node_bytes(CUgraphNode node, struct totals *sum)
{
    typedef CUresult (*params_of)(CUgraphNode, struct alloc_node *);
    struct alloc_node params = {.bytes = 0};
    if (CALL(params_of, cuGraphMemAllocNodeGetParams)(node, &params))
        return;
    struct here h = here_of_device(params.pool.location.id);
    if (params.pool.location.type != MEM_LOCATION_DEVICE || h.ordinal < 0)
        return;
    uint64_t extent;
    if (__builtin_add_overflow((uint64_t)params.bytes, 2 * MIB - 1, &extent))
        extent = UINT64_MAX;
    extent = extent / (2 * MIB) * (2 * MIB);
    if (__builtin_add_overflow(sum->bytes[h.ordinal], extent, &sum->bytes[h.ordinal]))
        sum->bytes[h.ordinal] = UINT64_MAX / 2;
    sum->device[h.ordinal] = h.device;
}

static void look_through(CUgraph graph, struct totals *sum, int depth)
{
    typedef CUresult (*nodes_of)(CUgraph, CUgraphNode *, size_t *);
    typedef CUresult (*type_of)(CUgraphNode, int *);
    typedef CUresult (*child_of)(CUgraphNode, CUgraph *);
    CUgraphNode few[NODES], *node = few;
    size_t count = 0, room = 0;
    if (depth > DEEPEST || CALL(nodes_of, cuGraphGetNodes)(graph, NULL, &count) || !count)
        return;
    if (count > NODES) {
        room = count * sizeof *node;
        if (!(node = own_map(room)))
            return;
    }
    if (!CALL(nodes_of, cuGraphGetNodes)(graph, node, &count))
        for (size_t i = 0; i < count; i++) {
            int type = -1;
            CUgraph child;
            if (CALL(type_of, cuGraphNodeGetType)(node[i], &type))
                continue;
            if (type == NODE_MEM_ALLOC)
                node_bytes(node[i], sum);
            else if (type == NODE_GRAPH && !CALL(child_of, cuGraphChildGraphNodeGetGraph)(node[i], &child))
                look_through(child, sum, depth + 1);
        }
    if (room)
        munmap(node, room);
}

/* By how many bytes the reserve grows at most when a graph that allocates `bytes` is first
 * launched. The launch first uses the idle part of the reserve. */
static uint64_t growth(const struct reserve *r, uint64_t bytes)
{
    typedef CUresult (*attribute)(CUdevice, int, void *);
    uint64_t used = 0, reserved = 0;
    if (CALL(attribute, cuDeviceGetGraphMemAttribute)(r->device, GRAPH_ATTR_USED, &used) ||
        CALL(attribute, cuDeviceGetGraphMemAttribute)(r->device, GRAPH_ATTR_RESERVED, &reserved))
        return bytes;
    uint64_t idle = reserved > used ? reserved - used : 0;
    return bytes > idle ? bytes - idle : 0;
}

/* Charges the bytes of `sum` on each device. If the charge on one device fails, gives back the
 * charges on the other devices. */
static CUresult begin(const struct totals *sum, struct reserve *r[PAGE_DEVICES])
{
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < PAGE_DEVICES; i++)
        r[i] = NULL;
    for (int i = 0; i < PAGE_DEVICES && !result; i++) {
        if (!sum->bytes[i] && !sum->look[i])
            continue;
        struct here h = {.ordinal = i, .device = sum->device[i]};
        if ((r[i] = reserve_graphs(h))) {
            result = reserve_begin(r[i], sum->bytes[i] ? growth(r[i], sum->bytes[i]) : 0);
            if (result)
                r[i] = NULL;
        }
    }
    for (int i = 0; i < PAGE_DEVICES && result; i++)
        if (r[i])
            reserve_end(r[i], true);
    return result;
}

/* The guard cannot undo a launch. So it counts the growth of the reserve even if the growth does
 * not fit in the grant. */
static void end(struct reserve *const r[PAGE_DEVICES])
{
    for (int i = 0; i < PAGE_DEVICES; i++)
        if (r[i] && reserve_end(r[i], true))
            reserve_settle(r[i]);
}

static void enter(CUgraphExec exec, const struct totals *sum)
{
    struct own stale;
    for (int i = 0; i < PAGE_DEVICES; i++) {
        struct own own = {.key = (uint64_t)exec + (uint64_t)i, .bytes = sum->bytes[i],
                          .owner = (uint64_t)sum->device[i], .kind = OWN_GRAPH, .ordinal = (int16_t)i};
        if (sum->bytes[i])
            table_put(&own, &stale);
    }
}

#define INSTANTIATE(graph, call)                                 \
    ENTER;                                                       \
    struct totals sum = {.bytes = {0}};                          \
    struct reserve *r[PAGE_DEVICES];                             \
    if (guard_page)                                              \
        look_through(graph, &sum, 0);                            \
    CUresult result = begin(&sum, r);                            \
    if (result)                                                  \
        return result;                                           \
    result = call;                                               \
    end(r);                                                      \
    if (!result)                                                 \
        enter(*out, &sum);                                       \
    return result

CUresult wrap_cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *node, char *log, size_t size)
{
    INSTANTIATE(graph, REAL(cuGraphInstantiate)(out, graph, node, log, size));
}

CUresult wrap_cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *node, char *log, size_t size)
{
    INSTANTIATE(graph, REAL(cuGraphInstantiate_v2)(out, graph, node, log, size));
}

CUresult wrap_cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    INSTANTIATE(graph, REAL(cuGraphInstantiateWithFlags)(out, graph, flags));
}

CUresult wrap_cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, void *params)
{
    INSTANTIATE(graph, REAL(cuGraphInstantiateWithParams)(out, graph, params));
}

CUresult wrap_cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, void *params)
{
    INSTANTIATE(graph, REAL(cuGraphInstantiateWithParams_ptsz)(out, graph, params));
}

/* Whether the last launch of a graph with memory nodes was a launch of the same graph in the same
 * stream. Its memory is then still in place. Also records this launch as the last one. */
static bool repeats(CUgraphExec exec, CUstream stream, bool per_thread)
{
    static uint64_t last;
    static __thread char own; /* stands for the thread's default stream */
    uint64_t key = (uint64_t)stream;
    if (key == 2 || (per_thread && !key))
        key = (uint64_t)&own;
    key ^= (uint64_t)exec * 0x9e3779b97f4a7c15ull;
    if (__atomic_load_n(&last, __ATOMIC_RELAXED) == key)
        return true;
    __atomic_store_n(&last, key, __ATOMIC_RELAXED);
    return false;
}

/* If this launch may reserve memory, fills `sum` and returns true. A graph reserves all its memory
 * at its first launch, and at its first launch after each trim. Later it may reserve memory if it
 * does not repeat the last launch. A graph without memory nodes never reserves memory, and is not
 * in the table. */
static bool reserves_memory(CUgraphExec exec, CUstream stream, bool per_thread, struct totals *sum)
{
    uint32_t now = __atomic_load_n(&graph_trims, __ATOMIC_ACQUIRE) + 1;
    bool known = false, found = false, repeat = false;
    *sum = (struct totals){.bytes = {0}};
    for (int i = 0; i < PAGE_DEVICES; i++) {
        struct own own;
        if (!table_get(OWN_GRAPH, (uint64_t)exec + (uint64_t)i, &own))
            continue;
        if (!known)
            repeat = repeats(exec, stream, per_thread);
        known = true;
        if (own.extra == now && repeat)
            continue;
        sum->bytes[i] = own.extra == now ? 0 : own.bytes;
        sum->look[i] = true;
        sum->device[i] = (CUdevice)own.owner;
        found = true;
    }
    return found;
}

static void launched(CUgraphExec exec, const struct totals *sum, uint32_t at)
{
    struct own own, stale;
    for (int i = 0; i < PAGE_DEVICES; i++)
        if (sum->bytes[i] && table_take(OWN_GRAPH, (uint64_t)exec + (uint64_t)i, &own)) {
            own.extra = at;
            table_put(&own, &stale);
        }
}

#define LAUNCH(exec, stream, per_thread, call)                               \
    ENTER;                                                                   \
    struct totals sum;                                                       \
    struct reserve *r[PAGE_DEVICES];                                         \
    if (!guard_page || !table_seen(OWN_GRAPH) ||                             \
        !reserves_memory(exec, stream, per_thread, &sum))                    \
        return call;                                                         \
    uint32_t at = __atomic_load_n(&graph_trims, __ATOMIC_ACQUIRE) + 1;       \
    CUresult result = begin(&sum, r);                                        \
    if (result)                                                              \
        return result;                                                       \
    result = call;                                                           \
    end(r);                                                                  \
    if (!result)                                                             \
        launched(exec, &sum, at);                                            \
    return result

CUresult wrap_cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    CUresult full = window_pass(stream, false);
    if (full)
        return full;
    LAUNCH(exec, stream, false, REAL(cuGraphLaunch)(exec, stream));
}

CUresult wrap_cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    CUresult full = window_pass(stream, true);
    if (full)
        return full;
    LAUNCH(exec, stream, true, REAL(cuGraphLaunch_ptsz)(exec, stream));
}

CUresult wrap_cuGraphUpload(CUgraphExec exec, CUstream stream)
{
    LAUNCH(exec, stream, false, REAL(cuGraphUpload)(exec, stream));
}

CUresult wrap_cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
    LAUNCH(exec, stream, true, REAL(cuGraphUpload_ptsz)(exec, stream));
}

CUresult wrap_cuGraphExecDestroy(CUgraphExec exec)
{
    ENTER_BACK(cuGraphExecDestroy, (uint64_t)exec);
    struct own own;
    bool ours = false;
    for (int i = 0; table_seen(OWN_GRAPH) && i < PAGE_DEVICES; i++)
        ours |= table_take(OWN_GRAPH, (uint64_t)exec + (uint64_t)i, &own);
    CUresult result = REAL(cuGraphExecDestroy)(exec);
    if (ours)
        pools_settle(-1);
    return result;
}

CUresult wrap_cuDeviceGraphMemTrim(CUdevice device)
{
    ENTER_BACK(cuDeviceGraphMemTrim, (uint64_t)device);
    __atomic_add_fetch(&graph_trims, 1, __ATOMIC_ACQ_REL);
    CUresult result = REAL(cuDeviceGraphMemTrim)(device);
    struct here h = here_of_device(device);
    if (h.ordinal >= 0)
        pools_settle(h.ordinal);
    return result;
}
