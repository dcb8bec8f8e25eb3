"""The services of one kind: those at given addresses, and those that DNS names list."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from gateway.pairs.watch import Watch
from hippo.base.tasks import cancel_all

logger = logging.getLogger("gateway.pairs.backends")

PREFIX = "dns+"
_LEAVING_S = 60.0  # a request may have chosen the service without having begun there

WatchT = TypeVar("WatchT", bound=Watch[Any])


class Pool(Generic[WatchT]):
    """Watches the services at ``addresses``.

    An address "dns+name:port" stands for a service at each address of the name, which is looked up
    every ``period_s``.

    ``make`` is given an address and the name that lists it, if any, without the port.
    ``services`` is changed in place, and ``on_change`` is called after each change. A service whose
    address is no longer listed gets no new sequences and is closed when its last one has ended.
    While a name cannot be looked up, its services stay. No failure ends the look-ups.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        make: Callable[[str, str], WatchT],
        on_change: Callable[[], None],
        *,
        period_s: float,
    ) -> None:
        self._make = make
        self._on_change = on_change
        self._period_s = period_s
        names = [each.removeprefix(PREFIX) for each in addresses if each.startswith(PREFIX)]
        fixed = {each: make(each, "") for each in addresses if not each.startswith(PREFIX)}
        # By name and address; what is fixed has the name "".
        self._listed: dict[str, dict[str, WatchT]] = {"": fixed, **{name: {} for name in names}}
        self._problems: dict[str, str] = {name: f"{name} was not looked up yet" for name in names}
        self.services: list[WatchT] = list(fixed.values())
        self._lookups: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def problems(self) -> list[str]:
        """Why names list no service."""
        return list(self._problems.values())

    def start(self) -> None:
        for service in self.services:
            service.start()
        self._lookups = [asyncio.create_task(self._look_up(name)) for name in self._problems]

    async def close(self) -> None:
        await cancel_all([*self._lookups, *self._leaving])
        await asyncio.gather(*(service.close() for service in self.services))

    async def _look_up(self, name: str) -> None:
        while True:
            problem = None
            try:
                self._update(name, await asyncio.to_thread(addresses_of, name))
            except (OSError, UnicodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                problem = f"the name {name} has no address: {reason or error}"
            except Exception as error:  # such as a TLS file that is missing while it is renewed
                problem = f"what {name} lists cannot be used: {error}"
            if problem is None:
                self._problems.pop(name, None)
            elif self._problems.get(name) != problem:
                self._problems[name] = problem
                logger.warning("%s", problem)
            await asyncio.sleep(self._period_s)

    def _update(self, name: str, found: list[str]) -> None:
        before = self._listed[name]
        if list(before) == found:
            return
        host = name.rpartition(":")[0]
        listed = {each: before.get(each) or self._make(each, host) for each in found}
        self._listed[name] = listed
        for address in listed.keys() - before.keys():
            logger.info("%s lists %s", name, address)
            listed[address].start()
        for address in before.keys() - listed.keys():
            logger.info("%s no longer lists %s", name, address)
            task = asyncio.create_task(self._leave(before[address]))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        self.services[:] = [each for listed in self._listed.values() for each in listed.values()]
        self._on_change()

    async def _leave(self, service: WatchT) -> None:
        try:
            await asyncio.sleep(_LEAVING_S)
            while service.num_running:
                await asyncio.sleep(self._period_s)
        finally:
            await service.close()


def addresses_of(name: str) -> list[str]:
    """Returns the sorted addresses of "host:port", as "ip:port", of the resolver's first family.

    Raises OSError if the host cannot be resolved.
    """
    host, _, port = name.rpartition(":")
    infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    family = infos[0][0]
    hosts = {str(address[0]) for kind, *_, address in infos if kind == family}
    shown = (f"[{each}]" if family == socket.AF_INET6 else each for each in hosts)
    return sorted(f"{each}:{port}" for each in shown)
