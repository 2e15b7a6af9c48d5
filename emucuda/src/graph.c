/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Graphs and their nodes.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

static bool node_bad(const struct node *n) { return !n || n->magic != MAGIC_NODE; }

/* ---- building ---- */

struct graph *graph_new(void)
{
    struct graph *g = calloc(1, sizeof *g);
    if (g)
        g->magic = MAGIC_GRAPH;
    return g;
}

struct node *node_add(struct graph *g, int type)
{
    struct node *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->magic = MAGIC_NODE;
    n->type = type;
    n->graph = g;
    if (g->last)
        g->last->next = n;
    else
        g->first = n;
    g->last = n;
    g->count++;
    return n;
}

static void nodes_delete(struct node *first)
{
    while (first) {
        struct node *n = first;
        first = n->next;
        if (n->type == NODE_KERNEL)
            free(n->of.launch.values);
        if (n->type == NODE_GRAPH && n->of.child)
            graph_delete(n->of.child);
        if ((n->type == NODE_ALLOC || n->type == NODE_FREE) && n->of.memory) {
            pthread_mutex_lock(&driver.lock);
            graph_memory_unref(n->of.memory);
            pthread_mutex_unlock(&driver.lock);
        }
        n->magic = 0;
        free(n);
    }
}

/* Removes a node that could not be completed. */
void node_drop_last(struct graph *g, struct node *node)
{
    struct node *before = NULL;
    for (struct node *n = g->first; n != node; n = n->next)
        before = n;
    if (before)
        before->next = NULL;
    else
        g->first = NULL;
    g->last = before;
    g->count--;
    nodes_delete(node);
}

void graph_delete(struct graph *g)
{
    nodes_delete(g->first);
    g->magic = 0;
    free(g);
}

static size_t values_size(const struct kernel *k)
{
    return k->params ? k->offset[k->params - 1] + k->size[k->params - 1] : 0;
}

CUresult node_set_launch(struct node *node, struct kernel *k, const struct launch *launch, void **params)
{
    char *values = malloc(values_size(k) + 1);
    if (!values)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < k->params; i++)
        memcpy(values + k->offset[i], params[i], k->size[i]);
    node->of.launch.kernel = k;
    node->of.launch.shape = *launch;
    node->of.launch.values = values;
    return CUDA_SUCCESS;
}

