/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The driver inside one process: the devices that CUDA_VISIBLE_DEVICES shows, contexts, device
 * memory, streams, and the gate that the checkpoint lock closes.
 *
 * Device memory: each visible device has one memfd. The address space has two halves of the same
 * layout, `driver.delta` bytes apart. The caller sees the addresses of the user half. The user half
 * is never accessible, so that a host access to a device pointer faults as on hardware. This
 * library reaches the bytes through the alias half. The window of a device maps its memfd linearly,
 * so an allocation needs no system call. The VMM window is mapped piece by piece. The files are
 * sparse, so only memory that was touched takes host memory.
 */
#ifndef EMUCUDA_DRIVER_H
#define EMUCUDA_DRIVER_H

#include "cuda_abi.h"
#include "machine.h"

#define MAGIC_CONTEXT 0x63747831u
#define MAGIC_STREAM 0x73747231u
#define MAGIC_EVENT 0x65767431u
#define MAGIC_MODULE 0x6d6f6431u
#define MAGIC_KERNEL 0x6b726e31u
#define MAGIC_POOL 0x706f6f31u
#define MAGIC_ARRAY 0x61727231u
#define MAGIC_MIPMAP 0x6d697031u
#define MAGIC_GREEN 0x67726e31u
#define MAGIC_GRAPH 0x67726131u
#define MAGIC_NODE 0x6e6f6431u
#define MAGIC_EXECUTABLE 0x65786531u

enum allocation_kind { ALLOC_DEVICE, ALLOC_POOL, ALLOC_HOST, ALLOC_REGISTERED, ALLOC_MANAGED, ALLOC_VMM,
                       ALLOC_GRAPH };

struct allocation {
    uint64_t address;
    uint64_t size;    /* size as the program requested it */
    uint64_t extent;  /* bytes of address space that it takes */
    uint64_t charged; /* bytes charged on the device; 0 for pool memory, because the pool is charged
                       * for it */
    uint64_t id;
    int kind;
    int device; /* visible ordinal; -1: host */
    unsigned flags;
    struct context *context; /* NULL: the memory belongs to no context, or to one that has ended */
    struct pool *pool;
    struct graph_memory *graph;
    bool shared; /* the memory is exported, and shared_count() counts it */
};

/* Address ranges in a sorted array that grows. */
struct range {
    uint64_t start, size;
};
struct ranges {
    struct range *item;
    size_t count, room;
};

struct device {
    uint32_t physical;  /* index in the machine; a restore onto another device changes it */
    uint32_t pci_index; /* the index in the PCI id; never changes, because the real driver shows an
                         * old PCI id after a migration (NVIDIA/cuda-checkpoint #48) */
    int fd;             /* memfd with the bytes, -1 until the first context */
    uint64_t window, window_size; /* of the user half */
    struct ranges free;
    uint64_t next_physical; /* file offset of the next VMM allocation, after the window */
    bool charged;           /* the overhead of a context is charged */
    uint64_t overhead;      /* bytes of that overhead, loaded code included */
    bool worked;            /* work has been submitted, so the lazily loaded code is in memory */
    struct context *primary;
    unsigned primary_count;
    unsigned primary_flags;
    struct pool *default_pool, *current_pool, *graph_pool;
};

struct context {
    uint32_t magic;
    int device;
    unsigned flags;
    bool primary, destroyed;
    uint64_t id;
    struct green *green; /* the green context to which this context belongs; both end together */
    struct stream *legacy;
    uint64_t limits[10];
    uint64_t peers; /* one bit for each visible ordinal */
    struct context *next;
};

struct stream {
    uint32_t magic;
    struct context *context;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t tail; /* time at which all submitted work is done, in ns of CLOCK_MONOTONIC */
    bool destroyed;
    const void *thread; /* of a per-thread stream: an address that only this thread has */
    struct capture *capture; /* NULL: the stream runs work instead of recording it */
    struct stream *next;
};

