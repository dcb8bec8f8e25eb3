"""The trainings of these tests are small."""

from tests.support.devices.threads import one_thread as one_thread
