"""Tests of tiny tensors on one thread."""

from tests.support.devices.threads import one_thread as one_thread
