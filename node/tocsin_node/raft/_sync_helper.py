"""The process that waits for the disk, so that the node's loop does not.

Run by path, in isolated mode, with one end of a SOCK_SEQPACKET pair as standard input. Each message
and each answer is one byte:

    D   with two descriptors attached: from now on sync this file, and once its folder
    S   sync; answered by 0 when everything written before is durable, else by the errno

It ends when the node closes its end, or dies. Imports nothing of the project.
"""

import os
import signal
import socket


def main() -> None:
    # A terminal's signals go to the whole group; the node decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = socket.socket(fileno=0)
    file = folder = -1
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 1, 2)
        if not message:
            return
        if message == b"D":
            for fd in (file, folder):
                if fd >= 0:
                    os.close(fd)
            file, folder = descriptors
            continue
        try:
            os.fdatasync(file)
            if folder >= 0:
                os.fsync(folder)
                os.close(folder)
                folder = -1
        except OSError as error:
            link.send(bytes([min(error.errno or 255, 255)]))
        else:
            link.send(b"\0")


if __name__ == "__main__":
    main()
