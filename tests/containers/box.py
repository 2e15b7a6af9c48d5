# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sets up the file system and the user of a container, and then executes its program.

This script is the first process of the container. ``unshare`` has made the namespaces. The first
line of standard input describes everything else, see ``kit.Box``.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
NEWUSER, DETACH, PIVOT_ROOT = 0x10000000, 2, 155

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *values):
    values = [v.encode() if isinstance(v, str) else v for v in values]
    if getattr(libc, name)(*values):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{tuple(values)}: {os.strerror(number)}")


def mount(source, target, kind, flags=0, data=None):
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def bind(source, target, *, writable=False):
    """Mount a file or folder of the machine in the container."""
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    mount(source, target, None, BIND)
    if not writable:
        mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID)


def build(spec):
    """Make the root of the container and enter it."""
    mount(None, "/", None, REC | PRIVATE)
    root = spec["root"]
    mount("image", root, "tmpfs", NOSUID, "mode=755")
    for name in ("bin", "lib", "lib64", "usr"):
        if Path(f"/{name}").is_symlink():
            Path(root, name).symlink_to(Path(f"/{name}").readlink())
        elif Path(f"/{name}").exists():
            bind(f"/{name}", f"{root}/{name}")
    for name in ("null", "zero", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}", writable=True)
    for folder, data in (("tmp", "mode=1777"), ("dev/shm", "mode=1777,size=64k")):
        Path(root, folder).mkdir(parents=True)
        mount("tmpfs", f"{root}/{folder}", "tmpfs", NOSUID | NODEV, data)
    Path(root, "proc").mkdir()
    mount("proc", f"{root}/proc", "proc")
    for source, target, writable in spec["mounts"]:
        bind(source, root + target, writable=writable)
    for path, target in spec["links"]:
        Path(root + path).parent.mkdir(parents=True, exist_ok=True)
        Path(root + path).symlink_to(target)
    Path(root, "old").mkdir()
    if libc.syscall(PIVOT_ROOT, root.encode(), f"{root}/old".encode()):
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    call("umount2", "/old", DETACH)
    Path("/old").rmdir()
    mount(None, "/", None, REMOUNT | BIND | RDONLY)


def in_user_namespace(first):
    """Enter a user namespace, as with Docker's userns-remap: its user 0 is ``first`` outside."""
    ready, entered = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.read(entered[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 {first} 65536")
        os.write(ready[1], b"1")
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    call("unshare", NEWUSER)
    os.write(entered[1], b"1")
    os.read(ready[0], 1)


def main():
    # Without a buffer, this process reads only one line. The container's program reads the rest.
    with open(0, "rb", buffering=0, closefd=False) as file:
        spec = json.loads(file.readline())
    build(spec)
    if spec["users_from"]:
        in_user_namespace(spec["users_from"])
    if spec["uid"] is not None:  # a container without root has one user id
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])
    os.umask(0o022)
    os.execve(spec["command"][0], spec["command"], spec["env"])


if __name__ == "__main__":
    main()
