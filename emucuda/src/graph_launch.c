/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Executable graphs. A launch does the work of the nodes during the call, one node after the other,
 * as if the program had submitted each node to the stream.
 */
#include "graph.h"

#include <stdlib.h>

struct executable {
    uint32_t magic;
    uint64_t flags;
    struct graph *graph; /* a copy that belongs to this executable graph */
};

enum { AUTO_FREE_ON_LAUNCH = 1, UPLOAD = 2, DEVICE_LAUNCH = 4, NODE_PRIORITY = 8, FLAGS = 15 };

static bool executable_bad(const struct executable *e) { return !e || e->magic != MAGIC_EXECUTABLE; }

static CUresult claim(const struct node *first)
{
    bool taken = false;
    pthread_mutex_lock(&driver.lock);
    for (const struct node *n = first; n; n = n->next)
        taken = taken || (n->type == NODE_ALLOC && n->of.memory->instantiated);
    for (const struct node *n = first; n && !taken; n = n->next)
        if (n->type == NODE_ALLOC)
            n->of.memory->instantiated = true;
    pthread_mutex_unlock(&driver.lock);
    return taken ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph g, uint64_t flags)
{
    GATED;
    if (!out || graph_bad(g) || flags > FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & DEVICE_LAUNCH)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct executable *e = calloc(1, sizeof *e);
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct graph *copy = NULL;
    CUresult result = graph_copy(g, &copy);
    if (!result)
        result = claim(copy->first);
    if (result) {
        if (copy)
            graph_delete(copy);
        free(e);
        return result;
    }
    *e = (struct executable){MAGIC_EXECUTABLE, flags, copy};
    *out = e;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph g, unsigned long long flags)
{
    REQUIRE(flags <= FLAGS);
    return instantiate(out, g, flags);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph g, CUgraphNode *node, char *log, size_t size)
{
    if (node)
        *node = NULL;
    if (log && size)
        *log = 0;
    return instantiate(out, g, 0);
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph g, CUgraphNode *node, char *log, size_t size)
{
    return cuGraphInstantiate_v2(out, g, node, log, size);
}

EXPORT CUresult cuGraphUpload(CUgraphExec e, CUstream stream)
{
    REQUIRE_STREAM(stream);
    GATED;
    struct stream *s;
    if (executable_bad(e))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result)
        result = graph_memory_upload(e->graph->first);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(out, g, p->flags);
    if (!result && p->flags & UPLOAD)
        result = cuGraphUpload(*out, p->hUploadStream);
    p->hErrNode_out = NULL;
    p->result_out = result != CUDA_SUCCESS;
    return result;
}

EXPORT CUresult cuGraphExecGetFlags(CUgraphExec e, uint64_t *flags)
{
    CHECKED;
    if (executable_bad(e) || !flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = e->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec e)
{
    GATED;
    if (executable_bad(e))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    for (struct node *n = e->graph->first; n; n = n->next)
        if (n->type == NODE_ALLOC)
            n->of.memory->instantiated = false;
    pthread_mutex_unlock(&driver.lock);
    graph_delete(e->graph);
    e->magic = 0;
    free(e);
    return CUDA_SUCCESS;
}

static CUresult run_memory(const struct node *n, CUstream stream)
{
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && n->type == NODE_ALLOC)
        result = graph_memory_alloc(n->of.memory, s->context);
    else if (!result)
        result = graph_memory_free(n->of.memory);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

static CUresult run(const struct node *first, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    for (const struct node *n = first; n && !result; n = n->next) {
        void *params[MAX_PARAMS];
        struct kernel *k = n->of.launch.kernel;
        switch (n->type) {
        case NODE_KERNEL:
            if (kernel_bad(k))
                return CUDA_ERROR_INVALID_HANDLE;
            for (uint32_t i = 0; i < k->params; i++)
                params[i] = n->of.launch.values + k->offset[i];
            result = launch_now(k, stream, &n->of.launch.shape, params);
            break;
        case NODE_MEMCPY: result = copy_now(&n->of.copy, stream); break;
        case NODE_MEMSET: result = fill_now(&n->of.fill, stream); break;
        case NODE_HOST: result = host_now(stream, n->of.host.fn, n->of.host.userData); break;
        case NODE_GRAPH: result = run(n->of.child->first, stream); break;
        case NODE_ALLOC: case NODE_FREE: result = run_memory(n, stream); break;
        default: break;
        }
    }
    return result;
}

/* Takes the memory of a launch before any node runs. So a launch without enough memory runs no
 * node. If memory of an earlier launch is still allocated, this function returns an error; with
 * AUTO_FREE_ON_LAUNCH, it frees that memory instead. */
static CUresult prepare(struct executable *e)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    for (struct node *n = e->graph->first; n && !result; n = n->next)
        if (n->type == NODE_ALLOC && n->of.memory->live)
            result = e->flags & AUTO_FREE_ON_LAUNCH ? graph_memory_free(n->of.memory) : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = graph_memory_upload(e->graph->first);
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec e, CUstream stream)
{
    REQUIRE_STREAM(stream);
    GATED;
    CUresult result;
    if (executable_bad(e))
        return CUDA_ERROR_INVALID_VALUE;
    if (capture_refuses(stream, NULL, &result)) /* a capture could record this launch only as a
                                                 * child graph node */
        return result;
    result = prepare(e);
    return result ? result : run(e->graph->first, stream);
}
