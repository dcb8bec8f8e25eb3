"""The bytes of requests that the gateway holds in memory: bodies, data: URLs and fetched media."""

from collections import Counter

from gateway.common.errors import RefusedError

# Counted from here on. What is below is bounded by the number of connections, so that an ordinary
# question is answered beside any number of large ones.
FREE_BYTES = 1 << 16


class MemoryFullError(RefusedError):
    """The requests of all clients, or of one, hold as many bytes as they may."""

    def __init__(self, message: str) -> None:
        told = f"{message} (--max-held-mib); send the request again"
        super().__init__(503, told, "overloaded", headers={"retry-after": "1"})


class ByteBudget:
    """At most ``max_bytes`` are held by all requests; one client's hold half of them at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = Counter[str]()  # by client

    def take(self, client: str, num_bytes: int) -> None:
        """Counts bytes of a client. Raises MemoryFullError if there is no room for them."""
        if self._held[client] + num_bytes > self._max_bytes // 2:
            raise MemoryFullError(
                f"your requests hold {self._held[client]:,} bytes of this server's memory, and "
                f"one client's may hold {self._max_bytes // 2:,}"
            )
        if self._held.total() + num_bytes > self._max_bytes:
            raise MemoryFullError("this server's memory for requests is full")
        self._held[client] += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        """Takes back what ``take`` has counted."""
        self._held[client] -= num_bytes
        if not self._held[client]:
            del self._held[client]


class Holding:
    """What one request of ``client`` holds, until ``release``."""

    def __init__(self, budget: ByteBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_counted = 0
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts bytes; raises MemoryFullError as the budget does."""
        counted = max(self.num_bytes + num_bytes - FREE_BYTES, 0)
        if counted > self._num_counted:
            self._budget.take(self._client, counted - self._num_counted)
            self._num_counted = counted
        self.num_bytes += num_bytes

    def release(self) -> None:
        self._budget.give_back(self._client, self._num_counted)
        self.num_bytes = self._num_counted = 0
