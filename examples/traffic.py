"""How many bytes this process has sent: what the kernel counts on its TCP sockets."""

from __future__ import annotations

import os
import socket
import struct

# Of `struct tcp_info` in linux/tcp.h; Linux 4.19 and newer fill it that far.
_BYTES_SENT = 200


def sent_bytes() -> int | None:
    """Bytes of payload sent over all open TCP sockets; None where nothing counts them.

    That is everything Gloo and MPI over TCP send, to ranks on this machine too. What
    NCCL sends over other transports is not in it.
    """
    if not os.path.isdir("/proc/self/fd"):
        return None
    total, counted = 0, False
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, or not TCP
            continue
        if len(info) >= _BYTES_SENT + 8:
            total += struct.unpack_from("=Q", info, _BYTES_SENT)[0]
            counted = True
    return total if counted else None
