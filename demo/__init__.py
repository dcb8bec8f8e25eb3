"""The bundled model pair: a synthetic world of clips, training, measurement and checkpoints."""
