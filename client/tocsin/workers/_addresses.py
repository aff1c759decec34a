"""Which addresses an HTTP job may reach. The address that is judged is the one connected to.

Whoever may create jobs decides what the worker calls, from within the worker's network. So what is
not public is refused unless the worker's owner allows it: loopback, private networks, link-local
addresses (where clouds answer questions about credentials), and all that only looks public.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class AddressPolicy:
    """What may be called beside public addresses.

    Attributes:
        allow_private: anything.
        networks: these.
    """

    allow_private: bool = False
    networks: Sequence[Network] = ()

    def allows(self, address: str) -> bool:
        """Whether a numeric address may be connected to."""
        if self.allow_private:
            return True
        found = _plain(ipaddress.ip_address(address.partition("%")[0]))
        if any(found.version == net.version and found in net for net in self.networks):
            return True
        return found.is_global and not found.is_multicast


class AddressRefused(Exception):
    """A name stands for no address that may be called."""


def resolved(host: str, port: int, policy: AddressPolicy) -> list[tuple[int, tuple[str, int]]]:
    """Family and numeric address of everything that a name stands for and that may be called.

    Raises:
        AddressRefused: none of it may be.
        OSError: the name stands for nothing.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    allowed = [
        (int(family), (str(address[0]), port))
        for family, _, _, _, address in found
        if policy.allows(str(address[0]))
    ]
    if not allowed:
        shown = ", ".join(sorted({str(address[0]) for _, _, _, _, address in found}))
        subject = host if shown == host.strip("[]") else f"{host} is {shown}, which"
        raise AddressRefused(
            f"{subject} is not public: this worker was not allowed to call it "
            "(tocsin worker http --allow-network)"
        )
    return allowed


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv6 one carries, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
