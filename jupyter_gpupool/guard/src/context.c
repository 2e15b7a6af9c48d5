/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Contexts. The driver takes some hundred MiB for the first context of a process on a device. The
 * process cannot read how much, so the page has the number of bytes to charge. The end of a context
 * frees everything that was allocated in it.
 */
#include "counting.h"
#include "own.h"
#include "wraps.h"

struct devices {
    uint32_t lock;
    uint32_t changes; /* grows whenever a context ends. A thread may use its cached context only
                       * while this number stays the same */
    uint64_t numbers;
    struct {
        uint32_t live;     /* number of contexts, including the primary context */
        bool charged;
        CUcontext primary; /* the primary context's handle while it is active */
        uint64_t bytes;    /* bytes that were charged for the first context */
        struct {
            bool known;
            unsigned flags;
            int active;
        } state;           /* the state of the primary context, as the driver last reported it */
    } device[PAGE_DEVICES];
};

static void *the_devices;

static struct devices *devices(void) { return own_block(&the_devices, sizeof(struct devices)); }

/* ---- where the calling thread allocates */

static const struct here nowhere = {.ordinal = -1};

static __thread struct here remembered;
static __thread uint32_t remembered_at;

static uint64_t number_of(struct devices *d, CUcontext context, CUdevice device)
{
    struct own own, stale;
    own_lock(&d->lock); /* two threads may add a context at once */
    if (!table_get(OWN_CONTEXT, (uint64_t)context, &own)) {
        own = (struct own){.key = (uint64_t)context, .kind = OWN_CONTEXT, .owner = ++d->numbers,
                           .extra = (uint32_t)device};
        table_put(&own, &stale);
    }
    own_unlock(&d->lock);
    return own.owner;
}

struct here here_now(void)
{
    typedef CUresult (*current)(CUcontext *);
    typedef CUresult (*device)(CUdevice *);
    struct devices *d = guard_page ? devices() : NULL;
    CUcontext context = NULL;
    if (!d || CALL(current, cuCtxGetCurrent)(&context) || !context)
        return nowhere;
    /* The program may have made this context without the guard: through an export table, or after
     * it opened the driver by its path. While the session is suspended, the driver blocks calls
     * with this context, too. So note here that the process has a context. */
    if (!guard_has_context()) {
        guard_note_init();
        guard_note_context();
    }
    uint32_t now = __atomic_load_n(&d->changes, __ATOMIC_ACQUIRE);
    if (remembered.context == context && remembered_at == now)
        return remembered;
    struct here h = {.context = context, .ordinal = -1};
    if (CALL(device, cuCtxGetDevice)(&h.device))
        return nowhere;
    h.ordinal = guard_ordinal(h.device);
    if (h.ordinal >= PAGE_DEVICES)
        h.ordinal = -1;
    h.number = number_of(d, context, h.device);
    remembered = h;
    remembered_at = now;
    return h;
}

struct here here_recorded(void)
{
    struct own own;
    CUcontext context = current_context();
    if (!current_known() || !table_get(OWN_CONTEXT, (uint64_t)context, &own))
        return nowhere;
    struct here h = here_of_device((CUdevice)own.extra);
    h.context = context;
    h.number = own.owner;
    return h;
}

struct here here_of_device(CUdevice device)
{
    struct here h = {.device = device, .ordinal = guard_page ? guard_ordinal(device) : -1};
    if (h.ordinal >= PAGE_DEVICES)
        h.ordinal = -1;
    return h;
}

/* A stream's context may differ from the current context. The difference matters only if the
 * session has more than one device. */
struct here here_of_stream(CUstream stream, bool per_thread)
{
    typedef CUresult (*device_of)(CUstream, CUdevice *);
    struct here h = here_now();
    CUdevice device;
    if (h.ordinal < 0 || guard_page->devices < 2 || (uintptr_t)stream < 16)
        return h;
    int entry = per_thread ? E_cuStreamGetDevice_ptsz : E_cuStreamGetDevice;
    if (!guard_has(entry) || ((device_of)guard_real[entry])(stream, &device) || device == h.device)
        return h;
    h.device = device;
    h.ordinal = guard_ordinal(device);
    return h;
}

/* ---- the constant charge of a context, and everything that the guard gives back when a context
 * ends */

