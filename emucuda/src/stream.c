/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Streams and events. Data moves when work is submitted. The driver models only the time at which
 * the work counts as done. Synchronise calls, queries, events and the checkpoint lock, which waits
 * for running work, use that time.
 */
#include "driver.h"

#include <stdlib.h>
#include <unistd.h>

struct stream *stream_new(struct context *context, unsigned flags, int priority)
{
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    *s = (struct stream){.magic = MAGIC_STREAM, .context = context, .flags = flags,
                         .priority = priority, .id = ++driver.next_id, .next = driver.streams};
    driver.streams = s;
    return s;
}

/* Returns the thread's per-thread stream in the context. The first use creates the stream. A stream
 * exists as long as its context. A new thread may get the stream of a thread that has ended. */
static struct stream *per_thread(struct context *context)
{
    static __thread struct stream *last;
    if (last && last->context == context && !last->destroyed)
        return last;
    struct stream *s = driver.streams;
    while (s && (s->thread != &last || s->context != context || s->destroyed))
        s = s->next;
    if (!s && (s = stream_new(context, 0, 0)))
        s->thread = &last;
    return last = s;
}

static bool stream_known(const struct stream *stream)
{
    for (struct stream *s = driver.streams; s; s = s->next)
        if (s == stream)
            return !s->destroyed;
    return false;
}

static bool is_default(CUstream handle)
{
    return !handle || handle == STREAM_LEGACY || handle == STREAM_PER_THREAD;
}

bool stream_bad(CUstream handle)
{
    if (is_default(handle))
        return false;
    /* Call driver_check() before taking the lock. In the child of a fork(), a thread of the parent
     * may have held the lock, and nobody would release it. */
    if (driver_check())
        return !driver.initialised;
    pthread_mutex_lock(&driver.lock);
    bool known = stream_known(handle);
    pthread_mutex_unlock(&driver.lock);
    return !known;
}

/* Call this with the lock held. */
CUresult stream_resolve(CUstream handle, struct stream **out)
{
    if (is_default(handle)) {
        struct context *c;
        CUresult result = context_current(&c);
        if (result)
            return result;
        *out = handle == STREAM_PER_THREAD ? per_thread(c) : c->legacy;
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!stream_known(handle))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = handle;
    return CUDA_SUCCESS;
}

static bool is_legacy(const struct stream *s) { return s == s->context->legacy; }

/* Returns the time at which all work of the stream is done. The legacy stream also waits for the
 * blocking streams of its context, and these streams wait for the legacy stream. */
uint64_t stream_tail(const struct stream *stream)
{
    uint64_t tail = stream->tail;
    if (stream->flags & STREAM_NON_BLOCKING)
        return tail;
    if (!is_legacy(stream))
        return stream->context->legacy->tail > tail ? stream->context->legacy->tail : tail;
    for (struct stream *s = driver.streams; s; s = s->next)
        if (s->context == stream->context && !(s->flags & STREAM_NON_BLOCKING) && s->tail > tail)
            tail = s->tail;
    return tail;
}

/* Lazy loading: when a process submits its first work, the driver itself takes device memory for
 * code. If too little memory is free, it takes none. */
static void load_code(struct device *d)
{
    struct fault code;
    d->worked = true;
    if (fault_active(FAULT_LOADED_CODE, getpid(), (int)d->physical, &code) &&
        machine_charge(driver.slot, d->physical, code.bytes))
        d->overhead += code.bytes;
}

uint64_t stream_submit(struct stream *stream, uint64_t duration)
{
    struct device *d = &driver.device[stream->context->device];
    if (!d->worked)
        load_code(d);
    uint64_t start = stream_tail(stream), now = now_ns();
    if (start < now)
        start = now;
    stream->tail = start + duration;
    return stream->tail;
}

