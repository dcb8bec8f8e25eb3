"""Takes from the worker process what decoding does not need, before it reads a stranger's file.

    everywhere   no core dump, few descriptors, files and an address space of a limited size
    Linux        no new privileges
    Landlock     no file is opened, made, renamed or removed by name; no TCP; no signal to others
    seccomp      no file is opened, and no socket, program or process made; threads are

A limit of processes (RLIMIT_NPROC) would count the threads of all processes of the user, so seccomp
refuses new processes instead. The kernel's calls are made here: libseccomp's binding needs a
library of the system, the binding of Landlock is at a pre-release, and both are longer than this.
"""

import ctypes
import errno
import os
import resource
import struct
import sys

from hippo.base.worker_process import limit_memory

_MAX_DESCRIPTORS = 16
"""The three standard ones, the socket, the media, Pillow's copy of it and the result; doubled."""

_PR_SET_NO_NEW_PRIVS = 38

# landlock.h: number of the bits of its rights on files, by the version that brought them.
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same on every architecture
_LANDLOCK_VERSION = 1  # a flag: tell the version
_FILE_BITS = {1: 13, 2: 14, 3: 15, 5: 16}
_TCP_SINCE, _TCP = 4, 0b11  # bind, connect
_SCOPES_SINCE, _SCOPES = 6, 0b11  # abstract sockets, signals

# seccomp.h, filter.h
_SET_FILTER = 1
_ALL_THREADS, _WITHOUT_SLOWDOWN = 1, 4  # TSYNC; SPEC_ALLOW: old kernels slow a process down else
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000  # numbers of another ABI of x86-64
_CLONE_THREAD = 0x10000
_OPENAT2, _IO_URING_SETUP, _CLONE3 = 437, 425, 435  # the same on every architecture


# By architecture: its number in audit.h, its numbers of seccomp and clone, and what is refused.
_MACHINES = {
    "x86_64": (
        *(0xC000003E, 317, 56),
        *(2, 85, 257, 304),  # open, creat, openat, open_by_handle_at
        *(41, 53),  # socket, socketpair
        *(59, 322),  # execve, execveat
        *(57, 58),  # fork, vfork
        *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
    ),
    "aarch64": (
        *(0xC00000B7, 277, 220),
        *(56, 265),  # openat, open_by_handle_at
        *(198, 199),  # socket, socketpair
        *(221, 281),  # execve, execveat
        *(117, 270, 271),  # ptrace, process_vm_readv, process_vm_writev
    ),
}


def confine(max_memory_bytes: int) -> list[str]:
    """Confines this process, which must have one thread, for good. It may take so much memory more
    than it has, and write files of this size.

    Returns which of "no new privileges", "landlock" and "seccomp" the system has.
    """
    limit_memory(max_memory_bytes)
    for limit, most in (
        (resource.RLIMIT_FSIZE, max_memory_bytes),
        (resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(limit, (value, value))
    if sys.platform != "linux":
        return []
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return []  # the others need it
    found = ["no new privileges"]
    if _restrict_files(kernel):
        found.append("landlock")
    if _filter_calls(kernel):
        found.append("seccomp")
    return found


def _restrict_files(kernel: ctypes.CDLL) -> bool:
    """Forbids by Landlock, to this thread and those that it starts, whatever the kernel's version
    of it knows; returns whether there is Landlock."""
    version = kernel.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return False
    num_bits = max(bits for since, bits in _FILE_BITS.items() if since <= version)
    rules = struct.pack(
        "=QQQ",
        (1 << num_bits) - 1,
        _TCP if version >= _TCP_SINCE else 0,
        _SCOPES if version >= _SCOPES_SINCE else 0,
    )
    number = kernel.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if number < 0:
        return False
    try:
        return bool(kernel.syscall(_LANDLOCK_RESTRICT, number, 0) == 0)
    finally:
        os.close(number)


def _filter_calls(kernel: ctypes.CDLL) -> bool:
    """Refuses system calls with EPERM; returns whether the kernel can."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or sys.maxsize < 2**32:
        return False
    architecture, seccomp, clone, *refused = machine
    steps = ctypes.create_string_buffer(_filter(architecture, clone, refused))
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(steps))
    flags = _ALL_THREADS | _WITHOUT_SLOWDOWN
    return bool(kernel.syscall(seccomp, _SET_FILTER, flags, program) == 0)


def _filter(architecture: int, clone: int, refused: list[int]) -> bytes:
    """Returns the steps of the filter (struct sock_filter): code, steps to skip if true and if
    false, value."""
    refusal = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        refusal,
    ]
    for number in (*refused, _OPENAT2, _IO_URING_SETUP):
        steps += [(_EQUAL, 0, 1, number), refusal]
    steps += [
        # Its flags are in memory, which a filter cannot read; the C library then takes clone.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _ARGUMENT_AT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        refusal,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
