"""The inside of the sandbox: run by path as `python -I -S sandbox_init.py`, standard library only.

Takes one `Job` as a length and JSON on stdin, and becomes, in namespaces of its own, a process that sees no network,
no other process, read-only system libraries and a small /tmp, has no privilege to get out, is refused the system calls
that no limit covers, and runs the program. The
exit status is the program's; anything on stderr says why the sandbox could not be made, and then nothing was run.
"""

# Importing pathlib would cost more than all that this file does, once for every test.
# ruff: noqa: PTH103, PTH112, PTH114, PTH115, PTH123, PTH211

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NamedTuple

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ISOLATED = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
# A remount inside a user namespace must keep the flags that the mount came with: (as statvfs has it, as mount has it).
KEPT_FLAGS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
NOBODY = 65534
# Root gives every sandbox a user of its own: the kernel counts processes by user, and never counts root's.
FIRST_UID = 1_000_000_000
STAGE = "/sys"  # where the new root is put together; it exists everywhere, and nothing in it is needed
MAX_FILES = 64


class Machine(NamedTuple):
    """Numbers of one architecture: its own (linux/audit.h) and its system calls'.

    `refused` are shmget, semget, msgget, memfd_create and memfd_secret (memory that no limit counts), add_key,
    request_key and keyctl (the keys of whoever started the run) and io_uring_setup (which does by itself whatever is
    refused to others).
    """

    audit_arch: int
    pivot_root: int
    prctl: int
    socket: int
    refused: tuple[int, ...]


MACHINES = {
    "x86_64": Machine(0xC000003E, 155, 157, 41, (29, 64, 68, 319, 447, 248, 249, 250, 425)),
    "aarch64": Machine(0xC00000B7, 41, 167, 198, (194, 190, 186, 279, 447, 217, 218, 219, 425)),
}
# Classic BPF (linux/bpf_common.h, linux/seccomp.h), and where struct seccomp_data holds what.
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
SECCOMP_MODE_FILTER = 2
CALL_NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
X32_CALLS = 0x40000000  # the same calls under other numbers
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    check(
        libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()),
        f"mount {source} on {target}",
    )


def is_real_root() -> bool:
    """Root over all users, not only over those of a container."""
    with open("/proc/self/uid_map") as f:
        return os.geteuid() == 0 and f.read().split() == ["0", "0", "4294967295"]


def enter_namespaces() -> int | None:
    """Returns the user to become inside; None when a user namespace has taken the privileges away already."""
    if is_real_root():
        check(libc.unshare(ISOLATED), "unshare")
        return FIRST_UID + os.getpid()
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(ISOLATED | CLONE_NEWUSER), "unshare (are user namespaces allowed?)")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(line)
    return None


def build_root(shown: list[str], tmp_bytes: int) -> None:
    """Make STAGE/root the root: `shown` read-only, three devices and an empty /tmp; the rest of the disk is gone."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    root = f"{STAGE}/root"
    for path in shown:
        if os.path.islink(path):  # /lib is usr/lib on a merged system
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
            bind_read_only(path, root + path, MS_NODEV)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        os.close(os.open(root + device, os.O_CREAT | os.O_WRONLY, 0o666))
        mount(device, root + device, "", MS_BIND)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={tmp_bytes},nr_inodes=4096,mode=777")
    os.chdir(STAGE)
    check(libc.syscall(MACHINES[os.uname().machine].pivot_root, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount the old root")
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    # Below the mount's root: the kernel refuses a process that was chrooted any user namespace of its own.
    os.chroot("/root")
    os.chdir("/tmp")


def bind_read_only(source: str, target: str, flags: int) -> None:
    mount(source, target, "", MS_BIND | MS_REC)
    had = os.statvfs(target).f_flag
    for seen, kept in KEPT_FLAGS:
        flags |= kept if had & seen else 0
    mount("none", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def set_limits(job: dict[str, Any], own_processes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["tmp_bytes"],
        resource.RLIMIT_NPROC: job["processes"] + own_processes,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, limit in limits.items():
        resource.setrlimit(which, (limit, limit))


def drop_privileges(user: int | None) -> None:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")  # a change of user has cleared it


def filter_calls(machine: Machine) -> None:
    """Refuse, from here on, `machine.refused`, to outlive the process that watches this one, and sockets of a family
    that a network namespace does not close (such as the one to the host of a virtual machine).
    """
    steps = [  # what to do, steps to skip if so and if not, a number
        (LOAD, 0, 0, ARCH),
        (IF_EQUAL, 1, 0, machine.audit_arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL_NUMBER),
        (IF_AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, KILL),
    ]
    for call in machine.refused:
        steps += [(IF_EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE)]
    steps += [
        (IF_EQUAL, 0, 3, machine.prctl),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_EQUAL, 0, 7, PR_SET_PDEATHSIG),
        (RETURN, 0, 0, REFUSE),
        (IF_EQUAL, 0, 5, machine.socket),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((IF_EQUAL, skip, 0, family) for skip, family in ((3, AF_UNIX), (2, AF_INET), (1, AF_INET6))),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def run_program(job: dict[str, Any], user: int | None) -> None:
    """Never returns: becomes the program as process 1, whose end is the end of every process in the sandbox."""
    os.setsid()  # process groups know no namespaces: a signal to its own would reach the judge and the whole run
    build_root(job["shown"], job["tmp_bytes"])
    with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as f:
        f.write(job["program"])
    with open("input", "w+", encoding="utf-8", errors="surrogatepass") as f:
        f.write(job["input"])
        f.flush()
        os.lseek(f.fileno(), 0, os.SEEK_SET)
        os.dup2(f.fileno(), 0)
    set_limits(job, own_processes=int(user is None))  # without a user of its own, this file's process is counted too
    drop_privileges(user)
    filter_calls(MACHINES[os.uname().machine])
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    os.execve(job["python"], [job["python"], "-I", "-S", "-B", "program.py"], env)


def read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            raise EOFError("the job was cut short")
        data += chunk
    return data


def main() -> int:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        job = json.loads(read_exactly(struct.unpack("<I", read_exactly(4))[0]))
        user = enter_namespaces()
        pid = os.fork()
        if pid == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            run_program(job, user)
    except (OSError, EOFError, KeyError) as e:
        os.write(2, f"{e}".encode())
        os._exit(1)
    # Told to end, it waits for the program too: where nobody reaps orphans, they fill the process table.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    os.close(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
