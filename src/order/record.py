#!/usr/bin/env python3
"""Prints the functions of dynasour that a start, a fork and an execve execute, in that order.

Usage: record.py DYNASOUR > functions.txt

Each function's first byte becomes a breakpoint (ptrace), which is taken away when it is hit. A line
is a pattern of a function's name, or, for a function of the C library, the archive and the object
that has it. A generic function has many copies, which only the hash at the end of their names tells
apart, so its whole name is the pattern, and the list is to be made again when the compiler or a
dependency changes. build.rs makes a linker script of the lines.
"""
import ctypes
import os
import re
import signal
import struct
import subprocess
import sys

TRACEME, CONT, GETREGS, SETREGS, SETOPTIONS = 0, 7, 12, 13, 0x4200
EVENT_EXEC = 4
# Follow fork, vfork, clone and exec; the traced end with this program.
OPTIONS = 0x2 | 0x4 | 0x8 | 0x10 | 0x100000
RIP = 16  # the index of rip among the registers

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SCRIPT = "/bin/true; /bin/true; /bin/ls >/dev/null; x=$(/usr/bin/expr 1 + 1); exit 0"


def symbols(program):
    """Address -> names of each function; the bytes of the code, and where they lie."""
    names = {}
    for line in subprocess.check_output(["nm", program], text=True).splitlines():
        address, kind, name = line[:16].strip(), line[17], line[19:]
        if address and kind in "tTwWi":
            names.setdefault(int(address, 16), []).append(name)
    header = subprocess.check_output(["readelf", "-lW", program], text=True)
    segment = re.search(r" LOAD +0x(\w+) 0x(\w+) 0x\w+ 0x(\w+) 0x\w+ R E", header)
    offset, start, size = (int(number, 16) for number in segment.groups())
    with open(program, "rb") as file:
        file.seek(offset)
        code = file.read(size)
    return {a: n for a, n in names.items() if start <= a < start + size}, start, code


def record(program):
    names, start, code = symbols(program)
    patched = bytearray(code)
    for address in names:
        patched[address - start] = 0xCC
    child = os.fork()
    if child == 0:
        libc.ptrace(TRACEME, 0, None, None)
        command = [program, "run", "--tier", "direct", "--", "bash", "-c", SCRIPT]
        os.execv(program, command)
    executed, known = {}, set()
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return [name for address in executed for name in names[address]]
        if not os.WIFSTOPPED(status):
            continue
        stopped, event = os.WSTOPSIG(status), status >> 16
        deliver = 0
        if stopped == signal.SIGTRAP and (event == EVENT_EXEC or pid not in known and pid == child):
            libc.ptrace(SETOPTIONS, pid, None, OPTIONS)
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(patched)
        elif stopped == signal.SIGTRAP and event == 0:
            registers = ctypes.create_string_buffer(27 * 8)
            libc.ptrace(GETREGS, pid, None, registers)
            rip = struct.unpack_from("Q", registers, RIP * 8)[0] - 1
            if rip in names:
                executed.setdefault(rip)
                with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                    memory.seek(rip)
                    memory.write(code[rip - start : rip - start + 1])
                struct.pack_into("Q", registers, RIP * 8, rip)
                libc.ptrace(SETREGS, pid, None, registers)
            else:
                deliver = stopped
        elif event == 0 and not (stopped == signal.SIGSTOP and pid not in known):
            deliver = stopped
        known.add(pid)
        libc.ptrace(CONT, pid, None, deliver)


def place(name, objects):
    """The line for a function."""
    if name in objects:
        return objects[name]
    name = re.sub(r"\.llvm\.\d+$", "", name)
    is_generic = "$LT$" in name or re.match("_ZN(4core|5alloc|3std|9hashbrown)", name)
    if "dynasour" in name or not is_generic:
        name = re.sub(r"17h[0-9a-f]{16}E$", "17h*", name)
    # The version of the compiler is part of the names of crates.
    return re.sub(r"Cs[0-9A-Za-z]+_", "Cs*_", name)


def main():
    objects = {}
    for library in ["libc.a", "libm.a"]:
        archive = subprocess.check_output(["cc", f"-print-file-name={library}"], text=True).strip()
        if library == "libm.a" and "GROUP" in open(archive, errors="replace").read(4096):
            archive = re.search(r"\S+/libm-\S+\.a", open(archive).read()).group()
        listing = subprocess.run(["nm", "-A", archive], text=True, capture_output=True).stdout
        for line in listing.splitlines():
            where, _, name = line.rpartition(" ")
            if where[-1:] in tuple("tTwWi"):
                member = where.split(":")[1]
                objects.setdefault(name, f"{os.path.basename(archive)}:{member}")
    # The command's own start defines some of them itself.
    with open(os.path.join(os.path.dirname(__file__), "../fixed_address.rs")) as file:
        for name in re.findall(r'extern "C" fn (\w+)', file.read()):
            objects.pop(name, None)
    printed = dict.fromkeys(place(name, objects) for name in record(sys.argv[1]))
    print("\n".join(printed))


main()
