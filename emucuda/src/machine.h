/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The emulated machine: everything that processes must agree on, in one shared file.
 *
 * `<state>/machine` is mapped by every process that initialised CUDA or NVML. It holds the
 * devices, one slot per CUDA process (what it is charged for, its checkpoint mailbox) and the
 * injected faults. `<state>/lock` is held shared by every user of the machine and taken
 * exclusively only to (re)create it.
 */
#ifndef EMUCUDA_MACHINE_H
#define EMUCUDA_MACHINE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_DEVICES 64
#define MAX_SLOTS 1024
#define MAX_FAULTS 32
#define MACHINE_MAGIC 0x67707570656d7531ull
#define MACHINE_ABI 3u
#define DRIVER_VERSION "580.159.04" /* the driver whose behaviour is emulated (tests/driver_records) */
#define CUDA_VERSION 13000          /* its version of the API */
#define MIB (1ull << 20)
#define GRANULE (2 * MIB) /* size of a device page, as on the hardware */

/* What EMUCUDA_MACHINE asks for. Sizes in bytes, bandwidth in bytes/s (0: unlimited). */
struct spec {
    uint64_t count;
    uint64_t memory;
    uint64_t context;
    uint64_t bandwidth;
    uint64_t reserved;
    uint64_t profile; /* whose times to model, see spec.c; 0: as fast as the host */
};

/* Rates of a profile, bytes/s; 0: unlimited. */
struct rates {
    uint64_t copies;  /* between host and device */
    uint64_t memory;  /* of the device's memory */
    uint64_t suspend; /* from the device into the process's own memory, which is pageable */
    uint64_t resume;
    uint64_t begin_suspend, begin_resume; /* ns before the first byte */
};
const struct rates *spec_rates(const struct spec *spec);

/* Parses "2x16GiB,context=256MiB". 0, or -1 with a sentence in `error`. */
int spec_parse(const char *text, struct spec *out, char *error, size_t error_size);
/* Parses a size such as "1.5GiB" or "8GB/s" (`rate`). 0 or -1. */
int spec_size(const char *text, size_t length, bool rate, uint64_t *out);

enum fault_kind {
    FAULT_SLOW_COPIES,
    FAULT_LOCK_TIMEOUT,
    FAULT_CHECKPOINT_REFUSED,
    FAULT_RESTORE_FAILED,
    FAULT_DEVICE_LOST,
    FAULT_NVML_MISSING_PIDS,
    FAULT_HANG,
    /* Quirks: the other behaviour, where that of all real drivers is not known. */
    FAULT_RESIDUE,
    FAULT_NVML_LESS,
    FAULT_NVML_WAITS,
    FAULT_NVML_LATE,
    FAULT_NVML_LAG,
    FAULT_SUSPEND_KEEPS,
    FAULT_RESTORE_KEEPS_STATE,
    FAULT_RESTORE_HIDES_LOSS,
    FAULT_RESTORE_MORE,
    FAULT_MIGRATION_REFUSED,
    FAULT_INIT_NOT_ENOUGH,
    FAULT_LOCK_IGNORES_TIMEOUT,
    FAULT_NVML_HOST_PIDS,
    FAULT_CONTEXT_MORE,
    FAULT_LOADED_CODE,
    FAULT_KINDS,
};

struct fault {
    uint32_t kind;
    uint32_t used;     /* times it struck */
    uint64_t id;       /* identity of its line; `used` is kept when other lines are rewritten */
    int64_t pid;       /* -1: any */
    int64_t device;    /* machine index, -1: any */
    int64_t count;     /* how often it may strike, -1: always */
    uint64_t bandwidth; /* slow-copies: bytes/s */
    uint64_t bytes;     /* bytes of device memory, for faults about a size */
    uint64_t ms;        /* the delay of NVML */
    int64_t number;     /* nvml-host-pids: the number in lists; -1: one unused here */
    uint32_t code;     /* CUresult or Xid to report, 0: the default */
    char op[16];       /* hang: which call; "": any */
};

struct fault_table {
    uint32_t count;
    struct fault fault[MAX_FAULTS];
};

/* A request of a checkpoint call to the service thread of its target. */
enum request_op { OP_STATE = 1, OP_LOCK, OP_CHECKPOINT, OP_RESTORE, OP_UNLOCK };

struct request {
    uint32_t posted; /* futex word; the service thread sleeps on it */
    uint32_t done;   /* futex word; the caller sleeps on it */
    uint32_t op;
    uint32_t timeout_ms;
    uint32_t pairs; /* 0: no device map */
    uint8_t map[MAX_DEVICES]; /* machine index to machine index */
    int32_t result;
    uint32_t state; /* answer to OP_STATE */
};

#define BUSY_BUCKETS 64
#define BUSY_BUCKET_NS 100000000ull /* 0.1 s; the window of a utilisation sample is 1 s */

struct busy {
    uint64_t bucket[BUSY_BUCKETS]; /* (absolute bucket number << 32) | busy ns */
    uint64_t from, until;          /* the longest interval still to come, CLOCK_MONOTONIC ns */
};

