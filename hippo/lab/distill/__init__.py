"""``hippo distill``: trains a draft on the answers of its target.

The stages, each of which goes on where it stopped: the target's answers through its service
(``questions``, ``answers``), the draft's inputs (``examples``), the training (``student``,
``batches``, ``training``), and what it brought (``results``).
"""
