/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Stream capture. Work that a program submits to a stream in capture does not run: it becomes a
 * node of a graph. A stream joins a capture when it waits for an event of that capture. When the
 * capture ends, the stream that began it must have waited for all work of the other streams.
 *
 * Each stream in a capture has a vector clock, which records the work for which the stream has
 * waited. The clock has one number for each stream S of the capture: the number of steps of S for
 * which the clock's owner has waited. An event has the clock that its stream had when the event was
 * recorded.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };
enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };

enum { MAX_JOINED = 32 }; /* the most streams in one capture */

struct capture {
    struct graph *graph;
    bool broken;
    int mode;
    uint64_t id;
    pthread_t thread;
    struct stream *member[MAX_JOINED]; /* the first stream began the capture; NULL: the stream was
                                        * destroyed */
    unsigned members, places;
    uint32_t clock[MAX_JOINED][MAX_JOINED]; /* [i][j]: steps of stream j that stream i has waited
                                             * for; [i][i]: steps of stream i */
};

struct mark {
    uint64_t capture; /* id of the capture */
    uint32_t clock[MAX_JOINED];
};

static bool any(void) { return __atomic_load_n(&driver.captures, __ATOMIC_RELAXED) != 0; }

static CUresult broke(struct capture *c, CUresult why)
{
    c->broken = true;
    return why;
}

static unsigned place_of(const struct capture *c, const struct stream *s)
{
    unsigned i = 0;
    while (c->member[i] != s)
        i++;
    return i;
}

/* Counts one more step of the stream. Call this with the lock held. */
static void step(struct capture *c, const struct stream *s)
{
    unsigned i = place_of(c, s);
    c->clock[i][i]++;
}

