/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The launch window limits the unfinished launches of a process while another session waits for the
 * memory of this session. A suspend waits until all submitted work is done. Without a limit, the
 * suspend takes as long as all the work that the program has queued.
 *
 * The idea and the range of 1 to 2,048 launches come from nvshare (src/hook.c, cuLaunchKernel; G.
 * Alexopoulos, "nvshare: Practical GPU Sharing Without Memory Size Constraints", ICSE 2024): after
 * a number of launches, wait for the device. A short wait doubles this number, a long wait halves
 * it. There are two differences. First, nvshare's bounds of a wait are seconds. Ours are
 * milliseconds, because a cell waits until the work is done. Second, nvshare waits for the whole
 * context. This wait fails while any stream of the context records a graph (nvshare#22). It never
 * ends if submitted work waits for a later action of this thread. So the guard waits only for the
 * stream of the launch, by an event. It waits for LONGEST_NS at most, and does not wait while any
 * stream records a graph. During a wait it releases the interpreter's lock, which a host function
 * of that stream may need.
 *
 * Each process has one window for all its streams, and a separate count for each stream.
 */
#include "counting.h"
#include "wraps.h"

#include <time.h>

#define MOST 2048u
#define SLOW_NS 20000000u      /* a wait this long halves the window */
#define VERY_SLOW_NS 200000000u /* a wait this long sets the window to 1 */
#define LONGEST_NS 5000000000ull
#define FIRST_NAP_NS 20000u
#define LAST_NAP_NS 500000u
#define STREAMS 64u /* if the program has more streams, some streams share a count, and their
                     * launches wait earlier */

enum { RELAXED = 2 };

static uint32_t window = 1;
static uint32_t pending[STREAMS]; /* number of launches since the last wait, by stream */

static bool contended(void)
{
    return guard_page && __atomic_load_n(&guard_page->contended, __ATOMIC_RELAXED);
}

static uint32_t *count_of(CUstream stream, bool per_thread)
{
    static __thread char own; /* stands for the thread's default stream */
    uint64_t key = (uint64_t)stream;
    if (key == 2 || (per_thread && !key))
        key = (uint64_t)&own;
    return &pending[(key >> 4 ^ key >> 10 ^ key) % STREAMS];
}

static void adapt(uint64_t waited)
{
    uint32_t now = __atomic_load_n(&window, __ATOMIC_RELAXED);
    uint32_t then = waited >= VERY_SLOW_NS ? 1
                    : waited >= SLOW_NS    ? (now > 1 ? now / 2 : 1)
                                           : (now < MOST ? 2 * now : MOST);
    __atomic_store_n(&window, then, __ATOMIC_RELAXED);
}

static bool done(CUevent event)
{
    return CALL(CUresult(*)(CUevent), cuEventQuery)(event) != CUDA_ERROR_NOT_READY;
}

/* Wait until the event is done, the gate closes or LONGEST_NS is over. If the gate has closed, the
 * launch waits at the gate afterwards. */
static void wait_for(CUevent event, uint64_t began)
{
    struct timespec pause = {.tv_nsec = FIRST_NAP_NS};
    if (done(event))
        return;
    void *thread = interpreter_release();
    do {
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < (long)LAST_NAP_NS)
            pause.tv_nsec *= 2;
    } while (!done(event) && gate_lets(false) && monotonic() - began < LONGEST_NS);
    interpreter_take(thread);
}

/* Waits for the earlier launches of the stream: records an event and waits for it (wait_for).
 * Called inside a counted call. If the driver refuses the event, the launch goes on without a
 * wait. */
static void drain(CUstream stream, bool per_thread)
{
    typedef CUresult (*create)(CUevent *, unsigned);
    typedef CUresult (*record)(CUevent, CUstream);
    typedef CUresult (*destroy)(CUevent);
    typedef CUresult (*exchange)(int *);
    CUevent event;
    int mode = RELAXED;
    uint64_t began = monotonic();
    if (CALL(create, cuEventCreate)(&event, EVENT_DISABLE_TIMING))
        return;
    /* Another thread may begin to record a graph now, in a mode that forbids the calls below in all
     * threads. The mode RELAXED allows them in this thread. */
    bool exchanged = guard_has(E_cuThreadExchangeStreamCaptureMode) &&
                     !CALL(exchange, cuThreadExchangeStreamCaptureMode)(&mode);
    record submit = per_thread && guard_has(E_cuEventRecord_ptsz) ? CALL(record, cuEventRecord_ptsz)
                                                                  : CALL(record, cuEventRecord);
    if (!submit(event, stream)) {
        wait_for(event, began);
        /* If the gate has closed, the wait ended early. So its length says nothing about the
         * GPU. */
        if (gate_lets(false))
            adapt(monotonic() - began);
    }
    if (exchanged)
        CALL(exchange, cuThreadExchangeStreamCaptureMode)(&mode);
    CALL(destroy, cuEventDestroy_v2)(event);
}

CUresult window_pass(CUstream stream, bool per_thread)
{
    if (!contended() || capture_any())
        return CUDA_SUCCESS;
    uint32_t *count = count_of(stream, per_thread);
    if (__atomic_add_fetch(count, 1, __ATOMIC_RELAXED) <= __atomic_load_n(&window, __ATOMIC_RELAXED))
        return CUDA_SUCCESS;
    CUresult error = guard_enter();
    if (error)
        return error;
    drain(stream, per_thread);
    __atomic_store_n(count, 1, __ATOMIC_RELAXED);
    guard_leave();
    return CUDA_SUCCESS;
}

void window_synced(void)
{
    if (contended())
        for (uint32_t i = 0; i < STREAMS; i++)
            __atomic_store_n(&pending[i], 0, __ATOMIC_RELAXED);
}

void window_stream_synced(CUstream stream, bool per_thread)
{
    if (contended())
        __atomic_store_n(count_of(stream, per_thread), 0, __ATOMIC_RELAXED);
}

/* ---- the calls: an entry point calls its function here if the gate is not open or the slice is
 * contended */

#define LAUNCH(name, stream, per_thread, ...)             \
    CUresult error = guard_slow_gate(E_##name);           \
    if (!error)                                           \
        error = window_pass(stream, per_thread);          \
    if (!error)                                           \
        error = guard_slow_gate(E_##name);                \
    return error ? error : REAL(name)(__VA_ARGS__)

CUresult wrap_cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    LAUNCH(cuLaunchKernel, stream, false, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

CUresult wrap_cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    LAUNCH(cuLaunchKernel_ptsz, stream, true, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);
}

/* Read *config only if the guard counts the launch. The driver may refuse a call before it reads
 * the structure, so the pointer may be invalid. */
static CUstream stream_of(const CUlaunchConfig *config)
{
    return config && contended() ? config->hStream : NULL;
}

CUresult wrap_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    LAUNCH(cuLaunchKernelEx, stream_of(config), false, config, f, params, extra);
}

CUresult wrap_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    LAUNCH(cuLaunchKernelEx_ptsz, stream_of(config), true, config, f, params, extra);
}

CUresult wrap_cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params)
{
    LAUNCH(cuLaunchCooperativeKernel, stream, false, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}

CUresult wrap_cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                             unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                             void **params)
{
    LAUNCH(cuLaunchCooperativeKernel_ptsz, stream, true, f, gx, gy, gz, bx, by, bz, shared, stream, params);
}
