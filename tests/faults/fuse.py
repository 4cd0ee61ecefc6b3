"""A file system that passes everything through to a directory, except what it was told to fail: the kernel's own EIO.

`python fuse.py BACKING MOUNTPOINT RULES` mounts (as root, without libfuse) and serves until it is unmounted. RULES is
JSON: {"read": [NAME, OFFSET], "write": [NAME, OFFSET], "fsync": NAME, "fsyncdir": NAME, "rename2": false}. A read or
write of a file whose name ends in NAME fails when it reaches OFFSET; `fsync` and `fsyncdir` fail for such names;
`rename2: false` stands for file systems that know neither RENAME_NOREPLACE nor RENAME_EXCHANGE.

Source: include/uapi/linux/fuse.h, protocol 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import sys

MAX_WRITE = 128 << 10
HEADER = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
(LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, OPEN, READ) = (1, 2, 3, 4, 9, 10, 11, 12, 14, 15)
(WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR) = (16, 17, 18, 20, 25, 26, 27, 28)
(RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, RENAME2) = (29, 30, 35, 36, 38, 42, 45)
SILENT = (FORGET, BATCH_FORGET, INTERRUPT)
libc = ctypes.CDLL(None, use_errno=True)


def _unknown(node: int, body: bytes) -> bytes:
    raise OSError(errno.ENOSYS, "unknown to this file system")


class Flaky:
    """The file system: nodes are paths below the backing directory."""

    def __init__(self, backing: str, rules: dict) -> None:
        self.backing, self.rules = backing, rules
        self.paths = {1: ""}
        self.nodes = {"": 1}
        self.handlers = {
            LOOKUP: self.lookup,
            GETATTR: self.getattr,
            SETATTR: self.setattr,
            MKDIR: self.mkdir,
            UNLINK: lambda node, body: os.unlink(self.child(node, body)[1]),
            RMDIR: lambda node, body: os.rmdir(self.child(node, body)[1]),
            RENAME: self.rename,
            RENAME2: self.rename2,
            OPEN: self.open,
            CREATE: self.create,
            READ: self.read,
            WRITE: self.write,
            FSYNC: lambda node, body: self.sync("fsync", node, body),
            FSYNCDIR: lambda node, body: self.sync("fsyncdir", node, body),
            RELEASE: lambda node, body: os.close(struct.unpack_from("<Q", body)[0]),
            RELEASEDIR: lambda node, body: os.close(struct.unpack_from("<Q", body)[0]),
            FLUSH: lambda node, body: b"",
            STATFS: self.statfs,
            OPENDIR: self.opendir,
            READDIR: self.readdir,
            INIT: self.init,
            DESTROY: lambda node, body: b"",
        }

    def path(self, node: int) -> str:
        return os.path.join(self.backing, self.paths[node])

    def child(self, node: int, body: bytes) -> tuple[str, str]:
        name = os.fsdecode(body.split(b"\0", 1)[0])
        relative = os.path.join(self.paths[node], name)
        return relative, os.path.join(self.backing, relative)

    def fails(self, kind: str, path: str, end: int = 0) -> None:
        rule = self.rules.get(kind)
        if rule is None:
            return
        name, offset = (rule, 0) if isinstance(rule, str) else rule
        if path.endswith(name) and end >= offset:
            raise OSError(errno.EIO, kind)

    @staticmethod
    def attributes(status: os.stat_result) -> bytes:
        times = [getattr(status, f"st_{kind}time_ns") for kind in "amc"]
        seconds, nanoseconds = [t // 10**9 for t in times], [t % 10**9 for t in times]
        return ATTRIBUTES.pack(
            *(status.st_ino, status.st_size, status.st_blocks, *seconds, *nanoseconds),
            *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, status.st_blksize, 0),
        )

    def entry(self, relative: str) -> bytes:
        status = os.lstat(os.path.join(self.backing, relative))
        node = self.nodes.setdefault(relative, len(self.paths) + 1)
        self.paths[node] = relative
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self.attributes(status)

    def init(self, node: int, body: bytes) -> bytes:
        major, _, readahead, _ = struct.unpack_from("<IIII", body)
        return struct.pack("<IIIIHHII32x", major, 31, readahead, 0, 8, 8, MAX_WRITE, 1)

    def lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body)[0])

    def getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(os.lstat(self.path(node)))

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        mode = struct.unpack_from("<I", body, 68)[0]
        if valid & 1:
            os.chmod(self.path(node), stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(self.path(node), size)
        return self.getattr(node, b"")

    def mkdir(self, node: int, body: bytes) -> bytes:
        relative, path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0])
        return self.entry(relative)

    def moved(self, old: str, new: str, flags: int) -> bytes:
        full = [os.fsencode(os.path.join(self.backing, path)) for path in (old, new)]
        if libc.renameat2(-100, full[0], -100, full[1], flags):
            raise OSError(ctypes.get_errno(), "rename")

        def renamed(path: str) -> str:
            for one, other in ((old, new), (new, old)):
                if path == one or path.startswith(one + "/"):
                    # What is replaced is out of the way; what is exchanged has the other's name.
                    return other + path[len(one) :] if flags & 2 or one == old else "\0" + path
            return path

        self.paths = {node: renamed(path) for node, path in self.paths.items()}
        self.nodes = {path: node for node, path in self.paths.items()}
        return b""

    def rename(self, node: int, body: bytes) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new, _ = body[8:].split(b"\0", 2)
        return self.moved(self.child(node, old)[0], self.child(target, new)[0], 0)

    def rename2(self, node: int, body: bytes) -> bytes:
        if not self.rules.get("rename2", True):
            raise OSError(errno.ENOSYS, "rename2")
        target, flags, _ = struct.unpack_from("<QII", body)
        old, new, _ = body[16:].split(b"\0", 2)
        return self.moved(self.child(node, old)[0], self.child(target, new)[0], flags)

    def open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        handle = os.open(self.path(node), flags & ~(os.O_EXCL | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND))
        return struct.pack("<QII", handle, 1, 0)  # 1: no page cache, so that every read comes here

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        relative, path = self.child(node, body[16:])
        handle = os.open(path, flags & ~os.O_APPEND | os.O_CREAT, mode)
        return self.entry(relative) + struct.pack("<QII", handle, 1, 0)

    def read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self.fails("read", self.paths[node], offset + size)
        return os.pread(handle, size, offset)

    def write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        self.fails("write", self.paths[node], offset + size)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def sync(self, kind: str, node: int, body: bytes) -> bytes:
        self.fails(kind, self.paths[node])
        return b""

    def statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self.backing)
        counts = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("<QQQQQIIII24x", *counts, s.f_bsize, s.f_namemax, s.f_frsize, 0)

    def opendir(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", os.open(self.path(node), os.O_RDONLY | os.O_DIRECTORY), 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for i, name in enumerate(sorted(os.listdir(self.path(node)))[offset:], start=offset + 1):
            raw = os.fsencode(name)
            line = struct.pack("<QQII", i + 1, i, len(raw), 0) + raw
            line += b"\0" * (-len(line) % 8)
            if len(answer) + len(line) > size:
                break
            answer += line
        return answer

    def serve(self, device: int) -> None:
        """Answer the kernel until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, MAX_WRITE + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in SILENT:
                continue
            error, answer = 0, b""
            try:
                answer = self.handlers.get(opcode, _unknown)(node, request[HEADER.size :]) or b""
            except OSError as failure:
                error, answer = -(failure.errno or errno.EIO), b""
            os.write(device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)


def main() -> None:
    backing, mountpoint, rules = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if libc.mount(b"flaky", os.fsencode(mountpoint), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot mount")
    print("mounted", flush=True)
    Flaky(backing, json.loads(rules)).serve(device)


if __name__ == "__main__":
    main()