/* Whether this process has any context. If it has one, it moves with its session. So its devices
 * are already the devices of the slice. */
static bool any_live(struct devices *d)
{
    bool live = false;
    own_lock(&d->lock);
    for (int i = 0; i < PAGE_DEVICES; i++)
        live |= d->device[i].live != 0;
    own_unlock(&d->lock);
    return live;
}

/* Called before the driver makes a context. Charges for the context if it is the first of this
 * process on the device. If two threads make the first context at the same time, both charge for
 * it, because no thread holds a lock while it asks the broker. In this case context_end() gives one
 * of the two charges back. */
static CUresult context_begin(int ordinal, uint64_t *charged)
{
    struct devices *d = devices();
    struct page_slot *slot = guard_slot();
    *charged = 0;
    if (ordinal < 0 || !d || !slot)
        return CUDA_SUCCESS;
    CUresult result = any_live(d) ? CUDA_SUCCESS : landing(ordinal);
    if (result)
        return result;
    own_lock(&d->lock);
    bool first = !d->device[ordinal].charged;
    own_unlock(&d->lock);
    if (!first)
        return CUDA_SUCCESS;
    uint64_t bytes = __atomic_load_n(&guard_page->context_bytes, __ATOMIC_RELAXED);
    result = guard_charge(ordinal, bytes);
    if (!result)
        *charged = bytes;
    else if (landing_over() == KEPT_RELEASED && !any_live(d))
        guard_follow(false);
    return result;
}

/* Called after the driver's call that makes a context. If the context is the primary context,
 * `primary` is its handle. */
static CUresult context_end(CUresult result, int ordinal, uint64_t charged, CUcontext primary)
{
    struct devices *d = devices();
    if (!result)
        guard_note_context();
    if (ordinal < 0 || !d)
        return result;
    own_lock(&d->lock);
    __typeof__(&d->device[0]) at = &d->device[ordinal];
    if (!result && (!primary || at->primary != primary)) {
        at->live++;
        if (primary)
            at->primary = primary;
    }
    if (!result && charged && !at->charged) {
        at->charged = true;
        at->bytes = charged;
        __atomic_store_n(&guard_slot()->context[ordinal], charged, __ATOMIC_RELAXED);
        charged = 0;
    }
    own_unlock(&d->lock);
    enum landing_kept kept = landing_over();
    guard_follow(any_live(d) || kept == KEPT_NOTED);
    guard_credit(ordinal, charged);
    return result;
}

static bool of_context(const struct own *own, void *with)
{
    return own->owner == *(uint64_t *)with &&
           (own->kind == OWN_DEVICE || own->kind == OWN_MANAGED || own->kind == OWN_ARRAY ||
            own->kind == OWN_CAPTURE || own->kind == OWN_REGISTERED);
}

static void credit_entry(const struct own *own, void *with)
{
    (void)with;
    settle_stale(own);
}

/* Called after a context has ended: give its memory back. If it was the last context on the device,
 * also give the constant charge back. `number` is the context's number from the table, 0 if it had
 * none. */
static void context_gone(int ordinal, uint64_t number, bool was_primary)
{
    struct devices *d = devices();
    uint64_t bytes = 0;
    if (ordinal < 0 || !d)
        return;
    __atomic_add_fetch(&d->changes, 1, __ATOMIC_ACQ_REL);
    if (number)
        table_sweep(of_context, credit_entry, &number);
    own_lock(&d->lock);
    __typeof__(&d->device[0]) at = &d->device[ordinal];
    if (was_primary)
        at->primary = NULL;
    if (at->live && !--at->live && at->charged) {
        bytes = at->bytes;
        at->charged = false;
        __atomic_store_n(&guard_slot()->context[ordinal], 0, __ATOMIC_RELAXED);
    }
    own_unlock(&d->lock);
    if (!any_live(d))
        guard_follow(false);
    guard_credit(ordinal, bytes);
    pools_settle(ordinal);
}

/* Called before a context ends: take it out of the table and return its number, 0 if it has none.
 * The entry must go before the context ends. Otherwise the driver could give the same handle to a
 * new context of another thread while the old entry is still there. The new context would then
 * allocate under the old number, and the guard would never give these bytes back. */