static CUresult join(struct capture *c, struct stream *s, const uint32_t *clock)
{
    if (!s->capture) {
        if (s == s->context->legacy || c->places == MAX_JOINED)
            return broke(c, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        c->member[c->places++] = s;
        c->members++;
        s->capture = c;
        __atomic_add_fetch(&driver.captures, 1, __ATOMIC_RELAXED);
    }
    unsigned i = place_of(c, s);
    for (unsigned j = 0; j < MAX_JOINED; j++)
        if (clock[j] > c->clock[i][j])
            c->clock[i][j] = clock[j];
    return CUDA_SUCCESS;
}

/* True if the stream that began the capture has waited for all work of the other streams. */
static bool all_joined(const struct capture *c)
{
    for (unsigned i = 1; i < c->places; i++)
        if (c->clock[0][i] < c->clock[i][i])
            return false;
    return true;
}

/* Returns the capture that must record the call, or NULL. Call this with the lock held. A call on
 * the legacy stream would wait for the blocking streams of its context. If one of these streams is
 * in capture, this function breaks that capture and sets an error. */
static struct capture *find(CUstream handle, CUresult *result)
{
    struct stream *s;
    *result = stream_resolve(handle, &s);
    if (*result)
        return NULL;
    if (s->capture) {
        if (s->capture->broken)
            *result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        return s->capture;
    }
    for (struct stream *o = driver.streams; o && s == s->context->legacy; o = o->next)
        if (o->capture && o->context == s->context && !(o->flags & STREAM_NON_BLOCKING)) {
            *result = broke(o->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            return o->capture;
        }
    return NULL;
}

/* Adds a node to the graph if the stream is in capture. `waits` means that the call returns only
 * when its work is done; such a call breaks the capture. Returns true if the call must not run
 * now. */
static bool recording(CUstream stream, int type, bool waits, struct node **node, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (!any())
        return false;
    pthread_mutex_lock(&driver.lock);
    struct stream *s;
    struct capture *c = find(stream, result);
    if (c && !*result && waits)
        *result = broke(c, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (c && !*result && !(*node = node_add(c->graph, type)))
        *result = broke(c, CUDA_ERROR_OUT_OF_MEMORY);
    if (c && !*result && !stream_resolve(stream, &s))
        step(c, s);
    pthread_mutex_unlock(&driver.lock);
    return c || *result;
}

bool capture_copy(CUstream stream, const CUDA_MEMCPY3D *p, bool wait, CUresult *result)
{
    struct node *n = NULL;
    bool taken = recording(stream, NODE_MEMCPY, wait, &n, result);
    if (n)
        n->of.copy = *p;
    return taken;
}

bool capture_fill(CUstream stream, const CUDA_MEMSET_NODE_PARAMS *p, bool wait, CUresult *result)
{
    struct node *n = NULL;
    bool taken = recording(stream, NODE_MEMSET, wait, &n, result);
    if (n)
        n->of.fill = *p;
    return taken;
}

bool capture_launch(CUstream stream, CUfunction kernel, const struct launch *launch, void **params,
                    CUresult *result)
{
    struct node *n = NULL;
    bool taken = recording(stream, NODE_KERNEL, false, &n, result);
    if (n && (*result = node_set_launch(n, kernel, launch, params)))
        node_drop_last(n->graph, n);
    return taken;
}

bool capture_host(CUstream stream, void (*function)(void *), void *data, CUresult *result)
{
    struct node *n = NULL;
    bool taken = recording(stream, NODE_HOST, false, &n, result);
    if (n)
        n->of.host = (CUDA_HOST_NODE_PARAMS){function, data};
    return taken;
}

/* Returns the graph of the stream's capture, or NULL. The caller adds a memory node to the graph.
 * The functions that add memory nodes take the lock, so this function releases the lock. */
static struct graph *graph_of(CUstream stream, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (!any())
        return NULL;
    pthread_mutex_lock(&driver.lock);
    struct stream *s;
    struct capture *c = find(stream, result);
    struct graph *graph = c && !*result ? c->graph : NULL;
    if (graph && !stream_resolve(stream, &s))
        step(c, s);
    pthread_mutex_unlock(&driver.lock);
    return graph;
}

bool capture_alloc(CUstream stream, size_t size, struct pool *pool, CUdeviceptr *out, CUresult *result)
{
    struct node *n = NULL;
    struct stream *s = NULL;
    struct graph *graph = graph_of(stream, result);
    if (!graph)
        return *result != CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    stream_resolve(stream, &s);
    CUmemPoolProps props = {.allocType = MEM_ALLOCATION_PINNED, .location = {MEM_LOCATION_DEVICE, s->context->device}};
    if (pool)
        props = pool->props;
    pthread_mutex_unlock(&driver.lock);
    *result = out ? graph_memory_node(graph, &props, size, &n) : CUDA_ERROR_INVALID_VALUE;
    if (n)
        *out = n->of.memory->address;
    return true;
}

bool capture_free(CUstream stream, uint64_t address, CUresult *result)
{
    struct node *n = NULL;
    struct graph *graph = graph_of(stream, result);
    if (graph)
        *result = graph_free_node(graph, address, &n);
    return graph || *result;
}

bool capture_event(CUstream stream, struct event *event, bool wait, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (!any() && !event->mark)
        return false;
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    struct capture *c = find(stream, result), *of = NULL;
    if (!*result)
        *result = stream_resolve(stream, &s);
    for (struct stream *o = driver.streams; o && event->mark && !of; o = o->next)
        if (o->capture && o->capture->id == event->mark->capture)
            of = o->capture;
    if (!*result && wait && !event->mark) {
        if (c)
            /* The event was recorded before the capture. */
            *result = broke(c, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    } else if (!*result && wait) {
        if (!of)
            *result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* the event belongs to a capture that
                                                              * has ended */
        else if (c && c != of)
            *result = broke(c, broke(of, CUDA_ERROR_STREAM_CAPTURE_MERGE));
        else
            *result = join(of, s, event->mark->clock);
    } else if (!*result) {
        event_unmark(event);
        if (c && !(event->mark = calloc(1, sizeof *event->mark))) {
            *result = broke(c, CUDA_ERROR_OUT_OF_MEMORY);
        } else if (c) {
            event->mark->capture = c->id;
            memcpy(event->mark->clock, c->clock[place_of(c, s)], sizeof event->mark->clock);
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return c || *result || (wait && of);
}

void event_unmark(struct event *event)
{
    free(event->mark);
    event->mark = NULL;
}

bool capture_refuses(CUstream stream, const struct context *context, CUresult *result)
{
    *result = CUDA_SUCCESS;
    if (!any())
        return false;
    pthread_mutex_lock(&driver.lock);
    struct capture *c = NULL;
    for (struct stream *s = driver.streams; s && context && !c; s = s->next)
        if (s->context == context)
            c = s->capture;
    if (!context)
        c = find(stream, result);
    if (c && !*result)
        *result = broke(c, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    pthread_mutex_unlock(&driver.lock);
    return *result != CUDA_SUCCESS;
}

void capture_drop(struct stream *s)
{
    struct capture *c = s->capture;
    if (!c)
        return;
    c->broken = true;
    c->member[place_of(c, s)] = NULL;
    s->capture = NULL;
    __atomic_sub_fetch(&driver.captures, 1, __ATOMIC_RELAXED);
    /* The capture's graph is never freed, because this thread already holds the lock that freeing
     * the graph would take. */
    if (!--c->members)
        free(c);
}

/* With the lock held: ends the capture for all its streams. */
static void end(struct capture *c)
{
    for (unsigned i = 0; i < c->places; i++)
        if (c->member[i]) {
            c->member[i]->capture = NULL;
            __atomic_sub_fetch(&driver.captures, 1, __ATOMIC_RELAXED);
        }
    free(c);
}

/* ---- the calls ---- */

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    REQUIRE(mode >= 0 && mode <= 2);
    GATED;
    struct stream *s;
    struct capture *c = calloc(1, sizeof *c);
    struct graph *g = graph_new();
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && (mode < MODE_GLOBAL || mode > MODE_RELAXED))
        result = CUDA_ERROR_INVALID_VALUE;
    else if (!result && s == s->context->legacy)
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    else if (!result && s->capture)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (!result && !(c && g))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        *c = (struct capture){.graph = g, .mode = mode, .id = ++driver.next_id, .thread = pthread_self(),
                              .member = {s}, .members = 1, .places = 1};
        s->capture = c;
        __atomic_add_fetch(&driver.captures, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&driver.lock);
    if (result) {
        free(c);
        if (g)
            graph_delete(g);
    }
    return result;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *out)
{
    GATED;
    struct stream *s;
    struct graph *graph = NULL;
    CUresult failed = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && !s->capture)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (!result && s->capture->mode != MODE_RELAXED && !pthread_equal(s->capture->thread, pthread_self()))
        result = broke(s->capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    else if (!result && s->capture->member[0] != s)
        result = broke(s->capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (!result) {
        graph = s->capture->graph;
        if (s->capture->broken)
            failed = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (!all_joined(s->capture))
            failed = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        else if (!out)
            failed = CUDA_ERROR_INVALID_VALUE;
        end(s->capture);
    }
    pthread_mutex_unlock(&driver.lock);
    if (graph && failed)
        graph_delete(graph);
    if (out)
        *out = result || failed ? NULL : graph;
    return result ? result : failed;
}

EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **dependencies, const void **edges, size_t *count)
{
    static __thread CUgraphNode last; /* the result points to this variable */
    REQUIRE(status);
    REQUIRE_STREAM(stream);
    CHECKED;
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    struct capture *c = result ? NULL : s->capture;
    *status = !c ? STATUS_NONE : c->broken ? STATUS_INVALIDATED : STATUS_ACTIVE;
    if (c && id)
        *id = c->id;
    if (c && graph)
        *graph = c->graph;
    last = c ? c->graph->last : NULL;
    if (dependencies)
        *dependencies = &last;
    if (edges)
        *edges = NULL;
    if (count)
        *count = last != NULL;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                          const CUgraphNode **dependencies, size_t *count)
{
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, NULL, count);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    return cuStreamGetCaptureInfo_v3(stream, status, NULL, NULL, NULL, NULL, NULL);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    static __thread int current;
    CHECKED;
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    int old = current;
    current = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
