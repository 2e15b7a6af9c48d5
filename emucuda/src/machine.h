/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The emulated machine: one shared file with everything on which all processes must agree.
 *
 * Every process that initialised CUDA or NVML maps `<state>/machine`. The file holds the devices,
 * one slot for each CUDA process (its charges and its checkpoint mailbox) and the injected faults.
 * Every process that uses the machine holds a shared lock on `<state>/lock`. A process takes the
 * lock exclusively only to create the machine, or to create it again.
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
#define GRANULE (2 * MIB) /* size of a page of device memory, as on the hardware */

/* The machine that EMUCUDA_MACHINE describes. Sizes are in bytes, the bandwidth is in bytes/s (0:
 * unlimited). */
struct spec {
    uint64_t count;
    uint64_t memory;
    uint64_t context;
    uint64_t bandwidth;
    uint64_t reserved;
    uint64_t profile; /* number of the board in spec.c whose times the machine models; 0: no board,
                       * the machine is as fast as the host */
};

/* Rates of a profile, bytes/s; 0: unlimited. */
struct rates {
    uint64_t copies;  /* between host and device */
    uint64_t memory;  /* reads and writes of the device's own memory */
    uint64_t suspend; /* from the device into the process's own pageable memory */
    uint64_t resume;
    uint64_t begin_suspend, begin_resume; /* ns that pass before the first byte moves */
};
const struct rates *spec_rates(const struct spec *spec);

/* Parses "2x16GiB,context=256MiB". Returns 0, or -1 with a sentence in `error`. */
int spec_parse(const char *text, struct spec *out, char *error, size_t error_size);
/* Parses a size such as "1.5GiB", with `rate` also "8GB/s". Returns 0 or -1. */
int spec_size(const char *text, size_t length, bool rate, uint64_t *out);

enum fault_kind {
    FAULT_SLOW_COPIES,
    FAULT_LOCK_TIMEOUT,
    FAULT_CHECKPOINT_REFUSED,
    FAULT_RESTORE_FAILED,
    FAULT_DEVICE_LOST,
    FAULT_NVML_MISSING_PIDS,
    FAULT_HANG,
    /* Quirks. Real drivers may differ in some behaviours. Each quirk selects the other behaviour of
     * two possible ones. */
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
    uint32_t used;     /* how often the fault has struck */
    uint64_t id;       /* identity of the fault: `id=` in its line of the file, or a hash of the
                        * line; if other lines change, the fault keeps `used` */
    int64_t pid;       /* -1: any process */
    int64_t device;    /* index in the machine, -1: any device */
    int64_t count;     /* how often the fault may strike, -1: always */
    uint64_t bandwidth; /* slow-copies: bytes/s */
    uint64_t bytes;     /* bytes of device memory, for faults about a size */
    uint64_t ms;        /* delay of NVML's answer */
    int64_t number;     /* nvml-host-pids: the pid that NVML lists; -1: NVML lists a pid that no
                         * process here can have */
    uint32_t code;     /* CUresult or Xid to report, 0: the default */
    char op[16];       /* hang: the call that hangs; "": any call */
};

struct fault_table {
    uint32_t count;
    struct fault fault[MAX_FAULTS];
};

/* A request that a checkpoint call sends to the service thread of its target process. */
enum request_op { OP_STATE = 1, OP_LOCK, OP_CHECKPOINT, OP_RESTORE, OP_UNLOCK };

struct request {
    uint32_t posted; /* futex word; the service thread sleeps on it */
    uint32_t done;   /* futex word; the caller sleeps on it */
    uint32_t op;
    uint32_t timeout_ms;
    uint32_t pairs; /* number of pairs in `map`; 0: no device map */
    uint8_t map[MAX_DEVICES]; /* from machine index to machine index */
    int32_t result;
    uint32_t state; /* answer to OP_STATE */
};

#define BUSY_BUCKETS 64
#define BUSY_BUCKET_NS 100000000ull /* 0.1 s; the window of a utilisation sample is 1 s */

struct busy {
    uint64_t bucket[BUSY_BUCKETS]; /* (absolute bucket number << 32) | busy ns */
    uint64_t from, until;          /* begin and end, CLOCK_MONOTONIC ns, of the latest busy interval
                                    * that is too long for `bucket` */
};

struct slot {
    int32_t pid; /* pid in the process's own PID namespace; 0: the slot is free */
    uint32_t uid;
    uint64_t space; /* inode of that namespace; 0: unknown */
    uint64_t start; /* start time of the process, in clock ticks since boot */
    uint32_t state; /* PROCESS_* */
    int32_t service_tid; /* thread that serves checkpoint calls; 0: not started yet */
    uint32_t managed;    /* number of live managed allocations; a checkpoint is possible only at
                          * 0 */
    uint32_t shared;     /* number of live exports and imports; a checkpoint is possible only at
                          * 0 */
    uint64_t suspended; /* bytes of device memory that the host stores while the process is
                         * checkpointed */
    uint64_t used[MAX_DEVICES]; /* bytes charged on each device, contexts included */
    uint64_t had[MAX_DEVICES];  /* while suspended: the charge before the suspend */
    uint64_t suspended_at;      /* CLOCK_MONOTONIC ns */
    uint64_t charged_at;        /* when the process was charged first; 0: never */
    uint32_t moving;            /* a checkpoint or a restore is copying now */
    uint32_t asleep;            /* futex word: 1 while the process is locked or suspended; the
                                 * process's NVML calls wait until it is 0 */
    struct busy busy[MAX_DEVICES];
    struct request request;
    pthread_mutex_t callers; /* a checkpoint call holds it, so only one call runs at a time; a later
                              * owner of the slot uses the same mutex */
};