struct event {
    uint32_t magic;
    struct context *context;
    unsigned flags;
    bool recorded;
    bool shared;   /* exported or imported */
    struct mark *mark; /* not NULL: the event was last recorded in a capture; then the event marks a
                        * place in a graph and has no time */
    uint64_t own;  /* the time of an event that is not shared */
    uint64_t *time;
    int fd; /* file with the time of a shared event; -1: none */
    struct event *previous, *next; /* in the list of all events */
};

struct pool {
    uint32_t magic;
    int device; /* -1: host */
    bool is_default, destroyed;
    bool shared;   /* the pool is exported */
    bool imported; /* the pool is imported from another process, and cannot allocate */
    CUmemPoolProps props;
    uint64_t threshold, used, used_high, reserved, reserved_high;
    uint64_t live;
    int reuse[3];
    uint64_t access; /* one bit for each visible ordinal */
    struct pool *next;
};

struct driver {
    pthread_mutex_t lock; /* protects all tables below */
    bool initialised;
    struct slot *slot;
    int count; /* number of visible devices */
    struct device device[MAX_DEVICES];
    uint64_t delta;      /* alias address = user address + delta */
    uint64_t base, span; /* begin and size of the user half */
    uint64_t vmm_window, vmm_size;
    struct ranges vmm_free;
    struct allocation *allocation; /* sorted by address */
    size_t allocations, allocations_room;
    struct context *contexts;
    struct stream *streams;
    struct event *events;
    struct pool *pools;
    uint64_t next_id;
    uint32_t inflight;       /* number of calls inside the gate; the lock waits on this futex word
                              * until it is 0 */
    uint32_t closed;         /* callers wait at the gate on this futex word */
    uint32_t suspend_state;  /* PROCESS_*; the calls of this process read this state */
    uint32_t captures;       /* number of streams in capture */
    uint32_t sticky;         /* error that ended the contexts (illegal address, lost device) */
};

extern struct driver driver;

/* ---- gate.c ---- */
CUresult driver_check(void); /* whether the driver is initialised and this process is not the child
                              * of a fork() */
CUresult driver_sticky(void); /* the error that ended the contexts, or success */
CUresult gate_enter(int *passed);
int gate_try(void); /* like gate_enter(), but does not wait: returns 0 if the gate is closed */
void gate_leave(const int *passed);
void gate_inside(int change); /* 1: the thread begins a host call; -1: the thread ends a host call.
                               * Inside a host call, the thread's own calls pass a closed gate. */
bool gate_close(uint64_t deadline); /* closes the gate and waits for running work. If work still
                                     * runs at the deadline, opens the gate and returns false. 0
                                     * means no deadline. */
void gate_open(void);
bool sync_returns_early(void); /* returns true while the process is LOCKED; crashes the process
                                * while it is CHECKPOINTED or FAILED */

/* The first line of every call that reaches a device: waits while the process is locked. */
#define GATED                                                          \
    __attribute__((cleanup(gate_leave))) int gate_passed_ = 0;         \
    do {                                                               \
        CUresult gate_result_ = gate_enter(&gate_passed_);             \
        if (gate_result_)                                              \
            return gate_result_;                                       \
    } while (0)
/* The first line of every call that only reads tables of the driver. */
#define CHECKED                                     \
    do {                                            \
        CUresult check_result_ = driver_check();    \
        if (check_result_)                          \
            return check_result_;                   \
    } while (0)

/* Put these checks of arguments before GATED or CHECKED. NVIDIA's libraries also check such
 * arguments first, and then check that cuInit has run (tests/driver_records). */
#define REQUIRE(condition)                          \
    do {                                            \
        if (!(condition))                           \
            return CUDA_ERROR_INVALID_VALUE;        \
    } while (0)
#define REQUIRE_HANDLE(condition)                   \
    do {                                            \
        if (!(condition))                           \
            return CUDA_ERROR_INVALID_HANDLE;       \
    } while (0)
/* Most calls with a stream make this check. Copies, kernel launches, allocations, synchronise calls
 * and cuStreamQuery do not make it. */
#define REQUIRE_STREAM(stream) REQUIRE_HANDLE(!stream_bad(stream))