static uint64_t number_taken(CUcontext context)
{
    struct devices *d = devices();
    struct own own;
    if (!d || !context || !table_take(OWN_CONTEXT, (uint64_t)context, &own))
        return 0;
    __atomic_add_fetch(&d->changes, 1, __ATOMIC_ACQ_REL);
    return own.owner;
}

/* The context has not ended: put its number back. */
static void number_back(CUcontext context, CUdevice device, uint64_t number)
{
    struct own stale, own = {.key = (uint64_t)context, .kind = OWN_CONTEXT, .owner = number,
                             .extra = (uint32_t)device};
    if (number)
        table_put(&own, &stale);
}

/* ---- the calls */

#define CREATE(call, device)                                                       \
    ENTER;                                                                         \
    int ordinal = here_of_device(device).ordinal;                                  \
    uint64_t charged;                                                              \
    CUresult result = context_begin(ordinal, &charged);                              \
    if (result)                                                                    \
        return result;                                                             \
    result = context_end(call, ordinal, charged, NULL);                            \
    if (!result)                                                                   \
        current_pushed(*out);                                                      \
    return result

CUresult wrap_cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    CREATE(REAL(cuCtxCreate_v2)(out, flags, device), device);
}

CUresult wrap_cuCtxCreate_v3(CUcontext *out, void *affinity, int count, unsigned flags, CUdevice device)
{
    CREATE(REAL(cuCtxCreate_v3)(out, affinity, count, flags, device), device);
}

CUresult wrap_cuCtxCreate_v4(CUcontext *out, void *params, unsigned flags, CUdevice device)
{
    CREATE(REAL(cuCtxCreate_v4)(out, params, flags, device), device);
}

static CUresult pinned(CUresult result)
{
    if (!result)
        guard_pin(PIN_GRAPHICS);
    return result;
}

CUresult wrap_cuGLCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    CREATE(pinned(REAL(cuGLCtxCreate_v2)(out, flags, device)), device);
}

CUresult wrap_cuVDPAUCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device, uint32_t vdp, void *get)
{
    CREATE(pinned(REAL(cuVDPAUCtxCreate_v2)(out, flags, device, vdp, get)), device);
}

/* A green context is a part of the primary context. If the primary context does not exist, this
 * call creates it. So the wrapper charges for a context. */
CUresult wrap_cuGreenCtxCreate(CUgreenCtx *out, void *resources, CUdevice device, unsigned flags)
{
    ENTER;
    int ordinal = here_of_device(device).ordinal;
    uint64_t charged;
    CUresult result = context_begin(ordinal, &charged);
    if (result)
        return result;
    result = context_end(REAL(cuGreenCtxCreate)(out, resources, device, flags), ordinal, charged, NULL);
    if (!result && ordinal >= 0) {
        struct own stale, own = {.key = (uint64_t)*out, .kind = OWN_GREEN, .ordinal = (int16_t)ordinal};
        table_put(&own, &stale);
    }
    return result;
}

CUresult wrap_cuGreenCtxDestroy(CUgreenCtx context)
{
    ENTER_BACK(cuGreenCtxDestroy, (uint64_t)context);
    struct own own, stale;
    bool ours = table_take(OWN_GREEN, (uint64_t)context, &own);
    CUresult result = REAL(cuGreenCtxDestroy)(context);
    if (ours && !result)
        context_gone(own.ordinal, 0, false);
    else if (ours)
        table_put(&own, &stale);
    return result;
}

CUresult wrap_cuCtxDestroy_v2(CUcontext context)
{
    typedef CUresult (*push)(CUcontext);
    typedef CUresult (*pop)(CUcontext *);
    ENTER_BACK(cuCtxDestroy_v2, (uint64_t)context);
    struct here here = nowhere;
    uint64_t number = 0;
    if (guard_page && context) {
        /* The driver reports a device only for the current context. So make `context` current while
         * the guard asks. */
        CUcontext before;
        if (!CALL(push, cuCtxPushCurrent_v2)(context)) {
            here = here_now();
            CALL(pop, cuCtxPopCurrent_v2)(&before);
        }
        number = number_taken(context);
    }
    CUresult result = REAL(cuCtxDestroy_v2)(context);
    if (!result) {
        current_destroyed(context);
        context_gone(here.ordinal, number, false);
    } else {
        number_back(context, here.device, number);
    }
    return result;
}

