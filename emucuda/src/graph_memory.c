/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Memory of graphs. When a program adds an allocation node, the node gets its final address. A
 * launch or an upload then takes the device memory from a pool: each device has one pool for its
 * graphs. The pool keeps its memory until cuDeviceGraphMemTrim.
 */
#include "graph.h"

#include <stdlib.h>

static struct graph_memory *memories; /* driver.lock protects this list */

static struct graph_memory *find(uint64_t address)
{
    for (struct graph_memory *m = memories; m; m = m->next)
        if (m->address == address)
            return m;
    return NULL;
}

void graph_memory_unref(struct graph_memory *m)
{
    if (--m->references)
        return;
    struct allocation a = {.address = m->address, .extent = m->extent, .device = m->device};
    device_release(&a, false);
    for (struct graph_memory **link = &memories; *link; link = &(*link)->next)
        if (*link == m) {
            *link = m->next;
            break;
        }
    free(m);
}

/* Adds an allocation node. */
CUresult graph_memory_node(struct graph *graph, const CUmemPoolProps *props, size_t size, struct node **out)
{
    struct allocation a;
    if (!size || props->allocType != MEM_ALLOCATION_PINNED || props->handleTypes ||
        props->location.type != MEM_LOCATION_DEVICE || props->location.id < 0 ||
        props->location.id >= driver.count)
        return CUDA_ERROR_INVALID_VALUE;
    struct node *node = node_add(graph, NODE_ALLOC);
    struct graph_memory *m = calloc(1, sizeof *m);
    CUresult result = node && m ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    if (!result)
        result = arena_open_device(props->location.id);
    if (!result) /* takes only address space, no bytes */
        result = device_allocate(props->location.id, (size + 511) / 512 * 512, false, &a);
    if (!result) {
        *m = (struct graph_memory){.address = a.address, .size = size, .extent = a.extent,
                                   .device = props->location.id, .references = 1, .props = *props,
                                   .next = memories};
        memories = m;
        node->of.memory = m;
        *out = node;
    }
    pthread_mutex_unlock(&driver.lock);
    if (result) {
        free(m);
        if (node)
            node_drop_last(graph, node);
    }
    return result;
}

CUresult graph_free_node(struct graph *graph, uint64_t address, struct node **out)
{
    struct node *node = node_add(graph, NODE_FREE);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    struct graph_memory *m = find(address);
    bool freed = false;
    for (struct node *n = graph->first; n && m; n = n->next)
        freed = freed || (n->type == NODE_FREE && n->of.memory == m);
    if (m && !freed) {
        m->references++;
        node->of.memory = m;
        *out = node;
    }
    pthread_mutex_unlock(&driver.lock);
    if (m && !freed)
        return CUDA_SUCCESS;
    node_drop_last(graph, node);
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult graph_memory_alloc(struct graph_memory *m, struct context *context)
{
    struct pool *pool = pool_for_graphs(m->device);
    CUresult result = pool ? pool_reserve(pool, m->extent) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result)
        return result;
    struct allocation a = {.address = m->address, .size = m->size, .extent = m->extent,
                           .kind = ALLOC_GRAPH, .device = m->device, .context = context,
                           .pool = pool, .graph = m};
    if (!allocation_add(&a))
        return CUDA_ERROR_OUT_OF_MEMORY;
    m->live = true;
    m->references++;
    pool->used += m->extent;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    return CUDA_SUCCESS;
}

/* Frees the bytes and removes the entry from the table. The address stays reserved as long as a
 * graph uses it. */
CUresult graph_memory_free(struct graph_memory *m)
{
    struct allocation *a = allocation_find(m->address);
    if (!m->live || !a)
        return CUDA_ERROR_INVALID_VALUE;
    arena_punch(m->device, m->address - driver.device[m->device].window, m->extent);
    a->pool->used -= m->extent;
    allocation_remove(a);
    m->live = false;
    graph_memory_unref(m);
    return CUDA_SUCCESS;
}

/* Allocates the peak memory that a launch of the nodes needs. */
CUresult graph_memory_upload(const struct node *first)
{
    CUresult result = CUDA_SUCCESS;
    for (int device = 0; device < driver.count && !result; device++) {
        uint64_t now = 0, most = 0;
        for (const struct node *n = first; n; n = n->next) {
            if ((n->type != NODE_ALLOC && n->type != NODE_FREE) || n->of.memory->device != device)
                continue;
            if (n->type == NODE_ALLOC && !n->of.memory->live)
                now += n->of.memory->extent;
            else if (n->type == NODE_FREE && now >= n->of.memory->extent)
                now -= n->of.memory->extent;
            most = now > most ? now : most;
        }
        struct pool *pool = most ? pool_for_graphs(device) : NULL;
        if (most)
            result = pool ? pool_reserve(pool, most) : CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

enum { ATTR_USED, ATTR_USED_HIGH, ATTR_RESERVED, ATTR_RESERVED_HIGH };

static CUresult attribute(CUdevice device, int which, uint64_t *value, bool set)
{
    GATED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!value || which < ATTR_USED || which > ATTR_RESERVED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    if (set && (*value || which == ATTR_USED || which == ATTR_RESERVED))
        return CUDA_ERROR_INVALID_VALUE; /* a program can reset only the high watermarks */
    pthread_mutex_lock(&driver.lock);
    struct pool *p = driver.device[device].graph_pool;
    if (set && p && which == ATTR_USED_HIGH)
        p->used_high = p->used;
    else if (set && p)
        p->reserved_high = p->reserved;
    else if (!set)
        *value = !p ? 0 : which == ATTR_USED ? p->used : which == ATTR_USED_HIGH ? p->used_high
                        : which == ATTR_RESERVED ? p->reserved : p->reserved_high;
    pthread_mutex_unlock(&driver.lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int which, void *value)
{
    return attribute(device, which, value, false);
}

EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice device, int which, void *value)
{
    return attribute(device, which, value, true);
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    GATED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&driver.lock);
    if (driver.device[device].graph_pool)
        pool_trim(driver.device[device].graph_pool, 0);
    pthread_mutex_unlock(&driver.lock);
    return CUDA_SUCCESS;
}