/* ---- device.c ---- */
int device_attribute(int number, int device); /* by the attribute's number in the Driver API */

/* ---- context.c ---- */
CUresult context_current(struct context **out);
/* Call these with the lock held: */
/* Makes a context active. If `*out` is a primary context that has ended, this context becomes
 * active again. If `*out` is null, the function makes a new context. */
CUresult context_new(int device, unsigned flags, struct context **out);
void context_end(struct context *c);
bool context_valid(struct context *context);
bool context_known(struct context *context); /* call this without the lock */

/* ---- arena.c: address space and bytes ---- */
CUresult arena_init(void);
CUresult arena_open_device(int device);
void *arena_host(uint64_t user_address); /* the alias address of a device address */
#define ARENA_PIECE 65536
/* Writes `size` bytes to device memory. With `repeated`, `from` has ARENA_PIECE bytes, and the
 * function writes them again and again. If the function returns false, the caller must write
 * through the alias half. */
bool arena_write(int device, uint64_t address, const char *from, uint64_t size, bool repeated);
void arena_punch(int device, uint64_t file_offset, uint64_t size);
void arena_poison(bool poisoned);
CUresult arena_vmm_map(uint64_t address, uint64_t size, int fd, uint64_t file_offset);
void arena_vmm_unmap(uint64_t address, uint64_t size);
/* Returns 0 if no range is large enough. */
uint64_t ranges_take(struct ranges *ranges, uint64_t size, uint64_t align, uint64_t fixed);
bool ranges_give(struct ranges *ranges, uint64_t start, uint64_t size);

/* ---- memory.c ---- */
struct allocation *allocation_find(uint64_t address);
struct allocation *allocation_add(const struct allocation *a); /* NULL: the host has no memory */
void allocation_remove(struct allocation *a);
/* Allocates device memory. The caller sets `charge` to false for pool memory. The function then
 * charges no bytes, and does not round the size up to device pages. */
CUresult device_allocate(int device, uint64_t size, bool charge, struct allocation *out);
void device_release(const struct allocation *a, bool charge);
void host_release(const struct allocation *a); /* for host or managed memory */
void managed_count(int change);
/* Sets `*host` to the address at which the host can reach the bytes. Sets `*device` to the visible
 * ordinal of their device, or to -1 for host memory. */
CUresult resolve(uint64_t address, uint64_t size, void **host, int *device);

/* ---- pool.c ---- */
struct pool *pool_default(int device);
void pools_trim_idle(void);
void pools_trim_synced(void); /* call this without the lock at the end of a synchronise call */
CUresult pool_free(struct allocation *a);
struct pool *pool_for_graphs(int device);
CUresult pool_reserve(struct pool *pool, uint64_t bytes); /* makes room for `bytes` more used
                                                           * bytes */
void pool_trim(struct pool *pool, uint64_t keep);

/* ---- array.c ---- */
void arrays_end(const struct context *c); /* call this with the lock held when the context ends */

/* ---- graph_memory.c ---- */
struct graph_memory;
CUresult graph_memory_free(struct graph_memory *memory);

/* ---- vmm.c ---- */
struct physical;
struct share;
uint64_t vmm_mapped_bytes(uint64_t address, uint64_t *start);
CUresult vmm_resolve(uint64_t address, uint64_t size, void **host, int *device);
void vmm_poison(bool poisoned);
/* Maps memory of another process. If `context` is not NULL, the mapping ends with this context, and
 * a second import of the same memory into it returns the same address. The mapping then ends only
 * when it was closed as often as it was imported. */
CUresult vmm_import(const struct share *share, struct context *context, CUdeviceptr *out);
bool vmm_import_close(uint64_t address);
void vmm_imports_end(const struct context *c);

