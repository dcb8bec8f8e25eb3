"""What does not go with layers that have a recurrent state."""

from hippo.errors import ModelLoadError
from hippo.models.interface.checkpoint import Checkpoint
from hippo.models.interface.plan import LoadPlan


def check_hybrid(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    """Raises ModelLoadError for what is not supported with such layers."""
    has_states = f"{checkpoint.name} has layers with a recurrent state"
    for is_asked, what in (
        (plan.tensor_parallel > 1, "run on one device only: leave --tensor-parallel out"),
        (plan.first_layers, "are not read by a prefill helper: leave --prefill-helper-layers out"),
        (plan.cuda_graphs == "on", "are not captured as graphs: leave --cuda-graphs on out"),
        (plan.quantization, "are not quantised at load: leave --quantization out"),
    ):
        if is_asked:
            raise ModelLoadError(f"{has_states}, which {what}")
