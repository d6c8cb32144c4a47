"""A byte worker, as the gateway starts it: `python -m gateway.workers ORDERS REPORTS`, two descriptors of sockets."""

import signal
import socket
import sys

from gateway.workers.worker import Worker

# A signal to the gateway's whole process group must not cut its streams: a worker ends when the gateway has ended.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
orders, reports = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:])
Worker(orders, reports).run()