/* Asks the driver for the state of the primary context, and stores it. The guard answers queries
 * from the stored state while the driver would block. Returns whether the context is active; true
 * if the driver does not answer. */
static bool primary_state(struct devices *d, CUdevice device, int ordinal)
{
    typedef CUresult (*state)(CUdevice, unsigned *, int *);
    unsigned flags = 0;
    int active = 1;
    bool known = !CALL(state, cuDevicePrimaryCtxGetState)(device, &flags, &active);
    own_lock(&d->lock);
    d->device[ordinal].state.known = known;
    d->device[ordinal].state.flags = flags;
    d->device[ordinal].state.active = active;
    own_unlock(&d->lock);
    return !known || active;
}

CUresult wrap_cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    ENTER;
    int ordinal = here_of_device(device).ordinal;
    uint64_t charged;
    CUresult result = context_begin(ordinal, &charged);
    if (result)
        return result;
    result = REAL(cuDevicePrimaryCtxRetain)(out, device);
    if (!result && ordinal >= 0 && devices())
        primary_state(devices(), device, ordinal);
    return context_end(result, ordinal, charged, result ? NULL : *out);
}

/* Called before a release or a reset of the primary context. The guard may note this call instead
 * of making it now. So the state is unknown until the driver has made the call. */
static void primary_unknown(CUdevice device)
{
    int ordinal = here_of_device(device).ordinal;
    struct devices *d = guard_page ? devices() : NULL;
    if (!d || ordinal < 0)
        return;
    own_lock(&d->lock);
    d->device[ordinal].state.known = false;
    own_unlock(&d->lock);
}

/* PyTorch makes this query while it handles the error of an earlier call. The earlier call may have
 * failed because the user interrupted its wait. If the query waited too, the user would have to
 * interrupt again. So, while the driver would block, the guard answers from the stored state. */
CUresult wrap_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    int ordinal = here_of_device(device).ordinal;
    struct devices *d = guard_page ? devices() : NULL;
    if (d && ordinal >= 0 && flags && active && guard_blocked()) {
        own_lock(&d->lock);
        bool known = d->device[ordinal].state.known;
        if (known) {
            *flags = d->device[ordinal].state.flags;
            *active = d->device[ordinal].state.active;
        }
        own_unlock(&d->lock);
        if (known)
            return CUDA_SUCCESS;
    }
    ENTER; /* if a release was noted, ENTER makes it first */
    return REAL(cuDevicePrimaryCtxGetState)(device, flags, active);
}

#define SET_FLAGS(call)                                    \
    CUresult result = guard_enter_free();                  \
    if (result)                                            \
        return result;                                     \
    result = call;                                         \
    int ordinal = here_of_device(device).ordinal;          \
    if (!result && ordinal >= 0 && devices())              \
        primary_state(devices(), device, ordinal);         \
    guard_leave();                                         \
    return result

CUresult wrap_cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags)
{
    SET_FLAGS(REAL(cuDevicePrimaryCtxSetFlags)(device, flags));
}

CUresult wrap_cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    SET_FLAGS(REAL(cuDevicePrimaryCtxSetFlags_v2)(device, flags));
}

static CUresult primary_after(CUresult result, CUdevice device)
{
    struct devices *d = devices();
    int ordinal = here_of_device(device).ordinal;
    if (result || ordinal < 0 || !d)
        return result;
    if (primary_state(d, device, ordinal))
        return result;
    own_lock(&d->lock);
    CUcontext gone = d->device[ordinal].primary;
    own_unlock(&d->lock);
    if (gone)
        context_gone(ordinal, number_taken(gone), true);
    else if (!any_live(d))
        guard_follow(false); /* a landing made the context that has now ended */
    return result;
}

CUresult wrap_cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    primary_unknown(device);
    ENTER_BACK(cuDevicePrimaryCtxRelease_v2, (uint64_t)device);
    return primary_after(REAL(cuDevicePrimaryCtxRelease_v2)(device), device);
}

CUresult wrap_cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    primary_unknown(device);
    ENTER_BACK(cuDevicePrimaryCtxReset_v2, (uint64_t)device);
    return primary_after(REAL(cuDevicePrimaryCtxReset_v2)(device), device);
}
