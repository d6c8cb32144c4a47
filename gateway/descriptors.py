"""Descriptors that the next process finds again: systemd keeps them, or `heddle keep` (sd_notify(3), sd_listen_fds(3)).

The keeper announces itself with NOTIFY_SOCKET, and with FDSTORE how many it keeps; systemd does so from version 254 on.
"""

import asyncio
import itertools
import os
import socket
from array import array
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import MutableMapping, Sequence

from gateway.turnlog import LOGGER

_FIRST_DESCRIPTOR = 3
# A datagram socket queues 10 messages until its reader takes them, which can take a while on a busy machine.
_RETRY_S = 0.002
# The next process gets all names in one variable of its environment, which may have 128 KiB (MAX_ARG_STRLEN): with more
# it cannot be started. Names of 7 letters leave room for this many.
_MOST = 16_382
# At the end of a process nothing else waits for it.
_CLOSE_TIMEOUT_S = 1.0


class DescriptorStore:
    """Puts descriptors into keeping and takes them out again.

    Args:
        address: of the keeper's socket.
        limit: how many descriptors; the keeper would silently drop more.
        found: the descriptors that earlier processes left there, by name. They stay there until they are dropped.
    """

    def __init__(self, address: str, limit: int, found: dict[str, list[int]]) -> None:
        self.found = found
        self._limit = min(limit, _MOST)
        self._numbers = itertools.count()
        self._num_of = {name: len(descriptors) for name, descriptors in found.items()}
        self._num = sum(self._num_of.values())
        self._unsent: deque[bytes] = deque()
        self._is_gone = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def new_name(self, prefix: str) -> str:
        """A name of four more letters, which nothing kept has."""
        while True:
            name = prefix + urlsafe_b64encode((next(self._numbers) % 2**24).to_bytes(3, "big")).decode()
            if name not in self._num_of:
                return name

    async def keep(self, name: str, descriptors: Sequence[int], timeout_s: float) -> bool:
        """Put these into keeping under a new name; False if there is no room, or the keeper does not take them in
        time. They may be closed meanwhile, and their numbers be those of others.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._num + len(descriptors) > self._limit:
            return False
        self._count(name, len(descriptors))
        message = b"FDSTORE=1\nFDNAME=%b\nFDPOLL=0" % name.encode()
        copies: list[int] = []
        is_kept = False
        try:
            copies.extend(map(os.dup, descriptors))
            while self._unsent or not self._sent(message, copies):  # what had this name before is removed first
                if self._is_gone or loop.time() >= deadline:
                    return False
                await asyncio.sleep(_RETRY_S)
            is_kept = True
        except OSError:
            return False  # no more file descriptors
        finally:
            for copy in copies:
                os.close(copy)
            if not is_kept:
                self._count(name, 0)
        return True

    def keep_now(self, name: str, descriptor: int) -> None:
        """Put this one into keeping, if there is room and the keeper takes it at once."""
        if self._num < self._limit and self._sent(b"FDSTORE=1\nFDNAME=%b" % name.encode(), [descriptor]):
            self._count(name, 1)

    def drop(self, name: str) -> None:
        """Have the keeper close all descriptors of that name, if there are any."""
        if name in self._num_of:
            self._count(name, 0)
            self._unsent.append(b"FDSTOREREMOVE=1\nFDNAME=%b" % name.encode())
            if len(self._unsent) == 1:
                self._send_on()

    def drop_found(self) -> None:
        """Close what was found and nobody has taken, here and in keeping."""
        for name, descriptors in self.found.items():
            for descriptor in descriptors:
                os.close(descriptor)
            self.drop(name)
        self.found.clear()

    def close(self) -> None:
        """Send what is still unsent; nothing may follow."""
        self._socket.settimeout(_CLOSE_TIMEOUT_S)
        while self._unsent and self._sent(self._unsent[0], ()):
            self._unsent.popleft()
        self._socket.close()

    def _count(self, name: str, num: int) -> None:
        self._num += num - self._num_of.pop(name, 0)
        if num:
            self._num_of[name] = num

    def _send_on(self) -> None:
        while self._unsent and self._sent(self._unsent[0], ()):
            self._unsent.popleft()
        if self._unsent and self._socket.fileno() >= 0:
            asyncio.get_running_loop().call_later(_RETRY_S, self._send_on)

    def _sent(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Whether it was sent. A message without descriptors to a keeper that is gone counts as sent: nothing more can
        be done.
        """
        self._is_gone = False
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([message], beside, 0, self._address)  # `send_fds` drops the address (3.11)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            self._is_gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            return not descriptors
        return True


def descriptor_store(environment: MutableMapping[str, str]) -> DescriptorStore | None:
    """The descriptors that this process was given, taken once, because its children must not get them; None if nothing
    keeps descriptors for it.

    Args:
        environment: of the process; variables meant for it alone are removed.
    """
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    given_to = environment.pop("LISTEN_PID", "")
    is_ours = given_to == str(os.getpid())
    num = environment.pop("LISTEN_FDS", "")
    found: dict[str, list[int]] = {}
    if is_ours and num.isdecimal():
        for descriptor, name in zip(range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(num)), names, strict=False):
            os.set_inheritable(descriptor, False)
            found.setdefault(name, []).append(descriptor)
    address, limit = environment.pop("NOTIFY_SOCKET", ""), environment.pop("FDSTORE", "")
    if address and given_to and not is_ours:
        # A script, say, started it: the next one could not take back what this one keeps, nor listen at its address.
        LOGGER.warning("descriptors are not kept", extra={"fields": {"started by": os.getppid(), "kept for": given_to}})
    elif address and limit.isdecimal() and int(limit):
        return DescriptorStore(address, int(limit), found)
    for descriptors in found.values():
        for descriptor in descriptors:
            os.close(descriptor)
    return None
