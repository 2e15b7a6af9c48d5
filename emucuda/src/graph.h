/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Graphs. A node can depend only on nodes that already exist. So a launch runs the nodes in the
 * order in which they were added.
 */
#ifndef EMUCUDA_GRAPH_H
#define EMUCUDA_GRAPH_H

#include "module.h"

enum node_type { NODE_KERNEL = 0, NODE_MEMCPY = 1, NODE_MEMSET = 2, NODE_HOST = 3, NODE_GRAPH = 4,
                 NODE_EMPTY = 5, NODE_ALLOC = 10, NODE_FREE = 11 };

/* The memory of an allocation node. Its address stays reserved as long as a graph uses the memory.
 * Its bytes exist from a launch until a free node or the program frees them. */
struct graph_memory {
    uint64_t address, size, extent;
    int device;
    bool live;
    bool instantiated;   /* an executable graph uses this memory, so a second instantiation fails */
    unsigned references; /* one for each node, and one more while `live` */
    CUmemPoolProps props;
    struct graph_memory *next;
};

struct node {
    uint32_t magic;
    int type;
    struct graph *graph;
    union {
        struct {
            struct kernel *kernel;
            struct launch shape;
            char *values; /* a copy of the parameters */
        } launch;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS fill;
        CUDA_HOST_NODE_PARAMS host;
        struct graph *child;
        struct graph_memory *memory; /* for NODE_ALLOC and NODE_FREE */
    } of;
    struct node *next;
};

struct graph {
    uint32_t magic;
    size_t count;
    struct node *first, *last;
};

static inline bool graph_bad(const struct graph *g) { return !g || g->magic != MAGIC_GRAPH; }

/* ---- graph.c ---- */
struct graph *graph_new(void);
void graph_delete(struct graph *graph);
struct node *node_add(struct graph *graph, int type); /* NULL: the host has no memory */
/* Copies a graph. A memory node and its copy use the same memory. */
CUresult graph_copy(const struct graph *from, struct graph **to);
void node_drop_last(struct graph *graph, struct node *node);
CUresult node_set_launch(struct node *node, struct kernel *k, const struct launch *launch, void **params);

/* ---- graph_memory.c ---- */
CUresult graph_memory_node(struct graph *graph, const CUmemPoolProps *props, size_t size, struct node **out);
CUresult graph_free_node(struct graph *graph, uint64_t address, struct node **out);
/* Call these with the lock held: */
CUresult graph_memory_alloc(struct graph_memory *m, struct context *context);
CUresult graph_memory_free(struct graph_memory *m);
void graph_memory_unref(struct graph_memory *m);
CUresult graph_memory_upload(const struct node *first);

#endif