static CUresult nodes_copy(const struct node *first, struct graph *to)
{
    for (const struct node *n = first; n; n = n->next) {
        CUresult result = CUDA_SUCCESS;
        struct node *c = node_add(to, n->type);
        if (!c)
            return CUDA_ERROR_OUT_OF_MEMORY;
        if (n->type == NODE_KERNEL) {
            size_t size = values_size(n->of.launch.kernel);
            c->of.launch.kernel = n->of.launch.kernel;
            c->of.launch.shape = n->of.launch.shape;
            c->of.launch.values = malloc(size + 1);
            if (!c->of.launch.values)
                return CUDA_ERROR_OUT_OF_MEMORY;
            memcpy(c->of.launch.values, n->of.launch.values, size);
        } else if (n->type == NODE_GRAPH) {
            result = graph_copy(n->of.child, &c->of.child);
        } else {
            c->of = n->of;
            if (n->type == NODE_ALLOC || n->type == NODE_FREE) {
                pthread_mutex_lock(&driver.lock);
                c->of.memory->references++;
                pthread_mutex_unlock(&driver.lock);
            }
        }
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

CUresult graph_copy(const struct graph *from, struct graph **to)
{
    struct graph *g = graph_new();
    CUresult result = g ? nodes_copy(from->first, g) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result && g)
        graph_delete(g);
    *to = result ? NULL : g;
    return result;
}

static bool has_memory(const struct node *first)
{
    for (const struct node *n = first; n; n = n->next)
        if (n->type == NODE_ALLOC || n->type == NODE_FREE)
            return true;
    return false;
}

/* Every call that adds a node makes these checks. */
static CUresult check(const struct graph *g, CUgraphNode *const *out, const CUgraphNode *dependencies, size_t count)
{
    CHECKED;
    if (graph_bad(g) || !*out || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (node_bad(dependencies[i]) || dependencies[i]->graph != g)
            return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

#define ADDING(out, g, dependencies, count)                              \
    do {                                                                 \
        CUresult adding_ = check(g, &(out), dependencies, count);        \
        if (adding_)                                                     \
            return adding_;                                              \
    } while (0)

EXPORT CUresult cuGraphCreate(CUgraph *out, unsigned flags)
{
    CHECKED;
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = graph_new();
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphDestroy(CUgraph g)
{
    CHECKED;
    if (graph_bad(g))
        return CUDA_ERROR_INVALID_VALUE;
    graph_delete(g);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphClone(CUgraph *out, CUgraph g)
{
    CHECKED;
    if (graph_bad(g) || !out)
        return CUDA_ERROR_INVALID_VALUE;
    if (has_memory(g->first))
        return CUDA_ERROR_NOT_SUPPORTED; /* the driver cannot clone a graph with memory nodes */
    return graph_copy(g, out);
}

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n)
{
    REQUIRE(out && !graph_bad(g));
    ADDING(out, g, d, n);
    *out = node_add(g, NODE_EMPTY);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                     const CUDA_KERNEL_NODE_PARAMS *p)
{
    void *list[MAX_PARAMS];
    ADDING(out, g, d, n);
    if (!p || kernel_bad(p->func))
        return CUDA_ERROR_INVALID_VALUE;
    struct launch launch = {{p->gridDimX, p->gridDimY, p->gridDimZ}, {p->blockDimX, p->blockDimY, p->blockDimZ},
                            p->sharedMemBytes, false};
    void **params = launch_params(p->func, p->kernelParams, p->extra, list);
    if (launch_bad(p->func, &launch) || (p->func->params && !params))
        return CUDA_ERROR_INVALID_VALUE;
    struct node *node = node_add(g, NODE_KERNEL);
    CUresult result = node ? node_set_launch(node, p->func, &launch, params) : CUDA_ERROR_OUT_OF_MEMORY;
    if (!result)
        *out = node;
    else if (node)
        node_drop_last(g, node);
    return result;
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                        const CUDA_KERNEL_NODE_PARAMS *p)
{
    return cuGraphAddKernelNode(out, g, d, n, p);
}

EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                     const CUDA_MEMCPY3D *p, CUcontext context)
{
    ADDING(out, g, d, n);
    if (!p || !context_known(context))
        return CUDA_ERROR_INVALID_VALUE;
    if (p->srcMemoryType == MEMORYTYPE_ARRAY || p->dstMemoryType == MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED; /* an array's bytes cannot be read or written here */
    *out = node_add(g, NODE_MEMCPY);
    if (*out)
        (*out)->of.copy = *p;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                     const CUDA_MEMSET_NODE_PARAMS *p, CUcontext context)
{
    ADDING(out, g, d, n);
    if (!p || (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4) || !p->width ||
        !p->height)
        return CUDA_ERROR_INVALID_VALUE;
    if (!context_known(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = node_add(g, NODE_MEMSET);
    if (*out)
        (*out)->of.fill = *p;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                   const CUDA_HOST_NODE_PARAMS *p)
{
    REQUIRE(out && !graph_bad(g));
    ADDING(out, g, d, n);
    if (!p || !p->fn)
        return CUDA_ERROR_INVALID_VALUE;
    *out = node_add(g, NODE_HOST);
    if (*out)
        (*out)->of.host = *p;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n, CUgraph child)
{
    ADDING(out, g, d, n);
    if (graph_bad(child) || child == g)
        return CUDA_ERROR_INVALID_VALUE;
    if (has_memory(child->first))
        /* Drivers before CUDA 12.9 also refuse a child graph with memory nodes. CUDA 12.9
         * introduced ownership of child graphs, which the emulation lacks. */
        return CUDA_ERROR_NOT_SUPPORTED;
    struct graph *copy;
    CUresult result = graph_copy(child, &copy);
    if (result)
        return result;
    *out = node_add(g, NODE_GRAPH);
    if (!*out) {
        graph_delete(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*out)->of.child = copy;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n,
                                       CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    ADDING(out, g, d, n);
    CUresult result = p ? graph_memory_node(g, &p->poolProps, p->bytesize, out) : CUDA_ERROR_INVALID_VALUE;
    if (!result)
        p->dptr = (*out)->of.memory->address;
    return result;
}

EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n, CUdeviceptr p)
{
    ADDING(out, g, d, n);
    return graph_free_node(g, p, out);
}

EXPORT CUresult cuGraphAddNode(CUgraphNode *out, CUgraph g, const CUgraphNode *d, size_t n, CUgraphNodeParams *p)
{
    CUcontext context = NULL;
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    switch (p->type) {
    case NODE_KERNEL: return cuGraphAddKernelNode(out, g, d, n, &p->kernel);
    case NODE_MEMCPY: return cuGraphAddMemcpyNode(out, g, d, n, &p->memcpy.copyParams, p->memcpy.copyCtx);
    case NODE_MEMSET:
        context = *(CUcontext *)(&p->memset + 1); /* the structure has this field since version 2 */
        return cuGraphAddMemsetNode(out, g, d, n, &p->memset, context);
    case NODE_HOST: return cuGraphAddHostNode(out, g, d, n, &p->host);
    case NODE_GRAPH: return cuGraphAddChildGraphNode(out, g, d, n, p->graph);
    case NODE_EMPTY: return cuGraphAddEmptyNode(out, g, d, n);
    case NODE_ALLOC: return cuGraphAddMemAllocNode(out, g, d, n, &p->alloc);
    case NODE_FREE: return cuGraphAddMemFreeNode(out, g, d, n, p->free);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph g, const CUgraphNode *d, const void *edges, size_t n,
                                  CUgraphNodeParams *p)
{
    (void)edges;
    return cuGraphAddNode(out, g, d, n, p);
}

/* ---- queries ---- */

EXPORT CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count)
{
    CHECKED;
    if (graph_bad(g) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    size_t i = 0;
    for (struct node *n = g->first; n && nodes; n = n->next, i++)
        if (i < *count)
            nodes[i] = n;
    for (; nodes && i < *count; i++)
        nodes[i] = NULL;
    *count = g->count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode n, int *type)
{
    CHECKED;
    if (node_bad(n) || !type)
        return CUDA_ERROR_INVALID_VALUE;
    *type = n->type;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode n, CUgraph *g)
{
    CHECKED;
    if (node_bad(n) || n->type != NODE_GRAPH || !g)
        return CUDA_ERROR_INVALID_VALUE;
    *g = n->of.child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode n, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    REQUIRE(!node_bad(n) && p);
    CHECKED;
    if (n->type != NODE_ALLOC)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph_memory *m = n->of.memory;
    *p = (CUDA_MEM_ALLOC_NODE_PARAMS){.poolProps = m->props, .bytesize = m->size, .dptr = m->address};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode n, CUdeviceptr *p)
{
    REQUIRE(!node_bad(n) && p);
    CHECKED;
    if (n->type != NODE_FREE)
        return CUDA_ERROR_INVALID_VALUE;
    *p = n->of.memory->address;
    return CUDA_SUCCESS;
}
