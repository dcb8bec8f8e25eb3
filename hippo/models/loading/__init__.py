"""From a checkpoint and a plan to weights on a device that has room for them."""
