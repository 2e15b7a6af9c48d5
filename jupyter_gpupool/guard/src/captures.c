/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Streams that record a graph. A suspend must not interrupt a recording. During most of a recording
 * no call is inside the driver, and a recording may last longer than an idle session keeps its
 * slice. So the slot holds the number of streams that record, and the broker treats a recording as
 * use of the slice. A recording ends when the program ends the capture, or destroys the stream or
 * its context. If only one thread may end the capture, the recording also ends with this thread.
 */
#include "counting.h"
#include "wraps.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RELAXED = 2 };

static pthread_key_t at_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t this_thread(void) { return (uint32_t)syscall(SYS_gettid); }

/* The per-thread default stream has the same handle in all threads, but it is a different stream in
 * each thread. So its key contains the thread id. */
static uint64_t key_of(CUstream stream, bool per_thread)
{
    uint64_t handle = (uint64_t)stream;
    return handle == 2 || (per_thread && !handle) ? (uint64_t)this_thread() << 2 | 2 : handle;
}

static void count(int more)
{
    struct page_slot *slot = guard_slot();
    if (slot)
        __atomic_add_fetch(&slot->captures, (uint32_t)more, __ATOMIC_SEQ_CST);
}

bool capture_any(void)
{
    const struct page_slot *slot = guard_slot();
    return !slot || __atomic_load_n(&slot->captures, __ATOMIC_RELAXED);
}

void capture_over(const struct own *own)
{
    (void)own;
    count(-1);
}

/* ---- a thread that ends */

static bool of_thread(const struct own *own, void *thread)
{
    return own->kind == OWN_CAPTURE && own->extra == *(uint32_t *)thread && own->count != RELAXED;
}

static void over(const struct own *own, void *unused)
{
    (void)unused;
    capture_over(own);
}

static void thread_ends(void *unused)
{
    uint32_t thread = this_thread();
    (void)unused;
    table_sweep(of_thread, over, &thread);
}

static void make_key(void) { pthread_key_create(&at_end, thread_ends); }

/* ---- the calls */

/* The number of the stream's context, 0 if it is unknown. This context may differ from the current
 * context. */
static uint64_t context_of(CUstream stream, bool per_thread)
{
    typedef CUresult (*ask)(CUstream, CUcontext *);
    struct here h = here_now();
    struct own own;
    CUcontext context = NULL;
    int entry = per_thread ? E_cuStreamGetCtx_ptsz : E_cuStreamGetCtx;
    if (!guard_has(entry) || ((ask)guard_real[entry])(stream, &context) || context == h.context)
        return h.number;
    return table_get(OWN_CONTEXT, (uint64_t)context, &own) ? own.owner : 0;
}

/* Count the recording before the call leaves the count of calls. So a suspend always sees the call,
 * the recording, or both. */
static CUresult begun(CUresult result, CUstream stream, bool per_thread, int mode)
{
    if (result || !guard_page)
        return result;
    struct own stale, own = {.key = key_of(stream, per_thread), .owner = context_of(stream, per_thread), .count = (uint32_t)mode,
                             .extra = this_thread(), .kind = OWN_CAPTURE};
    pthread_once(&once, make_key);
    pthread_setspecific(at_end, &at_end);
    if (table_put(&own, &stale) && !stale.kind)
        count(1);
    return result;
}

static CUresult ended(CUresult result, CUstream stream, bool per_thread)
{
    typedef CUresult (*is)(CUstream, int *);
    struct own own, stale;
    int entry = per_thread ? E_cuStreamIsCapturing_ptsz : E_cuStreamIsCapturing, status = 0;
    if (!guard_page || !table_take(OWN_CAPTURE, key_of(stream, per_thread), &own))
        return result;
    /* After an error the stream may still record, because only another thread may end the capture.
     * In this case put the entry back. */
    if (result && guard_has(entry) && !((is)guard_real[entry])(stream, &status) && status)
        table_put(&own, &stale);
    else
        capture_over(&own);
    return result;
}

CUresult wrap_cuStreamBeginCapture(CUstream stream)
{
    ENTER;
    return begun(REAL(cuStreamBeginCapture)(stream), stream, false, 0);
}

CUresult wrap_cuStreamBeginCapture_ptsz(CUstream stream)
{
    ENTER;
    return begun(REAL(cuStreamBeginCapture_ptsz)(stream), stream, true, 0);
}

CUresult wrap_cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    ENTER;
    return begun(REAL(cuStreamBeginCapture_v2)(stream, mode), stream, false, mode);
}

CUresult wrap_cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode)
{
    ENTER;
    return begun(REAL(cuStreamBeginCapture_v2_ptsz)(stream, mode), stream, true, mode);
}

CUresult wrap_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const void *edges,
                                          size_t edge_count, int mode)
{
    ENTER;
    return begun(REAL(cuStreamBeginCaptureToGraph)(stream, graph, after, edges, edge_count, mode), stream, false,
                 mode);
}

CUresult wrap_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                               const void *edges, size_t edge_count, int mode)
{
    ENTER;
    return begun(REAL(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, after, edges, edge_count, mode), stream, true,
                 mode);
}

CUresult wrap_cuStreamEndCapture(CUstream stream, CUgraph *out)
{
    ENTER;
    return ended(REAL(cuStreamEndCapture)(stream, out), stream, false);
}

CUresult wrap_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out)
{
    ENTER;
    return ended(REAL(cuStreamEndCapture_ptsz)(stream, out), stream, true);
}

CUresult wrap_cuStreamDestroy_v2(CUstream stream)
{
    ENTER_BACK(cuStreamDestroy_v2, (uint64_t)stream);
    struct own own;
    bool records = table_seen(OWN_CAPTURE) && table_take(OWN_CAPTURE, (uint64_t)stream, &own);
    CUresult result = REAL(cuStreamDestroy_v2)(stream);
    if (records)
        capture_over(&own);
    return result;
}
