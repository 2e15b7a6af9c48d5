# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
#
# A department on one machine with 16 GPUs of 80 GiB: notebooks by day, training by night.
# Check it before you install it, here for such a machine:
#
#     jupyter gpupool check-config day_and_night.py --alone --devices 16x80GiB

c = get_config()

# ---- Who gets what

c.GPUPool.groups = {
    # Researchers have a guarantee of 60 % of the GPU memory. If other users have borrowed a part of
    # it, researchers get it back at once.
    "research": {"guarantee": "60%", "weight": 3, "unix_groups": ["research"]},
    # The group "deadline" belongs to "research". Two of the GPUs of "research" are guaranteed to
    # it.
    "deadline": {"parent": "research", "guarantee": "2 devices", "unix_groups": ["deadline"],
                 "order": 1},
    # All other users are students. Together they get at most half of the machine, and eight
    # GPU-hours a day. After these hours, their kernels still get memory that no other kernel wants.
    "students": {"users": "*", "cap": "50%",
                 "gpu_seconds_per_day": {"seconds": "8h", "rule": "window", "then": "borrow"}},
}  # fmt: skip

# The weight of past usage halves every 8 hours, so usage of 24 hours ago counts one eighth.
c.GPUPool.fair_share_half_life = "8h"

# ---- By day

c.GPUPool.idle_timeout = "10m"
c.GPUPool.quotas = {"*": {"leases": 3}}
c.GPUPool.priority_classes = {"interactive": 200, "notebook": 100, "batch": 0}
c.GPUPool.classes_allowed = ["interactive", "notebook"]  # class "batch" waits for the night

# ---- By night and at the weekend

WEEKEND = {
    "classes_allowed": None,
    "quotas": {"*": {"leases": 16}},
    "groups": {"students": {"cap": "100%"}},
}

c.GPUPool.schedules = [
    {
        "name": "night",
        "days": "mon-thu",
        "hours": "20:00-08:00",
        "time_zone": "Europe/Berlin",
        "set": {
            "classes_allowed": None,  # all classes
            "quotas": {"*": {"leases": 16}},
            "groups": {"students": {"cap": "90%"}},
            "idle_timeout": "2m",  # an unused notebook gives its slice back sooner
        },
    },
    {
        "name": "weekend",
        "days": "fri",
        # This schedule ends at midnight, and the next schedule begins at midnight.
        "hours": "20:00-24:00",
        "time_zone": "Europe/Berlin",
        "set": WEEKEND,
    },
    {
        "name": "weekend, the whole day",
        "days": "sat, sun",
        "time_zone": "Europe/Berlin",
        "set": WEEKEND,
    },
]
