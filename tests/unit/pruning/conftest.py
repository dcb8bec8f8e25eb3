"""Tests of tiny tensors on one thread."""

from __future__ import annotations

from tests.support.devices.threads import one_thread as one_thread