uint64_t driver_tail(const struct context *context)
{
    uint64_t tail = 0;
    for (struct stream *s = driver.streams; s; s = s->next)
        if ((!context || s->context == context) && s->tail > tail)
            tail = s->tail;
    return tail;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    REQUIRE(out && flags <= 1);
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    pthread_mutex_lock(&driver.lock);
    *out = stream_new(c, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    return cuStreamCreateWithPriority(out, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    REQUIRE_HANDLE(stream);
    REQUIRE_STREAM(stream);
    GATED;
    pthread_mutex_lock(&driver.lock);
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    for (struct stream **link = &driver.streams; *link; link = &(*link)->next)
        if (*link == stream && !is_legacy(stream)) {
            /* The work of a destroyed stream continues, and the legacy stream must still wait for
             * it. */
            if (stream->context->legacy->tail < stream->tail)
                stream->context->legacy->tail = stream->tail;
            capture_drop(stream);
            *link = stream->next;
            stream->magic = 0;
            free(stream);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* Resolves the stream `s` and runs `body` under the lock. Returns `result`. */
#define WITH_STREAM(handle, body)                         \
    do {                                                  \
        struct stream *s;                                 \
        pthread_mutex_lock(&driver.lock);                 \
        CUresult result = stream_resolve(handle, &s);     \
        if (!result) {                                    \
            body;                                         \
        }                                                 \
        pthread_mutex_unlock(&driver.lock);               \
        return result;                                    \
    } while (0)

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    CHECKED;
    CUresult refused;
    if (sync_returns_early())
        return CUDA_SUCCESS;
    if (capture_refuses(stream, NULL, &refused))
        return refused;
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    uint64_t tail = result ? 0 : stream_tail(s);
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    sleep_until(tail);
    pools_trim_synced();
    return driver_sticky();
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    CHECKED;
    CUresult refused;
    if (capture_refuses(stream, NULL, &refused))
        return refused;
    /* This call crashes a suspended process, as a synchronise call does. For a locked process it
     * goes on, and returns the true state of the stream. */
    sync_returns_early();
    WITH_STREAM(stream, result = driver_sticky();
                if (!result && now_ns() < stream_tail(s)) result = CUDA_ERROR_NOT_READY);
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned *flags)
{
    REQUIRE(flags);
    REQUIRE_STREAM(stream);
    CHECKED;
    WITH_STREAM(stream, *flags = s->flags);
}

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
    REQUIRE(priority);
    REQUIRE_STREAM(stream);
    CHECKED;
    WITH_STREAM(stream, *priority = s->priority);
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id)
{
    REQUIRE(id);
    REQUIRE_STREAM(stream);
    CHECKED;
    WITH_STREAM(stream, *id = s->id);
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
    REQUIRE(context);
    REQUIRE_STREAM(stream);
    CHECKED;
    WITH_STREAM(stream, *context = s->context);
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context, void **green)
{
    REQUIRE_STREAM(stream);
    if (green)
        *green = NULL;
    return cuStreamGetCtx(stream, context);
}

EXPORT CUresult cuStreamGetDevice(CUstream stream, CUdevice *device)
{
    REQUIRE(device);
    REQUIRE_STREAM(stream);
    CHECKED;
    WITH_STREAM(stream, *device = s->context->device);
}

/* Runs a host function after all earlier work of the stream. */
CUresult host_now(CUstream stream, void (*function)(void *), void *data)
{
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    uint64_t tail = result ? 0 : stream_tail(s);
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    sleep_until(tail);
    function(data);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data)
{
    REQUIRE(function);
    REQUIRE_STREAM(stream);
    GATED;
    CUresult result;
    return capture_host(stream, function, data, &result) ? result : host_now(stream, function, data);
}

EXPORT CUresult cuStreamAddCallback(CUstream stream, void (*function)(CUstream, CUresult, void *),
                                    void *data, unsigned flags)
{
    REQUIRE(function && !flags);
    REQUIRE_STREAM(stream);
    GATED;
    struct stream *s;
    CUresult refused;
    if (capture_refuses(stream, NULL, &refused))
        return refused;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    uint64_t tail = result ? 0 : stream_tail(s);
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    sleep_until(tail);
    function(stream, CUDA_SUCCESS, data);
    return CUDA_SUCCESS;
}

/* ---- events ---- */

static bool event_bad(const struct event *e) { return !e || e->magic != MAGIC_EVENT; }

/* Another process may set the time of a shared event. */
static uint64_t event_time(const struct event *e) { return __atomic_load_n(e->time, __ATOMIC_ACQUIRE); }
static void event_set(const struct event *e, uint64_t time) { __atomic_store_n(e->time, time, __ATOMIC_RELEASE); }

struct event *event_new(struct context *context, unsigned flags)
{
    struct event *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->magic = MAGIC_EVENT;
    e->context = context;
    e->flags = flags;
    e->time = &e->own;
    e->fd = -1;
    pthread_mutex_lock(&driver.lock);
    e->next = driver.events;
    if (e->next)
        e->next->previous = e;
    driver.events = e;
    pthread_mutex_unlock(&driver.lock);
    return e;
}

/* Makes the event's handle invalid, and removes the event from the list. */
static void event_end(struct event *e)
{
    event_unshare(e);
    event_unmark(e);
    e->magic = 0;
    *(e->previous ? &e->previous->next : &driver.events) = e->next;
    if (e->next)
        e->next->previous = e->previous;
}

/* Keeps the memory behind the handles of these events. So a program that uses such a handle later
 * gets an error and does not crash. */
void events_end(const struct context *c)
{
    for (struct event *e = driver.events, *next; e; e = next) {
        next = e->next;
        if (e->context == c)
            event_end(e);
    }
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (!out || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & EVENT_INTERPROCESS && !(flags & EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    *out = event_new(c, flags);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuEventDestroy_v2(CUevent e)
{
    REQUIRE_HANDLE(e);
    GATED;
    pthread_mutex_lock(&driver.lock);
    bool bad = event_bad(e);
    if (!bad)
        event_end(e);
    pthread_mutex_unlock(&driver.lock);
    if (bad)
        return CUDA_ERROR_INVALID_HANDLE;
    free(e);
    return CUDA_SUCCESS;
}

/* An event can be recorded only in a stream of its own context. But an event of the primary context
 * can also be recorded in a stream of a green context, which belongs to the primary context on
 * hardware. Here a green context is a context of its own. */
static CUresult check_recording(const struct event *e, CUstream stream)
{
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && s->context != e->context &&
        !(s->context->device == e->context->device && (s->context->green || e->context->green)))
        result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuEventRecordWithFlags(CUevent e, CUstream stream, unsigned flags)
{
    REQUIRE_STREAM(stream);
    GATED;
    if (event_bad(e))
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult refused = check_recording(e, stream);
    if (refused)
        return refused;
    CUresult captured;
    if (capture_event(stream, e, false, &captured))
        return captured;
    WITH_STREAM(stream, event_unmark(e); e->recorded = true; event_set(e, stream_submit(s, 0)));
}

EXPORT CUresult cuEventRecord(CUevent e, CUstream stream) { return cuEventRecordWithFlags(e, stream, 0); }

EXPORT CUresult cuEventQuery(CUevent e)
{
    REQUIRE_HANDLE(e);
    GATED;
    if (event_bad(e))
        return CUDA_ERROR_INVALID_HANDLE;
    if (e->mark)
        return CUDA_ERROR_CAPTURED_EVENT;
    return now_ns() >= event_time(e) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult event_wait_time(CUevent e, uint64_t *time)
{
    GATED; /* a locked process waits here. The wait for the event comes later, outside the gate, so
            * that a checkpoint lock does not wait for the event. */
    if (event_bad(e))
        return CUDA_ERROR_INVALID_HANDLE;
    if (e->mark)
        return CUDA_ERROR_CAPTURED_EVENT;
    *time = event_time(e);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventSynchronize(CUevent e)
{
    REQUIRE_HANDLE(e);
    uint64_t time;
    CUresult result = event_wait_time(e, &time);
    if (result)
        return result;
    sleep_until(time);
    pools_trim_synced();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    REQUIRE_HANDLE(ms && start);
    GATED;
    if (event_bad(start) || event_bad(end) || !start->recorded || !end->recorded ||
        (start->flags | end->flags) & EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t now = now_ns();
    if (now < event_time(start) || now < event_time(end))
        return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)(int64_t)(event_time(end) - event_time(start)) / 1e6);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
    return cuEventElapsedTime_v2(ms, a, b);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent e, unsigned flags)
{
    REQUIRE_STREAM(stream);
    GATED;
    (void)flags;
    if (event_bad(e))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult captured;
    if (capture_event(stream, e, true, &captured))
        return captured;
    WITH_STREAM(stream, uint64_t time = event_time(e); if (time > s->tail) s->tail = time);
}
