"""The trainings of these tests are small; the models are held against transformers'."""

from tests.support.devices.threads import one_thread as one_thread
from tests.unit.models.conftest import held as held