struct slot {
    int32_t pid; /* in the PID namespace of the process itself; 0: free */
    uint32_t uid;
    uint64_t space; /* that namespace (its inode); 0: not known */
    uint64_t start; /* start time of the process, in clock ticks since boot */
    uint32_t state; /* PROCESS_* */
    int32_t service_tid; /* 0: no context yet */
    uint32_t managed;    /* live managed allocations; a checkpoint needs 0 */
    uint32_t shared;     /* live exports and imports; a checkpoint needs 0 */
    uint64_t suspended; /* bytes held on the host while checkpointed */
    uint64_t used[MAX_DEVICES]; /* bytes charged per device, context included */
    uint64_t had[MAX_DEVICES];  /* while suspended: the earlier charge */
    uint64_t suspended_at;      /* CLOCK_MONOTONIC ns */
    uint64_t charged_at;        /* the first time; 0: never */
    uint32_t moving;            /* a checkpoint or restore is copying */
    uint32_t asleep;            /* futex word: from the checkpoint to the unlock; NVML waits for its end */
    struct busy busy[MAX_DEVICES];
    struct request request;
    pthread_mutex_t callers; /* one checkpoint call at a time; outlives the slot's owner */
};

struct machine {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;
    uint64_t faults_touch; /* offset 16: written by the Python side to announce a new file */
    struct spec spec;
    uint64_t faults_seen;             /* faults_touch when the table was read */
    uint64_t faults_identity[3];      /* inode, mtime, size of the file read */
    struct fault_table faults;
    uint32_t xid_sequence[MAX_DEVICES]; /* counts losses of each device */
    uint32_t xid_code[MAX_DEVICES];
    pthread_mutex_t lock;
    uint64_t used[MAX_DEVICES]; /* sum over the slots */
    uint32_t slots; /* highest slot ever taken: the rest of the file stays sparse */
    uint8_t uuid[MAX_DEVICES][16];
    struct slot slot[MAX_SLOTS];
};

_Static_assert(offsetof(struct machine, faults_touch) == 16, "faults.py writes there");

/* Maps the machine that the environment describes. Idempotent, thread-safe.
 * 0; or a reason: */
enum { MACHINE_OK = 0, MACHINE_NONE, MACHINE_BAD, MACHINE_CONFLICT };
int machine_open(void);
extern struct machine *machine; /* NULL until machine_open() succeeded */
const char *machine_state_dir(void);
/* Opens the machine's control file, `<state>/nvidiactl`, or closes it and the files of all GPUs. As
 * with /dev/nvidiactl, the driver cannot be replaced while a process has the file open. */
void machine_device_file(bool open_it);
/* Opens the file of one GPU, `<state>/nvidia<index>`. The GPU cannot be reset while a process has
 * the file open. */
void machine_gpu_file(unsigned index);

/* A process holds the lock of its slot for life, so that those of other PID namespaces find it: as a driver in the
 * operating system knows it, whatever number it gives itself. */
void machine_hold(unsigned slot);
pid_t machine_holder(unsigned slot); /* its number here; 0: it has none here; -1: nobody holds the lock */
uint64_t machine_space(void);        /* this process's PID namespace */

void machine_lock(void);
void machine_unlock(void);
/* Without the lock: frees the bytes of processes that ended. */
void machine_reap(void);

struct slot *machine_slot_take(void);       /* the caller's own slot, created; NULL if full */
struct slot *machine_slot_find(pid_t pid);  /* a live CUDA process, or NULL */
bool slot_alive(const struct slot *slot);
/* The process's number here, as the operating system translates it; 0: it has none here, or has ended. */
pid_t slot_number(const struct slot *slot);
uint64_t process_start(pid_t pid); /* 0: no such process, or it is dead */

/* Moves `bytes` onto the slot's account. false: the device is full. */
bool machine_charge(struct slot *slot, unsigned device, uint64_t bytes);
void machine_release(struct slot *slot, unsigned device, uint64_t bytes);
uint64_t machine_free(unsigned device);
uint64_t machine_capacity(void); /* bytes of one device that can be charged */
void machine_wait_still(void); /* waits until no live process is being moved */
void machine_wait_awake(void); /* waits until this process is not suspended */

/* Utilisation: records and reads modelled kernel time. */
void busy_record(struct slot *slot, unsigned device, uint64_t from, uint64_t until);
unsigned busy_percent(const struct slot *slot, unsigned device, uint64_t now);

void uuid_text(const uint8_t uuid[16], char out[41]); /* "GPU-xxxxxxxx-..." */
void device_name(char *out, size_t size);
void pci_bus_id(unsigned device, char *out, size_t size);

/* Faults. `device` < 0: for no particular device. Each hit reduces the count of a counted fault. */
bool fault_hit(enum fault_kind kind, pid_t pid, int device, const char *op, struct fault *out);
/* The same, without reducing the count. */
bool fault_active(enum fault_kind kind, pid_t pid, int device, struct fault *out);
bool faults_pending(void); /* cheap: may any fault be set? */
bool device_is_lost(unsigned device);
/* What limits a copy: the machine's bandwidth, else its profile's rate; or a fault. 0: nothing. */
uint64_t copy_bandwidth(unsigned device, uint64_t profile_rate);
uint64_t device_residue(unsigned device); /* bytes in use that belong to no process */

/* Time and futexes. */
uint64_t now_ns(void);
void sleep_until(uint64_t ns);
void futex_wait(const uint32_t *word, uint32_t value, int64_t timeout_ns, bool shared);
void futex_wake(const uint32_t *word, bool shared);

#endif
