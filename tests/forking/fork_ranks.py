"""Have a script run as ranks that are forked from a process that has torch loaded.

Arguments: the address of a `RankService`, how many ranks, the script, and its arguments.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
    channel.connect(sys.argv[1])
    request = {
        "num_ranks": int(sys.argv[2]),
        "command": sys.argv[3:],
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }
    socket.send_fds(channel, [json.dumps(request).encode()], [1, 2])
    code = int(channel.recv(100) or 1)
sys.exit(code)
