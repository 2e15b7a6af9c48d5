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
    # 60 % are the researchers', at once if they need them; nobody else's kernel keeps them out.
    "research": {"guarantee": "60%", "weight": 3, "unix_groups": ["research"]},
    # Of these, two GPUs for the people with the deadline, who are members of research as well.
    "deadline": {"parent": "research", "guarantee": "2 devices", "unix_groups": ["deadline"],
                 "order": 1},
    # Everybody else gets what is left, half of the machine at most, and eight GPU-hours a day.
    # Then their kernels still get what nobody else wants.
    "students": {"users": "*", "cap": "50%",
                 "gpu_seconds_per_day": {"seconds": "8h", "rule": "window", "then": "borrow"}},
}  # fmt: skip

# What somebody used yesterday at this time counts an eighth of what is used now.
c.GPUPool.fair_share_half_life = "8h"

# ---- By day

c.GPUPool.idle_timeout = "10m"
c.GPUPool.quotas = {"*": {"leases": 3}}
c.GPUPool.priority_classes = {"interactive": 200, "notebook": 100, "batch": 0}
c.GPUPool.classes_allowed = ["interactive", "notebook"]  # training waits for the night

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
            "classes_allowed": None,  # all
            "quotas": {"*": {"leases": 16}},
            "groups": {"students": {"cap": "90%"}},
            "idle_timeout": "2m",  # an open notebook that nobody uses makes room sooner
        },
    },
    {
        "name": "weekend",
        "days": "fri",
        # From Friday evening on; the rule below takes over at midnight.
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