struct machine {
    uint64_t magic;
    uint32_t abi;
    uint32_t size;
    uint64_t faults_touch; /* at offset 16; Python changes this value to announce that the faults
                            * file has changed */
    struct spec spec;
    uint64_t faults_seen;             /* value of faults_touch when the table was read */
    uint64_t faults_identity[3];      /* inode, mtime and size of the file that was read */
    struct fault_table faults;
    uint32_t xid_sequence[MAX_DEVICES]; /* how often each device was lost */
    uint32_t xid_code[MAX_DEVICES];
    pthread_mutex_t lock;
    uint64_t used[MAX_DEVICES]; /* sum over all slots */
    uint32_t slots; /* number of slots that have ever been used; the rest of the file stays
                     * sparse */
    uint8_t uuid[MAX_DEVICES][16];
    struct slot slot[MAX_SLOTS];
};

_Static_assert(offsetof(struct machine, faults_touch) == 16, "faults.py writes there");

/* Maps the machine that the environment describes. Any thread may call this function. After
 * MACHINE_CONFLICT, the next call tries again. After another result, later calls only return this
 * result. The result is one of these values: */
enum { MACHINE_OK = 0, MACHINE_NONE, MACHINE_BAD, MACHINE_CONFLICT };
int machine_open(void);
extern struct machine *machine; /* NULL until machine_open() succeeded */
const char *machine_state_dir(void);
/* Opens or closes the machine's control file, `<state>/nvidiactl`. This file plays the part of
 * /dev/nvidiactl: while a process has it open, the driver cannot be replaced. A close also closes
 * the files of all GPUs. */
void machine_device_file(bool open_it);
/* Opens the file of one GPU, `<state>/nvidia<index>`. The GPU cannot be reset while a process has
 * the file open. */
void machine_gpu_file(unsigned index);

/* Takes the lock of a slot. A process holds the lock of its slot until it ends, so that processes
 * of other PID namespaces can find the process. A real driver needs no such lock: it is part of the
 * operating system and sees the processes of all namespaces. */
void machine_hold(unsigned slot);
pid_t machine_holder(unsigned slot); /* the holder's pid in this namespace; 0: the holder has no pid
                                      * here; -1: no process holds the lock */
uint64_t machine_space(void);        /* this process's PID namespace */

void machine_lock(void);
void machine_unlock(void);
/* Call this without the lock. Frees the bytes of processes that have ended. */
void machine_reap(void);

struct slot *machine_slot_take(void);       /* takes a slot for the caller; NULL: no slot is free */
struct slot *machine_slot_find(pid_t pid);  /* the slot of a live CUDA process, or NULL */
bool slot_alive(const struct slot *slot);
/* Returns the pid of the slot's process in this PID namespace. Returns 0 if the process has no pid
 * in this namespace, or has ended. */
pid_t slot_number(const struct slot *slot);
uint64_t process_start(pid_t pid); /* 0: the process does not exist, or is dead */

/* Charges `bytes` to the slot. Returns false if the device is full. */
bool machine_charge(struct slot *slot, unsigned device, uint64_t bytes);
void machine_release(struct slot *slot, unsigned device, uint64_t bytes);
uint64_t machine_free(unsigned device);
uint64_t machine_capacity(void); /* the most bytes of one device that can be charged */
void machine_wait_still(void); /* waits until no checkpoint or restore of a live process is
                                * copying */
void machine_wait_awake(void); /* waits until this process is not suspended */

/* Utilisation: record and read the modelled kernel time. */
void busy_record(struct slot *slot, unsigned device, uint64_t from, uint64_t until);
unsigned busy_percent(const struct slot *slot, unsigned device, uint64_t now);

void uuid_text(const uint8_t uuid[16], char out[41]); /* "GPU-xxxxxxxx-..." */
void device_name(char *out, size_t size);
void pci_bus_id(unsigned device, char *out, size_t size);

/* Returns true if a fault of this kind applies to the process, device and call, and adds 1 to the
 * fault's `used`. `device` < 0: any device. A fault with a count no longer applies when `used` has
 * reached the count. */
/* `device` is a physical device, -1 for any device, or NO_DEVICE: then only a fault that names no
 * device is found. */
bool fault_hit(enum fault_kind kind, pid_t pid, int device, const char *op, struct fault *out);
#define NO_DEVICE MAX_DEVICES
/* Like fault_hit(), but does not change `used`, and ignores which call the fault names. */
bool fault_active(enum fault_kind kind, pid_t pid, int device, struct fault *out);
bool faults_pending(void); /* a cheap check whether any fault may be set */
bool device_is_lost(unsigned device);
/* Returns the bandwidth of a copy in bytes/s; 0: unlimited. This is the machine's bandwidth. If the
 * machine has none, it is `profile_rate`. A fault may lower the result. */
uint64_t copy_bandwidth(unsigned device, uint64_t profile_rate);
uint64_t device_residue(unsigned device); /* bytes in use that belong to no process */

/* Time and futexes. */
uint64_t now_ns(void);
void sleep_until(uint64_t ns);
void futex_wait(const uint32_t *word, uint32_t value, int64_t timeout_ns, bool shared);
void futex_wake(const uint32_t *word, bool shared);

#endif