/* ---- share.c ---- */
enum { SHARE_IPC = 1, SHARE_EVENT, SHARE_VMM, SHARE_POOL, SHARE_POINTER };
struct share {
    int device; /* visible ordinal */
    bool own;   /* this process has exported it */
    int pid, fd;
    uint64_t start;        /* start time of that process */
    uint64_t offset, size; /* place in the memfd of the device */
};
void shared_count(int change);
void share_pack(CUipcMemHandle *out, int kind, int device, uint64_t offset, uint64_t size);
CUresult share_file(int *out, int kind, int device, uint64_t offset, uint64_t size);
CUresult share_unpack(const CUipcMemHandle *handle, int kind, struct share *out);
CUresult share_read(int fd, int kind, struct share *out);
int share_open(const struct share *share); /* opens the memfd; -1: impossible */
void event_unshare(struct event *event);

/* ---- stream.c ---- */
struct event *event_new(struct context *context, unsigned flags);
void events_end(const struct context *c); /* call this with the lock held when the context ends */
/* Returns true if the handle is neither a stream nor a default stream. Call this without the
 * lock. */
bool stream_bad(CUstream handle);
CUresult stream_resolve(CUstream handle, struct stream **out);
struct stream *stream_new(struct context *context, unsigned flags, int priority);
/* Adds `duration` ns of work at the end of the stream. Returns the time when this work will be
 * done. */
uint64_t stream_submit(struct stream *stream, uint64_t duration);
uint64_t stream_tail(const struct stream *stream);
uint64_t driver_tail(const struct context *context); /* NULL: over all contexts */

/* The shape of a launch. */
struct launch {
    unsigned grid[3], block[3];
    unsigned shared;  /* bytes of dynamic shared memory; the kernel's static shared memory is
                       * extra */
    bool cooperative; /* all blocks exist at the same time */
};

/* ---- copy.c, launch.c: these functions run work at once. The caller has passed the gate. No
 * capture records the work. ---- */
CUresult copy_now(const CUDA_MEMCPY3D *p, CUstream stream);
CUresult fill_now(const CUDA_MEMSET_NODE_PARAMS *p, CUstream stream);
CUresult launch_now(CUfunction kernel, CUstream stream, const struct launch *launch, void **params);
CUresult host_now(CUstream stream, void (*function)(void *), void *data);

/* ---- capture.c: each function returns true if the call must not run. A capture has then recorded
 * the call, or `*result` has the error that the call returns. ---- */
bool capture_copy(CUstream stream, const CUDA_MEMCPY3D *p, bool wait, CUresult *result);
bool capture_fill(CUstream stream, const CUDA_MEMSET_NODE_PARAMS *p, bool wait, CUresult *result);
bool capture_launch(CUstream stream, CUfunction kernel, const struct launch *launch, void **params,
                    CUresult *result);
bool capture_host(CUstream stream, void (*function)(void *), void *data, CUresult *result);
bool capture_alloc(CUstream stream, size_t size, struct pool *pool, CUdeviceptr *out, CUresult *result);
bool capture_free(CUstream stream, uint64_t address, CUresult *result);
bool capture_event(CUstream stream, struct event *event, bool wait, CUresult *result);
/* For a call that a capture does not allow: if a stream is in capture, breaks the capture and
 * returns true. Looks at all streams of `context`; if `context` is NULL, looks at `stream`. */
bool capture_refuses(CUstream stream, const struct context *context, CUresult *result);
void capture_drop(struct stream *stream); /* call this with the lock held when the stream ends */
void event_unmark(struct event *event);

/* ---- kernels.c ---- */
/* Runs a built-in kernel, or interprets the text of a kernel's module. Returns the modelled ns. */
uint64_t kernel_run(CUfunction kernel, int device, const struct launch *launch, void **params, CUresult *result);
CUresult kernel_check(CUfunction kernel, int device); /* whether the kernel can run here */

/* ---- ptx/ ---- */
CUresult kernel_compiled(CUfunction kernel, int device);
uint64_t kernel_interpret(CUfunction kernel, int device, const struct launch *launch, void **params, CUresult *result);

/* ---- service.c, suspend.c ---- */
CUresult service_start(void);
CUresult suspend_out(void);
CUresult suspend_in(const uint8_t *map, unsigned pairs, bool *fatal);

#endif
