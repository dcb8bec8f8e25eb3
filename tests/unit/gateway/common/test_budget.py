"""The bytes that requests hold in memory."""

import pytest

from gateway.common.budget import FREE_BYTES, ByteBudget, Holding, MemoryFullError


def test_the_first_bytes_of_each_request_are_free() -> None:
    budget = ByteBudget(2)
    many = [Holding(budget, "alice") for _ in range(100)]
    for each in many:
        each.take(FREE_BYTES - 1)
        each.take(1)
    many[0].take(1)
    with pytest.raises(MemoryFullError):
        many[1].take(1)


def test_one_client_has_half_and_all_together_have_the_whole() -> None:
    budget = ByteBudget(1000)
    clients = {name: Holding(budget, name) for name in ("alice", "bob", "carol")}
    for each in clients.values():
        each.take(FREE_BYTES)
    clients["alice"].take(500)
    with pytest.raises(MemoryFullError, match="one client's may hold 500"):
        clients["alice"].take(1)
    clients["bob"].take(400)
    with pytest.raises(MemoryFullError, match="this server's memory for requests is full"):
        clients["carol"].take(101)
    clients["carol"].take(100)
    clients["alice"].release()
    clients["carol"].take(400)


def test_what_was_refused_is_not_held() -> None:
    budget = ByteBudget(1000)
    holding = Holding(budget, "alice")
    for _ in range(3):
        with pytest.raises(MemoryFullError):
            holding.take(FREE_BYTES + 501)
    holding.take(FREE_BYTES + 500)
    holding.release()
    holding.take(FREE_BYTES + 500)
